//! Every encoding, and random weights in each.

use std::cell::Cell;

use half::{bf16, f16};
use moeflux_compute::{BlockScale, Bytes, DType, Error, Half, MatrixScale, Tensor, Zeros, quant};

use super::random::Random;

/// Affine of `bits` in groups of `group`.
pub(crate) fn affine(bits: u8, group: u8, scale: Half) -> DType {
    DType::Affine { bits, group, scale }
}

/// Every encoding; of affine every width, every group and both kinds of scales; of FP8 every kind of scales.
pub(crate) fn dtypes() -> Vec<DType> {
    use DType::{
        BF16, F16, F32, IQ4_NL, IQ4_XS, MXFP4, Q2_K, Q3_K, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0,
    };
    let mut all = vec![F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K];
    all.extend([IQ4_NL, IQ4_XS, MXFP4, DType::MXFP4_Planes]);
    for (i, bits) in [2, 3, 4, 5, 6, 8].into_iter().enumerate() {
        all.push(affine(bits, [32, 64, 128][i % 3], Half::BF16));
        all.push(affine(bits, [64, 128, 32][i % 3], Half::F16));
    }
    for scale in [BlockScale::F32, BlockScale::BF16, BlockScale::E8M0] {
        all.extend([DType::Fp8 { scale }, DType::Fp8_Whole { scale }]);
    }
    all.extend([DType::Fp8_Rows { scale: BlockScale::BF16 }, DType::MXFP8_Planes]);
    all.extend([MatrixScale::Factor, MatrixScale::Divisor].map(|matrix| DType::NVFP4 { matrix }));
    all.extend(grouped_integers());
    all
}

/// Integers of both widths, with zero points and without, in groups of every size and in whole rows.
pub(crate) fn grouped_integers() -> [DType; 6] {
    let int = |bits, group, scale, zeros| DType::Int { bits, group, scale, zeros };
    [
        int(4, 32, Half::BF16, Zeros::Middle),
        int(4, 64, Half::F16, Zeros::Stored),
        int(4, 0, Half::F16, Zeros::Stored),
        int(8, 128, Half::F16, Zeros::Stored),
        int(8, 32, Half::BF16, Zeros::Stored),
        int(8, 0, Half::BF16, Zeros::Middle),
    ]
}

/// Encodings with codebooks of several values at once, which no kernel of a GPU multiplies with in eight bits.
pub(crate) fn codebooks() -> [DType; 7] {
    use DType::{IQ1_M, IQ1_S, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS};
    [IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S]
}

thread_local!(static BLANK: Cell<bool> = const { Cell::new(false) });

/// What `make` gives where weights are all zeros, for who asks what operations there are: random values take long.
pub(crate) fn with_blank_weights<T>(make: impl FnOnce() -> T) -> T {
    BLANK.set(true);
    let made = make();
    BLANK.set(false);
    made
}

/// A matrix of zeros where weights are to be so.
pub(crate) fn blank(dtype: DType, rows: usize, cols: usize) -> Option<Tensor> {
    let plane = |plane| Bytes::new(vec![0; dtype.plane_bytes(plane, rows, cols).expect("whole blocks")]);
    let planes = || (0..dtype.planes()).map(plane).collect();
    BLANK.get().then(|| Tensor::new(dtype, rows, cols, planes()).expect("planes of the right size"))
}

/// A matrix of about normal values: quantised where there is a quantiser, random valid blocks of like size otherwise.
pub(crate) fn weight(random: &mut Random, dtype: DType, rows: usize, cols: usize) -> Tensor {
    if let Some(blank) = blank(dtype, rows, cols) {
        return blank;
    }
    let values: Vec<f32> = random.normals(rows * cols);
    let planes = match quant::quantize(dtype, &values, cols) {
        Ok(planes) => planes,
        Err(Error::Unsupported { .. }) => random_planes(random, dtype, rows, cols),
        Err(error) => panic!("{error}"),
    };
    let planes = planes.into_iter().map(Bytes::new).collect();
    Tensor::new(dtype, rows, cols, planes).expect("planes of the right size")
}

/// Where the f16 scale of all quantised values and, if there is one, that of the minima lie in a block.
fn scales(dtype: DType) -> (usize, Option<usize>) {
    match dtype {
        DType::Q5_0 | DType::IQ4_NL | DType::IQ4_XS | DType::IQ1_S | DType::IQ2_XXS | DType::IQ2_XS => {
            (0, None)
        }
        DType::IQ2_S | DType::IQ3_XXS | DType::IQ3_S => (0, None),
        DType::Q2_K => (80, Some(82)),
        DType::Q3_K => (108, None),
        DType::Q4_1 | DType::Q5_1 | DType::Q5_K => (0, Some(2)),
        other => panic!("{other} has a quantiser"),
    }
}

