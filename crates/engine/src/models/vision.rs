//! [`Vision`]: the part of a multimodal checkpoint that reads pictures, as a graph of its own.
//!
//! A picture is cut into patches, a row each. The encoder turns blocks of patches into rows that stand for tokens of the
//! text model, together with what its first layers add at those tokens. How pixels become patches is said by a
//! [`PictureForm`], from the checkpoint's configuration and that of its image processor.

mod config;
mod qwen3_vl;

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

/// Records the tower of a model type.
type Record = fn(&Arc<Checkpoint>, &Section) -> Result<Vision>;

/// Towers by the `model_type` of the whole model.
const TOWERS: &[(&str, Record)] =
    &[("qwen3_vl_moe", qwen3_vl::record), ("qwen3_5_moe", qwen3_vl::record_qwen3_5)];

/// Records what reads pictures.
///
/// # Errors
/// [`Error::Vision`] if there is nothing that can be used; [`Error::Config`], [`Error::MissingTensor`] and
/// [`Error::Tensor`] if it is not whole.
pub(super) fn record(checkpoint: &Arc<Checkpoint>) -> Result<Vision> {
    let refused = |reason: String| Error::Vision { path: checkpoint.path().into(), reason };
    if checkpoint.format() != Format::HuggingFace {
        let reason =
            "pictures are read with safetensors folders in Hugging Face's layout, not with this format";
        return Err(refused(reason.into()));
    }
    let config = Section::of_checkpoint(checkpoint);
    let model_type = config.word("model_type")?.unwrap_or_default();
    let Some((_, record)) = TOWERS.iter().find(|(name, _)| *name == model_type) else {
        let known: Vec<&str> = TOWERS.iter().map(|(name, _)| *name).collect();
        return Err(refused(format!(
            "models of type {model_type:?} read no pictures; {} do",
            known.join(", ")
        )));
    };
    record(checkpoint, &config)
}

impl Vision {
    /// Checks that its rows are as wide as those of the text model.
    pub(super) fn check_fits(&self, model: &Model) -> Result<()> {
        let width = model.graph.hidden().map_or(0, |hidden| hidden.width());
        if width == self.form.hidden_size {
            return Ok(());
        }
        Err(Error::Config {
            path: model.checkpoint.config_path(),
            key: "vision_config.out_hidden_size".into(),
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
