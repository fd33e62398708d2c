//! [`Emulator`]: a device made of fibres on the CPU, for tests. Every kernel is compiled from the text that GPUs run,
//! with checked memory: accesses out of bounds or of memory that nothing has written, races between threads and
//! diverging barriers are errors.

use std::any::Any;
use std::collections::BTreeSet;
use std::ffi::{CStr, CString, c_char, c_void};
use std::sync::{Arc, Mutex};

use super::device::{BufferId, Device, DeviceInfo, Dispatch, Grid, Order, RecordingId, Slice, View};
use crate::{Bytes, Error, Result};

/// Bytes of a page of memory that is adopted.
const ADOPTED_PAGE: usize = 4096;

/// Who wrote a byte last; see `emulator/machine.h`. An array, for which zeros are memory that nothing touches.
type Stamp = [u32; 2];

#[repr(C)]
struct BoundMemory {
    data: *mut u8,
    written: *mut u8,
    stamps: *mut Stamp,
    bytes: u64,
    name: *const c_char,
    writer: u32,
    /// Zero: a device buffer.
    element: u32,
    writes: *mut u64,
    reads: *mut u64,
}

#[repr(C)]
struct Binding {
    memory: *mut BoundMemory,
    offset: u64,
}

#[repr(C)]
struct KernelEntry {
    name: *const c_char,
    run: *const c_void,
    buffers: u32,
    constant_bytes: u32,
    next: *const KernelEntry,
}

unsafe extern "C" {
    fn moeflux_emulator_unit(name: *const c_char) -> *const KernelEntry;
    fn moeflux_emulator_run(
        kernel: *const KernelEntry,
        bindings: *const Binding,
        constants: *const c_void,
        grid: *const u32,
        threads: u32,
        asked: u32,
        first_group: u32,
        before: u32,
        seed: u64,
        message: *mut c_char,
        message_bytes: usize,
    ) -> i32;
}

/// A device buffer: 16-byte words, so that it is aligned.
struct Buffer {
    data: Vec<u128>,
    written: Vec<u8>,
    stamps: Vec<Stamp>,
    bytes: usize,
    /// Not of the device's memory.
    host: bool,
    name: CString,
}

/// A copy to host memory that is made some time before it is waited for.
struct Away {
    from: Slice,
    to: *mut [u8],
}

// SAFETY: memory that whoever started the copy leaves to it until it is waited for.
unsafe impl Send for Away {}

/// Looks at copies of which they have ended at one.
const LATE: u64 = 3;

/// Names of kernels.
pub type Ran = Arc<Mutex<BTreeSet<String>>>;

/// A device that is emulated.
#[derive(Default)]
pub struct Emulator {
    buffers: Vec<Option<Buffer>>,
    recordings: Vec<Option<Vec<Dispatch>>>,
    /// Whether kernels are those of the text that Metal is given.
    metal: bool,
    /// Whether it copies weights to a group's memory ahead, and whether in bulk.
    copies_ahead: bool,
    bulk_copies: bool,
    /// Whether it runs kernels for tensor cores.
    tensor_cores: bool,
    /// Where names of kernels that have run are kept.
    ran: Option<Ran>,
    /// Bytes a second of host memory.
    bus: u64,
    /// Bytes of buffers that there may be, if that is limited, and those that there are.
    limit: Option<u64>,
    used: u64,
    /// Appended to names of units: a unit with a planted fault.
    fault: Option<String>,
    random: u64,
    away: Vec<Away>,
    /// Groups run so far, and one: their numbers tell this dispatch's writes from earlier ones.
    groups: u32,
    /// The number of the first one of the dispatches right before.
    before: u32,
}

impl Emulator {
    /// A device whose order of threads follows from `seed`.
    pub fn new(seed: u64) -> Self {
        Self { random: seed, groups: 1, before: 1, bus: 50_000_000_000, ..Self::default() }
    }

    /// The same device, which reads so many bytes of host memory a second.
    #[must_use]
    pub fn with_bus(self, bus: u64) -> Self {
        Self { bus, ..self }
    }

