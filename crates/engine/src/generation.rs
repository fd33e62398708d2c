//! [`TextModel`]: from text to text: tokenizer, chat template and engine of one checkpoint.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use moeflux_compute::backend::Backend;
use serde_json::{Map, Value, json};

use crate::batch::Part;
use crate::chat_template::ChatTemplate;
use crate::conversation::Conversation;
use crate::decoding::{Decoding, DecodingOptions, Piece};
use crate::engine::{Engine, Options, Outputs, Stats};
use crate::pictures::{self, Picture};
use crate::session::Session;
use crate::tokenizer::{AddSpecial, Tokenizer};
use crate::{Error, Result};

/// A model that reads and writes text; [`open`](crate::open()) opens one.
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

    /// Gets everything ready that the first answer would wait for: [`Engine::warm_up`], and what a template and a tokenizer
    /// make when they are first used.
    ///
    /// # Errors
    /// As [`Engine::warm_up`].
    pub fn warm_up(&mut self) -> Result<()> {
        // What a template refuses is refused when it is asked for.
        let hello = json!({"role": "user", "content": "Hello, world"});
        if self.encode_chat(&[hello]).is_err() {
            self.tokenizer.encode("Hello, world", AddSpecial::No)?;
        }
        self.engine.warm_up()
    }

    /// Token ids of a conversation, ready for the model's answer; see [`encode_chat`].
    ///
    /// # Errors
    /// If the template refuses the messages.
    pub fn encode_chat(&self, messages: &[Value]) -> Result<Vec<u32>> {
        let conversation = ChatPrompt { messages, ..ChatPrompt::default() };
        Ok(encode_chat(&self.tokenizer, self.template.as_ref(), &conversation)?.tokens)
    }

    /// An empty conversation.
    pub fn conversation(&self) -> Conversation {
        Conversation::new(self.engine.session())
    }

    /// Evaluates `prompt` and generates an answer; `on_text` gets text as soon as it is certain and says whether to go
    /// on. It also gets an empty text between the chunks of a long prompt; the answer to a prompt that it stops is empty.
    ///
    /// # Errors
    /// As [`TextModel::start`] and [`Generation::step`]. The session then holds what had been evaluated.
    pub fn generate(
        &mut self,
        session: &mut Session,
        prompt: &[u32],
        options: DecodingOptions,
        mut on_text: impl FnMut(&str) -> bool,
    ) -> Result<Generated> {
        let mut generation = self.start(session, prompt, options)?;
        while let Some(step) = generation.step()? {
            let go_on = match &step {
                Step::Prefill { .. } => on_text(""),
                Step::Text(text) => on_text(text),
            };
            if !go_on && !generation.is_finished() {
                on_text(&generation.stop()?);
            }
        }
        Ok(generation.finish())
    }

    /// Begins to generate an answer to `prompt`, appended to what `session` holds.
    ///
    /// # Errors
    /// [`Error::Option`] for an empty prompt, [`Error::Token`] and [`Error::ContextFull`], and as [`Decoding::new`].
    pub fn start<'a>(
        &'a mut self,
        session: &'a mut Session,
        prompt: &[u32],
        options: DecodingOptions,
    ) -> Result<Generation<'a>> {
        if prompt.is_empty() {
            return Err(Error::Option {
                option: "prompt",
                expected: "at least one token".to_owned(),
                got: "none".to_owned(),
            });
        }
        let decoding = Decoding::new(&self.tokenizer, prompt, options, None)?;
        self.engine.take_stats();
        self.engine.check_tokens(session.position(), prompt)?;
        Ok(Generation {
            engine: &mut self.engine,
            session,
            decoding,
            prompt: prompt.to_vec(),
            evaluated: 0,
            logits: vec![],
            prefill: None,
            next: None,
            finish: None,
        })
    }
}

/// What one step of a [`Generation`] did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// A chunk of the prompt was evaluated, not the last.
    Prefill {
        /// Tokens of the prompt evaluated so far.
        evaluated: usize,
        /// Tokens of the prompt.
        total: usize,
    },
    /// A token was generated, or several that were guessed; the text that is certain by now, which may be empty.
    Text(String),
}

