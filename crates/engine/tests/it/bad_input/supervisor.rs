//! Tries damaged checkpoints one after the other in a thread that is watched.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use moeflux::checkpoint::Checkpoint;
use moeflux::io::pread::PreadPool;
use moeflux::models::{self, Model};
use moeflux::{Engine, Error, Options, Outputs};
use moeflux_compute::cpu::CpuBackend;

/// Far more than the slowest of these tiny models takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// More than any of them needs.
const MEMORY: u64 = 256 << 20;

static BACKEND: LazyLock<CpuBackend> = LazyLock::new(|| CpuBackend::new(1, None).expect("a thread"));

/// The model that is recorded from the checkpoint at `path`.
pub(crate) fn record(path: &Path) -> Result<Model, Error> {
    models::record(Arc::new(Checkpoint::open(path)?))
}

/// Logits of all `tokens`.
pub(crate) fn run(model: Model, tokens: &[u32]) -> Result<Vec<f32>, Error> {
    let options = Options { memory: Some(MEMORY), ..Options::default() };
    let queue = Box::new(PreadPool::new(1).expect("a thread"));
    let mut engine = Engine::new(model, &*BACKEND, &options, queue, |_, _| ())?;
    let mut session = engine.session();
    engine.eval(&mut session, tokens, Outputs::All)
}

/// What a changed checkpoint is to the engine.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// The model that it was before.
    Same,
    /// Another model, which ran.
    Other,
    /// Nothing that runs.
    Refused(Error),
}

/// Compares the model at `path` with the `known` one (its graph as text) and runs it if it is another.
pub(crate) fn attempt(path: &Path, tokens: &[u32], known: &str) -> Outcome {
    let attempt = || {
        let model = record(path)?;
        if format!("{:?}", model.graph) == known {
            return Ok(Outcome::Same);
        }
        run(model, tokens).map(|_| Outcome::Other)
    };
    attempt().unwrap_or_else(Outcome::Refused)
}

/// Runs `work` in a thread of its own. It calls its argument with the name of each case and what to do; `judge` gets
/// name and outcome. Panics within cases are gathered; a case that takes too long ends the test.
pub(crate) fn supervise<T: Send + 'static>(
    work: impl FnOnce(&mut dyn FnMut(String, &mut dyn FnMut() -> T)) + Send + 'static,
    mut judge: impl FnMut(&str, T),
) {
    enum Report<T> {
        Begun(String),
        Ended(Option<T>),
    }
    let (sender, receiver) = mpsc::channel();
    let worker = std::thread::spawn(move || {
        work(&mut |case, run| {
            sender.send(Report::Begun(case)).expect("someone listens");
            let outcome = catch_unwind(AssertUnwindSafe(run)).ok();
            sender.send(Report::Ended(outcome)).expect("someone listens");
        });
    });
    let (mut case, mut panicked) = (String::new(), vec![]);
    loop {
        match receiver.recv_timeout(PATIENCE) {
            Ok(Report::Begun(name)) => case = name,
            Ok(Report::Ended(Some(outcome))) => judge(&case, outcome),
            Ok(Report::Ended(None)) => panicked.push(std::mem::take(&mut case)),
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => panic!("{case}: no end after {PATIENCE:?}"),
        }
    }
    worker.join().expect("damage can be done");
    assert!(panicked.is_empty(), "panics: {panicked:#?}");
}

/// The case and its message, if that does not name `file` and say `part`.
pub(crate) fn unclear_message(case: &str, error: &Error, file: &Path, part: &str) -> Option<String> {
    let message = error.to_string();
    let clear = message.contains(&file.display().to_string()) && message.contains(part);
    (!clear).then(|| format!("{case}: {message}"))
}

/// Whether a tensor holds what follows from the configuration: MiniMax-Text-01's decays, which are not read.
pub(crate) fn is_computed(name: &str) -> bool {
    ["_decay", ".slope_rate"].iter().any(|end| name.ends_with(end))
}

/// Whether a tensor belongs to what drafts tokens, which is not read.
pub(crate) fn is_of_draft(name: &str) -> bool {
    name.starts_with("mtp.") || name.starts_with("model.mtp.") || name.ends_with(".eh_proj.weight")
}

/// Whether a tensor belongs to what a multimodal checkpoint sees or hears with, which is not read.
pub(crate) fn is_of_vision(name: &str) -> bool {
    let parts = [
        "visual",
        "vision",
        "audio_tower",
        "vit.",
        "projector",
        "patch_merge_mlp",
        "patch_merger",
        "resampler_model",
        "mlp.gate.weight_1",
    ];
    parts.iter().any(|part| name.contains(part))
}
