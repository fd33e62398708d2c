//! [`Vision`]: the part of a multimodal checkpoint that reads pictures, as a graph of its own.
//!
//! A picture is cut into patches, a row each. The encoder turns blocks of patches into rows that stand for tokens of the
//! text model, together with what its first layers add at those tokens. How pixels become patches is said by a
//! [`PictureForm`], from the checkpoint's configuration and that of its image processor.

mod clip;
mod config;
mod gemma4;
mod gemma4_clip;
mod gemma4_config;
mod llama4;
mod llama4_clip;
mod llama4_config;
pub(crate) mod projector;
mod qwen3_vl;
mod qwen3_vl_clip;
mod qwen3_vl_config;

use std::sync::Arc;

use moeflux_compute::graph::WeightId;
use serde_json::Value as Json;

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
    /// Of the encoder's weights, the table of position embeddings: (positions, channels).
    pub(crate) positions: WeightId,
    /// What stands for a sheet as a whole, if there is such a row: (channels).
    pub(crate) class: Option<WeightId>,
}

/// How pictures become patches and tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct PictureForm {
    /// Pixels of a patch's side.
    pub patch_size: usize,
    /// Order of a patch's values.
    pub order: PatchOrder,
    /// Patches of a block's side; a block is a token.
    pub merge_size: usize,
    /// At which size pictures are read.
    pub sizing: Sizing,
    /// How they are brought to that size.
    pub filter: Filter,
    /// What becomes of pixels.
    pub pixels: PixelForm,
    /// Whether what that makes of them, v, becomes 2 · (v − ½).
    pub centres: bool,
    /// The token that chat templates write where a picture is.
    pub placeholder: u32,
    /// A token of the vocabulary for what needs one where a row of a picture is.
    pub stand_in: u32,
    /// Parts of a token's row: its embedding, then what layers add.
    pub levels: usize,
    /// Width of each.
    pub hidden_size: usize,
}

/// Order of a patch's values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PatchOrder {
    /// (3, frames, side, side). A picture stands still: frames are the same.
    ChannelsFirst {
        /// How many.
        frames: usize,
    },
    /// (frames, side, side, 3).
    ChannelsLast {
        /// How many.
        frames: usize,
    },
}

/// Which kernel resamples pictures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Filter {
    /// Keys 1981, a = −½.
    Bicubic,
    /// A triangle.
    Bilinear,
}

/// What becomes of channels of pixels, 0 to 255.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum PixelForm {
    /// Times a factor.
    Rescaled {
        /// The factor.
        factor: f64,
    },
    /// Times a factor, less a mean, divided by a deviation of red, green and blue.
    Normalised {
        /// The factor.
        factor: f64,
        /// Of each channel.
        mean: [f64; 3],
        /// Of each channel.
        std: [f64; 3],
    },
    /// The same, each step rounded to bfloat16.
    NormalisedInBf16 {
        /// The factor.
        factor: f64,
        /// Of each channel.
        mean: [f64; 3],
        /// Of each channel.
        std: [f64; 3],
    },
}

/// At which size pictures are read, and where their patches stand.
#[derive(Debug, Clone, PartialEq)]
pub enum Sizing {
    /// About their own, in whole blocks (Qwen2-VL).
    Blocks {
        /// Side of the square grid that position embeddings were learned for.
        grid_side: usize,
        /// Pixels that smaller pictures are enlarged to.
        min_pixels: usize,
        /// Pixels that larger pictures are reduced to.
        max_pixels: usize,
    },
    /// As large as a number of tokens allows (Gemma 4).
    SoftTokens {
        /// The most tokens.
        max_soft_tokens: usize,
        /// Position embeddings of a row's patches; as many of a column's follow.
        positions: usize,
        /// The token before a picture.
        begin: u32,
        /// The token after it.
        end: u32,
    },
    /// Tiles of one size, and if there are several the whole picture (Llama 4).
    Tiles {
        /// Pixels of a tile's side.
        side: usize,
        /// The most tiles besides the whole picture.
        max_tiles: usize,
        /// Whether pictures are enlarged as far as that allows.
        to_max_canvas: bool,
        /// What stands around tiles.
        tokens: TileTokens,
    },
}

/// Tokens around the tiles of a picture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TileTokens {
    /// Before the picture.
    pub start: u32,
    /// Between tiles of a row.
    pub between_columns: u32,
    /// After each row of tiles.
    pub after_row: u32,
    /// Before the whole picture.
    pub whole: u32,
    /// After the picture.
    pub end: u32,
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
    /// The type of its projectors in GGUF files.
    projector: &'static str,
    tower: Tower,
}

/// What a kind of model reads pictures with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tower {
    Qwen3Vl,
    Gemma4,
    Llama4,
}

