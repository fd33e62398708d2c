//! What a GGUF projector says of its tower: files that llama.cpp calls `mmproj`, of the architecture `clip`.
//!
//! Such a file says nothing of the text model but its width, nor how many pixels pictures have: bounds are those of the
//! published models, in tokens. Rotation and activation are those of the one type that is read, `qwen3vl_merger`.
//!
//! Source: llama.cpp `tools/mtmd/clip-impl.h`, `conversion/base.py`.

use moeflux_compute::graph::Gelu;

use super::config::Section;
use super::qwen3_vl::Described;
use super::{Filter, Kind, PatchOrder, PictureForm, PixelForm, Sizing};
use crate::checkpoint::gguf::{Array, Metadata};
use crate::checkpoint::{Checkpoint, Format};
use crate::{Error, Result};

/// The width of what the projector makes.
pub(super) const PROJECTION_DIM: &str = "clip.vision.projection_dim";

/// Layers whose output goes to the text model.
const DEEPSTACK: &str = "clip.vision.is_deepstack_layers";

/// The type of projectors that is read.
const TYPE: &str = "qwen3vl_merger";

/// What templates of these models write where a picture is.
const PLACEHOLDER: &str = "<|image_pad|>";

/// Largest size that is taken for one.
const MOST: u64 = 1 << 20;

/// Tokens of the smallest and of the largest picture: 65,536 and 16,777,216 pixels in blocks of 32 by 32.
const TOKENS: [usize; 2] = [64, 16_384];

/// What `projector` says of the tower for the text model `checkpoint` of `kind`.
///
/// # Errors
/// [`Error::Config`] or [`Error::Malformed`] for what is not as it should be; [`Error::Vision`] for types that are not known.
pub(super) fn describe(checkpoint: &Checkpoint, projector: &Checkpoint, kind: &Kind) -> Result<Described> {
    let own = Keys(projector.metadata());
    if projector.format() != Format::Gguf {
        let (what, expected) = ("projector".into(), "a GGUF file".into());
        let path = projector.path().into();
        return Err(Error::Malformed { path, what, expected, got: "a folder".into() });
    }
    let architecture = own.0.str("general.architecture")?;
    if architecture != Some("clip") {
        let got = architecture.unwrap_or("nothing").to_owned();
        return Err(own.fault("general.architecture", "clip, as projectors have", got));
    }
    let of_all = own.0.str("clip.projector_type")?;
    let projector_type = of_all.or(own.0.str("clip.vision.projector_type")?).unwrap_or_default();
    if projector_type != TYPE {
        let reason = format!("projectors of type {projector_type:?} cannot be read; {TYPE} can");
        return Err(Error::Vision { path: projector.path().into(), reason });
    }
    let (hidden, depth) = (own.size("clip.vision.embedding_length")?, own.size("clip.vision.block_count")?);
    let heads_key = "clip.vision.attention.head_count";
    let heads = own.size(heads_key)?;
    if !hidden.is_multiple_of(heads) || !(hidden / heads).is_multiple_of(4) {
        let expected = format!("heads of a multiple of 4 of the {hidden} channels");
        return Err(own.fault(heads_key, &expected, heads.to_string()));
    }
    let width = checkpoint.metadata().u64(&format!("{}.embedding_length", kind.gguf_architecture))?;
    let made = own.size(PROJECTION_DIM)?;
    if let Some(width) = width.filter(|width| *width != made as u64) {
        return Err(own.fault(PROJECTION_DIM, &format!("the text model's {width}"), made.to_string()));
    }
    let deepstack = own.deepstack(depth)?;
    check_deepstack(checkpoint, &own, kind, deepstack.len())?;
    Ok(Described {
        form: form(checkpoint, &own, kind, (1 + deepstack.len(), made))?,
        positions: (own.size("clip.vision.image_size")? / own.size("clip.vision.patch_size")?).pow(2),
        hidden,
        heads,
        intermediate: own.size("clip.vision.feed_forward_length")?,
        depth,
        gelu: Gelu::Tanh,
        theta: 10_000.0,
        eps: own.0.f64("clip.vision.attention.layer_norm_epsilon")?.unwrap_or(1e-6) as f32,
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

fn form(
    checkpoint: &Checkpoint,
    own: &Keys<'_>,
    kind: &Kind,
    (levels, hidden_size): (usize, usize),
) -> Result<PictureForm> {
    let (size_key, patch_key) = ("clip.vision.image_size", "clip.vision.patch_size");
    let (image_size, patch_size) = (own.size(size_key)?, own.size(patch_key)?);
    if patch_size > 1024 {
        return Err(own.fault(patch_key, "at most 1024", patch_size.to_string()));
    }
    if !image_size.is_multiple_of(patch_size) {
        let expected = format!("a multiple of the patch's {patch_size}");
        return Err(own.fault(size_key, &expected, image_size.to_string()));
    }
    let merge_key = "clip.vision.spatial_merge_size";
    let merge_size = own.optional_size(merge_key)?.unwrap_or(2);
    if merge_size > 1024 {
        return Err(own.fault(merge_key, "at most 1024", merge_size.to_string()));
    }
    let unit = patch_size * merge_size * patch_size * merge_size;
    let bound = |key, tokens: usize| Ok::<_, Error>(own.optional_size(key)?.unwrap_or(tokens * unit));
    let std_key = "clip.vision.image_std";
    let image_std = own.three(std_key)?;
    if image_std.iter().any(|std| *std <= 0.0) {
        return Err(own.fault(std_key, "numbers above 0", format!("{image_std:?}")));
    }
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
        pixels: PixelForm::Normalised {
            factor: 1.0 / 255.0,
            mean: own.three("clip.vision.image_mean")?,
            std: image_std,
        },
        stand_in: 0,
        centres: false,
        placeholder: placeholder(checkpoint, kind)?,
        levels,
        hidden_size,
    })
}

/// The token that the text model's template writes where a picture is.
fn placeholder(checkpoint: &Checkpoint, kind: &Kind) -> Result<u32> {
    if checkpoint.format() != Format::Gguf {
        let config = Section::of_checkpoint(checkpoint);
        let placeholder = config.optional_size("image_token_id")?.unwrap_or(kind.placeholder);
        return u32::try_from(placeholder).map_err(|_| config.unsupported("image_token_id", "a token id"));
    }
    let tokens = checkpoint.metadata().strings("tokenizer.ggml.tokens")?.unwrap_or_default();
    let found = tokens.iter().position(|token| token == PLACEHOLDER);
    found.and_then(|id| u32::try_from(id).ok()).ok_or_else(|| Error::Vision {
        path: checkpoint.path().into(),
        reason: format!("its vocabulary has no {PLACEHOLDER}"),
    })
}

/// Key-values of a projector.
struct Keys<'a>(&'a Metadata);

