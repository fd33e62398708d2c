//! `open`: from a model's name and the options of the command line to a [`Model`].

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::mpsc;

use moeflux::hub::HubId;
use moeflux::{
    AdapterSource, Compute, Devices, OpenOptions, Options, Scheduler, SchedulerOptions, TextModel, hardware,
};
use moeflux_compute::backend::ActivationMode;
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::convert::{budgets, to_bytes};
use crate::error::classes::OptionError;
use crate::error::{OrRaise, option};
use crate::host::Host;
use crate::model::Model;
use crate::wait::receive;

/// How loading goes on.
enum Loading {
    /// Bytes loaded, bytes in all.
    Progress(u64, u64),
    Over(moeflux::Result<(Box<TextModel>, PathBuf)>),
}

/// Opens a model.
// As many sequences as `moeflux serve` has; the queue is as good as unlimited, since who waits is this process.
#[pyfunction]
#[pyo3(signature = (
    model, *, backend="auto", memory=None, devices=None, split=None, device_memory=None, batch_invariant=false, processor_share=None, expert_cache=None,
    threads=None, chunk=None, context=None, sequences=8, kv_tokens=None, activations="int8", kv=None, simd=None,
    mirrors=None, read_mode=None, read_queue=None, read_depth=None, cache_policy=None, prefetch=None, spec_type=None, draft_max=None, adapters=None,
    adapter=None, queue=1048576, kept_sessions=16, progress=None
))]
#[expect(clippy::too_many_arguments, reason = "keyword arguments")]
pub fn open(
    py: Python<'_>,
    model: PathBuf,
    backend: &str,
    memory: Option<Bound<'_, PyAny>>,
    devices: Option<Bound<'_, PyAny>>,
    split: Option<&str>,
    device_memory: Option<Bound<'_, PyAny>>,
    batch_invariant: bool,
    processor_share: Option<f32>,
    expert_cache: Option<usize>,
    threads: Option<usize>,
    chunk: Option<usize>,
    context: Option<usize>,
    sequences: usize,
    kv_tokens: Option<usize>,
    activations: &str,
    kv: Option<&str>,
    simd: Option<&str>,
    mirrors: Option<Vec<PathBuf>>,
    read_mode: Option<&str>,
    read_queue: Option<&str>,
    read_depth: Option<usize>,
    cache_policy: Option<&str>,
    prefetch: Option<&str>,
    spec_type: Option<&str>,
    draft_max: Option<usize>,
    adapters: Option<BTreeMap<String, PathBuf>>,
    adapter: Option<String>,
    queue: usize,
    kept_sessions: usize,
    progress: Option<Bound<'_, PyAny>>,
) -> PyResult<Model> {
    let defaults = Options::default();
    let made = || -> moeflux::Result<OpenOptions> {
        let engine = Options {
            expert_cache,
            chunk,
            context,
            sequences,
            kv_tokens,
            activations: activations_of(activations)?,
            kv_type: parse("kv", "f16, f32 or q8_0", kv)?,
            mirrors: mirrors.unwrap_or_default(),
            read_mode: parse("read_mode", "direct or buffered", read_mode)?,
            read_queue: parse("read_queue", "io_uring or pread", read_queue)?,
            read_depth: read_depth.unwrap_or(defaults.read_depth),
            cache_policy: parse("cache_policy", "lru, lfu:HALF_LIFE or blend:LONG:SHORT:PART", cache_policy)?
                .unwrap_or(defaults.cache_policy),
            prefetch: parse("prefetch", "auto, off or always", prefetch)?.unwrap_or(defaults.prefetch),
            spec_type: parse("spec_type", "off, ngram, mtp or auto", spec_type)?
                .unwrap_or(defaults.spec_type),
            draft_max: draft_max.unwrap_or(defaults.draft_max),
            adapters: adapters
                .unwrap_or_default()
                .into_iter()
                .map(|(name, folder)| AdapterSource { name, folder })
                .collect(),
            ..defaults
        };
        let options = OpenOptions::new().engine_options(engine).compute(compute_of(backend)?);
        let split = parse("split", "layers or experts", split)?.unwrap_or_default();
        let options = options.batch_invariant(batch_invariant).split(split);
        let options = processor_share.into_iter().fold(options, OpenOptions::processor_share);
        let options = threads.into_iter().fold(options, OpenOptions::threads);
        let simd = parse("simd", "portable, neon, avx2 or avx512", simd)?;
        Ok(simd.into_iter().fold(options, OpenOptions::simd))
    };
    let options = made().or_raise(py)?;
    let bytes = |given: Option<Bound<'_, PyAny>>| given.as_ref().map(to_bytes).transpose();
    let options = bytes(memory)?.into_iter().fold(options, OpenOptions::memory);
    let options = options.devices(devices_of(devices)?).device_memories(budgets(device_memory)?);
    let served = SchedulerOptions { queue, kept_sessions, ..SchedulerOptions::default() };
    let cache = hub_cache(py)?;

    // On a thread of its own, so that Ctrl-C need not wait for it.
    let (sender, mut loading) = mpsc::channel();
    let work = move || {
        let told = sender.clone();
        let open = || {
            let path = locate(model, &cache)?;
            let mut opened = options.open_with_progress(&path, |loaded, total| {
                let _ = told.send(Loading::Progress(loaded, total));
            })?;
            opened.engine.set_adapter(adapter.as_deref())?;
            Ok((Box::new(opened), path))
        };
        let _ = sender.send(Loading::Over(open()));
    };
    std::thread::Builder::new().name("moeflux-open".into()).spawn(work)?;
    loop {
        match receive(py, &mut loading)? {
            Loading::Progress(loaded, total) => {
                if let Some(progress) = &progress {
                    progress.call1((loaded, total))?;
                }
            }
            Loading::Over(opened) => {
                let (opened, path) = opened.or_raise(py)?;
                let scheduler = Scheduler::start(*opened, served).or_raise(py)?;
                return Ok(Model::new(Host::new(scheduler), path));
            }
        }
    }
}

