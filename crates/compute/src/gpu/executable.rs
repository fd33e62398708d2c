//! [`GpuExecutable`]: a graph on a device.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::backend::GpuOptions;
use super::budget::{Budget, PAGE_NUMBERS};
use super::compressed::{self, IndexScratch};
use super::device::{BufferId, Device, Dispatch, RecordingId, Slice};
use super::experts::{self, DeviceExperts, Room};
use super::few_experts::{self, Quantized};
use super::inputs::{FEW_ROWS, InputLayout, Shape, Turn, page_numbers, turns};
use super::lower::{Memory, Piece, Scratch, lower, scratch_bytes};
use super::ngrams::{self, NGramTable};
use super::state::State;
use super::steps::{Buffers, Step, buffers, steps};
use super::tensor_cores::{self, TensorScratch};
use super::weights::{self, DeviceWeight};
use crate::backend::{ActivationMode, Batch, CompileOptions, DeviceCounts, Executable, ExpertSource};
use crate::graph::{EmbedOp, ExpertSetId, Graph, LinearOp, Op, RouteOp, StateId, WeightId};
use crate::profile::{Profile, Work};
use crate::{Error, Result, Tensor};

/// Device memory that is left alone when all that is free may be used: for modules, recordings and the driver.
const MARGIN: u64 = 512 << 20;

/// Pairs for each expert from which on all experts are taken to be chosen: at 4, chance leaves out one in fifty.
const ALL_CHOSEN: usize = 4;

/// Lists of dispatches that are kept, at most.
const MOST_RECORDINGS: usize = 32;

/// Dispatches of one batch shape, recorded once they have been used before.
type Recording = Vec<Piece<RecordingId>>;

/// A graph ready to run on a device.
pub(crate) struct GpuExecutable {
    device: Mutex<Box<dyn Device>>,
    graph: Graph,
    steps: Vec<Step>,
    buffers: Buffers,
    values: Vec<BufferId>,
    weights: Vec<DeviceWeight>,
    routings: Vec<[BufferId; 2]>,
    state: State,
    experts: DeviceExperts,
    scratch: Scratch,
    tensor: Option<TensorScratch>,
    simdgroup_matrices: bool,
    multiprocessors: usize,
    copies_ahead: bool,
    quantized: Quantized,
    activations: ActivationMode,
    turns: Vec<Turn>,
    ngrams: HashMap<StateId, NGramTable>,
    index: IndexScratch,
    max_rows: usize,
    inputs: BufferId,
    /// Buffers that grow, with their bytes.
    page_numbers: (BufferId, usize),
    logits: (BufferId, usize),
    /// What the device's page numbers are.
    held_pages: Vec<u8>,
    recordings: HashMap<Shape, Option<Recording>>,
    profiling: bool,
    /// How often the device was waited for to count what it did.
    asked: u64,
}

