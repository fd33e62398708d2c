//! The CUDA driver's functions, found in its library when a device is first asked for.
//!
//! Declared by hand: the few that are needed, so that a machine without the library, or with one that lacks a
//! function, gives an error instead of a panic. Sources: `cuda.h` of CUDA 12.0, the oldest driver that has them all.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::Path;
use std::ptr;

use libloading::Library;

use crate::{Error, Result};

/// Error codes of the driver that mean something to us.
pub(super) const OUT_OF_MEMORY: c_int = 2;
const NOT_READY: c_int = 600;
const NO_DEVICE: c_int = 100;
const SUCCESS: c_int = 0;
/// Errors after which a context can do nothing any more: device not available, uncorrectable memory error, a fault of a
/// kernel (illegal address, timeout, traps, misaligned access, …), unknown.
const LOST: &[c_int] = &[46, 214, 220, 700, 702, 709, 714, 715, 716, 717, 718, 719, 999];

/// Driver interface of CUDA 12.0.
const OLDEST_DRIVER: c_int = 12_000;

/// Device memory.
pub(super) type DevicePointer = u64;

macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {$(
        $(#[$doc])*
        #[repr(transparent)]
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(super) struct $name(*mut c_void);

        impl $name {
            pub(super) const NULL: Self = Self(ptr::null_mut());
        }

        // SAFETY: the driver's handles may be used by any thread.
        unsafe impl Send for $name {}
        // SAFETY: as above.
        unsafe impl Sync for $name {}
    )*};
}

handles! {
    /// The primary context of a device.
    Context,
    /// A queue of work.
    Stream,
    /// A mark in a queue.
    Event,
    /// Loaded device code.
    Module,
    /// A kernel of a module.
    Function,
    /// Work with its dependencies.
    Graph,
    /// A graph ready to run.
    GraphExec,
    /// A piece of work in a graph.
    GraphNode,
}

/// `CUDA_KERNEL_NODE_PARAMS_v2`.
#[repr(C)]
pub(super) struct KernelNode {
    pub(super) function: Function,
    pub(super) grid: [c_uint; 3],
    pub(super) threads: [c_uint; 3],
    pub(super) shared_bytes: c_uint,
    pub(super) parameters: *mut *mut c_void,
    pub(super) extra: *mut *mut c_void,
    pub(super) kernel: *mut c_void,
    pub(super) context: Context,
}

/// `CUlaunchAttribute`, whose value is a union of 64 bytes.
#[repr(C)]
pub(super) struct LaunchAttribute {
    id: c_int,
    padding: [u8; 4],
    value: [u32; 16],
}

impl LaunchAttribute {
    /// `CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION`.
    const CLUSTER: c_int = 4;

    /// Has so many blocks along the first axis run together.
    pub(super) fn cluster(blocks: u32) -> Self {
        let mut value = [0; 16];
        value[..3].copy_from_slice(&[blocks, 1, 1]);
        Self { id: Self::CLUSTER, padding: [0; 4], value }
    }
}

/// `CUlaunchConfig`.
#[repr(C)]
pub(super) struct LaunchConfig {
    pub(super) grid: [c_uint; 3],
    pub(super) threads: [c_uint; 3],
    pub(super) shared_bytes: c_uint,
    pub(super) stream: Stream,
    pub(super) attributes: *mut LaunchAttribute,
    pub(super) attribute_count: c_uint,
}

/// `CUgraphEdgeData`.
#[repr(C)]
struct EdgeData {
    from_port: u8,
    to_port: u8,
    kind: u8,
    reserved: [u8; 5],
}

type AddEdges =
    unsafe extern "C" fn(Graph, *const GraphNode, *const GraphNode, *const EdgeData, usize) -> c_int;

/// `CUdevice_attribute` and `CUfunction_attribute` values.
pub(super) mod attribute {
    use std::ffi::c_int;
    pub(crate) const MULTIPROCESSORS: c_int = 16;
    pub(crate) const CAPABILITY_MAJOR: c_int = 75;
    pub(crate) const CAPABILITY_MINOR: c_int = 76;
    pub(crate) const MOST_SHARED_BYTES: c_int = 97;
    pub(crate) const FUNCTION_DYNAMIC_SHARED_BYTES: c_int = 8;
    pub(crate) const FUNCTION_SHARED_PERCENT: c_int = 9;
}

macro_rules! functions {
    ($($field:ident = $symbol:literal ($($arg:ty),* $(,)?);)*) => {
        /// The driver's library with its functions; each returns an error code.
        #[derive(Debug)]
        pub(super) struct Driver {
            $(pub(super) $field: unsafe extern "C" fn($($arg),*) -> c_int,)*
            /// `cuGraphAddDependencies_v2`, of drivers from CUDA 12.3 on.
            graph_add_edges: Option<AddEdges>,
            /// Keeps the functions mapped.
            _library: Library,
        }

        #[cfg(test)]
        pub(super) const SYMBOLS: &[&str] = &[$($symbol),*];

        impl Driver {
            fn from_library(library: Library) -> Result<Self> {
                // SAFETY: the types are those of `cuda.h` for these symbols, and the library outlives the pointers,
                // which are fields beside it.
                unsafe {
                    Ok(Self {
                        $($field: find(&library, $symbol)?,)*
                        graph_add_edges: find(&library, "cuGraphAddDependencies_v2").ok(),
                        _library: library,
                    })
                }
            }
        }
    };
}

