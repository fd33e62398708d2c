//! [`Names`]: what checkpoints call the things that families ask for by one name, which is Hugging Face's.
//!
//! The rows here are those of most families. What one family has is in its file, and what belongs to a block that
//! several families record (latent attention, linear attention, indexers) in the block's, beside the code that asks for
//! it.

/// Pairs of names: the one that is asked for, and the one that a checkpoint may have.
pub type NameMap = &'static [(&'static str, &'static str)];

/// Names of one family, besides those of all.
#[derive(Debug, Clone, Copy)]
pub struct Names {
    /// GGUF's names of modules and of tensors, both within a layer or both at the top.
    pub gguf_tensors: &'static [NameMap],
    /// GGUF's keys, behind the architecture's prefix.
    pub gguf_keys: &'static [NameMap],
    /// Other keys of configurations, for what is not there under its own.
    pub other_keys: NameMap,
    /// Other keys of configurations that count before a thing's own.
    pub first_keys: NameMap,
    /// Other names of modules and of tensors in Hugging Face and MLX checkpoints, within a layer, for those that are not
    /// there under their own.
    pub other_tensors: NameMap,
    /// What stands in place of `model.` in Hugging Face and MLX checkpoints: the first below which a module of `top` is,
    /// or the first if none is.
    pub prefixes: &'static [&'static str],
    /// Modules behind the prefix, by one of which it is known.
    pub top: &'static [&'static str],
    /// The list of decoder layers behind the prefix.
    pub layers: &'static str,
    /// Modules behind the prefix that have other names than `embed_tokens` and `norm`; and `lm_head`.
    pub renamed: NameMap,
    /// The list of a configuration with a kind for each layer, which counts them where `num_hidden_layers` is absent.
    pub layer_kinds: &'static str,
    /// The same with a letter for each layer, where there is no list.
    pub layer_letters: Option<&'static str>,
    /// Layers after those that Hugging Face configurations count, where no key says how many there are: they draft tokens.
    pub uncounted_layers: usize,
    /// Endings of the names of optional tensors that published checkpoints have.
    pub published: &'static [&'static str],
    /// Where Hugging Face checkpoints keep the layer that drafts tokens, if not as the layer after the last.
    pub draft: Option<DraftNames>,
    /// Modules within a layer whose rows or columns GGUF files have in another order than Hugging Face checkpoints.
    pub gguf_orders: &'static [(&'static str, GgufOrder)],
}

/// An order of a matrix's rows or columns in GGUF files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GgufOrder {
    /// Rows of each head so that those which are rotated together follow each other: row 2i + j is row i + j · head_dim / 2 of
    /// Hugging Face's.
    RotatedPairs,
    /// Value heads with those of one key head apart.
    TiledHeads,
}

/// Queries and keys of families whose converter lets pairs follow each other.
pub const PAIRED: &[(&str, GgufOrder)] =
    &[("self_attn.q_proj", GgufOrder::RotatedPairs), ("self_attn.k_proj", GgufOrder::RotatedPairs)];

/// Names of a layer that drafts tokens, for what is asked for below a layer.
#[derive(Debug, Clone, Copy)]
pub struct DraftNames {
    /// What stands before the names of its modules and tensors.
    pub prefix: &'static str,
    /// Modules that have other names: the one asked for, and all of the other.
    pub modules: NameMap,
}

/// Of families whose files have another name for the norm before the feed-forward layer, or have that norm after attention.
pub const POST_ATTENTION_NORM: NameMap = &[("post_attention_layernorm", "post_attention_norm")];

/// Modules and tensors.
const GGUF_TENSORS: NameMap = &[
    ("model.embed_tokens", "token_embd"),
    ("model.norm", "output_norm"),
    ("lm_head", "output"),
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.qkv_proj", "attn_qkv"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("mlp.gate", "ffn_gate_inp"),
    ("block_sparse_moe.gate", "ffn_gate_inp"),
    ("mlp.shared_experts.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_experts.up_proj", "ffn_up_shexp"),
    ("mlp.shared_experts.down_proj", "ffn_down_shexp"),
    ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
    ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
    ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
    ("eh_proj", "nextn.eh_proj"),
    ("enorm", "nextn.enorm"),
    ("hnorm", "nextn.hnorm"),
    ("shared_head.norm", "nextn.shared_head_norm"),
];

