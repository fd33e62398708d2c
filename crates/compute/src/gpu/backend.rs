//! [`GpuBackend`]: graphs on a [`Device`].

use std::time::Instant;

use super::device::{Device, DeviceInfo};
use super::divided::{DividedExecutable, check_division, member_memory};
use super::memory::{
    Held, all_bytes, device_keeps_experts, device_scratch_bytes, divide as divide_memory, least_memory, size,
    usable, whole_memory,
};
use super::options::{GpuOptions, Split};
use super::pipeline::{Numbered, PipelineExecutable, Place, divide, on_device};
use super::run::GpuExecutable;
use super::steps::{buffers, steps};
use super::supported;
use crate::backend::{Backend, Compilation, CompileOptions, DraftMemory, Executable, WithDraft};
use crate::graph::{Ends, Graph, Part};
use crate::{Error, Result, Tensor};

/// The part of a device's memory that a graph beside another may take: one in so many.
const BESIDE: u64 = 8;
/// Rows of prompts that keep matrix units busy, most first, and the part of a device's memory that what they take may have: one in
/// so many. On an H200 prompts of 4,096 tokens are 1.06 times as fast at once as by 2,048, and 2 times as by 512. Several devices
/// overlap batches.
const PROMPT_ROWS: [usize; 3] = [4096, 2048, 1024];
const PROMPT_PART: u64 = 24;
const OVERLAPPING_ROWS: usize = 2048;
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