/// A function of the library, copied out of its symbol.
///
/// # Safety
/// `T` must be the function's type, and the library must outlive its use.
unsafe fn find<T: Copy>(library: &Library, symbol: &str) -> Result<T> {
    // SAFETY: the caller's.
    let found = unsafe { library.get::<T>(symbol.as_bytes()) };
    found.map(|symbol| *symbol).map_err(|_| Error::NoDevice {
        reason: format!("the NVIDIA driver has no {symbol}: CUDA 12.0 (driver 525) or later is needed"),
    })
}

functions! {
    init = "cuInit"(c_uint);
    driver_version = "cuDriverGetVersion"(*mut c_int);
    error_name = "cuGetErrorName"(c_int, *mut *const c_char);
    error_string = "cuGetErrorString"(c_int, *mut *const c_char);
    device_count = "cuDeviceGetCount"(*mut c_int);
    device_get = "cuDeviceGet"(*mut c_int, c_int);
    device_name = "cuDeviceGetName"(*mut c_char, c_int, c_int);
    device_memory = "cuDeviceTotalMem_v2"(*mut usize, c_int);
    device_attribute = "cuDeviceGetAttribute"(*mut c_int, c_int, c_int);
    context_retain = "cuDevicePrimaryCtxRetain"(*mut Context, c_int);
    context_release = "cuDevicePrimaryCtxRelease_v2"(c_int);
    context_set = "cuCtxSetCurrent"(Context);
    can_reach = "cuDeviceCanAccessPeer"(*mut c_int, c_int, c_int);
    context_reach = "cuCtxEnablePeerAccess"(Context, c_uint);
    memory_info = "cuMemGetInfo_v2"(*mut usize, *mut usize);
    memory_alloc = "cuMemAlloc_v2"(*mut DevicePointer, usize);
    memory_free = "cuMemFree_v2"(DevicePointer);
    host_alloc = "cuMemHostAlloc"(*mut *mut c_void, usize, c_uint);
    host_free = "cuMemFreeHost"(*mut c_void);
    host_register = "cuMemHostRegister_v2"(*mut c_void, usize, c_uint);
    host_unregister = "cuMemHostUnregister"(*mut c_void);
    host_pointer = "cuMemHostGetDevicePointer_v2"(*mut DevicePointer, *mut c_void, c_uint);
    copy_to_device = "cuMemcpyHtoDAsync_v2"(DevicePointer, *const c_void, usize, Stream);
    copy_to_host = "cuMemcpyDtoHAsync_v2"(*mut c_void, DevicePointer, usize, Stream);
    copy_within = "cuMemcpyDtoDAsync_v2"(DevicePointer, DevicePointer, usize, Stream);
    copy_between = "cuMemcpyPeerAsync"(DevicePointer, Context, DevicePointer, Context, usize, Stream);
    set_bytes = "cuMemsetD8Async"(DevicePointer, u8, usize, Stream);
    stream_create = "cuStreamCreate"(*mut Stream, c_uint);
    stream_destroy = "cuStreamDestroy_v2"(Stream);
    stream_wait = "cuStreamWaitEvent"(Stream, Event, c_uint);
    stream_synchronize = "cuStreamSynchronize"(Stream);
    event_create = "cuEventCreate"(*mut Event, c_uint);
    event_destroy = "cuEventDestroy_v2"(Event);
    event_record = "cuEventRecord"(Event, Stream);
    event_query = "cuEventQuery"(Event);
    event_synchronize = "cuEventSynchronize"(Event);
    event_elapsed = "cuEventElapsedTime"(*mut f32, Event, Event);
    module_load = "cuModuleLoadData"(*mut Module, *const c_void);
    module_unload = "cuModuleUnload"(Module);
    module_function = "cuModuleGetFunction"(*mut Function, Module, *const c_char);
    function_set = "cuFuncSetAttribute"(Function, c_int, c_int);
    launch = "cuLaunchKernelEx"(*const LaunchConfig, Function, *mut *mut c_void, *mut *mut c_void);
    graph_create = "cuGraphCreate"(*mut Graph, c_uint);
    graph_destroy = "cuGraphDestroy"(Graph);
    graph_add_kernel = "cuGraphAddKernelNode_v2"(
        *mut GraphNode, Graph, *const GraphNode, usize, *const KernelNode,
    );
    graph_kernel_set = "cuGraphKernelNodeSetAttribute"(GraphNode, c_int, *const [u32; 16]);
    graph_instantiate = "cuGraphInstantiateWithFlags"(*mut GraphExec, Graph, u64);
    graph_launch = "cuGraphLaunch"(GraphExec, Stream);
    graph_exec_destroy = "cuGraphExecDestroy"(GraphExec);
}

