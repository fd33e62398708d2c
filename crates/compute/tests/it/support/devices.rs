//! The devices that operations are tested on.

use std::cell::Cell;
#[cfg(target_os = "linux")]
use std::sync::{Mutex, OnceLock};

use moeflux_compute::gpu::emulator::{Emulator, Ran};
use moeflux_compute::gpu::{GpuBackend, GpuOptions};

/// Makes a backend on a device; what is left to chance follows from the seed.
pub(crate) type MakeDevice = fn(u64) -> GpuBackend;

/// A GPU.
pub(crate) const CUDA: &str = "CUDA";

/// The emulated device.
pub(crate) const EMULATOR: &str = "the emulator";

/// The emulated device with the text that Metal gets.
pub(crate) const METAL: &str = "the emulator with Metal's text";

/// The processor's backends.
pub(crate) const CPU: &str = "CPU";

/// The variable that limits tests of operations to the backend of this name, for tools that are slow or blind beside it.
const ONLY: &str = "MOEFLUX_TEST_ONLY";

/// The variable that limits each test to a part of its cases, for tools that are slow: `1/4` are the 2nd, the 6th and so on.
const PART: &str = "MOEFLUX_TEST_PART";

/// Whether the test's next case is of the part that is tested.
pub(crate) fn is_in_part() -> bool {
    thread_local!(static NEXT: Cell<usize> = const { Cell::new(0) });
    let Ok(part) = std::env::var(PART) else { return true };
    let (which, of) = part.split_once('/').expect("two numbers");
    let [which, of] = [which, of].map(|n| n.parse::<usize>().expect("a number"));
    NEXT.replace(NEXT.get() + 1) % of == which
}

/// The variable that asks tests for everything they know to try. Without it they end sooner: of what differs in little they try a part.
const ALL: &str = "MOEFLUX_TEST_ALL";

/// Whether the case of this number is tried where one of so many is enough.
pub(crate) fn is_tried(number: usize, of: usize) -> bool {
    number.is_multiple_of(of) || std::env::var_os(ALL).is_some()
}

/// Whether the backend is one that is tested.
pub(crate) fn is_tested(name: &str) -> bool {
    std::env::var(ONLY).map_or(true, |only| only == name)
}

/// The emulated device with both texts of the kernels, and a GPU where there is one.
///
/// # Panics
/// If a backend alone is to be tested that is not here: tests that test nothing must not pass.
pub(crate) fn devices() -> Vec<(&'static str, MakeDevice)> {
    devices_with::<false>()
}

/// The same, where a row's result does not depend on how many others there are.
pub(crate) fn batch_invariant_devices() -> Vec<(&'static str, MakeDevice)> {
    devices_with::<true>()
}

/// The emulated device.
pub(crate) fn plain() -> GpuBackend {
    GpuBackend::new("emulator", GpuOptions::default(), || Ok(Box::new(Emulator::new(1))))
}

/// An emulated device that copies weights ahead, as CUDA's of compute capability 9.0 do, and tells which kernels have run.
pub(crate) fn copying_ahead(ran: &Ran) -> GpuBackend {
    let ran = ran.clone();
    ahead(move || Emulator::new(1).telling(ran.clone()))
}

/// An emulated device that does so as CUDA's of other compute capabilities do.
pub(crate) fn copying_by_lanes(ran: &Ran) -> GpuBackend {
    let ran = ran.clone();
    GpuBackend::new("emulator", GpuOptions::default(), move || {
        Ok(Box::new(Emulator::new(1).copying_by_lanes().telling(ran.clone())))
    })
}

/// The former with a planted fault.
pub(crate) fn copying_with_fault(seed: u64, fault: &'static str) -> GpuBackend {
    ahead(move || Emulator::with_fault(seed, fault))
}

/// What a device for tensor cores copies to groups' memory by itself.
#[cfg(target_os = "linux")]
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Copies {
    None,
    /// Weights, as CUDA's of compute capability 9.0 do.
    Ahead,
}

/// An emulated device that runs kernels for tensor cores, and tells which kernels have run; all experts are resident where it is not
/// said how many are.
#[cfg(target_os = "linux")]
pub(crate) fn on_tensor_cores(ran: &Ran, copies: Copies, expert_slots: Option<usize>) -> GpuBackend {
    let ran = ran.clone();
    tensor(copies, expert_slots, move || Emulator::new(1).telling(ran.clone()))
}

/// The same with a planted fault.
#[cfg(target_os = "linux")]
pub(crate) fn tensor_fault(seed: u64, fault: &'static str) -> GpuBackend {
    tensor(Copies::Ahead, None, move || Emulator::with_fault(seed, fault))
}

#[cfg(target_os = "linux")]
fn tensor(
    copies: Copies,
    expert_slots: Option<usize>,
    open: impl Fn() -> Emulator + Send + Sync + 'static,
) -> GpuBackend {
    let options = GpuOptions { expert_slots, ..GpuOptions::default() };
    GpuBackend::new("emulator", options, move || {
        let device = open().tensor_cores();
        Ok(Box::new(if copies == Copies::Ahead { device.copying_ahead() } else { device }))
    })
}

fn ahead(open: impl Fn() -> Emulator + Send + Sync + 'static) -> GpuBackend {
    GpuBackend::new("emulator", GpuOptions::default(), move || Ok(Box::new(open().copying_ahead())))
}

fn devices_with<const BATCH_INVARIANT: bool>() -> Vec<(&'static str, MakeDevice)> {
    fn options<const BATCH_INVARIANT: bool>() -> GpuOptions {
        GpuOptions { batch_invariant: BATCH_INVARIANT, ..GpuOptions::default() }
    }
    let emulated: MakeDevice = |seed| {
        GpuBackend::new("emulator", options::<BATCH_INVARIANT>(), move || Ok(Box::new(Emulator::new(seed))))
    };
    let metal: MakeDevice = |seed| {
        let open = move || Ok(Box::new(Emulator::new(seed).metal()) as _);
        GpuBackend::new("metal", options::<BATCH_INVARIANT>(), open)
    };
    let mut all = vec![(EMULATOR, emulated), (METAL, metal)];
    #[cfg(target_os = "linux")]
    if let Ok(device) = moeflux_compute::gpu::cuda::Cuda::open(0, None) {
        // As long as one is open, others open quickly.
        static KEPT: OnceLock<Mutex<moeflux_compute::gpu::cuda::Cuda>> = OnceLock::new();
        KEPT.get_or_init(|| Mutex::new(device));
        all.push((CUDA, |_| {
            let open = || Ok(Box::new(moeflux_compute::gpu::cuda::Cuda::open(0, None)?) as _);
            GpuBackend::new("cuda", options::<BATCH_INVARIANT>(), open)
        }));
    }
    let here: Vec<&str> = [CPU].into_iter().chain(all.iter().map(|(name, _)| *name)).collect();
    if let Ok(only) = std::env::var(ONLY) {
        assert!(here.contains(&only.as_str()), "{ONLY}={only}: here are {here:?}");
    }
    all.retain(|(name, _)| is_tested(name));
    all
}
