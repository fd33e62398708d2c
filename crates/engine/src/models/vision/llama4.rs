//! The tower of Llama 4: the patches of a tile with a row for all of it, learned position embeddings, queries and keys rotated by
//! column and row, and blocks of patches that an adapter and a projector make tokens of. A tile sees itself only.
//!
//! Source: transformers `modeling_llama4.py`; llama.cpp `conversion/llama4.py`.

use std::sync::Arc;

use moeflux_compute::graph::{Gelu, Precision, Rope, RopeStyle, Value};

use super::{PictureForm, TileTokens, Vision};
use crate::Result;
use crate::checkpoint::{Checkpoint, Format};
use crate::models::names::Names;
use crate::models::recorder::{Form, Recorder};

const NAMES: Names =
    Names { prefixes: &["", "model."], top: &["vision_model.patch_embedding.linear"], ..Names::COMMON };

/// Epsilon of all norms; the configuration's is not looked at by transformers.
const EPS: f32 = 1e-5;

/// What a file says of a tower.
pub(super) struct Described {
    pub form: PictureForm,
    /// Position embeddings: of all patches of a tile, then of the row for all of it.
    pub positions: usize,
    pub hidden: usize,
    pub intermediate: usize,
    pub depth: usize,
    pub heads: usize,
    /// Width within the adapter and of what it makes.
    pub projected: usize,
    /// Base of the rotation.
    pub theta: f64,
}

/// The tokens around tiles, of a vocabulary that has an id for each name.
///
/// # Errors
/// Those of `id`.
pub(super) fn tile_tokens(id: impl Fn(&str) -> Result<u32>) -> Result<TileTokens> {
    Ok(TileTokens {
        start: id("<|image_start|>")?,
        between_columns: id("<|tile_x_separator|>")?,
        after_row: id("<|tile_y_separator|>")?,
        whole: id("<|image|>")?,
        end: id("<|image_end|>")?,
    })
}

/// A tower that is recorded.
struct Tower {
    own: Described,
    /// Where its rotation is.
    rope: usize,
    gguf: bool,
    /// What GGUF files call the norm before an MLP.
    gguf_norm: &'static str,
}

/// Records the tower that a checkpoint, which may be a projector, is described to have.
///
/// # Errors
/// If weights are missing or do not fit.
pub(super) fn record(checkpoint: &Arc<Checkpoint>, own: Described) -> Result<Vision> {
    let mut r = Recorder::new(Arc::clone(checkpoint), &NAMES, None);
    let rope = r.graph.rotation(rotation(&own));
    let gguf_norm = if checkpoint.contains("v.blk.0.ln2.weight") { "ln2" } else { "attn_post_norm" };
    let tower = Tower { own, rope, gguf: checkpoint.format() == Format::Gguf, gguf_norm };
    let Described { hidden, projected, form, .. } = &tower.own;
    let module = |name: &str| tower.top(name);

    r.graph.scope("patch_embedding");
    let rows = r.graph.input_rows(form.patch_width() + hidden);
    let patches = r.graph.slice(rows, 1, 0, form.patch_width())?;
    let place = r.graph.slice(rows, 1, form.patch_width(), *hidden)?;
    let x = linear(&mut r, patches, &module("patch_embedding.linear"), *hidden)?;
    let x = r.graph.add(x, place)?;
    let positions = r.parameter(&module("positional_embedding_vlm"), tower.own.positions, *hidden)?;
    let class = r.constants(&module("class_embedding"), &[*hidden], Form::F32)?;
    let mut x = layer_norm(&mut r, x, &module("layernorm_pre"))?;
    for layer in 0..tower.own.depth {
        x = block(&mut r, &tower, layer, x)?;
    }
    r.graph.scope("vision_adapter");
    let x = layer_norm(&mut r, x, &module("layernorm_post"))?;
    let all = r.graph.block_rows(x, form.merge_size * form.merge_size);
    let mut h = r.graph.gather_rows(all);
    for name in ["vision_adapter.mlp.fc1", "vision_adapter.mlp.fc2"] {
        h = linear(&mut r, h, &module(name), *projected)?;
        h = r.graph.gelu(h, Gelu::Erf);
    }
    r.graph.scope("multi_modal_projector");
    let out = linear(&mut r, h, &module("multi_modal_projector.linear_1"), form.hidden_size)?;
    let (encoder, _) = r.finish(out, 0)?;
    Ok(Vision { encoder, form: tower.own.form, positions, class: Some(class) })
}

