//! FP8 weights as plain floats: codes become f32 in registers, each times its scale, as the dequantiser defines.

use super::plain::Plain;
use crate::cpu::simd::{Isa, MAX_LANES};
use crate::{BlockScale, TensorView, quant::fp8::scale_of};

/// Codes of which `COLS` columns share a scale, [`usize::MAX`] for all of a row.
#[derive(Clone, Copy)]
pub(super) struct Fp8<'a, const COLS: usize> {
    w: TensorView<'a>,
    scale: BlockScale,
}

impl<'a, const COLS: usize> Fp8<'a, COLS> {
    /// For the weights `w`.
    pub(super) fn new(w: TensorView<'a>, scale: BlockScale) -> Self {
        Self { w, scale }
    }

    /// Calls `each` with the number and the value of every scale of a row.
    pub(super) fn scales(self, row: usize, mut each: impl FnMut(usize, f32)) {
        let bytes = self.w.row(1, row);
        let mut all = |kind: BlockScale| {
            for (i, bytes) in bytes.chunks_exact(kind.bytes()).enumerate() {
                each(i, scale_of(kind, bytes));
            }
        };
        // Each loop knows what it reads.
        match self.scale {
            BlockScale::F32 => all(BlockScale::F32),
            BlockScale::BF16 => all(BlockScale::BF16),
            BlockScale::E8M0 => all(BlockScale::E8M0),
        }
    }
}

impl<const COLS: usize> Plain for Fp8<'_, COLS> {
    const BYTES: usize = 1;
    const SCALED: Option<usize> = Some(COLS);

    #[inline(always)]
    unsafe fn load<I: Isa>(self, isa: I, p: *const u8) -> I::F {
        // SAFETY: by the caller.
        unsafe { isa.load_e4m3(p) }
    }

    #[inline(always)]
    unsafe fn load_first<I: Isa>(self, isa: I, p: *const u8, n: usize) -> I::F {
        let mut codes = [0u8; MAX_LANES];
        // SAFETY: n bytes are valid by the caller, and fewer than LANES ≤ MAX_LANES.
        unsafe {
            p.copy_to_nonoverlapping(codes.as_mut_ptr(), n);
            self.load(isa, codes.as_ptr())
        }
    }

    #[inline(always)]
    fn scale(self, row: usize, col: usize) -> f32 {
        let size = self.scale.bytes();
        let at = if COLS == usize::MAX { 0 } else { col / COLS * size };
        scale_of(self.scale, &self.w.row(1, row)[at..at + size])
    }
}
