//! Synthetic models as folders: safetensors shards, configuration, tokenizer.

use std::fs::File;
use std::path::Path;

use moeflux_compute::DType;
use serde_json::{Map, Value, json};

use super::vocabulary::{CHAT_TEMPLATE, END_OF_TEXT, END_OF_TURN, PRE_TOKENIZER, SPECIAL_TOKENS, Vocabulary};
use super::weights::Weight;
use super::{Outcome, Plan, cut_layers, hub, mlx, pieces};
use crate::checkpoint::Format;
use crate::checkpoint::safetensors::{ElementType, TensorSpec, Writer};
use crate::tokenizer::pre_tokenizers;
use crate::{Error, Result};

/// Most bytes of a shard, unless one weight is larger.
const SHARD_BYTES: u64 = 4 << 30;

/// What headers say beside tensors.
fn metadata(plan: &Plan) -> [(&'static str, &'static str); 1] {
    let mlx = plan.recipe.encoding.format() == Format::Mlx;
    [("format", if mlx { "mlx" } else { "pt" })]
}

/// Tensors of one file.
#[derive(Debug, Default)]
struct Shard {
    specs: Vec<TensorSpec>,
    bytes: u64,
}

/// Fills the folder `folder`.
pub(super) fn write(
    plan: &Plan,
    folder: &Path,
    threads: usize,
    progress: &mut dyn FnMut(u64) -> bool,
) -> Result<Outcome> {
    let shards = shards(plan);
    let file_name = |i: usize| match shards.len() {
        1 => "model.safetensors".to_owned(),
        n => format!("model-{:05}-of-{n:05}.safetensors", i + 1),
    };
    let vocabulary = Vocabulary::new(plan.recipe.shape.vocab_size());
    write_json(&folder.join("config.json"), &config(plan, &vocabulary))?;
    write_json(&folder.join("tokenizer.json"), &tokenizer(&vocabulary))?;
    write_json(&folder.join("tokenizer_config.json"), &tokenizer_config(&vocabulary))?;
    let names = shards.iter().enumerate();
    let names =
        names.flat_map(|(i, s)| s.specs.iter().map(move |spec| (spec.name.clone(), file_name(i).into())));
    let weight_map: Map<String, Value> = names.collect();
    let index = json!({ "metadata": { "total_size": plan.bytes() }, "weight_map": weight_map });
    write_json(&folder.join("model.safetensors.index.json"), &index)?;

    let mut shards = shards.iter().enumerate();
    let mut open = || -> Result<Option<ShardFile>> {
        shards
            .next()
            .map(|(i, shard)| ShardFile::create(&folder.join(file_name(i)), &metadata(plan), &shard.specs))
            .transpose()
    };
    let mut current = open()?;
    let mut append = |bytes: &[u8]| -> Result<()> {
        if current.as_ref().is_some_and(|file| file.writer.current().is_none()) {
            if let Some(full) = current.take() {
                full.finish()?;
            }
            current = open()?;
        }
        let file = current.as_mut().expect("as many shards as the weights need");
        file.writer.append(bytes)
    };
    let outcome = pieces::for_each(plan, threads, &mut append, progress)?;
    if let (Outcome::Complete, Some(last)) = (outcome, current) {
        last.finish()?;
    }
    Ok(outcome)
}

struct ShardFile {
    path: std::path::PathBuf,
    writer: Writer<File>,
}

impl ShardFile {
    fn create(path: &Path, metadata: &[(&str, &str)], specs: &[TensorSpec]) -> Result<Self> {
        let file = File::create(path).map_err(|source| Error::Io {
            action: "create",
            path: path.to_owned(),
            source,
        })?;
        Ok(Self { path: path.to_owned(), writer: Writer::new(file, path, metadata, specs)? })
    }

    fn finish(self) -> Result<()> {
        let file = self.writer.finish()?;
        file.sync_all().map_err(|source| Error::Io { action: "write", path: self.path, source })
    }
}

fn write_json(path: &Path, value: &Value) -> Result<()> {
    let write = || {
        let mut file = File::create(path)?;
        serde_json::to_writer_pretty(std::io::BufWriter::new(&mut file), value)?;
        file.sync_all()
    };
    write().map_err(|source| Error::Io { action: "write", path: path.to_owned(), source })
}

