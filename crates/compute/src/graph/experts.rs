//! Routers and routed experts.

use super::builder::check;
use super::operation::{Operation, Refers, Visitor, refers};
use super::{
    Activation, ExpertLowRank, ExpertSetId, GraphBuilder, MatrixSpec, Node, Output, Routing, Value, WeightId,
};
use crate::{Error, Result};

/// What a router's logits are turned into before experts are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Score {
    /// Softmax over all experts (Switch Transformer, Mixtral, Qwen).
    Softmax,
    /// Sigmoid of each (DeepSeek-V3).
    Sigmoid,
    /// √(ln(1 + eˣ)) of each (DeepSeek-V4).
    SqrtSoftplus,
    /// Experts are chosen by logits; weights are the softmax over the chosen (gpt-oss).
    SoftmaxOfChosen,
    /// Experts are chosen by logits, to which a bias is added; weights are the sigmoid of each (Kolibri-1).
    SigmoidOfChosen,
    /// Experts are chosen by logits; the weight of each is its part of a softmax over those which were not chosen before it
    /// and are not far below it: a logit l with (c − l) / max(|l|, c) > 2 · [`Route::epsilon`], for the logit c of the
    /// chosen one, takes no part (SparseMixer, Liu et al. 2024, at inference; Phi-3.5-MoE).
    SparseMixer,
}

/// How a group of experts is ranked among groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupRank {
    /// By its best expert (DeepSeek-V2).
    Best,
    /// By the sum of its two best experts (DeepSeek-V3).
    BestTwo,
    /// The same, where experts of the other groups can still be chosen, by zero in place of their own score (A.X-K2).
    BestTwoElseZero,
}

/// Experts are first limited to those of the best groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Groups {
    /// Number of equal groups (`n_group`).
    pub count: usize,
    /// Groups that stay (`topk_group`).
    pub keep: usize,
    /// How groups are ranked.
    pub rank: GroupRank,
}

/// How router logits become expert weights.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Route {
    /// Experts in the layer.
    pub experts: usize,
    /// Experts per token (`num_experts_per_tok`).
    pub top_k: usize,
    /// What logits are turned into.
    pub score: Score,
    /// Limit to the best groups.
    pub groups: Option<Groups>,
    /// Divide the chosen weights by their sum (`norm_topk_prob`).
    pub renormalize: bool,
    /// Added to that sum; of [`Score::SparseMixer`] what is close.
    pub epsilon: f32,
    /// Factor on the weights at the end (`routed_scaling_factor`).
    pub scale: f32,
}

impl Route {
    /// Softmax over all experts, without groups or factor.
    pub fn softmax(experts: usize, top_k: usize, renormalize: bool) -> Self {
        Self { experts, top_k, score: Score::Softmax, groups: None, renormalize, epsilon: 1e-20, scale: 1.0 }
    }
}

/// What every expert of one layer looks like: down(silu(gate·x) ⊙ (up·x)), or without a gate down(relu(up·x)²).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertSet {
    /// Decoder layer.
    pub layer: usize,
    /// Experts in the layer.
    pub experts: usize,
    /// Gate projection (moe_intermediate_size, hidden_size), if they have one.
    pub gate: Option<MatrixSpec>,
    /// Up projection (moe_intermediate_size, hidden_size).
    pub up: MatrixSpec,
    /// Down projection (hidden_size, moe_intermediate_size).
    pub down: MatrixSpec,
}

impl ExpertSet {
    /// Gate if there is one, up and down.
    pub fn matrices(&self) -> impl Iterator<Item = MatrixSpec> {
        self.gate.into_iter().chain([self.up, self.down])
    }

    /// Channels between the projections (`moe_intermediate_size`).
    pub fn width(&self) -> usize {
        self.up.rows
    }
}

/// Biases of the projections of all experts of a layer, f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertBiases {
    /// (experts · moe_intermediate_size).
    pub gate: WeightId,
    /// (experts · moe_intermediate_size).
    pub up: WeightId,
    /// (experts · hidden_size).
    pub down: WeightId,
}

/// What experts' weights are multiplied with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Weighted {
    /// Their results.
    #[default]
    Output,
    /// What they take (Llama 4).
    Input,
}

/// A norm of what every expert returns, before it is weighted: y ⊙ weight / √(mean((y ⊙ weight)²) + eps) (`post_expert_norm` of
/// Muse Spark, 2026).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OutputNorm {
    /// (hidden_size), f32.
    pub weight: WeightId,
    /// Added to the mean square.
    pub eps: f32,
}

/// What experts compute besides their three products.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ExpertMlp {
    /// Between gate, up and down.
    pub activation: Activation,
    /// Added to the products.
    pub biases: Option<ExpertBiases>,
    /// Where the router's weights enter.
    pub weighted: Weighted,
    /// Experts that return what they take, whose ids follow those of the set: nothing is read for them (the zero-computation
    /// experts of LongCat-Flash, 2025).
    pub identities: usize,
    /// The norm of each one's result.
    pub norm: Option<OutputNorm>,
}

