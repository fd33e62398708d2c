//! [`GpuBackend`]: graphs on a [`Device`].

use std::time::Instant;

use super::device::Device;
use super::memory::{
    all_bytes, device_keeps_experts, device_scratch_bytes, least_memory, usable, whole_memory,
};
use super::options::GpuOptions;
use super::pipeline::{Numbered, PipelineExecutable, Place, divide, on_device};
use super::run::GpuExecutable;
use super::steps::{buffers, steps};
use super::supported;
use crate::backend::{Backend, CompileOptions, Executable};
use crate::graph::{Ends, Graph, Part};
use crate::{Result, Tensor};

/// The part of a device's memory that a graph beside another may take: one in so many.
const BESIDE: u64 = 8;
/// Bytes of a trial copy from host memory.
const LINK_TRIAL: usize = 64 << 20;

/// Opens a device of its own for every graph that is compiled.
type Open = dyn Fn() -> Result<Box<dyn Device>> + Send + Sync;

/// A GPU that a backend may use.
pub struct GpuDevice {
    name: String,
    number: usize,
    memory: Option<u64>,
    open: Box<Open>,
}

impl GpuDevice {
    /// The GPU that `open` gives, of whose memory `memory` bytes may be used; without that what is free, less a margin. `name`
    /// is for people, and `number` tells it from others in errors.
    pub fn new(
        name: impl Into<String>,
        number: usize,
        memory: Option<u64>,
        open: impl Fn() -> Result<Box<dyn Device>> + Send + Sync + 'static,
    ) -> Self {
        Self { name: name.into(), number, memory, open: Box::new(open) }
    }
}

/// Runs graphs on a GPU, or on several that have some layers each.
pub struct GpuBackend {
    devices: Vec<GpuDevice>,
    options: GpuOptions,
}

impl GpuBackend {
    /// A backend on the devices that `open` gives; `name` is for people.
    pub fn new(
        name: impl Into<String>,
        options: GpuOptions,
        open: impl Fn() -> Result<Box<dyn Device>> + Send + Sync + 'static,
    ) -> Self {
        Self { devices: vec![GpuDevice::new(name, 0, options.memory, open)], options }
    }

    /// A backend on several devices, each of which runs the layers after those of the one before. As few of them are used as
    /// hold the whole model, in their order. Their memory is what each of them says, and not that of `options`.
    ///
    /// # Panics
    /// Without any device.
    pub fn of_devices(devices: Vec<GpuDevice>, options: GpuOptions) -> Self {
        assert!(!devices.is_empty(), "a backend has a device");
        Self { devices, options }
    }

    /// Opens a device.
    fn open(&self, index: usize) -> Result<Box<dyn Device>> {
        let device = &self.devices[index];
        let named = |error| if self.devices.len() > 1 { on_device(device.number, error) } else { error };
        (device.open)().map_err(named)
    }

    /// Of the memory of a device that may be used, what is left beside another graph on the first one, if there is a limit:
    /// else what is free says so.
    fn memory_of(&self, index: usize, options: &CompileOptions) -> Option<u64> {
        let beside = if index == 0 { options.beside } else { 0 };
        self.devices[index].memory.map(|memory| memory.saturating_sub(beside))
    }

    /// Parts of a graph for devices that have been opened, and `memory` of each, or what the options say.
    fn divide(
        &self,
        graph: &Graph,
        devices: &[Box<dyn Device>],
        options: &CompileOptions,
        memory: Option<u64>,
    ) -> Result<Vec<Part>> {
        let infos = devices.iter().map(|device| device.info()).enumerate();
        let places = infos.map(|(index, info)| {
            let memory = memory.or_else(|| self.memory_of(index, options));
            Place { memory: usable(&info, memory), info }
        });
        let places: Vec<Place> = places.collect();
        divide(graph, &places, options, self.options.spread || memory.is_some())
    }
}

impl Backend for GpuBackend {
    fn describe(&self) -> String {
        let mut names: Vec<(&str, usize)> = vec![];
        for device in &self.devices {
            match names.iter_mut().find(|(name, _)| *name == device.name) {
                Some((_, count)) => *count += 1,
                None => names.push((&device.name, 1)),
            }
        }
        let counted = |(name, count): (&str, usize)| match count {
            1 => name.to_owned(),
            _ => format!("{name} × {count}"),
        };
        names.into_iter().map(counted).collect::<Vec<_>>().join(" + ")
    }