impl Keys<'_> {
    fn fault(&self, key: &str, expected: &str, got: String) -> Error {
        Error::Config { path: self.0.path().into(), key: key.into(), expected: expected.into(), got }
    }

    /// A positive whole number, if it is there.
    fn optional_size(&self, key: &str) -> Result<Option<usize>> {
        match self.0.u64(key)? {
            Some(size) if !(1..=MOST * MOST).contains(&size) => {
                Err(self.fault(key, "a positive whole number", size.to_string()))
            }
            size => Ok(size.map(|size| size as usize)),
        }
    }

    /// A positive whole number that is not too large.
    fn size(&self, key: &str) -> Result<usize> {
        let expected = format!("a whole number from 1 to {MOST}");
        match self.optional_size(key)? {
            Some(size) if size as u64 <= MOST => Ok(size),
            size => Err(self.fault(key, &expected, size.map_or("nothing".into(), |size| size.to_string()))),
        }
    }

    /// Three finite numbers.
    fn three(&self, key: &str) -> Result<[f64; 3]> {
        let numbers = self.0.f64s(key)?.unwrap_or_default();
        let three = <[f64; 3]>::try_from(numbers.as_slice()).ok();
        three
            .filter(|three| three.iter().all(|n| n.is_finite()))
            .ok_or_else(|| self.fault(key, "three numbers", format!("{numbers:?}")))
    }

    /// The layers whose output goes to the text model.
    fn deepstack(&self, depth: usize) -> Result<Vec<usize>> {
        let layers = match self.0.get(DEEPSTACK) {
            None => return Ok(vec![]),
            Some(_) => match self.0.array(DEEPSTACK)? {
                Some(Array::Bool(layers)) if layers.len() == depth => layers,
                other => {
                    let expected = format!("a truth value for each of {depth} layers");
                    return Err(self.fault(
                        DEEPSTACK,
                        &expected,
                        other.map_or("nothing".into(), Array::describe),
                    ));
                }
            },
        };
        Ok((0..depth).filter(|layer| layers[*layer]).collect())
    }
}
