//! [`RouterChoices`]: which experts each token of an evaluation was sent to.

use moeflux_compute::backend::{ExpertSource, ExpertView};
use moeflux_compute::graph::ExpertSetId;

/// What the router of one layer chose.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouterChoices {
    /// Number of the layer, from 0.
    pub layer: usize,
    /// Ids of the chosen experts, (tokens, num_experts_per_tok), row-major, in the router's order.
    pub experts: Vec<u32>,
    /// Experts that a token is sent to.
    pub num_experts_per_tok: usize,
}

impl RouterChoices {
    /// What was chosen for each token, in the order of the tokens.
    pub fn tokens(&self) -> impl Iterator<Item = &[u32]> {
        self.experts.chunks_exact(self.num_experts_per_tok)
    }
}

/// Notes what a pass is routed to before it asks `source` for experts.
pub(crate) struct Recording<'a, S> {
    pub(crate) source: &'a mut S,
    /// One entry for each set, in the order of sets.
    pub(crate) choices: Option<&'a mut [RouterChoices]>,
}

impl<S: ExpertSource> ExpertSource for Recording<'_, S> {
    fn announce(&mut self, set: ExpertSetId, experts: &[u32]) -> moeflux_compute::Result<()> {
        self.source.announce(set, experts)
    }

    fn visit(
        &mut self,
        set: ExpertSetId,
        experts: &[u32],
        visitor: &mut dyn FnMut(&[ExpertView<'_>]),
    ) -> moeflux_compute::Result<()> {
        self.source.visit(set, experts, visitor)
    }

    fn routed(&mut self, set: ExpertSetId, ids: &[u32], rows: usize) {
        if let Some(choices) = &mut self.choices {
            let choices = &mut choices[set.0];
            choices.num_experts_per_tok = ids.len() / rows.max(1);
            choices.experts.extend_from_slice(ids);
        }
        self.source.routed(set, ids, rows);
    }

    fn wants_forecast(&mut self) -> bool {
        self.source.wants_forecast()
    }

    fn forecast(&mut self, set: ExpertSetId, likely: &[u32]) {
        self.source.forecast(set, likely);
    }
}
