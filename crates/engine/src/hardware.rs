//! [`Compute`]: what a model runs on, found at run time, and how memory is divided between host and GPU.

use std::fmt::{Display, Formatter};
use std::str::FromStr;

use moeflux_compute::backend::Backend;
use moeflux_compute::cpu::{CpuBackend, SimdLevel};
use moeflux_compute::gpu::{Device, DeviceInfo, GpuBackend, GpuDevice, GpuOptions, ProcessorShare, Split};

use crate::error::size;
use crate::memory::available;
use crate::{Error, Result};

/// Compute backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Compute {
    /// GPUs if there is one that can be used, else the processor.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// GPUs: CUDA on Linux, Metal on macOS.
    Gpu,
}

/// The GPUs that a model runs on, a part of it on each.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Devices {
    /// The first one.
    #[default]
    First,
    /// All that can be used.
    All,
    /// Those of these numbers, counted from 0 as the system lists them, layers in this order.
    Numbers(Vec<usize>),
}

impl FromStr for Devices {
    type Err = String;

    /// `all`, or numbers separated by commas.
    fn from_str(text: &str) -> std::result::Result<Self, String> {
        if text == "all" {
            return Ok(Self::All);
        }
        let numbers = text.split(',').map(|number| number.trim().parse());
        let numbers = numbers.collect::<std::result::Result<_, _>>();
        numbers.map(Self::Numbers).map_err(|_| format!("expected all, or numbers such as 0,1; got {text:?}"))
    }
}

impl Display for Devices {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::First => f.write_str("the first GPU"),
            Self::All => f.write_str("all"),
            Self::Numbers(numbers) => {
                let numbers: Vec<String> = numbers.iter().map(ToString::to_string).collect();
                f.write_str(&numbers.join(","))
            }
        }
    }
}

impl Devices {
    /// Of the GPUs that were found, those that are meant.
    fn choose(&self, found: Vec<DeviceInfo>) -> Result<Vec<Gpu>> {
        let refused =
            |expected: String| Err(Error::Option { option: "devices", expected, got: self.to_string() });
        let count = found.len();
        let gpu = |(number, info)| Gpu { number, info, memory: None };
        let all: Vec<Gpu> = found.into_iter().enumerate().map(gpu).collect();
        match self {
            Self::First => Ok(all.into_iter().take(1).collect()),
            Self::All => Ok(all),
            Self::Numbers(numbers) => {
                let twice = |(at, number): (usize, &usize)| numbers[..at].contains(number);
                if numbers.is_empty() || numbers.iter().enumerate().any(twice) {
                    return refused("the number of a GPU, or of several, each once".to_owned());
                }
                if numbers.iter().any(|number| *number >= count) {
                    return refused(match count {
                        0 => "a usable GPU, of which there is none on this machine".to_owned(),
                        1 => "0, the only GPU".to_owned(),
                        _ => format!("numbers of GPUs, from 0 to {}", count - 1),
                    });
                }
                Ok(numbers.iter().map(|number| all[*number].clone()).collect())
            }
        }
    }
}

/// A GPU of this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// As the system lists it, from 0.
    pub number: usize,
    /// What it is.
    pub info: DeviceInfo,
    /// Bytes of its memory to use; by default what is free, less a margin.
    pub memory: Option<u64>,
}

/// Says how much memory may be used of each of `gpus`: as `sizes`, one each or one for all.
///
/// # Errors
/// [`Error::Option`] if there is another number of sizes.
pub fn limit(gpus: &mut [Gpu], sizes: &[u64]) -> Result<()> {
    let count = gpus.len();
    match sizes {
        [] => {}
        [of_all] => gpus.iter_mut().for_each(|gpu| gpu.memory = Some(*of_all)),
        _ if sizes.len() == count => {
            gpus.iter_mut().zip(sizes).for_each(|(gpu, bytes)| gpu.memory = Some(*bytes));
        }
        _ => {
            let each =
                if count > 1 { format!(", or one for each of {count} devices") } else { String::new() };
            return Err(Error::Option {
                option: "device-memory",
                expected: format!("one size{each}"),
                got: format!("{} sizes", sizes.len()),
            });
        }
    }
    Ok(())
}

/// The kind of GPU that this system may have.
#[derive(Clone, Copy)]
pub struct Gpus {
    /// `cuda` or `metal`.
    pub name: &'static str,
    /// Lists the GPUs that can be used.
    pub find: fn() -> moeflux_compute::Result<Vec<DeviceInfo>>,
    /// Opens one of them, by its number, with at most so many bytes of its memory.
    open: fn(usize, Option<u64>) -> moeflux_compute::Result<Box<dyn Device>>,
}

