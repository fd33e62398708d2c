//! The tower of Gemma 4: patches with embeddings of their column and row, blocks with norms before and after, queries and keys
//! normed and rotated by column in one half of a head and by row in the other, and the mean of each block as a soft token,
//! which is normed and projected to the text model's width.
//!
//! Source: transformers `modeling_gemma4.py`; llama.cpp `conversion/gemma.py`.

use std::sync::Arc;

use moeflux_compute::graph::{Activation, Placement, Precision, Rope, RopeStyle, Value};

use super::{PictureForm, Vision};
use crate::checkpoint::{Checkpoint, Format};
use crate::models::blocks::times;
use crate::models::names::Names;
use crate::models::recorder::{Form, Recorder};
use crate::{Error, Result};

const NAMES: Names =
    Names { prefixes: &["model.", ""], top: &["vision_tower.patch_embedder.input_proj"], ..Names::COMMON };

/// What a file says of a tower.
pub(super) struct Described {
    pub form: PictureForm,
    /// Position embeddings of an axis.
    pub positions: usize,
    pub hidden: usize,
    pub intermediate: usize,
    pub depth: usize,
    pub heads: usize,
    pub head_dim: usize,
    /// Base of the rotation.
    pub theta: f64,
    /// Epsilon of all norms.
    pub eps: f32,
    /// Whether inputs and outputs of linear layers are limited.
    pub clips: bool,
    /// Whether soft tokens have a mean taken away and are scaled.
    pub standardizes: bool,
}

/// A tower that is recorded.
struct Tower {
    own: Described,
    /// Where the rotations by column and by row are.
    ropes: [usize; 2],
    gguf: bool,
}

/// Records the tower that a checkpoint, which may be a projector, is described to have.
///
/// # Errors
/// If weights are missing or do not fit.
pub(super) fn record(checkpoint: &Arc<Checkpoint>, own: Described) -> Result<Vision> {
    let mut r = Recorder::new(Arc::clone(checkpoint), &NAMES, None);
    let ropes = [2, 1].map(|axis| r.graph.rotation(rotation(&own, axis)));
    let tower = Tower { own, ropes, gguf: checkpoint.format() == Format::Gguf };
    let Described { hidden, depth, form, eps, .. } = &tower.own;

    r.graph.scope("patch_embedder");
    let rows = r.graph.input_rows(form.patch_width() + hidden);
    let patches = r.graph.slice(rows, 1, 0, form.patch_width())?;
    let place = r.graph.slice(rows, 1, form.patch_width(), *hidden)?;
    let x = embed(&mut r, &tower, patches)?;
    let mut x = r.graph.add(x, place)?;
    let table = tower.top("vision_tower.patch_embedder.position_embedding_table");
    let positions = r.stacked_parameter(&table, [2, tower.own.positions, *hidden])?;
    for layer in 0..*depth {
        x = block(&mut r, &tower, layer, x)?;
    }
    r.graph.scope("pooler");
    let mut h = pool(&mut r, &tower, x)?;
    if tower.own.standardizes {
        let mean = r.constants(&tower.top("vision_tower.std_bias"), &[*hidden], Form::F32)?;
        let scale = r.constants(&tower.top("vision_tower.std_scale"), &[*hidden], Form::F32)?;
        h = r.graph.standardize(h, mean, scale)?;
    }
    r.graph.scope("embed_vision");
    let h = r.graph.unit_norm(h, 1, *eps)?;
    let out = linear(&mut r, h, &tower.top("embed_vision.embedding_projection"), form.hidden_size)?;
    let (encoder, _) = r.finish(out, 0)?;
    Ok(Vision { encoder, form: tower.own.form, positions, class: None })
}

impl Tower {
    /// What the file calls a module or tensor.
    fn top(&self, name: &str) -> String {
        let gguf = match name {
            _ if !self.gguf => return format!("model.{name}"),
            "vision_tower.patch_embedder.input_proj" => "v.patch_embd",
            "vision_tower.patch_embedder.position_embedding_table" => "v.position_embd.weight",
            "vision_tower.std_bias" => "v.std_bias",
            "vision_tower.std_scale" => "v.std_scale",
            _ => "mm.input_projection",
        };
        gguf.to_owned()
    }

    /// What it calls a module of a layer.
    fn layer(&self, layer: usize, name: &str) -> String {
        let gguf = match name {
            _ if !self.gguf => return format!("model.vision_tower.encoder.layers.{layer}.{name}"),
            "input_layernorm" => "ln1",
            "post_attention_layernorm" => "attn_post_norm",
            "pre_feedforward_layernorm" => "ln2",
            "post_feedforward_layernorm" => "ffn_post_norm",
            "self_attn.q_proj" => "attn_q",
            "self_attn.k_proj" => "attn_k",
            "self_attn.v_proj" => "attn_v",
            "self_attn.o_proj" => "attn_out",
            "self_attn.q_norm" => "attn_q_norm",
            "self_attn.k_norm" => "attn_k_norm",
            "mlp.gate_proj" => "ffn_gate",
            "mlp.up_proj" => "ffn_up",
            _ => "ffn_down",
        };
        format!("v.blk.{layer}.{gguf}")
    }
}

/// Half of a head's channels by the position on `axis`: the first half of those with the others.
fn rotation(own: &Described, axis: u8) -> Rope {
    let pairs = own.head_dim / 4;
    let frequency = |i: usize| 1.0 / (own.theta as f32).powf((2 * i) as f32 / (2 * pairs) as f32);
    let inv_freq = (0..pairs).map(frequency).collect();
    Rope { style: RopeStyle::HalfSplit, inv_freq, magnitude: 1.0, axes: vec![axis; pairs] }
}

