//! Weights of any encoding to measure with: random, finite, and of a size that keeps activations within bounds.
//!
//! A few rows are made and repeated: time does not depend on what values are, but routers must choose differently from
//! token to token, and results must not become infinite.

use std::collections::HashMap;

use half::{bf16, f16};
use moeflux_compute::graph::{GatedDeltaRuleOp, Graph, MatrixSpec, Op, SsmScanOp};
use moeflux_compute::{BlockScale, Bytes, DType, Half, MatrixScale, Tensor};

use crate::io::buffer::HostBuffer;
use crate::sampler::random::Random;
use crate::synth::blocks::Filler;
use crate::{Error, Result};

/// Rows that are made, and about how many bytes they are at most.
const MADE_ROWS: usize = 256;
const MADE_BYTES: usize = 2 << 20;
/// A of a decay exp(A · softplus(·)).
const DECAY: f32 = -0.05;

/// Random matrices. What two that are asked for one after the other have alike is made once: the memory of a large one
/// takes longer to be had than it takes to be multiplied.
#[derive(Debug)]
pub(super) struct RandomWeights {
    random: Random,
    last: HashMap<MatrixSpec, Vec<Tensor>>,
}

impl RandomWeights {
    pub(super) fn new(seed: u64) -> Self {
        Self { random: Random::new(seed), last: HashMap::new() }
    }

    /// A weight for every one of `graph`, and one for each of `others`.
    pub(super) fn of_graph(
        &mut self,
        graph: &Graph,
        others: &[MatrixSpec],
    ) -> Result<(Vec<Tensor>, Vec<Tensor>)> {
        let decays: Vec<usize> = graph
            .nodes()
            .iter()
            .filter_map(|node| match &node.op {
                Op::GatedDeltaRule(GatedDeltaRuleOp { decay, .. }) => Some(decay.index()),
                Op::SsmScan(SsmScanOp { weights, .. }) => Some(weights.a.index()),
                _ => None,
            })
            .collect();
        let is_vector = |spec: &MatrixSpec| spec.rows == 1 && spec.dtype == DType::F32;
        let specs = || graph.weights().iter().map(|weight| weight.matrix);
        let matrices: Vec<MatrixSpec> =
            specs().filter(|spec| !is_vector(spec)).chain(others.iter().copied()).collect();
        let mut made = self.matrices(&matrices)?.into_iter();
        let weight = |(index, spec): (usize, MatrixSpec)| {
            if is_vector(&spec) {
                let value = if decays.contains(&index) { DECAY } else { 1.0 };
                return Ok(Tensor::from_f32(1, spec.cols, &vec![value; spec.cols])?);
            }
            Ok(made.next().expect("a matrix for each"))
        };
        let weights = specs().enumerate().map(weight).collect::<Result<_>>()?;
        Ok((weights, made.collect()))
    }

    /// Matrices of these kinds. Those of the call before that are of none are given up first.
    fn matrices(&mut self, specs: &[MatrixSpec]) -> Result<Vec<Tensor>> {
        let last = &mut self.last;
        let found: Vec<Option<Tensor>> = specs.iter().map(|spec| last.get_mut(spec)?.pop()).collect();
        last.clear();
        let of = specs.iter().zip(found);
        let all = of.map(|(spec, found)| found.map_or_else(|| matrix(*spec, &mut self.random), Ok));
        let all = all.collect::<Result<Vec<_>>>()?;
        for (spec, tensor) in specs.iter().zip(&all) {
            self.last.entry(*spec).or_default().push(tensor.clone());
        }
        Ok(all)
    }
}

/// Random weights of variance 1 / columns.
fn matrix(spec: MatrixSpec, random: &mut Random) -> Result<Tensor> {
    let MatrixSpec { dtype, rows, cols } = spec;
    let std = (cols.max(1) as f32).sqrt().recip();
    let mut planes = vec![];
    for plane in 0..dtype.planes() {
        let bytes = dtype.plane_bytes(plane, rows, cols)?;
        let row = dtype.row_bytes(plane, cols)?.max(1);
        let no_memory =
            |source| Error::Io { action: "find memory to measure", path: "weights".into(), source };
        let mut buffer = HostBuffer::zeroed(bytes).map_err(no_memory)?;
        let all = buffer.as_mut_slice();
        let made = (MADE_BYTES / row).min(MADE_ROWS).clamp(1, (bytes / row).max(1)) * row;
        let (first, mut rest) = all.split_at_mut(made.min(bytes));
        fill(dtype, cols, std, plane, random, first);
        while !rest.is_empty() {
            let (next, after) = rest.split_at_mut(first.len().min(rest.len()));
            next.copy_from_slice(&first[..next.len()]);
            rest = after;
        }
        planes.push(Bytes::new(buffer));
    }
    Ok(Tensor::new(dtype, rows, cols, planes)?)
}

