//! DeepSeek-V4.1. Residual streams joined by hyper-connections, which say how streams collapse for the block after theirs; one key
//! that is the value too for all heads, over a window of recent tokens and, in most layers, over compressed entries of all tokens,
//! of which an indexer chooses some. Layers share entries and choices with one before them; what is kept is rounded to few bits.
//!
//! Source: mlx-lm `deepseek_v41.py`; transformers and llama.cpp do not have it. Published checkpoints have names of their own.
//! Every layer keeps its entries here, also those of another. Contexts end where one layer's choice would limit that of others;
//! n-gram memory is refused.

use moeflux_compute::graph::{
    self, Activation, BlockFloat, CompressedAttention, CompressedInputs, EntryIndex, ExpertMlp,
    HyperConnection, HyperKind, IndexInputs, Placement, PositionScale, Precision, Route, Score, TokenForm,
    Value, WindowPool,
};

use super::blocks::{self, streams};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::deepseek_v4::attention::ropes;
use super::names::{NameMap, Names};
use super::recorder::{ExpertNames, Form, Recorder};
use super::{Family, SILU};
use crate::Result;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "DeepSeek-V4.1",
    model_types: &["deepseek_v41"],
    gguf_architectures: &[],
    hidden_act: SILU,
    names: &Names {
        other_tensors: OTHER_TENSORS,
        // Published checkpoints have nothing before their names.
        prefixes: &["model.", "model.language_model.", "language_model.model.", ""],
        top: &["embed_tokens", "embed"],
        renamed: &[("embed_tokens", "embed"), ("lm_head", "head")],
        ..Names::COMMON
    },
    record,
};

/// Names of published checkpoints.
const OTHER_TENSORS: NameMap = &[
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("attn_hc.fn", "hc_attn_fn"),
    ("attn_hc.base", "hc_attn_base"),
    ("attn_hc.scale", "hc_attn_scale"),
    ("ffn_hc.fn", "hc_ffn_fn"),
    ("ffn_hc.base", "hc_ffn_base"),
    ("ffn_hc.scale", "hc_ffn_scale"),
    ("self_attn.q_a_proj", "attn.wq_a"),
    ("self_attn.q_a_norm", "attn.q_norm"),
    ("self_attn.q_b_proj", "attn.wq_b"),
    ("self_attn.kv_proj", "attn.wkv"),
    ("self_attn.kv_norm", "attn.kv_norm"),
    ("self_attn.o_a_proj", "attn.wo_a"),
    ("self_attn.o_b_proj", "attn.wo_b"),
    ("self_attn.sinks", "attn.attn_sink"),
    ("self_attn.compressor.kv_proj", "attn.compressor.wkv"),
    ("self_attn.compressor.gate_proj", "attn.compressor.wgate"),
    ("self_attn.compressor.kv_norm", "attn.compressor.norm"),
    ("self_attn.indexer.q_b_proj", "attn.indexer.wq_b"),
    ("self_attn.indexer.weights_proj", "attn.indexer.weights_proj"),
    ("self_attn.indexer.k_proj", "attn.indexer.wk"),
    ("self_attn.indexer.k_norm", "attn.indexer.k_norm"),
    ("mlp.gate", "ffn.gate"),
    ("mlp.gate.e_score_correction_bias", "ffn.gate.bias"),
    ("mlp.shared_experts.gate_proj", "ffn.shared_experts.w1"),
    ("mlp.shared_experts.up_proj", "ffn.shared_experts.w3"),
    ("mlp.shared_experts.down_proj", "ffn.shared_experts.w2"),
];

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("hidden_size", DefaultValue::Count(5120)),
    ("moe_intermediate_size", DefaultValue::Count(2304)),
    ("num_hidden_layers", DefaultValue::Count(40)),
    ("num_attention_heads", DefaultValue::Count(64)),
    ("head_dim", DefaultValue::Count(512)),
    ("q_lora_rank", DefaultValue::Count(1280)),
    ("num_experts", DefaultValue::Count(384)),
    ("num_experts_per_tok", DefaultValue::Count(6)),
    ("max_position_embeddings", DefaultValue::Count(1_048_576)),
];

