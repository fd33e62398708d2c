//! `plan`: what a model needs and how fast it is here, as `moeflux plan --json` says it.

use std::path::PathBuf;
use std::sync::mpsc;

use moeflux::cost::{Plan, PlanOptions, PlanProgress, PlannedModel};
use moeflux::models::assumed::Storage;
use pyo3::prelude::*;

use crate::convert::{budgets, from_json};
use crate::error::{OrRaise, option};
use crate::opening::{compute_of, devices_of, hub_cache, locate, parse};
use crate::wait::receive;

/// How planning goes on.
enum Planning {
    Busy(f64),
    Over(Box<moeflux::Result<Plan>>),
}

/// Predicts what a model needs and how fast it is on this machine, without loading it; takes some seconds. Besides what `open`
/// takes, a config.json, or `synth:SHAPE`. Memory is one budget or several.
#[pyfunction]
#[pyo3(signature = (
    model, *, memory=None, devices=None, device_memory=None, context=None, kv=None, prompt=512, quant=None, trace=None, skew=0.8,
    backend="auto", threads=None, simd=None
))]
#[expect(clippy::too_many_arguments, reason = "keyword arguments")]
pub fn plan<'py>(
    py: Python<'py>,
    model: PathBuf,
    memory: Option<Bound<'py, PyAny>>,
    devices: Option<Bound<'py, PyAny>>,
    device_memory: Option<Bound<'py, PyAny>>,
    context: Option<usize>,
    kv: Option<&str>,
    prompt: usize,
    quant: Option<&str>,
    trace: Option<PathBuf>,
    skew: f64,
    backend: &str,
    threads: Option<usize>,
    simd: Option<&str>,
) -> PyResult<Bound<'py, PyAny>> {
    let cache = hub_cache(py)?;
    let options = PlanOptions {
        memory: budgets(memory)?,
        device_memory: budgets(device_memory)?,
        context,
        kv_type: parse("kv", "f16, f32 or q8_0", kv).or_raise(py)?,
        prompt,
        skew,
        trace,
        compute: compute_of(backend).or_raise(py)?,
        devices: devices_of(devices)?,
        threads,
        simd: parse("simd", "portable, neon, avx2 or avx512", simd).or_raise(py)?,
        downloads: cache.clone(),
    };
    let storage = quant.map(Storage::by_name).transpose().or_raise(py)?;
    // On a thread of its own, so that Ctrl-C need not wait for it.
    let (sender, mut planning) = mpsc::channel();
    let work = move || {
        let told = sender.clone();
        let plan = || {
            let planned = find(model, storage, &cache)?;
            Plan::new(&planned, &options, |progress| {
                if let PlanProgress::Busy(part) = progress {
                    let _ = told.send(Planning::Busy(part));
                }
            })
        };
        let _ = sender.send(Planning::Over(Box::new(plan())));
    };
    std::thread::Builder::new().name("moeflux-plan".into()).spawn(work)?;
    loop {
        match receive(py, &mut planning)? {
            Planning::Busy(part) => {
                let text = format!("other programs take {:.0} % of the processors", 100.0 * part);
                py.import("warnings")?.call_method1("warn", (text,))?;
            }
            Planning::Over(plan) => return from_json(py, &plan.or_raise(py)?.json()),
        }
    }
}

fn find(model: PathBuf, storage: Option<Storage>, cache: &std::path::Path) -> moeflux::Result<PlannedModel> {
    let name = model.to_string_lossy().into_owned();
    if let Some(planned) = PlannedModel::configured(&name, storage)? {
        return Ok(planned);
    }
    if storage.is_some() {
        return Err(option("quant", "none for a model that states its own encoding", &name));
    }
    match name.strip_prefix("synth:") {
        Some(shape) => PlannedModel::synthetic(&name, shape),
        None => PlannedModel::stored(&name, &locate(model, cache)?, "on disk", true),
    }
}
