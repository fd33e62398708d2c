//! The tower of Qwen3-VL: patches of two frames, learned position embeddings resampled to the picture's grid, rotary
//! embedding by row and column, attention of all patches to all, and blocks of patches merged into tokens; the output of
//! a few layers goes to the text model's first layers (DeepStack, Meng et al. 2024). That of Qwen3.5 is the same without
//! DeepStack.
//!
//! Source: transformers `modeling_qwen3_vl_moe.py`, `modeling_qwen3_5_moe.py`, `image_processing_qwen2_vl.py`.

use std::sync::Arc;

use moeflux_compute::graph::{Gelu, Precision, Rope, RopeStyle, Value, WeightId};

use super::config::Section;
use super::{PictureForm, Vision};
use crate::Result;
use crate::checkpoint::Checkpoint;
use crate::models::names::Names;
use crate::models::recorder::Recorder;

/// Names of the tower's modules: what the text model calls `model.` is `model.visual.` here.
const NAMES: Names =
    Names { prefixes: &["model.visual.", "visual."], top: &["patch_embed.proj"], ..Names::COMMON };

/// Epsilon of all norms.
const EPS: f32 = 1e-6;

/// Sizes of the tower.
struct Tower {
    hidden: usize,
    heads: usize,
    intermediate: usize,
    depth: usize,
    /// Patches of a block.
    block: usize,
    out: usize,
    gelu: Gelu,
    rope: usize,
    /// Layers whose output goes to the text model.
    deepstack: Vec<usize>,
}

/// What differs between the families.
struct Kind {
    /// Layers whose output goes to the text model, where the configuration does not say; `None` if none may.
    deepstack: Option<&'static [usize]>,
    /// The token that stands for a picture, where the configuration does not say.
    placeholder: usize,
}

/// Records the tower of Qwen3-VL-MoE.
///
/// # Errors
/// If configuration or weights are missing or do not fit.
pub(super) fn record(checkpoint: &Arc<Checkpoint>, config: &Section) -> Result<Vision> {
    record_kind(checkpoint, config, &Kind { deepstack: Some(&[8, 16, 24]), placeholder: 151_655 })
}

/// Records the tower of Qwen3.5-MoE.
///
/// # Errors
/// As [`record`].
pub(super) fn record_qwen3_5(checkpoint: &Arc<Checkpoint>, config: &Section) -> Result<Vision> {
    record_kind(checkpoint, config, &Kind { deepstack: None, placeholder: 248_056 })
}

fn record_kind(checkpoint: &Arc<Checkpoint>, config: &Section, kind: &Kind) -> Result<Vision> {
    let own = config.within("vision_config")?;
    let deepstack = deepstack(&own, kind)?;
    let form = form(checkpoint, config, &own, (kind, deepstack.len()))?;
    let mut r = Recorder::new(Arc::clone(checkpoint), &NAMES, None);
    let tower = tower(&mut r, &own, &form, deepstack)?;
    let hidden = tower.hidden;

    r.graph.scope("patch_embed");
    let rows = r.graph.input_rows(form.patch_width() + hidden);
    let patches = r.graph.slice(rows, 1, 0, form.patch_width())?;
    let place = r.graph.slice(rows, 1, form.patch_width(), hidden)?;
    let kernel = r.kernel("model.patch_embed.proj", hidden, form.patch_width())?;
    let bias = r.vector("model.patch_embed.proj", "bias", hidden)?;
    let x = r.graph.linear(patches, kernel, Some(bias), Precision::Fast)?;
    let positions = r.matrix("model.pos_embed", Some(form.grid_side * form.grid_side), hidden)?;
    let mut x = r.graph.add(x, place)?;
    let mut levels = vec![];
    for layer in 0..tower.depth {
        x = block(&mut r, &tower, layer, x)?;
        if let Some(index) = tower.deepstack.iter().position(|own| *own == layer) {
            r.graph.scope(format!("deepstack.{index}"));
            let blocks = blocks(&mut r, &tower, x);
            let module = format!("model.deepstack_merger_list.{index}");
            let h = layer_norm(&mut r, blocks, &format!("{module}.norm"))?;
            levels.push(merge(&mut r, &tower, h, &module)?);
        }
    }
    r.graph.scope("merger");
    let h = layer_norm(&mut r, x, "model.merger.norm")?;
    let h = blocks(&mut r, &tower, h);
    let mut out = merge(&mut r, &tower, h, "model.merger")?;
    for level in levels {
        out = r.graph.join(out, level);
    }
    let (encoder, _) = r.finish(out, 0)?;
    Ok(Vision { encoder, form, positions })
}

