//! Fixtures: tiny checkpoints with goldens, and copies of them that a test may damage.

pub mod cover;
pub mod faulty;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use moeflux::checkpoint::Checkpoint;
use moeflux::experts::{CacheOptions, ExpertCache, PolicyKind, Prefetch, SlotPlan};
use moeflux::io::queue::ReadQueue;
use moeflux::{Engine, Options, Outputs, models};
use moeflux_compute::backend::{ActivationMode, Backend};
use moeflux_compute::gpu::emulator::Emulator;
use moeflux_compute::gpu::{GpuBackend, GpuOptions};
use safetensors::SafeTensors;

/// A folder with a checkpoint and its golden.
#[derive(Debug, Clone)]
pub struct Fixture {
    pub path: PathBuf,
    /// `hf`, `gguf` or `mlx`.
    pub kind: &'static str,
    /// `hf/qwen3_moe_basic`.
    pub name: String,
}

impl Fixture {
    /// The fixture of this name, as in `hf/qwen3_moe_basic`.
    pub fn named(name: &str) -> Self {
        all().into_iter().find(|f| f.name == name).unwrap_or_else(|| panic!("no fixture {name}"))
    }

    /// What is known to be right about it.
    pub fn golden(&self) -> Golden {
        Golden::read(&self.path.join("golden.safetensors"))
    }

    /// A copy that may be changed, without the golden.
    pub fn copy(&self) -> Copied {
        let folder = tempfile::tempdir().expect("temporary folder");
        for entry in std::fs::read_dir(&self.path).expect("fixture") {
            let from = entry.expect("fixture").path();
            let name = from.file_name().expect("a name");
            if name != "golden.safetensors" {
                std::fs::copy(&from, folder.path().join(name)).expect("copy");
            }
        }
        Copied(folder)
    }
}

/// A checkpoint folder that is removed with the value.
pub struct Copied(tempfile::TempDir);

impl Copied {
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}

/// Every fixture, by kind and name.
pub fn all() -> Vec<Fixture> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let mut found = vec![];
    for kind in ["gguf", "hf", "mlx"] {
        let mut folders: Vec<PathBuf> =
            std::fs::read_dir(root.join(kind)).expect("fixtures").map(|e| e.expect("entry").path()).collect();
        folders.sort();
        assert!(!folders.is_empty(), "fixtures of {kind}");
        found.extend(folders.into_iter().map(|path| {
            let name = format!("{kind}/{}", path.file_name().expect("a name").display());
            Fixture { path, kind, name }
        }));
    }
    found
}

/// A GGUF file with integers, which nothing here writes.
pub const HAS_INTEGERS: &str = "gguf/deepseek_v4_mxfp4";

/// At least one fixture of every family in every format, and of every kind of folder with few bits, but of those with such numbers.
pub fn sample() -> Vec<Fixture> {
    let of_hf = ["basic", "lite", "fp8", "multimodal", "gpt_oss", "published"];
    let integers = ["int4_zeros", "moe_nvfp4", "moe_gptq_v2", "moe_awq"];
    let chosen =
        |f: &Fixture| f.kind != "hf" || of_hf.iter().chain(&integers).any(|part| f.name.contains(part));
    all().into_iter().filter(|f| chosen(f) && f.name != HAS_INTEGERS).collect()
}

/// The variable that asks tests for everything they know to try. Without it they end sooner: of what differs in little they try a part.
const ALL: &str = "MOEFLUX_TEST_ALL";

/// Whether the case of this number is tried where one of so many is enough.
pub fn is_tried(number: usize, of: usize) -> bool {
    number.is_multiple_of(of) || all_are_tried()
}

/// Whether that is asked for.
pub fn all_are_tried() -> bool {
    std::env::var_os(ALL).is_some()
}

/// Content of a `golden.safetensors`.
pub struct Golden {
    pub tokens: Vec<u32>,
    /// (tokens, vocab_size).
    pub logits: Vec<f32>,
    pub vocab_size: usize,
    /// Mean KL divergence of another engine's logits on the same file; quantised checkpoints only.
    pub peer_kl: Option<f64>,
}

impl Golden {
    pub fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).expect("golden");
        let file = SafeTensors::deserialize(&bytes).expect("golden");
        let data = |name: &str| file.tensor(name).expect("in the golden").data();
        let words = |name: &str| data(name).as_chunks::<4>().0.iter();
        Self {
            tokens: words("tokens").map(|b| u32::from_le_bytes(*b)).collect(),
            logits: words("logits").map(|b| f32::from_le_bytes(*b)).collect(),
            vocab_size: file.tensor("logits").expect("in the golden").shape()[1],
            peer_kl: file
                .tensor("peer_kl")
                .ok()
                .map(|_| f64::from_le_bytes(data("peer_kl").try_into().expect("one f64"))),
        }
    }
}

/// Writes a file in place of one that may be there. A file that is truncated and written again is flushed by some file
/// systems, a new one is not: fifty times as fast, where a test writes thousands.
pub fn replace(path: &Path, bytes: impl AsRef<[u8]>) {
    let _ = std::fs::remove_file(path);
    std::fs::write(path, bytes).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}

/// Options of the exact mode.
pub fn f32_options() -> Options {
    Options { activations: ActivationMode::F32, ..Options::default() }
}

/// Positions of the golden beside the checkpoint at `path`, if there is one.
pub fn golden_positions(path: &Path) -> Option<usize> {
    let golden = path.join("golden.safetensors");
    golden.exists().then(|| Golden::read(&golden).tokens.len())
}

/// An engine on the checkpoint at `path`; unless said otherwise for as many positions as the golden has, as some rotary
/// scaling depends on them.
pub fn open(path: &Path, backend: &dyn Backend, options: &Options) -> Engine {
    let options = Options { context: options.context.or_else(|| golden_positions(path)), ..options.clone() };
    Engine::open(path, backend, &options, |_, _| ()).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The experts of a fixture in a cache of `slots`, read through `queue`; what was used last is kept.
pub fn expert_cache(fixture: &str, slots: usize, queue: Box<dyn ReadQueue>) -> ExpertCache {
    let checkpoint = Arc::new(Checkpoint::open(&Fixture::named(fixture).path).unwrap());
    let store = models::record(checkpoint).unwrap().experts;
    let plan = SlotPlan::of_slots(&store.shapes(), slots);
    let options =
        CacheOptions { policy: PolicyKind::Lru, prefetch: Prefetch::Always, ..CacheOptions::default() };
    ExpertCache::new(store, plan, queue, options, &mut |_| ()).unwrap()
}

/// The emulated GPU, and one that is here.
pub fn gpus(options: GpuOptions) -> Vec<GpuBackend> {
    let emulated = GpuBackend::new("emulator", options, || Ok(Box::new(Emulator::new(7))));
    #[cfg(target_os = "linux")]
    if moeflux_compute::gpu::cuda::Cuda::open(0, None).is_ok() {
        let open = || Ok(Box::new(moeflux_compute::gpu::cuda::Cuda::open(0, None)?) as _);
        return vec![emulated, GpuBackend::new("cuda", options, open)];
    }
    vec![emulated]
}

/// Logits of all `tokens` in a new session.
pub fn logits(engine: &mut Engine, tokens: &[u32]) -> Vec<f32> {
    let mut session = engine.session();
    engine.eval(&mut session, tokens, Outputs::All).unwrap_or_else(|e| panic!("{e}"))
}

/// The bits, which tell −0 from 0 and compare NaNs.
pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}
