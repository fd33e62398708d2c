//! Qwen4-Exp. Qwen3.5's layers between parallel residual streams, which are collapsed by learned gates; full attention sees
//! the tokens of blocks that an indexer chooses; some layers add embeddings of hashed n-grams to the streams.
//!
//! Source: transformers `modeling_qwen4_exp.py`. GGUF architecture `qwen4exp`, whose files hold what n-grams are hashed with.

mod ngrams;

use moeflux_compute::graph::{
    BlockInputs, CompressedAttention, EntryIndex, HeadPairing, IndexInputs, Placement, Precision, RopeStyle,
    Route, TokenForm, Value,
};

use super::blocks::hybrid::{self, Linear, OutputGate};
use super::blocks::{self, Decoder, Moe, SharedExpert};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::names::{NameMap, Names};
use super::recorder::{ExpertNames, Form, Recorder};
use super::{Family, SILU};
use crate::Result;
use crate::checkpoint::Format;
use ngrams::LayerEmbeddings;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "Qwen4-Exp",
    model_types: &["qwen4_exp", "qwen4_exp_text"],
    gguf_architectures: &["qwen4exp"],
    hidden_act: SILU,
    names: &Names {
        gguf_tensors: &[hybrid::GGUF_TENSORS, ngrams::GGUF_TENSORS, GGUF_TENSORS],
        gguf_keys: &[hybrid::GGUF_KEYS, ngrams::GGUF_KEYS, GGUF_KEYS],
        gguf_orders: hybrid::TILED,
        ..hybrid::NAMES
    },
    record,
};

/// Modules of GGUF files.
const GGUF_TENSORS: NameMap = &[
    ("attn_hyper_connection.hc_norm", "hc_attn_norm"),
    ("attn_hyper_connection.input_mix_weight_down", "hc_attn_down"),
    ("attn_hyper_connection.input_mix_weight_up", "hc_attn_up"),
    ("attn_hyper_connection.block_inject_weight", "hc_attn_inject"),
    ("mlp_hyper_connection.hc_norm", "hc_ffn_norm"),
    ("mlp_hyper_connection.input_mix_weight_down", "hc_ffn_down"),
    ("mlp_hyper_connection.input_mix_weight_up", "hc_ffn_up"),
    ("mlp_hyper_connection.block_inject_weight", "hc_ffn_inject"),
    ("model.hyper_connection_mixer.hc_norm", "output_hc_norm"),
    ("model.hyper_connection_mixer.input_mix_weight_down", "output_hc_down"),
    ("model.hyper_connection_mixer.input_mix_weight_up", "output_hc_up"),
    ("self_attn.indexer.q_proj", "indexer.q_proj"),
    ("self_attn.indexer.k_proj", "indexer.k_proj"),
    ("self_attn.indexer.q_layernorm", "indexer.q_norm"),
    ("self_attn.indexer.k_layernorm", "indexer.k_norm"),
];

/// Keys of GGUF files.
const GGUF_KEYS: NameMap = &[
    ("hc_count", "hyper_connection.count"),
    ("hc_lowrank", "hyper_connection.low_rank"),
    ("indexer_n_heads", "attention.indexer.head_count"),
    ("indexer_head_dim", "attention.indexer.key_length"),
    ("indexer_budget", "attention.indexer.top_k"),
    ("compress_ratios", "attention.compress_ratios"),
];

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("num_attention_heads", DefaultValue::Count(16)),
    ("num_key_value_heads", DefaultValue::Count(2)),
    ("head_dim", DefaultValue::Count(256)),
    ("num_experts", DefaultValue::Count(512)),
    ("max_position_embeddings", DefaultValue::Count(32768)),
];

/// Parallel residual streams.
#[derive(Debug, Clone, Copy)]
struct Streams {
    /// How many.
    count: usize,
    /// Width of what their gates are made from.
    rank: usize,
    eps: f32,
}

impl Streams {
    /// The streams x in one row, each gated channel by channel; and x normed.
    fn collapse(&self, r: &mut Recorder, x: Value, module: &str) -> Result<(Value, Value)> {
        let name = |part: &str| format!("{module}.{part}");
        let normed = r.rms_norm_each(x, &name("hc_norm"), self.count, self.eps)?;
        let low = r.linear(normed, &name("input_mix_weight_down"), self.rank, Precision::Fast)?;
        let low = r.graph.scaled_silu(low, 1.0 / self.count as f32);
        let gate = r.linear(low, &name("input_mix_weight_up"), x.width(), Precision::Fast)?;
        Ok((r.graph.gated_mean(normed, gate, self.count)?, normed))
    }

