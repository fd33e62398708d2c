//! Random weights, made as encoded blocks rather than quantised from floats: quants are random bits, and scales are
//! chosen so that values have mean 0 and the standard deviation asked for. That runs at the speed of memory.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use moeflux_compute::DType;

use super::hub_blocks;
use super::low_bit::low_bit;
use crate::sampler::random::Random;

/// Columns at the start of a row that can be made constant: whole sub-blocks of every encoding.
pub(super) const CONSTANT_COLS: usize = 64;
/// Byte of packed 4-bit and 8-bit quants in constant columns: about one standard deviation above the middle.
const CONSTANT_QUANTS: u8 = 0xCC;

/// What rows look like.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Filler {
    pub(crate) dtype: DType,
    pub(crate) cols: usize,
    /// Standard deviation of the values.
    pub(crate) std: f32,
    /// Whether the first [`CONSTANT_COLS`] columns hold one value instead.
    pub(crate) constant: bool,
}

impl Filler {
    /// Fills `out`, whole rows of `plane`. Scales and biases of an affine encoding must get the same random numbers.
    pub(crate) fn fill(&self, plane: usize, random: &mut Random, out: &mut [u8]) {
        match (self.dtype, plane) {
            (DType::F32, _) => self.floats(random, out, |values, out: &mut [[u8; 4]]| {
                out.iter_mut().zip(values).for_each(|(out, v)| *out = v.to_le_bytes());
            }),
            (DType::F16, _) => self.floats(random, out, |values, out: &mut [[u8; 2]]| {
                let mut halves = [f16::ZERO; FLOAT_BATCH];
                halves[..values.len()].convert_from_f32_slice(values);
                out.iter_mut().zip(halves).for_each(|(out, v)| *out = v.to_le_bytes());
            }),
            (DType::BF16, _) => self.floats(random, out, |values, out: &mut [[u8; 2]]| {
                out.iter_mut().zip(values).for_each(|(out, v)| *out = bf16::from_f32(*v).to_le_bytes());
            }),
            (DType::Q5_0, _) => self.q5_0(random, out),
            (DType::MXFP4, _) => self.mxfp4(random, out),
            (DType::Q8_0, _) => self.q8_0(random, out),
            (DType::Q4_K, _) => self.q4_k(random, out),
            (DType::Q5_K, _) => self.q5_k(random, out),
            (DType::Q6_K, _) => self.q6_k(random, out),
            (dtype, _) if low_bit(dtype).is_some() => {
                low_bit(dtype).expect("one of few bits").fill(self.std, random, out);
            }
            (
                DType::Fp8 { .. }
                | DType::Fp8_Rows { .. }
                | DType::MXFP8_Planes
                | DType::NVFP4 { .. }
                | DType::Int { .. },
                _,
            ) => hub_blocks::fill(self.dtype, plane, self.std, random, out),
            (DType::Affine { bits, .. }, 0) => self.affine_quants(bits, random, out),
            (DType::Affine { bits, .. }, _) => self.affine_scales(bits, plane == 2, random, out),
            (dtype, _) => {
                unreachable!("no random blocks of {dtype}; tests fill every encoding that a recipe uses")
            }
        }
    }

    fn floats<const N: usize>(
        &self,
        random: &mut Random,
        out: &mut [u8],
        encode: impl Fn(&[f32], &mut [[u8; N]]),
    ) {
        let mut values = [0.0; FLOAT_BATCH];
        for row in out.chunks_exact_mut(self.cols * N) {
            for (batch, out) in row.as_chunks_mut::<N>().0.chunks_mut(FLOAT_BATCH).enumerate() {
                let values = &mut values[..out.len()];
                values.iter_mut().for_each(|v| *v = normal(random) * self.std);
                if self.constant && batch == 0 {
                    values[..CONSTANT_COLS].fill(self.std);
                }
                encode(values, out);
            }
        }
    }

