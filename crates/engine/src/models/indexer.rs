//! DeepSeek Sparse Attention's indexer (DeepSeek-V3.2, 2025) as families record it: a few small heads that choose which
//! tokens a latent attention sees. Layers may share a choice.

use moeflux_compute::graph::{
    BlockChoice, BlockScore, Chosen, EntryIndex, IndexInputs, Placement, Precision, Value, WindowPool,
};
use serde_json::Value as Json;

use super::config::Config;
use super::names::NameMap;
use super::recorder::{Form, Recorder};
use crate::Result;
use crate::checkpoint::Format;

/// Modules and tensors of GGUF files.
pub const GGUF_TENSORS: NameMap = &[
    ("self_attn.indexer.wq_b", "indexer.attn_q_b"),
    ("self_attn.indexer.wk", "indexer.attn_k"),
    ("self_attn.indexer.weights_proj", "indexer.proj"),
    ("self_attn.indexer.k_norm", "indexer.k_norm"),
    ("self_attn.indexer.index_kpool_compress_gate", "indexer_compressor_gate.weight"),
    ("self_attn.indexer.index_kpool_compress_ape", "indexer_compressor_ape.weight"),
];

/// Keys of GGUF files.
pub const GGUF_KEYS: NameMap = &[
    ("index_topk", "attention.indexer.top_k"),
    ("index_n_heads", "attention.indexer.head_count"),
    ("index_head_dim", "attention.indexer.key_length"),
    ("indexer_types", "attention.indexer.types"),
];

/// Where channels of the index are rotated.
#[derive(Debug, Clone, Copy)]
pub struct IndexRotation {
    /// Index of the rotation in the graph.
    pub rope: usize,
    /// Channels of a head before the rotated ones.
    pub first: usize,
}

/// The indexer of all layers of a model.
#[derive(Debug, Clone, Copy)]
pub struct Indexer {
    /// Heads, and tokens or pools of tokens that they choose.
    pub index: EntryIndex,
    /// Rotation of its heads and keys, if there is one.
    pub rotation: Option<IndexRotation>,
    /// Epsilon of the norm of its keys.
    pub norm_eps: f32,
    /// Tokens of a pool, which have one key and are chosen together; 1 for tokens on their own.
    pub pool: usize,
    /// The module, below the indexer, of the factors of heads of queries, which grow with positions, if there are some: its
    /// `bias` and `scale`.
    pub scaling: Option<&'static str>,
}

impl Indexer {
    /// Reads heads and numbers of tokens; `heads` is the family's default. Nothing is rotated.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for what does not fit.
    pub fn new(config: &Config<'_>, heads: usize, norm_eps: f32) -> Result<Self> {
        let size = |key, default| config.optional_size(key).map(|found| found.unwrap_or(default));
        let index = EntryIndex {
            heads: size("index_n_heads", heads)?,
            head_dim: size("index_head_dim", 128)?,
            top_k: size("index_topk", 2048)?,
        };
        Ok(Self { index, rotation: None, norm_eps, pool: 1, scaling: None })
    }

    /// What the queries of `layer` see: by its normed hidden state h and the normed latent of its queries.
    ///
    /// # Errors
    /// If weights are missing or do not fit.
    pub fn choose(&self, r: &mut Recorder, layer: usize, [h, latent]: [Value; 2]) -> Result<Chosen> {
        let name = |part: &str| format!("model.layers.{layer}.self_attn.indexer.{part}");
        let EntryIndex { heads, head_dim, .. } = self.index;
        let q = r.linear(latent, &name("wq_b"), heads * head_dim, Precision::Fast)?;
        let k = r.linear(h, &name("wk"), head_dim, Precision::Fast)?;
        let norm = r.constants(&name("k_norm.weight"), &[head_dim], Form::F32)?;
        let bias = r.vector(&name("k_norm"), "bias", head_dim)?;
        let mut k = r.graph.layer_norm(k, norm, bias, self.norm_eps)?;
        let mut q = q;
        if let Some(module) = self.scaling {
            q = head_scale(r, q, &name(module), heads)?;
        }
        if let Some(IndexRotation { rope, first }) = self.rotation {
            let place = Placement { first, inverse: false, stride: 1 };
            q = r.graph.placed_rope(q, heads, rope, place)?;
            k = r.graph.placed_rope(k, 1, rope, place)?;
        }
        if self.pool > 1 {
            let gate = r.parameter(&name("index_kpool_compress_gate"), head_dim, h.width())?;
            let gate = r.graph.linear(h, gate, None, Precision::Fast)?;
            let bias = r.constants(&name("index_kpool_compress_ape"), &[self.pool, head_dim], Form::F32)?;
            let shape = WindowPool { window: self.pool, overlap: false, width: head_dim };
            k = r.graph.window_pool(k, gate, bias, shape)?;
        }
        let weights = Some(r.linear(h, &name("weights_proj"), heads, Precision::F32)?);
        let choice = BlockChoice { index: self.index, block: self.pool, score: BlockScore::Sum };
        let blocks = r.graph.choose_blocks(IndexInputs { q, k, weights }, choice)?;
        Ok(Chosen { blocks, groups: 1, block: self.pool, tail: self.pool > 1 })
    }
}

