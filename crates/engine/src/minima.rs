//! [`Minima`]: the least memory that a model can be opened with, of the processor's and of a GPU's.

use moeflux_compute::Error::DeviceMemory;
use moeflux_compute::backend::Backend;

use crate::engine::Options;
use crate::models::Model;
use crate::placement::Placement;
use crate::speculation::{Drafter, SpecType};
use crate::{Error, Result};

/// The least memory, in bytes, that a model can be opened with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Minima {
    /// Of the processor's.
    pub host: u64,
    /// Of the backend's own, beside so little of the processor's and for as many rows and positions as the options ask for;
    /// `None` where it has none.
    pub device: Option<u64>,
}

impl Minima {
    /// What `model` needs at least on `backend`, with `options` but for their memory.
    ///
    /// # Errors
    /// [`Error::Option`] for zeros, [`Error::Compute`] if there is no device.
    pub fn new(model: &Model, backend: &dyn Backend, options: &Options) -> Result<Self> {
        let place = |memory| Placement::least(model, backend, &Options { memory, ..options.clone() });
        let placement = match place(Some(0)) {
            Err(Error::Budget { minimum, .. }) => place(Some(minimum))?,
            other => other?,
        };
        let compile = placement.compile_options(options);
        let mut device = backend.least_memory(&model.graph, compile)?;
        // Without being asked to, it takes only what is left.
        if let Some(draft) = model.draft.as_ref().filter(|_| options.spec_type == SpecType::Mtp) {
            let own = backend.least_memory(&draft.graph, Drafter::options(compile))?;
            device = device.zip(own).map(|(model, draft)| model.saturating_add(draft));
        }
        Ok(Self { host: placement.budget.total.max(placement.budget.needs.held()), device })
    }

    /// An error of opening `model`, which says both minima if it is for want of memory.
    pub(crate) fn told(error: Error, model: &Model, backend: &dyn Backend, options: &Options) -> Error {
        if !error.is_out_of_memory() {
            return error;
        }
        let Ok(Self { host, device: Some(least) }) = Self::new(model, backend, options) else { return error };
        match error {
            Error::Budget { budget, minimum, parts, .. } => {
                Error::Budget { budget, minimum, parts, device: Some(least) }
            }
            // Otherwise there was no room for one buffer, as others use the device too.
            Error::Compute(DeviceMemory { device, free, .. }) if free < least => {
                Error::DeviceBudget { device, budget: free, minimum: least, host }
            }
            other => other,
        }
    }
}
