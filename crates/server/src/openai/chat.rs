//! `/v1/chat/completions`.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use moeflux::scheduler::Done;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{finish_reason, logprob_entry, now, unique, usage};
use crate::answer::{Update, Whole};
use crate::error::{ApiError, Dialect};
use crate::markup::{Call, Choice, Delta, Tool, Tools};
use crate::prompt::{Ask, Form, Prompt, Sampling, Texts, content_text};
use crate::sse::{self, Events, Render, Tell};
use crate::{App, Site, body, fields, pictures, prompt};

const MAX_TOP_LOGPROBS: usize = 20;

#[derive(Debug, Deserialize)]
struct ChatRequest {
    model: Option<String>,
    messages: Vec<Value>,
    #[serde(flatten)]
    sampling: Sampling,
    max_tokens: Option<usize>,
    max_completion_tokens: Option<usize>,
    stop: Option<Texts>,
    n: Option<usize>,
    logprobs: Option<bool>,
    top_logprobs: Option<usize>,
    response_format: Option<Value>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    parallel_tool_calls: Option<bool>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    /// Streams say how far the prompt is, as llama.cpp's server does.
    return_progress: Option<bool>,
    /// Variables of the chat template, as in `enable_thinking`.
    chat_template_kwargs: Option<Map<String, Value>>,
    reasoning_effort: Option<String>,
    /// Names a conversation that is kept on disk.
    prompt_cache_key: Option<String>,
    /// The last message is the beginning of the answer.
    continue_final_message: Option<bool>,
    #[serde(flatten)]
    more: Map<String, Value>,
}

#[derive(Debug, Deserialize)]
pub(super) struct StreamOptions {
    #[serde(default)]
    pub(super) include_usage: bool,
}

pub(crate) async fn handle(State(site): State<Arc<Site>>, request: Request) -> Response {
    answer(&site, request).await.unwrap_or_else(|error| error.response(Dialect::OpenAi))
}

async fn answer(site: &Site, request: Request) -> Result<Response, ApiError> {
    let (request, room) = body::json::<ChatRequest>(site, request).await?;
    let model = site.find(request.model.as_deref())?;
    let stream = request.stream.unwrap_or(false);
    let with_usage = request.stream_options.as_ref().is_some_and(|options| options.include_usage);
    let with_progress = request.return_progress.unwrap_or(false);
    let ask = request.ask()?;
    let app = site.get(model).await?;
    let answers = ask.submit(&app, room).await?;
    let head = Head { id: unique("chatcmpl-"), created: now(), app };
    if stream {
        return Ok(sse::stream(
            answers,
            Chunks { head, with_usage, with_progress, begun: vec![], calls: vec![], dones: vec![] },
        ));
    }
    let wholes = answers.collect().await?;
    Ok(Json(head.whole(&wholes)).into_response())
}

impl ChatRequest {
    fn ask(self) -> Result<Ask, ApiError> {
        if self.messages.is_empty() {
            return Err(ApiError::invalid("messages", "expected at least one"));
        }
        let mut more = self.more;
        if self.continue_final_message == Some(true) {
            // Clients say both.
            more.remove("add_generation_prompt");
        }
        fields::refuse(&more)?;
        let messages = self.messages.iter().enumerate();
        let mut messages: Vec<Value> =
            messages.map(|(index, message)| normal(index, message)).collect::<Result<_, _>>()?;
        let prefill = match self.continue_final_message {
            Some(true) => Some(prompt::take_beginning(&mut messages).ok_or_else(|| {
                ApiError::invalid("continue_final_message", "the last message is no text of the assistant's")
            })?),
            _ => None,
        };
        let logprobs = match (self.logprobs.unwrap_or(false), self.top_logprobs) {
            (true, count) => Some(count.unwrap_or(0)),
            (false, Some(0) | None) => None,
            (false, Some(_)) => return Err(ApiError::invalid("top_logprobs", "needs logprobs")),
        };
        if logprobs.is_some_and(|count| count > MAX_TOP_LOGPROBS) {
            let message = format!("expected at most {MAX_TOP_LOGPROBS}");
            return Err(ApiError::invalid("top_logprobs", message));
        }
        let mut variables = self.chat_template_kwargs.unwrap_or_default();
        Ask::set_effort(&mut variables, self.reasoning_effort.as_deref());
        Ok(Ask {
            sampling: self.sampling,
            max_tokens: self.max_completion_tokens.or(self.max_tokens),
            stop: self.stop.map(Texts::list).unwrap_or_default(),
            answers: self.n.unwrap_or(1),
            logprobs,
            form: fields::form(&more, Form::parse(self.response_format.as_ref(), "response_format")?)?,
            tools: tools(self.tools, self.tool_choice, self.parallel_tool_calls)?,
            conversation: self.prompt_cache_key,
            prefill,
            ..Ask::new(vec![Prompt::Chat(messages, variables)])
        })
    }
}