/// What is before the weights if all of them are in the file `path`, their alignment, and the model's configuration.
pub(super) fn header(plan: &Plan, path: &Path) -> Result<(Vec<u8>, u64, Value)> {
    let all: Vec<TensorSpec> = plan.weights.iter().flat_map(|weight| specs(plan, weight)).collect();
    let mut header = vec![];
    Writer::new(&mut header, path, &metadata(plan), &all)?;
    let vocabulary = Vocabulary::new(plan.recipe.shape.vocab_size());
    Ok((header, 1, config(plan, &vocabulary)))
}

/// The tensors that store `weight`, in the order of its planes.
fn specs(plan: &Plan, weight: &Weight) -> Vec<TensorSpec> {
    match plan.recipe.encoding.format() {
        Format::HuggingFace => hub::specs(plan.recipe.encoding, weight),
        _ => mlx::specs(weight),
    }
}

/// The tensor that stores plain floats.
pub(super) fn plain_spec(weight: &Weight) -> TensorSpec {
    let dtype = if weight.dtype == DType::F32 { ElementType::F32 } else { ElementType::BF16 };
    TensorSpec { name: weight.name.clone(), dtype, shape: weight.shape.clone() }
}

/// Divides the weights over files without cutting one.
fn shards(plan: &Plan) -> Vec<Shard> {
    let mut shards = vec![Shard::default()];
    for weight in &plan.weights {
        let specs = specs(plan, weight);
        let bytes = specs.iter().filter_map(TensorSpec::bytes).sum::<u64>();
        if shards.last().is_some_and(|s| s.bytes > 0 && s.bytes + bytes > SHARD_BYTES) {
            shards.push(Shard::default());
        }
        if let Some(shard) = shards.last_mut() {
            shard.specs.extend(specs);
            shard.bytes += bytes;
        }
    }
    shards
}

/// The module whose weight it is.
pub(super) fn module(weight: &Weight) -> &str {
    weight.name.strip_suffix(".weight").unwrap_or(&weight.name)
}

fn config(plan: &Plan, vocabulary: &Vocabulary) -> Value {
    let mut config = plan.recipe.shape.parsed().config().clone();
    cut_layers(&mut config, plan.recipe.layers);
    config["bos_token_id"] = Value::Null;
    config["eos_token_id"] = vocabulary.special(END_OF_TURN).into();
    config["pad_token_id"] = vocabulary.special(END_OF_TEXT).into();
    config["torch_dtype"] = "bfloat16".into();
    match plan.recipe.encoding.format() {
        Format::HuggingFace => hub::describe(plan.recipe.encoding, &mut config),
        _ => mlx::describe(&plan.weights, &mut config),
    }
    config
}

fn tokenizer(vocabulary: &Vocabulary) -> Value {
    let ids = vocabulary.tokens[..vocabulary.ordinary].iter().enumerate();
    let vocab: Map<String, Value> = ids.map(|(id, token)| (token.clone(), id.into())).collect();
    let added: Vec<Value> = SPECIAL_TOKENS
        .iter()
        .map(|token| {
            let mut entry = added_token(token);
            entry["id"] = vocabulary.special(token).into();
            entry
        })
        .collect();
    let patterns = pre_tokenizers::by_name(PRE_TOKENIZER).map_or(&[][..], |rule| rule.patterns);
    let mut steps: Vec<Value> = patterns
        .iter()
        .map(|pattern| {
            json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false })
        })
        .collect();
    let byte_level =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false });
    steps.push(byte_level.clone());
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": { "type": "Sequence", "pretokenizers": steps },
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": false,
            "vocab": vocab,
            "merges": vocabulary.merges,
        },
    })
}

fn added_token(text: &str) -> Value {
    json!({
        "content": text,
        "lstrip": false,
        "normalized": false,
        "rstrip": false,
        "single_word": false,
        "special": true,
    })
}

fn tokenizer_config(vocabulary: &Vocabulary) -> Value {
    let added = SPECIAL_TOKENS.map(|token| (vocabulary.special(token).to_string(), added_token(token)));
    json!({
        "add_bos_token": false,
        "added_tokens_decoder": Map::from_iter(added),
        "bos_token": null,
        "chat_template": CHAT_TEMPLATE,
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": null,
    })
}
