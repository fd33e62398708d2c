//! The tower of Qwen3-VL: patches of two frames, learned position embeddings resampled to the picture's grid, rotary
//! embedding by row and column, attention of all patches to all, and blocks of patches merged into tokens; the output of
//! a few layers goes to the text model's first layers (DeepStack, Meng et al. 2024). That of Qwen3.5 is the same without
//! DeepStack.
//!
//! GGUF projectors (`qwen3vl_merger`) have a kernel for each of the two frames. A picture stands still: its patches are the
//! same in both. MLX folders have the tower as `vision_tower` and the kernel's channels last.
//!
//! Source: transformers `modeling_qwen3_vl_moe.py`, `modeling_qwen3_5_moe.py`; llama.cpp `conversion/qwen3vl.py`.

use std::sync::Arc;

use moeflux_compute::graph::{Gelu, Precision, Rope, RopeStyle, Value, WeightId};

use super::{PictureForm, Vision};
use crate::Result;
use crate::checkpoint::{Checkpoint, Format};
use crate::models::names::Names;
use crate::models::recorder::Recorder;

/// Names of the tower's modules: what the text model calls `model.` is `model.visual.` here.
const NAMES: Names = Names {
    prefixes: &["model.visual.", "visual.", "vision_tower."],
    top: &["patch_embed.proj"],
    ..Names::COMMON
};

/// What a file says of a tower.
pub(super) struct Described {
    pub form: PictureForm,
    /// Position embeddings.
    pub positions: usize,
    pub hidden: usize,
    pub heads: usize,
    pub intermediate: usize,
    pub depth: usize,
    pub gelu: Gelu,
    /// Base of the rotation.
    pub theta: f64,
    /// Epsilon of all norms.
    pub eps: f32,
    /// Layers whose output goes to the text model.
    pub deepstack: Vec<usize>,
}

/// A tower that is recorded.
struct Tower {
    own: Described,
    /// Where its rotation is.
    rope: usize,
    gguf: bool,
}

/// Records the tower that a checkpoint, which may be a projector, is described to have.
///
/// # Errors
/// If weights are missing or do not fit.
pub(super) fn record(checkpoint: &Arc<Checkpoint>, own: Described) -> Result<Vision> {
    let mut r = Recorder::new(Arc::clone(checkpoint), &NAMES, None);
    let rope = r.graph.rotation(rotation(&own));
    let tower = Tower { own, rope, gguf: checkpoint.format() == Format::Gguf };
    let Described { hidden, depth, form, deepstack, .. } = &tower.own;

    r.graph.scope("patch_embed");
    let rows = r.graph.input_rows(form.patch_width() + hidden);
    let patches = r.graph.slice(rows, 1, 0, form.patch_width())?;
    let place = r.graph.slice(rows, 1, form.patch_width(), *hidden)?;
    let module = tower.top("patch_embed.proj");
    let kernel = r.kernel(&module, "weight", *hidden, &form.patch_shape())?;
    let bias = r.vector(&module, "bias", *hidden)?;
    let mut x = r.graph.linear(patches, kernel, Some(bias), Precision::Fast)?;
    if tower.gguf {
        let kernel = r.kernel(&module, "weight.1", *hidden, &form.patch_shape())?;
        let second = r.graph.linear(patches, kernel, None, Precision::Fast)?;
        x = r.graph.add(x, second)?;
    }
    let table = r.matrix(&tower.top("pos_embed"), Some(tower.own.positions), *hidden)?;
    x = r.graph.add(x, place)?;
    let mut levels = vec![];
    for layer in 0..*depth {
        x = block(&mut r, &tower, layer, x)?;
        if let Some(index) = deepstack.iter().position(|own| *own == layer) {
            r.graph.scope(format!("deepstack.{index}"));
            let blocks = blocks(&mut r, &tower, x);
            let module = |name: &str| tower.deepstack(index, layer, name);
            let h = layer_norm(&mut r, &tower, blocks, &module("norm"))?;
            levels.push(merge(&mut r, &tower, h, module)?);
        }
    }
    r.graph.scope("merger");
    let h = layer_norm(&mut r, &tower, x, &tower.top("merger.norm"))?;
    let h = blocks(&mut r, &tower, h);
    let mut out = merge(&mut r, &tower, h, |name| tower.top(&format!("merger.{name}")))?;
    for level in levels {
        out = r.graph.join(out, level);
    }
    let (encoder, _) = r.finish(out, 0)?;
    Ok(Vision { encoder, form: tower.own.form, positions: table, class: None })
}

