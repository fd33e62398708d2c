//! Random numbers and random weights of every encoding.

// Every test binary that includes this module uses a part of it.
#![allow(dead_code)]

use half::f16;
use moeflux_compute::{Bytes, DType, Error, Half, Tensor, quant};

/// A fixed sequence for each seed (splitmix64: Steele, Lea & Flood 2014).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// Uniform within 0..1.
    pub fn uniform(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 24) as f32
    }

    /// About normal, by the sum of twelve uniform numbers.
    pub fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.uniform()).sum::<f32>() - 6.0
    }

    pub fn normals(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }
}

/// Affine of `bits` in groups of `group`.
pub fn affine(bits: u8, group: u8, scale: Half) -> DType {
    DType::Affine { bits, group, scale }
}

/// Every encoding; of affine every width, every group and both kinds of scales.
pub fn dtypes() -> Vec<DType> {
    use DType::{BF16, F16, F32, Q2_K, Q3_K, Q4_0, Q4_K, Q5_0, Q5_K, Q6_K, Q8_0};
    let mut all = vec![F32, F16, BF16, Q4_0, Q5_0, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K];
    for (i, bits) in [2, 3, 4, 5, 6, 8].into_iter().enumerate() {
        all.push(affine(bits, [32, 64, 128][i % 3], Half::BF16));
        all.push(affine(bits, [64, 128, 32][i % 3], Half::F16));
    }
    all
}

/// A matrix of about normal values: quantised where there is a quantiser, random valid blocks of like size otherwise.
pub fn weight(random: &mut Random, dtype: DType, rows: usize, cols: usize) -> Tensor {
    let values: Vec<f32> = random.normals(rows * cols);
    let planes = match quant::quantize(dtype, &values, cols) {
        Ok(planes) => planes,
        Err(Error::Unsupported { .. }) => vec![random_blocks(random, dtype, rows, cols)],
        Err(error) => panic!("{error}"),
    };
    let planes = planes.into_iter().map(Bytes::new).collect();
    Tensor::new(dtype, rows, cols, planes).expect("planes of the right size")
}

/// Where the f16 scale of all quantised values and, if there is one, that of the minima lie in a block.
fn scales(dtype: DType) -> (usize, Option<usize>) {
    match dtype {
        DType::Q5_0 => (0, None),
        DType::Q2_K => (80, Some(82)),
        DType::Q3_K => (108, None),
        DType::Q5_K => (0, Some(2)),
        other => panic!("{other} has a quantiser"),
    }
}

/// Largest magnitude of the integer that the f16 scale multiplies.
fn integers(dtype: DType) -> f32 {
    match dtype {
        DType::Q5_0 => 16.0,
        DType::Q2_K => 15.0 * 3.0,
        DType::Q3_K => 32.0 * 4.0,
        _ => 63.0 * 31.0,
    }
}

fn random_blocks(random: &mut Random, dtype: DType, rows: usize, cols: usize) -> Vec<u8> {
    let bytes = dtype.row_bytes(0, cols).expect("whole blocks") * rows;
    let mut blocks: Vec<u8> = (0..bytes).map(|_| random.next() as u8).collect();
    let (scale_at, min_at) = scales(dtype);
    for block in blocks.chunks_exact_mut(dtype.block_bytes(0)) {
        let scale = (1.0 + random.uniform()) * 2.0 / integers(dtype);
        block[scale_at..scale_at + 2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
        if let Some(at) = min_at {
            // Minima are products with at most 63 (Q5_K) or 15 (Q2_K).
            let min = (0.5 + random.uniform()) / 30.0;
            block[at..at + 2].copy_from_slice(&f16::from_f32(min).to_le_bytes());
        }
    }
    blocks
}