/// Columns of a block of keys and of the index that have one scale, and of entries.
const KEY_BLOCK: usize = 32;
const ENTRY_BLOCK: usize = 16;

/// Heads of x rounded, if blocks are equal parts of `width` channels.
fn rounded(r: &mut Recorder, x: Value, width: usize, block: usize, form: BlockFloat) -> Result<Value> {
    if width.is_multiple_of(block) { Ok(r.graph.round_blocks(x, block, form)?) } else { Ok(x) }
}

/// Entries of a layer, which others after it attend to.
#[derive(Debug, Clone, Copy)]
struct Entries {
    /// In the rows of the tokens that end them.
    rows: Value,
    /// Tokens of an entry.
    stride: usize,
}

/// What layers hand on to those after them.
#[derive(Debug, Clone, Copy, Default)]
struct Shared {
    entries: Option<Entries>,
    /// Keys of entries for the index.
    keys: Option<Entries>,
    /// What was compared for the last choice, and tokens of an entry.
    choice: Option<(IndexInputs, usize)>,
}

/// What all layers' attention has in common.
struct Attention {
    heads: usize,
    head_dim: usize,
    q_rank: usize,
    /// Groups of the output projection, and the width of each.
    output: (usize, usize),
    window: usize,
    index: EntryIndex,
    rotary_dim: usize,
    /// Rotations of layers that see a window only, and of the others.
    ropes: [usize; 2],
    eps: f32,
    /// Tokens of an entry of each layer; none of those that see a window only.
    strides: Vec<usize>,
    /// Layers that make entries, and that choose some.
    sources: [Vec<usize>; 2],
    shared: Shared,
}

impl Attention {
    fn new(config: &Config<'_>, r: &mut Recorder, layers: usize, eps: f32) -> Result<Self> {
        let size = |key, default| config.optional_size(key).map(|found| found.unwrap_or(default));
        let (heads, head_dim) = (config.size("num_attention_heads")?, config.size("head_dim")?);
        let index = EntryIndex {
            heads: size("index_n_heads", 32)?,
            head_dim: size("index_head_dim", 128)?,
            top_k: size("index_topk", 512)?,
        };
        let key = "qk_rope_head_dim";
        let rotary_dim = size(key, 64)?;
        let most = head_dim.min(index.head_dim);
        if !rotary_dim.is_multiple_of(2) || rotary_dim > most {
            return Err(config.unsupported(key, &format!("an even number of {most} channels")));
        }
        let groups = size("o_groups", 8)?;
        if !heads.is_multiple_of(groups) {
            return Err(config.unsupported("o_groups", &format!("a divisor of the {heads} heads")));
        }
        let mut strides = config.sizes("compress_ratios")?;
        strides.resize(layers.max(strides.len()), 0);
        Ok(Self {
            heads,
            head_dim,
            q_rank: config.size("q_lora_rank")?,
            output: (groups, size("o_lora_rank", 1024)?),
            window: config.positions("sliding_window")?.unwrap_or(128),
            index,
            rotary_dim,
            ropes: ropes(config, head_dim, rotary_dim)?.map(|rope| r.graph.rotation(rope)),
            eps,
            strides,
            sources: [config.sizes("kv_source_layer_ids")?, config.sizes("index_source_layer_ids")?],
            shared: Shared::default(),
        })
    }

    /// Ends contexts where the choice of blocks by one layer would limit what layers after it choose from.
    fn limit(&self, config: &Config<'_>, r: &mut Recorder, layers: usize) -> Result<()> {
        let key = "candidate_source_layer_id";
        let source = config.read(key, "a whole number", |value| value.as_i64())?.unwrap_or(-1);
        let Some(source) = usize::try_from(source).ok().filter(|source| *source < layers) else {
            return Ok(());
        };
        let key = "candidate_topk_blocks";
        let blocks = config.count(key)?.unwrap_or(2048);
        let limits = self.sources[1].iter().any(|layer| *layer > source && *layer < layers);
        let stride = self.strides[source];
        if blocks == 0 || !limits || stride == 0 || !self.sources[1].contains(&source) {
            return Ok(());
        }
        let block = config.optional_size("candidate_block_size")?.unwrap_or(8);
        let positions = blocks.saturating_mul(block).saturating_add(1).saturating_mul(stride) - 1;
        r.limit_context(Some(positions));
        match config.context() {
            Some(wanted) if wanted > positions => {
                let expected = format!("enough blocks of {block} for the {wanted} positions of the context");
                Err(config.unsupported(key, &expected))
            }
            _ => Ok(()),
        }
    }

