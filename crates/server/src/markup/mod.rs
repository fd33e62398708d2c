//! How a model's text marks reasoning, answer and tool calls.
//!
//! A model's format is not known by its name: its chat template renders a conversation with a call, and the format whose
//! parser reads that call back is the model's.

mod calls;
mod channels;
mod lark;
mod reader;
mod splitter;
mod tags;

use std::sync::Arc;

use moeflux::Scheduler;
use moeflux::chat_template::ChatTemplate;
use moeflux::generation::{ChatPrompt, EncodedChat};
use moeflux::tokenizer::{AddSpecial, Tokenizer};
use serde_json::{Map, Value, json};

use crate::error::ApiError;
use crate::pictures;
pub(crate) use calls::{Call, Choice, Tool, Tools};
pub(crate) use lark::Wanted;
pub(crate) use splitter::{Collected, Delta, Parts, Splitter};
use splitter::{END_THINK, THINK};
use tags::Tags;

/// How calls are marked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Calls {
    Tagged(&'static Tags),
    OnChannels,
}

/// How a template wants messages with calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct History {
    /// Arguments as JSON text, not as an object.
    arguments_as_text: bool,
    /// No content is null, not an empty text.
    null_content: bool,
}

/// A model's markup.
#[derive(Debug)]
pub(crate) struct Markup {
    /// Messages stand on channels, whether or not there are functions.
    channels: bool,
    calls: Option<Calls>,
    history: History,
    /// The template says which functions there are.
    shows_tools: bool,
    /// Special tokens that are part of the markup.
    visible: Vec<u32>,
    /// The vocabulary has a token for the beginning of reasoning.
    knows_thinking: bool,
}

const QUESTION: &str = "Which question is asked for a trial?";
const FUNCTION: &str = "trial_function";

impl Markup {
    /// The markup of the model that `scheduler` runs.
    pub(crate) fn of(scheduler: &Scheduler) -> Self {
        let tokenizer = scheduler.tokenizer();
        let special = |text: &str| tokenizer.token_to_id(text).filter(|id| tokenizer.is_special(*id));
        let has_channels = [channels::CHANNEL, channels::MESSAGE].iter().all(|t| special(t).is_some());
        let mut markup = match scheduler.template() {
            Some(template) => Self::recognise(template, has_channels),
            None => Self::none(),
        };
        let mut texts: Vec<&str> = vec![THINK, END_THINK];
        match markup.calls {
            Some(Calls::Tagged(tags)) => texts.extend(tags.texts().iter().flat_map(|text| tokens_in(text))),
            Some(Calls::OnChannels) | None => {}
        }
        if markup.channels {
            texts.extend(channels::TOKENS);
        }
        let eos = tokenizer.eos_ids();
        markup.visible = texts.into_iter().filter_map(special).filter(|id| !eos.contains(id)).collect();
        markup.visible.sort_unstable();
        markup.visible.dedup();
        markup.knows_thinking = tokenizer.token_to_id(THINK).is_some();
        markup
    }

    /// That of a model that marks nothing.
    pub(crate) fn none() -> Self {
        let history = History { arguments_as_text: false, null_content: false };
        Self {
            channels: false,
            calls: None,
            history,
            shows_tools: false,
            visible: vec![],
            knows_thinking: false,
        }
    }

    /// Finds the way that reads back what `template` writes.
    fn recognise(template: &ChatTemplate, has_channels: bool) -> Self {
        let arguments = json!({"text": "two words", "count": 7});
        let parameters = json!({"type": "object", "properties": {"text": {"type": "string"}, "count": {"type": "integer"}}});
        let tool = Tool {
            name: FUNCTION.into(),
            description: Some("For a trial.".into()),
            parameters,
            strict: false,
        };
        let tools = Arc::new(Tools { tools: vec![tool], choice: Choice::Auto, parallel: true });
        let call = json!({"id": "trial0001", "type": "function",
            "function": {"name": FUNCTION, "arguments": arguments}});
        let render = |messages: &[Value], tools: Option<&Value>| {
            template.render(&json!(messages), tools, true, &Map::new()).ok()
        };
        let question = json!({"role": "user", "content": QUESTION});
        let plain = render(std::slice::from_ref(&question), None).unwrap_or_default();
        let shown = render(std::slice::from_ref(&question), Some(&tools.json())).unwrap_or_default();
        let mut markup = Self::none();
        markup.channels = has_channels && plain.ends_with("<|start|>assistant");
        markup.shows_tools = shown.contains(FUNCTION);
        for (arguments_as_text, null_content) in [(false, false), (false, true), (true, false), (true, true)]
        {
            let history = History { arguments_as_text, null_content };
            let mut messages = [
                question.clone(),
                json!({"role": "assistant", "content": "", "tool_calls": [call]}),
                json!({"role": "tool", "tool_call_id": "trial0001", "content": "seen"}),
            ];
            messages.iter_mut().for_each(|message| history.fit(message));
            let Some(text) = render(&messages, Some(&tools.json())) else { continue };
            // What comes before may show by an example how calls are written.
            let Some((_, text)) = text.split_once(QUESTION) else { continue };
            let reads = |parts: Parts| {
                let mut splitter = Splitter::new(parts);
                let mut deltas = vec![];
                splitter.push(text, &mut deltas);
                splitter.finish(false, &mut deltas);
                let mut collected = Collected::default();
                deltas.into_iter().for_each(|delta| collected.add(delta));
                collected.calls.iter().any(|call| {
                    let read: Option<Value> = serde_json::from_str(&call.arguments).ok();
                    call.name == FUNCTION && read.as_ref() == Some(&arguments)
                })
            };
            let found = if markup.channels {
                reads(Parts { channels: true, ..Parts::default() }).then_some(Calls::OnChannels)
            } else {
                tags::ALL.iter().find_map(|tags| {
                    let parts = Parts { calls: Some((tags, Arc::clone(&tools))), ..Parts::default() };
                    reads(parts).then_some(Calls::Tagged(tags))
                })
            };
            if found.is_some() {
                (markup.calls, markup.history) = (found, history);
                break;
            }
        }
        markup
    }