    /// The streams x after `block` of their collapse, whose result is added to each.
    fn around(
        &self,
        r: &mut Recorder,
        x: Value,
        module: &str,
        block: impl FnOnce(&mut Recorder, Value) -> Result<Value>,
    ) -> Result<Value> {
        let (h, normed) = self.collapse(r, x, module)?;
        let inject = format!("{module}.block_inject_weight");
        let logits = r.linear(normed, &inject, self.count, Precision::F32)?;
        let out = block(r, h)?;
        Ok(r.graph.stream_add(x, out, logits)?)
    }
}

/// Full attention over blocks that an indexer chooses.
#[derive(Debug, Clone, Copy)]
struct Indexed {
    shape: CompressedAttention,
    index: EntryIndex,
    rope: usize,
}

impl Indexed {
    fn new(config: &Config<'_>, r: &mut Recorder, d: &Decoder) -> Result<Self> {
        let rotary_dim = blocks::rotary_dim(config, d.head_dim, 1.0)?;
        let (budget, stride) = (config.size("indexer_budget")?, stride(config, d.layers)?);
        if !budget.is_multiple_of(stride) {
            let expected = format!("a multiple of the {stride} tokens of a block");
            return Err(config.unsupported("indexer_budget", &expected));
        }
        if config.optional_size("indexer_kv_heads")?.is_some_and(|heads| heads != 1) {
            return Err(config.unsupported("indexer_kv_heads", "1"));
        }
        let head_dim = config.size("indexer_head_dim")?;
        if rotary_dim > head_dim {
            let expected = format!("at least the {rotary_dim} channels that rotate");
            return Err(config.unsupported("indexer_head_dim", &expected));
        }
        let index = EntryIndex { heads: config.size("indexer_n_heads")?, head_dim, top_k: budget / stride };
        let shape = CompressedAttention {
            form: TokenForm::Grouped { kv_heads: d.kv_heads },
            heads: d.heads,
            head_dim: d.head_dim,
            scale: (d.head_dim as f32).sqrt().recip(),
            window: usize::MAX,
            stride,
            index: Some(index),
        };
        let rope = blocks::rotation(r, config, rotary_dim, RopeStyle::HalfSplit, 1e4)?;
        Ok(Self { shape, index, rope })
    }

    fn attention(&self, r: &mut Recorder, d: &Decoder, layer: usize, h: Value) -> Result<Value> {
        let module = |name: &str| format!("model.layers.{layer}.self_attn.indexer.{name}");
        let EntryIndex { heads, head_dim, .. } = self.index;
        let (q_width, rows) = (heads * head_dim, (heads + 1) * head_dim);
        let stride = self.shape.stride;
        hybrid::gated_attention(r, d, layer, h, self.rope, |r, [q, k, v]| {
            let (index_q, index_k) = if r.format() == Format::Gguf {
                let index_q = r.linear(h, &module("q_proj"), q_width, Precision::Fast)?;
                (index_q, r.linear(h, &module("k_proj"), head_dim, Precision::Fast)?)
            } else {
                let both = module("index_qk_proj");
                let mut part = |range| r.linear_part(h, &both, rows, &[range], Precision::Fast);
                (part(0..q_width)?, part(q_width..rows)?)
            };
            let index_q = r.rms_norm(index_q, &module("q_layernorm"), heads, d.eps)?;
            let index_q = r.graph.rope(index_q, heads, self.rope)?;
            let mean = r.graph.window_mean(index_k, stride)?;
            let index_k = r.rms_norm(mean, &module("k_layernorm"), 1, d.eps)?;
            let place = Placement { first: 0, inverse: false, stride };
            let index_k = r.graph.placed_rope(index_k, 1, self.rope, place)?;
            let index = IndexInputs { q: index_q, k: index_k, weights: None };
            Ok(r.graph.block_attention(BlockInputs { q, k, v, index }, self.shape)?)
        })
    }
}

/// Tokens of a block, which GGUF files list by layer, with zero for those of linear attention.
fn stride(config: &Config<'_>, layers: usize) -> Result<usize> {
    if config.format() != Format::Gguf {
        return config.size("indexer_compress_ratio");
    }
    let key = "compress_ratios";
    let listed = config.per_layer(key, layers)?.unwrap_or_default();
    let mut strides = listed.into_iter().take(layers).filter(|stride| *stride > 0);
    match strides.next() {
        Some(first) if strides.all(|stride| stride == first) => Ok(first),
        _ => Err(config.unsupported(key, "one number for all layers that have an indexer")),
    }
}

