//! [`PlannedMemory`]: what a model needs, and the budgets that a plan looks at.

use moeflux_compute::backend::{Backend, PAGE_TOKENS, page_bytes};

use super::{PlanOptions, PlannedGpu};
use crate::models::Model;
use crate::{Error, Options, Placement, Result, memory};

/// Memory that a model needs, in bytes.
#[derive(Debug, Clone)]
pub struct PlannedMemory {
    /// Weights that always are in memory.
    pub trunk: u64,
    /// All experts.
    pub experts: u64,
    /// Keys, values and states of a context.
    pub kv: u64,
    /// Intermediate values.
    pub scratch: u64,
    /// The program itself.
    pub overhead: u64,
    /// With every expert in memory.
    pub all_resident: u64,
    /// The smallest budget that works.
    pub minimum: u64,
    /// Tokens of the context.
    pub context: usize,
    /// What the machine has free, as the engine takes it if nothing is asked for.
    pub available: Option<u64>,
}

impl PlannedMemory {
    pub(super) fn new(model: &Model, backend: &dyn Backend, options: &PlanOptions) -> Result<Self> {
        let place = |memory| Placement::new(model, backend, &options.engine(memory));
        let whole = place(u64::MAX)?;
        let needs = whole.budget.needs;
        let memory::Needs { trunk, kv, scratch, overhead, .. } = needs;
        let minimum = match place(0) {
            Err(Error::Budget { minimum, .. }) => minimum,
            Err(error) => return Err(error),
            Ok(_) => 0,
        };
        let pages =
            page_bytes(&model.graph, whole.kv_type) as u64 * whole.context.div_ceil(PAGE_TOKENS) as u64;
        Ok(Self {
            trunk,
            experts: model.experts.total_bytes(),
            kv: kv.max(pages),
            scratch,
            overhead,
            all_resident: needs.held() + whole.slots.bytes(),
            minimum,
            context: whole.context,
            available: memory::available().map(|bytes| bytes / 10 * 9),
        })
    }

    /// What so many devices need together besides experts.
    pub(super) fn beside_experts(&self, devices: usize) -> u64 {
        self.trunk + self.kv + self.scratch * devices as u64
    }

    /// Those that are `asked` for, or from the smallest budget that works to everything.
    pub(super) fn budgets(&self, asked: &[u64]) -> Vec<u64> {
        if !asked.is_empty() {
            return asked.to_vec();
        }
        let rest = self.all_resident - self.all_resident.min(self.experts);
        let part = |n: u64| rest + self.experts / 4 * n;
        let mut all = vec![self.minimum, part(1), part(2), part(3), self.all_resident];
        // Whole mebibytes, so that they can be asked for.
        all.iter_mut().for_each(|bytes| *bytes = bytes.next_multiple_of(1 << 20));
        all.extend(self.available.map(|bytes| bytes >> 20 << 20));
        all.retain(|bytes| (self.minimum..=self.all_resident.next_multiple_of(1 << 20)).contains(bytes));
        all.sort_unstable();
        all.dedup();
        all
    }

    /// Those that are `asked` for, or a quarter, half and all of the experts, as far as GPUs have memory for them: of each.
    pub(super) fn device_budgets(&self, asked: &[u64], gpu: Option<&PlannedGpu>) -> Vec<Option<u64>> {
        let Some(gpu) = gpu else { return vec![None] };
        if !asked.is_empty() {
            return asked.iter().copied().map(Some).collect();
        }
        let parts = [self.experts / 4, self.experts / 2, self.experts];
        let parts = parts.map(|part| (self.beside_experts(gpu.count) + part).div_ceil(gpu.count as u64));
        let mut all: Vec<u64> = parts.into_iter().filter(|bytes| *bytes <= gpu.usable()).collect();
        if all.len() < parts.len() {
            all.push(gpu.usable());
        }
        all.into_iter().map(Some).collect()
    }
}

impl PlanOptions {
    pub(super) fn engine(&self, memory: u64) -> Options {
        Options { memory: Some(memory), context: self.context, kv_type: self.kv_type, ..Options::default() }
    }
}
