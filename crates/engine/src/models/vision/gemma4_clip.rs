//! What a GGUF projector says of Gemma 4's tower: the type `gemma4v`.
//!
//! Source: llama.cpp `tools/mtmd/clip.cpp`, `conversion/gemma.py`.

use super::clip::{PROJECTION_DIM, Projector};
use super::gemma4::Described;
use super::{Filter, PatchOrder, PictureForm, PixelForm, Sizing};
use crate::Result;

/// Soft tokens of a picture, at most.
const SOFT_TOKENS: usize = 280;

/// What a projector says of the tower.
///
/// # Errors
/// [`crate::Error::Config`], [`crate::Error::MissingTensor`] and [`crate::Error::Tensor`] for what is not as it should be.
pub(super) fn describe(projector: &Projector<'_>) -> Result<Described> {
    let own = &projector.keys;
    let heads = own.size("clip.vision.attention.head_count")?;
    let queries = "v.blk.0.attn_q.weight";
    // The width of heads is said by their tensors only.
    let [rows, _] = projector.shape(queries)?;
    if !rows.is_multiple_of(heads) || !(rows / heads).is_multiple_of(4) {
        return Err(own.fault(
            "clip.vision.attention.head_count",
            &format!("heads of a multiple of 4 of the {rows} rows of {queries}"),
            heads.to_string(),
        ));
    }
    let [_, positions, _] = projector.shape("v.position_embd.weight")?;
    let (patch_size, merge_size) =
        (own.side("clip.vision.patch_size", None)?, own.side("clip.vision.projector.scale_factor", Some(3))?);
    let (mean, std) = own.mean_and_std()?;
    Ok(Described {
        form: PictureForm {
            patch_size,
            order: PatchOrder::ChannelsFirst { frames: 1 },
            merge_size,
            sizing: Sizing::SoftTokens {
                max_soft_tokens: SOFT_TOKENS,
                positions,
                begin: projector.token("<|image>")?,
                end: projector.token("<image|>")?,
            },
            filter: Filter::Bicubic,
            pixels: PixelForm::Normalised { factor: 1.0 / 255.0, mean, std },
            placeholder: projector.token("<|image|>")?,
            stand_in: projector.padding()?,
            centres: true,
            levels: 1,
            hidden_size: own.size(PROJECTION_DIM)?,
        },
        positions,
        hidden: own.size("clip.vision.embedding_length")?,
        intermediate: own.size("clip.vision.feed_forward_length")?,
        depth: own.size("clip.vision.block_count")?,
        heads,
        head_dim: rows / heads,
        theta: 100.0,
        eps: own.eps(1e-6)?,
        // Those that are limited have tensors that say so.
        clips: true,
        standardizes: projector.has("v.std_bias"),
    })
}
