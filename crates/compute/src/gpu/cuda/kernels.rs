//! [`Kernels`]: what is loaded of the archive on a GPU, by all of the process's [`super::Cuda`] together, as modules and
//! what they allow their functions belong to the GPU's context, which is one for a process.

use std::collections::HashMap;
use std::ffi::{CString, c_int};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::archive::{Archive, ImageId};
use super::driver::{Driver, Function, Module, attribute, call};
use crate::gpu::device::Dispatch;
use crate::gpu::kernels::{
    BATCHED_UNIT, BLOCKS_UNIT, EARLY_UNIT, ENTER_EXPERTS_UNIT, EXPERT_PANELS_UNIT, JOINT_EXPERTS_UNIT,
    JOINT_ROWS_UNIT, MEET_UNIT, PANELS_UNIT, PRODUCTS_UNIT, TENSOR_DECODE_UNIT,
};
use crate::{Error, Result};

/// So much shared memory a block has without asking, beside what any kernel declares.
const DEFAULT_SHARED_BYTES: u32 = 32 << 10;

/// Units whose kernels a token of decoding takes.
const DECODING_UNITS: &[&str] = &[
    "few_rows",
    "few_experts",
    "batch",
    "moe",
    "divided",
    "route",
    "decode",
    "attention",
    "tiers",
    TENSOR_DECODE_UNIT,
    EARLY_UNIT,
    JOINT_ROWS_UNIT,
    JOINT_EXPERTS_UNIT,
    BATCHED_UNIT,
    PRODUCTS_UNIT,
    PANELS_UNIT,
    BLOCKS_UNIT,
    ENTER_EXPERTS_UNIT,
    MEET_UNIT,
];

/// Of a multiprocessor's memory, what groups of their kernels get, where two of most find room; the rest is a cache.
const SHARED_BYTES: usize = 114 << 10;

/// The same in percent of that memory, all but a kilobyte of which one group may have.
fn shared_percent(group_memory: usize) -> c_int {
    let percent = (100 * SHARED_BYTES).div_ceil(group_memory + (1 << 10));
    percent.min(100) as c_int
}

/// A kernel that can be launched.
#[derive(Debug, Clone, Copy)]
pub(super) struct Kernel {
    pub(super) function: Function,
    /// Whether it waits for the kernel before it by itself.
    pub(super) waits: bool,
    /// Dynamic shared memory that it may have by now.
    shared_bytes: u32,
    /// Whether it has been told how much of a multiprocessor's memory is for groups.
    divided: bool,
}

/// Kernels of a GPU, loaded when they are first asked for and unloaded with the last of their users.
pub(super) struct Kernels {
    driver: Arc<Driver>,
    /// Whether there is machine code for the GPU.
    has_code: bool,
    /// The part of a multiprocessor's memory that groups of kernels of decoding get.
    shared_percent: c_int,
    loaded: Mutex<Loaded>,
}

struct Loaded {
    archive: Archive,
    kernels: HashMap<String, Kernel>,
    modules: HashMap<ImageId, Module>,
}

