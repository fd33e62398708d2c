//! From an API's request to the scheduler's.

use std::sync::Arc;

use moeflux::generation::EncodedChat;
use moeflux::sampler::SamplerOptions;
use moeflux::scheduler::ManyRequest;
use moeflux::{Constraint, DecodingOptions, Picture};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::App;
use crate::answer::Answers;
use crate::constraints::{Made, constrain};
use crate::error::ApiError;
use crate::intake::Room;
use crate::log::Tally;
use crate::markup::{Parts, Tools, Wanted};

/// Most prompts of one request.
const MAX_PROMPTS: usize = 1024;
/// Most answers to one prompt.
const MAX_ANSWERS: usize = 16;
/// Most stop texts of one request.
const MAX_STOPS: usize = 16;

/// Sampling as interfaces write it; all of it may be left out.
#[derive(Debug, Clone, Default, Deserialize)]
pub(crate) struct Sampling {
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<i64>,
    min_p: Option<f32>,
    #[serde(alias = "repeat_penalty")]
    repetition_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    #[serde(default)]
    logit_bias: Option<Map<String, Value>>,
    seed: Option<i64>,
    /// Never end by itself.
    ignore_eos: Option<bool>,
}

impl Sampling {
    /// `eos` ends texts.
    fn options(&self, eos: &[u32]) -> Result<SamplerOptions, ApiError> {
        let within = |name: &str, value: Option<f32>, low: f32, high: f32| match value {
            Some(value) if !(low..=high).contains(&value) => {
                Err(ApiError::invalid(name, format!("expected a number from {low} to {high}, got {value}")))
            }
            _ => Ok(()),
        };
        within("temperature", self.temperature, 0.0, 2.0)?;
        within("presence_penalty", self.presence_penalty, -2.0, 2.0)?;
        within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)?;
        let mut logit_bias = std::collections::BTreeMap::new();
        for (token, bias) in self.logit_bias.iter().flatten() {
            let fault = || {
                ApiError::invalid(
                    "logit_bias",
                    format!("{token:?}: {bias}: expected a token id and a number from -100 to 100"),
                )
            };
            let id: u32 = token.parse().map_err(|_| fault())?;
            let bias = bias.as_f64().filter(|bias| (-100.0..=100.0).contains(bias)).ok_or_else(fault)?;
            // -100 is meant as never, as in OpenAI's interface.
            logit_bias.insert(id, if bias == -100.0 { f32::NEG_INFINITY } else { bias as f32 });
        }
        if self.ignore_eos == Some(true) {
            logit_bias.extend(eos.iter().map(|id| (*id, f32::NEG_INFINITY)));
        }
        let default = SamplerOptions::default();
        Ok(SamplerOptions {
            temperature: self.temperature.unwrap_or(1.0),
            top_p: self.top_p.unwrap_or(1.0),
            // Some clients say -1 for all.
            top_k: usize::try_from(self.top_k.unwrap_or(0)).unwrap_or(0),
            min_p: self.min_p.unwrap_or(0.0),
            repetition_penalty: self.repetition_penalty.unwrap_or(1.0),
            presence_penalty: self.presence_penalty.unwrap_or(0.0),
            frequency_penalty: self.frequency_penalty.unwrap_or(0.0),
            logit_bias,
            seed: self.seed.map(i64::cast_unsigned),
            ..default
        })
    }
}

/// One text or several.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged, expecting = "expected a string or a list of strings")]
pub(crate) enum Texts {
    One(String),
    Many(Vec<String>),
}

impl Texts {
    pub(crate) fn list(self) -> Vec<String> {
        match self {
            Self::One(text) => vec![text],
            Self::Many(texts) => texts,
        }
    }
}

