//! What configurations of Hugging Face say of Gemma 4's tower and of its image processor.
//!
//! Source: transformers `configuration_gemma4.py`, `image_processing_gemma4.py`.

use super::config::Section;
use super::gemma4::Described;
use super::{Filter, PatchOrder, PictureForm, PixelForm, Sizing};
use crate::Result;
use crate::checkpoint::Checkpoint;

/// Tokens that pictures may be given, at most.
const SOFT_TOKENS: [usize; 5] = [70, 140, 280, 560, 1120];

/// What the configuration of `checkpoint` says of the tower.
///
/// # Errors
/// [`crate::Error::Config`], and [`crate::Error::Io`] or [`crate::Error::Malformed`] for the image processor's.
pub(super) fn describe(checkpoint: &Checkpoint) -> Result<Described> {
    let config = &Section::of_checkpoint(checkpoint);
    let own = &config.within("vision_config")?;
    let size = |key: &str, default: usize| Ok::<_, crate::Error>(own.optional_size(key)?.unwrap_or(default));
    let (heads, head_dim) = (size("num_attention_heads", 12)?, size("head_dim", 64)?);
    if size("num_key_value_heads", 12)? != heads {
        return Err(own.unsupported("num_key_value_heads", &format!("as many as there are heads, {heads}")));
    }
    if !head_dim.is_multiple_of(4) {
        return Err(own.unsupported("head_dim", "a multiple of 4"));
    }
    if own.word("hidden_activation")?.is_some_and(|name| name != "gelu_pytorch_tanh") {
        return Err(own.unsupported("hidden_activation", "gelu_pytorch_tanh"));
    }
    own.must_not("attention_bias")?;
    let rope = own.within_or_empty("rope_parameters")?;
    if rope.word("rope_type")?.is_some_and(|kind| kind != "axial" && kind != "default") {
        return Err(rope.unsupported("rope_type", "axial"));
    }
    let theta = rope.number("rope_theta")?.unwrap_or(100.0);
    if theta <= 1.0 {
        return Err(rope.unsupported("rope_theta", "a number above 1"));
    }
    let eps = own.number("rms_norm_eps")?.unwrap_or(1e-6) as f32;
    if eps <= 0.0 {
        return Err(own.unsupported("rms_norm_eps", "a number above 0"));
    }
    let positions = size("position_embedding_size", 10_240)?;
    Ok(Described {
        form: form(checkpoint, config, own, positions)?,
        positions,
        hidden: size("hidden_size", 768)?,
        intermediate: size("intermediate_size", 3072)?,
        depth: size("num_hidden_layers", 16)?,
        heads,
        head_dim,
        theta,
        eps,
        clips: own.flag("use_clipped_linears", false)?,
        standardizes: own.flag("standardize", false)?,
    })
}

fn form(checkpoint: &Checkpoint, config: &Section, own: &Section, positions: usize) -> Result<PictureForm> {
    let processor = Section::of_image_processor(checkpoint.path())?;
    for key in ["do_resize", "do_rescale", "do_convert_rgb"] {
        processor.must(key)?;
    }
    let mut sides = [0; 2];
    for (side, (key, default)) in sides.iter_mut().zip([("patch_size", 16), ("pooling_kernel_size", 3)]) {
        *side = own.optional_size(key)?.unwrap_or(default);
        if processor.optional_size(key)?.unwrap_or(default) != *side {
            return Err(processor.unsupported(key, &format!("the tower's {side}")));
        }
        if *side > 1024 {
            return Err(own.unsupported(key, "at most 1024"));
        }
    }
    let max_soft_tokens = processor.optional_size("max_soft_tokens")?.unwrap_or(280);
    if !SOFT_TOKENS.contains(&max_soft_tokens) {
        return Err(processor.unsupported("max_soft_tokens", "70, 140, 280, 560 or 1120"));
    }
    let factor = processor.number("rescale_factor")?.unwrap_or(1.0 / 255.0);
    let pixels = if processor.flag("do_normalize", false)? {
        let (mean, std) = processor.mean_and_std([0.0; 3], [1.0; 3])?;
        PixelForm::Normalised { factor, mean, std }
    } else {
        PixelForm::Rescaled { factor }
    };
    let token = |key: &str, default| Ok::<_, crate::Error>(config.token(key)?.unwrap_or(default));
    let text = config.within("text_config")?;
    Ok(PictureForm {
        patch_size: sides[0],
        order: PatchOrder::ChannelsLast { frames: 1 },
        merge_size: sides[1],
        sizing: Sizing::SoftTokens {
            max_soft_tokens,
            positions,
            begin: token("boi_token_id", 255_999)?,
            end: token("eoi_token_id", 258_882)?,
        },
        filter: processor.filter(Filter::Bicubic)?,
        pixels,
        placeholder: token("image_token_id", 258_880)?,
        stand_in: text.token("pad_token_id")?.unwrap_or(0),
        centres: true,
        levels: 1,
        hidden_size: text.optional_size("hidden_size")?.unwrap_or(2304),
    })
}