fn linear(r: &mut Recorder, x: Value, module: &str, rows: usize) -> Result<Value> {
    let weight = r.matrix(module, Some(rows), x.width())?;
    Ok(r.graph.linear(x, weight, None, Precision::Fast)?)
}

/// Patches as the tower's channels; GGUF files store that as the kernel of a convolution.
fn embed(r: &mut Recorder, tower: &Tower, patches: Value) -> Result<Value> {
    let (module, hidden) = (tower.top("vision_tower.patch_embedder.input_proj"), tower.own.hidden);
    if !tower.gguf {
        return linear(r, patches, &module, hidden);
    }
    let kernel = r.kernel(&module, "weight", hidden, &tower.own.form.patch_shape())?;
    Ok(r.graph.linear(patches, kernel, None, Precision::Fast)?)
}

/// A layer's linear layer, of which inputs and outputs may be limited.
fn clippable(r: &mut Recorder, tower: &Tower, x: Value, module: &str, rows: usize) -> Result<Value> {
    let x = clipped(r, tower, x, &format!("{module}.input"))?;
    let weight = if tower.gguf { module.to_owned() } else { format!("{module}.linear") };
    let out = linear(r, x, &weight, rows)?;
    clipped(r, tower, out, &format!("{module}.output"))
}

fn clipped(r: &mut Recorder, tower: &Tower, x: Value, name: &str) -> Result<Value> {
    if !tower.own.clips {
        return Ok(x);
    }
    let limit = |name: &str, none: f32| match tower.gguf && !r.has_parameter(name) {
        true => Ok(none),
        false => r.limit(name),
    };
    let least = limit(&format!("{name}_min"), f32::NEG_INFINITY)?;
    let limits = [least, limit(&format!("{name}_max"), f32::INFINITY)?];
    if limits[0] > limits[1] {
        return Err(Error::Tensor {
            path: r.path().into(),
            tensor: format!("{name}_max"),
            expected: format!("at least {}, the least value", limits[0]),
            got: limits[1].to_string(),
        });
    }
    let none = limits == [f32::NEG_INFINITY, f32::INFINITY];
    Ok(if none { x } else { r.graph.clamp_between(x, limits) })
}

/// Norm, attention, norm, residual; norm, MLP, norm, residual.
fn block(r: &mut Recorder, tower: &Tower, layer: usize, x: Value) -> Result<Value> {
    let Described { hidden, intermediate, heads, head_dim, eps, .. } = tower.own;
    let module = |name: &str| tower.layer(layer, name);
    let norm = |r: &mut Recorder, x, name: &str| r.rms_norm(x, &module(name), 1, eps);
    r.graph.scope(format!("layers.{layer}.attn"));
    let h = norm(r, x, "input_layernorm")?;
    let project = |r: &mut Recorder, name: &str| {
        clippable(r, tower, h, &module(&format!("self_attn.{name}")), heads * head_dim)
    };
    let [q, k, v] = [project(r, "q_proj")?, project(r, "k_proj")?, project(r, "v_proj")?];
    let rotated = |r: &mut Recorder, x: Value, name: &str| -> Result<Value> {
        let mut x = r.rms_norm(x, &module(&format!("self_attn.{name}")), heads, eps)?;
        for (half, rope) in tower.ropes.into_iter().enumerate() {
            let place = Placement { first: half * head_dim / 2, ..Placement::default() };
            x = r.graph.placed_rope(x, heads, rope, place)?;
        }
        Ok(x)
    };
    let (q, k) = (rotated(r, q, "q_norm")?, rotated(r, k, "k_norm")?);
    let v = r.graph.unit_norm(v, heads, eps)?;
    let mixed = r.graph.bidirectional_attention([q, k, v], heads, 1.0)?;
    let out = clippable(r, tower, mixed, &module("self_attn.o_proj"), hidden)?;
    let out = norm(r, out, "post_attention_layernorm")?;
    let x = r.graph.add(x, out)?;
    r.graph.scope(format!("layers.{layer}.mlp"));
    let h = norm(r, x, "pre_feedforward_layernorm")?;
    let gate = clippable(r, tower, h, &module("mlp.gate_proj"), intermediate)?;
    let up = clippable(r, tower, h, &module("mlp.up_proj"), intermediate)?;
    let h = r.graph.activate(Activation::GeGlu, Some(gate), up)?;
    let out = clippable(r, tower, h, &module("mlp.down_proj"), hidden)?;
    let out = norm(r, out, "post_feedforward_layernorm")?;
    Ok(r.graph.add(x, out)?)
}

/// The mean of each block, times the root of its width: (outputs, hidden).
fn pool(r: &mut Recorder, tower: &Tower, x: Value) -> Result<Value> {
    let (hidden, side) = (tower.own.hidden, tower.own.form.merge_size);
    let patches = side * side;
    let x = times(r, x, (hidden as f32).sqrt() / patches as f32);
    let all = r.graph.block_rows(x, patches);
    let blocks = r.graph.gather_rows(all);
    let mut sum = r.graph.slice(blocks, 1, 0, hidden)?;
    for patch in 1..patches {
        let next = r.graph.slice(blocks, 1, patch * hidden, hidden)?;
        sum = r.graph.add(sum, next)?;
    }
    Ok(sum)
}
