//! Lowering to the kernels of `kernels/foresight.h`: the next layer's experts are asked for while the bus is idle.

use super::place::{FETCH_GROUPS, worth};
use crate::gpu::arguments::{FetchConstants, ForeseeConstants, RouteConstants};
use crate::gpu::device::{Dispatch, Order, Slice};
use crate::gpu::lower::context::{DeferredNorm, DeferredRoute, Launch, Lowering, Product, THREADS};
use crate::gpu::memory::{MOST_FORESEEN, Shelf};
use crate::gpu::steps::Step;
use crate::graph::{ExpertSetId, Routing, Value};

/// Microseconds of the bus that go to the next layer: from the end of this one's products until that chooses it is idle anyway, and what
/// comes late then would come later. As `AHEAD` of the engine's `cost/predict.rs`.
const MICROSECONDS: u64 = 36;
/// Rows of a batch, at most: what more rows miss takes the bus so long that 36 µs of it are not worth the asking.
const MOST_ROWS: usize = 2;

/// What a layer is foreseen to choose, by logits (rows, experts).
#[derive(Debug, Clone, Copy)]
pub(in crate::gpu::lower) struct Foresight {
    set: ExpertSetId,
    pairs: usize,
    choice: DeferredRoute,
    logits: Slice,
}

/// How many experts are asked for ahead, how many of their first bytes, and how many eighths are left then; none by default.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Ahead {
    pub(super) count: usize,
    pub(super) bytes: usize,
    pub(super) rest: usize,
}

impl Lowering<'_> {
    /// Queues the next layer's router for what this one's reads, `logits` being the newest product; nothing where the device does not
    /// bring experts, or one of the routers is not a product of a norm.
    pub(in crate::gpu::lower) fn foresee(&mut self, logits: Value, routing: Routing) {
        if self.rows > MOST_ROWS || self.memory.experts.resident() {
            return;
        }
        let own = self.router(logits).and_then(|router| Some((router, *self.norms.get(&router.x)?)));
        let Some((own, norm)) = own.filter(|(own, _)| self.is_newest(own)) else { return };
        let Some((foresight, router, next_norm)) = self.next_choice(routing) else { return };
        let suits = norm.x.width() == next_norm.x.width()
            && self.enters(own.weight, own.precision) == Some(false)
            && self.enters(router.weight, router.precision) == Some(false);
        if !suits {
            return;
        }
        let product = self.plain_product_of(&router, (self.value(norm.x), Some(next_norm)), foresight.logits);
        self.run.push(Dispatch { order: Order::Beside, ..product });
        self.foresight = Some(foresight);
    }

    /// The product that makes logits of experts.
    fn router(&self, logits: Value) -> Option<Product> {
        self.steps.iter().find_map(|step| match *step {
            Step::Linear { x, weight, bias, precision, cap: None, residual: None, adapted: None, out }
                if out == logits =>
            {
                Some(Product { x, weight, bias, residual: None, precision, out })
            }
            _ => None,
        })
    }

    /// Whether a product is the last dispatch so far.
    fn is_newest(&self, p: &Product) -> bool {
        let out = self.value(p.out);
        self.waiting.is_empty() && self.run.last().is_some_and(|last| last.buffers.last() == Some(&out))
    }

    /// The choice of the layer with experts after that of `routing`, its router and the norm that this reads.
    fn next_choice(&self, routing: Routing) -> Option<(Foresight, Product, DeferredNorm)> {
        let tiers = |set, counts| self.memory.experts.placing(set, counts);
        let experts = |step: &Step| match *step {
            Step::MoeExperts { routing, experts, .. } => Some((routing, experts)),
            _ => None,
        };
        let mut layers = self.steps.iter().filter_map(experts).skip_while(|(own, _)| *own != routing);
        let (_, set) = layers.next()?;
        let (next, next_set) = layers.next()?;
        tiers(set, [self.rows, self.rows * routing.top_k()])?;
        let pairs = self.rows * next.top_k();
        let foreseen = tiers(next_set, [self.rows, pairs])?.placement(next_set);
        let of_next = |step: &Step| match *step {
            Step::Route { logits, bias, scales: None, route, routing } if routing == next => {
                Some(DeferredRoute { logits, bias, route })
            }
            _ => None,
        };
        let choice = self.steps.iter().find_map(of_next)?;
        let router = self.router(choice.logits)?;
        let norm = self.steps.iter().find_map(|step| match *step {
            Step::RmsNorm { x, weight, groups: 1, eps, out } if out == router.x => {
                Some(DeferredNorm { x, weight, eps })
            }
            _ => None,
        })?;
        let ids_alone = choice.route.experts == foreseen.shelf.experts;
        let suits = foreseen.shelf.slots > 1 && ids_alone;
        let lacks = foreseen.shelf.slots < foreseen.shelf.experts;
        let foresight = Foresight { set: next_set, pairs, choice, logits: foreseen.logits };
        (suits && lacks).then_some((foresight, router, norm))
    }

    /// What is asked for ahead of a layer's experts.
    fn asked_ahead(&self, set: ExpertSetId, shelf: &Shelf) -> Ahead {
        let most = (self.memory.info.bus * MICROSECONDS / 1_000_000) as usize;
        if shelf.slot_bytes <= most {
            let count = (most / shelf.slot_bytes).min(MOST_FORESEEN).min(shelf.slots / 2).max(1);
            return Ahead { count, bytes: shelf.slot_bytes, rest: 0 };
        }
        // What is not chosen after all must not keep the bus for long.
        let first = self.memory.experts.parts(set)[2].start();
        let bytes = first.min(most) / 16 * 16;
        let eighths = ((shelf.slot_bytes - bytes) * 8 + shelf.slot_bytes / 2) / shelf.slot_bytes;
        Ahead { count: 1, bytes, rest: eighths.max(1) }
    }

    /// What may have been foreseen of a layer's experts.
    pub(super) fn was_foreseen(&self, set: ExpertSetId, shelf: &Shelf) -> Ahead {
        if self.foreseen.contains(&set) { self.asked_ahead(set, shelf) } else { Ahead::default() }
    }

    /// What chooses the experts to ask for, beside this layer's own choice, and what asks for them when the bus is idle.
    pub(super) fn ask_ahead(&mut self) -> Option<[Dispatch; 2]> {
        let Foresight { set, pairs, choice, logits } = self.foresight.take()?;
        let at = self.memory.experts.placing(set, [self.rows, pairs])?.placement(set);
        let Ahead { count, bytes, .. } = self.asked_ahead(set, &at.shelf);
        let bias = self.optional(choice.bias);
        let buffers = [logits, bias, at.table, at.owners, at.worth, at.foreseen];
        let constants = &ForeseeConstants {
            shelf: at.shelf.constants(),
            worth: worth(self.rows),
            route: RouteConstants::new(&choice.route, choice.bias.is_some()),
            pairs,
            count,
        };
        let foresee = Launch { unit: "foresight", kernel: "foresee", buffers: &buffers, constants }
            .over([1, 1, 1], THREADS);
        let buffers = [at.foreseen_list, at.host, self.memory.experts.slots()];
        let constants = &FetchConstants { brought: at.shelf.brought(0..bytes), there: 0 };
        let fetch = Launch { unit: "tiers", kernel: "fetch", buffers: &buffers, constants }
            .over([FETCH_GROUPS, count, 1], THREADS);
        self.foreseen.insert(set);
        Some([Dispatch { order: Order::Beside, ..foresee }, Dispatch { order: Order::Aside, ..fetch }])
    }
}