impl GpuExecutable {
    pub(crate) fn new(
        mut device: Box<dyn Device>,
        graph: Graph,
        tensors: &[Tensor],
        options: CompileOptions,
        gpu: GpuOptions,
    ) -> Result<Self> {
        let rows = options.max_rows.max(1);
        let steps = steps(&graph);
        let buffers = buffers(&graph, &steps);
        let d = &mut *device;
        let info = d.info();
        let free = info.free;
        let tensor_cores = info.tensor_cores && options.activations == ActivationMode::Int8;
        let logits_bytes = graph.vocab_size() * 4;
        // What is needed is known before anything big is allocated.
        let turns = turns(&graph);
        let budget = Budget::new(&graph, tensors, &options, (&buffers, &turns), tensor_cores)?;
        let taken = budget.total(&vec![false; tensors.len()]);
        let total = gpu.memory.unwrap_or(free.saturating_sub(MARGIN));
        // Of a table of embeddings a token needs a row: where device memory does not hold all experts, some more of them
        // are worth more.
        let crowded = options.keep_experts
            && gpu.host_memory
            && (gpu.expert_slots.is_some() || total < taken.saturating_add(experts::all_bytes(&graph)?));
        let far: Vec<bool> =
            (0..tensors.len()).map(|w| crowded && only_embeds(&graph, WeightId(w))).collect();
        let taken = budget.total(&far);
        let wanted = taken.saturating_add(experts::least_bytes(&graph)?);
        if gpu.expert_slots.is_none() && total < wanted {
            return Err(Error::DeviceMemory { device: info.name, wanted, free: total });
        }
        let weights = weights::upload(d, tensors, &far)?;
        let mut alloc = |bytes: usize| d.alloc(bytes.max(4));
        let values = buffers.widths.iter().map(|width| alloc(width * rows * 4)).collect::<Result<_>>()?;
        let (attention, moe, buckets) = scratch_bytes(&graph, rows);
        let scratch = Scratch {
            attention: all(attention, &mut alloc)?,
            experts: all(moe, &mut alloc)?,
            buckets: all(buckets, &mut alloc)?,
        };
        let tensor = if tensor_cores {
            let [x, scale, tiles] = all(tensor_cores::scratch_bytes(&graph, rows), &mut alloc)?;
            Some(TensorScratch { x, scale, tiles })
        } else {
            None
        };
        let [bytes, scales] = all(few_experts::scratch_bytes(&graph, rows), &mut alloc)?;
        let quantized = Quantized { bytes, scales };
        let mut routings = vec![];
        for node in &graph.nodes {
            if let Op::Route(RouteOp { route, .. }) = node.op {
                routings.push([alloc(rows * route.top_k * 4)?, alloc(rows * route.top_k * 4)?]);
            }
        }
        let inputs = alloc(InputLayout::most_bytes(rows, &graph.ropes, &turns))?;
        let chosen = alloc(compressed::chosen_bytes(&graph, rows))?;
        let room = budget.room;
        let index = IndexScratch { scores: alloc(compressed::score_bytes(room, rows))?, room, chosen };
        let page_numbers = (alloc(PAGE_NUMBERS)?, PAGE_NUMBERS);
        let logits = (alloc(logits_bytes)?, logits_bytes);
        let ngrams = ngrams::upload(d, &graph, &weights)?;
        let state = State::new(d, &graph, options.kv_type)?;
        let room = match gpu.expert_slots {
            Some(slots) => Room::Slots(slots),
            None => {
                let budget = total.saturating_sub(taken).min(info.largest_buffer);
                Room::Bytes { budget, minimum: experts::most_chosen(&graph) }
            }
        };
        let experts = DeviceExperts::new(d, &graph, room, options.keep_experts && gpu.host_memory)?;
        Ok(Self {
            device: Mutex::new(device),
            graph,
            steps,
            buffers,
            values,
            weights,
            routings,
            state,
            experts,
            scratch,
            tensor,
            simdgroup_matrices: info.simdgroup_matrices,
            multiprocessors: info.multiprocessors,
            copies_ahead: info.copies_ahead,
            quantized,
            activations: options.activations,
            turns,
            ngrams,
            index,
            max_rows: rows,
            inputs,
            page_numbers,
            logits,
            held_pages: vec![],
            recordings: HashMap::new(),
            profiling: false,
            asked: 0,
        })
    }

