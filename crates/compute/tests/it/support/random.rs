//! Seeded random values and weights.

use moeflux_compute::{Bytes, DType, Half, MatrixScale, Tensor};

/// SplitMix64 (Steele, Lea, Flood 2014).
pub(crate) struct Random(u64);

impl Random {
    /// The same values for the same seed.
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    #[inline(always)]
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// In 0..1.
    #[inline(always)]
    pub(crate) fn uniform(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 24) as f32
    }

    /// Below `n`.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// A value that looks normal: the sum of twelve uniform ones, variance 1.
    #[inline(always)]
    pub(crate) fn normal(&mut self) -> f32 {
        // Written out: weights are millions of values, and tests are compiled with few optimisations.
        let (mut sum, mut left) = (0.0, 12);
        while left > 0 {
            sum += self.uniform();
            left -= 1;
        }
        sum - 6.0
    }

    /// `n` of them.
    pub(crate) fn normals(&mut self, n: usize) -> Vec<f32> {
        let mut values = vec![0.0; n];
        values.iter_mut().for_each(|value| *value = self.normal());
        values
    }

    /// A weight of random codes with scales (and minima or biases) of either sign below 0.1.
    pub(crate) fn tensor(&mut self, dtype: DType, rows: usize, cols: usize) -> Tensor {
        let planes = self.planes(dtype, rows, cols).into_iter().map(Bytes::new).collect();
        Tensor::new(dtype, rows, cols, planes).expect("planes of the right sizes")
    }

    /// The planes of such a weight.
    pub(crate) fn planes(&mut self, dtype: DType, rows: usize, cols: usize) -> Vec<Vec<u8>> {
        let sizes = (0..dtype.planes()).map(|p| dtype.plane_bytes(p, rows, cols).expect("whole blocks"));
        let mut planes: Vec<Vec<u8>> = sizes.map(|n| (0..n).map(|_| self.next() as u8).collect()).collect();
        match dtype {
            DType::F32 => self.fill(&mut planes[0], 4, 0, |v| v.to_le_bytes().to_vec()),
            DType::F16 => self.fill(&mut planes[0], 2, 0, |v| half(Half::F16, v)),
            DType::BF16 => self.fill(&mut planes[0], 2, 0, |v| half(Half::BF16, v)),
            DType::Affine { scale, .. } => {
                for plane in &mut planes[1..] {
                    self.fill(plane, 2, 0, |v| half(scale, v));
                }
            }
            DType::MXFP4 => {
                for block in planes[0].chunks_exact_mut(17) {
                    block[0] = self.power_of_two();
                }
            }
            DType::MXFP4_Planes => planes[1].fill_with(|| self.power_of_two()),
            DType::Int { scale, .. } => self.fill(&mut planes[1], 2, 0, |v| half(scale, v)),
            DType::NVFP4 { matrix } => {
                // Scales of either sign below two, subnormal ones included.
                planes[1].iter_mut().for_each(|code| *code &= 0xBF);
                let scale = if matrix == MatrixScale::Factor { 0.0173f32 } else { 57.9 };
                planes[2] = scale.to_le_bytes().to_vec();
            }
            DType::MXFP8_Planes => {
                // Below two, and no NaN.
                planes[0].iter_mut().for_each(|code| *code &= 0xBF);
                planes[1].fill_with(|| self.power_of_two());
            }
            DType::IQ1_M => {
                // The top bits of the scale: 2⁻⁷ to 2⁻⁵.
                planes[0].chunks_exact_mut(56).for_each(|block| block[55] = block[55] & 15 | 0x20);
            }
            blocks => {
                for &at in scale_offsets(blocks) {
                    self.fill(&mut planes[0], blocks.block_bytes(0), at, |v| half(Half::F16, v));
                }
            }
        }
        planes
    }

    /// Plane and offset of the first scale, and one that is no number; none for plain floats.
    pub(crate) fn scale_at(&self, dtype: DType) -> Option<(usize, usize, &'static [u8])> {
        const HALF: &[u8] = &[0xff, 0x7f];
        const POWER: &[u8] = &[0xff];
        const SMALL: &[u8] = &[0x7f];
        match dtype {
            // Of IQ1_M it is spread over four words.
            DType::F32 | DType::F16 | DType::BF16 | DType::IQ1_M => None,
            DType::MXFP4 => Some((0, 0, POWER)),
            DType::MXFP4_Planes | DType::MXFP8_Planes => Some((1, 0, POWER)),
            DType::Affine { .. } | DType::Int { .. } => Some((1, 0, HALF)),
            DType::NVFP4 { .. } => Some((1, 0, SMALL)),
            blocks => Some((0, scale_offsets(blocks)[0], HALF)),
        }
    }

    /// A scale of MXFP4, 2^−9 to 2^−2.
    fn power_of_two(&mut self) -> u8 {
        118 + (self.next() & 7) as u8
    }

    /// Writes a random float at offset `at` of every `step` bytes.
    fn fill(&mut self, plane: &mut [u8], step: usize, at: usize, to_bytes: impl Fn(f32) -> Vec<u8>) {
        for block in plane.chunks_exact_mut(step) {
            let bytes = to_bytes(0.2 * self.uniform() - 0.1);
            block[at..at + bytes.len()].copy_from_slice(&bytes);
        }
    }
}

fn half(kind: Half, v: f32) -> Vec<u8> {
    match kind {
        Half::F16 => half::f16::from_f32(v).to_le_bytes().to_vec(),
        Half::BF16 => half::bf16::from_f32(v).to_le_bytes().to_vec(),
    }
}

/// Where blocks keep their f16 scales.
fn scale_offsets(dtype: DType) -> &'static [usize] {
    match dtype {
        DType::Q4_0 | DType::Q5_0 | DType::Q8_0 | DType::IQ4_NL | DType::IQ4_XS => &[0],
        DType::IQ1_S | DType::IQ2_XXS | DType::IQ2_XS | DType::IQ2_S | DType::IQ3_XXS | DType::IQ3_S => &[0],
        DType::Q2_K => &[80, 82],
        DType::Q3_K => &[108],
        DType::Q4_K | DType::Q5_K | DType::Q4_1 | DType::Q5_1 => &[0, 2],
        DType::Q6_K => &[208],
        other => panic!("{other} has no blocks"),
    }
}