/// Heads of q times the factors of `module`: its `bias`, and its `scale` · ln(1 + position).
///
/// # Errors
/// If weights are missing or do not fit.
pub fn head_scale(r: &mut Recorder, q: Value, module: &str, heads: usize) -> Result<Value> {
    let mut of = |part: &str| r.constants(&format!("{module}.{part}"), &[heads], Form::F32);
    let (base, slope) = (of("bias")?, of("scale")?);
    Ok(r.graph.head_scale(q, heads, base, slope)?)
}

/// For each layer whether it has an indexer of its own, as `indexer_types` says; the others see what the last one before
/// them chose.
///
/// # Errors
/// [`crate::Error::Config`] for unknown kinds, too few of them, or a layer with nothing to share.
pub fn layers_with_indexer(config: &Config<'_>, layers: usize, default: Vec<bool>) -> Result<Vec<bool>> {
    let key = "indexer_types";
    let own: Option<Vec<bool>> = match config.format() {
        Format::Gguf => config.flags(key)?,
        _ => {
            let kinds = config.words(key)?;
            if kinds.iter().flatten().any(|kind| kind != "full" && kind != "shared") {
                return Err(config.unsupported(key, &format!("full or shared for each of {layers} layers")));
            }
            kinds.map(|kinds| kinds.iter().map(|kind| kind == "full").collect())
        }
    };
    match own {
        Some(own) if own.len() < layers => {
            Err(config.unsupported(key, &format!("an entry for each of {layers} layers")))
        }
        own => Ok(own.unwrap_or(default)),
    }
}

/// A list of words, or the letters of one word.
fn words_or_letters(config: &Config<'_>, key: &str) -> Result<Option<Vec<String>>> {
    let word = |v: &Json| v.as_str().map(str::to_owned);
    config.read(key, "a string or a list of strings", |v| match v {
        Json::String(letters) => Some(letters.chars().map(String::from).collect()),
        other => other.as_array()?.iter().map(word).collect(),
    })
}

/// The default of [`layers_with_indexer`] for models whose pattern has other keys: `index_topk_pattern`, else every
/// `index_topk_freq`th layer from `index_skip_topk_offset` on.
///
/// # Errors
/// [`crate::Error::Config`] for values that are none.
pub fn pattern(config: &Config<'_>, layers: usize) -> Result<Vec<bool>> {
    let key = "index_topk_pattern";
    if let Some(pattern) = words_or_letters(config, key)? {
        let kind = |word: &String| match word.as_str() {
            "F" | "full" => Ok(true),
            "S" | "shared" => Ok(false),
            _ => Err(config.unsupported(key, "F or S for each layer")),
        };
        if pattern.len() < layers {
            return Err(config.unsupported(key, &format!("F or S for each of {layers} layers")));
        }
        return pattern.iter().take(layers).map(kind).collect();
    }
    let freq = config.count("index_topk_freq")?.unwrap_or(1).max(1);
    let offset = config.count("index_skip_topk_offset")?.unwrap_or(2);
    Ok((0..layers).map(|layer| (layer + 1).saturating_sub(offset).is_multiple_of(freq)).collect())
}
