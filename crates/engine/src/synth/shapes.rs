//! Shapes of published models, by name. Sources: each model's `config.json`.

use crate::{Error, Result};

/// Which architecture a shape is of; decides tensor names and configuration keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// `qwen3_moe`: per-head query and key norms.
    Qwen3Moe,
    /// `mixtral`.
    Mixtral,
}

/// Sizes of a Mixture-of-Experts decoder whose layers are all routed and whose head has a matrix of its own.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shape {
    /// Name on the command line.
    pub name: &'static str,
    /// Architecture.
    pub architecture: Architecture,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Decoder layers.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads.
    pub num_key_value_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Routed experts of a layer.
    pub num_experts: usize,
    /// Experts that a token uses in a layer.
    pub num_experts_per_tok: usize,
    /// Width of an expert.
    pub moe_intermediate_size: usize,
    /// Width that the configuration gives for dense layers, which these models do not have.
    pub intermediate_size: usize,
    /// Token ids.
    pub vocab_size: usize,
    /// Positions.
    pub max_position_embeddings: usize,
    /// Base of the rotary embedding.
    pub rope_theta: f32,
    /// Epsilon of all norms.
    pub rms_norm_eps: f32,
}

/// Every shape.
pub const SHAPES: &[Shape] = &[
    Shape {
        name: "qwen3-30b-a3b",
        architecture: Architecture::Qwen3Moe,
        hidden_size: 2048,
        num_hidden_layers: 48,
        num_attention_heads: 32,
        num_key_value_heads: 4,
        head_dim: 128,
        num_experts: 128,
        num_experts_per_tok: 8,
        moe_intermediate_size: 768,
        intermediate_size: 6144,
        vocab_size: 151_936,
        max_position_embeddings: 40_960,
        rope_theta: 1e6,
        rms_norm_eps: 1e-6,
    },
    Shape {
        name: "qwen3-235b-a22b",
        architecture: Architecture::Qwen3Moe,
        hidden_size: 4096,
        num_hidden_layers: 94,
        num_attention_heads: 64,
        num_key_value_heads: 4,
        head_dim: 128,
        num_experts: 128,
        num_experts_per_tok: 8,
        moe_intermediate_size: 1536,
        intermediate_size: 12_288,
        vocab_size: 151_936,
        max_position_embeddings: 40_960,
        rope_theta: 1e6,
        rms_norm_eps: 1e-6,
    },
    Shape {
        name: "mixtral-8x7b",
        architecture: Architecture::Mixtral,
        hidden_size: 4096,
        num_hidden_layers: 32,
        num_attention_heads: 32,
        num_key_value_heads: 8,
        head_dim: 128,
        num_experts: 8,
        num_experts_per_tok: 2,
        moe_intermediate_size: 14_336,
        intermediate_size: 14_336,
        vocab_size: 32_000,
        max_position_embeddings: 32_768,
        rope_theta: 1e6,
        rms_norm_eps: 1e-5,
    },
    // Rows of at least 256 columns, so that every encoding can store them.
    Shape {
        name: "tiny",
        architecture: Architecture::Qwen3Moe,
        hidden_size: 256,
        num_hidden_layers: 4,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 64,
        num_experts: 16,
        num_experts_per_tok: 4,
        moe_intermediate_size: 256,
        intermediate_size: 512,
        vocab_size: 1024,
        max_position_embeddings: 4096,
        rope_theta: 1e6,
        rms_norm_eps: 1e-6,
    },
];

impl Shape {
    /// The shape called `name`.
    ///
    /// # Errors
    /// [`Error::Option`] listing the names there are.
    pub fn by_name(name: &str) -> Result<Self> {
        SHAPES.iter().find(|shape| shape.name == name).copied().ok_or_else(|| {
            let names: Vec<&str> = SHAPES.iter().map(|shape| shape.name).collect();
            Error::Option { option: "shape", expected: names.join(", "), got: name.to_owned() }
        })
    }
}