    /// Whether functions can be called.
    pub(crate) fn calls_tools(&self) -> bool {
        self.calls.is_some()
    }

    /// Whether the model may think before it answers.
    pub(crate) fn thinks(&self) -> bool {
        self.channels || self.knows_thinking
    }

    /// Special tokens that are part of the markup.
    pub(crate) fn visible(&self) -> &[u32] {
        &self.visible
    }

    /// Renders and encodes a conversation, with the functions that may be called.
    pub(crate) fn encode(
        &self,
        scheduler: &Scheduler,
        messages: &[Value],
        tools: Option<&Tools>,
        variables: &Map<String, Value>,
    ) -> Result<EncodedChat, ApiError> {
        let mut messages = messages.to_vec();
        messages.iter_mut().for_each(|message| self.history.fit(message));
        let pictures = pictures::read(scheduler, &mut messages)?;
        let mut preface = None;
        let json = match tools {
            Some(tools) => {
                let Some(calls) = self.calls else {
                    let message = "this model's chat template does not support tool calls in a known format";
                    return Err(ApiError::invalid("tools", message));
                };
                tools.check()?;
                if !self.shows_tools {
                    preface = Some(describe(scheduler.tokenizer(), calls, tools));
                }
                Some(tools.json())
            }
            None => None,
        };
        let conversation = ChatPrompt {
            messages: &messages,
            preface: preface.as_deref(),
            tools: json.as_ref(),
            variables: Some(variables),
            pictures: &pictures,
        };
        Ok(scheduler.encode_chat(&conversation)?)
    }

    /// Whether an answer that is begun may go on to call one of `tools`.
    pub(crate) fn may_continue(&self, tools: &Tools) -> bool {
        tools.choice == Choice::Auto && !self.channels
    }

    /// Appends the beginning of an answer, as plain text, to a prompt.
    pub(crate) fn begin_answer(
        &self,
        scheduler: &Scheduler,
        prompt: &mut EncodedChat,
        beginning: &str,
    ) -> Result<(), ApiError> {
        let tokenizer = scheduler.tokenizer();
        let before = if self.channels {
            format!("{}final{}", channels::CHANNEL, channels::MESSAGE)
        } else if prompt.text.trim_end().ends_with(THINK) {
            // What is begun is the answer, not reasoning.
            format!("\n{END_THINK}\n\n")
        } else {
            String::new()
        };
        prompt.tokens.extend(tokenizer.encode(&before, AddSpecial::No)?);
        prompt.tokens.extend(tokenizer.encode_plain(beginning)?);
        prompt.text += &before;
        prompt.text += beginning;
        Ok(())
    }

    /// What an answer to `prompt` may contain.
    pub(crate) fn parts(&self, prompt: &str, tools: Option<&Arc<Tools>>) -> Parts {
        let calls = match (self.calls, tools) {
            (Some(Calls::Tagged(tags)), Some(tools)) => Some((tags, Arc::clone(tools))),
            _ => None,
        };
        let thinking = prompt.trim_end().ends_with(THINK);
        Parts { thinking, split: true, channels: self.channels, calls }
    }

    /// Whether the model may think before it answers `prompt`.
    fn may_think(&self, prompt: &str) -> bool {
        let prompt = prompt.trim_end();
        prompt.ends_with(THINK) || (self.knows_thinking && !prompt.ends_with(END_THINK))
    }
}

/// Says which functions there are, for a template that does not.
fn describe(tokenizer: &Tokenizer, calls: Calls, tools: &Tools) -> String {
    let mut text = String::from("You can call these functions:\n");
    for tool in tools.json().as_array().into_iter().flatten() {
        let mut function = tool["function"].clone();
        tokenizer.mark_outside(&mut function);
        text += &format!("{function}\n");
    }
    if let Calls::Tagged(tags) = calls {
        text += &format!("\nTo call one, write exactly:\n{}", tags.example());
    }
    text
}

/// The tokens in a piece of markup: `<…>`.
fn tokens_in(text: &str) -> impl Iterator<Item = &str> {
    text.split_inclusive('>')
        .filter(|piece| piece.ends_with('>'))
        .filter_map(|piece| Some(&piece[piece.rfind('<')?..]))
}

impl History {
    /// Makes `message` one that the template reads.
    fn fit(self, message: &mut Value) {
        let Some(fields) = message.as_object_mut().filter(|fields| fields.contains_key("tool_calls")) else {
            return;
        };
        let empty = fields.get("content").is_none_or(|content| content.is_null() || content == "");
        if empty {
            let none = if self.null_content { Value::Null } else { json!("") };
            fields.insert("content".into(), none);
        }
        if self.arguments_as_text {
            let calls = fields.get_mut("tool_calls").and_then(Value::as_array_mut);
            for call in calls.into_iter().flatten() {
                if let Some(arguments) = call.pointer_mut("/function/arguments").filter(|a| !a.is_string()) {
                    *arguments = json!(arguments.to_string());
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
