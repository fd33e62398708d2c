//! GGUF projectors: files that llama.cpp calls `mmproj`, of the architecture `clip`; what those of all models have.
//!
//! Such a file says nothing of the text model but its width, nor how many pixels pictures have: bounds are those of the
//! published models. Rotation and activation are those of the projector's type.
//!
//! Source: llama.cpp `tools/mtmd/clip-impl.h`, `conversion/base.py`.

use super::config::Section;
use super::{Kind, special};
use crate::checkpoint::gguf::{Array, Metadata};
use crate::checkpoint::{Checkpoint, Format};
use crate::{Error, Result};

/// The width of what the projector makes.
pub(super) const PROJECTION_DIM: &str = "clip.vision.projection_dim";

/// Largest size that is taken for one.
const MOST: u64 = 1 << 20;

/// The projector of a text model.
pub(super) struct Projector<'a> {
    text: &'a Checkpoint,
    own: &'a Checkpoint,
    kind: &'a Kind,
    pub keys: Keys<'a>,
}

impl<'a> Projector<'a> {
    /// `own` as the projector of the text model `text` of `kind`.
    ///
    /// # Errors
    /// [`Error::Malformed`] or [`Error::Config`] for what is no projector or has another width than the text model;
    /// [`Error::Vision`] for one of another type.
    pub(super) fn new(text: &'a Checkpoint, own: &'a Checkpoint, kind: &'a Kind) -> Result<Self> {
        let keys = Keys(own.metadata());
        if own.format() != Format::Gguf {
            let (what, expected) = ("projector".into(), "a GGUF file".into());
            let path = own.path().into();
            return Err(Error::Malformed { path, what, expected, got: "a folder".into() });
        }
        let architecture = keys.0.str("general.architecture")?;
        if architecture != Some("clip") {
            let got = architecture.unwrap_or("nothing").to_owned();
            return Err(keys.fault("general.architecture", "clip, as projectors have", got));
        }
        let of_all = keys.0.str("clip.projector_type")?;
        let projector_type = of_all.or(keys.0.str("clip.vision.projector_type")?).unwrap_or_default();
        if projector_type != kind.projector {
            let (model, known) = (kind.gguf_architecture, kind.projector);
            let reason = format!(
                "projectors of type {projector_type:?} cannot be read for {model} models; {known} can"
            );
            return Err(Error::Vision { path: own.path().into(), reason });
        }
        let width = text.metadata().u64(&format!("{}.embedding_length", kind.gguf_architecture))?;
        let made = keys.size(PROJECTION_DIM)?;
        if let Some(width) = width.filter(|width| *width != made as u64) {
            return Err(keys.fault(PROJECTION_DIM, &format!("the text model's {width}"), made.to_string()));
        }
        Ok(Self { text, own, kind, keys })
    }

    /// The kind of model.
    pub(super) fn kind(&self) -> &'a Kind {
        self.kind
    }

    /// The text model.
    pub(super) fn text(&self) -> &'a Checkpoint {
        self.text
    }

    /// Whether it has a tensor.
    pub(super) fn has(&self, tensor: &str) -> bool {
        self.own.contains(tensor)
    }

    /// The sides of a tensor, the slowest first.
    ///
    /// # Errors
    /// [`Error::MissingTensor`], or [`Error::Tensor`] if it has another number of them.
    pub(super) fn shape<const N: usize>(&self, tensor: &str) -> Result<[usize; N]> {
        let path = || self.own.path().into();
        let entry = self.own.entry(tensor);
        let entry = entry.ok_or_else(|| Error::MissingTensor { path: path(), tensor: tensor.into() })?;
        <[usize; N]>::try_from(entry.shape.as_slice()).map_err(|_| Error::Tensor {
            path: path(),
            tensor: tensor.into(),
            expected: format!("{N} dimensions"),
            got: format!("shape {:?}", entry.shape),
        })
    }

    /// The id of a token of the text model.
    ///
    /// # Errors
    /// [`Error::Vision`] if its vocabulary lacks it; [`Error::Io`] or [`Error::Malformed`] if a folder has no tokenizer that can
    /// be read.
    pub(super) fn token(&self, name: &str) -> Result<u32> {
        if self.text.format() != Format::Gguf {
            return special(self.text, name);
        }
        let tokens = self.text.metadata().strings("tokenizer.ggml.tokens")?.unwrap_or_default();
        let found = tokens.iter().position(|token| token == name);
        found.and_then(|id| u32::try_from(id).ok()).ok_or_else(|| Error::Vision {
            path: self.text.path().into(),
            reason: format!("its vocabulary has no {name}"),
        })
    }

    /// The id that the text model's vocabulary has for padding; 0 if it does not say.
    ///
    /// # Errors
    /// [`Error::Config`] for what is no token id.
    pub(super) fn padding(&self) -> Result<u32> {
        if self.text.format() != Format::Gguf {
            let text = Section::of_checkpoint(self.text).within_or_empty("text_config")?;
            return Ok(text.token("pad_token_id")?.unwrap_or(0));
        }
        let key = "tokenizer.ggml.padding_token_id";
        let id = self.text.metadata().u64(key)?.unwrap_or(0);
        u32::try_from(id).map_err(|_| Keys(self.text.metadata()).fault(key, "a token id", id.to_string()))
    }
}

