//! The scalar meaning of routers and routed experts.

use std::collections::HashMap;

use super::attention::softmax;
use super::linear::by_adapter;
use super::norm::rms_norm;
use super::{Interpreter, Matrix, Outcome, ReferenceCall, ReferenceOp, activate, linear, sigmoid, softplus};
use crate::backend::{ExpertSource, ExpertView};
use crate::graph::{
    Activation, GroupRank, MoeExpertsOp, Route, RouteBy, RouteOp, Score, TopSoftmaxOp, Weighted,
};
use crate::quant::dequantize_row;
use crate::{Result, Tensor, TensorView};

/// What logits are turned into.
fn scores(logits: &[f32], score: Score) -> Vec<f64> {
    match score {
        Score::Softmax => softmax(logits),
        Score::Sigmoid => logits.iter().map(|l| f64::from(sigmoid(*l))).collect(),
        Score::SqrtSoftplus => logits.iter().map(|l| softplus(f64::from(*l)).sqrt()).collect(),
        Score::SoftmaxOfChosen | Score::SigmoidOfChosen | Score::SparseMixer => {
            logits.iter().map(|l| f64::from(*l)).collect()
        }
    }
}

/// The chosen experts with their weights, best first; ties go to the lower id. Experts outside the kept groups cannot
/// be chosen. A logit that is not finite makes every weight NaN: it comes from a broken weight or an overflow, and must
/// not vanish by not being chosen. Source: transformers' routers.
pub fn route(logits: &[f32], bias: Option<&[f32]>, route: &Route) -> Vec<(u32, f32)> {
    let scores = scores(logits, route.score);
    let mut ranks: Vec<f64> =
        scores.iter().enumerate().map(|(e, score)| score + bias.map_or(0.0, |b| f64::from(b[e]))).collect();
    let mut order: Vec<usize> = (0..scores.len()).collect();
    if let Some(groups) = route.groups {
        let size = scores.len() / groups.count;
        let rank = |group: usize| {
            let mut best = ranks[group * size..(group + 1) * size].to_vec();
            best.sort_by(|a, b| b.total_cmp(a));
            match groups.rank {
                GroupRank::Best => best[0],
                GroupRank::BestTwo | GroupRank::BestTwoElseZero => best.iter().take(2).sum(),
            }
        };
        let mut ranked: Vec<usize> = (0..groups.count).collect();
        ranked.sort_by(|a, b| rank(*b).total_cmp(&rank(*a)).then(a.cmp(b)));
        let kept = |e: &usize| ranked[..groups.keep].contains(&(e / size));
        if groups.rank == GroupRank::BestTwoElseZero {
            order.iter().filter(|e| !kept(e)).for_each(|e| ranks[*e] = 0.0);
        } else {
            order.retain(kept);
        }
    }
    order.sort_by(|a, b| ranks[*b].total_cmp(&ranks[*a]).then(a.cmp(b)));
    order.truncate(route.top_k);
    weigh(logits, &scores, order, route)
}

/// The experts `ids` with their weights.
pub fn route_by_token(logits: &[f32], ids: &[f32], route: &Route) -> Vec<(u32, f32)> {
    weigh(logits, &scores(logits, route.score), ids.iter().map(|id| *id as usize).collect(), route)
}

/// Weights of SparseMixer of the experts `order`.
fn mixed(logits: &[f32], order: &[usize], epsilon: f32) -> Vec<f64> {
    let mut left = vec![true; logits.len()];
    let weight = |chosen: &usize| {
        let best = logits[*chosen];
        let far = |logit: f32| (best - logit) / logit.abs().max(best) > 2.0 * epsilon;
        let among = logits.iter().zip(&left).filter(|(logit, left)| **left && !far(**logit));
        let sum: f64 = among.map(|(logit, _)| f64::from(logit - best).exp()).sum();
        left[*chosen] = false;
        sum.recip()
    };
    order.iter().map(weight).collect()
}

