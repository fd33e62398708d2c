//! What every operation says of itself: a name, a shape rule, and what it refers to.
//!
//! An operation shows what it refers to in one place. Who reads which values, what an excerpt must copy and what a node is
//! called follow from that, so that nothing else has to know every operation.

use super::{
    Activation, BlockChoice, BlockFloat, CacheId, Chosen, CompressedCacheId, DeltaRule, ExpertLowRank,
    ExpertSetId, Gate, Gelu, GraphBuilder, HyperConnection, LatentCacheId, LowRank, NGrams, Placement,
    PositionScale, Precision, Route, Routing, SsmScan, StateId, Value, WeightId, Weighted, WindowPool,
};
use crate::Result;

/// An operation of a graph. Backends add how they compute it.
pub(crate) trait Operation: Refers {
    /// Its name, the same everywhere.
    const NAME: &'static str;

    /// Its shape rule: columns of its result, or experts that a route chooses for a token.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] or [`crate::Error::Unsupported`] if inputs and weights do not fit.
    fn width(&self, graph: &GraphBuilder) -> Result<usize>;

    /// What errors and profiles call it.
    fn label(&self) -> &'static str {
        Self::NAME
    }
}

/// Is shown everything of the graph that an operation refers to, and may exchange it.
pub(crate) trait Visitor {
    /// A value that is read.
    fn value(&mut self, _: &mut Value) {}

    /// The tokens that attention sees.
    fn chosen(&mut self, chosen: &mut Option<Chosen>) {
        if let Some(chosen) = chosen {
            self.value(&mut chosen.blocks);
        }
    }

    /// A router's choice that is read.
    fn routing(&mut self, _: &mut Routing) {}

    /// A weight.
    fn weight(&mut self, _: &mut WeightId) {}

    /// A weight with a row for each token of the vocabulary.
    fn token_table(&mut self, table: &mut WeightId) {
        self.weight(table);
    }

    /// The table of embeddings.
    fn embeddings(&mut self, table: &mut WeightId) {
        self.token_table(table);
    }

    /// Parts of a table, and which of its rows are read.
    fn ngram_tables(&mut self, tables: &mut Vec<WeightId>, _: &mut NGrams) {
        tables.iter_mut().for_each(|table| self.weight(table));
    }

    /// What adapters add to a linear layer.
    fn low_rank(&mut self, all: &mut Vec<LowRank>) {
        for own in all {
            self.weight(&mut own.a);
            self.weight(&mut own.b);
        }
    }

    /// What adapters add to experts.
    fn expert_low_rank(&mut self, all: &mut Vec<ExpertLowRank>) {
        for own in all.iter_mut().flat_map(|own| own.projections.iter_mut().flatten()) {
            self.weight(&mut own.a);
            self.weight(&mut own.b);
        }
    }

    /// A recurrent state.
    fn state(&mut self, _: &mut StateId) {}

    /// Keys and values of an attention.
    fn cache(&mut self, _: &mut CacheId) {}

    /// Latents of an attention.
    fn latent_cache(&mut self, _: &mut LatentCacheId) {}

    /// Tokens and entries of an attention.
    fn compressed_cache(&mut self, _: &mut CompressedCacheId) {}

    /// Routed experts of a layer.
    fn experts(&mut self, _: &mut ExpertSetId) {}
}

/// Shows a visitor what it refers to.
pub(crate) trait Refers {
    fn visit(&mut self, visitor: &mut dyn Visitor);
}

impl<T: Refers> Refers for Option<T> {
    fn visit(&mut self, visitor: &mut dyn Visitor) {
        self.iter_mut().for_each(|own| own.visit(visitor));
    }
}

impl Refers for Vec<Value> {
    fn visit(&mut self, visitor: &mut dyn Visitor) {
        self.iter_mut().for_each(|own| own.visit(visitor));
    }
}

impl Refers for Vec<LowRank> {
    fn visit(&mut self, visitor: &mut dyn Visitor) {
        visitor.low_rank(self);
    }
}

impl Refers for Vec<ExpertLowRank> {
    fn visit(&mut self, visitor: &mut dyn Visitor) {
        visitor.expert_low_rank(self);
    }
}

impl<T: Refers, const N: usize> Refers for [T; N] {
    fn visit(&mut self, visitor: &mut dyn Visitor) {
        self.iter_mut().for_each(|own| own.visit(visitor));
    }
}

impl Refers for Option<Chosen> {
    fn visit(&mut self, visitor: &mut dyn Visitor) {
        visitor.chosen(self);
    }
}

/// What a reference is to a visitor.
macro_rules! references {
    ($($type:ty: $show:ident),* $(,)?) => {
        $(impl Refers for $type {
            fn visit(&mut self, visitor: &mut dyn Visitor) {
                visitor.$show(self);
            }
        })*
    };
}

references! {
    Value: value,
    Routing: routing,
    WeightId: weight,
    StateId: state,
    CacheId: cache,
    LatentCacheId: latent_cache,
    CompressedCacheId: compressed_cache,
    ExpertSetId: experts,
}

/// What refers to nothing.
macro_rules! parameters {
    ($($type:ty),* $(,)?) => {
        $(impl Refers for $type {
            fn visit(&mut self, _: &mut dyn Visitor) {}
        })*
    };
}

parameters! {
    usize, f32, bool, Activation, BlockChoice, BlockFloat, DeltaRule, Gate, Gelu, HyperConnection, Placement, PositionScale, Precision, Route, SsmScan,
    Weighted, WindowPool,
}

/// Shows all fields of a structure, in the given order; one that is left out does not compile.
macro_rules! refers {
    ($type:ident { $($field:ident),* $(,)? }) => {
        impl $crate::graph::operation::Refers for $type {
            fn visit(&mut self, visitor: &mut dyn $crate::graph::operation::Visitor) {
                let Self { $($field),* } = self;
                $($crate::graph::operation::Refers::visit($field, visitor);)*
            }
        }
    };
}
pub(crate) use refers;
