//! [`Conversation`]: messages, and the session that holds their tokens, so that every turn evaluates only what is new.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value, json};

use crate::decoding::DecodingOptions;
use crate::generation::{ChatPrompt, Generated, Generation, Step, TextModel, encode_chat};
use crate::pictures::Picture;
use crate::reasoning::{Passage, ReasoningForm, ReasoningSplit};
use crate::session::Session;
use crate::tokenizer::AddSpecial;
use crate::{Error, Result};

/// Maximum tokens in an answer unless options say otherwise.
const MAX_TOKENS: usize = 1024;

/// How a message is answered.
#[derive(Debug, Clone)]
pub struct AnswerOptions {
    /// Sampling, limits and stop texts. Special tokens that mark reasoning are always visible.
    pub decoding: DecodingOptions,
    /// Variables of the chat template beside the messages, as in `enable_thinking`.
    pub variables: Map<String, Value>,
}

/// Greedy, at most 1,024 tokens.
impl Default for AnswerOptions {
    fn default() -> Self {
        let decoding = DecodingOptions { max_tokens: MAX_TOKENS, ..DecodingOptions::default() };
        Self { decoding, variables: Map::new() }
    }
}

/// An answer that was given.
#[derive(Debug, Clone)]
pub struct Answered {
    /// Tokens, why it ended, and statistics.
    pub generated: Generated,
    /// Tokens of the prompt that the session held already.
    pub reused: usize,
    /// What was answered, without reasoning.
    pub text: String,
    /// What the model thought.
    pub reasoning: String,
}

/// What happens while a message is answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// So many tokens of the prompt have been evaluated, of as many as are new.
    Prefill {
        /// Tokens evaluated.
        evaluated: usize,
        /// Tokens to evaluate.
        total: usize,
    },
    /// A piece of the answer.
    Passage(Passage),
}

/// A conversation with a [`TextModel`].
#[derive(Debug)]
pub struct Conversation {
    messages: Vec<Value>,
    /// What the image parts of messages show, in their order.
    pictures: Vec<Arc<Picture>>,
    /// What the next message is to show.
    attached: Vec<Arc<Picture>>,
    session: Session,
}

/// Image parts of messages.
fn image_parts(messages: &[Value]) -> usize {
    let parts = messages.iter().filter_map(|message| message["content"].as_array()).flatten();
    parts.filter(|part| part["type"] == "image").count()
}

impl Conversation {
    /// An empty one; see [`TextModel::conversation`].
    pub(crate) fn new(session: Session) -> Self {
        Self { messages: vec![], pictures: vec![], attached: vec![], session }
    }

    /// All messages: objects with `role` and `content`.
    pub fn messages(&self) -> &[Value] {
        &self.messages
    }

    /// Has the next message of the user show a picture, before its text.
    pub fn attach(&mut self, picture: Arc<Picture>) {
        self.attached.push(picture);
    }

    /// Appends a message without answering it, such as an example or what was said elsewhere.
    pub fn push(&mut self, role: &str, content: &str) {
        self.messages.push(json!({"role": role, "content": content}));
    }

    /// Tokens that the model has read and written.
    pub fn position(&self) -> usize {
        self.session.position()
    }

    /// The system message.
    pub fn system(&self) -> Option<&str> {
        let first = self.messages.first().filter(|message| message["role"] == "system")?;
        first["content"].as_str()
    }

    /// Puts another system message in the place of the present one; an empty one removes it.
    pub fn set_system(&mut self, text: &str) {
        if self.system().is_some() {
            self.messages.remove(0);
        }
        if !text.is_empty() {
            self.messages.insert(0, json!({"role": "system", "content": text}));
        }
    }

    /// Takes back the user's last message and what followed it; returns the message, `None` if there is none. What the
    /// session holds of it is left out of the next evaluation. Pictures that it showed are attached again.
    pub fn take_back(&mut self) -> Option<String> {
        let last = self.messages.iter().rposition(|message| message["role"] == "user")?;
        let taken = self.messages.split_off(last);
        let left = image_parts(&self.messages);
        self.attached.extend(self.pictures.drain(left.min(self.pictures.len())..));
        let content = &taken[0]["content"];
        let parts = || content.as_array()?.iter().find_map(|part| part["text"].as_str());
        content.as_str().or_else(parts).map(str::to_owned)
    }

    /// Forgets everything but the system message.
    ///
    /// # Errors
    /// As [`Engine::truncate`](crate::Engine::truncate).
    pub fn reset(&mut self, model: &mut TextModel) -> Result<()> {
        self.messages.retain(|message| message["role"] == "system");
        self.pictures.clear();
        self.attached.clear();
        model.engine.truncate(&mut self.session, 0)
    }