/// Experts `order` with their weights.
fn weigh(logits: &[f32], scores: &[f64], order: Vec<usize>, route: &Route) -> Vec<(u32, f32)> {
    let chosen: Vec<f64> = match route.score {
        Score::SoftmaxOfChosen => softmax(&order.iter().map(|e| logits[*e]).collect::<Vec<_>>()),
        Score::SigmoidOfChosen => order.iter().map(|e| f64::from(sigmoid(logits[*e]))).collect(),
        Score::SparseMixer => mixed(logits, &order, route.epsilon),
        _ => order.iter().map(|e| scores[*e]).collect(),
    };
    let sum = if route.renormalize { chosen.iter().sum::<f64>() + f64::from(route.epsilon) } else { 1.0 };
    let poison = if logits.iter().all(|l| l.is_finite()) { 0.0 } else { f64::NAN };
    let weight = |w: f64| (w / sum * f64::from(route.scale) + poison) as f32;
    order.iter().zip(chosen).map(|(e, w)| (*e as u32, weight(w))).collect()
}

/// One expert on rows of activations; `biases` are its own of gate, up and down.
///
/// # Errors
/// If a weight's dtype has no dequantiser.
pub fn expert(
    weights: &ExpertView<'_>,
    activation: Activation,
    biases: Option<[&[f32]; 3]>,
    x: &[&[f32]],
) -> Result<Vec<Vec<f32>>> {
    let project = |weight: TensorView<'_>, which: usize, x: &[&[f32]]| -> Result<Matrix> {
        let mut all = linear(weight, x)?;
        for out in &mut all {
            let bias = biases.iter().flat_map(|b| b[which]);
            out.iter_mut().zip(bias).for_each(|(o, b)| *o += b);
        }
        Ok(all)
    };
    let mut gates = match weights.gate {
        Some(weight) => project(weight, 0, x)?,
        None => vec![vec![0.0; weights.up.rows()]; x.len()],
    };
    for (gate, up) in gates.iter_mut().zip(project(weights.up, 1, x)?) {
        for (g, u) in gate.iter_mut().zip(up) {
            *g = activate(activation, *g, u);
        }
    }
    let gates: Vec<&[f32]> = gates.iter().map(Vec::as_slice).collect();
    project(weights.down, 2, &gates)
}

impl ReferenceOp for RouteOp {
    fn run(&self, own: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        let logits = call.of(self.logits).iter();
        let scales = self.scales.map(|scales| own.vector(scales)).transpose()?;
        let scaled = |mut chosen: Vec<(u32, f32)>| {
            if let Some(scales) = &scales {
                chosen.iter_mut().for_each(|(id, weight)| *weight *= scales[*id as usize]);
            }
            chosen
        };
        match self.by {
            RouteBy::Scores { bias } => {
                let bias = bias.map(|b| own.vector(b)).transpose()?;
                let row = |row: &Vec<f32>| scaled(route(row, bias.as_deref(), &self.route));
                Ok(Outcome::Routing(logits.map(row).collect()))
            }
            RouteBy::Tokens { table } => {
                let table = own.weights[table.0].view();
                let row = |(logits, token): (&Vec<f32>, &u32)| {
                    let mut ids = vec![0.0; table.cols()];
                    dequantize_row(table, *token as usize, &mut ids)?;
                    Ok(scaled(route_by_token(logits, &ids, &self.route)))
                };
                logits.zip(call.batch.tokens).map(row).collect::<Result<_>>().map(Outcome::Routing)
            }
        }
    }
}

impl ReferenceOp for TopSoftmaxOp {
    fn run(&self, _: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        let row = |logits: &Vec<f32>| {
            let mut out = vec![0.0; logits.len()];
            for (id, weight) in route(logits, None, &self.route()) {
                out[id as usize] = weight;
            }
            out
        };
        Ok(Outcome::Rows(call.of(self.logits).iter().map(row).collect()))
    }
}

impl ReferenceOp for MoeExpertsOp {
    fn run(&self, own: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        let chosen = &call.routings[self.routing.index];
        let adapters = call.batch.adapters(call.of(self.x).len());
        own.moe(self, adapters.as_deref(), call.of(self.x), chosen, call.experts).map(Outcome::Rows)
    }
}

