//! Which blocks of tokens the engine has cached, for Dynamo's router.
//!
//! Hashes of whole prefixes are the engine's own; the router finds a prompt's blocks by hashes of their tokens, which it computes
//! itself and which are sent with every block.

use std::sync::{Arc, OnceLock};

use dynamo_backend_common::engine::KvEventPublisher;
use dynamo_kv_router::protocols::{
    BlockHashOptions, ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData,
    KvCacheStoreData, KvCacheStoredBlockData, compute_block_hash_for_seq,
};
use moeflux::scheduler::{BLOCK_TOKENS, BlockEvent};

/// Where events go, once the router is known. There are no requests before.
#[derive(Clone, Default)]
pub(crate) struct Events(Arc<OnceLock<Arc<KvEventPublisher>>>);

impl Events {
    /// From now on events are published.
    pub(crate) fn publish_to(&self, publisher: Arc<KvEventPublisher>) {
        // A worker has one publisher.
        let _ = self.0.set(publisher);
    }

    /// Takes what a step of the engine has changed. Does not wait.
    pub(crate) fn observe(&self, events: Vec<BlockEvent>) {
        let Some(publisher) = self.0.get() else { return };
        for event in events {
            let event = KvCacheEvent { event_id: publisher.next_event_id(), data: data(event), dp_rank: 0 };
            if publisher.publish(event).is_err() {
                // Its end is that of the worker.
                tracing::debug!("an event of the key-value cache came too late");
            }
        }
    }
}

fn data(event: BlockEvent) -> KvCacheEventData {
    match event {
        BlockEvent::Stored { parent, hashes, tokens } => {
            let of_tokens =
                compute_block_hash_for_seq(&tokens, BLOCK_TOKENS as u32, BlockHashOptions::default());
            let block = |(hash, tokens_hash)| KvCacheStoredBlockData {
                block_hash: ExternalSequenceBlockHash(hash),
                tokens_hash,
                mm_extra_info: None,
            };
            KvCacheEventData::Stored(KvCacheStoreData {
                parent_hash: parent.map(ExternalSequenceBlockHash),
                start_position: None,
                blocks: hashes.into_iter().zip(of_tokens).map(block).collect(),
            })
        }
        BlockEvent::Removed { hashes } => {
            let block_hashes = hashes.into_iter().map(ExternalSequenceBlockHash).collect();
            KvCacheEventData::Removed(KvCacheRemoveData { block_hashes })
        }
        BlockEvent::Cleared => KvCacheEventData::Cleared,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_have_the_hashes_that_routers_compute() {
        let tokens: Vec<u32> = (0..2 * BLOCK_TOKENS as u32).collect();
        let stored = BlockEvent::Stored { parent: Some(7), hashes: vec![8, 9], tokens: tokens.clone() };
        let KvCacheEventData::Stored(stored) = data(stored) else { panic!("not stored") };
        assert_eq!(stored.parent_hash, Some(ExternalSequenceBlockHash(7)));
        let hashes: Vec<u64> = stored.blocks.iter().map(|block| block.block_hash.0).collect();
        assert_eq!(hashes, [8, 9]);
        let prompt: Vec<u32> = tokens.into_iter().chain(5..8).collect();
        let expected = compute_block_hash_for_seq(&prompt, BLOCK_TOKENS as u32, BlockHashOptions::default());
        let sent: Vec<_> = stored.blocks.iter().map(|block| block.tokens_hash).collect();
        assert_eq!(sent, expected);
        let removed = data(BlockEvent::Removed { hashes: vec![9] });
        assert_eq!(
            removed,
            KvCacheEventData::Removed(KvCacheRemoveData { block_hashes: vec![ExternalSequenceBlockHash(9)] })
        );
        assert_eq!(data(BlockEvent::Cleared), KvCacheEventData::Cleared);
    }
}
