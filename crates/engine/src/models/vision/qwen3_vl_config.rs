//! What configurations of Hugging Face say of Qwen3-VL's tower and of its image processor.
//!
//! Source: transformers `configuration_qwen3_vl_moe.py`, `configuration_qwen3_5_moe.py`, `image_processing_qwen2_vl.py`.

use moeflux_compute::graph::Gelu;

use super::config::Section;
use super::qwen3_vl::Described;
use super::{Filter, Kind, PatchOrder, PictureForm, PixelForm, Sizing};
use crate::Result;
use crate::checkpoint::{Checkpoint, Format};

/// Epsilon of all norms.
const EPS: f32 = 1e-6;

/// What the configuration of `checkpoint` says of the tower of a model of `kind`.
///
/// # Errors
/// [`crate::Error::Config`], and [`crate::Error::Io`] or [`crate::Error::Malformed`] for the image processor's.
pub(super) fn describe(checkpoint: &Checkpoint, config: &Section, kind: &Kind) -> Result<Described> {
    let own = &config.within("vision_config")?;
    let deepstack = deepstack(own, kind)?;
    let form = form(checkpoint, config, own, (kind, deepstack.len()))?;
    let (hidden, heads) = (own.size("hidden_size")?, own.size("num_heads")?);
    let depth = own.size("depth")?;
    if !hidden.is_multiple_of(heads) || !(hidden / heads).is_multiple_of(4) {
        let expected = format!("heads of a multiple of 4 of the {hidden} channels");
        return Err(own.unsupported("num_heads", &expected));
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
    let intermediate = own.size("intermediate_size")?;
    let positions = own.optional_size("num_position_embeddings")?.unwrap_or(2304);
    Ok(Described { form, positions, hidden, heads, intermediate, depth, gelu, theta, eps: EPS, deepstack })
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
    checkpoint: &Checkpoint,
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
        order: match checkpoint.format() {
            Format::Mlx => PatchOrder::ChannelsLast { frames: sizes[1] },
            _ => PatchOrder::ChannelsFirst { frames: sizes[1] },
        },
        merge_size: sizes[2],
        sizing: Sizing::Blocks {
            grid_side,
            min_pixels: edge("shortest_edge", "min_pixels")?,
            max_pixels: edge("longest_edge", "max_pixels")?,
        },
        filter: Filter::Bicubic,
        pixels: PixelForm::Normalised {
            factor: processor.number("rescale_factor")?.unwrap_or(1.0 / 255.0),
            mean: processor.three("image_mean")?,
            std: image_std,
        },
        stand_in: 0,
        placeholder: u32::try_from(placeholder)
            .map_err(|_| config.unsupported("image_token_id", "a token id"))?,
        centres: false,
        levels: 1 + levels,
        hidden_size: own.size("out_hidden_size")?,
    })
}
