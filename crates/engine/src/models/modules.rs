//! [`Modules`]: which weights and experts of a graph are which modules of Hugging Face's model. What adapters are for is named
//! so, whatever the file's format.

use std::ops::Range;

use moeflux_compute::graph::{ExpertSetId, WeightId};

use super::names::{GgufOrder, Names};

/// Modules of which some checkpoints have one in place of several.
const FUSED: [(&str, &[&str]); 2] =
    [("qkv_proj", &["q_proj", "k_proj", "v_proj"]), ("gate_up_proj", &["gate_proj", "up_proj"])];

/// A weight that is a module of the model, or rows of one.
#[derive(Debug, Clone)]
pub(crate) struct Module {
    pub(crate) weight: WeightId,
    /// As families ask for it: `model.layers.3.self_attn.q_proj`.
    pub(crate) name: String,
    /// Rows of the whole module.
    pub(crate) rows: usize,
    /// Those that the weight has, in this order.
    pub(crate) parts: Vec<Range<usize>>,
}

/// How the rows of experts' gate and up are one tensor in Hugging Face's model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GateUp {
    /// One after the other.
    Halves,
    /// In turn.
    Interleaved,
}

/// The module of a layer's routed experts.
#[derive(Debug, Clone)]
pub(crate) struct ExpertModule {
    pub(crate) set: ExpertSetId,
    /// `model.layers.3.mlp.experts`.
    pub(crate) name: String,
    pub(crate) gate_up: GateUp,
}

/// Modules of a model.
#[derive(Debug, Clone)]
pub(crate) struct Modules {
    names: &'static Names,
    pub(crate) linears: Vec<Module>,
    pub(crate) experts: Vec<ExpertModule>,
}

/// Where an adapter may have what belongs to a weight: a module of so many rows, and which of them are the weight's, in this
/// order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) module: String,
    pub(crate) of: usize,
    pub(crate) rows: Vec<Range<usize>>,
}

impl Modules {
    pub(super) fn new(names: &'static Names) -> Self {
        Self { names, linears: vec![], experts: vec![] }
    }

    /// Says that `weight` is rows `parts` of a module of `rows` rows.
    pub(super) fn note(&mut self, weight: WeightId, module: &str, rows: usize, parts: Vec<Range<usize>>) {
        self.linears.push(Module { weight, name: module.to_owned(), rows, parts });
    }

    /// Says where the experts `set` are, below a layer.
    pub(super) fn note_experts(&mut self, set: ExpertSetId, layer: usize, module: &str, gate_up: GateUp) {
        self.experts.retain(|own| own.set != set);
        self.experts.push(ExpertModule { set, name: format!("model.layers.{layer}.{module}"), gate_up });
    }

    /// The one name that families, published checkpoints and transformers' own have for a module; `None` if it is neither in a
    /// layer of the decoder nor its head.
    pub(crate) fn canonical(&self, name: &str) -> Option<String> {
        if name == "lm_head" || name.ends_with(".lm_head") {
            return Some("lm_head".to_owned());
        }
        let known = |prefix: &str| {
            let all = [Names::COMMON.prefixes, self.names.prefixes].concat();
            prefix.is_empty()
                || all.contains(&prefix)
                || all.iter().any(|own| own.strip_prefix("model.") == Some(prefix))
        };
        let lists = ["layers", self.names.layers].into_iter();
        let mut found = lists.flat_map(|list| name.match_indices(list));
        let (at, list) = found.find(|(at, _)| known(&name[..*at]))?;
        let (layer, rest) = name[at + list.len()..].strip_prefix('.')?.split_once('.')?;
        let layer: usize = layer.parse().ok()?;
        let rest = rest.strip_prefix("block_sparse_moe.").map_or(rest.to_owned(), |own| format!("mlp.{own}"));
        Some(format!("model.layers.{layer}.{rest}"))
    }

