//! OpenAI's APIs.

pub(crate) mod chat;
pub(crate) mod completions;
pub(crate) mod embeddings;
pub(crate) mod models;
pub(crate) mod responses;

use std::collections::BTreeMap;

use moeflux::Finish;
use moeflux::decoding::TokenLogprobs;
use moeflux::scheduler::{Done, Usage};
use moeflux::tokenizer::Tokenizer;
use serde_json::{Value, json};

/// Why an answer ended, in OpenAI's words; `called` if it has calls and all are complete.
fn finish_reason(done: &Done, called: bool) -> &'static str {
    match done.finish {
        _ if called => "tool_calls",
        Finish::EndOfText | Finish::Stopped => "stop",
        Finish::MaxTokens | Finish::ContextFull => "length",
    }
}

/// What the engine did for an answer, beside what interfaces prescribe.
pub(crate) fn engine_usage(usage: &Usage) -> Value {
    let decode = (usage.total.saturating_sub(usage.first_token)).as_secs_f64();
    let later_tokens = usage.completion_tokens.saturating_sub(1) as f64;
    let per_second = if decode > 0.0 { later_tokens / decode } else { 0.0 };
    json!({
        "expert_hits": usage.experts.hits,
        "expert_misses": usage.experts.misses,
        "expert_bytes_read": usage.experts.bytes_read,
        "stall_seconds": usage.experts.stall.as_secs_f64(),
        "queued_seconds": usage.queued.as_secs_f64(),
        "first_token_seconds": usage.first_token.as_secs_f64(),
        "total_seconds": usage.total.as_secs_f64(),
        "tokens_per_second": per_second,
        "drafted_tokens": usage.drafted_tokens,
        "accepted_tokens": usage.accepted_tokens,
        "preemptions": usage.preemptions,
        "seed": usage.seed,
    })
}

/// `usage` over all answers to a request, each with the number of its prompt: a prompt counts once.
fn usage<'a>(dones: impl Iterator<Item = (usize, &'a Done)>) -> Value {
    let mut prompts: BTreeMap<usize, (usize, usize)> = BTreeMap::new();
    let mut completion = 0;
    let mut engine = vec![];
    for (prompt, done) in dones {
        let (tokens, cached) = prompts.entry(prompt).or_default();
        *tokens = done.usage.prompt_tokens.max(*tokens);
        *cached = done.usage.cached_tokens.max(*cached);
        completion += done.usage.completion_tokens;
        engine.push(engine_usage(&done.usage));
    }
    let prompt: usize = prompts.values().map(|(tokens, _)| tokens).sum();
    let cached: usize = prompts.values().map(|(_, cached)| cached).sum();
    let engine = if engine.len() == 1 { engine.remove(0) } else { Value::Array(engine) };
    json!({
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "moeflux": engine,
    })
}

/// A name that no other answer has.
pub(crate) fn unique(prefix: &str) -> String {
    use std::hash::{BuildHasher, Hasher};
    // The standard library's hasher starts from the system's random numbers, and never twice from the same.
    let part = || std::collections::hash_map::RandomState::new().build_hasher().finish();
    format!("{prefix}{:016x}{:08x}", part(), part() as u32)
}

pub(crate) fn now() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

/// The bytes of a token and their text.
fn token_text(tokenizer: &Tokenizer, token: u32) -> (String, Vec<u8>) {
    let bytes = tokenizer.token_bytes(token).unwrap_or_default();
    (String::from_utf8_lossy(&bytes).into_owned(), bytes)
}

/// An entry of `logprobs.content`.
fn logprob_entry(tokenizer: &Tokenizer, logprobs: &TokenLogprobs) -> Value {
    let entry = |logprob: &moeflux::decoding::Logprob| {
        let (token, bytes) = token_text(tokenizer, logprob.token);
        json!({"token": token, "logprob": logprob.logprob, "bytes": bytes})
    };
    let mut chosen = entry(&logprobs.chosen);
    chosen["top_logprobs"] = logprobs.top.iter().map(entry).collect();
    chosen
}