/// A message as chat templates expect it: content as one text, or as parts where it shows pictures, arguments of calls as objects.
pub(crate) fn normal(index: usize, message: &Value) -> Result<Value, ApiError> {
    let param = format!("messages[{index}]");
    let fields = message.as_object().ok_or_else(|| ApiError::invalid(&param, "expected an object"))?;
    let role = fields.get("role").and_then(Value::as_str).unwrap_or_default();
    let role = match role {
        "developer" => "system",
        "function" => "tool",
        "system" | "user" | "assistant" | "tool" => role,
        other => {
            let message = format!("role: expected system, user, assistant or tool, got {other:?}");
            return Err(ApiError::invalid(&param, message));
        }
    };
    let content = fields.get("content").unwrap_or(&Value::Null);
    let content = match role {
        "user" => pictures::content(content, &param)?,
        _ => json!(content_text(content, &param)?),
    };
    let mut normal = json!({"role": role, "content": content});
    for key in ["reasoning_content", "reasoning", "name", "tool_call_id"] {
        if let Some(value) = fields.get(key).filter(|value| value.is_string()) {
            normal[key] = value.clone();
        }
    }
    if let Some(calls) = fields.get("tool_calls").filter(|calls| !calls.is_null()) {
        let calls =
            calls.as_array().ok_or_else(|| ApiError::invalid(&param, "tool_calls: expected a list"))?;
        normal["tool_calls"] =
            calls.iter().map(|call| normal_call(call, &param)).collect::<Result<_, _>>()?;
    }
    Ok(normal)
}

fn normal_call(call: &Value, param: &str) -> Result<Value, ApiError> {
    let function = call.get("function");
    let name = function.and_then(|f| f.get("name")).and_then(Value::as_str);
    let name = name.ok_or_else(|| ApiError::invalid(param, "tool_calls: expected functions with names"))?;
    let arguments = match function.and_then(|f| f.get("arguments")) {
        None => json!({}),
        Some(Value::String(text)) => serde_json::from_str(text).unwrap_or_else(|_| json!(text)),
        Some(other) => other.clone(),
    };
    let id = call.get("id").cloned().unwrap_or_default();
    Ok(json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}))
}

pub(crate) fn tools(
    tools: Option<Vec<Value>>,
    choice: Option<Value>,
    parallel: Option<bool>,
) -> Result<Option<Tools>, ApiError> {
    let choice = match &choice {
        None | Some(Value::Null) => Choice::Auto,
        Some(Value::String(choice)) if choice == "none" => return Ok(None),
        Some(Value::String(choice)) if choice == "auto" => Choice::Auto,
        Some(Value::String(choice)) if choice == "required" => Choice::Required,
        Some(choice) => match choice.get("function").and_then(|f| f.get("name")).and_then(Value::as_str) {
            Some(name) => Choice::Named(name.into()),
            None => {
                return Err(ApiError::invalid("tool_choice", "expected none, auto, required or a function"));
            }
        },
    };
    let given = tools.unwrap_or_default();
    if given.is_empty() {
        return match choice {
            Choice::Auto => Ok(None),
            _ => Err(ApiError::invalid("tool_choice", "no tools were given")),
        };
    }
    let tool = |tool: &Value| {
        let function = tool.get("function").filter(|f| f.is_object());
        let function = function.ok_or_else(|| ApiError::invalid("tools", "expected functions"))?;
        let name = function.get("name").and_then(Value::as_str);
        let name = name.ok_or_else(|| ApiError::invalid("tools", "expected functions with names"))?;
        let none = json!({"type": "object", "properties": {}});
        Ok(Tool {
            name: name.into(),
            description: function.get("description").and_then(Value::as_str).map(str::to_owned),
            parameters: function.get("parameters").filter(|p| !p.is_null()).cloned().unwrap_or(none),
            strict: function.get("strict").and_then(Value::as_bool).unwrap_or(false),
        })
    };
    let tools = given.iter().map(tool).collect::<Result<_, ApiError>>()?;
    Ok(Some(Tools { tools, choice, parallel: parallel.unwrap_or(true) }))
}

/// What all parts of an answer say.
struct Head {
    id: String,
    created: u64,
    app: Arc<App>,
}

fn call_json(call: &Call) -> Value {
    let function = json!({"name": call.name, "arguments": call.arguments});
    json!({"id": unique("call_"), "type": "function", "function": function})
}

impl Head {
    fn object(&self, kind: &str, choices: Value) -> Value {
        json!({
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.app.name,
            "choices": choices,
        })
    }

