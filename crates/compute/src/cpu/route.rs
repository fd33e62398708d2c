//! The router: scores of all experts, then the best `top_k`.

use super::activate::softplus;
use super::executable::{CpuCall, CpuExecutable, CpuOp};
use crate::graph::{GroupRank, Groups, Output, Route, RouteBy, RouteOp, Score, TopSoftmaxOp};
use crate::quant::dequantize_row;
use crate::{Result, TensorView};

impl CpuOp for RouteOp {
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()> {
        let Output::Routing(routing) = call.out else { unreachable!("a route yields a routing") };
        let Self { logits, by, scales, route } = self;
        let mut choice = std::mem::take(&mut cpu.choices[routing.index]);
        let outcome = match by {
            RouteBy::Scores { bias } => {
                choice.route(cpu.values.of(*logits), bias.map(|b| &cpu.vectors[b.0][..]), route);
                Ok(())
            }
            RouteBy::Tokens { table } => {
                let ids = ids_of_tokens(cpu.weights[table.0].view(), call.batch.tokens, route);
                ids.map(|ids| choice.route_to(cpu.values.of(*logits), &ids, route))
            }
        };
        if let Some(scales) = scales {
            let scales = &cpu.vectors[scales.0];
            let chosen = choice.weights.iter_mut().zip(&choice.ids);
            chosen.for_each(|(weight, id)| *weight *= scales[*id as usize]);
        }
        let outcome = outcome.and_then(|()| announce(cpu, routing.index, &choice, call));
        cpu.choices[routing.index] = choice;
        outcome
    }
}

impl CpuOp for TopSoftmaxOp {
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()> {
        let Self { logits, top_k } = *self;
        let mut choice = Choice::default();
        choice.route(cpu.values.of(logits), None, &self.route());
        let rows = cpu.values.rows(logits);
        cpu.map_rows(call.out(), rows, |_, row, out| {
            out.fill(0.0);
            let chosen = row * top_k..(row + 1) * top_k;
            for (id, weight) in choice.ids[chosen.clone()].iter().zip(&choice.weights[chosen]) {
                out[*id as usize] = *weight;
            }
        });
        Ok(())
    }
}

/// Experts that `table` has for tokens.
fn ids_of_tokens(table: TensorView<'_>, tokens: &[u32], route: &Route) -> Result<Vec<u32>> {
    let mut ids = vec![0.0; tokens.len() * route.top_k];
    for (ids, token) in ids.chunks_exact_mut(route.top_k).zip(tokens) {
        dequantize_row(table, *token as usize, ids)?;
    }
    let last = route.experts as u32 - 1;
    Ok(ids.iter().map(|id| (*id as u32).min(last)).collect())
}

/// Tells the source of experts what a router chose, and what the next one will probably choose.
fn announce(cpu: &mut CpuExecutable, routing: usize, choice: &Choice, call: &mut CpuCall<'_>) -> Result<()> {
    let Some(set) = cpu.sets[routing] else { return Ok(()) };
    let experts = cpu.graph.expert_sets[set.0].experts;
    let mut ids = choice.ids.clone();
    ids.retain(|id| (*id as usize) < experts);
    call.experts.routed(set, &ids, call.tokens());
    call.experts.announce(set, &choice.distinct(experts))?;
    let Some(router) = cpu.routers[routing] else { return Ok(()) };
    if let Some(next) = cpu.routers.get(routing + 1).copied().flatten()
        && next.x.width() == router.x.width()
        && call.experts.wants_forecast()
    {
        let weights = (&cpu.weights[..], &cpu.vectors[..]);
        let experts = cpu.graph.expert_sets[next.set.0].experts;
        let x = cpu.values.of(router.x);
        let likely = cpu.forecast.likely(&cpu.context, weights, (&next, experts), x);
        call.experts.forecast(next.set, &likely);
    }
    Ok(())
}

/// Chosen experts of a batch.
#[derive(Debug, Default, Clone)]
pub(crate) struct Choice {
    /// (rows, top_k) expert ids, best first.
    pub(crate) ids: Vec<u32>,
    /// (rows, top_k) weights.
    pub(crate) weights: Vec<f32>,
}

impl Choice {
    /// Routes every row of `logits` (rows, experts); `bias` (experts) enters the choice only.
    pub(crate) fn route(&mut self, logits: &[f32], bias: Option<&[f32]>, route: &Route) {
        self.ids.clear();
        self.weights.clear();
        let mut scores = vec![0.0f32; route.experts];
        let mut ranks = vec![0.0f32; route.experts];
        let mut order: Vec<u32> = vec![];
        for row in logits.chunks_exact(route.experts) {
            score(row, route.score, &mut scores);
            // Softmax keeps the order of the logits, without its rounding.
            let plain = bias.is_none()
                && route.groups.is_none()
                && !matches!(route.score, Score::Sigmoid | Score::SqrtSoftplus);
            ranks.copy_from_slice(if plain { row } else { &scores });
            if let Some(bias) = bias {
                ranks.iter_mut().zip(bias).for_each(|(rank, bias)| *rank += bias);
            }
            order.clear();
            match route.groups {
                Some(groups) => keep_groups(&ranks, groups, &mut order),
                None => order.extend(0..route.experts as u32),
            }
            if route.groups.is_some_and(|groups| groups.rank == GroupRank::BestTwoElseZero) {
                let others = (0..route.experts as u32).filter(|id| order.binary_search(id).is_err());
                others.for_each(|id| ranks[id as usize] = 0.0);
                order.clear();
                order.extend(0..route.experts as u32);
            }
            let better = |a: &u32, b: &u32| ranks[*b as usize].total_cmp(&ranks[*a as usize]).then(a.cmp(b));
            if route.top_k < order.len() {
                order.select_nth_unstable_by(route.top_k - 1, better);
                order.truncate(route.top_k);
            }
            order.sort_unstable_by(better);
            self.weigh(row, &scores, &order, route);
        }
    }