/// An answer while it is being generated, a step at a time.
#[derive(Debug)]
pub struct Generation<'a> {
    engine: &'a mut Engine,
    session: &'a mut Session,
    decoding: Decoding<'a>,
    prompt: Vec<u32>,
    /// Tokens of the prompt that were evaluated.
    evaluated: usize,
    logits: Vec<f32>,
    /// What the prompt took, once it is evaluated.
    prefill: Option<Stats>,
    /// The token to evaluate next.
    next: Option<u32>,
    finish: Option<Finish>,
}

impl Generation<'_> {
    /// Evaluates a chunk of the prompt or a token; `None` at the end.
    ///
    /// # Errors
    /// As [`Engine::eval`] and [`Decoding::next`].
    pub fn step(&mut self) -> Result<Option<Step>> {
        if self.finish.is_some() {
            return Ok(None);
        }
        let total = self.prompt.len();
        if self.evaluated < total || self.prefill.is_none() {
            let rest = &self.prompt[self.evaluated..];
            let at = (&*self.session, self.session.position());
            let end = self.evaluated + self.engine.uncut(at, (&[], rest), self.engine.chunk());
            let chunk = &self.prompt[self.evaluated..end];
            self.logits = self.engine.eval(self.session, chunk, Outputs::Last)?;
            self.evaluated = end;
            if end < total {
                return Ok(Some(Step::Prefill { evaluated: end, total }));
            }
            // Templates may show an answer otherwise once it is past: the conversation then goes on from here.
            self.session.checkpoint();
            self.prefill = Some(self.engine.take_stats());
        }
        let mut piece = match self.next.take() {
            Some(token) => self.decode(token)?,
            None => self.decoding.next(&self.logits)?,
        };
        if piece.finish.is_none() && self.session.position() == self.engine.context() {
            piece = self.decoding.finish(piece, Finish::ContextFull)?;
        }
        (self.finish, self.next) = (piece.finish, piece.token);
        Ok(Some(Step::Text(piece.text)))
    }

    /// Evaluates a token and chooses the next, or several where guesses are right.
    fn decode(&mut self, token: u32) -> Result<Piece> {
        let room = room_to_guess(&self.decoding, self.session, self.engine.context());
        let draft = self.engine.draft(self.session, token, room);
        if draft.is_empty() {
            return self.decode_one(token);
        }
        let mut pieces = vec![];
        self.engine.verify(self.session, token, &draft, &mut self.decoding, &mut pieces)?;
        pieces.into_iter().try_fold(Piece::default(), |before, piece| {
            let piece = piece?;
            Ok(Piece { text: before.text + &piece.text, ..piece })
        })
    }

    /// Evaluates a token and chooses the next.
    fn decode_one(&mut self, token: u32) -> Result<Piece> {
        if !self.engine.draws_tokens() || !self.decoding.is_drawn() {
            let start = Instant::now();
            self.logits = self.engine.eval(self.session, &[token], Outputs::Last)?;
            self.engine.note_single_step(start.elapsed());
            return self.decoding.next(&self.logits);
        }
        let part = Part { session: &mut *self.session, tokens: &[token], outputs: Some(Outputs::Last) };
        let vocab_size = self.decoding.vocab_size();
        let (decoding, start) = (&mut self.decoding, Instant::now());
        let chosen = self.engine.eval_and_draw(&mut [part], &mut || vec![decoding.draw()], vocab_size)?;
        self.engine.note_single_step(start.elapsed());
        if let Some(token) = chosen.into_iter().next().flatten() {
            return self.decoding.next_drawn(token);
        }
        self.logits = self.engine.read_logits(0)?;
        self.decoding.next(&self.logits)
    }

    /// Whether the answer is complete.
    pub fn is_finished(&self) -> bool {
        self.finish.is_some()
    }

    /// Ends the answer here; returns text that was held back.
    ///
    /// # Errors
    /// If the last tokens cannot be decoded.
    pub fn stop(&mut self) -> Result<String> {
        self.finish = Some(Finish::Stopped);
        Ok(self.decoding.finish(Piece::default(), Finish::Stopped)?.text)
    }

    /// What was generated. An answer that was not complete counts as stopped.
    pub fn finish(self) -> Generated {
        let rest = self.engine.take_stats();
        let (prefill, decode) = match self.prefill {
            Some(prefill) => (prefill, rest),
            None => (rest, Stats::default()),
        };
        Generated {
            tokens: self.decoding.tokens().to_vec(),
            finish: self.finish.unwrap_or(Finish::Stopped),
            prefill,
            decode,
            first_token: self.decoding.first_token(),
        }
    }
}

