//! [`Layout`]: pages and state slots of all parts in the order of the whole graph, so that they are the same however layers
//! are divided.

use crate::backend::{KvType, PAGE_TOKENS};
use crate::graph::{Graph, Part};
use crate::{Error, Result};

/// What a page or a slot consists of, in order: the part that has it, and its bytes.
#[derive(Debug, Clone, Default)]
pub(super) struct Layout {
    pieces: Vec<(usize, usize)>,
    parts: usize,
}

impl Layout {
    /// Of pages: keys and values of all caches, latents, tokens and entries.
    pub(super) fn of_pages(graph: &Graph, parts: &[Part], kv_type: KvType) -> Self {
        let caches = graph.caches().iter().map(|c| {
            let rows = c.kv_heads * PAGE_TOKENS;
            kv_type.bytes(rows * c.head_dim) + kv_type.bytes(rows * c.value_dim)
        });
        let latents = graph.latent_caches().iter().map(|c| kv_type.bytes((c.rank + c.rope) * PAGE_TOKENS));
        let compressed = graph.compressed_caches().iter().map(|c| kv_type.bytes(c.page_elements()));
        let mut layout = Self { pieces: vec![], parts: parts.len() };
        layout.append(parts, |part| &part.caches, caches);
        layout.append(parts, |part| &part.latent_caches, latents);
        layout.append(parts, |part| &part.compressed_caches, compressed);
        layout
    }

    /// Of state slots.
    pub(super) fn of_slots(graph: &Graph, parts: &[Part]) -> Self {
        let mut layout = Self { pieces: vec![], parts: parts.len() };
        layout.append(parts, |part| &part.states, graph.states().iter().map(|n| n * size_of::<f32>()));
        layout
    }

    fn append(
        &mut self,
        parts: &[Part],
        numbers: impl Fn(&Part) -> &Vec<usize>,
        bytes: impl Iterator<Item = usize>,
    ) {
        debug_assert!(
            parts.iter().all(|part| numbers(part).is_sorted()),
            "parts keep the whole graph's order"
        );
        for (number, bytes) in bytes.enumerate() {
            let owner = parts.iter().position(|part| numbers(part).contains(&number));
            self.pieces.push((owner.expect("everything is in a part"), bytes));
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.pieces.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Appends to `out` what `read` appends of each part.
    pub(super) fn join(
        &self,
        out: &mut Vec<u8>,
        read: impl Fn(usize, &mut Vec<u8>) -> Result<()>,
    ) -> Result<()> {
        let mut all = vec![vec![]; self.parts];
        for (part, bytes) in all.iter_mut().enumerate() {
            read(part, bytes)?;
        }
        let mut at = vec![0; self.parts];
        for (part, bytes) in &self.pieces {
            out.extend_from_slice(&all[*part][at[*part]..][..*bytes]);
            at[*part] += bytes;
        }
        Ok(())
    }

    /// What each part has of `bytes`, which `op` was given.
    ///
    /// # Errors
    /// [`Error::Shape`] if that has another size.
    pub(super) fn split(&self, op: &'static str, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let (expected, got) = (self.bytes(), bytes.len());
        if expected != got {
            return Err(Error::Shape { op, what: "bytes", expected, got });
        }
        let (mut all, mut rest) = (vec![vec![]; self.parts], bytes);
        for (part, bytes) in &self.pieces {
            let (own, others) = rest.split_at(*bytes);
            all[*part].extend_from_slice(own);
            rest = others;
        }
        Ok(all)
    }
}
