//! Per-layer embeddings of Qwen4-Exp: n-grams are hashed to rows of a big table, and what those say is gated by each
//! residual stream and smoothed by a convolution.

use moeflux_compute::graph::{NGrams, Precision, Value, WeightId};
use serde_json::Value as Json;

use crate::checkpoint::Format;
use crate::models::blocks::Decoder;
use crate::models::config::Config;
use crate::models::names::NameMap;
use crate::models::recorder::{Form, Recorder};
use crate::{Error, Result};

/// Modules of GGUF files.
pub(super) const GGUF_TENSORS: NameMap = &[
    ("ple.key_proj", "ple_key"),
    ("ple.value_proj", "ple_value"),
    ("ple.norm_key", "ple_norm_key"),
    ("ple.norm_query", "ple_norm_query"),
    ("ple.norm_conv", "ple_norm_conv"),
    ("ple.conv1d", "ple_conv1d"),
];

/// Keys of GGUF files.
pub(super) const GGUF_KEYS: NameMap = &[
    ("ple_layers", "ple.layers"),
    ("ple_conv_kernel_size", "ple.conv_kernel"),
    ("ple_end", "ple.eos_token_id"),
    ("ple_row_width", "embedding_length_per_layer_input"),
    ("ngram_size", "ple.ngram_size"),
    ("heads_per_ngram", "ple.heads_per_ngram"),
    ("layer_multipliers", "ple.layer_multipliers"),
    ("ngram_heads_vocab_sizes", "ple.head_vocab_sizes"),
    ("ngram_heads_offsets", "ple.head_offsets"),
];

/// Hashed rows of a token, at most.
const MAX_HEADS: usize = 4096;

/// The embeddings of all layers that have some.
#[derive(Debug)]
pub(super) struct LayerEmbeddings<'a> {
    config: &'a Config<'a>,
    /// Layers, counted from one, ascending.
    layers: Vec<usize>,
    /// Width of a token's rows together.
    width: usize,
    /// Tokens of the longest n-gram; also the dilation of the convolution.
    size: usize,
    /// Rows of a token.
    heads: usize,
    kernel: usize,
    end: u32,
    /// Tables of heads have as many rows as the primes after this one, each its own.
    last_prime: u64,
    seed: u64,
    /// How n-grams are hashed, where the checkpoint says so.
    stored: Option<NGrams>,
    hidden_size: usize,
    streams: usize,
    eps: f32,
}

impl<'a> LayerEmbeddings<'a> {
    /// Reads what the configuration says of them; `None` if no layer has them.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for what is missing or does not fit.
    pub(super) fn new(config: &'a Config<'a>, d: &Decoder, streams: usize) -> Result<Option<Self>> {
        if config.format() == Format::Gguf {
            return Self::of_gguf(config, d, streams);
        }
        let mut layers = config.sizes("ple_layer_ids")?;
        layers.sort_unstable();
        layers.dedup();
        if layers.is_empty() {
            return Ok(None);
        }
        if layers[0] == 0 || layers.last().is_some_and(|last| *last > d.layers) {
            let expected = format!("layers from 1 to {}", d.layers);
            return Err(config.unsupported("ple_layer_ids", &expected));
        }
        let size = |key, default| config.optional_size(key).map(|found| found.unwrap_or(default));
        let (tokens, each) = (size("ngram_size", 3)?, size("heads_per_ngram", 8)?);
        let heads = (tokens - 1).saturating_mul(each);
        if heads == 0 || heads > MAX_HEADS {
            let expected = format!("2 or more, for at most {MAX_HEADS} heads");
            return Err(config.unsupported("ngram_size", &expected));
        }
        let width = size("ple_embed_dim", d.hidden_size)?;
        if !width.is_multiple_of(heads) {
            return Err(config.unsupported("ple_embed_dim", &format!("a multiple of the {heads} heads")));
        }
        let Some(end) = first_token(config, "eos_token_id")? else {
            return Err(config.unsupported("eos_token_id", "a token's id"));
        };
        Ok(Some(Self {
            config,
            layers,
            width,
            size: tokens,
            heads,
            kernel: size("ple_conv_kernel_size", 4)?,
            end,
            last_prime: config.positions("ngram_vocab_size_base")?.unwrap_or(20_000_000) as u64 - 1,
            seed: config.read("seed", "an integer", Json::as_u64)?.unwrap_or(1234),
            stored: None,
            hidden_size: d.hidden_size,
            streams,
            eps: d.eps,
        }))
    }