const KINDS: &[Kind] = &[
    Kind {
        model_type: "qwen3_vl_moe",
        gguf_architecture: "qwen3vlmoe",
        deepstack: Some(&[8, 16, 24]),
        placeholder: 151_655,
        projector: "qwen3vl_merger",
        tower: Tower::Qwen3Vl,
    },
    Kind {
        model_type: "qwen3_5_moe",
        gguf_architecture: "qwen35moe",
        deepstack: None,
        placeholder: 248_056,
        projector: "qwen3vl_merger",
        tower: Tower::Qwen3Vl,
    },
    Kind {
        model_type: "gemma4",
        gguf_architecture: "gemma4",
        deepstack: None,
        placeholder: 258_880,
        projector: "gemma4v",
        tower: Tower::Gemma4,
    },
    Kind {
        model_type: "llama4",
        gguf_architecture: "llama4",
        deepstack: None,
        placeholder: 200_090,
        projector: "llama4",
        tower: Tower::Llama4,
    },
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
    if let Some(own) = projector {
        let described = clip::Projector::new(checkpoint, own, kind)?;
        return match kind.tower {
            Tower::Qwen3Vl => qwen3_vl::record(own, qwen3_vl_clip::describe(&described)?),
            Tower::Gemma4 => gemma4::record(own, gemma4_clip::describe(&described)?),
            Tower::Llama4 => llama4::record(own, llama4_clip::describe(&described)?),
        };
    }
    match checkpoint.format() {
        Format::HuggingFace | Format::Mlx => {
            let config = Section::of_checkpoint(checkpoint);
            match kind.tower {
                Tower::Qwen3Vl => {
                    qwen3_vl::record(checkpoint, qwen3_vl_config::describe(checkpoint, &config, kind)?)
                }
                Tower::Gemma4 => gemma4::record(checkpoint, gemma4_config::describe(checkpoint)?),
                Tower::Llama4 => llama4::record(checkpoint, llama4_config::describe(checkpoint)?),
            }
        }
        Format::Gguf => Err(refused("no projector (mmproj*.gguf) is beside it, and none was named".into())),
    }
}

/// The id of a special token of a folder's tokenizer.
///
/// # Errors
/// [`Error::Io`] or [`Error::Malformed`] if there is no tokenizer that can be read, [`Error::Vision`] if it has no such token.
fn special(checkpoint: &Checkpoint, name: &str) -> Result<u32> {
    let path = checkpoint.path().join("tokenizer.json");
    let io = |source| Error::Io { action: "read", path: path.clone(), source };
    let bytes = std::fs::read(&path).map_err(io)?;
    let tokenizer: Json = serde_json::from_slice(&bytes).map_err(|error| Error::Malformed {
        path: path.clone(),
        what: "tokenizer".into(),
        expected: "JSON".into(),
        got: error.to_string(),
    })?;
    let added = tokenizer["added_tokens"].as_array().into_iter().flatten();
    let own = added.filter(|token| token["content"] == name).map(|token| &token["id"]).next();
    let id = own.or_else(|| tokenizer["model"]["vocab"].get(name)).and_then(Json::as_u64);
    id.and_then(|id| u32::try_from(id).ok())
        .ok_or_else(|| Error::Vision { path, reason: format!("its vocabulary has no {name}") })
}

impl Vision {
    /// Checks that its rows are as wide as those of the text model, whose vocabulary has all tokens that stand for pictures.
    pub(super) fn check_fits(&self, model: &Model) -> Result<()> {
        let vocabulary = model.graph.vocab_size();
        if let Some(token) = self.form.tokens().find(|token| *token as usize >= vocabulary) {
            let path = self.encoder.checkpoint.config_path();
            let reason = format!("token {token} for pictures is beyond the vocabulary of {vocabulary}");
            return Err(Error::Vision { path, reason });
        }
        let width = model.graph.hidden().map_or(0, |hidden| hidden.width());
        if width == self.form.hidden_size {
            return Ok(());
        }
        let key = match self.encoder.checkpoint.format() {
            Format::Gguf => clip::PROJECTION_DIM,
            _ if self.form.levels > 1 || matches!(self.form.sizing, Sizing::Blocks { .. }) => {
                "vision_config.out_hidden_size"
            }
            _ => "text_config.hidden_size",
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
    /// Tokens of the vocabulary that a model gets for a picture.
    fn tokens(&self) -> impl Iterator<Item = u32> + use<> {
        let around = match self.sizing {
            Sizing::Blocks { .. } => vec![],
            Sizing::SoftTokens { begin, end, .. } => vec![begin, end],
            Sizing::Tiles { tokens, .. } => {
                let TileTokens { start, between_columns, after_row, whole, end } = tokens;
                vec![start, between_columns, after_row, whole, end]
            }
        };
        around.into_iter().chain([self.stand_in])
    }

    /// Shape of a patch.
    fn patch_shape(&self) -> [usize; 4] {
        let side = self.patch_size;
        match self.order {
            PatchOrder::ChannelsFirst { frames } => [3, frames, side, side],
            PatchOrder::ChannelsLast { frames } => [frames, side, side, 3],
        }
    }

    /// Values of a patch.
    pub fn patch_width(&self) -> usize {
        self.patch_shape().iter().product()
    }

    /// Pixels of a block's side, of which sides of pictures become multiples.
    pub fn factor(&self) -> usize {
        self.patch_size * self.merge_size
    }
}
