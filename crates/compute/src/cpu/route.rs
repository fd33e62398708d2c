//! The router: softmax over all experts, then the best `top_k`.

use crate::graph::Route;

/// Chosen experts of a batch.
#[derive(Debug, Default, Clone)]
pub(crate) struct Choice {
    /// (rows, top_k) expert ids, best first.
    pub(crate) ids: Vec<u32>,
    /// (rows, top_k) weights.
    pub(crate) weights: Vec<f32>,
}

impl Choice {
    /// Routes every row of `logits` (rows, experts). A row with a logit that is not finite gets weights of NaN.
    pub(crate) fn route(&mut self, logits: &[f32], route: &Route) {
        self.ids.clear();
        self.weights.clear();
        let mut order: Vec<u32> = vec![];
        for row in logits.chunks_exact(route.experts) {
            order.clear();
            order.extend(0..route.experts as u32);
            let better = |a: &u32, b: &u32| row[*b as usize].total_cmp(&row[*a as usize]).then(a.cmp(b));
            if route.top_k < route.experts {
                order.select_nth_unstable_by(route.top_k - 1, better);
                order.truncate(route.top_k);
            }
            order.sort_unstable_by(better);
            let max = row[order[0] as usize];
            let p = |id: &u32| (row[*id as usize] - max).exp();
            let sum: f32 = match route.renormalize {
                true => order.iter().map(p).sum(),
                false => row.iter().map(|l| (l - max).exp()).sum(),
            };
            // Zero, or NaN if a logit is not finite.
            let poison: f32 = row.iter().map(|l| l * 0.0).sum();
            self.weights.extend(order.iter().map(|id| p(id) / sum + poison));
            self.ids.extend_from_slice(&order);
        }
    }

    /// Distinct ids, ascending.
    pub(crate) fn distinct(&self) -> Vec<u32> {
        let mut ids = self.ids.clone();
        ids.sort_unstable();
        ids.dedup();
        ids
    }
}