    /// The same from a GGUF file, which has one layer of them, counts layers from zero, and says how n-grams are hashed.
    fn of_gguf(config: &'a Config<'a>, d: &Decoder, streams: usize) -> Result<Option<Self>> {
        let layer = match config.sizes("ple_layers")?[..] {
            [] => return Ok(None),
            [layer] if layer < d.layers => layer,
            _ => return Err(config.unsupported("ple_layers", &format!("one layer below {}", d.layers))),
        };
        let (size, each) = (config.size("ngram_size")?, config.size("heads_per_ngram")?);
        let heads = (size - 1).saturating_mul(each);
        if heads == 0 || heads > MAX_HEADS {
            let expected = format!("2 or more, for at most {MAX_HEADS} heads");
            return Err(config.unsupported("ngram_size", &expected));
        }
        let Some(end) = config.count("ple_end")? else {
            return Err(config.unsupported("ple_end", "a token's id"));
        };
        let end = end as u32;
        let numbers = |key: &str, count: usize| -> Result<Vec<u64>> {
            let convert = |v: &Json| v.as_array()?.iter().map(Json::as_u64).collect();
            let found: Vec<u64> = config.read(key, "a list of integers", convert)?.unwrap_or_default();
            if found.len() != count {
                return Err(config.unsupported(key, &format!("{count} numbers")));
            }
            Ok(found)
        };
        let multipliers = numbers("layer_multipliers", size)?;
        let head_rows = numbers("ngram_heads_vocab_sizes", heads)?;
        if head_rows.iter().any(|rows| *rows == 0 || *rows > u32::MAX.into()) {
            return Err(config.unsupported("ngram_heads_vocab_sizes", "numbers of rows"));
        }
        let stored = NGrams { multipliers, head_rows, end };
        if numbers("ngram_heads_offsets", heads)? != firsts(&stored) {
            return Err(config.unsupported("ngram_heads_offsets", "the rows of the heads before each"));
        }
        Ok(Some(Self {
            config,
            layers: vec![layer + 1],
            width: config.size("ple_row_width")?.saturating_mul(heads),
            size,
            heads,
            kernel: config.size("ple_conv_kernel_size")?,
            end,
            last_prime: 0,
            seed: 0,
            stored: Some(stored),
            hidden_size: d.hidden_size,
            streams,
            eps: d.eps,
        }))
    }

    /// The streams x with the embeddings of `layer` added, if it has some. Layers are asked for in order.
    ///
    /// # Errors
    /// If weights are missing or do not fit.
    pub(super) fn add(&mut self, r: &mut Recorder, layer: usize, x: Value) -> Result<Value> {
        let Some(place) = self.layers.iter().position(|id| *id == layer + 1) else { return Ok(x) };
        let module = |name: &str| format!("model.layers.{layer}.ple.{name}");
        r.graph.scope(format!("layers.{layer}.ple"));
        let streams = self.streams;
        let queries = r.rms_norm_each(x, &module("norm_query"), streams, self.eps)?;
        let embedded = self.embed(r, layer, place)?;
        let keys = r.linear(embedded, &module("key_proj"), x.width(), Precision::Fast)?;
        let keys = r.rms_norm_each(keys, &module("norm_key"), streams, self.eps)?;
        let value = r.linear(embedded, &module("value_proj"), self.hidden_size, Precision::Fast)?;
        let gated = r.graph.stream_gate(keys, queries, value)?;
        let normed = r.rms_norm_each(gated, &module("norm_conv"), streams, self.eps)?;
        let taps = r.constants(&module("conv1d.weight"), &[x.width(), self.kernel], Form::F32)?;
        let smoothed = r.graph.dilated_conv1d(normed, taps, self.kernel, self.size)?;
        let added = r.graph.add(gated, smoothed)?;
        Ok(r.graph.add(x, added)?)
    }

