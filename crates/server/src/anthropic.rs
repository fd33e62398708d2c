//! Anthropic's `/v1/messages`.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use moeflux::Finish;
use moeflux::scheduler::Done;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::answer::{Update, Whole};
use crate::error::{ApiError, Dialect};
use crate::markup::{Call, Choice, Delta, Tool, Tools};
use crate::openai::{engine_usage, unique};
use crate::prompt::{self, Prompt};
use crate::prompt::{Ask, Form, Sampling, content_text};
use crate::sse::{self, Events, Render, Tell};
use crate::{App, Site, body, fields, pictures};

#[derive(Debug, Deserialize)]
struct MessagesRequest {
    model: String,
    messages: Vec<Value>,
    system: Option<Value>,
    max_tokens: Option<usize>,
    #[serde(flatten)]
    sampling: Sampling,
    stop_sequences: Option<Vec<String>>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    thinking: Option<Value>,
    output_config: Option<Value>,
    stream: Option<bool>,
    #[serde(flatten)]
    more: Map<String, Value>,
}

pub(crate) async fn handle(State(site): State<Arc<Site>>, request: Request) -> Response {
    answer(&site, request).await.unwrap_or_else(|error| error.response(Dialect::Anthropic))
}

async fn answer(site: &Site, request: Request) -> Result<Response, ApiError> {
    let (request, room) = body::json::<MessagesRequest>(site, request).await?;
    let model = site.find(Some(&request.model))?;
    let stream = request.stream.unwrap_or(false);
    let max_tokens = request.max_tokens.ok_or_else(|| ApiError::invalid("max_tokens", "is missing"))?;
    let ask = request.ask()?;
    let app = site.get(model).await?;
    let answers = Ask { max_tokens: Some(max_tokens), ..ask }.submit(&app, room).await?;
    let prompt_tokens = answers.prompt_tokens();
    let mut reply =
        Reply { id: unique("msg_"), app, prompt_tokens, blocks: 0, open: None, calls: vec![], done: None };
    if stream {
        return Ok(sse::stream(answers, reply));
    }
    let whole = answers.collect().await?.pop().unwrap_or_default();
    Ok(Json(reply.whole(whole)).into_response())
}

pub(crate) async fn count_tokens(State(site): State<Arc<Site>>, request: Request) -> Response {
    let counted = async {
        let (request, room) = body::json::<MessagesRequest>(&site, request).await?;
        let app = site.model(Some(&request.model)).await?;
        let ask = request.ask()?;
        let theirs = Arc::clone(&app);
        let count = tokio::task::spawn_blocking(move || {
            let _room = room;
            let encoded = ask.prompts.iter().map(|prompt| ask.encode(&theirs, prompt));
            encoded.map(|encoded| encoded.map(|encoded| encoded.tokens.len())).sum()
        });
        let count = count.await.unwrap_or(Ok(0))?;
        Ok::<_, ApiError>(Json(json!({"input_tokens": count})).into_response())
    };
    counted.await.unwrap_or_else(|error| error.response(Dialect::Anthropic))
}

impl MessagesRequest {
    fn ask(self) -> Result<Ask, ApiError> {
        fields::refuse(&self.more)?;
        let mut messages = vec![];
        if let Some(system) = &self.system {
            messages.push(json!({"role": "system", "content": content_text(system, "system")?}));
        }
        for (index, message) in self.messages.iter().enumerate() {
            push_message(message, &format!("messages.{index}"), &mut messages)?;
        }
        if self.messages.is_empty() {
            return Err(ApiError::invalid("messages", "expected at least one"));
        }
        // In this interface an answer continues the last message if that is the assistant's.
        let prefill = prompt::take_beginning(&mut messages);
        let mut variables = Map::new();
        let config = |key: &str| self.output_config.as_ref().and_then(|config| config.get(key));
        Ask::set_effort(&mut variables, config("effort").and_then(Value::as_str));
        let form = Form::parse(config("format"), "output_config.format")?;
        let thinking =
            self.thinking.as_ref().and_then(|thinking| thinking.get("type")).and_then(Value::as_str);
        if let Some(thinking) = thinking {
            variables.insert("enable_thinking".into(), json!(thinking != "disabled"));
        }
        Ok(Ask {
            sampling: self.sampling,
            stop: self.stop_sequences.unwrap_or_default(),
            form,
            tools: tools(self.tools, self.tool_choice.as_ref())?,
            prefill,
            ..Ask::new(vec![Prompt::Chat(messages, variables)])
        })
    }
}

