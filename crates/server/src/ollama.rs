//! Ollama's API, as far as its clients need it to talk to a model that is there: chat, generate, embed, and what models there
//! are.
//! Models are neither pulled nor loaded nor unloaded.

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use moeflux::Finish;
use moeflux::scheduler::Done;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::answer::{Answers, Update, Whole};
use crate::embeddings::{Embed, Embedded, Input, Pooling};
use crate::error::{ApiError, Dialect};
use crate::intake::Room;
use crate::markup::{Call, Collected, Delta};
use crate::openai::{chat, now};
use crate::prompt::{Ask, Form, Prompt, Sampling, Texts};
use crate::sse::{self, Events, Render};
use crate::{App, Site, body, fields};

/// Model, options and form, which both ways of asking share.
#[derive(Debug, Deserialize)]
struct Common {
    model: Option<String>,
    format: Option<Value>,
    options: Option<Options>,
    think: Option<Value>,
    stream: Option<bool>,
}

#[derive(Debug, Default, Deserialize)]
struct Options {
    #[serde(flatten)]
    sampling: Sampling,
    /// Most tokens; negative for as many as there is room for.
    num_predict: Option<i64>,
    stop: Option<Texts>,
    #[serde(flatten)]
    more: Map<String, Value>,
}

#[derive(Debug, Deserialize)]
struct ChatRequest {
    #[serde(flatten)]
    common: Common,
    #[serde(default)]
    messages: Vec<Value>,
    tools: Option<Vec<Value>>,
}

#[derive(Debug, Deserialize)]
struct GenerateRequest {
    #[serde(flatten)]
    common: Common,
    #[serde(default)]
    prompt: String,
    system: Option<String>,
    suffix: Option<String>,
    template: Option<String>,
    raw: Option<bool>,
    images: Option<Vec<Value>>,
}

pub(crate) async fn chat(State(site): State<Arc<Site>>, request: Request) -> Response {
    let answered = async {
        let (request, room) = body::json::<ChatRequest>(&site, request).await?;
        let (reply, app) = Reply::new(&site, &request.common, Kind::Chat).await?;
        if request.messages.is_empty() {
            return Ok(Json(reply.loaded()).into_response());
        }
        let messages = request.messages.iter().enumerate().map(|(index, message)| message_of(index, message));
        let messages = messages.collect::<Result<_, _>>()?;
        let tools = chat::tools(request.tools, None, None)?;
        let stream = request.common.stream.unwrap_or(true);
        let ask = request.common.ask(&app, |variables| Prompt::Chat(messages, variables))?;
        let answers = Ask { tools, ..ask }.submit(&app, room).await?;
        reply.answer(answers, stream).await
    };
    answered.await.unwrap_or_else(|error: ApiError| error.response(Dialect::Ollama))
}

pub(crate) async fn generate(State(site): State<Arc<Site>>, request: Request) -> Response {
    let answered = async {
        let (request, room) = body::json::<GenerateRequest>(&site, request).await?;
        let (reply, app) = Reply::new(&site, &request.common, Kind::Generate).await?;
        for (name, given) in [
            ("suffix", request.suffix.as_ref().is_some_and(|text| !text.is_empty())),
            ("template", request.template.as_ref().is_some_and(|text| !text.is_empty())),
            ("images", request.images.as_ref().is_some_and(|images| !images.is_empty())),
        ] {
            if given {
                return Err(ApiError::invalid(name, "is not supported"));
            }
        }
        if request.prompt.is_empty() {
            return Ok(Json(reply.loaded()).into_response());
        }
        let (prompt, system, stream) =
            (request.prompt, request.system, request.common.stream.unwrap_or(true));
        let ask = match request.raw {
            Some(true) => request.common.ask(&app, |_| Prompt::Text(prompt))?,
            _ => {
                let mut messages: Vec<Value> = vec![];
                messages.extend(system.map(|text| json!({"role": "system", "content": text})));
                messages.push(json!({"role": "user", "content": prompt}));
                request.common.ask(&app, |variables| Prompt::Chat(messages, variables))?
            }
        };
        let answers = ask.submit(&app, room).await?;
        reply.answer(answers, stream).await
    };
    answered.await.unwrap_or_else(|error: ApiError| error.response(Dialect::Ollama))
}

