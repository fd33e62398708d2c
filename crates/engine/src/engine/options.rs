//! [`Options`]: how a model is opened.

use std::path::PathBuf;
use std::sync::Arc;

use moeflux_compute::backend::{ActivationMode, Backend, KvType};

use crate::adapters::AdapterSource;
use crate::checkpoint::{Checkpoint, Format};
use crate::experts::{PolicyKind, Prefetch};
use crate::hardware::Processor;
use crate::io::file::ReadMode;
use crate::io::queue::QueueKind;
use crate::models::vision::projector;
use crate::models::{self, Model};
use crate::placement::Placement;
use crate::speculation::SpecType;
use crate::{Error, Result};

/// How a model is opened. Nothing else changes behaviour: there are no environment variables and no globals.
#[derive(Debug, Clone)]
pub struct Options {
    /// Bytes for everything: resident weights, context, scratch, experts. By default what the system grants.
    pub memory: Option<u64>,
    /// Bytes that [`Engine::grant`](crate::Engine::grant) may raise `memory` to, where experts are in the processor's memory: address space is set
    /// aside for them.
    pub memory_later: Option<u64>,
    /// Bytes of `memory` which the caller needs for itself.
    pub reserved: u64,
    /// Expert slots, in place of those that the memory budget leaves.
    pub expert_cache: Option<usize>,
    /// Most tokens evaluated at once. By default 512, up to 2048 where experts stream, up to 4096 on a GPU with room for that, or
    /// fewer if memory is short.
    pub chunk: Option<usize>,
    /// Positions of the context. By default what the model was made for, but at most 4096, or fewer if
    /// memory is short.
    pub context: Option<usize>,
    /// Sequences that are evaluated at the same time: memory is set aside for the recurrent states of so many.
    pub sequences: usize,
    /// Maximum positions of all sequences together. By default the context for one sequence, four times that for
    /// more, but at least 512 for each, or fewer if memory is short; never less than the context.
    pub kv_tokens: Option<usize>,
    /// Precision of matrix products whose weights are quantised.
    pub activations: ActivationMode,
    /// Precision of cached keys and values. By default f16, and f32 when activations are f32.
    pub kv_type: Option<KvType>,
    /// Positions that a session keeps to come back to; of models with recurrent state each takes the memory of a state.
    pub checkpoints: usize,
    /// Copies of the checkpoint on other disks, files or folders, from which experts are read at the same time.
    pub mirrors: Vec<PathBuf>,
    /// Whether experts are read past the page cache or through it. By default what a short probe finds faster.
    pub read_mode: Option<ReadMode>,
    /// What reads experts. By default the best that the system allows.
    pub read_queue: Option<QueueKind>,
    /// Reads under way at once; with `pread`, 8 at most. Deep enough that the disk has work while a prompt's attention is
    /// computed.
    pub read_depth: usize,
    /// Eviction policy for experts.
    pub cache_policy: PolicyKind,
    /// When to prefetch experts.
    pub prefetch: Prefetch,
    /// When tokens are drafted and verified in one pass, which changes no token.
    pub spec_type: SpecType,
    /// Most tokens drafted at a time, up to [`MOST_DRAFTED`](crate::MOST_DRAFTED).
    pub draft_max: usize,
    /// Adapters, whose weights are resident, for sessions that ask for one: [`Engine::session_with`](crate::Engine::session_with).
    pub adapters: Vec<AdapterSource>,
    /// Most pixels that a picture is read with; larger ones are reduced. Without it the part of the model that reads pictures
    /// is not loaded.
    pub picture_pixels: Option<usize>,
    /// The GGUF file of what reads pictures, for models that do not have that with them. By default `mmproj*.gguf` beside the
    /// GGUF file of a model. It counts only where there are `picture_pixels`.
    pub mmproj: Option<PathBuf>,
    /// What reads pictures where the model runs on GPUs.
    pub processor: Processor,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            memory: None,
            memory_later: None,
            reserved: 0,
            expert_cache: None,
            chunk: None,
            context: None,
            sequences: 1,
            kv_tokens: None,
            activations: ActivationMode::Int8,
            kv_type: None,
            checkpoints: 2,
            mirrors: vec![],
            read_mode: None,
            read_queue: None,
            read_depth: 256,
            cache_policy: PolicyKind::default(),
            prefetch: Prefetch::default(),
            spec_type: SpecType::default(),
            draft_max: 4,
            adapters: vec![],
            picture_pixels: None,
            mmproj: None,
            processor: Processor::default(),
        }
    }
}

impl Options {
    /// Whether a layer that drafts may be there: unless it was asked for, only where it takes nothing that experts could have. Devices
    /// with slots of their own see to that when they compile it.
    fn has_room_to_draft(&self, model: &Model, backend: &dyn Backend) -> bool {
        let holds_all = |placement: Placement| placement.slots.holds_all(&model.experts.shapes());
        self.spec_type == SpecType::Mtp
            || backend.has_own_slots()
            || Placement::new(model, backend, self).is_ok_and(holds_all)
    }

    /// Records the model of a checkpoint with what these options ask for.
    ///
    /// # Errors
    /// As [`models::record`](crate::models::record); [`Error::Option`] for what the backend or the checkpoint has not.
    pub(crate) fn record(&self, checkpoint: Arc<Checkpoint>, backend: &dyn Backend) -> Result<Model> {
        if self.picture_pixels.is_none() {
            let model = self.spec_type.record(Arc::clone(&checkpoint), backend, self.context)?;
            let takes_room = model.draft.is_some() && !self.has_room_to_draft(&model, backend);
            return if takes_room { models::record_for(checkpoint, self.context) } else { Ok(model) };
        }
        let refused =
            |option, expected: &str, got| Err(Error::Option { option, expected: expected.to_owned(), got });
        if self.spec_type == SpecType::Mtp {
            return refused("spec_type", "off, ngram or auto, with pictures", self.spec_type.to_string());
        }
        let projector = match &self.mmproj {
            None if checkpoint.format() == Format::Gguf => projector::beside(checkpoint.path())?,
            named => named.clone(),
        };
        let projector = projector.map(|path| Checkpoint::open(&path)).transpose()?.map(Arc::new);
        let model = models::record_with_vision(checkpoint, projector, self.context)?;
        match backend.refuses(&model.graph) {
            Some(what) => {
                let expected = format!("the processor, as GPUs have no kernels of {what}");
                refused("backend", &expected, backend.describe())
            }
            None => Ok(model),
        }
    }
}
