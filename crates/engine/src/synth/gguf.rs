//! Synthetic models as GGUF files that llama.cpp opens too.

use std::fs::File;
use std::path::Path;

use super::shapes::Architecture;
use super::vocabulary::{CHAT_TEMPLATE, END_OF_TEXT, END_OF_TURN, PRE_TOKENIZER, Vocabulary};
use super::weights::{Role, Weight};
use super::{Encoding, Outcome, Plan, Recipe, pieces};
use crate::checkpoint::gguf::{Array, Metadata, TensorSpec, Value, Writer};
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
    let spec = |w: &Weight| TensorSpec { name: name(w), dtype: w.dtype, shape: w.shape.clone() };
    let specs: Vec<TensorSpec> = plan.weights.iter().map(spec).collect();
    let mut writer = Writer::new(&file, path, &metadata(&plan.recipe, path), &specs)?;
    let outcome = pieces::for_each(plan, threads, &mut |bytes| writer.append(bytes), progress)?;
    if outcome == Outcome::Complete {
        writer.finish()?;
        file.sync_all().map_err(io("write"))?;
    }
    Ok(outcome)
}

fn name(weight: &Weight) -> String {
    let module = match weight.role {
        Role::Embedding => return "token_embd.weight".to_owned(),
        Role::Head => return "output.weight".to_owned(),
        Role::FinalNorm => return "output_norm.weight".to_owned(),
        Role::AttentionNorm => "attn_norm",
        Role::Query => "attn_q",
        Role::Key => "attn_k",
        Role::Value => "attn_v",
        Role::AttentionOut => "attn_output",
        Role::QueryNorm => "attn_q_norm",
        Role::KeyNorm => "attn_k_norm",
        Role::ExpertsNorm => "ffn_norm",
        Role::Router => "ffn_gate_inp",
        Role::ExpertGate => "ffn_gate_exps",
        Role::ExpertUp => "ffn_up_exps",
        Role::ExpertDown => "ffn_down_exps",
    };
    format!("blk.{}.{module}.weight", weight.layer)
}

/// Values of llama.cpp's `general.file_type`.
fn file_type(encoding: Encoding) -> u32 {
    match encoding {
        Encoding::Q4KM => 15,
        Encoding::Q8_0 => 7,
        _ => 1,
    }
}

/// The keys that llama.cpp's converter writes.
fn metadata(recipe: &Recipe, path: &Path) -> Metadata {
    let s = &recipe.shape;
    let prefix = match s.architecture {
        Architecture::Qwen3Moe => "qwen3moe",
        Architecture::Mixtral => "llama",
    };
    let mut metadata = Metadata::new(path);
    let mut set = |key: &str, value| drop(metadata.insert(key, value));
    let text = |text: &str| Value::String(text.to_owned());
    let number = |n: usize| Value::U32(n as u32);
    set("general.architecture", text(prefix));
    set("general.type", text("model"));
    set("general.name", Value::String(format!("{} of random weights", s.name)));
    set("general.file_type", Value::U32(file_type(recipe.encoding)));
    set("general.quantization_version", Value::U32(2));
    let sizes = [
        ("block_count", recipe.layers),
        ("context_length", s.max_position_embeddings),
        ("embedding_length", s.hidden_size),
        ("feed_forward_length", s.intermediate_size),
        ("attention.head_count", s.num_attention_heads),
        ("attention.head_count_kv", s.num_key_value_heads),
        ("attention.key_length", s.head_dim),
        ("attention.value_length", s.head_dim),
        ("rope.dimension_count", s.head_dim),
        ("expert_count", s.num_experts),
        ("expert_used_count", s.num_experts_per_tok),
        ("expert_feed_forward_length", s.moe_intermediate_size),
        ("vocab_size", s.vocab_size),
    ];
    for (key, value) in sizes {
        set(&format!("{prefix}.{key}"), number(value));
    }
    set(&format!("{prefix}.rope.freq_base"), Value::F32(s.rope_theta));
    set(&format!("{prefix}.attention.layer_norm_rms_epsilon"), Value::F32(s.rms_norm_eps));

    let vocabulary = Vocabulary::new(s.vocab_size);
    let (normal, control, unused) = (1, 3, 5);
    let merged = 256 + vocabulary.merges.len();
    let kind = |id: usize| match id {
        id if id < merged => normal,
        id if id < vocabulary.ordinary => unused,
        _ => control,
    };
    set("tokenizer.ggml.model", text("gpt2"));
    set("tokenizer.ggml.pre", text(PRE_TOKENIZER));
    set("tokenizer.ggml.token_type", Value::Array(Array::I32((0..s.vocab_size).map(kind).collect())));
    let merges = vocabulary.merges.iter().map(|(left, right)| format!("{left} {right}")).collect();
    set("tokenizer.ggml.merges", Value::Array(Array::String(merges)));
    set("tokenizer.ggml.eos_token_id", number(vocabulary.special(END_OF_TURN)));
    set("tokenizer.ggml.padding_token_id", number(vocabulary.special(END_OF_TEXT)));
    set("tokenizer.ggml.add_bos_token", Value::Bool(false));
    set("tokenizer.ggml.tokens", Value::Array(Array::String(vocabulary.tokens)));
    set("tokenizer.chat_template", text(CHAT_TEMPLATE));
    metadata
}