/// The form that an answer must have.
#[derive(Debug, Clone, Default)]
pub(crate) enum Form {
    #[default]
    Text,
    /// JSON by a schema.
    Json {
        schema: Value,
        /// The field that it came in.
        param: &'static str,
        /// All of it must be enforced.
        strict: bool,
    },
    /// What a regular expression matches as a whole.
    Regex { pattern: String, param: &'static str },
    /// One of several texts.
    Choice { texts: Vec<String>, param: &'static str },
}

impl Form {
    /// The field that asks for it.
    pub(crate) fn param(&self) -> &'static str {
        match self {
            Self::Text => "response_format",
            Self::Json { param, .. } | Self::Regex { param, .. } | Self::Choice { param, .. } => param,
        }
    }

    /// `{"type": "text" | "json_object" | "json_schema", …}` as in OpenAI's interfaces; the schema may stand in
    /// `json_schema` or, as in responses, beside the type.
    pub(crate) fn parse(format: Option<&Value>, param: &'static str) -> Result<Self, ApiError> {
        let Some(format) = format.filter(|format| !format.is_null()) else { return Ok(Self::Text) };
        match format.get("type").and_then(Value::as_str) {
            Some("text") => Ok(Self::Text),
            Some("json_object") => Ok(Self::Json { schema: json!({"type": "object"}), param, strict: false }),
            Some("json_schema") => {
                let fields = format.get("json_schema").unwrap_or(format);
                let schema = fields.get("schema");
                let schema = schema.ok_or_else(|| ApiError::invalid(param, "schema is missing"))?.clone();
                let strict = fields.get("strict").and_then(Value::as_bool).unwrap_or(false);
                Ok(Self::Json { schema, param, strict })
            }
            _ => Err(ApiError::invalid(param, "type: expected text, json_object or json_schema")),
        }
    }
}

/// What a prompt is made of.
#[derive(Debug, Clone)]
pub(crate) enum Prompt {
    /// Through the chat template, with its variables.
    Chat(Vec<Value>, Map<String, Value>),
    /// As it stands.
    Text(String),
    /// Token ids.
    Tokens(Vec<u32>),
}

/// A prompt as the model reads it.
pub(crate) struct Encoded {
    pub(crate) tokens: Vec<u32>,
    /// If it came through the chat template.
    pub(crate) text: Option<String>,
    /// What it shows.
    pub(crate) pictures: Vec<Arc<Picture>>,
}

/// A request in the terms that all interfaces share.
#[derive(Debug, Clone)]
pub(crate) struct Ask {
    pub(crate) prompts: Vec<Prompt>,
    pub(crate) sampling: Sampling,
    pub(crate) max_tokens: Option<usize>,
    pub(crate) stop: Vec<String>,
    pub(crate) answers: usize,
    pub(crate) logprobs: Option<usize>,
    pub(crate) form: Form,
    pub(crate) tools: Option<Tools>,
    pub(crate) conversation: Option<String>,
    /// The beginning of the answer, which the answer continues.
    pub(crate) prefill: Option<String>,
}

impl Ask {
    pub(crate) fn new(prompts: Vec<Prompt>) -> Self {
        Self {
            prompts,
            sampling: Sampling::default(),
            max_tokens: None,
            stop: vec![],
            answers: 1,
            logprobs: None,
            form: Form::Text,
            tools: None,
            conversation: None,
            prefill: None,
        }
    }

    /// Tells the chat template how much the model is to think.
    pub(crate) fn set_effort(variables: &mut Map<String, Value>, effort: Option<&str>) {
        let Some(effort) = effort else { return };
        if effort == "none" {
            variables.entry("enable_thinking").or_insert(json!(false));
        }
        variables.entry("reasoning_effort").or_insert(json!(effort));
    }

    /// Whether a grammar limits the answer.
    fn is_constrained(&self) -> bool {
        !matches!(self.form, Form::Text) || self.tools.is_some()
    }

    /// Encodes, compiles and queues; what the request takes until then is given back.
    pub(crate) async fn submit(self, app: &Arc<App>, room: Room) -> Result<Answers, ApiError> {
        let theirs = Arc::clone(app);
        let tally = Arc::clone(&room.tally);
        // Tokenizing and compiling grammars may take a while; a compiler that panics must not take the server along.
        let prepare = move || {
            let room = room;
            self.prepare(&theirs, &room.tally)
        };
        let prepared = tokio::task::spawn_blocking(prepare).await;
        let (request, parts) = match prepared {
            Ok(prepared) => prepared?,
            Err(_) => {
                let message = "the request could not be prepared";
                return Err(ApiError::new(axum::http::StatusCode::INTERNAL_SERVER_ERROR, message));
            }
        };
        Answers::submit(app, request, parts, tally)
    }