    /// Makes entries of normed h, and their keys for the index.
    fn compress(&mut self, r: &mut Recorder, layer: usize, h: Value) -> Result<()> {
        let name = |part: &str| format!("model.layers.{layer}.self_attn.{part}");
        let (dim, stride) = (self.head_dim, self.strides[layer]);
        let mut latent = r.linear(h, &name("compressor.kv_proj"), dim, Precision::Fast)?;
        if stride > 1 {
            let gate = r.linear(h, &name("compressor.gate_proj"), dim, Precision::Fast)?;
            let none = Form::NoneOf { count: stride.saturating_mul(dim) };
            let bias = r.constants(&name("compressor.kv_norm.weight"), &[dim], none)?;
            let pool = WindowPool { window: stride, overlap: false, width: dim };
            latent = r.graph.window_pool(latent, gate, bias, pool)?;
        }
        let latent = r.rms_norm(latent, &name("compressor.kv_norm"), 1, self.eps)?;
        let place = |dim| Placement { first: dim - self.rotary_dim, inverse: false, stride };
        let rows = r.graph.placed_rope(latent, 1, self.ropes[1], place(dim))?;
        let rows = rounded(r, rows, dim, ENTRY_BLOCK, BlockFloat::E2m1ByE4m3)?;
        self.shared.entries = Some(Entries { rows, stride });
        if self.sources[1].contains(&layer) {
            let width = self.index.head_dim;
            let k = r.linear(latent, &name("indexer.k_proj"), width, Precision::Fast)?;
            let k = r.rms_norm(k, &name("indexer.k_norm"), 1, self.eps)?;
            let k = r.graph.placed_rope(k, 1, self.ropes[1], place(width))?;
            let rows = rounded(r, k, width, KEY_BLOCK, BlockFloat::E2m1)?;
            self.shared.keys = Some(Entries { rows, stride });
        }
        Ok(())
    }

    /// Compares the entries that there are with what the indexer of `layer` makes of normed h and the queries' latent.
    fn choose(
        &mut self,
        config: &Config<'_>,
        r: &mut Recorder,
        layer: usize,
        inputs: [Value; 2],
    ) -> Result<()> {
        let Some(keys) = self.shared.keys else {
            self.shared.choice = None;
            return Ok(());
        };
        if keys.stride != self.strides[layer] {
            let expected =
                format!("{} for layer {layer}, as of the layer whose entries it sees", keys.stride);
            return Err(config.unsupported("compress_ratios", &expected));
        }
        let name = |part: &str| format!("model.layers.{layer}.self_attn.indexer.{part}");
        let ([h, latent], EntryIndex { heads, head_dim, .. }) = (inputs, self.index);
        let q = r.linear(latent, &name("q_b_proj"), heads * head_dim, Precision::Fast)?;
        let place = Placement { first: head_dim - self.rotary_dim, inverse: false, stride: 1 };
        let q = r.graph.placed_rope(q, heads, self.ropes[1], place)?;
        let q = rounded(r, q, head_dim, KEY_BLOCK, BlockFloat::E2m1)?;
        let weights = Some(r.linear(h, &name("weights_proj"), heads, Precision::F32)?);
        self.shared.choice = Some((IndexInputs { q, k: keys.rows, weights }, keys.stride));
        Ok(())
    }

