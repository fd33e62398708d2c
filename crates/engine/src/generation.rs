//! [`TextModel`]: from text to text: tokenizer, chat template and engine of one checkpoint.

use std::path::Path;
use std::time::{Duration, Instant};

use moeflux_compute::backend::Backend;
use serde_json::{Map, Value};

use crate::chat_template::ChatTemplate;
use crate::engine::{Engine, Options, Outputs, Stats};
use crate::sampler::Sampler;
use crate::session::Session;
use crate::tokenizer::{AddSpecial, Tokenizer};
use crate::{Error, Result};

/// A model that reads and writes text.
#[derive(Debug)]
pub struct TextModel {
    /// The model itself.
    pub engine: Engine,
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
    /// Its chat template, if it has one.
    pub template: Option<ChatTemplate>,
}

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// The model ended its answer.
    EndOfText,
    /// As many tokens as were asked for.
    MaxTokens,
    /// The context is full.
    ContextFull,
    /// The caller said so.
    Stopped,
}

/// What a generation did.
#[derive(Debug, Clone)]
pub struct Generated {
    /// Tokens generated, without the one that ended the answer.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub finish: Finish,
    /// Evaluating the prompt.
    pub prefill: Stats,
    /// Generating.
    pub decode: Stats,
    /// From the call to the first token.
    pub first_token: Duration,
}

impl TextModel {
    /// Opens the checkpoint at `path`; see [`Engine::open`].
    ///
    /// # Errors
    /// As [`Engine::open`], or if its tokenizer or chat template cannot be used.
    pub fn open(
        path: &Path,
        backend: &dyn Backend,
        options: &Options,
        progress: impl FnMut(u64, u64),
    ) -> Result<Self> {
        let engine = Engine::open(path, backend, options, progress)?;
        let checkpoint = engine.model().checkpoint();
        let tokenizer = Tokenizer::from_checkpoint(checkpoint)?;
        let (tokens, vocab_size) = (tokenizer.vocab_size(), engine.model().graph.vocab_size());
        if tokens > vocab_size {
            let reason = format!("expected at most the model's {vocab_size} tokens, got {tokens}");
            return Err(Error::Tokenizer { path: checkpoint.path().into(), reason });
        }
        let template = ChatTemplate::from_checkpoint(checkpoint)?
            .map(|template| template.with_special_tokens(tokenizer.special_tokens()));
        Ok(Self { engine, tokenizer, template })
    }

    /// Token ids of a conversation, ready for the model's answer; without a chat template, of the last message.
    ///
    /// # Errors
    /// If the template refuses the messages.
    pub fn encode_chat(&self, messages: &[Value]) -> Result<Vec<u32>> {
        let Some(template) = &self.template else {
            let text =
                messages.last().and_then(|m| m.get("content")).and_then(Value::as_str).unwrap_or_default();
            return self.tokenizer.encode(text, AddSpecial::Yes);
        };
        let text = template.render(&Value::Array(messages.to_vec()), None, true, &Map::new())?;
        // Templates write the special tokens themselves.
        self.tokenizer.encode(&text, AddSpecial::No)
    }

    /// Evaluates `prompt` and generates up to `max_tokens` tokens; `on_text` gets text as soon as it is complete and
    /// says whether to go on.
    ///
    /// # Errors
    /// As [`Engine::eval`] and [`Sampler::sample`]. The session then holds what had been evaluated.
    pub fn generate(
        &mut self,
        session: &mut Session,
        prompt: &[u32],
        sampler: &mut Sampler,
        max_tokens: usize,
        mut on_text: impl FnMut(&str) -> bool,
    ) -> Result<Generated> {
        let start = Instant::now();
        self.engine.take_stats();
        let mut logits = self.engine.eval(session, prompt, Outputs::Last)?;
        let prefill = self.engine.take_stats();
        prompt.iter().for_each(|token| sampler.accept(*token));
        let mut text = self.tokenizer.decode_stream_after(prompt, true)?;
        let mut tokens = vec![];
        let mut first_token = Duration::ZERO;
        // Padding rows of the vocabulary have no text.
        let usable = self.tokenizer.vocab_size();
        let finish = loop {
            if tokens.len() == max_tokens {
                break Finish::MaxTokens;
            }
            let token = sampler.sample(&logits[..usable])?;
            if tokens.is_empty() {
                first_token = start.elapsed();
            }
            if self.tokenizer.eos_ids().contains(&token) {
                break Finish::EndOfText;
            }
            tokens.push(token);
            sampler.accept(token);
            let piece = text.push(token)?;
            if !on_text(&piece) {
                break Finish::Stopped;
            }
            if session.position() == self.engine.context() {
                break Finish::ContextFull;
            }
            if tokens.len() < max_tokens {
                logits = self.engine.eval(session, &[token], Outputs::Last)?;
            }
        };
        on_text(&text.finish()?);
        Ok(Generated { tokens, finish, prefill, decode: self.engine.take_stats(), first_token })
    }
}