    /// w = ±d · (q − 16) with q uniform in 0..32, whose middle is −½; signs make up for that.
    fn q5_0(&self, random: &mut Random, out: &mut [u8]) {
        let d = f16::from_f32(self.std / uniform_std(32).hypot(0.5));
        fill_bytes(random, out);
        for row in out.chunks_exact_mut(self.cols / 32 * 22) {
            for (i, block) in row.as_chunks_mut::<22>().0.iter_mut().enumerate() {
                let negative = block[0] & 1 == 1 && !self.constant;
                block[..2].copy_from_slice(&if negative { -d } else { d }.to_le_bytes());
                if self.constant && i < CONSTANT_COLS / 32 {
                    // q = 25: the fifth bit of all, then nibbles of 9.
                    block[2..6].fill(0xFF);
                    block[6..].fill(0x99);
                }
            }
        }
    }

    /// w = 2^e · q with q uniform over the 16 codes. Not for constant columns, which only embeddings have.
    fn mxfp4(&self, random: &mut Random, out: &mut [u8]) {
        let power = PowerOfTwo::new(self.std / E2M1_STD);
        fill_bytes(random, out);
        for block in out.as_chunks_mut::<17>().0 {
            block[0] = power.draw(random);
        }
    }

    /// w = d · q with q uniform in −127..=127.
    fn q8_0(&self, random: &mut Random, out: &mut [u8]) {
        let d = f16::from_f32(self.std / uniform_std(255)).to_le_bytes();
        fill_bytes(random, out);
        for row in out.chunks_exact_mut(self.cols / 32 * 34) {
            for (i, block) in row.as_chunks_mut::<34>().0.iter_mut().enumerate() {
                block[..2].copy_from_slice(&d);
                // ggml's quantiser never gives −128, and kernels may rely on it.
                block[2..].iter_mut().for_each(|q| *q = if *q == 0x80 { 0x81 } else { *q });
                if self.constant && i < CONSTANT_COLS / 32 {
                    block[2..].fill(74);
                }
            }
        }
    }

    /// w = d · s · (q − 7.5) with q uniform in 0..16 and s, a sub-block's scale and minimum, uniform in 32..64.
    fn q4_k(&self, random: &mut Random, out: &mut [u8]) {
        let (d, dmin) = self.super_scales(16);
        fill_bytes(random, out);
        for row in out.chunks_exact_mut(self.cols / 256 * 144) {
            for block in row.as_chunks_mut::<144>().0 {
                super_block(d, dmin, &mut block[..16]);
            }
            if self.constant {
                constant_sub_blocks(&mut row[..16]);
                row[16..48].fill(CONSTANT_QUANTS);
            }
        }
    }

    /// w = d · s · (q − 15.5) with q uniform in 0..32 and s as for Q4_K.
    fn q5_k(&self, random: &mut Random, out: &mut [u8]) {
        let (d, dmin) = self.super_scales(32);
        fill_bytes(random, out);
        for row in out.chunks_exact_mut(self.cols / 256 * 176) {
            for block in row.as_chunks_mut::<176>().0 {
                super_block(d, dmin, &mut block[..16]);
            }
            if self.constant {
                // Fifth bits of elements l and 32 + l are bits 0 and 1 of byte 16 + l.
                constant_sub_blocks(&mut row[..16]);
                row[16..48].iter_mut().for_each(|high| *high |= 3);
                row[48..80].fill(0x88);
            }
        }
    }

    /// w = d · s · (q − 32) with q uniform in 0..64 and s = ±(64..128), either sign.
    fn q6_k(&self, random: &mut Random, out: &mut [u8]) {
        let d = f16::from_f32(self.std / (uniform_std(64) * rms(64, 127))).to_le_bytes();
        fill_bytes(random, out);
        for row in out.chunks_exact_mut(self.cols / 256 * 210) {
            for block in row.as_chunks_mut::<210>().0 {
                for s in &mut block[192..208] {
                    let magnitude = *s & 0x3F | 0x40;
                    *s = if *s & 0x80 == 0 { magnitude } else { magnitude.wrapping_neg() };
                }
                block[208..].copy_from_slice(&d);
            }
            if self.constant {
                // Elements 0..64: low nibbles of bytes 0..64, bits 0..4 of bytes 128..160.
                row[192..196].fill(96);
                row[..64].iter_mut().for_each(|q| *q = *q & 0xF0 | 0x02);
                row[128..160].iter_mut().for_each(|high| *high = *high & 0xF0 | 0x0F);
            }
        }
    }

