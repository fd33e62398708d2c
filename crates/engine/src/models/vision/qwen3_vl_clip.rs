//! What a GGUF projector says of Qwen3-VL's tower: the type `qwen3vl_merger`.

use moeflux_compute::graph::Gelu;

use super::clip::{Keys, PROJECTION_DIM, Projector};
use super::config::Section;
use super::qwen3_vl::Described;
use super::{Filter, Kind, PatchOrder, PictureForm, PixelForm, Sizing};
use crate::checkpoint::{Checkpoint, Format};
use crate::{Error, Result};

/// Layers whose output goes to the text model.
const DEEPSTACK: &str = "clip.vision.is_deepstack_layers";

/// What templates of these models write where a picture is.
const PLACEHOLDER: &str = "<|image_pad|>";

/// Tokens of the smallest and of the largest picture: 65,536 and 16,777,216 pixels in blocks of 32 by 32.
const TOKENS: [usize; 2] = [64, 16_384];

/// What a projector says of the tower.
///
/// # Errors
/// [`Error::Config`] for what is not as it should be.
pub(super) fn describe(projector: &Projector<'_>) -> Result<Described> {
    let own = &projector.keys;
    let (hidden, depth) = (own.size("clip.vision.embedding_length")?, own.size("clip.vision.block_count")?);
    let heads_key = "clip.vision.attention.head_count";
    let heads = own.size(heads_key)?;
    if !hidden.is_multiple_of(heads) || !(hidden / heads).is_multiple_of(4) {
        let expected = format!("heads of a multiple of 4 of the {hidden} channels");
        return Err(own.fault(heads_key, &expected, heads.to_string()));
    }
    let deepstack = own.layers(DEEPSTACK, depth)?.unwrap_or_default();
    let deepstack: Vec<usize> = (0..deepstack.len()).filter(|layer| deepstack[*layer]).collect();
    check_deepstack(projector.text(), own, projector.kind(), deepstack.len())?;
    let made = own.size(PROJECTION_DIM)?;
    Ok(Described {
        form: form(projector, (1 + deepstack.len(), made))?,
        positions: (own.size("clip.vision.image_size")? / own.size("clip.vision.patch_size")?).pow(2),
        hidden,
        heads,
        intermediate: own.size("clip.vision.feed_forward_length")?,
        depth,
        gelu: Gelu::Tanh,
        theta: 10_000.0,
        eps: own.eps(1e-6)?,
        deepstack,
    })
}

/// Refuses layers for the text model in another number than it takes.
fn check_deepstack(checkpoint: &Checkpoint, own: &Keys<'_>, kind: &Kind, layers: usize) -> Result<()> {
    let key = format!("{}.n_deepstack_layers", kind.gguf_architecture);
    let taken = match kind.deepstack {
        None => Some(0),
        Some(_) => checkpoint.metadata().u64(&key)?,
    };
    if taken.is_some_and(|taken| taken != layers as u64) {
        let expected = format!("{} layers, as the text model takes", taken.unwrap_or_default());
        return Err(own.fault(DEEPSTACK, &expected, layers.to_string()));
    }
    Ok(())
}

fn form(projector: &Projector<'_>, (levels, hidden_size): (usize, usize)) -> Result<PictureForm> {
    let own = &projector.keys;
    let size_key = "clip.vision.image_size";
    let (image_size, patch_size) = (own.size(size_key)?, own.side("clip.vision.patch_size", None)?);
    if !image_size.is_multiple_of(patch_size) {
        let expected = format!("a multiple of the patch's {patch_size}");
        return Err(own.fault(size_key, &expected, image_size.to_string()));
    }
    let merge_size = own.side("clip.vision.spatial_merge_size", Some(2))?;
    let unit = patch_size * merge_size * patch_size * merge_size;
    let bound = |key, tokens: usize| Ok::<_, Error>(own.optional_size(key)?.unwrap_or(tokens * unit));
    let (mean, std) = own.mean_and_std()?;
    Ok(PictureForm {
        patch_size,
        // A kernel for each of two frames that are the same.
        order: PatchOrder::ChannelsFirst { frames: 1 },
        merge_size,
        sizing: Sizing::Blocks {
            grid_side: image_size / patch_size,
            min_pixels: bound("clip.vision.image_min_pixels", TOKENS[0])?,
            max_pixels: bound("clip.vision.image_max_pixels", TOKENS[1])?,
        },
        filter: Filter::Bicubic,
        pixels: PixelForm::Normalised { factor: 1.0 / 255.0, mean, std },
        stand_in: 0,
        centres: false,
        placeholder: placeholder(projector)?,
        levels,
        hidden_size,
    })
}

/// The token that the text model's template writes where a picture is.
fn placeholder(projector: &Projector<'_>) -> Result<u32> {
    if projector.text().format() == Format::Gguf {
        return projector.token(PLACEHOLDER);
    }
    let config = Section::of_checkpoint(projector.text());
    let placeholder = config.optional_size("image_token_id")?.unwrap_or(projector.kind().placeholder);
    u32::try_from(placeholder).map_err(|_| config.unsupported("image_token_id", "a token id"))
}
