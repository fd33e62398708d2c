//! Kernels, compiled from their text when they are first used.

use std::collections::HashMap;
use std::sync::Arc;

use objc2::rc::{Retained, autoreleasepool};
use objc2::runtime::ProtocolObject;
use objc2_foundation::NSString;
use objc2_metal::{MTLCompileOptions, MTLComputePipelineState, MTLDevice, MTLLanguageVersion, MTLLibrary};

use crate::gpu::kernels;
use crate::{Error, Result};

/// Lanes of a warp, as kernels count them.
const LANES: usize = 32;

type Object<T> = Retained<ProtocolObject<T>>;

/// A kernel that is ready to run.
pub(super) struct Pipeline(Object<dyn MTLComputePipelineState>);

impl Pipeline {
    pub(super) fn state(&self) -> &ProtocolObject<dyn MTLComputePipelineState> {
        &self.0
    }

    /// Threads of a group, at most.
    pub(super) fn most_threads(&self) -> usize {
        self.0.maxTotalThreadsPerThreadgroup()
    }
}

/// What has been compiled so far.
pub(super) struct Library {
    device: Object<dyn MTLDevice>,
    units: HashMap<&'static str, Object<dyn MTLLibrary>>,
    pipelines: HashMap<String, Arc<Pipeline>>,
}

impl Library {
    pub(super) fn new(device: Object<dyn MTLDevice>) -> Self {
        Self { device, units: HashMap::new(), pipelines: HashMap::new() }
    }

    /// The kernel `name` of `unit`.
    ///
    /// # Errors
    /// [`Error::Device`] with the compiler's words, or if there is no such kernel.
    pub(super) fn pipeline(&mut self, unit: &'static str, name: &str) -> Result<Arc<Pipeline>> {
        if let Some(pipeline) = self.pipelines.get(name) {
            return Ok(Arc::clone(pipeline));
        }
        let failed = |reason: String| Error::Device { reason: format!("kernel {name}: {reason}") };
        let pipeline = autoreleasepool(|_| {
            if !self.units.contains_key(unit) {
                let text = kernels::units().find(|known| *known == unit).map(kernels::source);
                let text = text.ok_or_else(|| failed(format!("there is no unit {unit}")))?;
                let library = compile(&self.device, &text).map_err(failed)?;
                self.units.insert(unit, library);
            }
            let function = self.units[unit].newFunctionWithName(&NSString::from_str(name));
            let function = function.ok_or_else(|| failed(format!("{unit} has no such function")))?;
            let state = self.device.newComputePipelineStateWithFunction_error(&function);
            state.map_err(|error| failed(error.localizedDescription().to_string()))
        })?;
        let lanes = pipeline.threadExecutionWidth();
        if lanes != LANES {
            return Err(failed(format!("this GPU's warps have {lanes} lanes; {LANES} are needed")));
        }
        let pipeline = Arc::new(Pipeline(pipeline));
        self.pipelines.insert(name.to_owned(), Arc::clone(&pipeline));
        Ok(pipeline)
    }
}

fn compile(
    device: &ProtocolObject<dyn MTLDevice>,
    text: &str,
) -> std::result::Result<Object<dyn MTLLibrary>, String> {
    let options = MTLCompileOptions::new();
    options.setLanguageVersion(MTLLanguageVersion::Version3_0);
    // NaN and infinity must pass. The setting that replaced this one needs macOS 15.
    #[allow(deprecated)]
    options.setFastMathEnabled(false);
    let library = device.newLibraryWithSource_options_error(&NSString::from_str(text), Some(&options));
    library.map_err(|error| error.localizedDescription().to_string())
}