impl Interpreter {
    fn moe(
        &self,
        op: &MoeExpertsOp,
        adapters: Option<&[Option<u32>]>,
        x: &Matrix,
        chosen: &[Vec<(u32, f32)>],
        source: &mut dyn ExpertSource,
    ) -> Result<Matrix> {
        let (set, mlp) = (op.experts, op.mlp);
        let biases = match mlp.biases {
            Some(b) => Some([self.vector(b.gate)?, self.vector(b.up)?, self.vector(b.down)?]),
            None => None,
        };
        let mut ids: Vec<u32> = chosen.iter().flatten().map(|(id, _)| *id).collect();
        ids.sort_unstable();
        ids.dedup();
        // Those beyond return what they take.
        let experts = self.graph.expert_sets[set.0].experts;
        ids.retain(|id| (*id as usize) < experts);
        let mut parts: HashMap<(usize, u32), Vec<f32>> = HashMap::new();
        let mut failed = Ok(());
        source.visit(set, &ids, &mut |group| {
            for weights in group {
                let spec = &self.graph.expert_sets[set.0];
                let widths = [spec.up.rows, spec.up.rows, spec.down.rows];
                let own = |which: usize, all: &'_ [Vec<f32>; 3]| {
                    let start = weights.id as usize * widths[which];
                    start..(start + widths[which]).min(all[which].len())
                };
                let own = biases.as_ref().map(|b| [0, 1, 2].map(|which| &b[which][own(which, b)]));
                let weight =
                    |row: usize| chosen[row].iter().find(|c| c.0 == weights.id).map(|chosen| chosen.1);
                let rows = (0..chosen.len()).filter(|row| weight(*row).is_some());
                for (adapter, rows) in by_adapter(rows, adapters) {
                    let x = rows.iter().map(|row| {
                        let factor = if mlp.weighted == Weighted::Input { weight(*row) } else { None };
                        x[*row].iter().map(|v| factor.map_or(*v, |factor| v * factor)).collect()
                    });
                    let x: Matrix = x.collect();
                    let run = || {
                        let adapted = |which: usize, weight: Option<TensorView<'_>>| match weight {
                            Some(weight) => {
                                self.adapted_expert((weight, which, weights.id), &op.low_rank, adapter)
                            }
                            None => Ok(None),
                        };
                        let gate = adapted(0, weights.gate)?;
                        let (up, down) = (adapted(1, Some(weights.up))?, adapted(2, Some(weights.down))?);
                        let weights = ExpertView {
                            id: weights.id,
                            gate: gate.as_ref().map(Tensor::view).or(weights.gate),
                            up: up.as_ref().map_or(weights.up, Tensor::view),
                            down: down.as_ref().map_or(weights.down, Tensor::view),
                        };
                        let x: Vec<&[f32]> = x.iter().map(Vec::as_slice).collect();
                        expert(&weights, mlp.activation, own, &x)
                    };
                    match run() {
                        Ok(out) => parts.extend(rows.iter().map(|row| (*row, weights.id)).zip(out)),
                        Err(error) => failed = Err(error),
                    }
                }
            }
        })?;
        failed?;
        if let Some(norm) = mlp.norm {
            let weight = self.vector(norm.weight)?;
            for part in parts.values_mut() {
                part.iter_mut().zip(&weight).for_each(|(v, w)| *v *= w);
                rms_norm(part, &vec![1.0; weight.len()], norm.eps);
            }
        }
        let sum = |row: usize, column: usize| -> f32 {
            chosen[row]
                .iter()
                .map(|(id, w)| if mlp.weighted == Weighted::Input { (id, &1.0) } else { (id, w) })
                .map(|(id, w)| f64::from(*w) * f64::from(parts.get(&(row, *id)).unwrap_or(&x[row])[column]))
                .sum::<f64>() as f32
        };
        Ok((0..x.len()).map(|row| (0..x[row].len()).map(|column| sum(row, column)).collect()).collect())
    }
}
