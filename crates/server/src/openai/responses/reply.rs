//! A response: whole, or as events.

use std::sync::Arc;

use moeflux::Finish;
use moeflux::scheduler::Done;
use serde_json::{Value, json};

use crate::App;
use crate::answer::{Update, Whole};
use crate::markup::{Collected, Delta};
use crate::openai::{engine_usage, now, unique};
use crate::sse::{Events, Render, Tell};

/// What a response repeats of its request.
#[derive(Debug)]
pub(super) struct Echo {
    pub(super) tools: Vec<Value>,
    pub(super) tool_choice: Value,
    pub(super) parallel: bool,
}

/// A part of the output.
#[derive(Debug)]
struct Item {
    id: String,
    what: What,
    status: &'static str,
}

#[derive(Debug)]
enum What {
    Message(String),
    Call { id: String, name: String, arguments: String },
}

impl Item {
    fn message() -> Self {
        Self { id: unique("msg_"), what: What::Message(String::new()), status: "in_progress" }
    }

    fn call(name: String) -> Self {
        let what = What::Call { id: unique("call_"), name, arguments: String::new() };
        Self { id: unique("fc_"), what, status: "in_progress" }
    }

    fn json(&self) -> Value {
        match &self.what {
            What::Message(text) => {
                let content = if self.status == "in_progress" { json!([]) } else { json!([part(text)]) };
                json!({"type": "message", "id": self.id, "status": self.status, "role": "assistant", "content": content})
            }
            What::Call { id, name, arguments } => json!({
                "type": "function_call",
                "id": self.id,
                "call_id": id,
                "name": name,
                "arguments": arguments,
                "status": self.status,
            }),
        }
    }
}

fn part(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": []})
}

pub(super) struct Reply {
    id: String,
    created: u64,
    app: Arc<App>,
    echo: Echo,
    items: Vec<Item>,
    /// The last item is still being made.
    open: bool,
    /// Number of the next event.
    number: usize,
    done: Option<Done>,
}

impl Reply {
    pub(super) fn new(app: Arc<App>, echo: Echo) -> Self {
        let (id, created) = (unique("resp_"), now());
        Self { id, created, app, echo, items: vec![], open: false, number: 0, done: None }
    }

    pub(super) fn whole(&mut self, whole: Whole) -> Value {
        let Whole { said: Collected { text, calls, .. }, done, .. } = whole;
        self.done = done;
        let cut = self.status();
        if !text.is_empty() || calls.is_empty() {
            let status = if calls.is_empty() { cut } else { "completed" };
            self.items.push(Item { status, what: What::Message(text), ..Item::message() });
        }
        for call in calls {
            let mut item = Item::call(call.name);
            item.status = if call.complete { "completed" } else { "incomplete" };
            if let What::Call { arguments, .. } = &mut item.what {
                *arguments = call.arguments;
            }
            self.items.push(item);
        }
        self.object()
    }

    fn status(&self) -> &'static str {
        match self.done.as_ref().map(|done| done.finish) {
            None => "in_progress",
            Some(Finish::MaxTokens | Finish::ContextFull) => "incomplete",
            Some(_) => "completed",
        }
    }

    fn object(&self) -> Value {
        let status = self.status();
        let incomplete = (status == "incomplete").then(|| json!({"reason": "max_output_tokens"}));
        let output: Vec<Value> = match self.done {
            Some(_) => self.items.iter().map(Item::json).collect(),
            None => vec![],
        };
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
            "output": output,
            "parallel_tool_calls": self.echo.parallel,
            "tool_choice": self.echo.tool_choice,
            "tools": self.echo.tools,
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

    /// Sends an event of the last item.
    fn tell(&mut self, kind: &str, mut fields: Value, events: &mut Events) {
        let Some(item) = self.items.last() else { return };
        fields["item_id"] = json!(item.id);
        fields["output_index"] = json!(self.items.len() - 1);
        if matches!(item.what, What::Message(_)) {
            fields["content_index"] = json!(0);
        }
        self.send(kind, fields, events);
    }

    fn begin_item(&mut self, item: Item, events: &mut Events) {
        self.end_item("completed", events);
        let added = json!({"output_index": self.items.len(), "item": item.json()});
        self.send("response.output_item.added", added, events);
        let is_message = matches!(item.what, What::Message(_));
        self.items.push(item);
        self.open = true;
        if is_message {
            self.tell("response.content_part.added", json!({"part": part("")}), events);
        }
    }

    fn end_item(&mut self, status: &'static str, events: &mut Events) {
        if !std::mem::replace(&mut self.open, false) {
            return;
        }
        match self.items.last().map(|item| &item.what) {
            Some(What::Message(text)) => {
                let part = part(text);
                self.tell("response.output_text.done", json!({"text": text.clone(), "logprobs": []}), events);
                self.tell("response.content_part.done", json!({"part": part}), events);
            }
            Some(What::Call { name, arguments, .. }) => {
                let fields = json!({"name": name, "arguments": arguments});
                self.tell("response.function_call_arguments.done", fields, events);
            }
            None => {}
        }
        if let Some(item) = self.items.last_mut() {
            item.status = status;
            let item = item.json();
            let done = json!({"output_index": self.items.len() - 1, "item": item});
            self.send("response.output_item.done", done, events);
        }
    }

    /// Appends to the last item.
    fn append(&mut self, piece: String, events: &mut Events) {
        let kind = match self.items.last_mut().map(|item| &mut item.what) {
            Some(What::Message(text)) => {
                text.push_str(&piece);
                "response.output_text.delta"
            }
            Some(What::Call { arguments, .. }) => {
                arguments.push_str(&piece);
                "response.function_call_arguments.delta"
            }
            None => return,
        };
        let mut fields = json!({"delta": piece});
        if kind == "response.output_text.delta" {
            fields["logprobs"] = json!([]);
        }
        self.tell(kind, fields, events);
    }
}

impl Render for Reply {
    fn begin(&mut self, events: &mut Events) {
        self.send("response.created", json!({"response": self.object()}), events);
        self.send("response.in_progress", json!({"response": self.object()}), events);
    }

    fn update(&mut self, _: usize, update: Update, events: &mut Events) {
        match update {
            Update::Delta(Delta::Text(text)) => {
                let in_message =
                    self.open && self.items.last().is_some_and(|item| matches!(item.what, What::Message(_)));
                if !in_message {
                    self.begin_item(Item::message(), events);
                }
                self.append(text, events);
            }
            Update::Delta(Delta::CallBegin(name)) => self.begin_item(Item::call(name), events),
            Update::Delta(Delta::Arguments(text)) => self.append(text, events),
            Update::Delta(Delta::CallEnd) => self.end_item("completed", events),
            Update::Progress(progress) => events.raw(&progress.comment()),
            // This interface shows no reasoning, and log-probabilities are not asked for.
            Update::Delta(Delta::Reasoning(_)) | Update::Logprobs(_) => {}
            Update::Done(done) => self.done = Some(done),
            Update::Failed(error) => {
                let fault = json!({"code": "server_error", "message": error.message, "param": null});
                self.send("error", fault, events);
            }
        }
    }

    fn end(&mut self, events: &mut Events) {
        if self.items.is_empty() {
            self.begin_item(Item::message(), events);
        }
        self.end_item(self.status(), events);
        let last = match self.status() {
            "incomplete" => "response.incomplete",
            _ => "response.completed",
        };
        self.send(last, json!({"response": self.object()}), events);
    }
}