/// How many tokens after the next one may be guessed: none that the answer or the context has no room for, and the last position
/// is left to a step of its own.
pub(crate) fn room_to_guess(decoding: &Decoding<'_>, session: &Session, context: usize) -> usize {
    let positions = context.saturating_sub(session.position() + 2);
    positions.min(decoding.tokens_left().saturating_sub(1))
}

/// What a chat template turns into a prompt.
#[derive(Debug, Clone, Copy, Default)]
pub struct ChatPrompt<'a> {
    /// Objects with `role` and `content`. Special tokens that are written out in them are text.
    pub messages: &'a [Value],
    /// More for the system message, in which special tokens are such.
    pub preface: Option<&'a str>,
    /// JSON array of the functions that the model may call.
    pub tools: Option<&'a Value>,
    /// Further variables of the template, as in `enable_thinking`.
    pub variables: Option<&'a Map<String, Value>>,
    /// What the image parts of messages show, in their order.
    pub pictures: &'a [Arc<Picture>],
}

/// A conversation as the model reads it.
#[derive(Debug, Clone, PartialEq)]
pub struct EncodedChat {
    /// Token ids, ready for the model's answer.
    pub tokens: Vec<u32>,
    /// The text that they stand for.
    pub text: String,
    /// What it shows, which must be alive while the tokens are evaluated.
    pub pictures: Vec<Arc<Picture>>,
}

/// Renders and encodes a conversation; without a chat template, its last message alone.
///
/// # Errors
/// If the template refuses the messages, or makes no text of them.
pub fn encode_chat(
    tokenizer: &Tokenizer,
    template: Option<&ChatTemplate>,
    conversation: &ChatPrompt<'_>,
) -> Result<EncodedChat> {
    encode_chat_within(tokenizer, template, conversation, usize::MAX)
}

/// Adds a text to the system message, if need be a new one.
fn append_to_system(text: &str, messages: &mut Vec<Value>) {
    match messages.first_mut().filter(|first| first["role"] == "system") {
        Some(system) => {
            let before = system["content"].as_str().unwrap_or_default();
            system["content"] = json!(format!("{before}\n\n{text}").trim_start());
        }
        None => messages.insert(0, json!({"role": "system", "content": text})),
    }
}

/// As [`encode_chat`], for a context of so many positions: what is too long by far is refused before it is tokenised whole.
pub(crate) fn encode_chat_within(
    tokenizer: &Tokenizer,
    template: Option<&ChatTemplate>,
    conversation: &ChatPrompt<'_>,
    context: usize,
) -> Result<EncodedChat> {
    let ChatPrompt { messages, preface, tools, variables, pictures } = *conversation;
    let mut messages = Value::Array(messages.to_vec());
    tokenizer.mark_outside(&mut messages);
    let Some(template) = template else {
        let last = messages.as_array().and_then(|messages| messages.last());
        let text = last.and_then(|m| m.get("content")).and_then(Value::as_str).unwrap_or_default();
        let (tokens, text) = tokenizer.encode_marked_within(text.to_owned(), AddSpecial::Yes, context)?;
        return Ok(EncodedChat {
            tokens: pictures::place(tokens, pictures)?,
            text,
            pictures: pictures.to_vec(),
        });
    };
    if let (Some(preface), Some(messages)) = (preface, messages.as_array_mut()) {
        append_to_system(preface, messages);
    }
    let mut tools = tools.cloned();
    tools.iter_mut().for_each(|tools| tokenizer.mark_outside(tools));
    let none = Map::new();
    let text = template.render(&messages, tools.as_ref(), true, variables.unwrap_or(&none))?;
    // Templates write the special tokens themselves.
    let (tokens, text) = tokenizer.encode_marked_within(text, AddSpecial::No, context)?;
    if tokens.is_empty() {
        let reason = "it makes no text of these messages".to_owned();
        return Err(Error::ChatTemplate { path: template.path().to_owned(), reason });
    }
    Ok(EncodedChat { tokens: pictures::place(tokens, pictures)?, text, pictures: pictures.to_vec() })
}