    /// The rows of all n-grams that end with a token, of the table of the `place`th layer that has one.
    fn embed(&mut self, r: &mut Recorder, layer: usize, place: usize) -> Result<Value> {
        if let Some(ngrams) = self.stored.clone() {
            let table = r.matrix("per_layer_token_embd", None, self.width / self.heads)?;
            let rows = r.graph.matrix(table).rows;
            if ngrams.rows() > rows as u64 {
                let expected = format!("at least {} rows", ngrams.rows());
                let (path, tensor) = (self.config.path().into(), "per_layer_token_embd.weight".into());
                return Err(Error::Tensor { path, tensor, expected, got: rows.to_string() });
            }
            return Ok(r.graph.ngram_embed(vec![table], ngrams)?);
        }
        let vocab_size = self.config.size("vocab_size")? as u64;
        let head_rows: Vec<u64> = (0..self.heads).map(|_| self.next_prime()).collect();
        let ngrams = NGrams { multipliers: self.multipliers(place, vocab_size), head_rows, end: self.end };
        // Checkpoints hold what follows from the configuration, too.
        let stored = [
            ("layer_multipliers", ngrams.multipliers.clone()),
            ("ngram_heads_vocab_sizes", ngrams.head_rows.clone()),
            ("ngram_heads_offsets", firsts(&ngrams)),
        ];
        for (name, expected) in stored {
            let name = format!("model.layers.{layer}.ple.ple_embedding.{name}");
            let found = r.whole_numbers(&name, expected.len())?;
            if let Some(found) = found.filter(|found| *found != expected) {
                let (expected, got) = (format!("{expected:?}"), format!("{found:?}"));
                return Err(Error::Tensor { path: self.config.path().into(), tensor: name, expected, got });
            }
        }
        let rows = usize::try_from(ngrams.rows()).unwrap_or(usize::MAX);
        let tables = self.tables(r, layer, rows)?;
        Ok(r.graph.ngram_embed(tables, ngrams)?)
    }

    /// The parts of a layer's table of so many rows: shards, as checkpoints are published, or one tensor.
    fn tables(&self, r: &mut Recorder, layer: usize, rows: usize) -> Result<Vec<WeightId>> {
        let module = format!("model.layers.{layer}.ple.ple_embedding.ngram_embedding");
        let (width, shard) = (self.width / self.heads, |index: usize| format!("{module}.shard_{index}"));
        let size = |key, default| self.config.optional_size(key).map(|found| found.unwrap_or(default));
        let padded = rows.next_multiple_of(size("make_ngram_vocab_size_divisible_by", 128)?);
        if !r.has(&shard(0)) && !r.has(&shard(1)) {
            return Ok(vec![r.matrix(&module, Some(padded), width)?]);
        }
        // Shards are alike, but the last.
        let each = padded.div_ceil(size("split_ngram_parts", 512)?);
        let part = |first: usize| r.matrix(&shard(first / each), Some(each.min(padded - first)), width);
        (0..padded).step_by(each).map(part).collect()
    }

    /// The next prime after the last one.
    fn next_prime(&mut self) -> u64 {
        let is_prime = |n: u64| {
            let mut divisors = (3..).step_by(2).take_while(|d| d * d <= n);
            n == 2 || n > 2 && n % 2 == 1 && divisors.all(|d| !n.is_multiple_of(d))
        };
        self.last_prime = (self.last_prime + 1..).find(|n| is_prime(*n)).unwrap_or(u64::MAX);
        self.last_prime
    }

    /// Odd numbers that no token's id times one of them leaves 63 bits, from SplitMix64 (Steele et al. 2014).
    fn multipliers(&self, place: usize, vocab_size: u64) -> Vec<u64> {
        const GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;
        /// What the seeds of two layers are apart.
        const STEP: u64 = 10007;
        let half = (i64::MAX as u64 / vocab_size.max(1) / 2).max(1);
        let base = self.seed.wrapping_add(STEP.wrapping_mul(place as u64));
        let number = |index: u64| {
            let mut z = base.wrapping_add(GAMMA.wrapping_mul(index + 1)).wrapping_add(GAMMA);
            z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            2 * ((z ^ (z >> 31)) % half) + 1
        };
        (0..self.size as u64).map(number).collect()
    }
}

/// A token's id, or the first of several.
fn first_token(config: &Config<'_>, key: &str) -> Result<Option<u32>> {
    let id = |v: &Json| v.as_u64().and_then(|id| u32::try_from(id).ok());
    config.read(key, "a token's id or a list of them", |v| match v {
        Json::Array(ids) => id(ids.first()?),
        other => id(other),
    })
}

/// The first row of each head.
fn firsts(ngrams: &NGrams) -> Vec<u64> {
    let sums = ngrams.head_rows.iter().scan(0, |sum, rows| {
        *sum += rows;
        Some(*sum - rows)
    });
    sums.collect()
}
