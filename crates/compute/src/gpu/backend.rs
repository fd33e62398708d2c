//! [`GpuBackend`]: graphs on a [`Device`].

use std::time::Instant;

use super::device::Device;
use super::memory::{all_bytes, device_scratch_bytes, least_memory};
use super::options::GpuOptions;
use super::run::GpuExecutable;
use super::steps::{buffers, steps};
use super::supported;
use crate::backend::{Backend, CompileOptions, Executable};
use crate::graph::Graph;
use crate::{Result, Tensor};

/// Bytes of a trial copy from host memory.
const LINK_TRIAL: usize = 64 << 20;

/// Opens a device of its own for every graph that is compiled.
type Open = dyn Fn() -> Result<Box<dyn Device>> + Send + Sync;

/// Runs graphs on a GPU.
pub struct GpuBackend {
    name: String,
    open: Box<Open>,
    options: GpuOptions,
}

impl GpuBackend {
    /// A backend on the devices that `open` gives; `name` is for people.
    pub fn new(
        name: impl Into<String>,
        options: GpuOptions,
        open: impl Fn() -> Result<Box<dyn Device>> + Send + Sync + 'static,
    ) -> Self {
        Self { name: name.into(), open: Box::new(open), options }
    }
}

impl Backend for GpuBackend {
    fn describe(&self) -> String {
        self.name.clone()
    }

    fn scratch_bytes(&self, graph: &Graph, options: CompileOptions) -> usize {
        device_scratch_bytes(graph, options.max_rows)
    }

    fn has_own_memory(&self) -> bool {
        self.options.host_memory
    }

    fn has_own_slots(&self) -> bool {
        true
    }

    fn expert_bytes(&self, graph: &Graph) -> Option<u64> {
        all_bytes(graph).ok().filter(|bytes| self.options.host_memory && *bytes > 0)
    }

    fn least_memory(&self, graph: &Graph, options: CompileOptions) -> Result<Option<u64>> {
        if !self.options.host_memory {
            return Ok(None);
        }
        let info = (self.open)()?.info();
        let buffers = buffers(graph, &steps(graph));
        least_memory(&info, graph, &buffers, &options, &self.options).map(Some)
    }

    fn link_bandwidth(&self) -> Result<Option<f64>> {
        if !self.options.host_memory {
            return Ok(None);
        }
        let mut device = (self.open)()?;
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
        let device = (self.open)()?;
        Ok(Box::new(GpuExecutable::new(device, graph.clone(), &weights, &options, &self.options)?))
    }
}
