//! What a GGUF projector says of Llama 4's tower: the type `llama4`.
//!
//! Source: llama.cpp `tools/mtmd/clip.cpp`, `conversion/llama4.py`.

use super::clip::{PROJECTION_DIM, Projector};
use super::llama4::{Described, tile_tokens};
use super::{Filter, PatchOrder, PictureForm, PixelForm, Sizing};
use crate::Result;

/// Tiles of a picture, at most.
const TILES: usize = 16;

/// What a projector says of the tower.
///
/// # Errors
/// [`crate::Error::Config`], [`crate::Error::MissingTensor`] and [`crate::Error::Tensor`] for what is not as it should be.
pub(super) fn describe(projector: &Projector<'_>) -> Result<Described> {
    let own = &projector.keys;
    let (heads_key, size_key) = ("clip.vision.attention.head_count", "clip.vision.image_size");
    let (hidden, heads) = (own.size("clip.vision.embedding_length")?, own.size(heads_key)?);
    if !hidden.is_multiple_of(heads) || !(hidden / heads).is_multiple_of(4) {
        let expected = format!("heads of a multiple of 4 of the {hidden} channels");
        return Err(own.fault(heads_key, &expected, heads.to_string()));
    }
    let patch_size = own.side("clip.vision.patch_size", None)?;
    let merge_size = own.side("clip.vision.projector.scale_factor", Some(2))?;
    let side = own.size(size_key)?;
    if !side.is_multiple_of(patch_size * merge_size) || side > 1 << 14 {
        let expected = format!("a multiple of a block's {} pixels", patch_size * merge_size);
        return Err(own.fault(size_key, &expected, side.to_string()));
    }
    if own.0.bool("clip.use_gelu")? == Some(false) {
        return Err(own.fault("clip.use_gelu", "true", "false".into()));
    }
    let [projected, _] = projector.shape("mm.model.mlp.1.weight")?;
    let tokens = tile_tokens(|name| projector.token(name))?;
    let (mean, std) = own.mean_and_std()?;
    Ok(Described {
        form: PictureForm {
            patch_size,
            order: PatchOrder::ChannelsFirst { frames: 1 },
            merge_size,
            sizing: Sizing::Tiles { side, max_tiles: TILES, to_max_canvas: false, tokens },
            filter: Filter::Bilinear,
            pixels: PixelForm::NormalisedInBf16 { factor: 1.0 / 255.0, mean, std },
            placeholder: tokens.whole,
            stand_in: 0,
            centres: false,
            levels: 1,
            hidden_size: own.size(PROJECTION_DIM)?,
        },
        positions: (side / patch_size).pow(2) + 1,
        hidden,
        intermediate: own.size("clip.vision.feed_forward_length")?,
        depth: own.size("clip.vision.block_count")?,
        heads,
        projected,
        theta: 10_000.0,
    })
}
