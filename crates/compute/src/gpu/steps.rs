//! What a graph's nodes become: steps, each a few dispatches, with buffers for the values between them.

use std::collections::HashMap;

use crate::graph::{
    ActivateOp, Activation, AddOp, AttentionOp, CacheId, CausalConv1dOp, Chosen, ClampOp, DeltaInputs,
    DeltaRule, EmbedOp, Ends, ExpertMlp, ExpertSetId, Gate, GateOp, GatedDeltaRuleOp, GatherRowsOp, Graph,
    LatentAttention, LatentAttentionOp, LatentCacheId, LatentInputs, LatentWeights, LinearOp, MoeExpertsOp,
    Op, Output, Placement, Precision, RmsNormOp, RopeOp, Route, RouteBy, RouteOp, Routing, SliceOp, StateId,
    Value, WeightId,
};

/// What is done to heads of queries and keys before they are attended with.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Prepare {
    /// Index of the rotation in the graph.
    pub(crate) rope: Option<usize>,
    /// Weight and epsilon of the norm of each head of queries.
    pub(crate) q_norm: Option<(WeightId, f32)>,
    /// The same of keys.
    pub(crate) k_norm: Option<(WeightId, f32)>,
}

/// What attention over latents starts from, where it divides, normalises and rotates it itself.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EnteringLatents {
    /// (rows, heads · (nope + rope)).
    pub(crate) q: Value,
    /// (rows, rank + rope).
    pub(crate) kv: Value,
    /// Weight and epsilon of the norm of latents.
    pub(crate) norm: (WeightId, f32),
    /// Index of the rotation in the graph.
    pub(crate) rope: Option<usize>,
}

/// One operation, or several that run as one.
#[derive(Debug, Clone)]
pub(crate) enum Step {
    Embed {
        table: WeightId,
        out: Value,
    },
    /// x · weightᵀ + bias + residual.
    Linear {
        x: Value,
        weight: WeightId,
        bias: Option<WeightId>,
        precision: Precision,
        /// Outputs y become cap · tanh(y / cap).
        cap: Option<f32>,
        residual: Option<Value>,
        /// The node whose adapters add to it, if it has some.
        adapted: Option<usize>,
        out: Value,
    },
    RmsNorm {
        x: Value,
        weight: WeightId,
        groups: usize,
        eps: f32,
        out: Value,
    },
    Rope {
        x: Value,
        heads: usize,
        rope: usize,
        out: Value,
    },
    Attention {
        q: Value,
        k: Value,
        v: Value,
        cache: CacheId,
        sinks: Option<WeightId>,
        /// The tokens that are seen; all when absent.
        chosen: Option<Chosen>,
        /// What is added to scores, by distance.
        added: Option<Value>,
        /// What is done to queries and keys before.
        prepare: Prepare,
        out: Value,
    },
    LatentAttention {
        inputs: LatentInputs,
        weights: LatentWeights,
        cache: LatentCacheId,
        /// What the inputs but for `sinks` and `chosen` are made of here.
        entering: Option<EnteringLatents>,
        out: Value,
    },
    SwiGlu {
        gate: Value,
        up: Value,
        out: Value,
    },
    Add {
        a: Value,
        b: Value,
        out: Value,
    },
    Clamp {
        x: Value,
        limit: f32,
        out: Value,
    },
    Gate {
        x: Value,
        gate: Value,
        function: Gate,
        out: Value,
    },
    Slice {
        x: Value,
        groups: usize,
        start: usize,
        len: usize,
        out: Value,
    },
    GatherRows {
        x: Value,
        out: Value,
    },
    Route {
        logits: Value,
        bias: Option<WeightId>,
        /// Factors of experts.
        scales: Option<WeightId>,
        route: Route,
        routing: Routing,
    },
    /// Weighted sum of experts + residual.
    MoeExperts {
        x: Value,
        routing: Routing,
        experts: ExpertSetId,
        mlp: ExpertMlp,
        residual: Option<Value>,
        /// As of linear layers.
        adapted: Option<usize>,
        out: Value,
    },
    CausalConv1d {
        x: Value,
        weight: WeightId,
        bias: Option<WeightId>,
        kernel: usize,
        dilation: usize,
        plain: bool,
        state: StateId,
        out: Value,
    },
    GatedDeltaRule {
        inputs: DeltaInputs,
        decay: WeightId,
        dt_bias: WeightId,
        shape: DeltaRule,
        state: StateId,
        out: Value,
    },
    /// An operation that nothing is fused with.
    Alone {
        op: Op,
        out: Output,
    },
}

