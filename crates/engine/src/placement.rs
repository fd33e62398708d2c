//! [`Placement`]: how much of a model is in memory, decided from its sizes before anything is loaded.

use moeflux_compute::backend::{
    ActivationMode, Backend, CompileOptions, KvType, PAGE_TOKENS, page_bytes, slot_bytes,
};
use moeflux_compute::graph::{Op, RouteOp};

use crate::engine::Options;
use crate::experts::SlotPlan;
use crate::memory::{self, Budget, Needs};
use crate::models::Model;
use crate::pictures::{self, EncoderPlace};
use crate::speculation::{KEPT_HIDDEN, SpecType};
use crate::{Error, Result};

/// Tokens evaluated at once unless said otherwise, and the fewest that a small budget brings it down to.
const CHUNK: usize = 512;
const SMALLEST_CHUNK: usize = 32;
/// Scratch of a larger chunk may take this part of all memory, where experts stream.
const SCRATCH_PART: u64 = 16;
/// Positions of the context unless said otherwise, and the fewest that a small budget brings it down to.
const CONTEXT: usize = 4096;
const SMALLEST_CONTEXT: usize = 512;
/// Down to these, chunk and context shrink for the sake of experts too, as long as they take more memory than those: with
/// few slots an answer reads nearly all of its experts, a prompt of several chunks reads them for each.
const FAIR_CHUNK: usize = 128;
const FAIR_CONTEXT: usize = 2048;
/// Sequences that there is memory for at full length, unless said otherwise; more of them share it.
const FULL_SEQUENCES: usize = 4;

/// Positions that there is memory for of every sequence, at least, up to the context.
const EVERY_SEQUENCE: usize = 512;
/// Where experts stream, pages beyond those of one context take at most this part of what pages and experts have together:
/// an answer needs experts for every token, and pages of a second context only beside others.
const PAGES_PART: u64 = 4;

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
    /// Where the encoder of pictures runs, if there is one.
    pub(crate) encoder: EncoderPlace,
    /// Whether tokens are drafted by a layer of the checkpoint.
    drafts: bool,
}

impl Placement {
    /// Fits `model` into the memory that `options` allow.
    ///
    /// # Errors
    /// [`Error::Budget`] naming the least memory that works, [`Error::Option`] for zeros, [`Error::Compute`] if there is no
    /// device.
    pub fn new(model: &Model, backend: &dyn Backend, options: &Options) -> Result<Self> {
        let least = Self::least(model, backend, options)?;
        if options.chunk.is_some() || least.chunk >= least.context {
            return Ok(least);
        }
        // Prompts of a GPU are faster in larger chunks, if there is room for them.
        let Some(rows) = backend.prompt_rows(&model.graph, least.compile_options(options))? else {
            return Ok(least);
        };
        let chunk = Some(rows.min(least.context));
        let wider = Self::least(model, backend, &Options { chunk, ..options.clone() });
        Ok(wider.ok().filter(|wider| wider.keep_experts == least.keep_experts).unwrap_or(least))
    }