    /// f16 d and dmin of a k-quant with `levels` quants; dmin · m is the middle of d · sc · q where m = sc.
    fn super_scales(&self, levels: u32) -> ([u8; 2], [u8; 2]) {
        let d = f16::from_f32(self.std / (uniform_std(levels) * rms(32, 63)));
        let middle = (levels - 1) as f32 / 2.0;
        (d.to_le_bytes(), f16::from_f32(d.to_f32() * middle).to_le_bytes())
    }

    fn affine_quants(&self, bits: u8, random: &mut Random, out: &mut [u8]) {
        fill_bytes(random, out);
        if self.constant {
            for row in out.chunks_exact_mut(self.cols * usize::from(bits) / 8) {
                row[..CONSTANT_COLS * usize::from(bits) / 8].fill(CONSTANT_QUANTS);
            }
        }
    }

    /// w = s · (q − middle) with s uniform within a quarter of its mean.
    fn affine_scales(&self, bits: u8, biases: bool, random: &mut Random, out: &mut [u8]) {
        let levels = 1u32 << bits;
        let mean = self.std / (uniform_std(levels) * (1.0f32 + 0.25 * 0.25 / 3.0).sqrt());
        let middle = (levels - 1) as f32 / 2.0;
        for row in out.chunks_exact_mut(self.cols / 64 * 2) {
            for (group, out) in row.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                let spread = 0.75 + 0.5 * random.next_unit() as f32;
                let spread = if self.constant && group < CONSTANT_COLS / 64 { 1.0 } else { spread };
                let scale = bf16::from_f32(mean * spread);
                let value = if biases { bf16::from_f32(-middle * scale.to_f32()) } else { scale };
                *out = value.to_le_bytes();
            }
        }
    }
}

const FLOAT_BATCH: usize = 256;

/// Standard deviation of ±{0, ½, 1, 1½, 2, 3, 4, 6}, all equally likely: √8.5625.
pub(super) const E2M1_STD: f32 = 2.926_175;

/// Two neighbouring powers of two, of which each comes as often as the mean square of both asks for.
#[derive(Debug, Clone, Copy)]
pub(super) struct PowerOfTwo {
    /// The lower exponent.
    low: f32,
    share_of_low: f32,
}

impl PowerOfTwo {
    /// With `rms` as the root of the mean square.
    pub(super) fn new(rms: f32) -> Self {
        let low = rms.log2().floor();
        Self { low, share_of_low: (4.0 - (rms / low.exp2()).powi(2)) / 3.0 }
    }

    /// One of them as an e8m0 byte.
    pub(super) fn draw(self, random: &mut Random) -> u8 {
        let exponent = if random.next_unit() as f32 <= self.share_of_low { self.low } else { self.low + 1.0 };
        (exponent + 127.0).clamp(1.0, 254.0) as u8
    }
}

/// Standard deviation of the integers of a range of `levels`, all equally likely.
fn uniform_std(levels: u32) -> f32 {
    ((levels as f32 * levels as f32 - 1.0) / 12.0).sqrt()
}

/// Root mean square of the integers `from..=to`, all equally likely.
fn rms(from: u32, to: u32) -> f32 {
    let middle = (from + to) as f32 / 2.0;
    middle.hypot(uniform_std(to - from + 1))
}

/// Writes d, dmin and, from the random bits that are there, scales in 32..64 with minima equal to them.
///
/// The 12 bytes of scales and minima: see `get_scale_min_k4` in ggml.
fn super_block(d: [u8; 2], dmin: [u8; 2], head: &mut [u8]) {
    head[..2].copy_from_slice(&d);
    head[2..4].copy_from_slice(&dmin);
    for j in 4..8 {
        // Six bits of sub-block j − 4 with the fifth set; the top bits are those of sub-block j, the sixth set.
        head[j] = head[j] | 0x20 | 0x80;
        head[j + 4] = head[j];
        head[j + 8] = head[j + 8] & 15 | head[j + 8] << 4;
    }
}

/// Gives the first two sub-blocks of a row one common scale and minimum.
fn constant_sub_blocks(head: &mut [u8]) {
    for j in [4, 5, 8, 9] {
        head[j] = head[j] & 0xC0 | 48;
    }
}