    /// A device that runs the kernels of a unit with the planted fault `fault` where there is one.
    pub fn with_fault(seed: u64, fault: &str) -> Self {
        Self { fault: Some(fault.into()), ..Self::new(seed) }
    }

    /// The same device with kernels compiled from the text that Metal is given.
    #[must_use]
    pub fn metal(self) -> Self {
        Self { metal: true, ..self }
    }

    /// The same device with what CUDA's of compute capability 9.0 have for copies of weights to a group's memory, and with so few
    /// multiprocessors that small weights are worth it.
    #[must_use]
    pub fn copying_ahead(self) -> Self {
        Self { copies_ahead: true, bulk_copies: true, ..self }
    }

    /// The same device with what CUDA's of other compute capabilities have for that, and as few multiprocessors.
    #[must_use]
    pub fn copying_by_lanes(self) -> Self {
        Self { copies_ahead: true, ..self }
    }

    /// The same device with what CUDA's have for products on tensor cores, of those encodings that the kernels are compiled for here.
    #[must_use]
    pub fn tensor_cores(self) -> Self {
        Self { tensor_cores: true, ..self }
    }

    /// The same device, which adds names of kernels that it runs to `ran`.
    #[must_use]
    pub fn telling(self, ran: Ran) -> Self {
        Self { ran: Some(ran), ..self }
    }

    /// The same device with so many bytes of memory, of which what it knows about them takes nothing.
    #[must_use]
    pub fn with_memory(self, bytes: u64) -> Self {
        Self { limit: Some(bytes), ..self }
    }

    fn error(text: impl Into<String>) -> Error {
        Error::Device { reason: text.into() }
    }

    fn memory(&self) -> u64 {
        self.limit.unwrap_or(1 << 40)
    }

    fn buffer(&mut self, id: BufferId) -> Result<&mut Buffer> {
        let buffer = self.buffers.get_mut(id.0).and_then(Option::as_mut);
        buffer.ok_or_else(|| Self::error(format!("no buffer {}", id.0)))
    }

    /// Memory that is not the device's own.
    fn alloc_elsewhere(&mut self, bytes: usize) -> Result<BufferId> {
        let (limit, used) = (self.limit.take(), self.used);
        let buffer = self.alloc(bytes);
        (self.limit, self.used) = (limit, used);
        let buffer = buffer?;
        self.buffer(buffer)?.host = true;
        Ok(buffer)
    }

    /// The bytes from `at` on, and whether each was written.
    fn bytes(&mut self, at: Slice, len: usize) -> Result<(&mut [u8], &mut [u8])> {
        let buffer = self.buffer(at.buffer)?;
        let end = at.offset.checked_add(len).filter(|end| *end <= buffer.bytes);
        let end = end.ok_or_else(|| {
            Self::error(format!("{len} bytes at {} of a buffer of {}", at.offset, buffer.bytes))
        })?;
        let data: *mut u8 = buffer.data.as_mut_ptr().cast();
        // SAFETY: the words hold at least `bytes` bytes, and are borrowed through `buffer`.
        let data = unsafe { std::slice::from_raw_parts_mut(data, buffer.bytes) };
        Ok((&mut data[at.offset..end], &mut buffer.written[at.offset..end]))
    }

    fn kernel(&self, unit: &str, name: &str) -> Result<*const KernelEntry> {
        let unit = if self.metal { format!("metal/{unit}") } else { unit.to_owned() };
        let find = |unit: &str| {
            let unit = CString::new(unit).expect("names have no zero byte");
            // SAFETY: the name is a terminated string; the list it gives lives as long as the program.
            let mut entry = unsafe { moeflux_emulator_unit(unit.as_ptr()) };
            while !entry.is_null() {
                // SAFETY: entries and their names live as long as the program.
                let (entry_name, next) = unsafe { (CStr::from_ptr((*entry).name), (*entry).next) };
                if entry_name.to_bytes() == name.as_bytes() {
                    return Some(entry);
                }
                entry = next;
            }
            None
        };
        // A unit that is compiled for several encodings is one for each, which the kernel's name ends in.
        let encodings = name.match_indices('_').map(|(at, _)| format!("{unit}@{}", &name[at + 1..]));
        let units: Vec<String> = std::iter::once(unit.clone()).chain(encodings).collect();
        let faulty = self
            .fault
            .as_ref()
            .and_then(|fault| units.iter().find_map(|unit| find(&format!("{unit}!{fault}"))));
        faulty
            .or_else(|| units.iter().find_map(|unit| find(unit)))
            .ok_or_else(|| Self::error(format!("no kernel {name} in {unit}")))
    }