    /// The names that a module may have, the one that families ask for first.
    fn aliases(&self, name: &str) -> Vec<String> {
        let mut names = vec![name.to_owned()];
        if let Some((layer, rest)) = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'))
        {
            let others = self.names.other_tensors(rest).map(|other| format!("model.layers.{layer}.{other}"));
            names.extend(others);
        }
        names.iter().filter_map(|name| self.canonical(name.strip_suffix(".weight").unwrap_or(name))).collect()
    }

    /// The names of a layer's experts' module.
    pub(crate) fn expert_aliases(&self, module: &ExpertModule) -> Vec<String> {
        self.aliases(&module.name)
    }

    /// The order that a GGUF file has a module's rows or columns in, if it is another than Hugging Face's.
    pub(crate) fn gguf_order(&self, module: &Module) -> Option<GgufOrder> {
        let (_, rest) = module.name.strip_prefix("model.layers.")?.split_once('.')?;
        self.names.gguf_orders.iter().find(|(name, _)| *name == rest).map(|(_, order)| *order)
    }

    /// Where an adapter may have what belongs to linear layer `index`, the likeliest first.
    pub(crate) fn places(&self, index: usize, is_head: bool) -> Vec<Place> {
        let module = &self.linears[index];
        // Of models whose head is the table of embeddings.
        let name = if is_head { "lm_head" } else { &module.name };
        let whole = module.parts.len() == 1 && module.parts[0] == (0..module.rows);
        let place = |name, of, rows: &[Range<usize>]| Place { module: name, of, rows: rows.to_vec() };
        let own = self.aliases(name).into_iter();
        let mut places: Vec<Place> = own.map(|name| place(name, module.rows, &module.parts)).collect();
        let Some((parent, own)) = name.rsplit_once('.') else { return places };
        for (fused, separate) in FUSED {
            if own == fused && module.parts.len() == 1 {
                // Parts are recorded in their order.
                let same = self.linears[..index].iter().filter(|other| other.name == module.name);
                let apart = separate.get(same.count()).map(|name| format!("{parent}.{name}"));
                let names = apart.iter().flat_map(|name| self.aliases(name));
                let rows = module.parts[0].len();
                places.extend(names.map(|name| place(name, rows, std::slice::from_ref(&(0..rows)))));
            }
            if let (true, Some(at)) = (whole, separate.iter().position(|name| *name == own)) {
                let rows_of = |name: &str| {
                    let name = format!("{parent}.{name}");
                    self.linears.iter().find(|other| other.name == name).map(|other| other.rows)
                };
                let Some(all) = separate.iter().map(|name| rows_of(name)).collect::<Option<Vec<_>>>() else {
                    continue;
                };
                let before: usize = all[..at].iter().sum();
                let rows = before..before + module.rows;
                let names = self.aliases(&format!("{parent}.{fused}")).into_iter();
                places.extend(names.map(|name| place(name, all.iter().sum(), std::slice::from_ref(&rows))));
            }
        }
        places
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_one_module_are_one() {
        let modules = Modules::new(&Names::COMMON);
        for (name, expected) in [
            ("model.layers.3.self_attn.q_proj", Some("model.layers.3.self_attn.q_proj")),
            ("layers.3.self_attn.q_proj", Some("model.layers.3.self_attn.q_proj")),
            ("model.language_model.layers.3.mlp.gate", Some("model.layers.3.mlp.gate")),
            ("language_model.model.layers.12.mlp.gate", Some("model.layers.12.mlp.gate")),
            ("model.layers.0.block_sparse_moe.experts.7.w1", Some("model.layers.0.mlp.experts.7.w1")),
            ("language_model.lm_head", Some("lm_head")),
            ("model.visual.layers.3.attn.qkv", None),
            ("model.embed_tokens", None),
            ("model.layers.x.mlp", None),
        ] {
            assert_eq!(modules.canonical(name).as_deref(), expected, "{name}");
        }
    }
}
