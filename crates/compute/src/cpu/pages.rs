//! [`Pages`]: what one layer's attention keeps of the tokens before, as f16, f32 or 8-bit integers.

use std::ops::Range;

use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::kv_type::{KvType, Q8Block};

/// Pages of so many elements each; what an element means is up to the attention that owns them.
#[derive(Debug)]
pub(crate) struct Pages {
    elements: usize,
    values: Values,
}

/// Elements by page.
#[derive(Debug)]
pub(super) enum Values {
    F16(Vec<Box<[f16]>>),
    F32(Vec<Box<[f32]>>),
    /// Elements are a multiple of a block's, and so is all that is stored and loaded.
    Q8(Vec<Box<[Q8Block]>>),
}

impl Pages {
    pub(super) fn new(elements: usize, kv_type: KvType) -> Self {
        let values = match kv_type {
            KvType::F16 => Values::F16(vec![]),
            KvType::F32 => Values::F32(vec![]),
            KvType::Q8_0 => Values::Q8(vec![]),
        };
        Self { elements, values }
    }

    pub(super) fn values(&self) -> &Values {
        &self.values
    }

    /// Makes them at least `count`; further ones are zero.
    pub(crate) fn reserve(&mut self, count: usize) {
        let elements = self.elements;
        match &mut self.values {
            Values::F16(pages) => {
                pages.resize_with(count.max(pages.len()), || vec![f16::ZERO; elements].into_boxed_slice());
            }
            Values::F32(pages) => {
                pages.resize_with(count.max(pages.len()), || vec![0.0; elements].into_boxed_slice());
            }
            Values::Q8(pages) => {
                let zeros = || vec![Q8Block::default(); elements / Q8Block::LEN].into_boxed_slice();
                pages.resize_with(count.max(pages.len()), zeros);
            }
        }
    }

    /// Bytes of one page.
    pub(crate) fn page_bytes(&self) -> usize {
        let kv_type = match self.values {
            Values::F16(_) => KvType::F16,
            Values::F32(_) => KvType::F32,
            Values::Q8(_) => KvType::Q8_0,
        };
        kv_type.bytes(self.elements)
    }

    /// Appends a page to `out`, little-endian.
    pub(crate) fn read_page(&self, page: usize, out: &mut Vec<u8>) {
        match &self.values {
            Values::F16(pages) => out.extend(pages[page].iter().flat_map(|v| v.to_le_bytes())),
            Values::F32(pages) => out.extend(pages[page].iter().flat_map(|v| v.to_le_bytes())),
            Values::Q8(pages) => out.extend(pages[page].iter().flat_map(|block| block.to_bytes())),
        }
    }

    /// Replaces a page by what [`Pages::read_page`] gave: [`Pages::page_bytes`] bytes.
    pub(crate) fn write_page(&mut self, page: usize, bytes: &[u8]) {
        match &mut self.values {
            Values::F16(pages) => {
                let values = bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b));
                pages[page].iter_mut().zip(values).for_each(|(to, v)| *to = v);
            }
            Values::F32(pages) => {
                let values = bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b));
                pages[page].iter_mut().zip(values).for_each(|(to, v)| *to = v);
            }
            Values::Q8(pages) => {
                let blocks = bytes.as_chunks().0.iter().map(Q8Block::from_bytes);
                pages[page].iter_mut().zip(blocks).for_each(|(to, block)| *to = block);
            }
        }
    }

    /// Stores values in a page from element `at` on.
    pub(super) fn store(&mut self, page: usize, at: usize, values: &[f32]) {
        let to = at..at + values.len();
        match &mut self.values {
            Values::F16(pages) => pages[page][to].convert_from_f32_slice(values),
            Values::F32(pages) => pages[page][to].copy_from_slice(values),
            Values::Q8(pages) => {
                let blocks = pages[page][blocks(to)].iter_mut().zip(values.as_chunks().0);
                blocks.for_each(|(block, x)| *block = Q8Block::of(x));
            }
        }
    }

    /// Elements of a page from `at` on, as f32.
    pub(super) fn load(&self, page: usize, at: usize, out: &mut [f32]) {
        let from = at..at + out.len();
        match &self.values {
            Values::F16(pages) => pages[page][from].convert_to_f32_slice(out),
            Values::F32(pages) => out.copy_from_slice(&pages[page][from]),
            Values::Q8(pages) => load_blocks(&pages[page][blocks(from)], out),
        }
    }

    /// Elements of a page as f32; `scratch` holds them if need be.
    pub(super) fn get<'a>(&'a self, page: usize, range: Range<usize>, scratch: &'a mut [f32]) -> &'a [f32] {
        match &self.values {
            Values::F32(pages) => &pages[page][range],
            Values::F16(pages) => {
                let out = &mut scratch[..range.len()];
                pages[page][range].convert_to_f32_slice(out);
                out
            }
            Values::Q8(pages) => {
                let out = &mut scratch[..range.len()];
                load_blocks(&pages[page][blocks(range)], out);
                out
            }
        }
    }
}

/// The blocks of so many elements.
fn blocks(elements: Range<usize>) -> Range<usize> {
    debug_assert!(elements.start.is_multiple_of(Q8Block::LEN) && elements.end.is_multiple_of(Q8Block::LEN));
    elements.start / Q8Block::LEN..elements.end / Q8Block::LEN
}

fn load_blocks(blocks: &[Q8Block], out: &mut [f32]) {
    blocks.iter().zip(out.as_chunks_mut().0).for_each(|(block, out)| block.load(out));
}