impl Step {
    /// Values that it reads.
    pub(crate) fn inputs(&self) -> Vec<Value> {
        match *self {
            Self::Alone { ref op, .. } => op.values(),
            Self::Embed { .. } => vec![],
            Self::Linear { x, residual, .. } | Self::MoeExperts { x, residual, .. } => {
                [Some(x), residual].into_iter().flatten().collect()
            }
            Self::RmsNorm { x, .. }
            | Self::Rope { x, .. }
            | Self::Clamp { x, .. }
            | Self::Slice { x, .. }
            | Self::GatherRows { x, .. }
            | Self::CausalConv1d { x, .. } => vec![x],
            Self::Attention { q, k, v, chosen, added, .. } => {
                [q, k, v].into_iter().chain(chosen.map(|chosen| chosen.blocks)).chain(added).collect()
            }
            Self::LatentAttention { inputs, entering, .. } => {
                let LatentInputs { q_nope, c, rotated, chosen, .. } = inputs;
                let own = match entering {
                    Some(EnteringLatents { q, kv, .. }) => vec![q, kv],
                    None => [q_nope, c].into_iter().chain(rotated.into_iter().flatten()).collect(),
                };
                own.into_iter().chain(chosen.map(|chosen| chosen.blocks)).collect()
            }
            Self::SwiGlu { gate, up, .. } => vec![gate, up],
            Self::Add { a, b, .. } => vec![a, b],
            Self::Gate { x, gate, .. } => vec![x, gate],
            Self::Route { logits, .. } => vec![logits],
            Self::GatedDeltaRule { inputs: DeltaInputs { q, k, v, a, b }, .. } => vec![q, k, v, a, b],
        }
    }

    /// What a product adds to its result, if it can add something.
    fn residual(&self) -> Option<Option<Value>> {
        match *self {
            Self::Linear { residual, cap: None, .. } | Self::MoeExperts { residual, .. } => Some(residual),
            _ => None,
        }
    }

    /// What such a product adds, and where its result goes.
    fn sum(&mut self) -> Option<(&mut Option<Value>, &mut Value)> {
        match self {
            Self::Linear { residual, cap: None, out, .. } | Self::MoeExperts { residual, out, .. } => {
                Some((residual, out))
            }
            _ => None,
        }
    }

    /// The value that it writes; a route writes none.
    pub(crate) fn output(&self) -> Option<Value> {
        match *self {
            Self::Route { .. } | Self::Alone { out: Output::Routing(_), .. } => None,
            Self::Alone { out: Output::Value(out), .. }
            | Self::Embed { out, .. }
            | Self::Linear { out, .. }
            | Self::RmsNorm { out, .. }
            | Self::Rope { out, .. }
            | Self::Attention { out, .. }
            | Self::LatentAttention { out, .. }
            | Self::SwiGlu { out, .. }
            | Self::Add { out, .. }
            | Self::Clamp { out, .. }
            | Self::Gate { out, .. }
            | Self::Slice { out, .. }
            | Self::GatherRows { out, .. }
            | Self::MoeExperts { out, .. }
            | Self::CausalConv1d { out, .. }
            | Self::GatedDeltaRule { out, .. } => Some(out),
        }
    }
}

