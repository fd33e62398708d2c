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
use moeflux_compute::{DType, TensorView};

use super::blocks::{self, CONSTANT_COLS, Filler};
use super::shapes::Parsed;
use super::{Recipe, stream};
use crate::Result;
use crate::models::OutlinedWeight;

/// Variance that attention adds to the residual stream over all layers, where a token sees itself only.
const ATTENTION_VARIANCE: f32 = 0.25;
/// What is left of it where a token sees a few tens of others.
const ATTENTION_SHARE: f32 = 0.1;
/// Variance that experts add to the residual stream over all layers.
const EXPERTS_VARIANCE: f32 = 0.5;
/// Variance that shared experts add to it besides.
const SHARED_VARIANCE: f32 = 0.1;
/// E\[silu(x)²\] for x of variance 1.
const SWIGLU_VARIANCE: f32 = 0.356;
/// E\[relu(x)⁴\] for x of variance 1.
const SQUARED_RELU_VARIANCE: f32 = 1.5;
/// Σ w² of a token's k expert weights is about this much more than 1 / k.
const UNEVEN_WEIGHTS: f32 = 1.9;
/// Standard deviation of router logits: the last of a token's experts weighs about a tenth of the first.
const ROUTER_STD: f32 = 2.5;
/// Standard deviation of what sigmoid routers add to scores for choosing.
const CORRECTION_STD: f32 = 0.01;
/// Standard deviation of the Gumbel distribution of scale 1: π / √6.
const GUMBEL_STD: f32 = 1.2825;
/// Standard deviation of logits.
const LOGITS_STD: f32 = 3.0;
/// A of a decay exp(A · softplus(·)): a linear attention's state lasts for some tens of tokens.
const DECAY: f32 = -0.05;

/// How values come about.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Content {
    /// One value everywhere, after as many zeros.
    Fill { zeros: usize, value: f32 },
    /// These values.
    Given(Vec<f32>),
    /// Random, with the first rows of every matrix of the stack zero and the first columns constant or not.
    Random { std: f32, zero_rows: usize, constant: bool },
    /// Random, with the expert's row beginning with `bias[expert]` in as many columns as are constant.
    Router { std: f32, bias: Vec<f32> },
}

/// One weight of the model.
#[derive(Debug, Clone)]
pub(super) struct Weight {
    /// Name of the tensor in the checkpoint.
    pub(super) name: String,
    pub(super) dtype: DType,
    /// Row-major: `[n]`, `[rows, cols]` or `[stack, rows, cols]`.
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

    /// Rows of `plane`.
    pub(super) fn plane_rows(&self, plane: usize) -> usize {
        self.rows().div_ceil(self.dtype.block_rows(plane))
    }

    /// Bytes of `plane`.
    pub(super) fn plane_bytes(&self, plane: usize) -> u64 {
        (self.plane_rows(plane) * self.row_bytes(plane)) as u64
    }

    pub(super) fn bytes(&self) -> u64 {
        (0..self.dtype.planes()).map(|plane| self.plane_bytes(plane)).sum()
    }

    /// Whether it is made row by row; the others are made whole from floats.
    pub(super) fn is_random(&self) -> bool {
        matches!(self.content, Content::Random { .. })
    }

    /// What its rows look like, if it is random.
    pub(super) fn filler(&self) -> Option<Filler> {
        let Content::Random { std, constant, .. } = self.content else { return None };
        Some(Filler { dtype: self.dtype, cols: self.cols(), std, constant })
    }

    /// Rows of `plane` of each matrix of the stack, and how many of them are zero.
    pub(super) fn matrix(&self, plane: usize) -> (usize, usize) {
        match (&self.content, &self.shape[..]) {
            // Scales of several rows are of no stack, and stay: the codes of zero rows are zero.
            _ if self.dtype.block_rows(plane) > 1 => (self.plane_rows(plane), 0),
            (Content::Random { zero_rows, .. }, [.., rows, _]) => (*rows, *zero_rows),
            (_, [.., rows, _]) => (*rows, 0),
            _ => (1, 0),
        }
    }

