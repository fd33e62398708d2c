//! [`Placement`]: how much of a model is in memory, decided from its sizes before anything is loaded.

use moeflux_compute::backend::{
    ActivationMode, Backend, CompileOptions, KvType, PAGE_TOKENS, page_bytes, slot_bytes,
};
use moeflux_compute::graph::{Op, RouteOp};

use crate::engine::Options;
use crate::experts::SlotPlan;
use crate::memory::{self, Budget, Needs};
use crate::models::Model;
use crate::{Error, Result};

/// Tokens evaluated at once unless said otherwise, and the fewest that a small budget brings it down to.
const CHUNK: usize = 512;
const SMALLEST_CHUNK: usize = 32;
/// Scratch of a larger chunk may take this part of all memory, where experts stream.
const SCRATCH_PART: u64 = 16;
/// Positions of the context unless said otherwise, and the fewest that a small budget brings it down to.
const CONTEXT: usize = 4096;
const SMALLEST_CONTEXT: usize = 512;
/// Sequences that there is memory for at full length, unless said otherwise; more of them share it.
const FULL_SEQUENCES: usize = 4;

/// Positions that there is memory for of every sequence, at least, up to the context.
const EVERY_SEQUENCE: usize = 512;

/// Slots for experts on their way to a backend that keeps them.
const PASSING: usize = 64;

fn positive(option: &'static str, value: Option<usize>) -> Result<Option<usize>> {
    match value {
        Some(0) => Err(Error::Option { option, expected: "a positive number".into(), got: "0".into() }),
        other => Ok(other),
    }
}

/// Where a model's parts will be and how big: all that is decided before anything is loaded.
#[derive(Debug, Clone)]
pub struct Placement {
    /// How memory is divided.
    pub budget: Budget,
    /// Slots for routed experts.
    pub slots: SlotPlan,
    /// Most tokens evaluated at once.
    pub chunk: usize,
    /// Maximum positions of a sequence.
    pub context: usize,
    /// Pages of keys and values over all sequences.
    pub pages: usize,
    /// Recurrent states that are kept at once; none for models without.
    pub state_slots: usize,
    /// Precision of cached keys and values.
    pub kv_type: KvType,
    /// Whether the backend may keep all experts in host memory.
    pub keep_experts: bool,
    /// Whether the number of slots may change while the model runs.
    pub adjustable: bool,
}

impl Placement {
    /// Fits `model` into the memory that `options` allow.
    ///
    /// # Errors
    /// [`Error::Budget`] naming the least memory that works, [`Error::Option`] for zeros.
    pub fn new(model: &Model, backend: &dyn Backend, options: &Options) -> Result<Self> {
        let default_kv = if options.activations == ActivationMode::F32 { KvType::F32 } else { KvType::F16 };
        let kv_type = options.kv_type.unwrap_or(default_kv);
        let trunk = model.trunk_bytes();
        let total = options.memory.or_else(memory::default_budget).unwrap_or(u64::MAX);
        let top_k = top_k(model);
        let sequences = options.sequences.max(1);
        // Of every sequence the present state and the one that an evaluation writes; and those kept, of a few.
        let state_slots = if model.graph.states().is_empty() {
            0
        } else {
            options.checkpoints.saturating_mul(sequences.min(FULL_SEQUENCES)) + 2 * sequences
        };
        let states = (slot_bytes(&model.graph) as u64).saturating_mul(state_slots as u64);
        let mut context = positive("context", options.context)?.unwrap_or(model.context_length.min(CONTEXT));
        let mut chunk =
            positive("chunk", options.chunk)?.unwrap_or(CHUNK).min(context.max(options.sequences));
        let pages = |context: usize| {
            let of_some = context.saturating_mul(sequences.min(FULL_SEQUENCES));
            let of_all = sequences.saturating_mul(context.min(EVERY_SEQUENCE));
            let tokens = options.kv_tokens.unwrap_or(of_some.max(of_all));
            tokens.max(context).div_ceil(PAGE_TOKENS)
        };
        let needs = |kept: u64, chunk: usize, context: usize| {
            let compile = CompileOptions {
                activations: options.activations,
                kv_type,
                max_rows: chunk,
                ..CompileOptions::default()
            };
            let scratch = backend.scratch_bytes(&model.graph, compile) as u64;
            let kv = (page_bytes(&model.graph, kv_type) as u64).saturating_mul(pages(context) as u64);
            let kv = kv.saturating_add(states);
            let needs = Needs::new(trunk, kv, scratch, model.graph.vocab_size());
            let overhead = needs.overhead.saturating_add(options.reserved);
            Needs { kept, overhead, in_own_memory: backend.has_own_memory(), ..needs }
        };
        // Where the backend can keep all experts and there is memory for that, only those slots are wanted that experts
        // pass through.
        let kept = backend.expert_bytes(&model.graph).filter(|_| options.expert_cache.is_none());
        let kept =
            kept.filter(|kept| fit(model, options, total, needs(*kept, chunk, context), top_k).is_ok());
        let keep_experts = kept.is_some();
        let needs = |chunk, context| needs(kept.unwrap_or(0), chunk, context);
        let (mut budget, mut slots) = loop {
            match fit(model, options, total, needs(chunk, context), top_k) {
                Err(Error::Budget { .. }) if options.chunk.is_none() && chunk > SMALLEST_CHUNK => chunk /= 2,
                Err(Error::Budget { .. }) if options.context.is_none() && context > SMALLEST_CONTEXT => {
                    context /= 2;
                    chunk = chunk.min(context.max(options.sequences));
                }
                other => break other?,
            }
        };
        // A chunk reads nearly every expert that is not in memory, so where they stream, fewer chunks are better.
        if options.chunk.is_none() && chunk == CHUNK && !slots.holds_all(&model.experts.shapes()) {
            for larger in [4 * CHUNK, 2 * CHUNK] {
                let needs = needs(larger, context);
                if larger <= context && needs.scratch <= total / SCRATCH_PART {
                    let Ok(found) = fit(model, options, total, needs, top_k) else { continue };
                    (budget, slots) = found;
                    chunk = larger;
                    break;
                }
            }
        }
        let adjustable = options.expert_cache.is_none() && !backend.has_own_slots();
        if let Some(later) = options.memory_later.filter(|_| adjustable) {
            let most = later.max(total).saturating_sub(budget.needs.held());
            let sets = model.experts.shapes();
            let plan = SlotPlan::within(&sets, most, top_k);
            let starts_within = |plan: &SlotPlan| plan.bytes_within(budget.experts) <= budget.experts;
            let one_size = || SlotPlan::of_one_size(&sets, most, top_k).ok();
            slots = plan.ok().filter(starts_within).or_else(one_size).unwrap_or(slots);
        }
        Ok(Self {
            budget,
            slots,
            chunk,
            context,
            pages: pages(context),
            state_slots,
            kv_type,
            keep_experts,
            adjustable,
        })
    }
}

