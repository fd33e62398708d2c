//! Of kernels that choose experts.

use super::Format;
use crate::graph::{GroupRank, Route, Score};

arguments! {
    ["routing.h" RouteConstants]
    /// A choice of experts; none by default.
    RouteConstants {
        experts: usize,
        top_k: usize,
        score: u32,
        groups: usize,
        keep: usize,
        rank: u32,
        renormalize: bool,
        epsilon: f32,
        scale: f32,
        has_bias: bool,
    }

    ["route.h" ScaleChosenConstants]
    /// Of `scale_chosen`.
    ScaleChosenConstants { count: usize }

    ["route.h" RouteRowsConstants]
    /// Of `route_rows`.
    RouteRowsConstants { route: RouteConstants, rows: usize }

    ["route.h" TokenRouteConstants]
    /// Of `route_by_token`.
    TokenRouteConstants { route: RouteConstants, table: Format }
}

impl RouteConstants {
    /// A choice by logits, with a correction of them if `has_bias`.
    pub(crate) fn new(route: &Route, has_bias: bool) -> Self {
        let score = match route.score {
            Score::Softmax => 0,
            Score::Sigmoid => 1,
            Score::SoftmaxOfChosen => 2,
            Score::SqrtSoftplus => 3,
            Score::SparseMixer => 4,
            Score::SigmoidOfChosen => 5,
        };
        let (groups, keep) = route.groups.map_or((0, 0), |g| (g.count, g.keep));
        let rank = match route.groups.map(|groups| groups.rank) {
            None | Some(GroupRank::Best) => 0,
            Some(GroupRank::BestTwo) => 1,
            Some(GroupRank::BestTwoElseZero) => 2,
        };
        let Route { experts, top_k, renormalize, epsilon, scale, .. } = *route;
        Self { experts, top_k, score, groups, keep, rank, renormalize, epsilon, scale, has_bias }
    }
}
