//! What a device keeps between batches: key-value pages, latent pages, recurrent states.

use crate::backend::{KvType, PAGE_TOKENS};
use crate::gpu::device::{BufferId, Device, Slice};
use crate::graph::{Attention, Graph};
use crate::{Error, Result};

/// Items of equal size, whose number grows.
#[derive(Debug)]
pub(crate) struct Pool {
    buffer: BufferId,
    /// Bytes of an item.
    pub(crate) item: usize,
    items: usize,
}

impl Pool {
    fn new(device: &mut dyn Device, item: usize) -> Result<Self> {
        Ok(Self { buffer: device.alloc(item.max(4))?, item, items: 0 })
    }

    pub(crate) fn slice(&self) -> Slice {
        self.buffer.into()
    }

    /// Makes items `0..items` usable, whatever is in them; true if they moved.
    fn renew(&mut self, device: &mut dyn Device, items: usize) -> Result<bool> {
        if items <= self.items || self.item == 0 {
            return Ok(false);
        }
        // What was there makes room first; the pool has a buffer of its own even if there is too little then.
        let empty = device.alloc(4)?;
        device.free(self.buffer);
        (self.buffer, self.items) = (empty, 0);
        self.buffer = device.alloc(items * self.item)?;
        self.items = items;
        device.free(empty);
        Ok(true)
    }

    /// Makes items `0..items` usable, zeroed when new; true if they moved.
    fn reserve(&mut self, device: &mut dyn Device, items: usize) -> Result<bool> {
        if items <= self.items || self.item == 0 {
            return Ok(false);
        }
        let larger = device.alloc(items * self.item)?;
        let held = self.items * self.item;
        device.copy(self.buffer.into(), larger.into(), held)?;
        device.clear(Slice { buffer: larger, offset: held }, (items - self.items) * self.item)?;
        device.free(self.buffer);
        (self.buffer, self.items) = (larger, items);
        Ok(true)
    }

    fn item(&self, index: usize) -> Slice {
        Slice { buffer: self.buffer, offset: index * self.item }
    }
}

/// All pools of a graph.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) kv_type: KvType,
    /// Keys and values of each cache: pages of (kv_heads, PAGE_TOKENS, head_dim) and (…, value_dim).
    pub(crate) caches: Vec<[Pool; 2]>,
    /// Latents and rotated keys: pages of (PAGE_TOKENS, rank + rope).
    pub(crate) latents: Vec<Pool>,
    /// Tokens and entries of compressed attention: pages as [`crate::graph::CompressedAttention`] says.
    pub(crate) compressed: Vec<Pool>,
    /// Recurrent states, f32.
    pub(crate) states: Vec<Pool>,
    /// Keys and values, or latents, of a layer at a time as f16, where pages are of `Q8_0` and matrix units read f16: pages of
    /// [`unpacked_elements`].
    pub(crate) unpacked: Vec<Pool>,
}

/// Elements of a page of each pool of keys and values, or latents, as f16: none where nothing is unpacked.
pub(super) fn unpacked_elements(graph: &Graph, kv_type: KvType, tensor_cores: bool) -> Vec<usize> {
    if kv_type != KvType::Q8_0 || !tensor_cores {
        return vec![];
    }
    let largest = |elements: &dyn Fn(&Attention) -> usize| {
        graph.caches().iter().map(|c| c.kv_heads * PAGE_TOKENS * elements(c)).max().unwrap_or(0)
    };
    let latents = graph.latent_caches().iter().map(|c| (c.rank + c.rope) * PAGE_TOKENS).max();
    let keys = largest(&|c| c.head_dim).max(latents.unwrap_or(0));
    let values = largest(&|c| c.value_dim);
    [keys, values].into_iter().filter(|elements| *elements > 0).collect()
}

impl State {
    pub(crate) fn new(
        device: &mut dyn Device,
        graph: &Graph,
        kv_type: KvType,
        tensor_cores: bool,
    ) -> Result<Self> {
        let unpacked = unpacked_elements(graph, kv_type, tensor_cores).into_iter();
        let unpacked = unpacked.map(|elements| Pool::new(device, KvType::F16.bytes(elements)));
        let unpacked = unpacked.collect::<Result<_>>()?;
        let mut page = |elements: usize| Pool::new(device, kv_type.bytes(elements));
        let mut caches = vec![];
        for cache in graph.caches() {
            let rows = cache.kv_heads * PAGE_TOKENS;
            caches.push([page(rows * cache.head_dim)?, page(rows * cache.value_dim)?]);
        }
        let latents = graph.latent_caches().iter().map(|c| page((c.rank + c.rope) * PAGE_TOKENS));
        let latents = latents.collect::<Result<_>>()?;
        let compressed = graph.compressed_caches().iter().map(|c| page(c.page_elements()));
        let compressed = compressed.collect::<Result<_>>()?;
        let mut slot = |elements: &usize| Pool::new(device, elements * size_of::<f32>());
        let states = graph.states().iter().map(&mut slot).collect::<Result<_>>()?;
        Ok(Self { kv_type, caches, latents, compressed, states, unpacked })
    }