    /// As [`Choice::route`], with the experts of every row given: `ids` (rows, top_k).
    pub(crate) fn route_to(&mut self, logits: &[f32], ids: &[u32], route: &Route) {
        self.ids.clear();
        self.weights.clear();
        let mut scores = vec![0.0f32; route.experts];
        for (row, ids) in logits.chunks_exact(route.experts).zip(ids.chunks_exact(route.top_k)) {
            score(row, route.score, &mut scores);
            self.weigh(row, &scores, ids, route);
        }
    }

    /// Appends the experts `order` of a row with their weights.
    fn weigh(&mut self, row: &[f32], scores: &[f32], order: &[u32], route: &Route) {
        let start = self.weights.len();
        self.weights.extend(order.iter().map(|id| scores[*id as usize]));
        let chosen = &mut self.weights[start..];
        if route.score == Score::SoftmaxOfChosen {
            let logits: Vec<f32> = order.iter().map(|id| row[*id as usize]).collect();
            score(&logits, Score::Softmax, chosen);
        }
        if route.score == Score::SigmoidOfChosen {
            let logits: Vec<f32> = order.iter().map(|id| row[*id as usize]).collect();
            score(&logits, Score::Sigmoid, chosen);
        }
        if route.score == Score::SparseMixer {
            mix(row, order, route.epsilon, chosen);
        }
        let sum = if route.renormalize { chosen.iter().sum::<f32>() + route.epsilon } else { 1.0 };
        // Zero, or NaN if a logit is not finite: it must not vanish by not being chosen.
        let poison: f32 = row.iter().map(|l| l * 0.0).sum();
        chosen.iter_mut().for_each(|w| *w = *w / sum * route.scale + poison);
        self.ids.extend_from_slice(order);
    }

    /// Distinct ids below `experts`, ascending.
    pub(crate) fn distinct(&self, experts: usize) -> Vec<u32> {
        let mut ids = self.ids.clone();
        ids.sort_unstable();
        ids.dedup();
        ids.truncate(ids.partition_point(|id| (*id as usize) < experts));
        ids
    }
}

/// Scores of one row of logits.
fn score(logits: &[f32], score: Score, out: &mut [f32]) {
    match score {
        Score::Softmax => {
            let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            out.iter_mut().zip(logits).for_each(|(o, l)| *o = (l - max).exp());
            let sum: f32 = out.iter().sum();
            out.iter_mut().for_each(|o| *o /= sum);
        }
        Score::SqrtSoftplus => {
            out.iter_mut().zip(logits).for_each(|(o, l)| *o = softplus(*l).sqrt());
        }
        Score::Sigmoid => out.iter_mut().zip(logits).for_each(|(o, l)| *o = 1.0 / (1.0 + (-l).exp())),
        Score::SoftmaxOfChosen | Score::SigmoidOfChosen | Score::SparseMixer => out.copy_from_slice(logits),
    }
}

/// Weights of SparseMixer of the experts `order`, best first.
fn mix(logits: &[f32], order: &[u32], epsilon: f32, out: &mut [f32]) {
    for (n, out) in out.iter_mut().enumerate() {
        let (before, best) = (&order[..n], logits[order[n] as usize]);
        let far = |logit: f32| (best - logit) / logit.abs().max(best) > 2.0 * epsilon;
        let among = (0u32..).zip(logits).filter(|(id, logit)| !far(**logit) && !before.contains(id));
        *out = among.map(|(_, logit)| (logit - best).exp()).sum::<f32>().recip();
    }
}

/// Experts of the best groups, ascending.
fn keep_groups(ranks: &[f32], groups: Groups, kept: &mut Vec<u32>) {
    let size = ranks.len() / groups.count;
    let rank = |group: &[f32]| {
        let (mut best, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
        for r in group {
            if *r > best {
                (best, second) = (*r, best);
            } else if *r > second {
                second = *r;
            }
        }
        match groups.rank {
            GroupRank::BestTwo | GroupRank::BestTwoElseZero if group.len() > 1 => best + second,
            _ => best,
        }
    };
    let scores: Vec<f32> = ranks.chunks_exact(size).map(rank).collect();
    let mut order: Vec<usize> = (0..groups.count).collect();
    order.sort_unstable_by(|a, b| scores[*b].total_cmp(&scores[*a]).then(a.cmp(b)));
    order.truncate(groups.keep);
    order.sort_unstable();
    kept.extend(order.iter().flat_map(|group| (group * size) as u32..((group + 1) * size) as u32));
}