/// Goes on after a thread that panicked: what is loaded is right at any time.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Kernels {
    /// Those of the GPU number `ordinal`, of major compute capability `major`, whose groups may have `group_memory` bytes of memory.
    pub(super) fn of(driver: &Arc<Driver>, ordinal: c_int, major: c_int, group_memory: usize) -> Arc<Self> {
        // By where the driver's library is in memory, and GPU.
        type Users = HashMap<(usize, c_int), Weak<Kernels>>;
        static SHARED: Mutex<Option<Users>> = Mutex::new(None);
        let mut shared = lock(&SHARED);
        let shared = shared.get_or_insert_default();
        let key = (driver.module_load as usize, ordinal);
        if let Some(kernels) = shared.get(&key).and_then(Weak::upgrade) {
            return kernels;
        }
        let archive = Archive::open(major);
        let kernels = Arc::new(Self {
            driver: Arc::clone(driver),
            has_code: archive.has_code(),
            shared_percent: shared_percent(group_memory),
            loaded: Mutex::new(Loaded { archive, kernels: HashMap::new(), modules: HashMap::new() }),
        });
        shared.insert(key, Arc::downgrade(&kernels));
        kernels
    }

    /// Whether there is machine code for the GPU.
    pub(super) fn has_code(&self) -> bool {
        self.has_code
    }

    /// Whether machine code is there for the GPU and its driver knows the form. The GPU's context is the calling thread's.
    pub(super) fn runs_code(&self) -> bool {
        let mut loaded = lock(&self.loaded);
        let code = loaded.archive.find("wide_enter")[0].clone();
        code.is_some_and(|id| loaded.module(&self.driver, id).is_ok())
    }

    /// The kernel of a dispatch, allowed the dynamic shared memory that the dispatch wants. The GPU's context is the calling
    /// thread's.
    pub(super) fn get(&self, dispatch: &Dispatch) -> Result<Kernel> {
        let mut loaded = lock(&self.loaded);
        let name = &*dispatch.kernel;
        if !loaded.kernels.contains_key(name) {
            let kernel = loaded.load(&self.driver, name)?;
            loaded.kernels.insert(name.to_owned(), kernel);
        }
        let kernel = loaded.kernels.get_mut(name).expect("it was just put there");
        let set = |what, value| call!(self.driver, function_set(kernel.function, what, value));
        if kernel.shared_bytes < dispatch.shared {
            set(attribute::FUNCTION_DYNAMIC_SHARED_BYTES, dispatch.shared as c_int)?;
            kernel.shared_bytes = dispatch.shared;
        }
        // As much for all kernels of decoding, but for those that live on it: such as ask for different parts are not there
        // together.
        let percent = match dispatch.unit {
            EXPERT_PANELS_UNIT => Some(100),
            unit => DECODING_UNITS.contains(&unit).then_some(self.shared_percent),
        };
        if let Some(percent) = percent.filter(|_| !kernel.divided) {
            set(attribute::FUNCTION_SHARED_PERCENT, percent)?;
            kernel.divided = true;
        }
        Ok(*kernel)
    }
}

impl Loaded {
    fn load(&mut self, driver: &Driver, name: &str) -> Result<Kernel> {
        let failed = |error| Error::Device { reason: format!("kernel {name}: {error}") };
        let [compiled, text] = self.archive.find(name);
        // An older driver may not know the form of machine code.
        let loaded = compiled.and_then(|id| self.module(driver, id).ok());
        let module = match (loaded, text) {
            (Some(module), _) => module,
            (None, Some(id)) => self.module(driver, id).map_err(failed)?,
            (None, None) => {
                return Err(Error::Device { reason: format!("there is no kernel {name}") });
            }
        };
        let symbol = CString::new(name).expect("a name has no zero byte");
        let mut function = Function::NULL;
        call!(driver, module_function(&mut function, module, symbol.as_ptr()))?;
        Ok(Kernel { function, waits: loaded.is_some(), shared_bytes: DEFAULT_SHARED_BYTES, divided: false })
    }

    /// The module of an image, loaded when it is first asked for.
    fn module(&mut self, driver: &Driver, id: ImageId) -> Result<Module> {
        if let Some(module) = self.modules.get(&id) {
            return Ok(*module);
        }
        let mut module = Module::NULL;
        let image = self.archive.image(&id)?;
        call!(driver, module_load(&mut module, image.as_ptr().cast()))?;
        self.modules.insert(id, module);
        Ok(module)
    }
}

impl Drop for Kernels {
    /// Its last user has made the context the calling thread's.
    fn drop(&mut self) {
        for module in lock(&self.loaded).modules.values() {
            let _ = call!(self.driver, module_unload(*module));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_groups_find_room() {
        // Compute capability 9.0, 8.0, and 8.6, 8.9 or 12.0.
        assert_eq!([227, 163, 99].map(|kib| shared_percent(kib << 10)), [50, 70, 100]);
    }
}
