//! Attention of DeepSeek-V4: recent tokens, and entries that stand for the older ones.

use moeflux_compute::graph::{
    self, CompressedAttention, CompressedInputs, EntryIndex, IndexInputs, Placement, Precision, RopeStyle,
    TokenForm, Value, WindowPool,
};

use super::Dimensions;
use crate::Result;
use crate::checkpoint::Format;
use crate::models::config::Config;
use crate::models::recorder::{Form, Recorder};
use crate::models::rope;

/// What a layer attends to besides recent tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AttentionKind {
    /// Nothing.
    Sliding,
    /// Entries of a few tokens each, which overlap; an indexer chooses some.
    Sparse,
    /// All entries, of many tokens each.
    Heavy,
}

impl AttentionKind {
    /// Of each layer: as `layer_types` says, or `compress_ratios` in published configurations, else the first two heavy
    /// and then both in turn.
    pub(super) fn of_layers(config: &Config<'_>, layers: usize) -> Result<Vec<Self>> {
        let count = |key: &str, found: usize| {
            if found < layers {
                Err(config.unsupported(key, &format!("an entry for each of {layers} layers")))
            } else {
                Ok(())
            }
        };
        if let Some(kinds) = config.layer_kinds("layer_types")? {
            count("layer_types", kinds.len())?;
            let kind = |kind: &String| match kind.as_str() {
                "sliding_attention" => Ok(Self::Sliding),
                "compressed_sparse_attention" => Ok(Self::Sparse),
                "heavily_compressed_attention" => Ok(Self::Heavy),
                _ => {
                    let expected =
                        "sliding_attention, compressed_sparse_attention or heavily_compressed_attention";
                    Err(config.unsupported("layer_types", expected))
                }
            };
            return kinds.iter().take(layers).map(kind).collect();
        }
        let ratios = config.sizes("compress_ratios")?;
        if !ratios.is_empty() {
            count("compress_ratios", ratios.len())?;
            let kind = |ratio: &usize| match ratio {
                0 => Ok(Self::Sliding),
                4 => Ok(Self::Sparse),
                128 => Ok(Self::Heavy),
                _ => Err(config.unsupported("compress_ratios", "0, 4 or 128 for each layer")),
            };
            return ratios.iter().take(layers).map(kind).collect();
        }
        let sparse = |layer: usize| layer >= 2 && !layer.is_multiple_of(2);
        Ok((0..layers).map(|layer| if sparse(layer) { Self::Sparse } else { Self::Heavy }).collect())
    }
}

/// What all layers' attention has in common.
#[derive(Debug, Clone, Copy)]
pub(super) struct Attention {
    head_dim: usize,
    q_rank: usize,
    /// Groups of the output projection, and the width of each.
    output: (usize, usize),
    window: usize,
    /// Tokens of an entry in sparse and heavy layers.
    strides: [usize; 2],
    index: EntryIndex,
    rotary_dim: usize,
    /// Rotations of sliding and of other layers.
    ropes: [usize; 2],
}

