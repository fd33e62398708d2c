//! Which experts the next layer will probably choose: its router run on the present layer's hidden state.
//!
//! The residual stream changes little from one layer to the next, so the guess is often right; nothing depends on it but
//! when experts are read.

use super::activations::Q8Rows;
use super::linear::{CpuContext, LinearJob, linear};
use super::route::Choice;
use super::shared::SharedMut;
use crate::Tensor;
use crate::graph::{
    ExpertSetId, Graph, LinearOp, MoeExpertsOp, Op, Output, Route, RouteBy, RouteOp, Value, WeightId,
};

/// Rows of a batch that a forecast looks at; more would cost time and tell nothing new.
const MOST_ROWS: usize = 128;

/// A layer's router.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Router {
    /// The experts it chooses from.
    pub(crate) set: ExpertSetId,
    /// What the router gets.
    pub(crate) x: Value,
    weight: WeightId,
    bias: Option<WeightId>,
    /// Added to scores for choosing.
    correction: Option<WeightId>,
    route: Route,
}

/// The experts that each routing of `graph` is for.
pub(crate) fn sets(graph: &Graph) -> Vec<Option<ExpertSetId>> {
    let mut sets = vec![None; graph.routings];
    for node in &graph.nodes {
        if let Op::MoeExperts(MoeExpertsOp { routing, experts, .. }) = node.op {
            sets[routing.index] = Some(experts);
        }
    }
    sets
}

/// The routers of `graph` by the index of their routing; `None` where what they do is not a linear layer and a choice.
pub(crate) fn routers(graph: &Graph) -> Vec<Option<Router>> {
    let mut routers = vec![None; graph.routings];
    for node in &graph.nodes {
        let Op::MoeExperts(MoeExpertsOp { routing, experts: set, .. }) = node.op else { continue };
        let chosen = graph.nodes.iter().find_map(|node| match (&node.op, node.out) {
            (Op::Route(RouteOp { logits, by: RouteBy::Scores { bias }, route, .. }), Output::Routing(r))
                if r == routing =>
            {
                Some((*logits, *bias, *route))
            }
            _ => None,
        });
        let Some((logits, correction, route)) = chosen else { continue };
        routers[routing.index] = graph.nodes.iter().find_map(|node| match node.op {
            Op::Linear(LinearOp { x, weight, bias, .. }) if node.out == Output::Value(logits) => {
                Some(Router { set, x, weight, bias, correction, route })
            }
            _ => None,
        });
    }
    routers
}

/// Memory for forecasts.
#[derive(Debug, Default)]
pub(crate) struct Forecast {
    rows: Vec<f32>,
    logits: Vec<f32>,
    choice: Choice,
}

impl Forecast {
    /// Those of `experts` experts that `router` chooses on `x` (rows, hidden_size), those of most rows first.
    pub(crate) fn likely(
        &mut self,
        context: &CpuContext,
        (weights, vectors): (&[Tensor], &[Vec<f32>]),
        (router, experts): (&Router, usize),
        x: &[f32],
    ) -> Vec<u32> {
        let weight = &weights[router.weight.0];
        let width = weight.cols();
        let rows = x.len() / width;
        let step = rows.div_ceil(MOST_ROWS).max(1);
        self.rows.clear();
        x.chunks_exact(width).step_by(step).for_each(|row| self.rows.extend_from_slice(row));
        let rows = self.rows.len() / width;
        self.logits.resize(rows * weight.rows(), 0.0);
        let bias = router.bias.map(|b| &vectors[b.0][..]);
        let out = SharedMut::new(&mut self.logits);
        linear(context, &[LinearJob { weight, bias, q8: false, out }], &self.rows, &Q8Rows::default(), rows);
        self.choice.route(&self.logits, router.correction.map(|b| &vectors[b.0][..]), &router.route);
        if rows == 1 {
            return self.choice.ids.iter().copied().filter(|id| (*id as usize) < experts).collect();
        }
        let mut chosen = vec![0u32; router.route.experts];
        self.choice.ids.iter().for_each(|id| chosen[*id as usize] += 1);
        let mut likely = self.choice.distinct(experts);
        likely.sort_by_key(|id| std::cmp::Reverse(chosen[*id as usize]));
        likely
    }
}