/// What decides which experts a token gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RouteBy {
    /// The `top_k` largest of score + bias (ties: the lower id first).
    Scores {
        /// (experts), f32: added to scores for choosing only (`e_score_correction_bias`).
        bias: Option<WeightId>,
    },
    /// What a table has for the token's id (DeepSeek-V4's hash routing).
    Tokens {
        /// (vocab_size, top_k): expert ids.
        table: WeightId,
    },
}

/// Scores of experts, and a choice of `top_k` of them, weighted by their scores. If a logit is not finite, the weights are
/// NaN.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RouteOp {
    /// (tokens, experts).
    pub logits: Value,
    /// What is chosen by.
    pub by: RouteBy,
    /// (experts), f32: factors on the weights of chosen experts at the end (Gemma 4).
    pub scales: Option<WeightId>,
    /// How scores are made and become weights.
    pub route: Route,
}

refers!(RouteOp { logits, by, scales, route });

impl Operation for RouteOp {
    const NAME: &'static str = "route";

    fn width(&self, graph: &GraphBuilder) -> Result<usize> {
        let (op, Self { logits, by, scales, route }) = (Self::NAME, *self);
        check(op, "logits", route.experts, logits.width)?;
        if let Some(scales) = scales {
            graph.vector(op, "length of the scales", scales, route.experts)?;
        }
        let mut choosable = route.experts;
        match by {
            RouteBy::Scores { bias } => {
                if let Some(bias) = bias {
                    graph.vector(op, "length of the bias", bias, route.experts)?;
                }
                if let Some(groups) = route.groups {
                    choosable = groups.choosable(op, route.experts)?;
                }
            }
            RouteBy::Tokens { table } => {
                check(op, "columns of the table", route.top_k, graph.matrix(table).cols)?;
            }
        }
        if route.top_k == 0 || route.top_k > choosable {
            return Err(Error::Shape { op, what: "top_k", expected: choosable, got: route.top_k });
        }
        Ok(route.top_k)
    }
}

/// The softmax over the `top_k` largest logits of a row (ties: the lower column first), and 0 for the others: what
/// [`Score::SoftmaxOfChosen`] weighs experts by that are all computed (JetMoE's mixture of attention heads, Shen et al. 2024).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TopSoftmaxOp {
    /// (rows, experts).
    pub logits: Value,
    /// Logits of a row that count.
    pub top_k: usize,
}

refers!(TopSoftmaxOp { logits, top_k });

impl TopSoftmaxOp {
    /// The router that chooses and weighs so.
    pub(crate) fn route(&self) -> Route {
        let route = Route::softmax(self.logits.width, self.top_k, false);
        Route { score: Score::SoftmaxOfChosen, ..route }
    }
}

impl Operation for TopSoftmaxOp {
    const NAME: &'static str = "top_softmax";

    fn width(&self, _: &GraphBuilder) -> Result<usize> {
        let Self { logits, top_k } = *self;
        if top_k == 0 || top_k > logits.width {
            return Err(Error::Shape { op: Self::NAME, what: "top_k", expected: logits.width, got: top_k });
        }
        Ok(logits.width)
    }
}

/// Σ over the chosen experts, in the router's order, of weight · expert(x).
#[derive(Debug, Clone, PartialEq)]
pub struct MoeExpertsOp {
    /// (tokens, hidden_size).
    pub x: Value,
    /// Which experts, with what weight.
    pub routing: Routing,
    /// The layer's experts.
    pub experts: ExpertSetId,
    /// What they compute.
    pub mlp: ExpertMlp,
    /// What adapters add, at most one entry each.
    pub low_rank: Vec<ExpertLowRank>,
}

refers!(MoeExpertsOp { x, routing, experts, mlp, low_rank });

impl Operation for MoeExpertsOp {
    const NAME: &'static str = "moe_experts";

    fn width(&self, graph: &GraphBuilder) -> Result<usize> {
        let (op, set) = (Self::NAME, graph.expert_sets[self.experts.0]);
        check(op, "columns of up", self.x.width, set.up.cols)?;
        let taken = 2 + usize::from(self.mlp.activation.is_gated());
        check(op, "projections of an expert, for its activation", taken, set.matrices().count())?;
        check(
            op,
            "experts that the router chooses from",
            set.experts + self.mlp.identities,
            self.routing.experts,
        )?;
        if self.mlp.identities > 0 && self.mlp.weighted == Weighted::Input {
            let what = "experts that return what they take, weighted there";
            return Err(Error::Shape { op, what, expected: 0, got: self.mlp.identities });
        }
        if let Some(ExpertBiases { gate, up, down }) = self.mlp.biases {
            let gate_rows = set.gate.map_or(0, |gate| gate.rows);
            graph.vector(op, "biases of gate", gate, set.experts * gate_rows)?;
            graph.vector(op, "biases of up", up, set.experts * set.up.rows)?;
            graph.vector(op, "biases of down", down, set.experts * set.down.rows)?;
        }
        if let Some(OutputNorm { weight, .. }) = self.mlp.norm {
            graph.vector(op, "weights of the norm", weight, set.down.rows)?;
            if self.mlp.identities > 0 {
                let what = "experts that return what they take, beside a norm";
                return Err(Error::Shape { op, what, expected: 0, got: self.mlp.identities });
            }
        }
        Ok(self.x.width)
    }
}