    /// Writes messages and session to `file`.
    ///
    /// # Errors
    /// As [`Engine::save`](crate::Engine::save).
    pub fn save(&self, model: &TextModel, file: &Path) -> Result<()> {
        model.engine.save(&self.session, file, &Value::from(self.messages.clone()).to_string())
    }

    /// Continues what is in `file` instead.
    ///
    /// # Errors
    /// As [`Engine::load`](crate::Engine::load), or if there are no messages beside the session. The conversation is
    /// then as it was, or empty if its session is already replaced.
    pub fn load(&mut self, model: &mut TextModel, file: &Path) -> Result<()> {
        let note = model.engine.load(&mut self.session, file)?;
        self.messages.clear();
        self.messages = serde_json::from_str(&note).map_err(|error| Error::SessionFile {
            path: file.into(),
            what: "note",
            expected: "messages beside the session".to_owned(),
            got: error.to_string(),
        })?;
        self.pictures = model.engine.pictures_of(&self.session)?;
        Ok(())
    }

    /// Answers `text` as the next message of the user.
    ///
    /// # Errors
    /// As [`Conversation::stream`] and its iterator. The message is then no part of the conversation.
    pub fn ask(&mut self, model: &mut TextModel, text: &str, options: &AnswerOptions) -> Result<Answered> {
        self.ask_with(model, text, options, |_| true)
    }

    /// As [`Conversation::ask`]; `show` gets the answer as it comes and says whether to go on. What was said until then
    /// stays part of the conversation.
    ///
    /// # Errors
    /// As [`Conversation::ask`].
    pub fn ask_with(
        &mut self,
        model: &mut TextModel,
        text: &str,
        options: &AnswerOptions,
        mut show: impl FnMut(&Event) -> bool,
    ) -> Result<Answered> {
        let mut answer = self.stream(model, text, options)?;
        while let Some(event) = answer.next_event()? {
            if !show(&event) {
                answer.stop()?;
            }
        }
        Ok(answer.finish())
    }

    /// Answers `text` as the next message of the user, a piece at a time. When the iterator is dropped, what was said
    /// until then stays part of the conversation; after an error, or if nothing was said, the message is no part of it.
    ///
    /// # Errors
    /// If the chat template refuses the messages, or the prompt does not fit the context.
    pub fn stream<'a>(
        &'a mut self,
        model: &'a mut TextModel,
        text: &str,
        options: &AnswerOptions,
    ) -> Result<Answer<'a>> {
        // Those of a message that was not answered are no part of the conversation either.
        self.pictures.truncate(image_parts(&self.messages));
        if self.attached.is_empty() {
            self.push("user", text);
        } else {
            let mut parts = vec![json!({"type": "image"}); self.attached.len()];
            parts.push(json!({"type": "text", "text": text}));
            self.messages.push(json!({"role": "user", "content": parts}));
            self.pictures.append(&mut self.attached);
        }
        let Self { messages, pictures, session, .. } = self;
        match Self::begin(session, model, (messages, pictures), options) {
            Ok((generation, split, reused)) => Ok(Answer {
                generation: Some(generation),
                split,
                reused,
                messages,
                ready: VecDeque::new(),
                text: String::new(),
                reasoning: String::new(),
                failed: false,
            }),
            Err(error) => {
                messages.pop();
                Err(error)
            }
        }
    }

    fn begin<'a>(
        session: &'a mut Session,
        model: &'a mut TextModel,
        (messages, pictures): (&[Value], &[Arc<Picture>]),
        options: &AnswerOptions,
    ) -> Result<(Generation<'a>, ReasoningSplit, usize)> {
        let variables = Some(&options.variables);
        let prompt = ChatPrompt { messages, variables, pictures, ..ChatPrompt::default() };
        let encoded = encode_chat(&model.tokenizer, model.template.as_ref(), &prompt)?;
        // What the session already holds of the conversation need not be evaluated again.
        let all = &encoded.tokens;
        let common = all.iter().zip(session.tokens()).take_while(|(a, b)| a == b).count();
        let common = session.pictures().whole(common.min(all.len().saturating_sub(1)));
        model.engine.truncate(session, common)?;

        let form = ReasoningForm::of(model.template.as_ref());
        let mut visible = form.visible(&model.tokenizer);
        visible.extend(&options.decoding.visible);
        let begun = form.begun_by(&encoded.text);
        let decoding = DecodingOptions { visible, ..options.decoding.clone() };
        let generation = model.start(session, &all[common..], decoding)?;
        Ok((generation, ReasoningSplit::new(form, begun), common))
    }

    /// Continues what the session holds and then `text`, without a template; `show` gets text as it comes, nothing while
    /// the prompt is read, and says whether to go on.
    ///
    /// # Errors
    /// As [`TextModel::generate`].
    pub fn continue_text(
        &mut self,
        model: &mut TextModel,
        text: &str,
        options: &DecodingOptions,
        mut show: impl FnMut(&str) -> bool,
    ) -> Result<Answered> {
        let reused = self.session.position();
        let special = if reused == 0 { AddSpecial::Yes } else { AddSpecial::No };
        let tokens = model.tokenizer.encode(text, special)?;
        let mut text = String::new();
        let generated = model.generate(&mut self.session, &tokens, options.clone(), |piece| {
            text.push_str(piece);
            show(piece)
        })?;
        Ok(Answered { generated, reused, text, reasoning: String::new() })
    }
}