/// The graph's steps: an addition to the result of a product right before it becomes its residual, or that of the product whose
/// result it has as its residual.
pub(crate) fn steps(graph: &Graph, ends: &Ends) -> Vec<Step> {
    let mut uses = vec![0; graph.values];
    // What comes with a batch is written before its steps run.
    let nodes = (0..graph.nodes.len()).filter(|node| !matches!(graph.nodes[*node].op, Op::InputRows(_)));
    let all: Vec<Step> = nodes.map(|node| step(graph, node)).collect();
    let yielded = ends.outputs.iter().copied().chain([graph.logits]);
    for value in all.iter().flat_map(Step::inputs).chain(yielded) {
        uses[value.index] += 1;
    }
    let mut fused: Vec<Step> = vec![];
    for step in all {
        if let Step::Add { a, b, out } = step
            && let Some(product) = fused.last().and_then(Step::output)
            && uses[product.index] == 1
            && (a == product) != (b == product)
            && let Some(at) = adds(&fused, &uses, if a == product { b } else { a })
        {
            let added = if a == product { b } else { a };
            if let Some((residual, _)) = fused[at].sum() {
                *residual = Some(added);
            }
            if let Some((_, result)) = fused.last_mut().and_then(Step::sum) {
                *result = out;
            }
            continue;
        }
        fused.push(step);
    }
    prepare(graph, &uses, &mut fused);
    enter_latents(graph, &uses, &mut fused);
    fused
}

/// The step that a value can be added by, where it is added to the result of the last one: that, or what makes its residual.
fn adds(steps: &[Step], uses: &[usize], value: Value) -> Option<usize> {
    let last = steps.len().checked_sub(1)?;
    let Some(before) = steps[last].residual()? else { return Some(last) };
    let at = producer(steps, uses, before)?;
    let is_late = steps[at..].iter().any(|step| step.output() == Some(value));
    (steps[at].residual()?.is_none() && !is_late).then_some(at)
}

/// Where a value that is used once is made.
fn producer(steps: &[Step], uses: &[usize], value: Value) -> Option<usize> {
    steps.iter().position(|s| s.output() == Some(value)).filter(|_| uses[value.index] == 1)
}

/// Keeps the steps that are not `gone`.
fn retain(steps: &mut Vec<Step>, gone: &[usize]) {
    let mut index = 0;
    steps.retain(|_| {
        index += 1;
        !gone.contains(&(index - 1))
    });
}

/// The parts of queries and of what keys and values are made of, their norm and rotations become part of the attention over latents
/// that alone reads them.
fn enter_latents(graph: &Graph, uses: &[usize], steps: &mut Vec<Step>) {
    let mut gone = vec![];
    for index in 0..steps.len() {
        let Step::LatentAttention { inputs, cache, .. } = steps[index] else { continue };
        let Some((parts, made)) = latent_parts(steps, uses, inputs, &graph.latent_caches[cache.0]) else {
            continue;
        };
        gone.extend(parts);
        if let Step::LatentAttention { entering, .. } = &mut steps[index] {
            *entering = Some(made);
        }
    }
    retain(steps, &gone);
}

/// The steps that make inputs of attention over latents, and of what they make them; nothing if others read that too, or it is
/// made otherwise.
fn latent_parts(
    steps: &[Step],
    uses: &[usize],
    inputs: LatentInputs,
    shape: &LatentAttention,
) -> Option<(Vec<usize>, EnteringLatents)> {
    let LatentAttention { heads, nope, rope: rotated, rank, .. } = *shape;
    let sliced = |value: Value, parts: usize, first: usize, columns: usize| {
        let at = producer(steps, uses, value)?;
        match steps[at] {
            Step::Slice { x, groups, start, len, .. } if [groups, start, len] == [parts, first, columns] => {
                Some((at, x))
            }
            _ => None,
        }
    };
    let unrotated = |value: Value, wanted: usize| {
        let at = producer(steps, uses, value)?;
        match steps[at] {
            Step::Rope { x, heads, rope, .. } if heads == wanted => Some((at, x, rope)),
            _ => None,
        }
    };
    let [q_rope, k_rope] = inputs.rotated?;
    let turns = [unrotated(q_rope, heads), unrotated(k_rope, 1)];
    let [rope, other] = turns.map(|turn| turn.map(|(_, _, rope)| rope));
    let [q_rope, k_rope] = [(turns[0], q_rope), (turns[1], k_rope)].map(|(turn, x)| turn.map_or(x, |t| t.1));
    let normed = producer(steps, uses, inputs.c)?;
    let Step::RmsNorm { x: c, weight, groups: 1, eps, .. } = steps[normed] else { return None };
    let (nope_at, q) = sliced(inputs.q_nope, heads, 0, nope)?;
    let (rope_at, of_rope) = sliced(q_rope, heads, nope, rotated)?;
    let (c_at, kv) = sliced(c, 1, 0, rank)?;
    let (k_at, of_k) = sliced(k_rope, 1, rank, rotated)?;
    if rope != other || q != of_rope || kv != of_k {
        return None;
    }
    let turned = turns.into_iter().flatten().map(|(at, ..)| at);
    let parts = [nope_at, rope_at, c_at, k_at, normed].into_iter().chain(turned).collect();
    Some((parts, EnteringLatents { q, kv, norm: (weight, eps), rope }))
}