    /// Attention of `layer` to normed h.
    fn mix(&mut self, config: &Config<'_>, r: &mut Recorder, layer: usize, h: Value) -> Result<Value> {
        let name = |part: &str| format!("model.layers.{layer}.self_attn.{part}");
        let (heads, dim) = (self.heads, self.head_dim);
        let compresses = self.strides[layer] > 0;
        let rope = self.ropes[usize::from(compresses)];
        let place = Placement { first: dim - self.rotary_dim, inverse: false, stride: 1 };

        let latent = r.linear(h, &name("q_a_proj"), self.q_rank, Precision::Fast)?;
        let kv = r.linear(h, &name("kv_proj"), dim, Precision::Fast)?;
        let latent = r.rms_norm(latent, &name("q_a_norm"), 1, self.eps)?;
        let q = r.linear(latent, &name("q_b_proj"), heads * dim, Precision::Fast)?;
        let q = r.graph.placed_rope(q, heads, rope, place)?;
        let kv = r.rms_norm(kv, &name("kv_norm"), 1, self.eps)?;
        let kv = r.graph.placed_rope(kv, 1, rope, place)?;
        let kv = rounded(r, kv, dim, KEY_BLOCK, BlockFloat::E4m3)?;
        if compresses && self.sources[0].contains(&layer) {
            self.compress(r, layer, h)?;
        }
        if compresses && self.sources[1].contains(&layer) {
            self.choose(config, r, layer, [h, latent])?;
        }
        let sinks = r.constants(&name("sinks"), &[heads], Form::F32)?;
        let scale = (dim as f32).sqrt().recip();
        let seen = self.shared.entries.zip(self.shared.choice).filter(|_| compresses);
        let mixed = if let Some((Entries { rows, stride }, (index, chosen))) = seen {
            if stride != chosen {
                let expected = format!("the same for entries that layer {layer} sees as for their choice");
                return Err(config.unsupported("compress_ratios", &expected));
            }
            let shape = CompressedAttention {
                form: TokenForm::Shared,
                heads,
                head_dim: dim,
                scale,
                window: self.window,
                stride,
                index: Some(self.index),
            };
            let inputs = CompressedInputs { q, kv, entries: rows, index: Some(index), sinks };
            r.graph.compressed_attention(inputs, shape)?
        } else {
            let window = Some(self.window);
            let shape = graph::Attention { window, ..graph::Attention::grouped(heads, 1, dim, scale) };
            r.graph.attention_with_sinks(q, kv, kv, shape, Some(sinks))?
        };
        // The values were rotated with the keys.
        let mixed = r.graph.placed_rope(mixed, heads, rope, Placement { inverse: true, ..place })?;
        let (groups, rank) = self.output;
        let weight = r.head_matrices(&name("o_a_proj"), groups, rank, heads / groups * dim)?;
        let out = r.graph.grouped_linear(mixed, weight, groups, Precision::Fast)?;
        r.linear(out, &name("o_b_proj"), h.width(), Precision::Fast)
    }
}

/// Routed experts and the shared one.
struct Moe {
    route: Route,
    /// What logits are divided by.
    temperature: f32,
    activation: Activation,
    /// Of the shared expert.
    width: usize,
}

impl Moe {
    fn new(config: &Config<'_>) -> Result<Self> {
        let score = match config.word("scoring_func")?.as_deref() {
            None | Some("sqrtsoftplus") => Score::SqrtSoftplus,
            Some("sigmoid") => Score::Sigmoid,
            Some("softmax") => Score::Softmax,
            Some(_) => return Err(config.unsupported("scoring_func", "sqrtsoftplus, sigmoid or softmax")),
        };
        let (experts, top_k) = blocks::expert_counts(config, None)?;
        // The weight of one expert stays what it is.
        let renormalize = config.flag("norm_topk_prob", true)? && top_k > 1;
        let scale = config.magnitude("routed_scaling_factor")?.unwrap_or(1.5) as f32;
        let temperature = config.number("gate_temp")?.unwrap_or(1.0) as f32;
        if temperature == 0.0 {
            return Err(config.unsupported("gate_temp", "a number that is not 0"));
        }
        let limit = config.number("swiglu_limit")?.unwrap_or(10.0) as f32;
        let activation = if limit > 0.0 { Activation::LimitedSwiGlu { limit } } else { Activation::SwiGlu };
        Ok(Self {
            route: Route { score, scale, ..Route::softmax(experts, top_k, renormalize) },
            temperature,
            activation,
            width: config.size("moe_intermediate_size")?,
        })
    }