/// A whole graph, as one device runs it.
///
/// # Errors
/// [`Error::NoHead`] if hidden states are asked for and there are none.
fn whole(graph: &Graph, options: &CompileOptions) -> Result<(Graph, Ends)> {
    if !options.every_hidden {
        return Ok((graph.clone(), Ends::default()));
    }
    let (graph, hidden) = graph.with_hidden_beside().ok_or(Error::NoHead)?;
    Ok((graph, Ends { outputs: vec![hidden], ..Ends::default() }))
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
        devices: &[&dyn Device],
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

    /// Devices that have been opened, with what they are called and may use.
    fn numbered(&self, devices: Vec<Box<dyn Device>>, options: &CompileOptions) -> Vec<Numbered> {
        let of = |(index, (device, own)): (usize, (Box<dyn Device>, &GpuDevice))| Numbered {
            number: own.number,
            device,
            memory: self.memory_of(index, options),
        };
        devices.into_iter().zip(&self.devices).enumerate().map(of).collect()
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
        match whole(graph, &options) {
            Ok((graph, ends)) => device_scratch_bytes(&graph, &ends, options.max_rows),
            Err(_) => device_scratch_bytes(graph, &Ends::default(), options.max_rows),
        }
    }

    fn prompt_rows(&self, graph: &Graph, options: CompileOptions) -> Result<Option<usize>> {
        if !self.options.host_memory || self.options.expert_slots.is_some() {
            return Ok(None);
        }
        // Opened again below, which is quick as long as they are open.
        let devices = (0..self.devices.len()).map(|index| self.open(index)).collect::<Result<Vec<_>>>()?;
        let infos: Vec<DeviceInfo> = devices.iter().map(|device| device.info()).collect();
        if infos.iter().any(|info| !info.tensor_cores) {
            return Ok(None);
        }
        let memories = infos.iter().enumerate();
        let memory =
            memories.map(|(index, info)| usable(info, self.memory_of(index, &options))).min().unwrap_or(0);
        let most = if infos.len() > 1 { OVERLAPPING_ROWS } else { usize::MAX };
        for max_rows in PROMPT_ROWS.into_iter().filter(|rows| *rows > options.max_rows && *rows <= most) {
            let wider = CompileOptions { max_rows, ..options };
            let fits = self.scratch_bytes(graph, wider) as u64 <= memory / PROMPT_PART;
            if fits && self.least_memory(graph, wider)?.is_some_and(|least| least <= memory) {
                return Ok(Some(max_rows));
            }
        }
        Ok(None)
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
        if let [device] = &devices[..] {
            let (graph, ends) = whole(graph, &options)?;
            let buffers = buffers(&graph, &ends, &steps(&graph, &ends));
            return least_memory(&device.info(), &graph, &buffers, &options, &self.options).map(Some);
        }
        // The least that does if every device may use as much.
        let mut least = 0;
        if self.options.split == Split::Experts && devices.len() > 1 {
            for (index, device) in devices.iter().enumerate() {
                let held = Held { index, devices: devices.len() };
                least = least.max(member_memory(&**device, graph, &options, held)?);
            }
            return Ok(Some(least));
        }
        let devices: Vec<&dyn Device> = devices.iter().map(|device| &**device).collect();
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
        let bytes = whole_memory(&info, graph, &buffers, &options, Held::ALL)?;
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
        let whole = (graph.clone(), Ends::default(), Held::ALL);
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
            let (device, (graph, ends)) = (devices.remove(0), whole(graph, &options)?);
            let gpu = GpuOptions { memory: self.memory_of(0, &options), ..self.options };
            let whole = (graph, ends, Held::ALL);
            return Ok(Box::new(GpuExecutable::new(device, whole, &weights, &options, &gpu)?));
        }
        let options = CompileOptions { every_hidden: false, ..options };
        let mut numbered = self.numbered(devices, &options);
        if self.options.split == Split::Experts {
            check_division(&mut numbered, graph, &options)?;
            let divided = DividedExecutable::new(graph, numbered, &weights, &options, &self.options)?;
            return Ok(Box::new(divided));
        }
        let devices: Vec<_> = numbered.iter().map(|numbered| &*numbered.device).collect();
        let parts = self.divide(graph, &devices, &options, None)?;
        numbered.truncate(parts.len());
        Ok(Box::new(PipelineExecutable::new(graph, parts, numbered, &weights, &options, &self.options)?))
    }

    fn refuses_drafts(&self) -> Option<&'static str> {
        (self.devices.len() > 1).then_some("several devices")
    }

    fn compile_with_draft(
        &self,
        model: Compilation<'_>,
        draft: Compilation<'_>,
        memory: DraftMemory,
    ) -> Result<WithDraft> {
        if let Some(what) = self.refuses_drafts() {
            return Err(Error::Device {
                reason: format!("a graph that drafts beside another: not on {what}"),
            });
        }
        for of in [&model, &draft] {
            of.graph.check_weights(&of.weights)?;
            supported::check(of.graph)?;
        }
        let gpu = GpuOptions { memory: self.memory_of(0, &model.options), ..self.options };
        let info = self.open(0)?.info();
        let graphs = [whole(model.graph, &model.options)?, whole(draft.graph, &draft.options)?];
        let sized = |(graph, ends): &(Graph, Ends), options: &CompileOptions| {
            let buffers = buffers(graph, ends, &steps(graph, ends));
            size(&info, graph, &buffers, options, &gpu)
        };
        let sizes = [sized(&graphs[0], &model.options)?, sized(&graphs[1], &draft.options)?];
        let total = usable(&info, gpu.memory);
        let all = sizes[0].whole.saturating_add(sizes[1].whole);
        if memory == DraftMemory::Spare && all > total && gpu.expert_slots.is_none() {
            let alone = CompileOptions { every_hidden: false, ..model.options };
            let model = self.compile(model.graph, model.weights, alone)?;
            return Ok(WithDraft { model, draft: None });
        }
        let [of_model, of_draft] = match divide_memory(total, sizes[0], sizes[1]) {
            Some(parts) => parts.map(Some),
            // There are as many slots as were asked for, whatever there is.
            None if gpu.expert_slots.is_some() => [gpu.memory; 2],
            None => {
                let wanted = sizes[0].least.saturating_add(sizes[1].least);
                return Err(Error::DeviceMemory { device: info.name, wanted, free: total });
            }
        };
        let make = |(graph, ends): (Graph, Ends), of: Compilation<'_>, gpu: GpuOptions| {
            let whole = (graph, ends, Held::ALL);
            let made = GpuExecutable::new(self.open(0)?, whole, &of.weights, &of.options, &gpu)?;
            Ok::<Box<dyn Executable>, Error>(Box::new(made))
        };
        let [graph, drafting] = graphs;
        let model = make(graph, model, GpuOptions { memory: of_model, ..gpu })?;
        // The processor's threads have enough to do for the model.
        let draft = make(drafting, draft, GpuOptions { memory: of_draft, processor: None, ..gpu })?;
        Ok(WithDraft { model, draft: Some(draft) })
    }
}
