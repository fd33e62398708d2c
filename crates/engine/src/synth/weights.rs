//! What a synthetic model's weights are: their list, shapes, encodings and content, before any format's names.
//!
//! Matrices have variance 1 / fan-in, those that write to the residual stream less, so that all layers together add
//! [`ATTENTION_VARIANCE`] + [`EXPERTS_VARIANCE`] to the embedding's 1. Activations neither vanish nor explode at any
//! depth, and as in a trained model one expert chosen otherwise, which rounding of activations brings about, changes
//! logits little.
//!
//! With a router skew, the first 64 channels of the residual stream hold one constant: the embedding puts it there
//! and no layer writes to them. Only the routers (and experts) look at them, with weights that add c · −ln(rank) to an
//! expert's logit. The other channels add noise. If that noise were of the Gumbel distribution and c = s times its
//! scale, top-k would draw experts in proportion to rank^−s (Gumbel-top-k; Kool et al. 2019); normal noise of the same
//! standard deviation comes near.

use moeflux_compute::quant::{dequantize, quantize};
use moeflux_compute::{DType, Half, TensorView};

use super::blocks::{self, CONSTANT_COLS, Filler};
use super::shapes::Architecture;
use super::{Encoding, Recipe, stream};
use crate::Result;

/// Variance that attention adds to the residual stream over all layers, where a token sees itself only.
const ATTENTION_VARIANCE: f32 = 0.25;
/// What is left of it where a token sees a few tens of others.
const ATTENTION_SHARE: f32 = 0.1;
/// Variance that experts add to the residual stream over all layers.
const EXPERTS_VARIANCE: f32 = 0.5;
/// E\[silu(x)²\] for x of variance 1.
const SWIGLU_VARIANCE: f32 = 0.356;
/// Σ w² of a token's k expert weights is about this much more than 1 / k.
const UNEVEN_WEIGHTS: f32 = 1.9;
/// Standard deviation of router logits: the last of a token's experts weighs about a tenth of the first.
const ROUTER_STD: f32 = 2.5;
/// Standard deviation of the Gumbel distribution of scale 1: π / √6.
const GUMBEL_STD: f32 = 1.2825;
/// Standard deviation of logits.
const LOGITS_STD: f32 = 3.0;

/// A module's part in the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Embedding,
    Head,
    FinalNorm,
    AttentionNorm,
    Query,
    Key,
    Value,
    AttentionOut,
    QueryNorm,
    KeyNorm,
    ExpertsNorm,
    Router,
    ExpertGate,
    ExpertUp,
    ExpertDown,
}

/// How values come about.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Content {
    /// Ones, after as many zeros.
    Norm { zeros: usize },
    /// Random, with the first rows of every matrix of the stack zero and the first columns constant or not.
    Random { std: f32, zero_rows: usize, constant: bool },
    /// Random, with the expert's row beginning with `bias[expert]` in as many columns as are constant.
    Router { std: f32, bias: Vec<f32> },
}

/// One weight of the model.
#[derive(Debug, Clone)]
pub(super) struct Weight {
    pub(super) role: Role,
    pub(super) layer: usize,
    pub(super) dtype: DType,
    /// Row-major: `[n]`, `[rows, cols]` or `[experts, rows, cols]`.
    pub(super) shape: Vec<usize>,
    pub(super) content: Content,
}