fn tower(r: &mut Recorder, own: &Section, form: &PictureForm, deepstack: Vec<usize>) -> Result<Tower> {
    let (hidden, heads) = (own.size("hidden_size")?, own.size("num_heads")?);
    let (depth, merge) = (own.size("depth")?, form.merge_size);
    if !hidden.is_multiple_of(heads) || !(hidden / heads).is_multiple_of(4) {
        return Err(
            own.unsupported("num_heads", &format!("heads of a multiple of 4 of the {hidden} channels"))
        );
    }
    let gelu = match own.word("hidden_act")?.as_deref() {
        None | Some("gelu_pytorch_tanh") => Gelu::Tanh,
        Some("gelu") => Gelu::Erf,
        Some(_) => return Err(own.unsupported("hidden_act", "gelu_pytorch_tanh or gelu")),
    };
    if let Some(layer) = deepstack.iter().find(|layer| **layer >= depth) {
        let expected = format!("layers below {depth}, not {layer}");
        return Err(own.unsupported("deepstack_visual_indexes", &expected));
    }
    let rope = own.within_or_empty("rope_parameters")?;
    if rope.word("rope_type")?.is_some_and(|kind| kind != "axial" && kind != "default") {
        return Err(rope.unsupported("rope_type", "axial"));
    }
    let theta = rope.number("rope_theta")?.unwrap_or(10_000.0);
    if theta <= 1.0 {
        return Err(rope.unsupported("rope_theta", "a number above 1"));
    }
    // A quarter of a head's channels by row, the next by column; the other half are their partners.
    let quarter = hidden / heads / 4;
    let frequency = |i: usize| 1.0 / (theta as f32).powf((2 * i) as f32 / (2 * quarter) as f32);
    let inv_freq = (0..2 * quarter).map(|i| frequency(i % quarter)).collect();
    let axes = (0..2 * quarter).map(|i| if i < quarter { 1 } else { 2 }).collect();
    let rope = r.graph.rotation(Rope { style: RopeStyle::HalfSplit, inv_freq, magnitude: 1.0, axes });
    let (intermediate, out) = (own.size("intermediate_size")?, own.size("out_hidden_size")?);
    Ok(Tower { hidden, heads, intermediate, depth, block: merge * merge, out, gelu, rope, deepstack })
}

/// The layers whose output goes to the text model.
fn deepstack(own: &Section, kind: &Kind) -> Result<Vec<usize>> {
    let key = "deepstack_visual_indexes";
    let given = own.sizes(key)?;
    match kind.deepstack {
        Some(default) => Ok(given.unwrap_or_else(|| default.to_vec())),
        None if given.is_some_and(|layers| !layers.is_empty()) => Err(own.unsupported(key, "no layers")),
        None => Ok(vec![]),
    }
}

