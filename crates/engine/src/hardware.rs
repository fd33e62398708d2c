//! [`Compute`]: what a model runs on, found at run time, and how memory is divided between host and GPU.

use moeflux_compute::backend::Backend;
use moeflux_compute::cpu::{CpuBackend, SimdLevel};
use moeflux_compute::gpu::{Device, DeviceInfo, GpuBackend, GpuOptions, ProcessorShare};

use crate::error::size;
use crate::memory::available;
use crate::{Error, Result};

/// Compute backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Compute {
    /// The first GPU if there is one that can be used, else the processor.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// The first GPU: CUDA on Linux, Metal on macOS.
    Gpu,
}

/// The kind of GPU that this system may have.
#[derive(Clone, Copy)]
pub struct Gpus {
    /// `cuda` or `metal`.
    pub name: &'static str,
    /// Lists the GPUs that can be used.
    pub find: fn() -> moeflux_compute::Result<Vec<DeviceInfo>>,
    /// Opens the first of them with at most so many bytes of its memory.
    open: fn(Option<u64>) -> moeflux_compute::Result<Box<dyn Device>>,
}

impl std::fmt::Debug for Gpus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Gpus({})", self.name)
    }
}

/// The kind of GPU that moeflux knows on this system; `None` where it knows none.
pub const GPUS: Option<Gpus> = gpus();

#[cfg(target_os = "linux")]
const fn gpus() -> Option<Gpus> {
    Some(Gpus {
        name: "cuda",
        find: moeflux_compute::gpu::cuda::devices,
        open: |memory| Ok(Box::new(moeflux_compute::gpu::cuda::Cuda::open(0, memory)?)),
    })
}

#[cfg(target_os = "macos")]
const fn gpus() -> Option<Gpus> {
    Some(Gpus {
        name: "metal",
        find: moeflux_compute::gpu::metal::devices,
        open: |memory| Ok(Box::new(moeflux_compute::gpu::metal::Metal::open(memory)?)),
    })
}

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
const fn gpus() -> Option<Gpus> {
    None
}

impl Gpus {
    /// The first GPU, which is `device`, used as `options` says but for what `device` decides.
    pub fn backend(self, device: DeviceInfo, options: GpuOptions) -> Box<dyn Backend> {
        let memory = options.memory;
        let options = GpuOptions { host_memory: !device.unified, ..options };
        Box::new(GpuBackend::new(device.name, options, move || (self.open)(memory)))
    }
}

impl Compute {
    /// The first GPU and how it is opened, if there is one and `self` allows it.
    ///
    /// # Errors
    /// [`Error::Option`] if `self` is [`Compute::Gpu`] and there is none, or why it cannot be used.
    pub fn gpu(self) -> Result<Option<(DeviceInfo, Gpus)>> {
        let must = self == Self::Gpu;
        let no_gpu = || Error::Option {
            option: "backend",
            expected: "a usable GPU".to_owned(),
            got: "none on this machine".to_owned(),
        };
        let Some(gpus) = GPUS.filter(|_| self != Self::Cpu) else {
            return if must { Err(no_gpu()) } else { Ok(None) };
        };
        match (gpus.find)() {
            Ok(devices) => match devices.into_iter().next() {
                None if must => Err(no_gpu()),
                first => Ok(first.map(|device| (device, gpus))),
            },
            Err(error) if must => Err(error.into()),
            Err(_) => Ok(None),
        }
    }
}

/// Hardware and how much of its memory may be used.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Hardware {
    pub(crate) compute: Compute,
    /// Threads of the processor; by default one a core.
    pub(crate) threads: Option<usize>,
    /// The best instruction set to use; by default the machine's best.
    pub(crate) simd: Option<SimdLevel>,
    /// Bytes of the GPU's memory.
    pub(crate) device_memory: Option<u64>,
    /// See [`GpuOptions::batch_invariant`].
    pub(crate) batch_invariant: bool,
    /// See [`ProcessorShare::part`].
    pub(crate) processor_share: Option<f32>,
    /// Bytes of the processor's memory.
    pub(crate) memory: Option<u64>,
}

impl Hardware {
    /// The backend, and the bytes of memory that are left for the processor.
    pub(crate) fn backend(self) -> Result<(Box<dyn Backend>, Option<u64>)> {
        if let Some((gpu, gpus)) = self.compute.gpu()? {
            let (memory, host) = if gpu.unified {
                let (memory, host) = self.shared_memory(gpu.free)?;
                (Some(memory), Some(host))
            } else {
                (self.device_memory, self.memory)
            };
            let batch_invariant = self.batch_invariant;
            // A thread waits for the GPU.
            let threads = threads(self.threads)?.saturating_sub(1).max(1);
            let share = ProcessorShare { threads, part: self.processor_share };
            let processor = Some(share).filter(|_| !gpu.unified);
            let options = GpuOptions { memory, batch_invariant, processor, ..GpuOptions::default() };
            return Ok((gpus.backend(gpu, options), host));
        }
        if let Some(bytes) = self.device_memory {
            return Err(Error::Option {
                option: "device-memory",
                expected: "a usable GPU".to_owned(),
                got: format!("{} and no GPU", size(bytes)),
            });
        }
        Ok((Box::new(CpuBackend::new(threads(self.threads)?, self.simd)?), self.memory))
    }

    /// Divides memory between a GPU that shares the processor's and may have `free` bytes of it, and the processor.
    fn shared_memory(self, free: u64) -> Result<(u64, u64)> {
        let granted = || available().map(|bytes| bytes / 10 * 9);
        let total = self.memory.or_else(granted).unwrap_or(free);
        let gpu = self.device_memory.unwrap_or_else(|| free.min(total / 4 * 3));
        let host = total.checked_sub(gpu).filter(|host| *host > 0).ok_or_else(|| Error::Option {
            option: "device-memory",
            expected: format!("less than {}, which the GPU shares with the processor", size(total)),
            got: size(gpu),
        })?;
        Ok((gpu, host))
    }
}

/// `given` threads, or one for each processor.
///
/// # Errors
/// [`Error::Option`] for zero, and for far more than there are processors: they wait for each other at every step.
pub fn threads(given: Option<usize>) -> Result<usize> {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let most = (processors * 4).max(64);
    match given {
        Some(n) if n == 0 || n > most => Err(Error::Option {
            option: "threads",
            expected: format!("a positive number up to {most}, on {processors} processors"),
            got: n.to_string(),
        }),
        Some(n) => Ok(n),
        None => Ok(processors),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_memory_is_divided() {
        let divide = |memory: u64, device_memory: Option<u64>, free: u64| {
            let hardware = Hardware { memory: Some(memory), device_memory, ..Hardware::default() };
            hardware.shared_memory(free).map_err(|error| error.to_string())
        };
        assert_eq!(divide(16 << 30, None, 64 << 30), Ok((12 << 30, 4 << 30)));
        assert_eq!(divide(16 << 30, None, 8 << 30), Ok((8 << 30, 8 << 30)));
        assert_eq!(divide(16 << 30, Some(1 << 30), 8 << 30), Ok((1 << 30, 15 << 30)));
        let error = divide(4 << 30, Some(4 << 30), 8 << 30).unwrap_err();
        assert!(error.contains("device-memory") && error.contains("4.0 GiB"), "{error}");
    }

    #[test]
    fn numbers_of_threads_that_cannot_be_meant_are_refused() {
        for number in [0, 100_000] {
            assert!(threads(Some(number)).unwrap_err().to_string().contains("positive"), "{number}");
        }
        assert_eq!(threads(Some(3)).unwrap(), 3);
        assert!(threads(None).unwrap() > 0);
    }
}
