//! [`Vision`]: the part of a multimodal checkpoint that reads pictures, as a graph of its own.
//!
//! A picture is cut into patches, a row each. The encoder turns blocks of patches into rows that stand for tokens of the
//! text model, together with what its first layers add at those tokens. How pixels become patches is said by a
//! [`PictureForm`], from the checkpoint's configuration and that of its image processor.

mod clip;
mod config;
pub(crate) mod projector;
mod qwen3_vl;
mod qwen3_vl_config;

use std::sync::Arc;

use moeflux_compute::graph::WeightId;

use super::Model;
use crate::checkpoint::{Checkpoint, Format};
use crate::{Error, Result};
use config::Section;

/// What reads pictures.
#[derive(Debug)]
pub struct Vision {
    /// Its graph takes (patches, channels of a patch and of its position embedding) and yields (blocks of patches,
    /// levels · hidden_size).
    pub encoder: Model,
    /// How pictures become patches and tokens.
    pub form: PictureForm,
    /// Of the encoder's weights, the table of position embeddings: (side², channels).
    pub(crate) positions: WeightId,
}

/// How pictures become patches and tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct PictureForm {
    /// Pixels of a patch's side.
    pub patch_size: usize,
    /// Frames of a patch; a picture stands still.
    pub temporal_patch_size: usize,
    /// Patches of a block's side; a block is a token.
    pub merge_size: usize,
    /// Side of the square grid that position embeddings were learned for.
    pub grid_side: usize,
    /// Factor on channels of pixels, 0 to 255.
    pub rescale_factor: f64,
    /// Subtracted from rescaled red, green and blue.
    pub image_mean: [f64; 3],
    /// What they are divided by then.
    pub image_std: [f64; 3],
    /// Pixels that smaller pictures are enlarged to.
    pub min_pixels: usize,
    /// Pixels that larger pictures are reduced to.
    pub max_pixels: usize,
    /// The token that chat templates write where a picture is.
    pub placeholder: u32,
    /// Parts of a token's row: its embedding, then what layers add.
    pub levels: usize,
    /// Width of each.
    pub hidden_size: usize,
}

/// A kind of model that reads pictures.
#[derive(Debug)]
struct Kind {
    /// `model_type` of the whole model.
    model_type: &'static str,
    /// `general.architecture` of its text model.
    gguf_architecture: &'static str,
    /// Layers whose output goes to the text model, where a configuration does not say; `None` if none may.
    deepstack: Option<&'static [usize]>,
    /// The token that stands for a picture, where a configuration does not say.
    placeholder: usize,
}

const KINDS: &[Kind] = &[
    Kind {
        model_type: "qwen3_vl_moe",
        gguf_architecture: "qwen3vlmoe",
        deepstack: Some(&[8, 16, 24]),
        placeholder: 151_655,
    },
    Kind { model_type: "qwen3_5_moe", gguf_architecture: "qwen35moe", deepstack: None, placeholder: 248_056 },
];

/// Records what reads pictures: the part of `checkpoint` that does, or the projector in place of it.
///
/// # Errors
/// [`Error::Vision`] if there is nothing that can be used; [`Error::Config`], [`Error::MissingTensor`] and
/// [`Error::Tensor`] if it is not whole.
pub(super) fn record(
    checkpoint: &Arc<Checkpoint>,
    model_type: &str,
    projector: Option<&Arc<Checkpoint>>,
) -> Result<Vision> {
    let refused = |reason: String| Error::Vision { path: checkpoint.path().into(), reason };
    let gguf = checkpoint.format() == Format::Gguf;
    let name = |kind: &Kind| if gguf { kind.gguf_architecture } else { kind.model_type };
    let Some(kind) = KINDS.iter().find(|kind| name(kind) == model_type) else {
        let known: Vec<&str> = KINDS.iter().map(name).collect();
        let known = known.join(", ");
        return Err(refused(format!("models of type {model_type:?} read no pictures; {known} do")));
    };
    if let Some(projector) = projector {
        return qwen3_vl::record(projector, clip::describe(checkpoint, projector, kind)?);
    }
    match checkpoint.format() {
        Format::HuggingFace => {
            let config = Section::of_checkpoint(checkpoint);
            qwen3_vl::record(checkpoint, qwen3_vl_config::describe(checkpoint, &config, kind)?)
        }
        Format::Gguf => Err(refused("no projector (mmproj*.gguf) is beside it, and none was named".into())),
        Format::Mlx => Err(refused("the encoder of an MLX folder cannot be read".into())),
    }
}

impl Vision {
    /// Checks that its rows are as wide as those of the text model.
    pub(super) fn check_fits(&self, model: &Model) -> Result<()> {
        let width = model.graph.hidden().map_or(0, |hidden| hidden.width());
        if width == self.form.hidden_size {
            return Ok(());
        }
        let key = match self.encoder.checkpoint.format() {
            Format::Gguf => clip::PROJECTION_DIM,
            _ => "vision_config.out_hidden_size",
        };
        Err(Error::Config {
            path: self.encoder.checkpoint.config_path(),
            key: key.into(),
            expected: format!("the text model's {width}"),
            got: self.form.hidden_size.to_string(),
        })
    }

    /// Values of a row that the encoder takes: a patch, and the embedding of its position.
    pub fn row_width(&self) -> usize {
        self.form.patch_width() + self.position_width()
    }

    /// Channels of position embeddings.
    pub fn position_width(&self) -> usize {
        self.encoder.graph.weights()[self.positions.index()].matrix.cols
    }
}

impl PictureForm {
    /// Values of a patch.
    pub fn patch_width(&self) -> usize {
        3 * self.temporal_patch_size * self.patch_size * self.patch_size
    }

    /// Pixels of a block's side, of which sides of pictures become multiples.
    pub fn factor(&self) -> usize {
        self.patch_size * self.merge_size
    }
}
