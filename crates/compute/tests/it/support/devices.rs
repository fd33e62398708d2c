//! The devices that operations are tested on.

use std::cell::Cell;
#[cfg(target_os = "linux")]
use std::sync::{Mutex, OnceLock};

use moeflux_compute::gpu::emulator::Emulator;
use moeflux_compute::gpu::{GpuBackend, GpuOptions};

/// Makes a backend on a device; what is left to chance follows from the seed.
pub(crate) type MakeDevice = fn(u64) -> GpuBackend;

/// A GPU.
pub(crate) const CUDA: &str = "CUDA";

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
    let mut all = vec![("the emulator", emulated), (METAL, metal)];
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
