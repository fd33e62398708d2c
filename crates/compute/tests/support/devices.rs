//! The devices that operations are tested on.

use moeflux_compute::gpu::emulator::Emulator;
use moeflux_compute::gpu::{GpuBackend, GpuOptions};

/// Makes a backend on a device; what is left to chance follows from the seed.
pub(crate) type MakeDevice = fn(u64) -> GpuBackend;

/// The emulated device with the text that Metal gets.
pub(crate) const METAL: &str = "the emulator with Metal's text";

/// The variable that limits tests of operations to the backend of this name, for tools that are slow or blind beside it.
const ONLY: &str = "MOEFLUX_TEST_ONLY";

/// Whether the backend is one that is tested.
pub(crate) fn is_tested(name: &str) -> bool {
    std::env::var(ONLY).map_or(true, |only| only == name)
}

/// The emulated device with both texts of the kernels, and a GPU where there is one.
pub(crate) fn devices() -> Vec<(&'static str, MakeDevice)> {
    let emulated: MakeDevice =
        |seed| GpuBackend::new("emulator", GpuOptions::default(), move || Ok(Box::new(Emulator::new(seed))));
    let metal: MakeDevice = |seed| {
        GpuBackend::new("metal", GpuOptions::default(), move || Ok(Box::new(Emulator::new(seed).metal())))
    };
    let mut all = vec![("the emulator", emulated), (METAL, metal)];
    #[cfg(target_os = "linux")]
    if moeflux_compute::gpu::cuda::devices().is_ok() {
        all.push(("CUDA", |_| {
            let open = || Ok(Box::new(moeflux_compute::gpu::cuda::Cuda::open(0, None)?) as _);
            GpuBackend::new("cuda", GpuOptions::default(), open)
        }));
    }
    all.retain(|(name, _)| is_tested(name));
    all
}