refers!(ExpertBiases { gate, up, down });
refers!(OutputNorm { weight, eps });
refers!(ExpertMlp { activation, biases, weighted, identities, norm });

impl Refers for RouteBy {
    fn visit(&mut self, visitor: &mut dyn Visitor) {
        match self {
            Self::Scores { bias } => bias.visit(visitor),
            Self::Tokens { table } => visitor.token_table(table),
        }
    }
}

impl Groups {
    /// Experts that can be chosen.
    fn choosable(&self, op: &'static str, experts: usize) -> Result<usize> {
        check(op, "experts left over by groups", 0, experts % self.count.max(1))?;
        if self.keep == 0 || self.keep > self.count {
            return Err(Error::Shape { op, what: "groups kept", expected: self.count, got: self.keep });
        }
        match self.rank {
            GroupRank::BestTwoElseZero => Ok(experts),
            GroupRank::Best | GroupRank::BestTwo => Ok(experts / self.count * self.keep),
        }
    }
}

impl GraphBuilder {
    /// Declares the experts of a layer.
    ///
    /// # Errors
    /// [`Error::Shape`] if gate, up and down do not fit together.
    pub fn expert_set(&mut self, set: ExpertSet) -> Result<ExpertSetId> {
        let op = "expert set";
        if let Some(gate) = set.gate {
            check(op, "rows of up", gate.rows, set.up.rows)?;
            check(op, "columns of up", gate.cols, set.up.cols)?;
        }
        check(op, "columns of down", set.up.rows, set.down.cols)?;
        check(op, "rows of down", set.up.cols, set.down.rows)?;
        self.expert_sets.push(set);
        Ok(ExpertSetId(self.expert_sets.len() - 1))
    }

    /// The router: which experts, with what weight; `bias` is added to scores for choosing only.
    ///
    /// # Errors
    /// [`Error::Shape`] if there is not one logit (and bias) an expert, top_k is not within 1..=experts, or groups do
    /// not divide the experts or keep too few of them.
    pub fn route(&mut self, logits: Value, bias: Option<WeightId>, route: Route) -> Result<Routing> {
        self.record_route(RouteOp { logits, by: RouteBy::Scores { bias }, scales: None, route })
    }

    /// As [`GraphBuilder::route`], with a factor of each expert on its weight at the end.
    ///
    /// # Errors
    /// As [`GraphBuilder::route`], and if there is not one factor an expert.
    pub fn scaled_route(
        &mut self,
        logits: Value,
        bias: Option<WeightId>,
        scales: WeightId,
        route: Route,
    ) -> Result<Routing> {
        self.record_route(RouteOp { logits, by: RouteBy::Scores { bias }, scales: Some(scales), route })
    }

    /// Experts by token: those that `table` (vocab_size, top_k) has for the token's id, weighted as `route` says.
    ///
    /// # Errors
    /// [`Error::Shape`] if there is not one logit an expert or not one column a choice.
    pub fn route_by_token(&mut self, logits: Value, table: WeightId, route: Route) -> Result<Routing> {
        self.record_route(RouteOp { logits, by: RouteBy::Tokens { table }, scales: None, route })
    }

    fn record_route(&mut self, op: RouteOp) -> Result<Routing> {
        let out = Routing { index: self.routings, top_k: op.width(self)?, experts: op.route.experts };
        self.routings += 1;
        self.nodes.push(Node { name: self.scope.clone(), op: op.into(), out: Output::Routing(out) });
        Ok(out)
    }

    /// The softmax over the `top_k` largest logits of a row, and 0 for the others.
    ///
    /// # Errors
    /// [`Error::Shape`] if top_k is not within 1..=width.
    pub fn top_softmax(&mut self, logits: Value, top_k: usize) -> Result<Value> {
        self.record(TopSoftmaxOp { logits, top_k })
    }

    /// Weighted sum of the chosen experts.
    ///
    /// # Errors
    /// [`Error::Shape`] if the experts do not take x, or are not those that were chosen from.
    pub fn moe_experts(&mut self, x: Value, routing: Routing, experts: ExpertSetId) -> Result<Value> {
        self.moe_experts_with(x, routing, experts, ExpertMlp::default())
    }

    /// As [`GraphBuilder::moe_experts`], for experts with biases or another activation, or with some that return what they
    /// take.
    ///
    /// # Errors
    /// [`Error::Shape`] if the experts do not take x or are not those that were chosen from, biases do not fit or the activation takes another number of
    /// projections; [`Error::Unsupported`] if biases are not f32.
    pub fn moe_experts_with(
        &mut self,
        x: Value,
        routing: Routing,
        experts: ExpertSetId,
        mlp: ExpertMlp,
    ) -> Result<Value> {
        self.record(MoeExpertsOp { x, routing, experts, mlp, low_rank: vec![] })
    }
}