/// Appends a message in the form that chat templates expect; results of tools become messages of their own.
fn push_message(message: &Value, param: &str, messages: &mut Vec<Value>) -> Result<(), ApiError> {
    let role = match message.get("role").and_then(Value::as_str) {
        Some(role @ ("user" | "assistant" | "system")) => role,
        _ => return Err(ApiError::invalid(param, "role: expected user or assistant")),
    };
    let content = message.get("content").unwrap_or(&Value::Null);
    let Value::Array(blocks) = content else {
        messages.push(json!({"role": role, "content": content_text(content, param)?}));
        return Ok(());
    };
    let (mut text, mut reasoning, mut calls) = (String::new(), String::new(), vec![]);
    // In their order, which counts where there are pictures among them.
    let (mut parts, mut shows) = (vec![], false);
    for block in blocks {
        let said = |key: &str| block.get(key).and_then(Value::as_str).unwrap_or_default();
        match said("type") {
            "text" => {
                text.push_str(said("text"));
                parts.push(block.clone());
            }
            "image" if role == "user" => {
                shows = true;
                parts.push(block.clone());
            }
            "thinking" => reasoning.push_str(said("thinking")),
            "redacted_thinking" => {}
            "tool_use" => {
                let input = block.get("input").cloned().unwrap_or_else(|| json!({}));
                let function = json!({"name": said("name"), "arguments": input});
                calls.push(json!({"id": said("id"), "type": "function", "function": function}));
            }
            "tool_result" => {
                let result = content_text(block.get("content").unwrap_or(&Value::Null), param)?;
                messages
                    .push(json!({"role": "tool", "content": result, "tool_call_id": said("tool_use_id")}));
            }
            other => {
                let message = format!("content of type {other:?} is not supported");
                return Err(ApiError::invalid(param, message));
            }
        }
    }
    if text.is_empty()
        && calls.is_empty()
        && !shows
        && blocks.iter().any(|block| block["type"] == "tool_result")
    {
        return Ok(());
    }
    let content = if shows { pictures::content(&json!(parts), param)? } else { json!(text) };
    let mut normal = json!({"role": role, "content": content});
    if !reasoning.is_empty() {
        normal["reasoning_content"] = json!(reasoning);
    }
    if !calls.is_empty() {
        normal["tool_calls"] = json!(calls);
    }
    messages.push(normal);
    Ok(())
}

fn tools(tools: Option<Vec<Value>>, choice: Option<&Value>) -> Result<Option<Tools>, ApiError> {
    let said = |key: &str| choice.and_then(|choice| choice.get(key)).and_then(Value::as_str);
    let wanted = match (choice, said("type")) {
        (None | Some(Value::Null), _) | (_, Some("auto")) => Choice::Auto,
        (_, Some("none")) => return Ok(None),
        (_, Some("any")) => Choice::Required,
        (_, Some("tool")) => Choice::Named(said("name").unwrap_or_default().into()),
        _ => return Err(ApiError::invalid("tool_choice", "type: expected auto, any, tool or none")),
    };
    let given = tools.unwrap_or_default();
    if given.is_empty() {
        return match wanted {
            Choice::Auto => Ok(None),
            _ => Err(ApiError::invalid("tool_choice", "no tools were given")),
        };
    }
    let tool = |tool: &Value| {
        let name = tool.get("name").and_then(Value::as_str);
        let schema = tool.get("input_schema");
        let (Some(name), Some(schema)) = (name, schema) else {
            return Err(ApiError::invalid("tools", "expected objects with name and input_schema"));
        };
        let description = tool.get("description").and_then(Value::as_str).map(str::to_owned);
        let strict = tool.get("strict").and_then(Value::as_bool).unwrap_or(false);
        Ok(Tool { name: name.into(), description, parameters: schema.clone(), strict })
    };
    let tools = given.iter().map(tool).collect::<Result<_, ApiError>>()?;
    let single = choice.and_then(|choice| choice.get("disable_parallel_tool_use")).and_then(Value::as_bool);
    Ok(Some(Tools { tools, choice: wanted, parallel: !single.unwrap_or(false) }))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Block {
    Thinking,
    Text,
    Call,
}

struct Reply {
    id: String,
    app: Arc<App>,
    prompt_tokens: usize,
    /// Blocks that were opened.
    blocks: usize,
    /// The block that text is being appended to.
    open: Option<Block>,
    /// Whether each call is complete.
    calls: Vec<bool>,
    done: Option<Done>,
}

/// `called` if there are calls and all are complete.
fn stop_reason(done: &Done, called: bool) -> &'static str {
    match done.finish {
        _ if called => "tool_use",
        Finish::EndOfText => "end_turn",
        Finish::Stopped => "stop_sequence",
        Finish::MaxTokens => "max_tokens",
        Finish::ContextFull => "model_context_window_exceeded",
    }
}