/// Norms of heads and rotations of queries and keys become part of the attention that alone reads them.
fn prepare(graph: &Graph, uses: &[usize], steps: &mut Vec<Step>) {
    let producer = |steps: &[Step], value: Value| producer(steps, uses, value);
    // The rotation of `value` and a norm of its heads before, if it has them, and the value that they start from.
    let trace = |steps: &[Step], value: Value, wanted: usize| {
        let rotated = producer(steps, value).and_then(|at| match steps[at] {
            Step::Rope { x, heads, rope, .. } if heads == wanted => Some((at, x, rope)),
            _ => None,
        });
        let x = rotated.map_or(value, |(_, x, _)| x);
        let normed = producer(steps, x).and_then(|at| match steps[at] {
            Step::RmsNorm { x, weight, groups, eps, .. } if groups == wanted => Some((at, x, (weight, eps))),
            _ => None,
        });
        (rotated, normed, normed.map_or(x, |(_, x, _)| x))
    };
    let mut gone = vec![];
    for index in 0..steps.len() {
        let Step::Attention { q, k, cache, .. } = steps[index] else { continue };
        let shape = graph.caches[cache.0];
        let (q_rotated, q_normed, q) = trace(steps, q, shape.heads);
        let (k_rotated, k_normed, k) = trace(steps, k, shape.kv_heads);
        let rope = q_rotated.map(|r| r.2);
        if rope != k_rotated.map(|r| r.2) {
            continue;
        }
        gone.extend([q_rotated, k_rotated].into_iter().flatten().map(|r| r.0));
        gone.extend([q_normed, k_normed].into_iter().flatten().map(|n| n.0));
        let how = Prepare { rope, q_norm: q_normed.map(|n| n.2), k_norm: k_normed.map(|n| n.2) };
        if let Step::Attention { q: old_q, k: old_k, prepare, .. } = &mut steps[index] {
            (*old_q, *old_k, *prepare) = (q, k, how);
        }
    }
    retain(steps, &gone);
}