    fn next_random(&mut self) -> u64 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        self.random >> 16
    }

    fn run_one(&mut self, dispatch: &Dispatch) -> Result<()> {
        let kernel = self.kernel(dispatch.unit, &dispatch.kernel)?;
        if let Some(ran) = &self.ran {
            ran.lock().expect("nothing panics while it is held").insert(dispatch.kernel.to_string());
        }
        // SAFETY: the entry lives as long as the program.
        let (buffers, constant_bytes) = unsafe { ((*kernel).buffers, (*kernel).constant_bytes) };
        let bad = |what: &str, expected: usize, got: usize| {
            Self::error(format!("kernel {}: {got} {what}, expected {expected}", dispatch.kernel))
        };
        if dispatch.buffers.len() != buffers as usize {
            return Err(bad("buffers", buffers as usize, dispatch.buffers.len()));
        }
        if dispatch.constants.len() != constant_bytes as usize {
            return Err(bad("bytes of constants", constant_bytes as usize, dispatch.constants.len()));
        }
        let most = if dispatch.unit.starts_with("cuda/") { 1024 } else { 256 };
        if !dispatch.threads.is_multiple_of(32) || !(32..=most).contains(&dispatch.threads) {
            return Err(bad("threads", most as usize, dispatch.threads as usize));
        }
        let grid = match dispatch.grid {
            Grid::Fixed(grid) => grid,
            Grid::Indirect { at, limit } => {
                let (data, _) = self.bytes(at, 12)?;
                let grid: Vec<u32> =
                    data.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
                if grid.iter().zip(limit).any(|(n, limit)| *n > limit) {
                    return Err(Self::error(format!("{}: grid {grid:?} beyond {limit:?}", dispatch.kernel)));
                }
                [grid[0], grid[1], grid[2]]
            }
        };
        if grid.contains(&0) {
            return Ok(());
        }
        // Bindings of one buffer share a description of it.
        let mut memories: Vec<(BufferId, Box<BoundMemory>)> = vec![];
        let mut bindings = vec![];
        for slice in &dispatch.buffers {
            let buffer = self.buffer(slice.buffer)?;
            let memory = BoundMemory {
                data: buffer.data.as_mut_ptr().cast(),
                written: buffer.written.as_mut_ptr(),
                stamps: buffer.stamps.as_mut_ptr(),
                bytes: buffer.bytes as u64,
                name: buffer.name.as_ptr(),
                writer: 0,
                element: 0,
                writes: std::ptr::null_mut(),
                reads: std::ptr::null_mut(),
            };
            let at = memories.iter().position(|(id, _)| *id == slice.buffer);
            let at = at.unwrap_or_else(|| {
                memories.push((slice.buffer, Box::new(memory)));
                memories.len() - 1
            });
            bindings.push(Binding { memory: &raw mut *memories[at].1, offset: slice.offset as u64 });
        }
        let mut message = [0u8; 1024];
        let seed = self.next_random();
        // SAFETY: the kernel takes as many bindings and bytes of constants as it is given, as checked above; every
        // binding describes memory of a buffer that lives in `self`, and accesses are checked against its size.
        let outcome = unsafe {
            moeflux_emulator_run(
                kernel,
                bindings.as_ptr(),
                dispatch.constants.as_ptr().cast(),
                grid.as_ptr(),
                dispatch.threads,
                dispatch.shared,
                self.groups,
                self.before,
                seed,
                message.as_mut_ptr().cast(),
                message.len(),
            )
        };
        self.groups = self.groups.wrapping_add(grid.iter().product()).max(1);
        if outcome == 0 {
            return Ok(());
        }
        let message = CStr::from_bytes_until_nul(&message).map_or("no message".into(), CStr::to_string_lossy);
        Err(Self::error(message))
    }

    /// Runs stages one after the other, the dispatches of a stage in random order, and what is aside at once or as late as may be.
    fn run_all(&mut self, dispatches: &[Dispatch]) -> Result<()> {
        let mut rest = dispatches;
        let mut aside = vec![];
        while !rest.is_empty() {
            if rest[0].order == Order::Aside && self.next_random().is_multiple_of(2) {
                aside.push(&rest[0]);
                rest = &rest[1..];
                continue;
            }
            if rest[0].order == Order::Joining {
                aside.drain(..).try_for_each(|late| self.run_one(late))?;
            }
            let beside = rest[1..].iter().take_while(|d| d.order == Order::Beside).count();
            let (stage, later) = rest.split_at(beside + 1);
            let begun = self.groups;
            if stage[0].order == Order::AfterEnd {
                self.before = begun;
            }
            let first = self.next_random() as usize;
            for i in 0..stage.len() {
                self.run_one(&stage[(first + i) % stage.len()])?;
            }
            self.before = begun;
            rest = later;
        }
        aside.into_iter().try_for_each(|late| self.run_one(late))
    }
}