    fn logprobs(&self, logprobs: &[moeflux::decoding::TokenLogprobs]) -> Value {
        let tokenizer = self.app.scheduler.tokenizer();
        if logprobs.is_empty() {
            Value::Null
        } else {
            let content: Vec<Value> = logprobs.iter().map(|l| logprob_entry(tokenizer, l)).collect();
            json!({"content": content, "refusal": null})
        }
    }

    fn whole(&self, wholes: &[Whole]) -> Value {
        let choice = |(index, whole): (usize, &Whole)| {
            let said = &whole.said;
            let mut message = json!({"role": "assistant", "content": said.text, "refusal": null});
            if !said.reasoning.is_empty() {
                message["reasoning_content"] = json!(said.reasoning);
            }
            if !said.calls.is_empty() {
                message["tool_calls"] = said.calls.iter().map(call_json).collect();
                if said.text.is_empty() {
                    message["content"] = Value::Null;
                }
            }
            let reason = whole.done.as_ref().map(|done| finish_reason(done, said.called()));
            json!({
                "index": index,
                "message": message,
                "logprobs": self.logprobs(&whole.logprobs),
                "finish_reason": reason,
            })
        };
        let choices = wholes.iter().enumerate().map(choice).collect();
        let mut object = self.object("chat.completion", choices);
        object["usage"] = usage(wholes.iter().filter_map(|whole| Some((0, whole.done.as_ref()?))));
        object
    }
}

/// Streamed answers.
struct Chunks {
    head: Head,
    with_usage: bool,
    /// Answers that have started.
    begun: Vec<usize>,
    /// Of each call the answer that made it, and whether it is complete.
    calls: Vec<(usize, bool)>,
    /// How far the prompt is goes into chunks of its own.
    with_progress: bool,
    dones: Vec<Done>,
}

impl Chunks {
    /// Whether each call of an answer is complete.
    fn calls_of(&self, index: usize) -> impl Iterator<Item = bool> {
        self.calls.iter().filter(move |call| call.0 == index).map(|call| call.1)
    }

    fn send(&mut self, index: usize, delta: Value, more: Value, events: &mut Events) {
        let mut delta = delta;
        if !self.begun.contains(&index) {
            self.begun.push(index);
            delta["role"] = json!("assistant");
            if delta.get("content").is_none() {
                delta["content"] = json!("");
            }
        }
        let mut choice = json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": null});
        for (key, value) in more.as_object().into_iter().flatten() {
            choice[key] = value.clone();
        }
        events.data(&self.head.object("chat.completion.chunk", json!([choice])));
    }
}

impl Render for Chunks {
    fn update(&mut self, index: usize, update: Update, events: &mut Events) {
        match update {
            Update::Delta(Delta::Text(text)) => self.send(index, json!({"content": text}), json!({}), events),
            Update::Delta(Delta::Reasoning(text)) => {
                self.send(index, json!({"reasoning_content": text}), json!({}), events);
            }
            Update::Delta(Delta::CallBegin(name)) => {
                let mut entry = call_json(&Call { name, arguments: String::new(), complete: false });
                entry["index"] = json!(self.calls_of(index).count());
                self.calls.push((index, false));
                self.send(index, json!({"tool_calls": [entry]}), json!({}), events);
            }
            Update::Delta(Delta::Arguments(text)) => {
                let number = self.calls_of(index).count().saturating_sub(1);
                let entry = json!({"index": number, "function": {"arguments": text}});
                self.send(index, json!({"tool_calls": [entry]}), json!({}), events);
            }
            Update::Delta(Delta::CallEnd) => {
                if let Some(last) = self.calls.iter_mut().rfind(|call| call.0 == index) {
                    last.1 = true;
                }
            }
            Update::Progress(progress) => {
                if self.with_progress {
                    let mut object = self.head.object("chat.completion.chunk", json!([]));
                    object["prompt_progress"] = progress.json();
                    events.data(&object);
                } else {
                    events.raw(&progress.comment())
                }
            }
            Update::Logprobs(logprobs) => {
                let logprobs = self.head.logprobs(&[logprobs]);
                self.send(index, json!({}), json!({"logprobs": logprobs}), events);
            }
            Update::Done(done) => {
                let called =
                    self.calls_of(index).count() > 0 && self.calls_of(index).all(|complete| complete);
                let more = json!({"finish_reason": finish_reason(&done, called)});
                self.send(index, json!({}), more, events);
                self.dones.push(done);
            }
            Update::Failed(error) => events.data(&error.json(Dialect::OpenAi)),
        }
    }

    fn end(&mut self, events: &mut Events) {
        if self.with_usage {
            let mut object = self.head.object("chat.completion.chunk", json!([]));
            object["usage"] = usage(self.dones.iter().map(|done| (0, done)));
            events.data(&object);
        }
        events.raw("data: [DONE]\n\n");
    }
}