/// Keys.
const GGUF_KEYS: NameMap = &[
    ("hidden_size", "embedding_length"),
    ("num_hidden_layers", "block_count"),
    ("num_attention_heads", "attention.head_count"),
    ("num_key_value_heads", "attention.head_count_kv"),
    ("head_dim", "attention.key_length"),
    ("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
    ("num_experts", "expert_count"),
    ("num_experts_per_tok", "expert_used_count"),
    ("norm_topk_prob", "expert_weights_norm"),
    ("routed_scaling_factor", "expert_weights_scale"),
    ("expert_gating_func", "expert_gating_func"),
    ("n_group", "expert_group_count"),
    ("topk_group", "expert_group_used_count"),
    ("n_shared_experts", "expert_shared_count"),
    ("shared_expert_intermediate_size", "expert_shared_feed_forward_length"),
    ("first_k_dense_replace", "leading_dense_block_count"),
    ("num_nextn_predict_layers", "nextn_predict_layers"),
    ("intermediate_size", "feed_forward_length"),
    ("moe_intermediate_size", "expert_feed_forward_length"),
    ("swiglu_limit", "swiglu_clamp_exp"),
    ("max_position_embeddings", "context_length"),
    ("sliding_window", "attention.sliding_window"),
    ("rope_theta", "rope.freq_base"),
    ("rotary_dim", "rope.dimension_count"),
    ("mrope_section", "rope.dimension_sections"),
    ("rope_type", "rope.scaling.type"),
    ("factor", "rope.scaling.factor"),
    ("original_max_position_embeddings", "rope.scaling.original_context_length"),
    ("attention_factor", "rope.scaling.attn_factor"),
    ("beta_fast", "rope.scaling.yarn_beta_fast"),
    ("beta_slow", "rope.scaling.yarn_beta_slow"),
    ("yarn_log_multiplier", "rope.scaling.yarn_log_multiplier"),
];

/// Other keys of configurations.
const OTHER_KEYS: NameMap = &[("num_experts", "num_local_experts"), ("num_experts", "n_routed_experts")];

/// The names that `all` have for `name`.
fn of(all: NameMap, name: &str) -> impl Iterator<Item = &'static str> {
    all.iter().filter(move |(asked, _)| *asked == name).map(|(_, stored)| *stored)
}

impl Names {
    /// A family that has none of its own.
    pub const COMMON: Self = Self {
        gguf_tensors: &[],
        gguf_keys: &[],
        other_keys: &[],
        first_keys: &[],
        other_tensors: &[],
        // Multimodal checkpoints keep their text model one level down.
        prefixes: &["model.", "model.language_model.", "language_model.model."],
        top: &["embed_tokens"],
        layers: "layers",
        renamed: &[],
        layer_kinds: "layer_types",
        layer_letters: None,
        uncounted_layers: 0,
        published: &[],
        draft: None,
        gguf_orders: &[],
    };

    /// What GGUF files may call a module or tensor.
    pub(super) fn gguf_tensors(&self, name: &str) -> impl Iterator<Item = &'static str> {
        let own = self.gguf_tensors.iter().flat_map(move |all| of(all, name));
        own.chain(of(GGUF_TENSORS, name))
    }

    /// What GGUF files call a key, behind the architecture's prefix.
    pub(super) fn gguf_key(&self, key: &str) -> Option<&'static str> {
        self.gguf_keys().find(|(asked, _)| *asked == key).map(|(_, stored)| stored)
    }

    /// All keys of GGUF files, those of the family last.
    pub(super) fn gguf_keys(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        GGUF_KEYS.iter().chain(self.gguf_keys.iter().copied().flatten()).copied()
    }

    /// What configurations may call a key, in the order in which that counts.
    pub(crate) fn keys<'k>(&self, key: &'k str) -> impl Iterator<Item = &'k str> + Clone {
        let first: Vec<&'static str> = of(self.first_keys, key).collect();
        let others: Vec<&'static str> = of(OTHER_KEYS, key).chain(of(self.other_keys, key)).collect();
        first.into_iter().chain([key]).chain(others)
    }

    /// What Hugging Face and MLX checkpoints call a module or tensor of the layer that drafts tokens, if it is not among the
    /// others.
    pub(super) fn draft(&self, name: &str) -> Option<String> {
        let DraftNames { prefix, modules } = self.draft?;
        Some(of(modules, name).next().map_or_else(|| format!("{prefix}{name}"), str::to_owned))
    }

    /// What other names Hugging Face and MLX checkpoints may have for a layer's module or tensor.
    pub(super) fn other_tensors(&self, name: &str) -> impl Iterator<Item = &'static str> {
        of(self.other_tensors, name)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::models::FAMILIES;

    /// A row that stands twice, in two tables of a family or in its own and in those of all, is dead.
    #[test]
    fn no_family_says_twice_what_something_is_called() {
        for family in FAMILIES {
            let names = family.names;
            let rows = |common: NameMap, own: &[NameMap]| {
                let all = common.iter().chain(own.iter().copied().flatten());
                let mut seen = HashSet::new();
                let twice: Vec<_> = all.filter(|row| !seen.insert(**row)).collect();
                assert!(twice.is_empty(), "{}: {twice:?}", family.name);
            };
            rows(GGUF_TENSORS, names.gguf_tensors);
            rows(GGUF_KEYS, names.gguf_keys);
            rows(OTHER_KEYS, &[names.other_keys, names.first_keys]);
            rows(&[], &[names.other_tensors]);
        }
    }
}