/// For each layer whether its attention is linear.
fn linear_layers(config: &Config<'_>, layers: usize) -> Result<Vec<bool>> {
    if config.format() == Format::Gguf {
        return hybrid::linear_layers(config, layers);
    }
    let Some(kinds) = config.layer_kinds("layer_types")? else {
        let interval = config.optional_size("full_attention_interval")?.unwrap_or(4);
        return Ok((0..layers).map(|layer| !(layer + 1).is_multiple_of(interval)).collect());
    };
    // Published configurations call indexed attention full.
    let indexed = ["indexed_attention", "full_attention", "qwen_sparse_attention"];
    let known = |kind: &String| kind == "linear_attention" || indexed.contains(&kind.as_str());
    if kinds.len() < layers || !kinds.iter().all(known) {
        let expected = format!("linear_attention or indexed_attention for each of {layers} layers");
        return Err(config.unsupported("layer_types", &expected));
    }
    Ok(kinds.iter().take(layers).map(|kind| kind == "linear_attention").collect())
}

/// What gates linear attention.
fn output_gate(config: &Config<'_>) -> Result<OutputGate> {
    // GGUF files do not say, and llama.cpp knows but one.
    if config.format() == Format::Gguf {
        return Ok(OutputGate::Sigmoid);
    }
    match config.word("output_gate_type")?.as_deref() {
        None | Some("silu" | "swish") => Ok(OutputGate::Silu),
        Some("sigmoid") => Ok(OutputGate::Sigmoid),
        Some(_) => Err(config.unsupported("output_gate_type", "silu or sigmoid")),
    }
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let size = |key, default| config.optional_size(key).map(|found| found.unwrap_or(default));
    let mut d = Decoder::new(config, 1e-6)?;
    let gguf = config.format() == Format::Gguf;
    if config.optional_size("head_dim")?.is_none() && !gguf {
        d.head_dim = 256;
    }
    if !gguf {
        r.norms_are(Form::F32PlusOne);
    }
    let streams = Streams { count: size("hc_count", 4)?, rank: size("hc_lowrank", 320)?, eps: d.eps };
    let pairing = if gguf { HeadPairing::Tiled } else { HeadPairing::Grouped };
    let linear = Linear::new(config, pairing, output_gate(config)?)?;
    let is_linear = linear_layers(config, d.layers)?;
    let indexed = if is_linear.contains(&false) { Some(Indexed::new(config, r, &d)?) } else { None };
    let (experts, top_k) = blocks::expert_counts(config, Some(10))?;
    let moe = Moe {
        route: Route::softmax(experts, top_k, config.flag("norm_topk_prob", true)?),
        router: "mlp.gate",
        correction_bias: None,
        experts: ExpertNames { module: "mlp.experts", projections: ["gate_proj", "up_proj", "down_proj"] },
        shared: Some(SharedExpert {
            module: "mlp.shared_expert",
            width: size("shared_expert_intermediate_size", 512)?,
            gate: Some("mlp.shared_expert_gate"),
        }),
    };
    let mut embeddings = LayerEmbeddings::new(config, &d, streams.count)?;

    let (x, table) = blocks::embed(r, d.hidden_size)?;
    let mut x = r.graph.repeat(x, streams.count);
    for (layer, linear_layer) in is_linear.into_iter().enumerate() {
        let module = |name: &str| format!("model.layers.{layer}.{name}");
        if let Some(embeddings) = &mut embeddings {
            x = embeddings.add(r, layer, x)?;
        }
        r.graph.scope(format!("layers.{layer}.{}", if linear_layer { "linear_attn" } else { "self_attn" }));
        x = streams.around(r, x, &module("attn_hyper_connection"), |r, h| match &indexed {
            Some(indexed) if !linear_layer => indexed.attention(r, &d, layer, h),
            _ => hybrid::linear_attention(r, &d, layer, h, &linear),
        })?;
        r.graph.scope(format!("layers.{layer}.mlp"));
        x = streams
            .around(r, x, &module("mlp_hyper_connection"), |r, h| blocks::moe_of(r, layer, h, &moe))?;
    }

    r.graph.scope("lm_head");
    let x = r.graph.gather_rows(x);
    let (h, _) = streams.collapse(r, x, "model.hyper_connection_mixer")?;
    let tied = blocks::is_tied(r, config)?;
    if tied {
        return Ok(r.graph.linear(h, table, None, Precision::Fast)?);
    }
    let vocab_size = r.graph.matrix(table).rows;
    r.linear(h, "lm_head", vocab_size, Precision::Fast)
}
