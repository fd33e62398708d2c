//! [`TextModel`]: from text to text: tokenizer, chat template and engine of one checkpoint.

use std::path::Path;
use std::time::Duration;

use moeflux_compute::backend::Backend;
use serde_json::{Map, Value};

use crate::chat_template::ChatTemplate;
use crate::decoding::{Decoding, DecodingOptions, Piece};
use crate::engine::{Engine, Options, Outputs, Stats};
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
    /// A stop text came, or the caller said so.
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

    /// Token ids of a conversation, ready for the model's answer; see [`encode_chat`].
    ///
    /// # Errors
    /// If the template refuses the messages.
    pub fn encode_chat(&self, messages: &[Value]) -> Result<Vec<u32>> {
        let conversation = Conversation { messages, ..Conversation::default() };
        Ok(encode_chat(&self.tokenizer, self.template.as_ref(), &conversation)?.tokens)
    }

    /// Evaluates `prompt` and generates an answer; `on_text` gets text as soon as it is certain and says whether to go
    /// on. It also gets an empty text between the chunks of a long prompt; the answer to a prompt that it stops is empty.
    ///
    /// # Errors
    /// As [`Engine::eval`] and [`Decoding::next`]. The session then holds what had been evaluated.
    pub fn generate(
        &mut self,
        session: &mut Session,
        prompt: &[u32],
        options: DecodingOptions,
        mut on_text: impl FnMut(&str) -> bool,
    ) -> Result<Generated> {
        let mut decoding = Decoding::new(&self.tokenizer, prompt, options, None)?;
        self.engine.take_stats();
        self.engine.check_tokens(session.position(), prompt)?;
        let chunks = prompt.chunks(self.engine.chunk());
        let last = chunks.len().saturating_sub(1);
        let mut logits = vec![];
        for (index, chunk) in chunks.enumerate() {
            logits = self.engine.eval(session, chunk, Outputs::Last)?;
            if index < last && !on_text("") {
                return Ok(Generated {
                    tokens: vec![],
                    finish: Finish::Stopped,
                    prefill: self.engine.take_stats(),
                    decode: Stats::default(),
                    first_token: Duration::ZERO,
                });
            }
        }
        // Templates may show an answer otherwise once it is past: the conversation then goes on from here.
        session.checkpoint();
        let prefill = self.engine.take_stats();
        let finish = loop {
            let mut piece = decoding.next(&logits)?;
            if piece.finish.is_none() && session.position() == self.engine.context() {
                piece = decoding.finish(piece, Finish::ContextFull)?;
            }
            let go_on = on_text(&piece.text);
            match (piece.finish, piece.token) {
                (Some(finish), _) => break finish,
                (None, Some(token)) if go_on => {
                    logits = self.engine.eval(session, &[token], Outputs::Last)?;
                }
                _ => {
                    on_text(&decoding.finish(Piece::default(), Finish::Stopped)?.text);
                    break Finish::Stopped;
                }
            }
        };
        Ok(Generated {
            tokens: decoding.tokens().to_vec(),
            finish,
            prefill,
            decode: self.engine.take_stats(),
            first_token: decoding.first_token(),
        })
    }
}

/// What a chat template turns into a prompt.
#[derive(Debug, Clone, Copy, Default)]
pub struct Conversation<'a> {
    /// Objects with `role` and `content`.
    pub messages: &'a [Value],
    /// JSON array of the functions that the model may call.
    pub tools: Option<&'a Value>,
    /// Further variables of the template, as in `enable_thinking`.
    pub variables: Option<&'a Map<String, Value>>,
}

/// A conversation as the model reads it.
#[derive(Debug, Clone, PartialEq)]
pub struct EncodedChat {
    /// Token ids, ready for the model's answer.
    pub tokens: Vec<u32>,
    /// The text that they stand for.
    pub text: String,
}

/// Renders and encodes a conversation; without a chat template, its last message alone.
///
/// # Errors
/// If the template refuses the messages.
pub fn encode_chat(
    tokenizer: &Tokenizer,
    template: Option<&ChatTemplate>,
    conversation: &Conversation<'_>,
) -> Result<EncodedChat> {
    encode_chat_within(tokenizer, template, conversation, usize::MAX)
}

/// As [`encode_chat`], for a context of so many positions: what is too long by far is refused before it is tokenised whole.
pub(crate) fn encode_chat_within(
    tokenizer: &Tokenizer,
    template: Option<&ChatTemplate>,
    conversation: &Conversation<'_>,
    context: usize,
) -> Result<EncodedChat> {
    let Conversation { messages, tools, variables } = *conversation;
    let Some(template) = template else {
        let text = messages.last().and_then(|m| m.get("content")).and_then(Value::as_str).unwrap_or_default();
        let tokens = tokenizer.encode_within(text, AddSpecial::Yes, context)?;
        return Ok(EncodedChat { tokens, text: text.to_owned() });
    };
    let none = Map::new();
    let messages = Value::Array(messages.to_vec());
    let text = template.render(&messages, tools, true, variables.unwrap_or(&none))?;
    // Templates write the special tokens themselves.
    Ok(EncodedChat { tokens: tokenizer.encode_within(&text, AddSpecial::No, context)?, text })
}
