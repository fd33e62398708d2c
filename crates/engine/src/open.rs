//! The front door: [`open`], and [`OpenOptions`] for backend, memory and precision.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use moeflux_compute::backend::{ActivationMode, Backend, KvType};
use moeflux_compute::cpu::SimdLevel;
use moeflux_compute::gpu::Split;

use crate::adapters::AdapterSource;
use crate::checkpoint::Checkpoint;
use crate::hardware::{Compute, Devices, Hardware};
use crate::minima::Minima;
use crate::synth::Plan;
use crate::{Engine, Error, Options, Result, TextModel};

/// Opens a model with its tokenizer and chat template: a GGUF file, a safetensors folder, or `demo`, the small model
/// that comes with the library (feature `demo`). It runs on the first GPU if there is one, else on the processor, within
/// the memory that the system grants.
///
/// # Errors
/// As [`TextModel::open`].
pub fn open(model: impl AsRef<Path>) -> Result<TextModel> {
    OpenOptions::new().open(model)
}

/// How a model is opened. What is not set is chosen by the machine and the model.
#[derive(Debug, Clone, Default)]
pub struct OpenOptions {
    hardware: Hardware,
    options: Options,
}

impl OpenOptions {
    /// Everything chosen by the machine and the model.
    pub fn new() -> Self {
        Self::default()
    }

    /// Compute backend.
    pub fn compute(mut self, compute: Compute) -> Self {
        self.hardware.compute = compute;
        self
    }

    /// Bytes for everything that the processor's memory holds: weights, context, scratch, experts.
    pub fn memory(mut self, bytes: u64) -> Self {
        self.hardware.memory = Some(bytes);
        self
    }

    /// Bytes that [`Engine::grant`] may raise that to.
    pub fn memory_later(mut self, bytes: u64) -> Self {
        self.options.memory_later = Some(bytes);
        self
    }

    /// The GPUs to use; by default the first one. Unless [`split`](Self::split) says otherwise, layers are in a row over as few of
    /// them as hold the whole model, in their order; for several sequences over all of them, since each then computes other
    /// sequences' batches.
    pub fn devices(mut self, devices: Devices) -> Self {
        self.hardware.devices = devices;
        self
    }

    /// What several GPUs divide: by default layers. Batches have the same bits either way.
    pub fn split(mut self, split: Split) -> Self {
        self.hardware.split = split;
        self
    }

    /// Bytes of the GPU's memory to use; of several, of each.
    pub fn device_memory(self, bytes: u64) -> Self {
        self.device_memories(vec![bytes])
    }

    /// Bytes of memory to use of each of several GPUs, in their order, or one number for all.
    pub fn device_memories(mut self, bytes: Vec<u64>) -> Self {
        self.hardware.device_memory = bytes;
        self
    }

    /// Whether linear layers, routers and experts on a GPU give a token the same bits whatever else is in its batch, as they do
    /// on the CPU. Batches of more than a few sequences are slower then.
    pub fn batch_invariant(mut self, invariant: bool) -> Self {
        self.hardware.batch_invariant = invariant;
        self
    }

    /// The part of the experts missing on a GPU and kept by host memory that the processor computes, from 0 to 1; by default
    /// what makes tokens fastest, as measured. It changes no bits.
    pub fn processor_share(mut self, part: f32) -> Self {
        self.hardware.processor_share = Some(part);
        self
    }

    /// Threads that compute.
    pub fn threads(mut self, threads: usize) -> Self {
        self.hardware.processor.threads = Some(threads);
        self
    }

    /// The best instruction set to use.
    pub fn simd(mut self, level: SimdLevel) -> Self {
        self.hardware.processor.simd = Some(level);
        self
    }

    /// Positions of the context.
    pub fn context(mut self, positions: usize) -> Self {
        self.options.context = Some(positions);
        self
    }

    /// Sequences that are evaluated at the same time.
    pub fn sequences(mut self, sequences: usize) -> Self {
        self.options.sequences = sequences;
        self
    }

    /// Precision of activations in products with quantised weights.
    pub fn activations(mut self, activations: ActivationMode) -> Self {
        self.options.activations = activations;
        self
    }

    /// Precision of cached keys and values.
    pub fn kv_type(mut self, kv_type: KvType) -> Self {
        self.options.kv_type = Some(kv_type);
        self
    }

    /// An adapter that sessions may ask for by `name`: a folder of PEFT. May be called several times; see
    /// [`Engine::set_adapter`] and [`Engine::session_with`].
    pub fn adapter(mut self, name: impl Into<String>, folder: impl Into<PathBuf>) -> Self {
        self.options.adapters.push(AdapterSource { name: name.into(), folder: folder.into() });
        self
    }

    /// Loads the part of the model that reads pictures too; larger ones are reduced to so many pixels. Pictures are read on the
    /// processor, also where the model runs on GPUs.
    pub fn picture_pixels(mut self, pixels: usize) -> Self {
        self.options.picture_pixels = Some(pixels);
        self
    }