    fn pages(&self) -> impl Iterator<Item = &Pool> + Clone {
        self.caches.iter().flatten().chain(&self.latents).chain(&self.compressed)
    }

    /// True if something moved.
    pub(crate) fn reserve_pages(&mut self, device: &mut dyn Device, pages: usize) -> Result<bool> {
        let mut moved = false;
        let pools = self.caches.iter_mut().flatten().chain(&mut self.latents).chain(&mut self.compressed);
        for pool in pools {
            moved |= pool.reserve(device, pages)?;
        }
        for pool in &mut self.unpacked {
            moved |= pool.renew(device, pages)?;
        }
        Ok(moved)
    }

    /// True if something moved.
    pub(crate) fn reserve_slots(&mut self, device: &mut dyn Device, slots: usize) -> Result<bool> {
        let mut moved = false;
        for pool in &mut self.states {
            moved |= pool.reserve(device, slots)?;
        }
        Ok(moved)
    }

    pub(crate) fn page_bytes(&self) -> usize {
        self.pages().map(|pool| pool.item).sum()
    }

    pub(crate) fn slot_bytes(&self) -> usize {
        self.states.iter().map(|pool| pool.item).sum()
    }

    pub(crate) fn read_page(&self, device: &mut dyn Device, page: u32, out: &mut Vec<u8>) -> Result<()> {
        read(device, self.pages(), page, out)
    }

    pub(crate) fn write_page(&self, device: &mut dyn Device, page: u32, bytes: &[u8]) -> Result<()> {
        write(device, self.pages(), ("page", page), bytes)
    }

    pub(crate) fn read_slot(&self, device: &mut dyn Device, slot: u32, out: &mut Vec<u8>) -> Result<()> {
        read(device, self.states.iter(), slot, out)
    }

    pub(crate) fn write_slot(&self, device: &mut dyn Device, slot: u32, bytes: &[u8]) -> Result<()> {
        write(device, self.states.iter(), ("state slot", slot), bytes)
    }
}

fn read<'a>(
    device: &mut dyn Device,
    pools: impl Iterator<Item = &'a Pool>,
    index: u32,
    out: &mut Vec<u8>,
) -> Result<()> {
    for pool in pools {
        let start = out.len();
        out.resize(start + pool.item, 0);
        if (index as usize) < pool.items {
            device.download(pool.item(index as usize), &mut out[start..])?;
        }
    }
    Ok(())
}

fn write<'a>(
    device: &mut dyn Device,
    pools: impl Iterator<Item = &'a Pool> + Clone,
    (op, index): (&'static str, u32),
    mut bytes: &[u8],
) -> Result<()> {
    let expected = pools.clone().map(|pool| pool.item).sum();
    if bytes.len() != expected {
        return Err(Error::Shape { op, what: "bytes", expected, got: bytes.len() });
    }
    for pool in pools {
        if index as usize >= pool.items {
            return Err(Error::Shape { op, what: "index", expected: pool.items, got: index as usize });
        }
        let (own, rest) = bytes.split_at(pool.item);
        device.upload(pool.item(index as usize), own)?;
        bytes = rest;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::emulator::Emulator;

    #[test]
    fn a_pool_that_finds_no_memory_has_no_buffer_of_others() {
        const ITEM: usize = 96;
        let mut device = Emulator::new(5).with_memory(8 * ITEM as u64);
        let mut pool = Pool::new(&mut device, ITEM).unwrap();
        assert!(pool.renew(&mut device, 100).is_err());
        let other = device.alloc(4).unwrap();
        assert_ne!(pool.slice(), Slice::from(other));
        assert!(pool.renew(&mut device, 3).unwrap());
        device.upload(other.into(), &[7; 4]).unwrap();
        assert_eq!(pool.items, 3);
    }

    /// A device's memory is what others left in it.
    #[test]
    fn items_are_zero_when_new_and_stay_when_the_pool_grows() {
        const ITEM: usize = 96;
        let mut device = Emulator::new(5);
        let left = device.alloc(64 * ITEM).unwrap();
        device.upload(left.into(), &[0xa5; 64 * ITEM]).unwrap();
        device.free(left);
        let mut pool = Pool::new(&mut device, ITEM).unwrap();
        let mut expected: Vec<u8> = vec![];
        for (items, moves) in [(2, true), (2, false), (1, false), (3, true), (11, true)] {
            assert_eq!(pool.reserve(&mut device, items).unwrap(), moves);
            expected.resize(expected.len().max(items * ITEM), 0);
            let mut found = vec![1; expected.len()];
            device.download(pool.slice(), &mut found).unwrap();
            assert_eq!(found, expected, "{items} items");
            expected = (0..expected.len()).map(|i| i as u8 | 1).collect();
            device.upload(pool.slice(), &expected).unwrap();
        }
    }
}