/// An answer as it comes; an iterator over its [`Passage`]s.
#[derive(Debug)]
pub struct Answer<'a> {
    /// There until the answer is complete.
    generation: Option<Generation<'a>>,
    split: ReasoningSplit,
    reused: usize,
    messages: &'a mut Vec<Value>,
    ready: VecDeque<Passage>,
    text: String,
    reasoning: String,
    failed: bool,
}

impl Answer<'_> {
    /// What happens next; `None` at the end.
    ///
    /// # Errors
    /// As [`TextModel::generate`]; nothing comes after one.
    pub fn next_event(&mut self) -> Result<Option<Event>> {
        loop {
            if let Some(passage) = self.ready.pop_front() {
                return Ok(Some(Event::Passage(passage)));
            }
            let Some(generation) = self.generation.as_mut().filter(|_| !self.failed) else { return Ok(None) };
            if generation.is_finished() {
                return Ok(None);
            }
            let step = generation.step().inspect_err(|_| self.failed = true)?;
            match step {
                Some(Step::Prefill { evaluated, total }) => {
                    return Ok(Some(Event::Prefill { evaluated, total }));
                }
                Some(Step::Text(text)) => self.take(&text),
                None => {}
            }
        }
    }

    /// Ends the answer here; what was held back still comes.
    ///
    /// # Errors
    /// If the last tokens cannot be decoded.
    pub fn stop(&mut self) -> Result<()> {
        if let Some(generation) = &mut self.generation
            && !generation.is_finished()
        {
            let text = generation.stop().inspect_err(|_| self.failed = true)?;
            self.take(&text);
        }
        Ok(())
    }

    /// Ends the answer, if it has not ended, and says what it was.
    pub fn finish(mut self) -> Answered {
        let generated = self.end().expect("an answer ends once");
        Answered {
            generated,
            reused: self.reused,
            text: self.text.clone(),
            reasoning: self.reasoning.clone(),
        }
    }

    /// Takes text apart; at the end of the answer with what is held back.
    fn take(&mut self, text: &str) {
        let mut passages = vec![];
        self.split.push(text, &mut passages);
        if self.generation.as_ref().is_none_or(Generation::is_finished) {
            self.split.finish(&mut passages);
        }
        for passage in passages {
            match &passage {
                Passage::Reasoning(piece) => self.reasoning.push_str(piece),
                Passage::Text(piece) => self.text.push_str(piece),
            }
            self.ready.push_back(passage);
        }
    }

    /// Makes what was said part of the conversation.
    fn end(&mut self) -> Option<Generated> {
        // Text that cannot be decoded any more is not worth an error at the end.
        let _ = self.stop();
        let generated = self.generation.take()?.finish();
        if self.failed || generated.tokens.is_empty() {
            self.messages.pop();
        } else {
            let mut message = json!({"role": "assistant", "content": self.text});
            if !self.reasoning.is_empty() {
                message["reasoning_content"] = json!(self.reasoning);
            }
            self.messages.push(message);
        }
        Some(generated)
    }
}

impl Iterator for Answer<'_> {
    type Item = Result<Passage>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.next_event() {
                Ok(Some(Event::Passage(passage))) => return Some(Ok(passage)),
                Ok(Some(Event::Prefill { .. })) => {}
                Ok(None) => return None,
                Err(error) => return Some(Err(error)),
            }
        }
    }
}

impl Drop for Answer<'_> {
    fn drop(&mut self) {
        self.end();
    }
}