/// Experts that one token needs in a layer, at most.
pub(crate) fn top_k(model: &Model) -> usize {
    let route = |op: &Op| if let Op::Route(RouteOp { route, .. }) = op { route.top_k } else { 0 };
    model.graph.nodes().iter().map(|n| route(&n.op)).max().unwrap_or(0)
}

/// Divides the budget and plans slots: as many as it holds, or as many as the options ask for.
fn fit(
    model: &Model,
    options: &Options,
    total: u64,
    needs: Needs,
    top_k: usize,
) -> Result<(Budget, SlotPlan)> {
    let sets = model.experts.shapes();
    if let Some(slots) = positive("expert_cache", options.expert_cache)? {
        let plan = SlotPlan::of_slots(&sets, slots);
        return Ok((Budget::divide(total, needs, plan.bytes())?, plan));
    }
    let largest = sets.iter().map(|set| set.slot_bytes).max().unwrap_or(0) as u64;
    let mut budget = Budget::divide(total, needs, largest * top_k as u64)?;
    if needs.kept > 0 {
        budget.experts = budget.experts.min(largest * PASSING.max(top_k) as u64);
    }
    match SlotPlan::within(&sets, budget.experts, top_k) {
        Ok(plan) => Ok((budget, plan)),
        Err(minimum) => Err(Budget::divide(total, needs, minimum).err().unwrap_or_else(|| Error::Budget {
            budget: total,
            minimum,
            parts: "experts".into(),
        })),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use moeflux_compute::cpu::CpuBackend;

    use super::*;
    use crate::checkpoint::Checkpoint;
    use crate::models;

    #[test]
    fn states_and_what_is_reserved_are_in_the_budget() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/hf/qwen3_next_basic");
        let model = models::record(Arc::new(Checkpoint::open(&path).unwrap())).unwrap();
        let backend = CpuBackend::new(1, None).unwrap();
        let place = |options: &Options| Placement::new(&model, &backend, options).unwrap();
        let options = Options { memory: Some(1 << 40), sequences: 3, ..Options::default() };
        let placed = place(&options);
        let (page, slot) = (page_bytes(&model.graph, placed.kv_type), slot_bytes(&model.graph));
        assert!(slot > 0 && placed.state_slots == 2 * 3 + 3 * options.checkpoints);
        let needs = placed.budget.needs;
        assert_eq!(needs.kv, (page * placed.pages + slot * placed.state_slots) as u64);
        let reserved = place(&Options { reserved: 12_345, ..options }).budget;
        assert_eq!(reserved.needs, Needs { overhead: needs.overhead + 12_345, ..needs });
        assert_eq!(reserved.experts, placed.budget.experts - 12_345);
    }
}
