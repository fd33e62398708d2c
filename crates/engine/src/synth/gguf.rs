//! Synthetic models as GGUF files that llama.cpp opens too.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use super::vocabulary::{CHAT_TEMPLATE, END_OF_TEXT, END_OF_TURN, PRE_TOKENIZER, Vocabulary};
use super::weights::Weight;
use super::{Outcome, Plan, Recipe, pieces};
use crate::checkpoint::Encoding;
use crate::checkpoint::gguf::{Array, DEFAULT_ALIGNMENT, Metadata, TensorSpec, Value, Writer};
use crate::{Error, Result};

/// Writes the file `path`.
pub(super) fn write(
    plan: &Plan,
    path: &Path,
    threads: usize,
    progress: &mut dyn FnMut(u64) -> bool,
) -> Result<Outcome> {
    let io = |action| move |source| Error::Io { action, path: path.to_owned(), source };
    let file = File::create(path).map_err(io("create"))?;
    let mut writer = begin(plan, path, &file)?;
    let outcome = pieces::for_each(plan, threads, &mut |bytes| writer.append(bytes), progress)?;
    if outcome == Outcome::Complete {
        writer.finish()?;
        file.sync_all().map_err(io("write"))?;
    }
    Ok(outcome)
}

/// Writes what is before the weights to `out`; `path` is the file that errors name.
fn begin<W: Write>(plan: &Plan, path: &Path, out: W) -> Result<Writer<W>> {
    let spec = |w: &Weight| TensorSpec {
        name: w.name.clone(),
        encoding: Encoding::Weight(w.dtype),
        shape: w.shape.clone(),
    };
    let specs: Vec<TensorSpec> = plan.weights.iter().map(spec).collect();
    Writer::new(out, path, &metadata(&plan.recipe, path), &specs)
}

/// What is before the weights, and the alignment of each of them.
pub(super) fn header(plan: &Plan, path: &Path) -> Result<(Vec<u8>, u64)> {
    let mut header = vec![];
    begin(plan, path, &mut header)?;
    Ok((header, DEFAULT_ALIGNMENT))
}

/// The keys that llama.cpp's converter writes.
fn metadata(recipe: &Recipe, path: &Path) -> Metadata {
    let (s, vocab_size) = (&recipe.shape, recipe.shape.vocab_size());
    let mut metadata = s.parsed().gguf_metadata(path, recipe.layers);
    let mut set = |key: &str, value| drop(metadata.insert(key, value));
    let text = |text: &str| Value::String(text.to_owned());
    let number = |n: usize| Value::U32(n as u32);
    set("general.type", text("model"));
    // With spaces, as the converter writes names: llama.cpp expects certain tokens of what is called `phi-3`.
    set("general.name", Value::String(format!("{} of random weights", s.name.replace('-', " "))));
    set("general.file_type", Value::U32(recipe.encoding.file_type()));
    set("general.quantization_version", Value::U32(2));

    let vocabulary = Vocabulary::new(vocab_size);
    let (normal, control, unused) = (1, 3, 5);
    let merged = 256 + vocabulary.merges.len();
    let kind = |id: usize| match id {
        id if id < merged => normal,
        id if id < vocabulary.ordinary => unused,
        _ => control,
    };
    set("tokenizer.ggml.model", text("gpt2"));
    set("tokenizer.ggml.pre", text(PRE_TOKENIZER));
    set("tokenizer.ggml.token_type", Value::Array(Array::I32((0..vocab_size).map(kind).collect())));
    let merges = vocabulary.merges.iter().map(|(left, right)| format!("{left} {right}")).collect();
    set("tokenizer.ggml.merges", Value::Array(Array::String(merges)));
    set("tokenizer.ggml.eos_token_id", number(vocabulary.special(END_OF_TURN)));
    set("tokenizer.ggml.padding_token_id", number(vocabulary.special(END_OF_TEXT)));
    set("tokenizer.ggml.add_bos_token", Value::Bool(false));
    set("tokenizer.ggml.tokens", Value::Array(Array::String(vocabulary.tokens)));
    set("tokenizer.chat_template", text(CHAT_TEMPLATE));
    metadata
}
