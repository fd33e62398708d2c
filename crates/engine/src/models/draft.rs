//! [`Draft`]: the part of a checkpoint that predicts the token after the next one, a layer that was trained beside the model.
//!
//! It takes the hidden state that the model ends with at a position (what the head multiplies, after the final norm) and the
//! token that comes next, and is a decoder layer over both, with keys and values of its own, before a norm and the model's head.
//! Applied to its own hidden state and the token that it predicts, it goes on predicting.
//!
//! Source: DeepSeek-V3 (2024), section 2.2, "Multi-Token Prediction"; as SGLang and vLLM run it. Of several such layers the first
//! alone is used.

use moeflux_compute::Tensor;
use moeflux_compute::graph::{ExpertSetId, Graph};

use super::model::{Model, Source};
use crate::Result;

/// What drafts tokens: a graph of its own that reads rows of the model's.
#[derive(Debug)]
pub struct Draft {
    /// Its rows are hidden states of the model, or its own, each with the token that follows.
    pub graph: Graph,
    /// Its first expert set in the model's [`ExpertStore`](crate::experts::ExpertStore).
    pub(crate) first_set: usize,
    weights: Vec<Place>,
}

/// Where a weight comes from.
#[derive(Debug)]
enum Place {
    Own(Source),
    /// This weight of the model.
    Shared(usize),
}

impl Draft {
    /// A graph with weights from `sources`, of which a model has `of_model`.
    pub(super) fn new(graph: Graph, first_set: usize, sources: Vec<Source>, of_model: &[Source]) -> Self {
        let place = |source: Source| match of_model.iter().position(|other| *other == source) {
            Some(index) => Place::Shared(index),
            None => Place::Own(source),
        };
        Self { graph, first_set, weights: sources.into_iter().map(place).collect() }
    }

    /// Bytes of resident weights that the model does not have.
    pub(super) fn own_bytes(&self) -> u64 {
        let weights = self.weights.iter().zip(self.graph.weights());
        let own = weights.filter(|(place, _)| matches!(place, Place::Own(_)));
        own.filter_map(|(_, weight)| weight.matrix.bytes().ok()).map(|bytes| bytes as u64).sum()
    }
}

impl Model {
    /// Bytes of what drafts tokens, if there is any: resident weights that the model does not have, and routed experts.
    pub fn draft_bytes(&self) -> Option<(u64, u64)> {
        let draft = self.draft.as_ref()?;
        let sets = (draft.first_set..self.experts.sets()).map(ExpertSetId);
        let experts = sets.map(|set| self.experts.expert_bytes(set) * self.experts.set(set).experts as u64);
        Some((draft.own_bytes(), experts.sum()))
    }

    /// Reads the weights of what drafts tokens, if there is any, in the order of its graph's; those of the model are `loaded`.
    ///
    /// # Errors
    /// As [`Model::load`].
    pub(crate) fn load_draft(
        &self,
        loaded: &[Tensor],
        mut progress: impl FnMut(u64),
    ) -> Result<Option<Vec<Tensor>>> {
        let Some(draft) = &self.draft else { return Ok(None) };
        let load = |place: &Place| match place {
            Place::Own(source) => self.load_source(source, &mut progress),
            Place::Shared(index) => Ok(loaded[*index].clone()),
        };
        draft.weights.iter().map(load).collect::<Result<_>>().map(Some)
    }
}