impl Attention {
    pub(super) fn new(config: &Config<'_>, r: &mut Recorder, d: &Dimensions) -> Result<Self> {
        let size = |key, default| config.optional_size(key).map(|found| found.unwrap_or(default));
        let head_dim = size("head_dim", 512)?;
        let channels = config.optional_size("qk_rope_head_dim")?;
        let part = match config.number("partial_rotary_factor")? {
            Some(part) => Some(part),
            None if channels.is_none() => Some(64.0 / 512.0),
            None => None,
        };
        let rotary_dim = part.map_or(channels, |part| Some((head_dim as f64 * part) as usize)).unwrap_or(0);
        let index = EntryIndex {
            heads: size("index_n_heads", 64)?,
            head_dim: size("index_head_dim", 128)?,
            top_k: size("index_topk", 512)?,
        };
        if rotary_dim == 0 || rotary_dim % 2 != 0 || rotary_dim > head_dim.min(index.head_dim) {
            let most = head_dim.min(index.head_dim);
            return Err(config.unsupported("qk_rope_head_dim", &format!("an even number of {most} channels")));
        }
        let groups = size("o_groups", 8)?;
        if !d.heads.is_multiple_of(groups) {
            return Err(config.unsupported("o_groups", &format!("a divisor of the {} heads", d.heads)));
        }
        let stride = |kind: &str, key: &str, default: usize| -> Result<usize> {
            let own = config.optional_size(key)?;
            Ok(own.or(config.size_in("compress_rates", kind)?).unwrap_or(default))
        };
        Ok(Self {
            head_dim,
            q_rank: size("q_lora_rank", 1024)?,
            output: (groups, size("o_lora_rank", 1024)?),
            window: config.positions("sliding_window")?.unwrap_or(128),
            strides: [
                stride("compressed_sparse_attention", "compress_rate_csa", 4)?,
                stride("heavily_compressed_attention", "compress_rate_hca", 128)?,
            ],
            index,
            rotary_dim,
            ropes: ropes(config, head_dim, rotary_dim)?.map(|rope| r.graph.rotation(rope)),
        })
    }

    /// Attention of one layer to h.
    pub(super) fn record(
        &self,
        r: &mut Recorder,
        d: &Dimensions,
        layer: usize,
        h: Value,
        kind: AttentionKind,
    ) -> Result<Value> {
        let name = |part: &str| d.name(layer, &format!("self_attn.{part}"));
        let (heads, dim) = (d.heads, self.head_dim);
        let rope = self.ropes[usize::from(kind != AttentionKind::Sliding)];
        let place = Placement { first: dim - self.rotary_dim, inverse: false, stride: 1 };

        let latent = r.linear(h, &name("q_a_proj"), self.q_rank, Precision::Fast)?;
        let kv = r.linear(h, &name("kv_proj"), dim, Precision::Fast)?;
        let latent = r.rms_norm(latent, &name("q_a_norm"), 1, d.eps)?;
        let q = r.linear(latent, &name("q_b_proj"), heads * dim, Precision::Fast)?;
        let q = r.graph.unit_norm(q, heads, d.eps)?;
        let q = r.graph.placed_rope(q, heads, rope, place)?;
        let kv = r.rms_norm(kv, &d.key_norm(r, layer), 1, d.eps)?;
        let kv = r.graph.placed_rope(kv, 1, rope, place)?;
        let sinks = r.constants(&name("sinks"), &[heads], Form::F32)?;
        let scale = (dim as f32).sqrt().recip();
        let mixed = if kind == AttentionKind::Sliding {
            let window = Some(self.window);
            let shape = graph::Attention { window, ..graph::Attention::grouped(heads, 1, dim, scale) };
            r.graph.attention_with_sinks(q, kv, kv, shape, Some(sinks))?
        } else {
            let sparse = kind == AttentionKind::Sparse;
            let stride = self.strides[usize::from(!sparse)];
            let pool = WindowPool { window: stride, overlap: sparse, width: dim };
            let entries = self.entries(r, d, h, &|part| name(&format!("compressor.{part}")), pool)?;
            let index = if sparse { Some(self.index(r, d, [h, latent], &name, stride)?) } else { None };
            let shape = CompressedAttention {
                form: TokenForm::Shared,
                heads,
                head_dim: dim,
                scale,
                window: self.window,
                stride,
                index: index.map(|_| self.index),
            };
            r.graph.compressed_attention(CompressedInputs { q, kv, entries, index, sinks }, shape)?
        };
        // The values were rotated with the keys.
        let mixed = r.graph.placed_rope(mixed, heads, rope, Placement { inverse: true, ..place })?;
        let (groups, rank) = self.output;
        let weight = r.matrix(&name("o_a_proj"), Some(groups * rank), heads / groups * dim)?;
        let out = r.graph.grouped_linear(mixed, weight, groups, Precision::Fast)?;
        r.linear(out, &name("o_b_proj"), d.hidden_size, Precision::Fast)
    }

