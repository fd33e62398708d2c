//! Random blocks of ggml's encodings of two to four bits, of which routed experts of the largest models are made.

use std::sync::OnceLock;

use half::f16;
use moeflux_compute::quant::dequantize;
use moeflux_compute::{DType, TensorView};

use super::blocks::fill_bytes;
use super::stream;
use crate::sampler::random::Random;

/// An encoding whose blocks are random bits but for their scales.
#[derive(Debug)]
pub(super) struct LowBit {
    pub(super) dtype: DType,
    /// llama.cpp's `general.file_type` of files that are mostly in it.
    pub(super) file_type: u32,
    /// Where a block has its scale, an f16.
    scale: usize,
    /// The standard deviation of values of scale 1, once it has been measured.
    unit_std: OnceLock<f32>,
}

const fn of(dtype: DType, file_type: u32, scale: usize) -> LowBit {
    LowBit { dtype, file_type, scale, unit_std: OnceLock::new() }
}

pub(super) static LOW_BIT: [LowBit; 8] = [
    of(DType::IQ4_XS, 30, 0),
    of(DType::Q3_K, 12, 108),
    of(DType::IQ3_S, 26, 0),
    of(DType::IQ3_XXS, 23, 0),
    of(DType::Q2_K, 10, 80),
    of(DType::IQ2_S, 28, 0),
    of(DType::IQ2_XXS, 19, 0),
    of(DType::IQ1_S, 24, 0),
];

/// Blocks that the deviation of values is measured on, whatever is filled.
const MEASURED: usize = 512;

/// What is known of `dtype`, if it is one of them.
pub(super) fn low_bit(dtype: DType) -> Option<&'static LowBit> {
    LOW_BIT.iter().find(|low| low.dtype == dtype)
}

impl LowBit {
    fn block_bytes(&self) -> usize {
        self.dtype.row_bytes(0, self.dtype.block_len()).expect("a block")
    }

    /// Fills `out`, whole blocks, with values of mean 0 and standard deviation `std`.
    pub(super) fn fill(&self, std: f32, random: &mut Random, out: &mut [u8]) {
        let scale = f16::from_f32(std / self.unit_std.get_or_init(|| self.measure()));
        self.blocks(scale, random, out);
    }

    /// Random blocks of one scale.
    fn blocks(&self, scale: f16, random: &mut Random, out: &mut [u8]) {
        fill_bytes(random, out);
        for block in out.chunks_exact_mut(self.block_bytes()) {
            block[self.scale..self.scale + 2].copy_from_slice(&scale.to_le_bytes());
            if self.dtype == DType::Q2_K {
                // w = d · s · (q − 1.5): minima are as many as scales.
                block[82..84].copy_from_slice(&f16::from_f32(1.5 * scale.to_f32()).to_le_bytes());
                block[..16].iter_mut().for_each(|s| *s = *s & 15 | *s << 4);
            }
        }
    }

    /// The standard deviation of values of scale 1.
    fn measure(&self) -> f32 {
        let mut blocks = vec![0; MEASURED * self.block_bytes()];
        self.blocks(f16::ONE, &mut stream([0; 3]), &mut blocks);
        let view = TensorView::new(self.dtype, MEASURED, self.dtype.block_len(), &[&blocks]);
        let values = dequantize(view.expect("whole blocks")).expect("an encoding that can be read");
        let squares: f64 = values.iter().map(|v| f64::from(*v).powi(2)).sum();
        (squares / values.len() as f64).sqrt() as f32
    }
}