fn tool_use(name: &str, input: Value) -> Value {
    json!({"type": "tool_use", "id": unique("toolu_"), "name": name, "input": input})
}

impl Reply {
    /// Until the answer is complete, nobody knows how much of the prompt is known already.
    fn usage(&self) -> Value {
        let Some(Done { usage, .. }) = &self.done else {
            return json!({"input_tokens": self.prompt_tokens, "output_tokens": 0});
        };
        json!({
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_read_input_tokens": usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage.completion_tokens,
            "moeflux": engine_usage(usage),
        })
    }

    fn message(&self, content: Value, called: bool) -> Value {
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.app.name,
            "content": content,
            "stop_reason": self.done.as_ref().map(|done| stop_reason(done, called)),
            "stop_sequence": self.done.as_ref().and_then(|done| done.stopped_by.clone()),
            "usage": self.usage(),
        })
    }

    fn whole(&mut self, whole: Whole) -> Value {
        let mut content = vec![];
        let said = whole.said;
        if !said.reasoning.is_empty() {
            content.push(json!({"type": "thinking", "thinking": said.reasoning, "signature": ""}));
        }
        if !said.text.is_empty() {
            content.push(json!({"type": "text", "text": said.text}));
        }
        // Arguments that were cut off are no object, and nothing to act on.
        let of = |call: &Call| Some(tool_use(&call.name, serde_json::from_str(&call.arguments).ok()?));
        content.extend(said.calls.iter().filter(|call| call.complete).filter_map(of));
        self.done = whole.done;
        self.message(json!(content), said.called())
    }

    fn begin_block(&mut self, block: Value, events: &mut Events) {
        events.named(&json!({"type": "content_block_start", "index": self.blocks, "content_block": block}));
        self.blocks += 1;
    }

    fn delta(&self, delta: Value, events: &mut Events) {
        events.named(&json!({"type": "content_block_delta", "index": self.blocks - 1, "delta": delta}));
    }

    fn end_block(&mut self, events: &mut Events) {
        if self.open.take().is_some() {
            events.named(&json!({"type": "content_block_stop", "index": self.blocks - 1}));
        }
    }

    /// Makes `block` the one that text is appended to.
    fn enter(&mut self, block: Block, events: &mut Events) {
        if self.open != Some(block) {
            self.end_block(events);
            let empty = match block {
                Block::Thinking => json!({"type": "thinking", "thinking": "", "signature": ""}),
                _ => json!({"type": "text", "text": ""}),
            };
            self.begin_block(empty, events);
            self.open = Some(block);
        }
    }
}

impl Render for Reply {
    fn begin(&mut self, events: &mut Events) {
        events.named(&json!({"type": "message_start", "message": self.message(json!([]), false)}));
    }

    fn update(&mut self, _: usize, update: Update, events: &mut Events) {
        match update {
            Update::Delta(Delta::Text(text)) => {
                self.enter(Block::Text, events);
                self.delta(json!({"type": "text_delta", "text": text}), events);
            }
            Update::Delta(Delta::Reasoning(text)) => {
                self.enter(Block::Thinking, events);
                self.delta(json!({"type": "thinking_delta", "thinking": text}), events);
            }
            Update::Delta(Delta::CallBegin(name)) => {
                self.end_block(events);
                self.begin_block(tool_use(&name, json!({})), events);
                self.open = Some(Block::Call);
                self.calls.push(false);
            }
            Update::Delta(Delta::Arguments(text)) => {
                self.delta(json!({"type": "input_json_delta", "partial_json": text}), events);
            }
            Update::Delta(Delta::CallEnd) => {
                self.end_block(events);
                if let Some(last) = self.calls.last_mut() {
                    *last = true;
                }
            }
            Update::Progress(progress) => events.raw(&progress.comment()),
            Update::Logprobs(_) => {}
            Update::Done(done) => self.done = Some(done),
            Update::Failed(error) => events.named(&error.json(Dialect::Anthropic)),
        }
    }

    fn end(&mut self, events: &mut Events) {
        self.end_block(events);
        let called = !self.calls.is_empty() && self.calls.iter().all(|complete| *complete);
        let message = self.message(json!([]), called);
        let delta = json!({"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]});
        events.named(&json!({"type": "message_delta", "delta": delta, "usage": message["usage"]}));
        events.named(&json!({"type": "message_stop"}));
    }

    fn ping(&self, events: &mut Events) {
        events.named(&json!({"type": "ping"}));
    }
}
