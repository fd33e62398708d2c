//! Messages and the session that holds their tokens.

use std::path::Path;

use anyhow::{Context, Result};
use moeflux::error::size;
use moeflux::generation::{self, encode_chat};
use moeflux::tokenizer::AddSpecial;
use moeflux::{
    DecodingOptions, Generated, Passage, ReasoningForm, ReasoningSplit, Session, Stats, TextModel,
};
use serde_json::{Value, json};

use super::settings::Settings;

/// What a conversation has cost so far.
#[derive(Debug, Default)]
struct Totals {
    answers: usize,
    prefill: Stats,
    decode: Stats,
}

/// An answer that was given.
#[derive(Debug)]
pub struct Answered {
    pub generated: Generated,
    /// Tokens of the prompt that the session held already.
    pub reused: usize,
}

/// A conversation on an engine.
#[derive(Debug)]
pub struct Conversation {
    messages: Vec<Value>,
    session: Session,
    totals: Totals,
}

impl Conversation {
    /// An empty one.
    pub fn new(model: &TextModel, system: Option<&str>) -> Self {
        let messages = system.map(|text| json!({"role": "system", "content": text})).into_iter().collect();
        Self { messages, session: model.engine.session(), totals: Totals::default() }
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

    /// Forgets everything but the system message.
    pub fn reset(&mut self, model: &mut TextModel) -> Result<()> {
        self.messages.retain(|message| message["role"] == "system");
        Ok(model.engine.truncate(&mut self.session, 0)?)
    }

    /// Writes messages and session to `file`.
    pub fn save(&self, model: &TextModel, file: &Path) -> Result<()> {
        Ok(model.engine.save(&self.session, file, &Value::from(self.messages.clone()).to_string())?)
    }

    /// Continues what is in `file` instead.
    pub fn load(&mut self, model: &mut TextModel, file: &Path) -> Result<()> {
        let note = model.engine.load(&mut self.session, file)?;
        self.messages.clear();
        self.messages = serde_json::from_str(&note)
            .with_context(|| format!("{}: expected messages beside the session", file.display()))?;
        Ok(())
    }

    /// Answers `text` as the next message. `show` gets the answer as it comes, and nothing while the prompt is read; it says
    /// whether to continue. What was said until then stays part of the conversation.
    ///
    /// After an error, or if nothing was said, the message is no part of it.
    pub fn ask(
        &mut self,
        model: &mut TextModel,
        text: &str,
        settings: &Settings,
        show: impl FnMut(Option<&Passage>) -> bool,
    ) -> moeflux::Result<Answered> {
        self.messages.push(json!({"role": "user", "content": text}));
        match self.answer_messages(model, settings, show) {
            Ok((answered, Some(message))) => {
                self.messages.push(message);
                Ok(answered)
            }
            Ok((answered, None)) => {
                self.messages.pop();
                Ok(answered)
            }
            Err(error) => {
                self.messages.pop();
                Err(error)
            }
        }
    }

    fn answer_messages(
        &mut self,
        model: &mut TextModel,
        settings: &Settings,
        mut show: impl FnMut(Option<&Passage>) -> bool,
    ) -> moeflux::Result<(Answered, Option<Value>)> {
        let variables = settings.template_variables();
        let conversation = generation::Conversation {
            messages: &self.messages,
            variables: Some(&variables),
            ..generation::Conversation::default()
        };
        let encoded = encode_chat(&model.tokenizer, model.template.as_ref(), &conversation)?;
        // What the session already holds of the conversation need not be evaluated again.
        let all = &encoded.tokens;
        let common = all.iter().zip(self.session.tokens()).take_while(|(a, b)| a == b).count();
        let common = common.min(all.len().saturating_sub(1));
        model.engine.truncate(&mut self.session, common)?;

        let form = ReasoningForm::of(model.template.as_ref());
        let options =
            DecodingOptions { visible: form.visible(&model.tokenizer), ..settings.decoding_options() };
        let begun = form.begun_by(&encoded.text);
        let mut split = ReasoningSplit::new(form, begun);
        let (mut reasoning, mut text) = (String::new(), String::new());
        let mut take = |passages: Vec<Passage>| {
            passages.iter().fold(true, |go_on, passage| {
                match passage {
                    Passage::Reasoning(piece) => reasoning.push_str(piece),
                    Passage::Text(piece) => text.push_str(piece),
                }
                show(Some(passage)) && go_on
            }) && show(None)
        };
        let generated = model.generate(&mut self.session, &all[common..], options, |piece| {
            let mut passages = vec![];
            split.push(piece, &mut passages);
            take(passages)
        });
        let mut passages = vec![];
        split.finish(&mut passages);
        take(passages);
        let generated = generated?;
        self.totals.add(&generated);
        let message = (!generated.tokens.is_empty()).then(|| {
            let mut message = json!({"role": "assistant", "content": text});
            if !reasoning.is_empty() {
                message["reasoning_content"] = json!(reasoning);
            }
            message
        });
        Ok((Answered { generated, reused: common }, message))
    }

    /// Continues what the session holds and then `text`, without a template; `show` says whether to continue.
    pub fn continue_text(
        &mut self,
        model: &mut TextModel,
        text: &str,
        settings: &Settings,
        mut show: impl FnMut(&str) -> bool,
    ) -> moeflux::Result<Answered> {
        let reused = self.session.position();
        let special = if reused == 0 { AddSpecial::Yes } else { AddSpecial::No };
        let tokens = model.tokenizer.encode(text, special)?;
        let options = settings.decoding_options();
        let generated = model.generate(&mut self.session, &tokens, options, |piece| show(piece))?;
        self.totals.add(&generated);
        Ok(Answered { generated, reused })
    }

    /// What the conversation has cost so far, and where memory is.
    pub fn totals(&self, model: &TextModel) -> String {
        let Totals { answers, prefill, decode } = &self.totals;
        let mut cache = prefill.cache;
        cache += decode.cache;
        let (budget, experts) = (model.engine.budget(), model.engine.experts());
        let all = experts.store().total_bytes();
        format!(
            "{} of {} context tokens in use\n\
             {answers} answer{}: prefill {} tokens at {:.1} tokens/s, decode {} tokens at {:.1} tokens/s\n\
             experts: {:.1} % hits, {} read from disk, stalled {:.2} s\n\
             memory: trunk {}, context {}, {} of {} of experts",
            self.position(),
            model.engine.context(),
            if *answers == 1 { "" } else { "s" },
            prefill.tokens,
            speed(prefill),
            decode.tokens,
            speed(decode),
            100.0 * cache.hit_rate(),
            size(cache.bytes_read),
            cache.stall.as_secs_f64(),
            size(budget.needs.trunk),
            size(budget.needs.kv),
            size(experts.plan().bytes().min(all)),
            size(all),
        )
    }
}

impl Totals {
    fn add(&mut self, generated: &Generated) {
        self.answers += 1;
        for (total, more) in [(&mut self.prefill, &generated.prefill), (&mut self.decode, &generated.decode)]
        {
            total.tokens += more.tokens;
            total.time += more.time;
            total.cache += more.cache;
        }
    }
}

/// Tokens a second.
pub fn speed(stats: &Stats) -> f64 {
    stats.tokens as f64 / stats.time.as_secs_f64().max(1e-9)
}