pub(super) fn fill_bytes(random: &mut Random, out: &mut [u8]) {
    let (words, rest) = out.as_chunks_mut::<8>();
    words.iter_mut().for_each(|word| *word = random.next().to_le_bytes());
    let last = random.next().to_le_bytes();
    rest.copy_from_slice(&last[..rest.len()]);
}

/// Nearly normal with mean 0 and standard deviation 1: the sum of four uniform 16-bit numbers, scaled.
pub(super) fn normal(random: &mut Random) -> f32 {
    let word = random.next();
    let sum: u64 = (0..4).map(|i| word >> (16 * i) & 0xFFFF).sum();
    (sum as f32 - 131_070.0) * (1.0 / 37_837.23)
}

#[cfg(test)]
mod tests {
    use moeflux_compute::quant::dequantize;
    use moeflux_compute::{BlockScale, Half, MatrixScale, TensorView, Zeros};

    use super::super::low_bit::LOW_BIT;
    use super::*;

    const HUB: [DType; 6] = [
        DType::Fp8 { scale: BlockScale::F32 },
        DType::Fp8_Rows { scale: BlockScale::BF16 },
        DType::MXFP8_Planes,
        DType::NVFP4 { matrix: MatrixScale::Factor },
        DType::Int { bits: 4, group: 32, scale: Half::BF16, zeros: Zeros::Middle },
        DType::Int { bits: 4, group: 128, scale: Half::F16, zeros: Zeros::Stored },
    ];

    const AFFINE: [DType; 2] = [
        DType::Affine { bits: 4, group: 64, scale: Half::BF16 },
        DType::Affine { bits: 8, group: 64, scale: Half::BF16 },
    ];
    const ENCODINGS: [DType; 8] = [
        DType::F32,
        DType::F16,
        DType::BF16,
        DType::Q5_0,
        DType::Q8_0,
        DType::Q4_K,
        DType::Q5_K,
        DType::Q6_K,
    ];

    fn values(filler: Filler, rows: usize) -> Vec<f32> {
        let planes: Vec<Vec<u8>> = (0..filler.dtype.planes())
            .map(|plane| {
                let rows = rows.div_ceil(filler.dtype.block_rows(plane));
                let mut out = vec![0; filler.dtype.row_bytes(plane, filler.cols).unwrap() * rows];
                filler.fill(plane, &mut Random::new(1), &mut out);
                out
            })
            .collect();
        let planes: Vec<&[u8]> = planes.iter().map(Vec::as_slice).collect();
        dequantize(TensorView::new(filler.dtype, rows, filler.cols, &planes).unwrap()).unwrap()
    }

    #[test]
    fn values_have_the_standard_deviation_asked_for() {
        let low = LOW_BIT.iter().map(|low| low.dtype);
        for dtype in ENCODINGS.into_iter().chain(AFFINE).chain([DType::MXFP4]).chain(HUB).chain(low) {
            for std in [1.0, 0.02, 0.003] {
                let values = values(Filler { dtype, cols: 1024, std, constant: false }, 256);
                let n = values.len() as f64;
                let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / n;
                let var = values.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum::<f64>() / n;
                let relative = var.sqrt() / f64::from(std);
                assert!((relative - 1.0).abs() < 0.015, "{dtype} {std}: {relative}");
                assert!(mean.abs() < 0.015 * f64::from(std), "{dtype} {std}: mean {mean}");
            }
        }
    }

    #[test]
    fn constant_columns_hold_one_value_near_the_standard_deviation() {
        for dtype in ENCODINGS.into_iter().chain(AFFINE) {
            let values = values(Filler { dtype, cols: 512, std: 0.5, constant: true }, 16);
            let first = values[0];
            assert!((0.4..0.6).contains(&first), "{dtype}: {first}");
            for row in values.chunks_exact(512) {
                assert!(
                    row[..CONSTANT_COLS].iter().all(|v| *v == first),
                    "{dtype}: {:?}",
                    &row[..CONSTANT_COLS]
                );
                assert!(row[CONSTANT_COLS..].iter().any(|v| *v != first), "{dtype}");
            }
        }
    }
}