    /// Fills `out` with rows of `plane` from `first_row` on, from the random numbers that `key` says.
    pub(super) fn fill(&self, plane: usize, first_row: usize, key: [u64; 3], out: &mut [u8]) {
        let filler = self.filler().expect("only random weights are made row by row");
        filler.fill(plane, &mut stream(key), out);
        let (matrix_rows, zero_rows) = self.matrix(plane);
        if zero_rows > 0 {
            // Zero bytes are zero values in every encoding: scales and biases of a row are zero too.
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
        let mut values = vec![0.0; self.rows() * cols];
        match &self.content {
            Content::Fill { zeros, value } => values[*zeros..].fill(*value),
            Content::Given(given) => values.copy_from_slice(given),
            Content::Router { std, bias } => {
                let mut random = stream(key);
                // Routers may choose more than experts.
                let biases = bias.iter().chain(std::iter::repeat(&0.0));
                for (row, bias) in values.chunks_exact_mut(cols).zip(biases) {
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

/// What decides every weight's content.
#[derive(Debug)]
pub(super) struct Contents<'a> {
    recipe: &'a Recipe,
    hidden_size: usize,
    experts: usize,
    /// Whether decays are stored as logarithms.
    log_decay: bool,
    /// Standard deviations, as multiples of fan-in^−½, of what writes to the residual stream.
    attention_gain: f32,
    experts_gain: f32,
    shared_gain: f32,
    /// What the embedding's constant columns hold.
    level: f32,
}

impl<'a> Contents<'a> {
    /// For a model of `recipe` and `shape` whose embedding is stored in `embedding`.
    ///
    /// # Errors
    /// If that encoding cannot store its rows.
    pub(super) fn new(recipe: &'a Recipe, shape: &Parsed, embedding: DType) -> Result<Self> {
        let layers = recipe.layers as f32;
        let factors = ["routed_scaling_factor", "moe_router_scaling_factor"];
        let factor = factors.iter().find_map(|key| shape.config()[*key].as_f64()).unwrap_or(1.0) as f32;
        let top_k = shape.first_size(&["num_experts_per_tok", "moe_top_k"]) as f32;
        let squared_relu = shape.config()["mlp_hidden_act"] == "relu2";
        let variance = if squared_relu { SQUARED_RELU_VARIANCE } else { SWIGLU_VARIANCE };
        let one_layer = variance * factor * factor * UNEVEN_WEIGHTS / top_k;
        let hidden_size = shape.size("hidden_size");
        Ok(Self {
            recipe,
            hidden_size,
            experts: shape.experts(),
            log_decay: recipe.encoding.format() != crate::checkpoint::Format::Gguf,
            attention_gain: (ATTENTION_VARIANCE / layers).sqrt(),
            experts_gain: (EXPERTS_VARIANCE / (layers * one_layer)).sqrt(),
            shared_gain: (SHARED_VARIANCE / (layers * variance)).sqrt(),
            level: constant_level(embedding, hidden_size)?,
        })
    }

    /// Channels of the residual stream that hold a constant.
    fn silent(&self) -> usize {
        if self.recipe.router_skew > 0.0 { CONSTANT_COLS } else { 0 }
    }

    /// The tensors of a weight that a family asked for, with their content.
    pub(super) fn tensors(&self, outlined: OutlinedWeight) -> Vec<Weight> {
        let content = match &outlined.values {
            Some(values) => Content::Given(values.clone()),
            None => self.content(&outlined),
        };
        if let Some(names) = outlined.elements() {
            let shape = outlined.shape[1..].to_vec();
            let one =
                |name| Weight { name, dtype: outlined.dtype, shape: shape.clone(), content: content.clone() };
            return names.map(one).collect();
        }
        let OutlinedWeight { stored, dtype, shape, .. } = outlined;
        vec![Weight { name: stored, dtype, shape, content }]
    }

    fn content(&self, weight: &OutlinedWeight) -> Content {
        let is = |ending: &str| weight.name.ends_with(ending);
        let cols = weight.shape.last().copied().unwrap_or(1);
        let random = |std, zero_rows| Content::Random { std, zero_rows, constant: false };
        let fan_in = |n: usize| (n as f32).sqrt().recip();
        let written = |gain: f32| random(gain * fan_in(cols), self.silent());
        let fill = |zeros, value| Content::Fill { zeros, value };
        if is("embed_tokens.weight") {
            Content::Random { std: 1.0, zero_rows: 0, constant: self.silent() > 0 }
        } else if is("lm_head.weight") {
            random(LOGITS_STD * fan_in(cols), 0)
        } else if is("input_layernorm.weight") || is("norm_1.weight") || is("model.norm.weight") {
            fill(self.silent(), 1.0)
        } else if is("norm.weight") || is("norm_2.weight") {
            fill(0, 1.0)
        } else if is("exp_probs_b.bias") || is("e_score_correction_bias") {
            random(CORRECTION_STD, 0)
        } else if is("bias") || is("sinks") || is("attn_sinks.weight") {
            fill(0, 0.0)
        } else if is("A_log") {
            fill(0, if self.log_decay { (-DECAY).ln() } else { DECAY })
        } else if is("router.per_expert_scale") {
            fill(0, 1.0)
        } else if is("router.scale") {
            // What takes it divides by the root of the width.
            fill(0, (self.hidden_size as f32).sqrt())
        } else if is("mixer.D") || is("mamba.D") {
            fill(0, 1.0)
        } else if is("mlp.gate.weight")
            || is("mixer.gate.weight")
            || is("gate.gate.weight")
            || is("block_sparse_moe.gate.weight")
            || is("router.weight")
            || is("router.proj.weight")
            || is("router.layer.weight")
            || is("router.classifier.weight")
        {
            self.router(weight.layer())
        } else if is("conv1d.weight") {
            random(fan_in(weight.shape[1..].iter().product()), 0)
        } else if is("embed_q.weight") {
            // Transposed: a key's channel is a sum over rows.
            random(fan_in(weight.shape[1]), 0)
        } else if is("o_proj.weight") || is("out_proj.weight") {
            written(self.attention_gain)
        } else if is("experts.down_proj.weight") && !is("shared_experts.down_proj.weight") {
            written(self.experts_gain)
        } else if is("down_proj.weight") || is("fc2_latent_proj.weight") {
            written(self.shared_gain)
        } else {
            random(fan_in(cols), 0)
        }
    }

    fn router(&self, layer: usize) -> Content {
        let (layer, layers) = (layer as f32, self.recipe.layers as f32);
        let added = (layer + 1.0) * ATTENTION_VARIANCE * ATTENTION_SHARE + layer * EXPERTS_VARIANCE;
        Content::Router {
            std: ROUTER_STD * (self.hidden_size as f32 - self.silent() as f32).sqrt().recip(),
            bias: self.popularity(layer as u64, (1.0 + added / layers).sqrt() / self.level),
        }
    }

    /// Each expert's router weight in the constant columns: the logit −c · ln(rank), less its mean, over what
    /// those columns hold after the norm. Ranks are shuffled in every layer.
    fn popularity(&self, layer: u64, inverse_level: f32) -> Vec<f32> {
        let per_log = self.recipe.router_skew * ROUTER_STD / GUMBEL_STD;
        let mut logits: Vec<f32> = (1..=self.experts).map(|rank| -per_log * (rank as f32).ln()).collect();
        let mean = logits.iter().sum::<f32>() / self.experts as f32;
        logits.iter_mut().for_each(|l| *l = (*l - mean) * inverse_level / CONSTANT_COLS as f32);
        let mut random = stream([self.recipe.seed, u64::MAX, layer]);
        for i in (1..self.experts).rev() {
            logits.swap(i, (random.next_unit() * (i + 1) as f64) as usize);
        }
        logits
    }
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

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::super::{Encoding, Plan, Recipe, SHAPES};
    use super::{Content, Weight};
    use crate::checkpoint::Format;

    /// Names of the weights whose values the family says, with these, of a Gemma 4 of so many layers.
    fn given(encoding: Encoding, layers: usize) -> Vec<(String, Vec<f32>)> {
        let shape = *SHAPES.iter().find(|shape| shape.name == "gemma-4-26b-a4b").unwrap();
        let plan = Plan::new(Recipe { shape, layers, encoding, seed: 0, router_skew: 0.0 }).unwrap();
        let given = plan.weights.into_iter().filter_map(|w| match w.content {
            Content::Given(values) => Some((w.name, values)),
            _ => None,
        });
        given.collect()
    }

    #[test]
    fn numbers_that_are_read_while_recording_are_there() {
        let scalar = |name: &str| (name.to_owned(), vec![1.0]);
        let names = [
            (Encoding::Q4KM, "blk.0.layer_output_scale.weight"),
            (Encoding::Mlx4Bit, "model.layers.0.layer_scalar"),
        ];
        for (encoding, name) in names {
            assert_eq!(given(encoding, 1), [scalar(name)]);
        }
        // The sixth layer sees everything: a quarter of its channels rotate.
        let divisors = [vec![1.0; 64], vec![1e30; 192]].concat();
        let mut found = given(Encoding::Q4KM, 6);
        found.retain(|(name, _)| !name.contains("layer_output_scale"));
        assert_eq!(found, [("rope_freqs.weight".to_owned(), divisors)]);
    }

    /// All layers in a format's usual encoding, in others as many as there are kinds of them; rows of a weight of each kind.
    #[test]
    fn every_shape_and_encoding_fits() {
        for shape in SHAPES {
            let gguf = shape.has_gguf();
            for encoding in Encoding::ALL.iter().filter(|encoding| gguf || encoding.format() != Format::Gguf)
            {
                let usual = [Encoding::Q4KM, Encoding::Mlx4Bit].contains(encoding);
                let layers = if usual { shape.layers() } else { shape.layers().min(8) };
                let router_skew = if encoding.is_by_columns() { 0.0 } else { 1.0 };
                let recipe = Recipe { shape: *shape, layers, encoding: *encoding, seed: 0, router_skew };
                let plan = Plan::new(recipe).unwrap();
                let names: HashSet<&str> = plan.weights.iter().map(|w| w.name.as_str()).collect();
                assert_eq!(names.len(), plan.weights.len(), "{}: a name twice", shape.name);
                let mut kinds = HashSet::new();
                let kind = |w: &Weight| (w.name.replace(|c: char| c.is_ascii_digit(), ""), w.dtype);
                for weight in plan.weights.iter().filter(|w| w.is_random() && kinds.insert(kind(w))) {
                    for plane in 0..weight.dtype.planes() {
                        let mut row = vec![0; weight.row_bytes(plane)];
                        weight.fill(plane, weight.plane_rows(plane) - 1, [0; 3], &mut row);
                        assert!(row.iter().any(|byte| *byte != 0), "{weight:?}");
                    }
                }
            }
        }
    }
}