impl std::fmt::Debug for Gpus {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
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
        open: |number, memory| Ok(Box::new(moeflux_compute::gpu::cuda::Cuda::open(number, memory)?)),
    })
}

#[cfg(target_os = "macos")]
const fn gpus() -> Option<Gpus> {
    Some(Gpus {
        name: "metal",
        find: moeflux_compute::gpu::metal::devices,
        // There is one.
        open: |_, memory| Ok(Box::new(moeflux_compute::gpu::metal::Metal::open(memory)?)),
    })
}

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
const fn gpus() -> Option<Gpus> {
    None
}

impl Gpus {
    /// The given GPUs, of which there is one at least, used as `options` says but for what they decide themselves.
    pub fn backend(self, gpus: Vec<Gpu>, options: GpuOptions) -> Box<dyn Backend> {
        let unified = gpus.iter().any(|gpu| gpu.info.unified);
        let device = |Gpu { number, info, memory }| {
            GpuDevice::new(info.name, number, memory, move || (self.open)(number, memory))
        };
        let options = GpuOptions { host_memory: !unified, ..options };
        Box::new(GpuBackend::of_devices(gpus.into_iter().map(device).collect(), options))
    }
}

impl Compute {
    /// GPUs and how they are opened, if there are some and `self` allows it.
    ///
    /// # Errors
    /// [`Error::Option`] if `self` is [`Compute::Gpu`] or certain devices are wanted, and they are not there; or why they cannot
    /// be used.
    pub fn gpus(self, devices: &Devices) -> Result<Option<(Vec<Gpu>, Gpus)>> {
        let named = *devices != Devices::First;
        let refused = |got: &str| Error::Option {
            option: if named { "devices" } else { "backend" },
            expected: "a usable GPU".to_owned(),
            got: got.to_owned(),
        };
        if named && self == Self::Cpu {
            return Err(refused("the processor as the backend"));
        }
        let must = named || self == Self::Gpu;
        let none = || if must { Err(refused("none on this machine")) } else { Ok(None) };
        let Some(gpus) = GPUS.filter(|_| self != Self::Cpu) else { return none() };
        match (gpus.find)() {
            Ok(found) if found.is_empty() => none(),
            Ok(found) => Ok(Some((devices.choose(found)?, gpus))),
            Err(error) if must => Err(error.into()),
            Err(_) => Ok(None),
        }
    }
}

/// How the processor is used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Processor {
    /// Threads; by default one a core.
    pub threads: Option<usize>,
    /// The best instruction set to use; by default the machine's best.
    pub simd: Option<SimdLevel>,
}

impl Processor {
    /// # Errors
    /// [`Error::Option`] for threads that cannot be meant, [`Error::Compute`] if the machine lacks the instruction set.
    pub(crate) fn backend(self) -> Result<CpuBackend> {
        Ok(CpuBackend::new(threads(self.threads)?, self.simd)?)
    }
}

/// Hardware and how much of its memory may be used.
#[derive(Debug, Clone, Default)]
pub(crate) struct Hardware {
    pub(crate) compute: Compute,
    pub(crate) devices: Devices,
    pub(crate) split: Split,
    pub(crate) processor: Processor,
    /// Bytes of the GPUs' memory: of each, or of all alike.
    pub(crate) device_memory: Vec<u64>,
    /// See [`GpuOptions::batch_invariant`].
    pub(crate) batch_invariant: bool,
    /// See [`ProcessorShare::part`].
    pub(crate) processor_share: Option<f32>,
    /// Bytes of the processor's memory.
    pub(crate) memory: Option<u64>,
}

impl Hardware {
    /// The backend, and the bytes of memory that are left for the processor. For several sequences at once every one of several
    /// GPUs has layers, since each then computes other sequences' batches.
    pub(crate) fn backend(&self, sequences: usize) -> Result<(Box<dyn Backend>, Option<u64>)> {
        if let Some((mut found, gpus)) = self.compute.gpus(&self.devices)? {
            limit(&mut found, &self.device_memory)?;
            let unified = found.iter().any(|gpu| gpu.info.unified);
            let mut host = self.memory;
            if let Some(gpu) = found.first_mut().filter(|_| unified) {
                let (memory, left) = self.shared_memory(gpu.memory, gpu.info.free)?;
                (gpu.memory, host) = (Some(memory), Some(left));
            }
            let batch_invariant = self.batch_invariant;
            // A thread waits for the GPU.
            let threads = threads(self.processor.threads)?.saturating_sub(1).max(1);
            let share = ProcessorShare { threads, part: self.processor_share };
            let processor = Some(share).filter(|_| !unified);
            let (spread, split) = (sequences > 1, self.split);
            let options = GpuOptions { batch_invariant, processor, spread, split, ..GpuOptions::default() };
            return Ok((gpus.backend(found, options), host));
        }
        if let Some(bytes) = self.device_memory.first() {
            return Err(Error::Option {
                option: "device-memory",
                expected: "a usable GPU".to_owned(),
                got: format!("{} and no GPU", size(*bytes)),
            });
        }
        Ok((Box::new(self.processor.backend()?), self.memory))
    }