    fn scratch_bytes(&self, graph: &Graph, options: CompileOptions) -> usize {
        device_scratch_bytes(graph, options.max_rows)
    }

    fn refuses(&self, graph: &Graph) -> Option<&'static str> {
        supported::unsupported(graph)
    }

    fn has_own_memory(&self) -> bool {
        self.options.host_memory
    }

    fn has_own_slots(&self) -> bool {
        true
    }

    fn expert_bytes(&self, graph: &Graph) -> Option<u64> {
        let keeps = self.options.host_memory && device_keeps_experts(graph);
        all_bytes(graph).ok().filter(|bytes| keeps && *bytes > 0)
    }

    fn least_memory(&self, graph: &Graph, options: CompileOptions) -> Result<Option<u64>> {
        if !self.options.host_memory {
            return Ok(None);
        }
        let devices = (0..self.devices.len()).map(|index| self.open(index)).collect::<Result<Vec<_>>>()?;
        // The least that does if every device may use as much.
        let mut least = 0;
        for (part, device) in self.divide(graph, &devices, &options, Some(1))?.into_iter().zip(&devices) {
            let Part { graph, ends, .. } = part;
            let buffers = buffers(&graph, &ends, &steps(&graph, &ends));
            let own = least_memory(&device.info(), &graph, &buffers, &options, &self.options)?;
            // Those on the first device need no more than that.
            least = least.max(own.saturating_add(options.beside));
        }
        Ok(Some(least))
    }

    fn bytes_beside(&self, graph: &Graph, options: CompileOptions) -> Result<Option<u64>> {
        if supported::unsupported(graph).is_some() {
            return Ok(None);
        }
        let (info, ends) = (self.open(0)?.info(), Ends::default());
        let buffers = buffers(graph, &ends, &steps(graph, &ends));
        let bytes = whole_memory(&info, graph, &buffers, &options)?;
        Ok(Some(bytes).filter(|bytes| *bytes <= usable(&info, self.devices[0].memory) / BESIDE))
    }

    fn compile_beside(
        &self,
        graph: &Graph,
        weights: Vec<Tensor>,
        options: CompileOptions,
    ) -> Result<Box<dyn Executable>> {
        graph.check_weights(&weights)?;
        supported::check(graph)?;
        let gpu = GpuOptions { memory: self.devices[0].memory, ..self.options };
        let whole = (graph.clone(), Ends::default());
        Ok(Box::new(GpuExecutable::new(self.open(0)?, whole, &weights, &options, &gpu)?))
    }

    fn link_bandwidth(&self) -> Result<Option<f64>> {
        if !self.options.host_memory {
            return Ok(None);
        }
        let mut device = self.open(0)?;
        let (from, to) = (device.alloc_host(LINK_TRIAL)?, device.alloc(LINK_TRIAL)?);
        let mut seconds = f64::INFINITY;
        // The first copy may wake the link.
        for _ in 0..3 {
            let start = Instant::now();
            device.copy_from_host(from.into(), to.into(), LINK_TRIAL)?;
            device.finish_copies()?;
            device.synchronize()?;
            seconds = seconds.min(start.elapsed().as_secs_f64());
        }
        Ok(Some(LINK_TRIAL as f64 / seconds.max(1e-9)))
    }

    fn compile(
        &self,
        graph: &Graph,
        weights: Vec<Tensor>,
        options: CompileOptions,
    ) -> Result<Box<dyn Executable>> {
        graph.check_weights(&weights)?;
        supported::check(graph)?;
        let mut devices =
            (0..self.devices.len()).map(|index| self.open(index)).collect::<Result<Vec<_>>>()?;
        if devices.len() == 1 {
            let (device, whole) = (devices.remove(0), (graph.clone(), Ends::default()));
            let gpu = GpuOptions { memory: self.memory_of(0, &options), ..self.options };
            return Ok(Box::new(GpuExecutable::new(device, whole, &weights, &options, &gpu)?));
        }
        let parts = self.divide(graph, &devices, &options, None)?;
        let numbered = devices.into_iter().zip(&self.devices).enumerate().map(|(index, (device, own))| {
            Numbered { number: own.number, device, memory: self.memory_of(index, &options) }
        });
        let numbered: Vec<_> = numbered.take(parts.len()).collect();
        Ok(Box::new(PipelineExecutable::new(graph, parts, numbered, &weights, &options, &self.options)?))
    }
}
