//! MiniMax-M3. Per-head query and key norms; part of each head rotates; some layers see blocks of tokens that each head of an
//! indexer chooses for a part of the heads; sigmoid routing with a correction bias; gpt-oss's clamped SwiGLU everywhere.
//! Norm weights are added to one. The text part of the multimodal model.
//!
//! Source: transformers `modeling_minimax_m3_vl.py`; published checkpoints have other names for modules. GGUF architecture
//! `minimax-m3`, whose files have one added to norm weights, and choose blocks in all layers but the dense first ones.

use moeflux_compute::graph::{
    Activation, Attention, BlockChoice, BlockScore, Chosen, EntryIndex, IndexInputs, Precision, RopeStyle,
    Route, Score, Value,
};

use super::Family;
use super::blocks::{self, Decoder, Moe, SharedExpert};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::names::{NameMap, Names};
use super::recorder::{ExpertNames, Form, Recorder};
use crate::Result;
use crate::checkpoint::Format;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "MiniMax-M3",
    model_types: &["minimax_m3_vl", "minimax_m3_vl_text", "minimax_m3"],
    gguf_architectures: &["minimax-m3"],
    hidden_act: &["silu", "swish", "swigluoai"],
    names: &Names {
        gguf_tensors: &[GGUF_TENSORS],
        gguf_keys: &[GGUF_KEYS],
        other_keys: &[("num_nextn_predict_layers", "num_mtp_modules")],
        ..Names::COMMON
    },
    record,
};

/// Modules of GGUF files.
const GGUF_TENSORS: NameMap = &[
    ("self_attn.indexer.q_proj", "indexer.q_proj"),
    ("self_attn.indexer.k_proj", "indexer.k_proj"),
    ("self_attn.indexer.q_norm", "indexer.q_norm"),
    ("self_attn.indexer.k_norm", "indexer.k_norm"),
];

/// Keys of GGUF files.
const GGUF_KEYS: NameMap = &[
    ("index_topk_blocks", "attention.indexer.top_k"),
    ("index_n_heads", "attention.indexer.head_count"),
    ("index_head_dim", "attention.indexer.key_length"),
    ("index_block_size", "attention.indexer.block_size"),
    ("index_local_blocks", "attention.indexer.local_blocks"),
];

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("num_attention_heads", DefaultValue::Count(64)),
    ("num_key_value_heads", DefaultValue::Count(4)),
    ("head_dim", DefaultValue::Count(128)),
    ("num_experts", DefaultValue::Count(128)),
    ("max_position_embeddings", DefaultValue::Count(524_288)),
];

/// Object of published configurations.
const SPARSE: &str = "sparse_attention_config";

/// Channels of a head that rotate. transformers writes a `rotary_dim` that it does not read.
fn rotary_dim(config: &Config<'_>, head_dim: usize) -> Result<usize> {
    let part = match config.number("partial_rotary_factor")? {
        Some(part) => part,
        None if config.format() == Format::HuggingFace => 1.0,
        None => return blocks::rotary_dim(config, head_dim, 0.5),
    };
    let channels = (head_dim as f64 * part) as usize;
    if channels == 0 || !channels.is_multiple_of(2) || channels > head_dim {
        let expected = format!("an even number of the {head_dim} channels of a head");
        return Err(config.unsupported("partial_rotary_factor", &expected));
    }
    Ok(channels)
}

/// How blocks are chosen.
fn choice(config: &Config<'_>, heads: usize, rotary_dim: usize) -> Result<BlockChoice> {
    let sparse = config.within(SPARSE)?;
    let size = |published: &str, key: &str, default: usize| -> Result<usize> {
        let published = sparse.map(|sparse| sparse.count(published)).transpose()?.flatten();
        Ok(published.or(config.count(key)?).unwrap_or(default))
    };
    let index = EntryIndex {
        heads: size("sparse_num_index_heads", "index_n_heads", 4)?,
        head_dim: size("sparse_index_dim", "index_head_dim", 128)?,
        top_k: size("sparse_topk_blocks", "index_topk_blocks", 16)?,
    };
    let block = size("sparse_block_size", "index_block_size", 128)?;
    let local = size("sparse_local_block", "index_local_blocks", 1)?;
    if index.heads == 0 || !heads.is_multiple_of(index.heads) {
        return Err(config.unsupported("index_n_heads", &format!("a divisor of the {heads} heads")));
    }
    if index.head_dim < rotary_dim {
        let expected = format!("at least the {rotary_dim} channels that rotate");
        return Err(config.unsupported("index_head_dim", &expected));
    }
    if block == 0 {
        return Err(config.unsupported("index_block_size", "a positive integer"));
    }
    if index.top_k == 0 || local > index.top_k {
        let expected = format!("at least the {local} blocks that are always seen, and one");
        return Err(config.unsupported("index_topk_blocks", &expected));
    }
    Ok(BlockChoice { index, block, score: BlockScore::BestToken { local } })
}