impl Weight {
    pub(super) fn cols(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    pub(super) fn rows(&self) -> usize {
        self.shape.split_last().map_or(1, |(_, outer)| outer.iter().product())
    }

    /// Bytes of a row of `plane`; rows are whole blocks, which [`weights`] has checked.
    pub(super) fn row_bytes(&self, plane: usize) -> usize {
        self.dtype.row_bytes(plane, self.cols()).expect("whole blocks")
    }

    /// Whether it is made row by row; the others are made whole from floats.
    pub(super) fn is_random(&self) -> bool {
        matches!(self.content, Content::Random { .. })
    }

    /// Fills `out` with rows of `plane` from `first_row` on, from the random numbers that `key` says.
    pub(super) fn fill(&self, plane: usize, first_row: usize, key: [u64; 3], out: &mut [u8]) {
        let Content::Random { std, zero_rows, constant } = self.content else {
            unreachable!("only random weights are made row by row");
        };
        let filler = Filler { dtype: self.dtype, cols: self.cols(), std, constant };
        filler.fill(plane, &mut stream(key), out);
        if zero_rows > 0 {
            let matrix_rows = self.shape[self.shape.len() - 2];
            // Zero bytes are zero values in every encoding: scales and biases are zero too.
            for (i, row) in out.chunks_exact_mut(self.row_bytes(plane)).enumerate() {
                if (first_row + i) % matrix_rows < zero_rows {
                    row.fill(0);
                }
            }
        }
    }

    /// The bytes of every plane of a weight that is not made row by row.
    pub(super) fn whole(&self, key: [u64; 3]) -> Result<Vec<Vec<u8>>> {
        let cols = self.cols();
        let mut values = vec![1.0; self.rows() * cols];
        match &self.content {
            Content::Norm { zeros } => values[..*zeros].fill(0.0),
            Content::Router { std, bias } => {
                let mut random = stream(key);
                for (row, bias) in values.chunks_exact_mut(cols).zip(bias) {
                    row.iter_mut().for_each(|v| *v = blocks::normal(&mut random) * std);
                    if *bias != 0.0 {
                        row[..CONSTANT_COLS].fill(*bias);
                    }
                }
            }
            Content::Random { .. } => unreachable!("random weights are made row by row"),
        }
        Ok(quantize(self.dtype, &values, cols)?)
    }
}

/// llama.cpp's rule for which layers of a Q4_K_M file get more bits (`use_more_bits` in `llama-quant.cpp`).
fn more_bits(layer: usize, layers: usize) -> bool {
    layer < layers / 8 || layer >= 7 * layers / 8 || (layer - layers / 8) % 3 == 2
}

/// The encoding of a part, as the usual converters choose it.
fn dtype(recipe: &Recipe, role: Role, layer: usize) -> DType {
    let affine = |bits| DType::Affine { bits, group: 64, scale: Half::BF16 };
    let vector = matches!(
        role,
        Role::FinalNorm | Role::AttentionNorm | Role::QueryNorm | Role::KeyNorm | Role::ExpertsNorm
    );
    match recipe.encoding {
        Encoding::Mlx4Bit | Encoding::Mlx8Bit if vector => DType::BF16,
        // mlx-lm keeps routers at 8 bits.
        Encoding::Mlx8Bit => affine(8),
        Encoding::Mlx4Bit => affine(if role == Role::Router { 8 } else { 4 }),
        _ if vector || role == Role::Router => DType::F32,
        Encoding::F16 => DType::F16,
        Encoding::Q8_0 => DType::Q8_0,
        Encoding::Q4KM => {
            let few_experts = recipe.shape.num_experts == 8;
            match role {
                Role::Head => DType::Q6_K,
                Role::Key | Role::Value if few_experts => DType::Q8_0,
                Role::AttentionOut if few_experts => DType::Q5_K,
                Role::Value | Role::ExpertDown if more_bits(layer, recipe.layers) => DType::Q6_K,
                _ => DType::Q4_K,
            }
        }
    }
}

/// Every weight of the model, in file order.
///
/// # Errors
/// If an encoding cannot store a weight's rows.
pub(super) fn weights(recipe: &Recipe) -> Result<Vec<Weight>> {
    let s = &recipe.shape;
    let skewed = recipe.router_skew > 0.0;
    let silent = if skewed { CONSTANT_COLS } else { 0 };
    let random = |std, zero_rows| Content::Random { std, zero_rows, constant: false };
    let fan_in = |n: usize| (n as f32).sqrt().recip();
    let layers = recipe.layers as f32;
    let (hidden, inner) = (s.hidden_size, s.moe_intermediate_size);
    let q_width = s.num_attention_heads * s.head_dim;
    let kv_width = s.num_key_value_heads * s.head_dim;
    let attention_gain = (ATTENTION_VARIANCE / layers).sqrt();
    let one_layer = SWIGLU_VARIANCE * UNEVEN_WEIGHTS / s.num_experts_per_tok as f32;
    let experts_gain = (EXPERTS_VARIANCE / (layers * one_layer)).sqrt();

    let mut all = vec![];
    let mut add = |role, layer, shape: &[usize], content| -> Result<()> {
        let dtype = dtype(recipe, role, layer);
        let (&cols, outer) = shape.split_last().expect("every weight has a dimension");
        dtype.matrix_bytes(outer.iter().product(), cols)?;
        all.push(Weight { role, layer, dtype, shape: shape.to_vec(), content });
        Ok(())
    };
    let embedding = Content::Random { std: 1.0, zero_rows: 0, constant: skewed };
    add(Role::Embedding, 0, &[s.vocab_size, hidden], embedding)?;
    let level = constant_level(dtype(recipe, Role::Embedding, 0), hidden)?;
    for layer in 0..recipe.layers {
        add(Role::AttentionNorm, layer, &[hidden], Content::Norm { zeros: silent })?;
        add(Role::Query, layer, &[q_width, hidden], random(fan_in(hidden), 0))?;
        add(Role::Key, layer, &[kv_width, hidden], random(fan_in(hidden), 0))?;
        add(Role::Value, layer, &[kv_width, hidden], random(fan_in(hidden), 0))?;
        if s.architecture == Architecture::Qwen3Moe {
            add(Role::QueryNorm, layer, &[s.head_dim], Content::Norm { zeros: 0 })?;
            add(Role::KeyNorm, layer, &[s.head_dim], Content::Norm { zeros: 0 })?;
        }
        let out = random(fan_in(q_width) * attention_gain, silent);
        add(Role::AttentionOut, layer, &[hidden, q_width], out)?;
        add(Role::ExpertsNorm, layer, &[hidden], Content::Norm { zeros: 0 })?;
        let added =
            (layer as f32 + 1.0) * ATTENTION_VARIANCE * ATTENTION_SHARE + layer as f32 * EXPERTS_VARIANCE;
        let router = Content::Router {
            std: ROUTER_STD * fan_in(hidden - silent),
            bias: popularity(recipe, layer, (1.0 + added / layers).sqrt() / level),
        };
        add(Role::Router, layer, &[s.num_experts, hidden], router)?;
        add(Role::ExpertGate, layer, &[s.num_experts, inner, hidden], random(fan_in(hidden), 0))?;
        add(Role::ExpertUp, layer, &[s.num_experts, inner, hidden], random(fan_in(hidden), 0))?;
        let down = random(fan_in(inner) * experts_gain, silent);
        add(Role::ExpertDown, layer, &[s.num_experts, hidden, inner], down)?;
    }
    add(Role::FinalNorm, 0, &[hidden], Content::Norm { zeros: silent })?;
    add(Role::Head, 0, &[s.vocab_size, hidden], random(LOGITS_STD * fan_in(hidden), 0))?;
    Ok(all)
}

/// What the embedding's constant columns hold once encoded.
fn constant_level(dtype: DType, cols: usize) -> Result<f32> {
    let filler = Filler { dtype, cols, std: 1.0, constant: true };
    let planes = (0..dtype.planes()).map(|plane| {
        let mut row = vec![0; dtype.row_bytes(plane, cols)?];
        filler.fill(plane, &mut stream([0; 3]), &mut row);
        Ok(row)
    });
    let planes: Vec<Vec<u8>> = planes.collect::<Result<_>>()?;
    let planes: Vec<&[u8]> = planes.iter().map(Vec::as_slice).collect();
    Ok(dequantize(TensorView::new(dtype, 1, cols, &planes)?)?[0])
}

/// Each expert's router weight in the constant columns: the logit −c · ln(rank), less its mean, over what
/// those columns hold after the norm. Ranks are shuffled in every layer.
fn popularity(recipe: &Recipe, layer: usize, inverse_level: f32) -> Vec<f32> {
    let experts = recipe.shape.num_experts;
    let per_log = recipe.router_skew * ROUTER_STD / GUMBEL_STD;
    let mut logits: Vec<f32> = (1..=experts).map(|rank| -per_log * (rank as f32).ln()).collect();
    let mean = logits.iter().sum::<f32>() / experts as f32;
    logits.iter_mut().for_each(|l| *l = (*l - mean) * inverse_level / CONSTANT_COLS as f32);
    let mut random = stream([recipe.seed, u64::MAX, layer as u64]);
    for i in (1..experts).rev() {
        logits.swap(i, (random.next_unit() * (i + 1) as f64) as usize);
    }
    logits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_bits_for_half_of_the_layers() {
        let layers: Vec<usize> = (0..48).filter(|layer| more_bits(*layer, 48)).collect();
        let expected: Vec<usize> = (0..6).chain((8..42).step_by(3)).chain(42..48).collect();
        assert_eq!(layers, expected);
    }

    #[test]
    fn every_shape_and_encoding_fits() {
        for shape in super::super::SHAPES {
            for encoding in Encoding::ALL {
                let layers = shape.num_hidden_layers;
                let recipe = Recipe { shape: *shape, layers, encoding: *encoding, seed: 0, router_skew: 1.0 };
                for weight in weights(&recipe).unwrap().iter().filter(|w| w.is_random()) {
                    for plane in 0..weight.dtype.planes() {
                        let mut row = vec![0; weight.row_bytes(plane)];
                        weight.fill(plane, weight.rows() - 1, [0; 3], &mut row);
                        assert!(row.iter().any(|byte| *byte != 0), "{weight:?}");
                    }
                }
            }
        }
    }
}
