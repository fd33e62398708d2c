//! What configurations of Hugging Face say of Llama 4's tower and of its image processor.
//!
//! Source: transformers `configuration_llama4.py`, `image_processing_llama4.py`, `processing_llama4.py`.

use super::config::Section;
use super::llama4::{Described, tile_tokens};
use super::{Filter, PatchOrder, PictureForm, PixelForm, Sizing, special};
use crate::Result;
use crate::checkpoint::Checkpoint;

/// What the configuration of `checkpoint` says of the tower.
///
/// # Errors
/// [`crate::Error::Config`], and [`crate::Error::Io`] or [`crate::Error::Malformed`] for the image processor's and the
/// tokenizer's.
pub(super) fn describe(checkpoint: &Checkpoint) -> Result<Described> {
    let config = &Section::of_checkpoint(checkpoint);
    let own = &config.within("vision_config")?;
    let size = |key: &str, default: usize| Ok::<_, crate::Error>(own.optional_size(key)?.unwrap_or(default));
    let (hidden, heads) = (size("hidden_size", 768)?, size("num_attention_heads", 16)?);
    if !hidden.is_multiple_of(heads) || !(hidden / heads).is_multiple_of(4) {
        let expected = format!("heads of a multiple of 4 of the {hidden} channels");
        return Err(own.unsupported("num_attention_heads", &expected));
    }
    if own.word("hidden_act")?.is_some_and(|name| name != "gelu") {
        return Err(own.unsupported("hidden_act", "gelu"));
    }
    if size("num_channels", 3)? != 3 {
        return Err(own.unsupported("num_channels", "3"));
    }
    own.must_not("multi_modal_projector_bias")?;
    let rope = own.within_or_empty("rope_parameters")?;
    if rope.word("rope_type")?.is_some_and(|kind| kind != "axial" && kind != "default") {
        return Err(rope.unsupported("rope_type", "default"));
    }
    let theta = rope.number("rope_theta")?.or(own.number("rope_theta")?).unwrap_or(10_000.0);
    if theta <= 1.0 {
        return Err(rope.unsupported("rope_theta", "a number above 1"));
    }
    let form = form(checkpoint, config, own)?;
    let intermediate = size("intermediate_size", 5632)?;
    let block = hidden * form.merge_size * form.merge_size;
    if intermediate != block {
        let expected = format!("{block}, the channels of a block, which the adapter takes");
        return Err(own.unsupported("intermediate_size", &expected));
    }
    let projected = size("projector_output_dim", 4096)?;
    for (key, default) in [("projector_input_dim", 4096), ("vision_output_dim", 7680)] {
        if size(key, default)? != projected {
            return Err(own.unsupported(key, &format!("{projected}, as projector_output_dim")));
        }
    }
    let side = size("image_size", 448)? / form.patch_size;
    let depth = size("num_hidden_layers", 34)?;
    Ok(Described { positions: side * side + 1, form, hidden, intermediate, depth, heads, projected, theta })
}

/// Patches of a block's side, by the ratio of sides that pixel shuffling leaves.
fn merge_size(own: &Section) -> Result<usize> {
    let key = "pixel_shuffle_ratio";
    let ratio = own.number(key)?.unwrap_or(0.5);
    let side = (1.0 / ratio).round();
    if !(1.0..=1024.0).contains(&side) || (side * ratio - 1.0).abs() > 1e-9 {
        return Err(own.unsupported(key, "1 divided by a whole number"));
    }
    Ok(side as usize)
}

fn form(checkpoint: &Checkpoint, config: &Section, own: &Section) -> Result<PictureForm> {
    let processor = Section::of_image_processor(checkpoint.path())?;
    for key in ["do_resize", "do_rescale", "do_normalize", "do_convert_rgb"] {
        processor.must(key)?;
    }
    let patch_size = own.optional_size("patch_size")?.unwrap_or(14);
    if patch_size > 1024 {
        return Err(own.unsupported("patch_size", "at most 1024"));
    }
    let merge_size = merge_size(own)?;
    let side = own.optional_size("image_size")?.unwrap_or(448);
    if !side.is_multiple_of(patch_size * merge_size) || side > 1 << 14 {
        let expected = format!("a multiple of a block's {} pixels", patch_size * merge_size);
        return Err(own.unsupported("image_size", &expected));
    }
    let size = processor.within_or_empty("size")?;
    for key in ["height", "width"] {
        if size.optional_size(key)?.unwrap_or(336) != side {
            return Err(size.unsupported(key, &format!("the tower's {side}")));
        }
    }
    let max_tiles = processor.optional_size("max_patches")?.unwrap_or(16);
    if max_tiles > 4096 {
        return Err(processor.unsupported("max_patches", "at most 4096"));
    }
    let (mean, std) = processor.mean_and_std([0.5; 3], [0.5; 3])?;
    let patch = special(checkpoint, "<|patch|>")?;
    if config.token("image_token_index")?.or(config.token("image_token_id")?).unwrap_or(200_092) != patch {
        return Err(config.unsupported("image_token_index", &format!("{patch}, which is <|patch|>")));
    }
    let tokens = tile_tokens(|name| special(checkpoint, name))?;
    let to_max_canvas = processor.flag("resize_to_max_canvas", false)?;
    Ok(PictureForm {
        patch_size,
        order: PatchOrder::ChannelsFirst { frames: 1 },
        merge_size,
        sizing: Sizing::Tiles { side, max_tiles, to_max_canvas, tokens },
        filter: processor.filter(Filter::Bilinear)?,
        pixels: PixelForm::NormalisedInBf16 {
            factor: processor.number("rescale_factor")?.unwrap_or(1.0 / 255.0),
            mean,
            std,
        },
        placeholder: tokens.whole,
        stand_in: 0,
        centres: false,
        levels: 1,
        hidden_size: config.within("text_config")?.optional_size("hidden_size")?.unwrap_or(5120),
    })
}