impl Device for Emulator {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            name: "emulator".into(),
            memory: self.memory(),
            free: self.memory().saturating_sub(self.used),
            largest_buffer: 1 << 40,
            unified: self.metal,
            tensor_cores: self.tensor_cores,
            bulk_copies: self.bulk_copies,
            clusters: false,
            warp_groups: false,
            byte_matrices: !self.metal,
            multiprocessors: if self.copies_ahead { 4 } else { 8 },
            bus: self.bus,
            group_memory: match (self.copies_ahead, self.bulk_copies) {
                (false, _) => 32 << 10,
                (true, false) => 99 << 10,
                (true, true) => 227 << 10,
            },
            copies_ahead: self.copies_ahead,
            simdgroup_matrices: self.metal,
        }
    }

    fn alloc(&mut self, bytes: usize) -> Result<BufferId> {
        let DeviceInfo { name: device, free, .. } = self.info();
        let wanted = bytes as u64;
        if wanted > free {
            return Err(Error::DeviceMemory { device, wanted, free });
        }
        self.used += wanted;
        let id = self.buffers.len();
        self.buffers.push(Some(Buffer {
            // Not zeros, which would hide that nothing was written.
            // Some more than asked for, so that what is just beyond the end belongs to no other buffer.
            data: vec![0xcdcd_cdcd_cdcd_cdcd_cdcd_cdcd_cdcd_cdcd; bytes.div_ceil(16) + 16],
            written: vec![0; bytes],
            stamps: vec![[0; 2]; bytes],
            bytes,
            host: false,
            name: CString::new(format!("buffer {id}")).expect("no zero byte"),
        }));
        Ok(BufferId(id))
    }

    fn free(&mut self, buffer: BufferId) {
        if let Some(buffer) = self.buffers[buffer.0].take().filter(|buffer| !buffer.host) {
            self.used -= buffer.bytes as u64;
        }
    }

    fn alloc_host(&mut self, bytes: usize) -> Result<BufferId> {
        let buffer = self.alloc_elsewhere(bytes)?;
        self.clear(buffer.into(), bytes)?;
        Ok(buffer)
    }

    fn reaches(&mut self, other: &mut (dyn Device + 'static)) -> bool {
        let other: &mut dyn Any = other;
        other.is::<Self>()
    }

    /// A copy, which [`Device::follow`] brings up to date.
    fn view(&mut self, _other: &mut (dyn Device + 'static), buffer: BufferId, bytes: usize) -> Result<View> {
        Ok(View { of: buffer, at: self.alloc_elsewhere(bytes)?, bytes })
    }

    fn follow(&mut self, other: &mut (dyn Device + 'static), views: &[View]) -> Result<()> {
        let other: &mut dyn Any = other;
        let other = other.downcast_mut::<Self>().ok_or_else(|| Self::error("a device of another kind"))?;
        for View { of, at, bytes } in views {
            let (data, written) = other.bytes((*of).into(), *bytes)?;
            let (to_data, to_written) = self.bytes((*at).into(), *bytes)?;
            to_data.copy_from_slice(data);
            to_written.copy_from_slice(written);
        }
        Ok(())
    }

    fn host_bytes(&mut self, buffer: BufferId) -> Result<&mut [u8]> {
        let bytes = self.buffer(buffer)?.bytes;
        Ok(self.bytes(buffer.into(), bytes)?.0)
    }

    /// As Metal does, with whole pages around the bytes, of which nothing but the bytes may be read.
    fn adopt(&mut self, bytes: &Bytes) -> Result<Option<Slice>> {
        let bytes = bytes.as_slice();
        let offset = bytes.as_ptr() as usize % ADOPTED_PAGE;
        if !self.metal || !offset.is_multiple_of(16) {
            return Ok(None);
        }
        let slice = Slice { buffer: self.alloc(offset + bytes.len())?, offset };
        self.upload(slice, bytes)?;
        Ok(Some(slice))
    }

    fn upload(&mut self, to: Slice, bytes: &[u8]) -> Result<()> {
        let (data, written) = self.bytes(to, bytes.len())?;
        data.copy_from_slice(bytes);
        written.fill(1);
        Ok(())
    }

    fn download(&mut self, from: Slice, out: &mut [u8]) -> Result<()> {
        let (data, _) = self.bytes(from, out.len())?;
        out.copy_from_slice(data);
        Ok(())
    }

    fn copy(&mut self, from: Slice, to: Slice, bytes: usize) -> Result<()> {
        let (data, written) = self.bytes(from, bytes)?;
        let (data, written) = (data.to_vec(), written.to_vec());
        let (to_data, to_written) = self.bytes(to, bytes)?;
        to_data.copy_from_slice(&data);
        to_written.copy_from_slice(&written);
        Ok(())
    }

    fn copy_away(&mut self, from: Slice, to: &mut [u8]) -> Result<()> {
        self.away.push(Away { from, to });
        Ok(())
    }

    fn are_away(&mut self, waits: bool) -> Result<bool> {
        let ended = waits || self.next_random().is_multiple_of(LATE);
        if ended {
            self.after_away()?;
        }
        Ok(ended)
    }

    fn after_away(&mut self) -> Result<()> {
        for Away { from, to } in std::mem::take(&mut self.away) {
            // SAFETY: nothing else uses the memory until the copy has ended, by the contract of `copy_away`.
            self.download(from, unsafe { &mut *to })?;
        }
        Ok(())
    }

    fn clear(&mut self, at: Slice, bytes: usize) -> Result<()> {
        let (data, written) = self.bytes(at, bytes)?;
        data.fill(0);
        written.fill(1);
        Ok(())
    }

    fn run(&mut self, dispatches: &[Dispatch]) -> Result<()> {
        self.run_all(dispatches)
    }

    fn record(&mut self, dispatches: Vec<Dispatch>) -> Result<RecordingId> {
        self.recordings.push(Some(dispatches));
        Ok(RecordingId(self.recordings.len() - 1))
    }

    fn replay(&mut self, recording: RecordingId) -> Result<()> {
        let slot = self.recordings.get_mut(recording.0);
        let dispatches = slot.and_then(Option::take).ok_or_else(|| Self::error("no such recording"))?;
        let outcome = self.run_all(&dispatches);
        self.recordings[recording.0] = Some(dispatches);
        outcome
    }

    fn forget(&mut self, recording: RecordingId) {
        self.recordings[recording.0] = None;
    }

    fn synchronize(&mut self) -> Result<()> {
        Ok(())
    }
}