/// Largest magnitude of what the f16 scale multiplies.
fn integers(dtype: DType) -> f32 {
    match dtype {
        DType::Q4_1 | DType::Q5_0 => 16.0,
        DType::Q5_1 => 31.0,
        DType::Q2_K => 15.0 * 3.0,
        DType::Q3_K => 32.0 * 4.0,
        DType::IQ4_NL => 127.0,
        DType::IQ4_XS => 32.0 * 127.0,
        DType::IQ1_S | DType::IQ1_M => 15.0,
        DType::IQ2_XXS | DType::IQ2_XS | DType::IQ2_S => 15.5 * 43.0 / 4.0,
        DType::IQ3_XXS => 15.5 * 62.0 / 2.0,
        DType::IQ3_S => 31.0 * 15.0,
        _ => 63.0 * 31.0,
    }
}

fn random_planes(random: &mut Random, dtype: DType, rows: usize, cols: usize) -> Vec<Vec<u8>> {
    let sizes = (0..dtype.planes()).map(|plane| dtype.plane_bytes(plane, rows, cols).expect("whole blocks"));
    let mut planes: Vec<Vec<u8>> =
        sizes.map(|bytes| (0..bytes).map(|_| random.next() as u8).collect()).collect();
    // Powers of two: 2⁻⁴ to 2⁻².
    let power = |random: &mut Random| 123 + random.below(3) as u8;
    match dtype {
        DType::MXFP4 => planes[0].chunks_exact_mut(17).for_each(|block| block[0] = power(random)),
        DType::MXFP4_Planes => planes[1].fill_with(|| power(random)),
        DType::MXFP8_Planes => {
            // Magnitudes of 1/4 to 4.
            planes[0].fill_with(|| 0x28 + random.below(0x20) as u8 + 128 * random.below(2) as u8);
            planes[1].fill_with(|| 1 + power(random));
        }
        // Scales of 1/4 to 4, and what makes the largest element 1.
        DType::NVFP4 { matrix } => {
            planes[1].fill_with(|| 0x28 + random.below(0x20) as u8);
            let whole: f32 = if matrix == MatrixScale::Factor { 0.17 } else { 5.9 };
            planes[2].copy_from_slice(&whole.to_le_bytes());
        }
        // Zero points near the middle, as those of weights about zero are.
        DType::Int { bits, scale, .. } => {
            for half in planes[1].chunks_exact_mut(2) {
                let value = (1.0 + random.uniform()) * 2.0 / f32::from(1u16 << bits);
                half.copy_from_slice(&match scale {
                    Half::F16 => f16::from_f32(value).to_le_bytes(),
                    Half::BF16 => bf16::from_f32(value).to_le_bytes(),
                });
            }
            if let Some(zeros) = planes.get_mut(2) {
                let mut near = || random.below(4) as u8;
                zeros.fill_with(
                    || if bits == 4 { (6 + near()) | (6 + near()) << 4 } else { 120 + 4 * near() },
                );
            }
        }
        DType::Fp8 { scale } | DType::Fp8_Rows { scale } | DType::Fp8_Whole { scale } => {
            // Magnitudes of 1/4 to 4.
            planes[0].fill_with(|| 0x28 + random.below(0x20) as u8 + 128 * random.below(2) as u8);
            let mut scales = |n: usize| {
                planes[1].chunks_exact_mut(n).for_each(|bytes| {
                    let value = (0.3 + 0.3 * random.uniform()).to_le_bytes();
                    bytes.copy_from_slice(&value[4 - n..]);
                });
            };
            match scale {
                BlockScale::F32 => scales(4),
                BlockScale::BF16 => scales(2),
                BlockScale::E8M0 => planes[1].fill_with(|| power(random)),
            }
        }
        _ => {
            for block in planes[0].chunks_exact_mut(dtype.block_bytes(0)) {
                set_scales(random, dtype, block);
            }
        }
    }
    planes
}

/// Scales that make values of about 1.
fn set_scales(random: &mut Random, dtype: DType, block: &mut [u8]) {
    let scale = f16::from_f32((1.0 + random.uniform()) * 2.0 / integers(dtype)).to_le_bytes();
    if dtype == DType::IQ1_M {
        // On top of four words.
        for (i, word) in block[48..].chunks_exact_mut(2).enumerate() {
            let bits = u16::from_le_bytes(scale) >> (4 * i) & 15;
            word[1] = word[1] & 15 | (bits as u8) << 4;
        }
        return;
    }
    let (scale_at, min_at) = scales(dtype);
    block[scale_at..scale_at + 2].copy_from_slice(&scale);
    if let Some(at) = min_at {
        // Minima are products with at most 63 (Q5_K) or 15 (Q2_K); of Q4_1 and Q5_1 they are added as they are.
        let min = match dtype {
            DType::Q4_1 | DType::Q5_1 => -1.0 - random.uniform(),
            _ => (0.5 + random.uniform()) / 30.0,
        };
        block[at..at + 2].copy_from_slice(&f16::from_f32(min).to_le_bytes());
    }
}