/// Work that the driver failed at.
macro_rules! call {
    ($driver:expr, $function:ident($($arg:expr),* $(,)?)) => {{
        let driver = &*$driver;
        // SAFETY: the arguments are those of `cuda.h`, pointers among them valid for the call; handles are live
        // because their owners hold them.
        let code = unsafe { (driver.$function)($($arg),*) };
        driver.check(stringify!($function), code)
    }};
}
pub(super) use call;

impl Driver {
    /// Loads the driver and initialises it.
    ///
    /// # Errors
    /// [`Error::NoDevice`] saying what is missing.
    pub(super) fn load() -> Result<Self> {
        Self::load_from(Path::new("libcuda.so.1"))
    }

    /// The same from a file, or a name that the system looks for.
    pub(super) fn load_from(file: &Path) -> Result<Self> {
        // SAFETY: the driver's library runs no code of ours when it is loaded.
        let library = unsafe { Library::new(file) };
        let library = library.map_err(|_| Error::NoDevice {
            reason: format!("the NVIDIA driver ({}) is not installed", file.display()),
        })?;
        let driver = Self::from_library(library)?;
        // SAFETY: initialising takes flags, which must be 0.
        match unsafe { (driver.init)(0) } {
            SUCCESS => {}
            NO_DEVICE => return Err(Error::NoDevice { reason: "the NVIDIA driver finds no GPU".into() }),
            code => {
                let reason = format!("the NVIDIA driver does not start: {}", driver.describe(code));
                return Err(Error::NoDevice { reason });
            }
        }
        let mut version = 0;
        call!(&driver, driver_version(&mut version))?;
        if version < OLDEST_DRIVER {
            return Err(Error::NoDevice {
                reason: format!(
                    "the NVIDIA driver is for CUDA {}.{}; 12.0 (driver 525) or later is needed",
                    version / 1000,
                    version % 1000 / 10
                ),
            });
        }
        Ok(driver)
    }

    /// The driver's words for an error.
    fn describe(&self, code: c_int) -> String {
        let text = |function: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int| {
            let mut text = ptr::null();
            // SAFETY: `text` may be written; the string it is set to is the library's and constant.
            unsafe {
                if function(code, &mut text) != SUCCESS || text.is_null() {
                    return None;
                }
                Some(CStr::from_ptr(text).to_string_lossy().into_owned())
            }
        };
        let name = text(self.error_name).unwrap_or_else(|| format!("error {code}"));
        match text(self.error_string) {
            Some(words) => format!("{words} ({name})"),
            None => name,
        }
    }

    /// An error unless `code` is success.
    pub(super) fn check(&self, action: &str, code: c_int) -> Result<()> {
        match code {
            SUCCESS => Ok(()),
            code if LOST.contains(&code) => Err(Error::DeviceLost { reason: self.describe(code) }),
            code => Err(Error::Device { reason: format!("{action}: {}", self.describe(code)) }),
        }
    }

    /// Whether [`Self::add_early_edge`] can.
    pub(super) fn has_early_edges(&self) -> bool {
        self.graph_add_edges.is_some()
    }

    /// Lets kernel node `to` be set up while `from` runs (programmatic dependent launch); it waits for it itself.
    pub(super) fn add_early_edge(&self, graph: Graph, from: GraphNode, to: GraphNode) -> Result<()> {
        let Some(add) = self.graph_add_edges else {
            return Err(Error::Device { reason: "the driver has no programmatic edges".into() });
        };
        // CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC, CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC.
        let edge = EdgeData { from_port: 1, to_port: 0, kind: 1, reserved: [0; 5] };
        // SAFETY: the handles are live because the caller holds them; one edge is described.
        let code = unsafe { add(graph, &from, &to, &edge, 1) };
        self.check("graph_add_edges", code)
    }

    /// Has so many neighbouring blocks of a kernel node run together.
    pub(super) fn set_cluster(&self, node: GraphNode, blocks: u32) -> Result<()> {
        let LaunchAttribute { id, value, .. } = LaunchAttribute::cluster(blocks);
        call!(self, graph_kernel_set(node, id, &value))
    }

    /// Whether what was queued before an event has ended.
    pub(super) fn has_ended(&self, event: Event) -> Result<bool> {
        // SAFETY: the event is live because the caller holds it.
        match unsafe { (self.event_query)(event) } {
            NOT_READY => Ok(false),
            code => self.check("event_query", code).map(|()| true),
        }
    }

    /// Device memory, or nothing if there is not enough.
    pub(super) fn try_alloc(&self, bytes: usize) -> Result<Option<DevicePointer>> {
        let mut pointer = 0;
        // SAFETY: `pointer` may be written.
        match unsafe { (self.memory_alloc)(&mut pointer, bytes) } {
            OUT_OF_MEMORY => Ok(None),
            code => self.check("memory_alloc", code).map(|()| Some(pointer)),
        }
    }
}