fn form(
    checkpoint: &Arc<Checkpoint>,
    config: &Section,
    own: &Section,
    (kind, levels): (&Kind, usize),
) -> Result<PictureForm> {
    let processor = Section::of_image_processor(checkpoint.path())?;
    let table = own.optional_size("num_position_embeddings")?.unwrap_or(2304);
    let grid_side = table.isqrt();
    if grid_side * grid_side != table {
        return Err(own.unsupported("num_position_embeddings", "a square number"));
    }
    if own.optional_size("in_channels")?.unwrap_or(3) != 3 {
        return Err(own.unsupported("in_channels", "3"));
    }
    for key in ["do_resize", "do_rescale", "do_normalize", "do_convert_rgb"] {
        processor.must(key)?;
    }
    if processor.number("resample")?.is_some_and(|filter| filter != 3.0) {
        return Err(processor.unsupported("resample", "3, bicubic"));
    }
    let sides = [("patch_size", 16, "patch_size"), ("temporal_patch_size", 2, "temporal_patch_size")];
    let sides = [sides[0], sides[1], ("spatial_merge_size", 2, "merge_size")];
    let mut sizes = [0; 3];
    for (size, (key, default, given)) in sizes.iter_mut().zip(sides) {
        *size = own.optional_size(key)?.unwrap_or(default);
        if processor.optional_size(given)?.is_some_and(|other| other != *size) {
            return Err(processor.unsupported(given, &format!("the tower's {size}")));
        }
        if *size > 1024 {
            return Err(own.unsupported(key, "at most 1024"));
        }
    }
    let size = processor.within_or_empty("size")?;
    let edge = |key: &str, older: &str| match size.optional_size(key)? {
        Some(pixels) => Ok(pixels),
        None => match processor.optional_size(older)? {
            Some(pixels) => Ok(pixels),
            None => Err(size.unsupported(key, "a number of pixels")),
        },
    };
    let image_std = processor.three("image_std")?;
    if image_std.iter().any(|std| *std <= 0.0) {
        return Err(processor.unsupported("image_std", "numbers above 0"));
    }
    let placeholder = config.optional_size("image_token_id")?.unwrap_or(kind.placeholder);
    Ok(PictureForm {
        patch_size: sizes[0],
        temporal_patch_size: sizes[1],
        merge_size: sizes[2],
        grid_side,
        rescale_factor: processor.number("rescale_factor")?.unwrap_or(1.0 / 255.0),
        image_mean: processor.three("image_mean")?,
        image_std,
        min_pixels: edge("shortest_edge", "min_pixels")?,
        max_pixels: edge("longest_edge", "max_pixels")?,
        placeholder: u32::try_from(placeholder)
            .map_err(|_| config.unsupported("image_token_id", "a token id"))?,
        levels: 1 + levels,
        hidden_size: own.size("out_hidden_size")?,
    })
}

fn layer_norm(r: &mut Recorder, x: Value, module: &str) -> Result<Value> {
    let weight = r.vector(module, "weight", x.width())?;
    let bias = r.vector(module, "bias", x.width())?;
    Ok(r.graph.layer_norm(x, weight, bias, EPS)?)
}

fn linear(r: &mut Recorder, x: Value, module: &str, rows: usize) -> Result<Value> {
    let weight: WeightId = r.matrix(module, Some(rows), x.width())?;
    let bias = r.vector(module, "bias", rows)?;
    Ok(r.graph.linear(x, weight, Some(bias), Precision::Fast)?)
}

/// Norm, attention, residual, norm, MLP, residual.
fn block(r: &mut Recorder, tower: &Tower, layer: usize, x: Value) -> Result<Value> {
    let Tower { hidden, heads, intermediate, gelu, rope, .. } = *tower;
    let module = |name: &str| format!("model.blocks.{layer}.{name}");
    r.graph.scope(format!("layers.{layer}.attn"));
    let h = layer_norm(r, x, &module("norm1"))?;
    let mut part = |index: usize| {
        let rows = index * hidden..(index + 1) * hidden;
        r.linear_part(h, &module("attn.qkv"), 3 * hidden, &[rows], Precision::Fast)
    };
    let [q, k, v] = [part(0)?, part(1)?, part(2)?];
    let (q, k) = (r.graph.rope(q, heads, rope)?, r.graph.rope(k, heads, rope)?);
    let scale = ((hidden / heads) as f32).sqrt().recip();
    let mixed = r.graph.bidirectional_attention([q, k, v], heads, scale)?;
    let mixed = linear(r, mixed, &module("attn.proj"), hidden)?;
    let x = r.graph.add(x, mixed)?;
    r.graph.scope(format!("layers.{layer}.mlp"));
    let h = layer_norm(r, x, &module("norm2"))?;
    let h = linear(r, h, &module("mlp.linear_fc1"), intermediate)?;
    let h = r.graph.gelu(h, gelu);
    let h = linear(r, h, &module("mlp.linear_fc2"), hidden)?;
    Ok(r.graph.add(x, h)?)
}

/// A row for each block: (outputs, block · hidden).
fn blocks(r: &mut Recorder, tower: &Tower, x: Value) -> Value {
    let all = r.graph.block_rows(x, tower.block);
    r.graph.gather_rows(all)
}

/// The MLP that makes a token of a block: (outputs, out).
fn merge(r: &mut Recorder, tower: &Tower, h: Value, module: &str) -> Result<Value> {
    let h = linear(r, h, &format!("{module}.linear_fc1"), h.width())?;
    let h = r.graph.gelu(h, Gelu::Erf);
    linear(r, h, &format!("{module}.linear_fc2"), tower.out)
}