    /// Router, experts, shared expert of normed h.
    fn mix(&self, r: &mut Recorder, layer: usize, h: Value) -> Result<Value> {
        let name = |part: &str| format!("model.layers.{layer}.mlp.{part}");
        let Self { route, temperature, activation, width } = *self;
        // Not `Recorder::linear`: published checkpoints call the correction bias the router's bias.
        let router = r.matrix(&name("gate"), Some(route.experts), h.width())?;
        let mut logits = r.graph.linear(h, router, None, Precision::F32)?;
        if temperature != 1.0 {
            logits = r.graph.position_scale(logits, PositionScale::constant(temperature.recip()));
        }
        let bias = r.constants(&name("gate.e_score_correction_bias"), &[route.experts], Form::F32)?;
        let routing = r.graph.route(logits, Some(bias), route)?;
        // Before the experts, so that it is computed while they are read.
        let shared = blocks::mlp(r, h, &name("shared_experts"), width, activation)?;
        let published = r.has(&format!("model.layers.{layer}.ffn.gate"));
        let names = ExpertNames {
            module: if published { "ffn.experts" } else { "mlp.experts.switch_mlp" },
            projections: ["w1", "w3", "w2"],
        };
        let experts = r.experts(layer, route.experts, h.width(), &names)?;
        let body = ExpertMlp { activation, ..ExpertMlp::default() };
        let out = r.graph.moe_experts_with(h, routing, experts, body)?;
        Ok(r.graph.add(out, shared)?)
    }
}

/// Residual streams, and the weights by which they collapse for the next block; those of the block before, as of nothing but
/// embeddings there are none.
struct Streams {
    x: Value,
    collapse: Option<Value>,
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let engrams = config.sizes("engram_layer_ids")?;
    if !engrams.is_empty() {
        return Err(config.unsupported("engram_layer_ids", "none: there is no n-gram memory"));
    }
    let (hidden_size, layers) = (config.size("hidden_size")?, blocks::layers(config)?);
    let eps = config.magnitude("rms_norm_eps")?.unwrap_or(1e-20) as f32;
    let size = |key, default| config.optional_size(key).map(|found| found.unwrap_or(default));
    let shape = HyperConnection {
        streams: size("hc_mult", 4)?,
        norm_eps: eps,
        floor: config.magnitude("hc_eps")?.unwrap_or(1e-6) as f32,
        kind: HyperKind::Mixed { iterations: size("hc_sinkhorn_iters", 20)? },
    };
    let mut attention = Attention::new(config, r, layers, eps)?;
    attention.limit(config, r, layers)?;
    let moe = Moe::new(config)?;

    r.graph.scope("embed_tokens");
    let table = r.matrix("model.embed_tokens", config.optional_size("vocab_size")?, hidden_size)?;
    let embedded = r.graph.embed(table);
    let mut streams = Streams { x: r.graph.repeat(embedded, shape.streams), collapse: None };
    for layer in 0..layers {
        let base = format!("model.layers.{layer}");
        for (connection, norm) in [("attn_hc", "input_layernorm"), ("ffn_hc", "post_attention_layernorm")] {
            let attends = connection == "attn_hc";
            r.graph.scope(format!("layers.{layer}.{}", if attends { "self_attn" } else { "mlp" }));
            let names = ["fn", "base", "scale"].map(|part| format!("{base}.{connection}.{part}"));
            let weights = streams::weights(r, streams.x, names, shape)?;
            let h = match streams.collapse {
                Some(collapse) => r.graph.hyper_collapse(streams.x, collapse, shape.streams)?,
                None => embedded,
            };
            let h = r.rms_norm(h, &format!("{base}.{norm}"), 1, eps)?;
            let out = if attends { attention.mix(config, r, layer, h)? } else { moe.mix(r, layer, h)? };
            let x = r.graph.hyper_expand(streams.x, out, weights, shape.streams)?;
            streams = Streams { x, collapse: Some(weights) };
        }
    }

    r.graph.scope("lm_head");
    let x = r.graph.gather_rows(streams.x);
    let h = match streams.collapse {
        Some(collapse) => {
            let collapse = r.graph.gather_rows(collapse);
            r.graph.hyper_collapse(x, collapse, shape.streams)?
        }
        None => x,
    };
    let h = r.rms_norm(h, "model.norm", 1, eps)?;
    let vocab_size = r.graph.matrix(table).rows;
    let head = r.matrix("lm_head", Some(vocab_size), hidden_size)?;
    Ok(r.graph.linear(h, head, None, Precision::Fast)?)
}