    fn prepare(self, app: &App, tally: &Tally) -> Result<(ManyRequest, Parts), ApiError> {
        if self.answers == 0 || self.answers > MAX_ANSWERS {
            let message = format!("expected a number from 1 to {MAX_ANSWERS}, got {}", self.answers);
            return Err(ApiError::invalid("n", message));
        }
        if self.prompts.len() > MAX_PROMPTS {
            return Err(ApiError::invalid("prompt", format!("expected at most {MAX_PROMPTS} prompts")));
        }
        if self.stop.len() > MAX_STOPS {
            return Err(ApiError::invalid("stop", format!("expected at most {MAX_STOPS} strings")));
        }
        if self.max_tokens == Some(0) {
            return Err(ApiError::invalid("max_tokens", "expected a positive number, got 0"));
        }
        if self.sampling.ignore_eos == Some(true) && self.is_constrained() {
            let message = "an answer in a given form, or with tools, must be able to end";
            return Err(ApiError::invalid("ignore_eos", message));
        }
        if self.prefill.is_some() {
            let calls = self.tools.as_ref().is_some_and(|tools| !app.markup.may_continue(tools));
            if calls || !matches!(self.form, Form::Text) {
                let message = "an answer that is begun can neither be held to a form nor to calling tools";
                return Err(ApiError::invalid("messages", message));
            }
        }
        let sampler = self.sampling.options(app.scheduler.tokenizer().eos_ids())?;
        let (mut prompts, mut pictures) = (vec![], vec![]);
        let (mut parts, mut text) = (Parts::default(), None);
        let tools = self.tools.clone().map(Arc::new);
        for prompt in &self.prompts {
            let encoded = self.encode(app, prompt)?;
            prompts.push(encoded.tokens);
            pictures.extend(encoded.pictures);
            text = encoded.text;
            if let Some(text) = &text {
                parts = app.markup.parts(text, tools.as_ref());
            }
        }
        let options = DecodingOptions {
            sampler,
            max_tokens: self.max_tokens.unwrap_or(app.options.max_tokens),
            stop: self.stop.clone(),
            logprobs: self.logprobs,
            visible: if text.is_some() { app.markup.visible().to_vec() } else { vec![] },
        };
        let constraint = self.constraint(app, text.as_deref(), tally)?;
        let request = ManyRequest {
            prompts,
            answers: self.answers,
            options,
            constraint,
            conversation: self.conversation,
            adapter: app.adapter.clone(),
            pictures,
        };
        Ok((request, parts))
    }

    /// Encodes a prompt.
    pub(crate) fn encode(&self, app: &App, prompt: &Prompt) -> Result<Encoded, ApiError> {
        let plain = |tokens| Ok(Encoded { tokens, text: None, pictures: vec![] });
        match prompt {
            Prompt::Tokens(tokens) => plain(tokens.clone()),
            Prompt::Text(text) => plain(app.scheduler.encode(text)?),
            Prompt::Chat(messages, variables) => {
                let mut encoded =
                    app.markup.encode(&app.scheduler, messages, self.tools.as_ref(), variables)?;
                if let Some(beginning) = &self.prefill {
                    app.markup.begin_answer(&app.scheduler, &mut encoded, beginning)?;
                }
                let EncodedChat { tokens, text, pictures } = encoded;
                Ok(Encoded { tokens, text: Some(text), pictures })
            }
        }
    }

    /// What answers are held to. What of it cannot be enforced is counted as a warning.
    fn constraint(
        &self,
        app: &App,
        chat: Option<&str>,
        tally: &Tally,
    ) -> Result<Option<Box<dyn Constraint>>, ApiError> {
        if !self.is_constrained() {
            return Ok(None);
        }
        let wanted = Wanted { form: &self.form, tools: self.tools.as_ref() };
        let Made { constraint, warning } =
            constrain(&app.scheduler, &app.grammars, &app.markup, chat, &wanted)?;
        if let Some(text) = warning {
            tally.warn(text);
        }
        Ok(Some(constraint))
    }
}

/// Takes the text of the last message, if it is the assistant's and nothing but text.
pub(crate) fn take_beginning(messages: &mut Vec<Value>) -> Option<String> {
    let last = messages.last()?;
    if last["role"] != "assistant" || last.get("tool_calls").is_some() {
        return None;
    }
    let text = last["content"].as_str().filter(|text| !text.is_empty())?.to_owned();
    messages.pop();
    (!messages.is_empty()).then_some(text)
}

/// The text of a message's content: a text, or a list of parts of type `text`.
pub(crate) fn content_text(content: &Value, param: &str) -> Result<String, ApiError> {
    match content {
        Value::Null => Ok(String::new()),
        Value::String(text) => Ok(text.clone()),
        Value::Array(parts) => {
            let mut text = String::new();
            for part in parts {
                let kind = part.get("type").and_then(Value::as_str).unwrap_or("text");
                let known = ["text", "input_text", "output_text", "refusal"].contains(&kind);
                let piece = part.get("text").or_else(|| part.get("refusal")).and_then(Value::as_str);
                match piece.filter(|_| known) {
                    Some(piece) => text.push_str(piece),
                    None => {
                        return Err(ApiError::invalid(
                            param,
                            format!("content of type {kind:?} is not supported, only text"),
                        ));
                    }
                }
            }
            Ok(text)
        }
        _ => Err(ApiError::invalid(param, "content: expected a string or a list of parts")),
    }
}