/// Writes `half` at `places` of blocks of `len` bytes.
fn set_scales(out: &mut [u8], len: usize, half: [u8; 2], places: &[usize]) {
    for block in out.chunks_exact_mut(len) {
        places.iter().for_each(|at| block[*at..*at + 2].copy_from_slice(&half));
    }
}

/// Fills whole rows of a plane.
fn fill(dtype: DType, cols: usize, std: f32, plane: usize, random: &mut Random, out: &mut [u8]) {
    let half = f16::from_f32(std / 8.0).to_le_bytes();
    let mut bytes = |out: &mut [u8]| out.iter_mut().for_each(|byte| *byte = random.next() as u8);
    let mut blocks = |len: usize, places: &[usize], out: &mut [u8]| {
        bytes(out);
        set_scales(out, len, half, places);
    };
    match (dtype, plane) {
        (DType::Affine { group: 64, scale: Half::BF16, .. }, _)
        | (
            DType::F32 | DType::F16 | DType::BF16 | DType::Q5_0 | DType::Q8_0 | DType::Q4_K | DType::Q5_K,
            _,
        )
        | (DType::Q6_K | DType::MXFP4, _) => {
            Filler { dtype, cols, std, constant: false }.fill(plane, random, out);
        }
        (DType::Affine { .. } | DType::Int { .. } | DType::MXFP4_Planes | DType::NVFP4 { .. }, 0) => {
            bytes(out)
        }
        // The middle of the range.
        (DType::Int { .. }, 2) => out.fill(if dtype.block_rows(2) == 8 { 0x88 } else { 0x80 }),
        (DType::Affine { bits, scale, .. }, _) => {
            let levels = f32::from(1u16 << bits) - 1.0;
            let step = 3.0 * std / levels;
            let value = if plane == 1 { step } else { -step * levels / 2.0 };
            let value = match scale {
                Half::F16 => f16::from_f32(value).to_le_bytes(),
                Half::BF16 => bf16::from_f32(value).to_le_bytes(),
            };
            set_scales(out, 2, value, &[0]);
        }
        // The values are up to 6.
        (DType::MXFP4_Planes, _) => out.fill((127.0 + (std / 3.0).log2()).clamp(1.0, 254.0) as u8),
        // The values are up to 8 or 128.
        (DType::Int { bits, scale, .. }, _) => {
            let value = std / 4.6 / f32::from(1u8 << (bits.clamp(4, 8) - 4));
            let value = match scale {
                Half::F16 => f16::from_f32(value).to_le_bytes(),
                Half::BF16 => bf16::from_f32(value).to_le_bytes(),
            };
            set_scales(out, 2, value, &[0]);
        }
        // One, and what makes it as large as wanted.
        (DType::NVFP4 { .. }, 1) => out.fill(0x38),
        (DType::NVFP4 { matrix }, _) => {
            let scale = if matrix == MatrixScale::Factor { std / 3.0 } else { 3.0 / std };
            out.as_chunks_mut::<4>().0.iter_mut().for_each(|bytes| *bytes = scale.to_le_bytes());
        }
        (DType::Fp8 { .. } | DType::Fp8_Rows { .. } | DType::Fp8_Whole { .. } | DType::MXFP8_Planes, 0) => {
            bytes(out);
            // Below two, and no NaN.
            out.iter_mut().for_each(|byte| *byte &= 0xBF);
        }
        (DType::Fp8 { scale } | DType::Fp8_Rows { scale } | DType::Fp8_Whole { scale }, _)
            if scale == BlockScale::F32 =>
        {
            out.as_chunks_mut::<4>().0.iter_mut().for_each(|scale| *scale = std.to_le_bytes());
        }
        (DType::Fp8 { scale } | DType::Fp8_Rows { scale } | DType::Fp8_Whole { scale }, _)
            if scale == BlockScale::BF16 =>
        {
            set_scales(out, 2, bf16::from_f32(std).to_le_bytes(), &[0]);
        }
        (DType::Fp8 { .. } | DType::Fp8_Rows { .. } | DType::Fp8_Whole { .. }, _)
        | (DType::MXFP8_Planes, _) => {
            out.fill((127.0 + std.log2().round()).clamp(1.0, 254.0) as u8);
        }
        (DType::Q4_0 | DType::IQ4_NL, _) => blocks(18, &[0], out),
        (DType::Q2_K, _) => blocks(84, &[80, 82], out),
        (DType::Q3_K, _) => blocks(110, &[108], out),
        (DType::IQ1_S, _) => blocks(50, &[0], out),
        (DType::IQ2_XXS, _) => blocks(66, &[0], out),
        (DType::IQ2_XS, _) => blocks(74, &[0], out),
        (DType::IQ2_S, _) => blocks(82, &[0], out),
        (DType::IQ3_XXS, _) => blocks(98, &[0], out),
        (DType::IQ3_S, _) => blocks(110, &[0], out),
        (DType::IQ4_XS, _) => {
            bytes(out);
            // Values are up to 127, and scales up to 32.
            set_scales(out, 136, f16::from_f32(std / 256.0).to_le_bytes(), &[0]);
        }
        (DType::Q4_1, _) => blocks(20, &[0, 2], out),
        (DType::Q5_1, _) => blocks(24, &[0, 2], out),
        (DType::IQ1_M, _) => {
            bytes(out);
            // The scale's nibbles are on top of four words.
            for block in out.as_chunks_mut::<56>().0 {
                let nibbles = [half[0] << 4, half[0] & 0xF0, half[1] << 4, half[1] & 0xF0];
                for (word, nibble) in block[48..].as_chunks_mut::<2>().0.iter_mut().zip(nibbles) {
                    word[1] = word[1] & 0x0F | nibble;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use moeflux_compute::Zeros;
    use moeflux_compute::quant::dequantize;

    use super::*;

    #[test]
    fn what_is_asked_for_again_is_not_made_again() {
        let of = |rows| MatrixSpec { dtype: DType::Q8_0, rows, cols: 64 };
        let begins =
            |tensors: &[Tensor]| tensors.iter().map(|t| t.plane(0).as_slice().as_ptr()).collect::<Vec<_>>();
        let mut weights = RandomWeights::new(1);
        let first = weights.matrices(&[of(32), of(32), of(8)]).unwrap();
        let second = weights.matrices(&[of(16), of(32), of(32), of(32)]).unwrap();
        let [first, second] = [first, second].map(|tensors| begins(&tensors));
        assert!(second[1..3].iter().all(|begin| first[..2].contains(begin)) && second[1] != second[2]);
        assert!(!first.contains(&second[3]), "as often as it is asked for");
        assert!(weights.last.values().flatten().count() == 4, "what is not asked for is given up");
    }

    #[test]
    fn every_encoding_is_finite_and_varies_from_row_to_row() {
        let affine = |bits, group, scale| DType::Affine { bits, group, scale };
        let encodings = [
            DType::Q4_1,
            DType::Q5_1,
            DType::IQ1_S,
            DType::IQ1_M,
            DType::IQ2_XXS,
            DType::IQ2_XS,
            DType::IQ2_S,
            DType::IQ3_XXS,
            DType::IQ3_S,
            DType::IQ4_NL,
            DType::IQ4_XS,
            DType::F32,
            DType::F16,
            DType::BF16,
            DType::Q4_0,
            DType::Q5_0,
            DType::Q8_0,
            DType::Q2_K,
            DType::Q3_K,
            DType::Q4_K,
            DType::Q5_K,
            DType::Q6_K,
            DType::MXFP4,
            DType::MXFP4_Planes,
            DType::Fp8 { scale: BlockScale::F32 },
            DType::Fp8 { scale: BlockScale::BF16 },
            DType::Fp8 { scale: BlockScale::E8M0 },
            DType::Fp8_Whole { scale: BlockScale::F32 },
            DType::Fp8_Whole { scale: BlockScale::BF16 },
            DType::Fp8_Rows { scale: BlockScale::BF16 },
            DType::MXFP8_Planes,
            DType::Int { bits: 4, group: 32, scale: Half::BF16, zeros: Zeros::Middle },
            DType::Int { bits: 8, group: 0, scale: Half::F16, zeros: Zeros::Stored },
            DType::NVFP4 { matrix: MatrixScale::Factor },
            DType::NVFP4 { matrix: MatrixScale::Divisor },
            affine(4, 64, Half::BF16),
            affine(4, 32, Half::F16),
            affine(2, 128, Half::BF16),
            affine(8, 32, Half::BF16),
        ];
        for dtype in encodings {
            let tensor = matrix(MatrixSpec { dtype, rows: 256, cols: 512 }, &mut Random::new(1)).unwrap();
            let values = dequantize(tensor.view()).unwrap();
            assert!(values.iter().all(|v| v.is_finite()), "{dtype}");
            let square = values.iter().map(|v| v * v).sum::<f32>() / values.len() as f32;
            // Within a factor that norms make up for.
            assert!((1e-6..10.0).contains(&square), "{dtype}: {square}");
            assert_ne!(values[..512], values[512..1024], "{dtype}");
        }
    }
}