    /// The device, for calls through a shared reference.
    fn device(&self) -> MutexGuard<'_, Box<dyn Device>> {
        self.device.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn device_mut(&mut self) -> &mut dyn Device {
        &mut **self.device.get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets what was recorded: buffers have moved.
    fn forget(&mut self) {
        for recording in std::mem::take(&mut self.recordings).into_values().flatten().flatten() {
            let (Piece::Run(id) | Piece::Experts { body: id, .. }) = recording;
            self.device_mut().forget(id);
        }
    }

    /// Uploads what the batch is; buffers grow as needed.
    fn set_inputs(&mut self, batch: &Batch<'_>, shape: Shape) -> Result<()> {
        let logits = shape.outputs * self.graph.vocab_size() * 4;
        let pages = page_numbers(batch);
        let too_small = [(pages.len(), self.page_numbers), (logits, self.logits)];
        for (which, (wanted, (buffer, bytes))) in too_small.into_iter().enumerate() {
            if wanted <= bytes {
                continue;
            }
            let bytes = if which == 0 { wanted.next_power_of_two() } else { wanted };
            let device = self.device_mut();
            device.free(buffer);
            let grown = match device.alloc(bytes) {
                // Logits of many positions, for which there may be no room: they go to host memory as they are made.
                Err(Error::DeviceMemory { .. }) if which == 1 && !device.info().unified => {
                    device.alloc_host(bytes)?
                }
                buffer => buffer?,
            };
            let grown = (grown, bytes);
            if which == 0 {
                self.page_numbers = grown;
                self.held_pages.clear();
            } else {
                self.logits = grown;
            }
            self.forget();
        }
        self.make_room(batch)?;
        let ropes = &self.graph.ropes;
        let inputs = InputLayout::new(&shape, ropes, &self.turns).pack(batch, ropes, &self.turns);
        let (to, to_pages) = (self.inputs, self.page_numbers.0);
        self.device_mut().upload(to.into(), &inputs)?;
        if !self.held_pages.starts_with(&pages) {
            self.device_mut().upload(to_pages.into(), &pages)?;
            self.held_pages = pages;
        }
        Ok(())
    }

    /// Makes scores of entries have room for all that the batch's rows may choose among.
    fn make_room(&mut self, batch: &Batch<'_>) -> Result<()> {
        let longest = batch.spans.iter().map(|s| s.start + s.rows.len()).max().unwrap_or(0);
        let room = compressed::room(&self.graph, longest);
        if room <= self.index.room {
            return Ok(());
        }
        let (room, old) = (room.next_power_of_two(), self.index.scores);
        let bytes = compressed::score_bytes(room, self.max_rows);
        let device = self.device_mut();
        let scores = device.alloc(bytes)?;
        device.free(old);
        self.index = IndexScratch { scores, room, ..self.index };
        self.forget();
        Ok(())
    }

    fn lower(&self, shape: Shape) -> Vec<Piece<Vec<Dispatch>>> {
        let memory = Memory {
            weights: &self.weights,
            buffers: &self.values,
            routings: &self.routings,
            state: &self.state,
            experts: &self.experts,
            inputs: self.inputs,
            page_numbers: self.page_numbers.0,
            scratch: &self.scratch,
            turns: &self.turns,
            ngrams: &self.ngrams,
            index: self.index,
            tensor: self.tensor,
            simdgroup_matrices: self.simdgroup_matrices,
            multiprocessors: self.multiprocessors,
            copies_ahead: self.copies_ahead,
            quantized: self.quantized,
            activations: self.activations,
            logits: self.logits.0,
        };
        lower(&self.graph, &self.steps, &self.buffers, &memory, shape)
    }

    /// Runs one list for this shape: once as it is, from its second use on as a recording.
    fn run_pieces(&mut self, shape: Shape, source: &mut dyn ExpertSource) -> Result<()> {
        let seen = self.recordings.contains_key(&shape);
        if !seen || shape.rows > FEW_ROWS {
            for piece in self.lower(shape) {
                self.run_piece(&piece, source, |device, list: &Vec<Dispatch>| device.run(list))?;
            }
            if self.recordings.len() >= MOST_RECORDINGS {
                self.forget();
            }
            self.recordings.insert(shape, None);
            return Ok(());
        }
        let recording = match self.recordings.get_mut(&shape).and_then(Option::take) {
            Some(recording) => recording,
            None => self.record(shape)?,
        };
        let mut outcome = Ok(());
        for piece in &recording {
            outcome = self.run_piece(piece, source, |device, id: &RecordingId| device.replay(*id));
            if outcome.is_err() {
                break;
            }
        }
        self.recordings.insert(shape, Some(recording));
        outcome
    }

    fn record(&mut self, shape: Shape) -> Result<Recording> {
        let mut recording = vec![];
        for piece in self.lower(shape) {
            recording.push(match piece {
                Piece::Run(list) => Piece::Run(self.device_mut().record(list)?),
                Piece::Experts { set, ids, pairs, body } => {
                    Piece::Experts { set, ids, pairs, body: self.device_mut().record(body)? }
                }
            });
        }
        Ok(recording)
    }

    fn run_piece<D>(
        &mut self,
        piece: &Piece<D>,
        source: &mut dyn ExpertSource,
        run: impl Fn(&mut dyn Device, &D) -> Result<()>,
    ) -> Result<()> {
        match piece {
            Piece::Run(list) => run(self.device_mut(), list),
            Piece::Experts { set, ids, pairs, body } => {
                let experts = self.graph.expert_sets()[set.0].experts;
                // So many tokens ask for every expert, or nearly: not worth waiting for their choice.
                let all = self.experts.tiers().is_some() && *pairs >= ALL_CHOSEN * experts;
                let chosen = match all {
                    true => (0..experts as u32).collect(),
                    false => self.chosen(*ids, *pairs)?,
                };
                let device = &mut **self.device.get_mut().unwrap_or_else(PoisonError::into_inner);
                if let Some((tiers, slots)) = self.experts.tiers() {
                    return tiers.stream(device, slots, *set, &chosen, |device| run(device, body));
                }
                self.run_experts(*set, &chosen, source, |device| run(device, body))
            }
        }
    }

    /// The distinct ids of a routing, ascending.
    fn chosen(&mut self, ids: Slice, pairs: usize) -> Result<Vec<u32>> {
        let mut bytes = vec![0; pairs * 4];
        self.device_mut().download(ids, &mut bytes)?;
        let mut ids: Vec<u32> = bytes.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
        ids.sort_unstable();
        ids.dedup();
        Ok(ids)
    }

    /// Runs `body` for all of `chosen`, as many at a time as there are slots.
    fn run_experts(
        &mut self,
        set: ExpertSetId,
        chosen: &[u32],
        source: &mut dyn ExpertSource,
        body: impl Fn(&mut dyn Device) -> Result<()>,
    ) -> Result<()> {
        let device = &mut **self.device.get_mut().unwrap_or_else(PoisonError::into_inner);
        source.announce(set, chosen)?;
        for (pass, ids) in chosen.chunks(self.experts.room(set)).enumerate() {
            if pass > 0 {
                device.synchronize()?;
            }
            self.experts.load(device, set, ids, source)?;
            self.experts.publish(device, set, |id| ids.binary_search(&id).is_ok())?;
            body(device)?;
        }
        Ok(())
    }
}

/// Whether a weight is a table of embeddings, and no product's too.
fn only_embeds(graph: &Graph, weight: WeightId) -> bool {
    let embeds = |op: &Op| matches!(*op, Op::Embed(EmbedOp { table }) if table == weight);
    let multiplies = |op: &Op| matches!(*op, Op::Linear(LinearOp { weight: own, .. }) if own == weight);
    let mut ops = graph.nodes().iter().map(|node| &node.op);
    ops.clone().any(embeds) && !ops.any(multiplies)
}

/// The bytes of floats, little-endian as on every GPU.
#[cfg(target_endian = "little")]
fn bytes_of(values: &mut [f32]) -> &mut [u8] {
    // SAFETY: floats and bytes have no invalid values and no padding; the length is that of the same memory.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}

fn all<const N: usize>(
    sizes: [usize; N],
    alloc: &mut impl FnMut(usize) -> Result<BufferId>,
) -> Result<[BufferId; N]> {
    let mut buffers = [BufferId(0); N];
    for (buffer, bytes) in buffers.iter_mut().zip(sizes) {
        *buffer = alloc(bytes)?;
    }
    Ok(buffers)
}

impl Executable for GpuExecutable {
    fn run(
        &mut self,
        batch: &Batch<'_>,
        experts: &mut dyn ExpertSource,
        logits: &mut Vec<f32>,
    ) -> Result<()> {
        let device = &mut **self.device.get_mut().unwrap_or_else(PoisonError::into_inner);
        self.experts.load_all(device, experts)?;
        let shape = Shape::of(batch);
        self.set_inputs(batch, shape)?;
        self.run_pieces(shape, experts)?;
        if shape.rows <= FEW_ROWS
            && let Some((tiers, _)) = self.experts.tiers()
        {
            tiers.forget();
        }
        // Not cleared: what has the right length need not be filled before it is overwritten.
        logits.resize(shape.outputs * self.graph.vocab_size(), 0.0);
        let from = self.logits.0;
        self.device_mut().download(from.into(), bytes_of(logits))
    }

    fn set_profiling(&mut self, on: bool) {
        self.profiling = on;
        if on {
            self.device_mut().start_profile();
        } else {
            // What was measured is not wanted, nor is an error of it.
            let _ = self.device_mut().take_profile();
        }
    }

    fn device_counts(&mut self) -> Option<DeviceCounts> {
        let device = &mut **self.device.get_mut().unwrap_or_else(PoisonError::into_inner);
        let [experts, fetched] = match self.experts.tiers() {
            Some((tiers, _)) => {
                self.asked += 1;
                tiers.traffic(device).ok()?
            }
            None => [0; 2],
        };
        let counts = device.counts();
        Some(DeviceCounts { experts, fetched, waits: counts.waits.saturating_sub(self.asked), ..counts })
    }

    fn take_profile(&mut self) -> Option<Profile> {
        if !self.profiling {
            return None;
        }
        let kernels = self.device_mut().take_profile().ok()?;
        self.device_mut().start_profile();
        let mut profile = Profile::default();
        for kernel in kernels {
            profile.add_all(&kernel.kernel, kernel.runs, kernel.time, Work::default());
        }
        Some(profile)
    }

    fn reserve_pages(&mut self, pages: usize) -> Result<()> {
        let device = &mut **self.device.get_mut().unwrap_or_else(PoisonError::into_inner);
        if self.state.reserve_pages(device, pages)? {
            self.forget();
        }
        Ok(())
    }

    fn reserve_slots(&mut self, slots: usize) -> Result<()> {
        let device = &mut **self.device.get_mut().unwrap_or_else(PoisonError::into_inner);
        if self.state.reserve_slots(device, slots)? {
            self.forget();
        }
        Ok(())
    }

    fn page_bytes(&self) -> usize {
        self.state.page_bytes()
    }

    fn read_page(&self, page: u32, out: &mut Vec<u8>) -> Result<()> {
        self.state.read_page(&mut **self.device(), page, out)
    }

    fn write_page(&mut self, page: u32, bytes: &[u8]) -> Result<()> {
        self.state.write_page(&mut **self.device(), page, bytes)
    }

    fn slot_bytes(&self) -> usize {
        self.state.slot_bytes()
    }

    fn read_slot(&self, slot: u32, out: &mut Vec<u8>) -> Result<()> {
        self.state.read_slot(&mut **self.device(), slot, out)
    }

    fn write_slot(&mut self, slot: u32, bytes: &[u8]) -> Result<()> {
        self.state.write_slot(&mut **self.device(), slot, bytes)
    }
}