    /// The GGUF file of what reads pictures, where that is not beside the model: see [`Options::mmproj`].
    pub fn mmproj(mut self, file: impl Into<PathBuf>) -> Self {
        self.options.mmproj = Some(file.into());
        self
    }

    /// Everything else that [`Options`] has. Its `memory` counts only if [`OpenOptions::memory`] was not called; call this
    /// before the other methods, which change single fields.
    pub fn engine_options(mut self, options: Options) -> Self {
        self.hardware.memory = self.hardware.memory.or(options.memory);
        self.options = options;
        self
    }

    /// Opens a model with its tokenizer and chat template; see [`open`].
    ///
    /// # Errors
    /// As [`TextModel::open`]; [`Error::Option`] if the hardware asked for is not there.
    pub fn open(&self, model: impl AsRef<Path>) -> Result<TextModel> {
        self.open_with_progress(model, |_, _| ())
    }

    /// As [`OpenOptions::open`]; `progress` gets (bytes loaded, bytes in all).
    ///
    /// # Errors
    /// As [`OpenOptions::open`].
    pub fn open_with_progress(
        &self,
        model: impl AsRef<Path>,
        mut progress: impl FnMut(u64, u64),
    ) -> Result<TextModel> {
        let model = locate(model.as_ref())?;
        self.opened(|backend, options| TextModel::open(&model, backend, options, &mut progress))
    }

    /// Opens a model without its tokenizer; `progress` gets (bytes loaded, bytes in all).
    ///
    /// # Errors
    /// As [`Engine::open`]; [`Error::Option`] if the hardware asked for is not there.
    pub fn open_engine(&self, model: impl AsRef<Path>, mut progress: impl FnMut(u64, u64)) -> Result<Engine> {
        let model = locate(model.as_ref())?;
        self.opened(|backend, options| Engine::open(&model, backend, options, &mut progress))
    }

    /// Opens a model of random weights that is not written anywhere: its bytes are made in memory when they are read, some
    /// hundred megabytes of them at first, which count as memory. For measuring what does not fit a disk.
    ///
    /// # Errors
    /// As [`OpenOptions::open_engine`]; [`Error::Option`] for options that say how a disk is read.
    pub fn open_synthetic(&self, plan: &Plan, progress: impl FnMut(u64, u64)) -> Result<Engine> {
        let Options { mirrors, read_mode, read_queue, .. } = &self.options;
        let refused = [
            ("mirror", mirrors.first().map(|mirror| mirror.display().to_string())),
            ("read_mode", read_mode.map(|mode| mode.to_string())),
            ("read_queue", read_queue.map(|queue| queue.to_string())),
        ];
        for (option, got) in refused {
            if let Some(got) = got {
                let expected = "none for a model in memory, of which nothing is read from a disk".to_owned();
                return Err(Error::Option { option, expected, got });
            }
        }
        let (backend, memory) = self.hardware.backend(self.options.sequences)?;
        let (checkpoint, own) = plan.in_memory()?;
        let reserved = self.options.reserved.saturating_add(own);
        let options = Options { memory, reserved, ..self.options.clone() };
        Engine::of_checkpoint(checkpoint, &*backend, &options, progress)
    }

    /// The least memory, in bytes of the processor's, that the model can be opened with; only headers are read.
    ///
    /// # Errors
    /// As [`OpenOptions::open_engine`], but for memory that does not suffice.
    pub fn least_memory(&self, model: impl AsRef<Path>) -> Result<u64> {
        let checkpoint = Arc::new(Checkpoint::open(&locate(model.as_ref())?)?);
        self.opened(|backend, options| {
            let mut model = options.record(Arc::clone(&checkpoint), backend)?;
            model.adapt(&options.adapters)?;
            Minima::new(&model, backend, options).map(|minima| minima.host)
        })
    }

    /// Opens something on the hardware that was asked for; where any will do, on the processor if GPUs cannot run a model that
    /// reads pictures.
    fn opened<T>(&self, mut open: impl FnMut(&dyn Backend, &Options) -> Result<T>) -> Result<T> {
        let mut on = |hardware: &Hardware| {
            let (backend, memory) = hardware.backend(self.options.sequences)?;
            open(&*backend, &Options { memory, processor: hardware.processor, ..self.options.clone() })
        };
        let any = self.options.picture_pixels.is_some() && self.hardware.compute == Compute::Auto;
        match on(&self.hardware) {
            Err(Error::Option { option: "backend", .. }) if any => {
                on(&Hardware { compute: Compute::Cpu, ..self.hardware.clone() })
            }
            outcome => outcome,
        }
    }
}

/// Where the checkpoint is. `demo` is the model that comes with the library (`./demo` a file of that name).
fn locate(model: &Path) -> Result<PathBuf> {
    #[cfg(feature = "demo")]
    if model == Path::new("demo") {
        return crate::demo::unpack();
    }
    Ok(model.to_owned())
}