impl Tower {
    /// What the file calls a module or tensor.
    fn top(&self, name: &str) -> String {
        let gguf = match name {
            "multi_modal_projector.linear_1" if !self.gguf => return format!("model.{name}"),
            _ if !self.gguf => return format!("model.vision_model.{name}"),
            "patch_embedding.linear" => "v.patch_embd",
            "positional_embedding_vlm" => "v.position_embd.weight",
            "class_embedding" => "v.class_embd",
            "layernorm_pre" => "v.pre_ln",
            "layernorm_post" => "v.post_ln",
            "vision_adapter.mlp.fc1" => "mm.model.mlp.1",
            "vision_adapter.mlp.fc2" => "mm.model.mlp.2",
            _ => "mm.model.fc",
        };
        gguf.to_owned()
    }

    /// What it calls a module of a layer.
    fn layer(&self, layer: usize, name: &str) -> String {
        let gguf = match name {
            _ if !self.gguf => return format!("model.vision_model.model.layers.{layer}.{name}"),
            "input_layernorm" => "ln1",
            "post_attention_layernorm" => self.gguf_norm,
            "self_attn.q_proj" => "attn_q",
            "self_attn.k_proj" => "attn_k",
            "self_attn.v_proj" => "attn_v",
            "self_attn.o_proj" => "attn_out",
            "mlp.fc1" => "ffn_up",
            _ => "ffn_down",
        };
        format!("v.blk.{layer}.{gguf}")
    }
}

/// The first half of a head's pairs by column, the other by row.
fn rotation(own: &Described) -> Rope {
    let quarter = own.hidden / own.heads / 4;
    let frequency = |i: usize| 1.0 / (own.theta as f32).powf((2 * i) as f32 / (2 * quarter) as f32);
    let inv_freq = (0..2 * quarter).map(|i| frequency(i % quarter)).collect();
    let axes = (0..2 * quarter).map(|i| if i < quarter { 2 } else { 1 }).collect();
    Rope { style: RopeStyle::Interleaved, inv_freq, magnitude: 1.0, axes }
}

fn layer_norm(r: &mut Recorder, x: Value, module: &str) -> Result<Value> {
    let weight = r.vector(module, "weight", x.width())?;
    let bias = r.vector(module, "bias", x.width())?;
    Ok(r.graph.layer_norm(x, weight, bias, EPS)?)
}

fn linear(r: &mut Recorder, x: Value, module: &str, rows: usize) -> Result<Value> {
    let weight = r.matrix(module, Some(rows), x.width())?;
    Ok(r.graph.linear(x, weight, None, Precision::Fast)?)
}

fn biased(r: &mut Recorder, x: Value, module: &str, rows: usize) -> Result<Value> {
    let weight = r.matrix(module, Some(rows), x.width())?;
    let bias = r.vector(module, "bias", rows)?;
    Ok(r.graph.linear(x, weight, Some(bias), Precision::Fast)?)
}

/// Norm, attention, residual, norm, MLP, residual.
fn block(r: &mut Recorder, tower: &Tower, layer: usize, x: Value) -> Result<Value> {
    let Described { hidden, intermediate, heads, .. } = tower.own;
    let module = |name: &str| tower.layer(layer, name);
    r.graph.scope(format!("layers.{layer}.attn"));
    let h = layer_norm(r, x, &module("input_layernorm"))?;
    let project = |r: &mut Recorder, name: &str| biased(r, h, &module(&format!("self_attn.{name}")), hidden);
    let [q, k, v] = [project(r, "q_proj")?, project(r, "k_proj")?, project(r, "v_proj")?];
    let (q, k) = (r.graph.rope(q, heads, tower.rope)?, r.graph.rope(k, heads, tower.rope)?);
    let scale = ((hidden / heads) as f32).sqrt().recip();
    let mixed = r.graph.bidirectional_attention([q, k, v], heads, scale)?;
    let out = biased(r, mixed, &module("self_attn.o_proj"), hidden)?;
    let x = r.graph.add(x, out)?;
    r.graph.scope(format!("layers.{layer}.mlp"));
    let h = layer_norm(r, x, &module("post_attention_layernorm"))?;
    let h = biased(r, h, &module("mlp.fc1"), intermediate)?;
    let h = r.graph.gelu(h, Gelu::Erf);
    let out = biased(r, h, &module("mlp.fc2"), hidden)?;
    Ok(r.graph.add(x, out)?)
}