/// Where the checkpoint is: `demo`, a path, or what the name of a model on the Hub has in the cache.
pub fn locate(model: PathBuf, cache: &Path) -> moeflux::Result<PathBuf> {
    if model.as_os_str() == "demo" {
        return moeflux::demo::unpack();
    }
    match model.to_str().and_then(HubId::parse).filter(|_| !model.exists()) {
        Some(id) => moeflux::hub::find(cache, &id),
        None => Ok(model),
    }
}

/// Where Hugging Face's tools keep what they download.
pub fn hub_cache(py: Python<'_>) -> PyResult<PathBuf> {
    let environment = py.import("os")?.getattr("environ")?;
    let variable = |name: &str| -> PyResult<Option<PathBuf>> {
        let value: Option<PathBuf> = environment.call_method1("get", (name,))?.extract()?;
        Ok(value.filter(|path| !path.as_os_str().is_empty()))
    };
    if let Some(cache) = variable("HF_HUB_CACHE")? {
        return Ok(cache);
    }
    let home = variable("HF_HOME")?;
    let home = home.or_else(|| Some(moeflux::demo::cache_home()?.join("huggingface")));
    Ok(home.unwrap_or_else(std::env::temp_dir).join("hub"))
}

pub fn compute_of(name: &str) -> moeflux::Result<Compute> {
    let gpu = hardware::GPUS.map(|gpus| gpus.name);
    match name {
        "auto" => Ok(Compute::Auto),
        "cpu" => Ok(Compute::Cpu),
        name if Some(name) == gpu => Ok(Compute::Gpu),
        _ => {
            let expected = format!("auto, cpu or {}", gpu.unwrap_or("nothing else on this system"));
            Err(option("backend", &expected, name))
        }
    }
}

/// GPUs: `all`, a number, or several numbers.
pub fn devices_of(given: Option<Bound<'_, PyAny>>) -> PyResult<Devices> {
    let Some(given) = given else { return Ok(Devices::First) };
    if let Ok(text) = given.cast::<PyString>() {
        return text.to_str()?.parse().map_err(OptionError::new_err);
    }
    match given.extract() {
        Ok(number) => Ok(Devices::Numbers(vec![number])),
        Err(_) => {
            Ok(Devices::Numbers(given.try_iter()?.map(|item| item?.extract()).collect::<PyResult<_>>()?))
        }
    }
}

fn activations_of(name: &str) -> moeflux::Result<ActivationMode> {
    match name {
        "int8" => Ok(ActivationMode::Int8),
        "f32" => Ok(ActivationMode::F32),
        _ => Err(option("activations", "int8 or f32", name)),
    }
}

/// The value of an option that knows how it is written.
pub fn parse<T: FromStr>(
    name: &'static str,
    expected: &str,
    text: Option<&str>,
) -> moeflux::Result<Option<T>> {
    let parse = |text: &str| text.parse().map_err(|_| option(name, expected, text));
    text.map(parse).transpose()
}