/// For each layer whether it sees chosen blocks only.
fn sparse_layers(config: &Config<'_>, layers: usize) -> Result<Vec<bool>> {
    if let Some(kinds) = config.layer_kinds("layer_types")? {
        let known = ["minimax_m3_sparse", "full_attention"];
        if kinds.len() < layers || kinds.iter().any(|kind| !known.contains(&kind.as_str())) {
            let expected = format!("minimax_m3_sparse or full_attention for each of {layers} layers");
            return Err(config.unsupported("layer_types", &expected));
        }
        return Ok(kinds.iter().take(layers).map(|kind| kind == known[0]).collect());
    }
    if config.format() == Format::Gguf {
        let dense = config.count("first_k_dense_replace")?.unwrap_or(0);
        return Ok((0..layers).map(|layer| layer >= dense).collect());
    }
    match config.sizes_in(SPARSE, "sparse_attention_freq")? {
        Some(listed) if listed.len() < layers => {
            Err(config.unsupported(SPARSE, &format!("a frequency for each of {layers} layers")))
        }
        Some(listed) => Ok(listed.iter().take(layers).map(|frequency| *frequency != 0).collect()),
        None => Ok(vec![false; layers]),
    }
}

/// For each layer whether its feed-forward is dense.
fn dense_layers(config: &Config<'_>, layers: usize) -> Result<Vec<bool>> {
    let key = "moe_layer_freq";
    if config.words("mlp_layer_types")?.is_none() {
        let listed = config.sizes(key)?;
        if !listed.is_empty() {
            if listed.len() < layers {
                return Err(config.unsupported(key, &format!("a frequency for each of {layers} layers")));
            }
            return Ok(listed.iter().take(layers).map(|frequency| *frequency == 0).collect());
        }
    }
    blocks::dense_layers(config, layers, 0)
}