/// What both ways of asking for embeddings share.
#[derive(Debug, Deserialize)]
struct EmbedCommon {
    model: Option<String>,
    options: Option<Map<String, Value>>,
    dimensions: Option<usize>,
    pooling: Option<Pooling>,
    /// Whether what is too long may be cut off; nothing is.
    truncate: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct EmbedRequest {
    #[serde(flatten)]
    common: EmbedCommon,
    input: Option<Texts>,
}

#[derive(Debug, Deserialize)]
struct OldEmbedRequest {
    #[serde(flatten)]
    common: EmbedCommon,
    #[serde(default)]
    prompt: String,
}

#[derive(Debug, Serialize)]
struct EmbedReply {
    model: String,
    embeddings: Vec<Vec<f32>>,
    total_duration: u64,
    load_duration: u64,
    prompt_eval_count: usize,
}

#[derive(Debug, Serialize)]
struct OldEmbedReply {
    embedding: Vec<f32>,
}

pub(crate) async fn embed(State(site): State<Arc<Site>>, request: Request) -> Response {
    let begun = Instant::now();
    let embedded = async {
        let (EmbedRequest { common, input }, room) = body::json::<EmbedRequest>(&site, request).await?;
        let texts = match input {
            // Clients load a model by asking for nothing.
            Some(Texts::One(text)) if text.is_empty() => vec![],
            input => input.map(Texts::list).unwrap_or_default(),
        };
        let (model, embedded) = common.embed(&site, "input", texts, room).await?;
        let reply = EmbedReply {
            model,
            embeddings: embedded.embeddings,
            total_duration: begun.elapsed().as_nanos() as u64,
            load_duration: 0,
            prompt_eval_count: embedded.tokens,
        };
        Ok(Json(reply).into_response())
    };
    embedded.await.unwrap_or_else(|error: ApiError| error.response(Dialect::Ollama))
}

/// The older form, of one text.
pub(crate) async fn embeddings(State(site): State<Arc<Site>>, request: Request) -> Response {
    let embedded = async {
        let (request, room) = body::json::<OldEmbedRequest>(&site, request).await?;
        let texts = if request.prompt.is_empty() { vec![] } else { vec![request.prompt] };
        let (_, mut embedded) = request.common.embed(&site, "prompt", texts, room).await?;
        Ok(Json(OldEmbedReply { embedding: embedded.embeddings.pop().unwrap_or_default() }).into_response())
    };
    embedded.await.unwrap_or_else(|error: ApiError| error.response(Dialect::Ollama))
}

impl EmbedCommon {
    /// The model's name and what came of `texts`, which may be none.
    async fn embed(
        self,
        site: &Site,
        param: &'static str,
        texts: Vec<String>,
        room: Room,
    ) -> Result<(String, Embedded), ApiError> {
        let model = self.model.ok_or_else(|| ApiError::invalid("model", "is missing"))?;
        let app = site.model(Some(&model)).await?;
        self.options.as_ref().map_or(Ok(()), fields::refuse)?;
        if texts.is_empty() {
            return Ok((model, Embedded { embeddings: vec![], tokens: 0 }));
        }
        let inputs = texts.into_iter().map(Input::Text).collect();
        let pooling = self.pooling.unwrap_or_default();
        let embed = Embed { param, inputs, pooling, dimensions: self.dimensions };
        let too_long = |error: ApiError| match self.truncate {
            Some(true) if error.code == Some("context_length_exceeded") => {
                ApiError { message: format!("{}; nothing is truncated", error.message), ..error }
            }
            _ => error,
        };
        Ok((model, embed.run(&app, room).await.map_err(too_long)?))
    }
}

/// A message as chat templates expect it.
fn message_of(index: usize, message: &Value) -> Result<Value, ApiError> {
    if message.get("images").and_then(Value::as_array).is_some_and(|images| !images.is_empty()) {
        return Err(ApiError::invalid(&format!("messages[{index}]"), "images are not supported"));
    }
    let mut normal = chat::normal(index, message)?;
    if let Some(thinking) = message.get("thinking").filter(|thinking| thinking.is_string()) {
        normal["reasoning_content"] = thinking.clone();
    }
    Ok(normal)
}

impl Common {
    fn ask(self, app: &App, prompt: impl FnOnce(Map<String, Value>) -> Prompt) -> Result<Ask, ApiError> {
        let options = self.options.unwrap_or_default();
        fields::refuse(&options.more)?;
        let mut variables = Map::new();
        match &self.think {
            Some(Value::Bool(think)) => drop(variables.insert("enable_thinking".into(), json!(think))),
            Some(Value::String(effort)) => Ask::set_effort(&mut variables, Some(effort)),
            _ => {}
        }
        let json = |schema| Form::Json { schema, param: "format", strict: false };
        let form = match self.format {
            None | Some(Value::Null) => Form::Text,
            Some(Value::String(text)) if text.is_empty() => Form::Text,
            Some(Value::String(text)) if text == "json" => json(json!({"type": "object"})),
            Some(schema @ Value::Object(_)) => json(schema),
            Some(_) => return Err(ApiError::invalid("format", "expected \"json\" or a JSON schema")),
        };
        let context = app.scheduler.description().context;
        let max_tokens = options.num_predict.map(|count| usize::try_from(count).unwrap_or(context));
        Ok(Ask {
            sampling: options.sampling,
            max_tokens,
            stop: options.stop.map(Texts::list).unwrap_or_default(),
            form,
            ..Ask::new(vec![prompt(variables)])
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Chat,
    Generate,
}

/// An answer, whole or as lines of JSON.
struct Reply {
    model: String,
    kind: Kind,
    said: Collected,
    done: Option<Done>,
}

impl Reply {
    async fn new(site: &Site, common: &Common, kind: Kind) -> Result<(Self, Arc<App>), ApiError> {
        let model = common.model.as_deref().ok_or_else(|| ApiError::invalid("model", "is missing"))?;
        let app = site.model(Some(model)).await?;
        Ok((Self { model: model.to_owned(), kind, said: Collected::default(), done: None }, app))
    }

    /// The answer to a request that says nothing, by which clients load a model.
    fn loaded(&self) -> Value {
        let mut object = self.object(Collected::default());
        (object["done"], object["done_reason"]) = (json!(true), json!("load"));
        object
    }

    async fn answer(mut self, answers: Answers, stream: bool) -> Result<Response, ApiError> {
        if stream {
            let mut response = sse::stream(answers, self);
            let kind = HeaderValue::from_static("application/x-ndjson");
            response.headers_mut().insert(header::CONTENT_TYPE, kind);
            return Ok(response);
        }
        let Whole { said, done, .. } = answers.collect().await?.pop().unwrap_or_default();
        self.done = done;
        Ok(Json(self.object(said)).into_response())
    }

    /// What `said` adds, and if the answer is complete what it took.
    fn object(&self, said: Collected) -> Value {
        let mut object =
            json!({"model": self.model, "created_at": timestamp(now()), "done": self.done.is_some()});
        match self.kind {
            Kind::Generate => object["response"] = json!(said.text),
            Kind::Chat => object["message"] = json!({"role": "assistant", "content": said.text}),
        }
        let message = if self.kind == Kind::Chat { &mut object["message"] } else { &mut object };
        if !said.reasoning.is_empty() {
            message["thinking"] = json!(said.reasoning);
        }
        // Arguments that were cut off are no object, and nothing to act on.
        let of = |call: &Call| {
            let arguments: Value = serde_json::from_str(&call.arguments).ok()?;
            Some(json!({"function": {"name": call.name, "arguments": arguments}}))
        };
        let calls: Vec<Value> = said.calls.iter().filter(|call| call.complete).filter_map(of).collect();
        if !calls.is_empty() {
            message["tool_calls"] = json!(calls);
        }
        if let Some(Done { finish, usage, .. }) = &self.done {
            let reason = match finish {
                Finish::EndOfText | Finish::Stopped => "stop",
                Finish::MaxTokens | Finish::ContextFull => "length",
            };
            let evaluating = usage.first_token.saturating_sub(usage.queued);
            let generating = usage.total.saturating_sub(usage.first_token);
            for (key, value) in [
                ("done_reason", json!(reason)),
                ("total_duration", json!(usage.total.as_nanos() as u64)),
                ("load_duration", json!(0)),
                ("prompt_eval_count", json!(usage.prompt_tokens)),
                ("prompt_eval_duration", json!(evaluating.as_nanos() as u64)),
                ("eval_count", json!(usage.completion_tokens)),
                ("eval_duration", json!(generating.as_nanos() as u64)),
            ] {
                object[key] = value;
            }
        }
        object
    }

    fn send(&self, said: Collected, events: &mut Events) {
        events.raw(&format!("{}\n", self.object(said)));
    }
}

impl Render for Reply {
    fn update(&mut self, _: usize, update: Update, events: &mut Events) {
        match update {
            Update::Delta(delta @ (Delta::Text(_) | Delta::Reasoning(_))) => {
                let mut said = Collected::default();
                said.add(delta);
                self.send(said, events);
            }
            // Calls are sent when they are complete, as this interface has it.
            Update::Delta(delta) => {
                let ends = delta == Delta::CallEnd;
                self.said.add(delta);
                if ends {
                    let said = std::mem::take(&mut self.said);
                    self.send(said, events);
                }
            }
            Update::Logprobs(_) | Update::Progress(_) => {}
            Update::Done(done) => self.done = Some(done),
            Update::Failed(error) => events.raw(&format!("{}\n", error.json(Dialect::Ollama))),
        }
    }

    fn end(&mut self, events: &mut Events) {
        self.send(Collected::default(), events);
    }

    /// Lines of JSON have no comments.
    fn ping(&self, _: &mut Events) {}
}

/// The name that clients know the model by, and what little of it this interface wants.
fn describe(site: &Site, name: &str) -> Value {
    json!({
        "name": name,
        "model": name,
        "modified_at": timestamp(site.created),
        "details": {"family": "", "families": [], "format": "", "parameter_size": "", "quantization_level": ""},
    })
}

pub(crate) async fn tags(State(site): State<Arc<Site>>) -> Response {
    let models: Vec<Value> = site.models.names().map(|name| describe(&site, name)).collect();
    Json(json!({"models": models})).into_response()
}

pub(crate) async fn running(State(site): State<Arc<Site>>) -> Response {
    let running = |app: Arc<App>| {
        let mut model = describe(&site, &app.name);
        model["context_length"] = json!(app.scheduler.description().context);
        let memory = app.scheduler.figures().memory;
        model["size"] = json!(memory.budget.min(memory.grants.1));
        model
    };
    let models: Vec<Value> = site.models.all_loaded().into_iter().map(running).collect();
    Json(json!({"models": models})).into_response()
}

#[derive(Debug, Deserialize)]
struct ShowRequest {
    #[serde(alias = "name")]
    model: String,
}

pub(crate) async fn show(State(site): State<Arc<Site>>, request: Request) -> Response {
    let shown = async {
        let (request, _room) = body::json::<ShowRequest>(&site, request).await?;
        let app = site.model(Some(&request.model)).await?;
        let mut capabilities = vec!["completion"];
        capabilities.extend(app.markup.calls_tools().then_some("tools"));
        capabilities.extend(app.markup.thinks().then_some("thinking"));
        let mut model = describe(&site, &app.name);
        model["capabilities"] = json!(capabilities);
        model["model_info"] = json!({
            "general.architecture": "moeflux",
            "moeflux.context_length": app.scheduler.description().context,
        });
        Ok(Json(model).into_response())
    };
    shown.await.unwrap_or_else(|error: ApiError| error.response(Dialect::Ollama))
}

pub(crate) async fn version() -> Response {
    Json(json!({"version": env!("CARGO_PKG_VERSION")})).into_response()
}

/// Models come and go with the server.
pub(crate) async fn unsupported() -> Response {
    let message = "models are not managed by this server";
    ApiError::new(StatusCode::NOT_IMPLEMENTED, message).response(Dialect::Ollama)
}

/// Seconds since 1970 as RFC 3339 writes them, in UTC.
fn timestamp(seconds: u64) -> String {
    let (mut days, second) = (seconds / 86_400, seconds % 86_400);
    let is_leap =
        |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let mut year = 1970;
    while days >= 365 + u64::from(is_leap(year)) {
        days -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let mut month = 1;
    for length in [31, 28 + u64::from(is_leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    let (hour, minute) = (second / 3600, second / 60 % 60);
    format!("{year:04}-{month:02}-{:02}T{hour:02}:{minute:02}:{:02}Z", days + 1, second % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        for (seconds, expected) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_827_696, "2000-02-29T12:34:56Z"),
            (1_709_251_199, "2024-02-29T23:59:59Z"),
            (1_735_689_599, "2024-12-31T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(timestamp(seconds), expected);
        }
    }
}