    /// As [`Placement::new`], with no larger chunk than a small GPU gets.
    pub(crate) fn least(model: &Model, backend: &dyn Backend, options: &Options) -> Result<Self> {
        let default_kv = if options.activations == ActivationMode::F32 { KvType::F32 } else { KvType::F16 };
        let kv_type = options.kv_type.unwrap_or(default_kv);
        kv_type.check(&model.graph)?;
        let encoder = model.vision.as_ref().map_or(0, |vision| vision.encoder.trunk_bytes());
        let trunk = model.trunk_bytes() - if backend.has_own_memory() { encoder } else { 0 };
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
        // Tokens of a picture that attend to each other come at once, beside a token of each sequence.
        let at_once = match pictures::tokens_at_once(model, options.picture_pixels.unwrap_or(0)) {
            0 => 0,
            tokens => tokens + sequences,
        };
        let mut chunk = positive("chunk", options.chunk)?
            .unwrap_or(CHUNK)
            .min(context.max(options.sequences))
            .max(at_once);
        // Pages that are wanted, and the fewest that do.
        let wanted = |context: usize| {
            let of_some = context.saturating_mul(sequences.min(FULL_SEQUENCES));
            let of_all = sequences.saturating_mul(context.min(EVERY_SEQUENCE));
            options.kv_tokens.unwrap_or(of_some.max(of_all)).max(context).div_ceil(PAGE_TOKENS)
        };
        let least = |context: usize| options.kv_tokens.unwrap_or(context).max(context).div_ceil(PAGE_TOKENS);
        let graphs = || std::iter::once(&model.graph).chain(model.draft.as_ref().map(|draft| &draft.graph));
        let page: u64 = graphs().map(|graph| page_bytes(graph, kv_type) as u64).sum();
        // Hidden states of a batch on their way to the layer that drafts, and those that sessions keep.
        let hidden_row = match &model.draft {
            Some(_) => model.graph.hidden().map_or(0, |hidden| hidden.width() * size_of::<f32>()) as u64,
            None => 0,
        };
        let reading = model.experts.reading_bytes(options.read_depth);
        let encoder_place = EncoderPlace::new(model, backend, options)?;
        let pictures = pictures::memory(model, encoder_place, backend, options)?;
        let needs = |kept: u64, chunk: usize, pages: usize| {
            let compile = CompileOptions {
                activations: options.activations,
                kv_type,
                max_rows: chunk,
                every_hidden: model.draft.is_some(),
                ..CompileOptions::default()
            };
            let scratch = graphs().map(|graph| backend.scratch_bytes(graph, compile) as u64);
            let rows = (chunk as u64)
                .saturating_mul(2)
                .saturating_add((KEPT_HIDDEN as u64).saturating_mul(sequences as u64));
            let (scratch, hidden) = (scratch.fold(0, u64::saturating_add), hidden_row.saturating_mul(rows));
            // Where the model is in memory of the backend's own, these and pictures are in the processor's all the same.
            let here = pictures.saturating_add(hidden);
            let (scratch, beside) =
                if backend.has_own_memory() { (scratch, here) } else { (scratch.saturating_add(here), 0) };
            let kv = page.saturating_mul(pages as u64).saturating_add(states);
            let needs = Needs::new(trunk, kv, scratch, model.graph.vocab_size());
            let overhead = needs.overhead.saturating_add(options.reserved).saturating_add(reading);
            let overhead = overhead.saturating_add(beside);
            Needs { kept, overhead, in_own_memory: backend.has_own_memory(), ..needs }
        };
        // Where the backend can keep all experts and there is memory for that, only those slots are wanted that experts
        // pass through.
        let of_draft = model.draft.as_ref().and_then(|draft| backend.expert_bytes(&draft.graph)).unwrap_or(0);
        let kept = backend.expert_bytes(&model.graph).map(|bytes| bytes.saturating_add(of_draft));
        let kept = kept.filter(|_| options.expert_cache.is_none());
        let kept = kept
            .filter(|kept| fit(model, options, total, needs(*kept, chunk, wanted(context)), top_k).is_ok());
        let keep_experts = kept.is_some();
        let needs = |chunk, pages| needs(kept.unwrap_or(0), chunk, pages);
        let place = |chunk, pages| fit(model, options, total, needs(chunk, pages), top_k);
        let all_fit = |slots: &SlotPlan| slots.holds_all(&model.experts.shapes());
        // Whether experts that have no slot would get what the rest does without.
        let more_would_fit = |slots: &SlotPlan| {
            let fixed = options.expert_cache.is_some() || keep_experts || backend.has_own_memory();
            !fixed && !all_fit(slots)
        };
        let (mut budget, mut slots) = loop {
            let placed = place(chunk, least(context));
            // What is worth less than the experts that would have its memory.
            let (scratch, kv) = match &placed {
                Ok((budget, slots)) if more_would_fit(slots) => {
                    (budget.needs.scratch > budget.experts, budget.needs.kv > budget.experts)
                }
                Err(Error::Budget { .. }) => (true, true),
                _ => break placed?,
            };
            let may_read_less = options.chunk.is_none() && chunk > SMALLEST_CHUNK.max(at_once);
            // Pages that were asked for do not depend on the context.
            let may_hold_less = |less: usize| options.context.is_none() && least(less) < least(context);
            if scratch && may_read_less && chunk > FAIR_CHUNK {
                chunk = (chunk - SMALLEST_CHUNK.min(chunk - FAIR_CHUNK)).max(at_once);
            } else if kv && context > FAIR_CONTEXT && may_hold_less(context - PAGE_TOKENS) {
                context -= PAGE_TOKENS;
            } else if placed.is_err() && may_read_less {
                chunk = (chunk / 2).max(at_once);
            } else if placed.is_err() && context > SMALLEST_CONTEXT && may_hold_less(context / 2) {
                context /= 2;
                chunk = chunk.min(context.max(options.sequences)).max(at_once);
            } else {
                break placed?;
            }
        };
        // A chunk reads nearly every expert that is not in memory, so where they stream, fewer chunks are better.
        if options.chunk.is_none() && chunk == CHUNK && !all_fit(&slots) {
            for larger in [4 * CHUNK, 2 * CHUNK] {
                if larger <= context && needs(larger, 0).scratch <= total / SCRATCH_PART {
                    let Ok(found) = place(larger, least(context)) else { continue };
                    (budget, slots) = found;
                    chunk = larger;
                    break;
                }
            }
        }
        // All the pages that are wanted if that costs no experts, else what experts can spare.
        let (fewest, most) = (least(context), wanted(context));
        let spare = match options.expert_cache {
            Some(_) => budget.experts.saturating_sub(slots.bytes()) / page.max(1) + fewest as u64,
            None => (budget.experts + page * fewest as u64) / PAGES_PART / page.max(1),
        };
        let spare = usize::try_from(spare).unwrap_or(usize::MAX).clamp(fewest, most);
        let all =
            place(chunk, most).ok().filter(|(_, slots)| !more_would_fit(slots)).map(|found| (most, found));
        let some = || place(chunk, spare).ok().map(|found| (spare, found));
        let mut pages = fewest;
        if let Some(found) = all.or_else(some) {
            (pages, (budget, slots)) = found;
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
        let drafts = model.draft.is_some();
        Ok(Self {
            budget,
            slots,
            chunk,
            context,
            pages,
            state_slots,
            kv_type,
            keep_experts,
            adjustable,
            encoder: encoder_place,
            drafts,
        })
    }

    /// What a backend compiles the model for.
    pub fn compile_options(&self, options: &Options) -> CompileOptions {
        CompileOptions {
            activations: options.activations,
            kv_type: self.kv_type,
            max_rows: self.chunk,
            pages: self.pages,
            state_slots: self.state_slots,
            positions: self.context,
            sequences: options.sequences.max(1),
            outputs: if options.spec_type == SpecType::Off { 1 } else { options.draft_max.saturating_add(1) },
            keep_experts: self.keep_experts,
            every_hidden: self.drafts,
            beside: self.encoder.own_bytes(),
        }
    }
}

/// Experts that one token needs in a layer, at most.
pub(crate) fn top_k(model: &Model) -> usize {
    let route = |op: &Op| if let Op::Route(RouteOp { route, .. }) = op { route.top_k } else { 0 };
    let drafting = model.draft.iter().flat_map(|draft| draft.graph.nodes());
    model.graph.nodes().iter().chain(drafting).map(|n| route(&n.op)).max().unwrap_or(0)
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
            device: None,
        })),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use moeflux_compute::Tensor;
    use moeflux_compute::backend::Executable;
    use moeflux_compute::cpu::CpuBackend;
    use moeflux_compute::graph::Graph;

    use super::*;
    use crate::checkpoint::Checkpoint;
    use crate::models;
    use crate::synth::{Encoding, Plan, Recipe, Shape};

    #[test]
    fn memory_that_is_short_goes_to_what_is_worth_more() {
        let shape = Shape::by_name("qwen3-30b-a3b").unwrap();
        let recipe = Recipe { shape, layers: 8, encoding: Encoding::Q4KM, seed: 0, router_skew: 0.0 };
        let plan = Plan::new(recipe).unwrap();
        let backend = CpuBackend::new(1, None).unwrap();
        let place = |mib: u64, options: &Options| {
            let memory = Some(mib << 20);
            Placement::new(plan.model(), &backend, &Options { memory, sequences: 8, ..options.clone() })
                .unwrap()
        };
        let all = plan.model().experts.shapes();
        let mut before = 0;
        for mib in (640..4500).step_by(60) {
            let placed = place(mib, &Options::default());
            let Budget { needs, experts, .. } = placed.budget;
            let what = format!("{mib} MiB: {placed:?}");
            if placed.slots.holds_all(&all) {
                assert_eq!(placed.pages, 4 * CONTEXT / PAGE_TOKENS, "{what}");
                continue;
            }
            let slots = placed.slots.slots();
            let fewer = slots < std::mem::replace(&mut before, slots);
            assert!(!fewer || placed.chunk > CHUNK, "more memory, fewer slots: {what}");
            let one_context = placed.pages * PAGE_TOKENS == placed.context;
            assert!(one_context || needs.kv <= (needs.kv + experts) / PAGES_PART, "{what}");
            assert!(placed.chunk <= FAIR_CHUNK || needs.scratch <= experts, "{what}");
            assert!(placed.context <= FAIR_CONTEXT || needs.kv <= experts, "{what}");
        }
        assert!(place(4400, &Options::default()).slots.holds_all(&all), "the loop has seen both");
        let slots = |options: &Options| place(1024, options).slots.slots();
        let usual = slots(&Options::default());
        assert!(usual > 80, "{usual}");
        // What is asked for is kept, whatever it costs.
        let asked = Options { kv_tokens: Some(16_384), ..Options::default() };
        let placed = place(1024, &asked);
        assert_eq!((placed.pages * PAGE_TOKENS, placed.context), (16_384, CONTEXT));
        assert!(placed.slots.slots() < usual);
        let asked = Options { context: Some(8192), chunk: Some(1024), ..Options::default() };
        let placed = place(1024, &asked);
        assert_eq!((placed.context, placed.chunk, placed.pages * PAGE_TOKENS), (8192, 1024, 8192));
        let asked = Options { expert_cache: Some(20), ..Options::default() };
        let placed = place(1024, &asked);
        assert_eq!((placed.slots.slots(), placed.pages * PAGE_TOKENS), (20, 4 * CONTEXT));
    }

    /// The same memory holds 32 · 2 / 34 times as many tokens as 8-bit integers with a scale as in f16.
    #[test]
    fn integers_hold_nearly_twice_the_tokens() {
        let shape = Shape::by_name("qwen3-30b-a3b").unwrap();
        let recipe = Recipe { shape, layers: 2, encoding: Encoding::Q4KM, seed: 0, router_skew: 0.0 };
        let plan = Plan::new(recipe).unwrap();
        let backend = CpuBackend::new(1, None).unwrap();
        let fits = |kv_type: KvType, tokens: usize| {
            let memory = Some(2 << 30);
            let (kv_type, kv_tokens) = (Some(kv_type), Some(tokens));
            let options =
                Options { memory, kv_type, kv_tokens, expert_cache: Some(16), ..Options::default() };
            Placement::new(plan.model(), &backend, &options)
        };
        let most = |kv_type: KvType| {
            let (mut least, mut beyond) = (0, 1 << 20);
            while beyond - least > 1 {
                let middle = usize::midpoint(least, beyond);
                match fits(kv_type, middle * PAGE_TOKENS) {
                    Ok(_) => least = middle,
                    Err(Error::Budget { .. }) => beyond = middle,
                    Err(other) => panic!("{other}"),
                }
            }
            least * PAGE_TOKENS
        };
        let [f16, f32, q8] = KvType::ALL.map(most);
        assert!(f32 > 10_000, "{f32}");
        let ratio = |a: usize, b: usize| a as f64 / b as f64;
        assert!((ratio(q8, f16) - 64.0 / 34.0).abs() < 0.01, "{q8} {f16}");
        assert!((ratio(f16, f32) - 2.0).abs() < 0.01, "{f16} {f32}");
    }

    /// A processor that says that it has room for many rows.
    struct Roomy(CpuBackend);

    impl Backend for Roomy {
        fn describe(&self) -> String {
            self.0.describe()
        }

        fn scratch_bytes(&self, graph: &Graph, options: CompileOptions) -> usize {
            self.0.scratch_bytes(graph, options)
        }

        fn prompt_rows(&self, _: &Graph, _: CompileOptions) -> moeflux_compute::Result<Option<usize>> {
            Ok(Some(2048))
        }

        fn compile(
            &self,
            graph: &Graph,
            weights: Vec<Tensor>,
            options: CompileOptions,
        ) -> moeflux_compute::Result<Box<dyn Executable>> {
            self.0.compile(graph, weights, options)
        }
    }

    #[test]
    fn prompts_come_in_larger_chunks_where_there_is_room() {
        let shape = Shape::by_name("qwen3-30b-a3b").unwrap();
        let recipe = Recipe { shape, layers: 2, encoding: Encoding::Q4KM, seed: 0, router_skew: 0.0 };
        let plan = Plan::new(recipe).unwrap();
        let backend = Roomy(CpuBackend::new(1, None).unwrap());
        let chunk = |options: &Options| Placement::new(plan.model(), &backend, options).unwrap().chunk;
        let all = Options { memory: Some(1 << 40), ..Options::default() };
        assert_eq!(chunk(&all), 2048);
        assert_eq!(chunk(&Options { context: Some(1000), ..all.clone() }), 1000);
        assert_eq!(chunk(&Options { context: Some(300), ..all.clone() }), 300);
        assert_eq!(chunk(&Options { chunk: Some(64), ..all.clone() }), 64);
        assert_eq!(Placement::least(plan.model(), &backend, &all).unwrap().chunk, CHUNK);
        // The least memory that does for a small chunk still does.
        let least =
            match Placement::least(plan.model(), &backend, &Options { memory: Some(1), ..all.clone() }) {
                Err(Error::Budget { minimum, .. }) => minimum,
                other => panic!("{other:?}"),
            };
        assert!(chunk(&Options { memory: Some(least), ..all }) < CHUNK);
    }

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