/// Attention of normed h, over the blocks that are chosen if there is a choice.
fn attention(
    r: &mut Recorder,
    d: &Decoder,
    layer: usize,
    h: Value,
    (rope, choice): (usize, Option<BlockChoice>),
) -> Result<Value> {
    let module = |name: &str| format!("model.layers.{layer}.self_attn.{name}");
    let Decoder { heads, kv_heads, head_dim, eps, .. } = *d;
    let project = |r: &mut Recorder, name: &str, heads: usize| {
        r.linear(h, &module(name), heads * head_dim, Precision::Fast)
    };
    let (q, k) = (project(r, "q_proj", heads)?, project(r, "k_proj", kv_heads)?);
    let v = project(r, "v_proj", kv_heads)?;
    let q = r.rms_norm(q, &module("q_norm"), heads, eps)?;
    let k = r.rms_norm(k, &module("k_norm"), kv_heads, eps)?;
    let (q, k) = (r.graph.rope(q, heads, rope)?, r.graph.rope(k, kv_heads, rope)?);
    let chosen = match choice {
        None => None,
        Some(choice) => {
            let EntryIndex { heads, head_dim, .. } = choice.index;
            // transformers keeps the indexer in a module.
            let published = r.has(&module("index_q_proj"));
            let name = |part: &str| match published {
                true => module(&format!("index_{part}")),
                false => module(&format!("indexer.{part}")),
            };
            let q = r.linear(h, &name("q_proj"), heads * head_dim, Precision::Fast)?;
            let k = r.linear(h, &name("k_proj"), head_dim, Precision::Fast)?;
            let q = r.rms_norm(q, &name("q_norm"), heads, eps)?;
            let k = r.rms_norm(k, &name("k_norm"), 1, eps)?;
            let (q, k) = (r.graph.rope(q, heads, rope)?, r.graph.rope(k, 1, rope)?);
            let blocks = r.graph.choose_blocks(IndexInputs { q, k, weights: None }, choice)?;
            Some(Chosen { blocks, groups: choice.groups(), block: choice.block, tail: false })
        }
    };
    let scale = (head_dim as f32).sqrt().recip();
    let shape = Attention::grouped(heads, kv_heads, head_dim, scale);
    let mixed = r.graph.attention_over([q, k, v], shape, None, chosen)?;
    r.linear(mixed, &module("o_proj"), d.hidden_size, Precision::Fast)
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    for key in ["use_gemma_norm", "use_qk_norm"] {
        if !config.flag(key, true)? {
            return Err(config.unsupported(key, "true"));
        }
    }
    let gguf = config.format() == Format::Gguf;
    if gguf && config.count("expert_gating_func")?.unwrap_or(2) != 2 {
        return Err(config.unsupported("expert_gating_func", "2, sigmoid"));
    }
    let d = Decoder::new(config, 1e-6)?;
    if !gguf {
        r.norms_are(Form::F32PlusOne);
    }
    let rotary_dim = rotary_dim(config, d.head_dim)?;
    let rope = blocks::rotation(r, config, rotary_dim, RopeStyle::HalfSplit, 5e6)?;
    let sparse = sparse_layers(config, d.layers)?;
    let choice = match sparse.contains(&true) {
        true => Some(choice(config, d.heads, rotary_dim)?),
        false => None,
    };
    let dense = dense_layers(config, d.layers)?;
    let size = |key, default| config.optional_size(key).map(|found| found.unwrap_or(default));
    let activation = Activation::ClampedSwiGlu {
        alpha: config.number("swiglu_alpha")?.unwrap_or(1.702) as f32,
        limit: config.magnitude("swiglu_limit")?.unwrap_or(7.0) as f32,
    };
    let first = dense.iter().position(|dense| !dense).unwrap_or(0);
    let published = r.has(&format!("model.layers.{first}.block_sparse_moe.gate"));
    let name = |published_name, own| if published { published_name } else { own };
    let (experts, top_k) = blocks::expert_counts(config, Some(4))?;
    let moe = Moe {
        route: Route {
            score: Score::Sigmoid,
            scale: config.magnitude("routed_scaling_factor")?.unwrap_or(if gguf { 1.0 } else { 2.0 }) as f32,
            ..Route::softmax(experts, top_k, !gguf || config.flag("norm_topk_prob", false)?)
        },
        router: name("block_sparse_moe.gate", "mlp.gate"),
        correction_bias: Some(name("block_sparse_moe", "mlp.gate")),
        experts: ExpertNames {
            module: name("block_sparse_moe.experts", "mlp.experts"),
            projections: ["w1", "w3", "w2"],
        },
        shared: match gguf {
            true => blocks::shared_experts(config, "n_shared_experts", 1)?,
            false => Some(SharedExpert {
                module: name("block_sparse_moe.shared_experts", "mlp.shared_experts"),
                width: size("shared_intermediate_size", 3072)?,
                gate: None,
            }),
        },
    };
    let dense_width = match gguf {
        true => config.size("intermediate_size")?,
        false => size("dense_intermediate_size", 12288)?,
    };

    let (mut x, table) = blocks::embed(r, d.hidden_size)?;
    for layer in 0..d.layers {
        let base = format!("model.layers.{layer}");
        r.graph.scope(format!("layers.{layer}.self_attn"));
        let h = r.rms_norm(x, &format!("{base}.input_layernorm"), 1, d.eps)?;
        let mixed = attention(r, &d, layer, h, (rope, choice.filter(|_| sparse[layer])))?;
        x = r.graph.add(x, mixed)?;
        r.graph.scope(format!("layers.{layer}.mlp"));
        let h = r.rms_norm(x, &format!("{base}.post_attention_layernorm"), 1, d.eps)?;
        let out = match dense[layer] {
            true => {
                // Some exports keep dense layers under the experts' name.
                let renamed = r.has(&format!("{base}.block_sparse_moe.gate_proj"));
                let module = if renamed { "block_sparse_moe" } else { "mlp" };
                blocks::mlp(r, h, &format!("{base}.{module}"), dense_width, activation)?
            }
            false => blocks::moe_with(r, layer, h, &moe, [activation; 2])?,
        };
        x = r.graph.add(x, out)?;
    }
    blocks::head(r, config, x, table, d.eps)
}