/// Key-values of a projector.
pub(super) struct Keys<'a>(pub &'a Metadata);

impl Keys<'_> {
    pub(super) fn fault(&self, key: &str, expected: &str, got: String) -> Error {
        Error::Config { path: self.0.path().into(), key: key.into(), expected: expected.into(), got }
    }

    /// A positive whole number, if it is there.
    pub(super) fn optional_size(&self, key: &str) -> Result<Option<usize>> {
        match self.0.u64(key)? {
            Some(size) if !(1..=MOST * MOST).contains(&size) => {
                Err(self.fault(key, "a positive whole number", size.to_string()))
            }
            size => Ok(size.map(|size| size as usize)),
        }
    }

    /// A positive whole number that is not too large.
    pub(super) fn size(&self, key: &str) -> Result<usize> {
        let expected = format!("a whole number from 1 to {MOST}");
        match self.optional_size(key)? {
            Some(size) if size as u64 <= MOST => Ok(size),
            size => Err(self.fault(key, &expected, size.map_or("nothing".into(), |size| size.to_string()))),
        }
    }

    /// Three finite numbers.
    pub(super) fn three(&self, key: &str) -> Result<[f64; 3]> {
        let numbers = self.0.f64s(key)?.unwrap_or_default();
        let three = <[f64; 3]>::try_from(numbers.as_slice()).ok();
        three
            .filter(|three| three.iter().all(|n| n.is_finite()))
            .ok_or_else(|| self.fault(key, "three numbers", format!("{numbers:?}")))
    }

    /// A size of `key` that is at most 1024, as sides of patches and blocks are.
    pub(super) fn side(&self, key: &str, default: Option<usize>) -> Result<usize> {
        let size = match default {
            None => self.size(key)?,
            Some(default) => self.optional_size(key)?.unwrap_or(default),
        };
        if size > 1024 {
            return Err(self.fault(key, "at most 1024", size.to_string()));
        }
        Ok(size)
    }

    /// Mean and deviation of pixels' channels.
    pub(super) fn mean_and_std(&self) -> Result<([f64; 3], [f64; 3])> {
        let std_key = "clip.vision.image_std";
        let std = self.three(std_key)?;
        if std.iter().any(|std| *std <= 0.0) {
            return Err(self.fault(std_key, "numbers above 0", format!("{std:?}")));
        }
        Ok((self.three("clip.vision.image_mean")?, std))
    }

    /// Epsilon of norms.
    pub(super) fn eps(&self, default: f64) -> Result<f32> {
        let key = "clip.vision.attention.layer_norm_epsilon";
        let eps = self.0.f64(key)?.unwrap_or(default);
        if eps.is_finite() && eps > 0.0 {
            return Ok(eps as f32);
        }
        Err(self.fault(key, "a number above 0", eps.to_string()))
    }

    /// A truth value for each of `depth` layers, if there are such.
    pub(super) fn layers(&self, key: &str, depth: usize) -> Result<Option<Vec<bool>>> {
        if self.0.get(key).is_none() {
            return Ok(None);
        }
        match self.0.array(key)? {
            Some(Array::Bool(layers)) if layers.len() == depth => Ok(Some(layers.to_vec())),
            other => {
                let expected = format!("a truth value for each of {depth} layers");
                Err(self.fault(key, &expected, other.map_or("nothing".into(), Array::describe)))
            }
        }
    }
}