    /// Divides memory between a GPU that shares the processor's and may have `free` bytes of it, or is to have `wanted`, and the
    /// processor.
    fn shared_memory(&self, wanted: Option<u64>, free: u64) -> Result<(u64, u64)> {
        let granted = || available().map(|bytes| bytes / 10 * 9);
        let total = self.memory.or_else(granted).unwrap_or(free);
        let gpu = wanted.unwrap_or_else(|| free.min(total / 4 * 3));
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
            let hardware = Hardware { memory: Some(memory), ..Hardware::default() };
            hardware.shared_memory(device_memory, free).map_err(|error| error.to_string())
        };
        assert_eq!(divide(16 << 30, None, 64 << 30), Ok((12 << 30, 4 << 30)));
        assert_eq!(divide(16 << 30, None, 8 << 30), Ok((8 << 30, 8 << 30)));
        assert_eq!(divide(16 << 30, Some(1 << 30), 8 << 30), Ok((1 << 30, 15 << 30)));
        let error = divide(4 << 30, Some(4 << 30), 8 << 30).unwrap_err();
        assert!(error.contains("device-memory") && error.contains("4.0 GiB"), "{error}");
    }

    fn found(count: usize) -> Vec<DeviceInfo> {
        let info = DeviceInfo {
            name: "test".into(),
            memory: 8 << 30,
            free: 8 << 30,
            largest_buffer: 8 << 30,
            multiprocessors: 8,
            bus: 0,
            group_memory: 0,
            copies_ahead: false,
            bulk_copies: false,
            clusters: false,
            unified: false,
            tensor_cores: false,
            byte_matrices: false,
            warp_groups: false,
            simdgroup_matrices: false,
        };
        vec![info; count]
    }

    #[test]
    fn devices_are_chosen_by_number() {
        let choose = |text: &str, count: usize| -> std::result::Result<Vec<usize>, String> {
            let devices: Devices = text.parse()?;
            assert_eq!(devices.to_string(), text);
            let chosen = devices.choose(found(count)).map_err(|error| error.to_string())?;
            Ok(chosen.iter().map(|gpu| gpu.number).collect())
        };
        assert_eq!(choose("all", 3), Ok(vec![0, 1, 2]));
        assert_eq!(choose("1,0", 2), Ok(vec![1, 0]));
        assert_eq!(Devices::First.choose(found(2)).unwrap().len(), 1);
        for (text, count, expected) in [
            ("0,2", 2, "option devices: expected numbers of GPUs, from 0 to 1, got 0,2"),
            ("1", 1, "option devices: expected 0, the only GPU, got 1"),
            ("0,0", 2, "option devices: expected the number of a GPU, or of several, each once, got 0,0"),
            ("first", 2, "expected all, or numbers such as 0,1; got \"first\""),
            ("", 2, "expected all, or numbers such as 0,1; got \"\""),
            ("-1", 2, "expected all, or numbers such as 0,1; got \"-1\""),
        ] {
            assert_eq!(choose(text, count).unwrap_err(), expected);
        }
    }

    #[test]
    fn sizes_are_for_each_device_or_for_all() {
        let limits = |sizes: &[u64]| {
            let mut gpus = Devices::All.choose(found(2)).unwrap();
            limit(&mut gpus, sizes).map_err(|error| error.to_string())?;
            Ok(gpus.into_iter().map(|gpu| gpu.memory).collect::<Vec<_>>())
        };
        assert_eq!(limits(&[]), Ok(vec![None, None]));
        assert_eq!(limits(&[5]), Ok(vec![Some(5), Some(5)]));
        assert_eq!(limits(&[5, 6]), Ok(vec![Some(5), Some(6)]));
        let expected = "option device-memory: expected one size, or one for each of 2 devices, got 3 sizes";
        assert_eq!(limits(&[5, 6, 7]), Err(expected.to_owned()));
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
