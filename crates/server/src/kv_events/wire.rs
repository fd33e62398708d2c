//! Key-value cache events in the bytes that vLLM publishes (its `vllm/distributed/kv_events.py`): msgpack, with a batch as an
//! array and its events as maps, or in the format of versions before 0.24 as arrays of the same fields in this order.
//!
//! ```text
//! batch   [seconds since 1970, [event…], data-parallel rank]
//! stored  type "BlockStored", block_hashes, parent_block_hash or nil, token_ids, block_size, lora_id nil, medium, lora_name nil
//! removed type "BlockRemoved", block_hashes, medium
//! cleared type "AllBlocksCleared"
//! ```

use std::str::FromStr;

use moeflux::scheduler::{BLOCK_TOKENS, BlockEvent};
use rmp::encode::{self, ByteBuf};

/// The medium whose blocks are used where they are. It is what vLLM calls the memory of the device that computes, here the
/// host's if the CPU does.
const MEDIUM: &str = "GPU";
/// A server is one replica: which of several it is, its address says.
const RANK: u64 = 0;

/// The sequence number that ends a replay.
pub(super) const END: [u8; 8] = (-1_i64).to_be_bytes();

/// How an event is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KvEventsFormat {
    /// As a map, as vLLM does since 0.24.
    #[default]
    Map,
    /// As an array, as vLLM did before, and SGLang does.
    Array,
}

impl FromStr for KvEventsFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "map" => Ok(Self::Map),
            "array" => Ok(Self::Array),
            _ => Err("expected map or array".to_owned()),
        }
    }
}

/// A value of a field.
enum Field<'a> {
    Nil,
    Number(u64),
    Text(&'a str),
    Hashes(&'a [u64]),
    Tokens(&'a [u32]),
}

/// A batch of events, `time` in seconds since 1970.
pub(super) fn batch(format: KvEventsFormat, time: f64, events: &[BlockEvent]) -> Vec<u8> {
    let mut to = ByteBuf::new();
    array(&mut to, 3);
    done(encode::write_f64(&mut to, time));
    array(&mut to, events.len());
    for event in events {
        let fields = fields(event);
        match format {
            KvEventsFormat::Map => done(encode::write_map_len(&mut to, length(fields.len()))),
            KvEventsFormat::Array => array(&mut to, fields.len()),
        }
        for (name, value) in fields {
            if format == KvEventsFormat::Map {
                done(encode::write_str(&mut to, name));
            }
            write(&mut to, value);
        }
    }
    done(encode::write_uint(&mut to, RANK));
    to.into_vec()
}

/// The fields of an event, its type first.
fn fields(event: &BlockEvent) -> Vec<(&'static str, Field<'_>)> {
    match event {
        BlockEvent::Stored { parent, hashes, tokens } => vec![
            ("type", Field::Text("BlockStored")),
            ("block_hashes", Field::Hashes(hashes)),
            ("parent_block_hash", parent.map_or(Field::Nil, Field::Number)),
            ("token_ids", Field::Tokens(tokens)),
            ("block_size", Field::Number(BLOCK_TOKENS as u64)),
            ("lora_id", Field::Nil),
            ("medium", Field::Text(MEDIUM)),
            ("lora_name", Field::Nil),
        ],
        BlockEvent::Removed { hashes } => vec![
            ("type", Field::Text("BlockRemoved")),
            ("block_hashes", Field::Hashes(hashes)),
            ("medium", Field::Text(MEDIUM)),
        ],
        BlockEvent::Cleared => vec![("type", Field::Text("AllBlocksCleared"))],
    }
}

fn write(to: &mut ByteBuf, value: Field<'_>) {
    match value {
        Field::Nil => done(encode::write_nil(to)),
        Field::Number(number) => done(encode::write_uint(to, number)),
        Field::Text(text) => done(encode::write_str(to, text)),
        Field::Hashes(hashes) => {
            array(to, hashes.len());
            hashes.iter().for_each(|hash| done(encode::write_uint(to, *hash)));
        }
        Field::Tokens(tokens) => {
            array(to, tokens.len());
            tokens.iter().for_each(|token| done(encode::write_uint(to, u64::from(*token))));
        }
    }
}

fn array(to: &mut ByteBuf, len: usize) {
    done(encode::write_array_len(to, length(len)));
}

/// A step has far fewer than 2³² of anything.
fn length(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}

/// Writing to memory does not fail.
fn done<T, E>(_written: Result<T, E>) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_those_that_vllm_writes() {
        let stored =
            BlockEvent::Stored { parent: None, hashes: vec![1, u64::MAX], tokens: vec![5, 300, 70_000] };
        let next = BlockEvent::Stored { parent: Some(u64::MAX), hashes: vec![2], tokens: vec![] };
        let removed = BlockEvent::Removed { hashes: vec![128] };
        let events = [stored, next, removed, BlockEvent::Cleared];
        let arrays = [
            b"\x93\xcb\x3f\xf8\0\0\0\0\0\0\x94".as_slice(),
            b"\x98\xabBlockStored\x92\x01\xcf\xff\xff\xff\xff\xff\xff\xff\xff\xc0",
            b"\x93\x05\xcd\x01\x2c\xce\0\x01\x11\x70\x40\xc0\xa3GPU\xc0",
            b"\x98\xabBlockStored\x91\x02\xcf\xff\xff\xff\xff\xff\xff\xff\xff\x90\x40\xc0\xa3GPU\xc0",
            b"\x93\xacBlockRemoved\x91\xcc\x80\xa3GPU",
            b"\x91\xb0AllBlocksCleared",
            b"\0",
        ];
        assert_eq!(batch(KvEventsFormat::Array, 1.5, &events), arrays.concat());
        let maps = [
            b"\x93\xcb\x3f\xf8\0\0\0\0\0\0\x92".as_slice(),
            b"\x83\xa4type\xacBlockRemoved\xacblock_hashes\x91\xcc\x80\xa6medium\xa3GPU",
            b"\x81\xa4type\xb0AllBlocksCleared",
            b"\0",
        ];
        assert_eq!(batch(KvEventsFormat::Map, 1.5, &events[2..]), maps.concat());
        let stored = batch(KvEventsFormat::Map, 1.5, &events[1..2]);
        let maps = [
            b"\x93\xcb\x3f\xf8\0\0\0\0\0\0\x91\x88\xa4type\xabBlockStored\xacblock_hashes\x91\x02".as_slice(),
            b"\xb1parent_block_hash\xcf\xff\xff\xff\xff\xff\xff\xff\xff\xa9token_ids\x90\xaablock_size\x40",
            b"\xa7lora_id\xc0\xa6medium\xa3GPU\xa9lora_name\xc0\0",
        ];
        assert_eq!(stored, maps.concat());
        assert_eq!(END, [0xff; 8]);
    }
}
