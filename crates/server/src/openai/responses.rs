//! `/v1/responses`: text in, text out. Nothing is stored, so `previous_response_id` is refused; so are tools.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use moeflux::Finish;
use moeflux::scheduler::Done;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{engine_usage, now, unique};
use crate::answer::Update;
use crate::error::{ApiError, Dialect};
use crate::markup::Delta;
use crate::prompt::{Ask, Form, Prompt, Sampling, content_text};
use crate::sse::{self, Events, Render};
use crate::{App, body};

#[derive(Debug, Deserialize)]
struct ResponsesRequest {
    model: Option<String>,
    input: Input,
    instructions: Option<String>,
    #[serde(flatten)]
    sampling: Sampling,
    max_output_tokens: Option<usize>,
    text: Option<Value>,
    tools: Option<Vec<Value>>,
    previous_response_id: Option<String>,
    stream: Option<bool>,
    prompt_cache_key: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "input: expected a string or a list of messages")]
enum Input {
    Text(String),
    Items(Vec<Value>),
}

pub(crate) async fn handle(State(app): State<Arc<App>>, request: Request) -> Response {
    answer(app, request).await.unwrap_or_else(|error| error.response(Dialect::OpenAi))
}

async fn answer(app: Arc<App>, request: Request) -> Result<Response, ApiError> {
    let (request, room) = body::json::<ResponsesRequest>(&app, request).await?;
    app.check_model(request.model.as_deref())?;
    let stream = request.stream.unwrap_or(false);
    let answers = request.ask()?.submit(&app, room).await?;
    let mut reply = Reply {
        id: unique("resp_"),
        item: unique("msg_"),
        created: now(),
        app,
        text: String::new(),
        number: 0,
        done: None,
    };
    if stream {
        return Ok(sse::stream(answers, reply));
    }
    let whole = answers.collect().await?.pop().unwrap_or_default();
    (reply.text, reply.done) = (whole.text, whole.done);
    Ok(Json(reply.object()).into_response())
}

impl ResponsesRequest {
    fn ask(self) -> Result<Ask, ApiError> {
        if self.previous_response_id.is_some() {
            return Err(ApiError::invalid("previous_response_id", "responses are not stored"));
        }
        if self.tools.is_some_and(|tools| !tools.is_empty()) {
            return Err(ApiError::invalid("tools", "use /v1/chat/completions for tools"));
        }
        let mut messages = vec![];
        messages.extend(self.instructions.map(|text| json!({"role": "system", "content": text})));
        match self.input {
            Input::Text(text) => messages.push(json!({"role": "user", "content": text})),
            Input::Items(items) => {
                for (index, item) in items.iter().enumerate() {
                    let param = format!("input[{index}]");
                    let role = match item.get("role").and_then(Value::as_str) {
                        Some("developer") => "system",
                        Some(role @ ("system" | "user" | "assistant")) => role,
                        _ => return Err(ApiError::invalid(&param, "expected a message with a role")),
                    };
                    let content = content_text(item.get("content").unwrap_or(&Value::Null), &param)?;
                    messages.push(json!({"role": role, "content": content}));
                }
            }
        }
        if messages.is_empty() {
            return Err(ApiError::invalid("input", "expected at least one message"));
        }
        let format = self.text.as_ref().and_then(|text| text.get("format"));
        Ok(Ask {
            sampling: self.sampling,
            max_tokens: self.max_output_tokens,
            form: Form::parse(format, "text.format")?,
            conversation: self.prompt_cache_key,
            ..Ask::new(vec![Prompt::Chat(messages, Map::new())])
        })
    }
}

struct Reply {
    id: String,
    item: String,
    created: u64,
    app: Arc<App>,
    text: String,
    /// Number of the next event.
    number: usize,
    done: Option<Done>,
}

impl Reply {
    fn part(&self) -> Value {
        json!({"type": "output_text", "text": self.text, "annotations": []})
    }

    fn message(&self, status: &str) -> Value {
        let content = if status == "in_progress" { json!([]) } else { json!([self.part()]) };
        json!({"type": "message", "id": self.item, "status": status, "role": "assistant", "content": content})
    }

    fn object(&self) -> Value {
        let status = match self.done.as_ref().map(|done| done.finish) {
            None => "in_progress",
            Some(Finish::MaxTokens | Finish::ContextFull) => "incomplete",
            Some(_) => "completed",
        };
        let incomplete = (status == "incomplete").then(|| json!({"reason": "max_output_tokens"}));
        let output = self.done.as_ref().map(|_| self.message(status));
        let usage = self.done.as_ref().map(|done| {
            let usage = &done.usage;
            json!({
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
                "moeflux": engine_usage(usage),
            })
        });
        json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": null,
            "incomplete_details": incomplete,
            "instructions": null,
            "model": self.app.options.model,
            "output": output.into_iter().collect::<Vec<_>>(),
            "parallel_tool_calls": false,
            "tool_choice": "none",
            "tools": [],
            "metadata": {},
            "usage": usage,
        })
    }

    fn send(&mut self, kind: &str, fields: Value, events: &mut Events) {
        let mut data = json!({"type": kind, "sequence_number": self.number});
        self.number += 1;
        for (key, value) in fields.as_object().into_iter().flatten() {
            data[key] = value.clone();
        }
        events.named(&data);
    }

    /// Where in the output a text event belongs.
    fn place(&self, more: Value) -> Value {
        let mut place = json!({"item_id": self.item, "output_index": 0, "content_index": 0});
        for (key, value) in more.as_object().into_iter().flatten() {
            place[key] = value.clone();
        }
        place
    }
}

impl Render for Reply {
    fn begin(&mut self, events: &mut Events) {
        self.send("response.created", json!({"response": self.object()}), events);
        self.send("response.in_progress", json!({"response": self.object()}), events);
        let item = self.message("in_progress");
        self.send("response.output_item.added", json!({"output_index": 0, "item": item}), events);
        let place = self.place(json!({"part": self.part()}));
        self.send("response.content_part.added", place, events);
    }

    fn update(&mut self, _: usize, update: Update, events: &mut Events) {
        match update {
            Update::Delta(Delta::Text(text)) => {
                self.text.push_str(&text);
                let place = self.place(json!({"delta": text, "logprobs": []}));
                self.send("response.output_text.delta", place, events);
            }
            // This interface shows no reasoning; neither calls nor log-probabilities are asked for.
            Update::Delta(_) | Update::Logprobs(_) => {}
            Update::Done(done) => self.done = Some(done),
            Update::Failed(error) => {
                let fault = json!({"code": "server_error", "message": error.message, "param": null});
                self.send("error", fault, events);
            }
        }
    }

    fn end(&mut self, events: &mut Events) {
        let place = self.place(json!({"text": self.text, "logprobs": []}));
        self.send("response.output_text.done", place, events);
        let place = self.place(json!({"part": self.part()}));
        self.send("response.content_part.done", place, events);
        let response = self.object();
        let item = response["output"][0].clone();
        self.send("response.output_item.done", json!({"output_index": 0, "item": item}), events);
        let last = match response["status"] == "incomplete" {
            true => "response.incomplete",
            false => "response.completed",
        };
        self.send(last, json!({"response": response}), events);
    }
}