fn step(graph: &Graph, node: usize) -> Step {
    let (op, output) = (&graph.nodes[node].op, graph.nodes[node].out);
    let adapted = |low_rank: bool| low_rank.then_some(node);
    let alone = || Step::Alone { op: op.clone(), out: output };
    let out = match (op, output) {
        (
            &Op::Route(RouteOp { logits, by: RouteBy::Scores { bias }, scales, route }),
            Output::Routing(routing),
        ) => {
            return Step::Route { logits, bias, scales, route, routing };
        }
        (_, Output::Routing(_)) => return alone(),
        (_, Output::Value(out)) => out,
    };
    match *op {
        Op::Embed(EmbedOp { table }) => Step::Embed { table, out },
        Op::Linear(LinearOp { x, weight, bias, precision, cap, ref low_rank }) => {
            let adapted = adapted(!low_rank.is_empty());
            Step::Linear { x, weight, bias, precision, cap, residual: None, adapted, out }
        }
        Op::RmsNorm(RmsNormOp { x, weight: Some(weight), groups, eps })
            if graph.weights[weight.0].matrix.cols == x.width / groups =>
        {
            Step::RmsNorm { x, weight, groups, eps, out }
        }
        Op::Rope(RopeOp { x, heads, rope, place }) if place == Placement::default() => {
            Step::Rope { x, heads, rope, out }
        }
        Op::Attention(AttentionOp { q, k, v, cache, sinks, chosen, by_distance: added }) => {
            Step::Attention { q, k, v, cache, sinks, chosen, added, prepare: Prepare::default(), out }
        }
        Op::LatentAttention(LatentAttentionOp { inputs, weights, cache }) => {
            Step::LatentAttention { inputs, weights, cache, entering: None, out }
        }
        Op::Activate(ActivateOp { activation: Activation::SwiGlu, gate: Some(gate), up }) => {
            Step::SwiGlu { gate, up, out }
        }
        Op::Add(AddOp { a, b }) => Step::Add { a, b, out },
        Op::Clamp(ClampOp { x, limits: [least, limit] }) if least == -limit => Step::Clamp { x, limit, out },
        Op::MoeExperts(MoeExpertsOp { x, routing, experts, mlp, ref low_rank }) => {
            let adapted = adapted(!low_rank.is_empty());
            Step::MoeExperts { x, routing, experts, mlp, residual: None, adapted, out }
        }
        Op::Gate(GateOp { x, gate, function }) => Step::Gate { x, gate, function, out },
        Op::Slice(SliceOp { x, groups, start, len }) => Step::Slice { x, groups, start, len, out },
        Op::CausalConv1d(CausalConv1dOp { x, weight, bias, kernel, dilation, plain, state }) => {
            Step::CausalConv1d { x, weight, bias, kernel, dilation, plain, state, out }
        }
        Op::GatedDeltaRule(GatedDeltaRuleOp { inputs, decay, dt_bias, shape, state }) => {
            Step::GatedDeltaRule { inputs, decay, dt_bias, shape, state, out }
        }
        Op::GatherRows(GatherRowsOp { x }) => Step::GatherRows { x, out },
        _ => alone(),
    }
}

/// Buffers for values: which one each has, and their widths in f32.
#[derive(Debug, Clone, Default)]
pub(crate) struct Buffers {
    /// `None` for values that nothing writes, and the logits.
    pub(crate) of: Vec<Option<usize>>,
    pub(crate) widths: Vec<usize>,
}

/// When each value is needed for the last time, by index of the step. What a norm or a router reads stays as long as its
/// result: kernels of few rows make either where the result is read.
fn last_uses(graph: &Graph, ends: &Ends, steps: &[Step]) -> Vec<usize> {
    let mut last = vec![0; graph.values];
    let mut chosen = HashMap::new();
    for (index, step) in steps.iter().enumerate().rev() {
        if let Step::MoeExperts { routing, .. } = step {
            chosen.entry(*routing).or_insert(index);
        }
        let end = match step {
            Step::RmsNorm { out, .. } => index.max(last[out.index]),
            Step::Route { routing, .. } => chosen.get(routing).copied().unwrap_or(index),
            _ => index,
        };
        for value in step.inputs() {
            last[value.index] = last[value.index].max(end);
        }
    }
    ends.outputs.iter().for_each(|value| last[value.index] = steps.len());
    last
}