    /// Entries of the compressor whose modules `name` names, in the rows of the tokens that end them.
    fn entries(
        &self,
        r: &mut Recorder,
        d: &Dimensions,
        h: Value,
        name: &dyn Fn(&str) -> String,
        pool: WindowPool,
    ) -> Result<Value> {
        let [kv, gate, bias, norm] = ["kv_proj", "gate_proj", "position_bias", "kv_norm"].map(name);
        let channels = pool.channels();
        let kv = r.linear(h, &kv, channels, Precision::Fast)?;
        let gate = r.linear(h, &gate, channels, Precision::Fast)?;
        let bias = r.constants(&bias, &[pool.window, channels], Form::F32)?;
        let entries = r.graph.window_pool(kv, gate, bias, pool)?;
        let entries = r.rms_norm(entries, &norm, 1, d.eps)?;
        let place = Placement { first: pool.width - self.rotary_dim, inverse: false, stride: pool.window };
        Ok(r.graph.placed_rope(entries, 1, self.ropes[1], place)?)
    }

    /// What the indexer compares.
    fn index(
        &self,
        r: &mut Recorder,
        d: &Dimensions,
        [h, latent]: [Value; 2],
        name: &dyn Fn(&str) -> String,
        stride: usize,
    ) -> Result<IndexInputs> {
        let EntryIndex { heads, head_dim, .. } = self.index;
        let pool = WindowPool { window: stride, overlap: true, width: head_dim };
        let k = self.entries(r, d, h, &|part| name(&format!("compressor.indexer.{part}")), pool)?;
        let q = r.linear(latent, &name("compressor.indexer.q_b_proj"), heads * head_dim, Precision::Fast)?;
        let place = Placement { first: head_dim - self.rotary_dim, inverse: false, stride: 1 };
        let q = r.graph.placed_rope(q, heads, self.ropes[1], place)?;
        let weights = name("compressor.indexer.scorer.weights_proj");
        let weights = r.linear(h, &weights, heads, Precision::F32)?;
        Ok(IndexInputs { q, k, weights: Some(weights) })
    }
}

/// The rotations of sliding layers and of the others: two sets of parameters, or in published configurations two bases, of
/// which only the second is scaled, without YaRN's magnitude.
pub(in crate::models) fn ropes(
    config: &Config<'_>,
    head_dim: usize,
    rotary_dim: usize,
) -> Result<[graph::Rope; 2]> {
    let style = RopeStyle::Interleaved;
    let (main, compress) = (1e4, 1.6e5);
    let config = config.with_rope_sets_only();
    if let (Some(first), Some(second)) = (config.with_rope("main")?, config.with_rope("compress")?) {
        for set in [&first, &second] {
            let part = set.number("partial_rotary_factor")?.map(|part| (head_dim as f64 * part) as usize);
            if part.is_some_and(|channels| channels != rotary_dim) {
                let expected = format!("the {rotary_dim} of {head_dim} channels that rotate in all layers");
                return Err(set.unsupported("partial_rotary_factor", &expected));
            }
        }
        let own = rope::rotation(&first, rotary_dim, style, main)?;
        return Ok([own, rope::rotation(&second, rotary_dim, style, compress)?]);
    }
    // A base among the parameters is nobody's.
    let base = config.without_rope_objects().number("rope_theta")?.unwrap_or(main);
    let own = rope::plain(&config, rotary_dim, style, base)?;
    let theta = config.number("compress_rope_theta")?.unwrap_or(compress);
    let mut scaled = rope::scaled(&config, rotary_dim, style, theta)?;
    let yarn = config.word("rope_type")?.or(config.word("type")?).is_some_and(|kind| kind == "yarn");
    let given = config.number("attention_factor")?.is_some() || config.is_null("attention_factor");
    // llama.cpp takes YaRN's magnitude back whatever files say.
    if config.format() == Format::Gguf || yarn && !given {
        scaled.magnitude = 1.0;
    }
    Ok([own, scaled])
}
