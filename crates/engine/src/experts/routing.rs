//! [`RouterChoices`]: which experts each token of an evaluation was sent to.

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

    /// Appends the choices of a pass of `rows` tokens.
    pub(crate) fn extend(&mut self, ids: &[u32], rows: usize) {
        self.num_experts_per_tok = ids.len() / rows.max(1);
        self.experts.extend_from_slice(ids);
    }
}