/// First-fit over values in execution order. A step's output shares no buffer with its inputs.
pub(crate) fn buffers(graph: &Graph, ends: &Ends, steps: &[Step]) -> Buffers {
    let mut ending = vec![vec![]; steps.len() + 1];
    for (value, last) in last_uses(graph, ends, steps).into_iter().enumerate() {
        ending[last].push(value);
    }
    let mut buffers = Buffers { of: vec![None; graph.values], widths: vec![] };
    let brought = graph.input_rows().filter(|value| *value != graph.logits);
    for input in ends.inputs.iter().copied().chain(brought) {
        buffers.of[input.index] = Some(buffers.widths.len());
        buffers.widths.push(input.width());
    }
    let mut free: Vec<usize> = vec![];
    for (index, step) in steps.iter().enumerate() {
        if let Some(out) = step.output().filter(|out| *out != graph.logits) {
            let widths = &mut buffers.widths;
            let fits = free.iter().copied().filter(|b| widths[*b] >= out.width()).min_by_key(|b| widths[*b]);
            let chosen = fits.or_else(|| free.iter().copied().max_by_key(|b| widths[*b]));
            let buffer = chosen.unwrap_or_else(|| {
                widths.push(0);
                widths.len() - 1
            });
            free.retain(|b| *b != buffer);
            widths[buffer] = widths[buffer].max(out.width());
            buffers.of[out.index] = Some(buffer);
        }
        free.extend(ending[index].iter().filter_map(|value| buffers.of[*value]));
    }
    buffers
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::graph::{ExpertSet, GraphBuilder, MatrixSpec, Rope, RopeStyle};

    const WIDTH: usize = 8;

    fn weight(g: &mut GraphBuilder, rows: usize, cols: usize) -> WeightId {
        g.weight("w", MatrixSpec { dtype: DType::F32, rows, cols })
    }

    fn embedded(g: &mut GraphBuilder, width: usize) -> Value {
        let table = weight(g, 5, width);
        g.embed(table)
    }

    fn steps_to(g: GraphBuilder, logits: Value) -> Vec<Step> {
        let graph = g.finish(logits);
        steps(&graph, &Ends::default())
    }

    #[test]
    fn both_additions_after_experts_become_residuals() {
        let mut g = GraphBuilder::new();
        let x = embedded(&mut g, WIDTH);
        let [router, shared] = [3, WIDTH].map(|rows| weight(&mut g, rows, WIDTH));
        let logits = g.linear(x, router, None, Precision::F32).unwrap();
        let routing = g.route(logits, None, Route::softmax(3, 2, true)).unwrap();
        let shared = g.linear(x, shared, None, Precision::Fast).unwrap();
        let matrix = MatrixSpec { dtype: DType::F32, rows: WIDTH, cols: WIDTH };
        let set = ExpertSet { layer: 0, experts: 3, gate: Some(matrix), up: matrix, down: matrix };
        let set = g.expert_set(set).unwrap();
        let routed = g.moe_experts(x, routing, set).unwrap();
        let both = g.add(routed, shared).unwrap();
        let out = g.add(x, both).unwrap();
        let steps = steps_to(g, out);
        let residual_of = |value| steps.iter().find(|step| step.output() == Some(value)).unwrap().residual();
        assert!(!steps.iter().any(|step| matches!(step, Step::Add { .. })), "{steps:?}");
        assert_eq!([residual_of(shared), residual_of(out)], [Some(Some(x)), Some(Some(shared))]);
    }

    #[test]
    fn attention_over_latents_starts_from_products() {
        let shape = LatentAttention { heads: 2, nope: 4, rope: 2, rank: 6, value: 3, scale: 1.0 };
        let of_order = |swapped: bool| {
            let mut g = GraphBuilder::new();
            let (q, kv) = (embedded(&mut g, 12), embedded(&mut g, 8));
            let norm = weight(&mut g, 1, 6);
            let (style, inv_freq) = (RopeStyle::HalfSplit, vec![0.5]);
            let rope = g.rotation(Rope { style, inv_freq, magnitude: 1.0, axes: vec![] });
            let q_nope = g.slice(q, 2, if swapped { 2 } else { 0 }, 4).unwrap();
            let q_rope = g.slice(q, 2, if swapped { 0 } else { 4 }, 2).unwrap();
            let q_rope = g.rope(q_rope, 2, rope).unwrap();
            let c = g.slice(kv, 1, 0, 6).unwrap();
            let c = g.rms_norm(c, norm, 1, 1e-6).unwrap();
            let k_rope = g.slice(kv, 1, 6, 2).unwrap();
            let k_rope = g.rope(k_rope, 1, rope).unwrap();
            let inputs =
                LatentInputs { q_nope, c, rotated: Some([q_rope, k_rope]), sinks: None, chosen: None };
            let joint = LatentWeights::Joint(weight(&mut g, 14, 6));
            let out = g.latent_attention(inputs, joint, shape).unwrap();
            let steps = steps_to(g, out);
            let read = steps.last().unwrap().inputs();
            (steps.len(), read == [q, kv])
        };
        assert_eq!(of_order(false), (3, true), "two tables and attention");
        // Heads whose rotated channels come first are not what the kernel knows.
        assert_eq!(of_order(true), (10, false));
    }
}