/// A quarter of a head's channels by row, the next by column; the other half are their partners.
fn rotation(own: &Described) -> Rope {
    let quarter = own.hidden / own.heads / 4;
    let frequency = |i: usize| 1.0 / (own.theta as f32).powf((2 * i) as f32 / (2 * quarter) as f32);
    let inv_freq = (0..2 * quarter).map(|i| frequency(i % quarter)).collect();
    let axes = (0..2 * quarter).map(|i| if i < quarter { 1 } else { 2 }).collect();
    Rope { style: RopeStyle::HalfSplit, inv_freq, magnitude: 1.0, axes }
}

impl Tower {
    /// What the file calls a module.
    fn top(&self, name: &str) -> String {
        let gguf = match name {
            _ if !self.gguf => return format!("model.{name}"),
            "patch_embed.proj" => "v.patch_embd",
            "pos_embed" => "v.position_embd",
            "merger.norm" => "v.post_ln",
            "merger.linear_fc1" => "mm.0",
            _ => "mm.2",
        };
        gguf.to_owned()
    }

    /// What it calls a module of a layer.
    fn layer(&self, layer: usize, name: &str) -> String {
        let gguf = match name {
            _ if !self.gguf => return format!("model.blocks.{layer}.{name}"),
            "norm1" => "ln1",
            "norm2" => "ln2",
            "attn.qkv" => "attn_qkv",
            "attn.proj" => "attn_out",
            "mlp.linear_fc1" => "ffn_up",
            _ => "ffn_down",
        };
        format!("v.blk.{layer}.{gguf}")
    }

    /// What it calls a module of the merger of a layer, which is the `index`th that has one.
    fn deepstack(&self, index: usize, layer: usize, name: &str) -> String {
        if self.gguf {
            return format!("v.deepstack.{layer}.{}", name.trim_start_matches("linear_"));
        }
        format!("model.deepstack_merger_list.{index}.{name}")
    }
}

fn layer_norm(r: &mut Recorder, tower: &Tower, x: Value, module: &str) -> Result<Value> {
    let weight = r.vector(module, "weight", x.width())?;
    let bias = r.vector(module, "bias", x.width())?;
    Ok(r.graph.layer_norm(x, weight, bias, tower.own.eps)?)
}

fn linear(r: &mut Recorder, x: Value, module: &str, rows: usize) -> Result<Value> {
    let weight: WeightId = r.matrix(module, Some(rows), x.width())?;
    let bias = r.vector(module, "bias", rows)?;
    Ok(r.graph.linear(x, weight, Some(bias), Precision::Fast)?)
}

/// Norm, attention, residual, norm, MLP, residual.
fn block(r: &mut Recorder, tower: &Tower, layer: usize, x: Value) -> Result<Value> {
    let Described { hidden, heads, intermediate, gelu, .. } = tower.own;
    let module = |name: &str| tower.layer(layer, name);
    r.graph.scope(format!("layers.{layer}.attn"));
    let h = layer_norm(r, tower, x, &module("norm1"))?;
    let mut part = |index: usize| {
        let rows = index * hidden..(index + 1) * hidden;
        r.linear_part(h, &module("attn.qkv"), 3 * hidden, &[rows], Precision::Fast)
    };
    let [q, k, v] = [part(0)?, part(1)?, part(2)?];
    let (q, k) = (r.graph.rope(q, heads, tower.rope)?, r.graph.rope(k, heads, tower.rope)?);
    let scale = ((hidden / heads) as f32).sqrt().recip();
    let mixed = r.graph.bidirectional_attention([q, k, v], heads, scale)?;
    let mixed = linear(r, mixed, &module("attn.proj"), hidden)?;
    let x = r.graph.add(x, mixed)?;
    r.graph.scope(format!("layers.{layer}.mlp"));
    let h = layer_norm(r, tower, x, &module("norm2"))?;
    let h = linear(r, h, &module("mlp.linear_fc1"), intermediate)?;
    let h = r.graph.gelu(h, gelu);
    let h = linear(r, h, &module("mlp.linear_fc2"), hidden)?;
    Ok(r.graph.add(x, h)?)
}

/// A row for each block: (outputs, block · hidden).
fn blocks(r: &mut Recorder, tower: &Tower, x: Value) -> Value {
    let side = tower.own.form.merge_size;
    let all = r.graph.block_rows(x, side * side);
    r.graph.gather_rows(all)
}

/// The MLP that makes a token of a block: (outputs, out).
fn merge(r: &mut Recorder, tower: &Tower, h: Value, module: impl Fn(&str) -> String) -> Result<Value> {
    let h = linear(r, h, &module("linear_fc1"), h.width())?;
    let h = r.graph.gelu(h, Gelu::Erf);
    linear(r, h, &module("linear_fc2"), tower.own.form.hidden_size)
}
