//! `/v1/completions`: continues a text, without a chat template.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use moeflux::decoding::TokenLogprobs;
use moeflux::scheduler::Done;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::chat::StreamOptions;
use super::{finish_reason, now, token_text, unique, usage};
use crate::answer::{Update, Whole};
use crate::error::{ApiError, Dialect};
use crate::markup::Delta;
use crate::prompt::{Ask, Form, Prompt, Sampling, Texts};
use crate::sse::{self, Events, Render, Tell};
use crate::{App, Site, body, fields};

const MAX_LOGPROBS: usize = 20;
const MAX_PROMPTS: usize = 16;

#[derive(Debug, Deserialize)]
struct CompletionRequest {
    model: Option<String>,
    prompt: PromptField,
    #[serde(flatten)]
    sampling: Sampling,
    max_tokens: Option<usize>,
    stop: Option<Texts>,
    n: Option<usize>,
    logprobs: Option<usize>,
    response_format: Option<Value>,
    echo: Option<bool>,
    suffix: Option<String>,
    best_of: Option<usize>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    prompt_cache_key: Option<String>,
    #[serde(flatten)]
    more: Map<String, Value>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "prompt: expected a string, token ids, or a list of either")]
enum PromptField {
    Text(String),
    Texts(Vec<String>),
    Tokens(Vec<u32>),
    TokenLists(Vec<Vec<u32>>),
}

pub(crate) async fn handle(State(site): State<Arc<Site>>, request: Request) -> Response {
    answer(&site, request).await.unwrap_or_else(|error| error.response(Dialect::OpenAi))
}

async fn answer(site: &Site, request: Request) -> Result<Response, ApiError> {
    let (request, room) = body::json::<CompletionRequest>(site, request).await?;
    let model = site.find(request.model.as_deref())?;
    let stream = request.stream.unwrap_or(false);
    let with_usage = request.stream_options.as_ref().is_some_and(|options| options.include_usage);
    let echo = request.echo == Some(true);
    let n = request.n.unwrap_or(1);
    let tried = request.best_of.unwrap_or(n);
    let shown = request.logprobs;
    let ask = request.ask()?;
    let app = site.get(model).await?;
    let echo = if echo {
        ask.prompts.iter().map(|prompt| shown_prompt(&app, prompt)).collect::<Result<_, _>>()?
    } else {
        vec![]
    };
    let answers = ask.submit(&app, room).await?;
    let head = Head { id: unique("cmpl-"), created: now(), n, echo, app };
    if stream {
        return Ok(sse::stream(answers, Chunks { head, with_usage, begun: vec![], dones: vec![] }));
    }
    let wholes = answers.collect().await?;
    let best = wholes.chunks(tried).flat_map(|tried| best(tried, n));
    let choices = best.enumerate().map(|(index, whole)| {
        let reason = whole.done.as_ref().map(|done| finish_reason(done, false));
        let text = format!("{}{}", head.before(index), whole.said.text);
        let logprobs = if shown.is_some() { &whole.logprobs[..] } else { &[] };
        head.choice(index, &text, logprobs, json!(reason))
    });
    let mut object = head.object(choices.collect());
    let dones = wholes.iter().enumerate();
    object["usage"] = usage(dones.filter_map(|(index, whole)| Some((index / tried, whole.done.as_ref()?))));
    Ok(Json(object).into_response())
}

/// A prompt as it is repeated before its answer.
fn shown_prompt(app: &App, prompt: &Prompt) -> Result<String, ApiError> {
    match prompt {
        Prompt::Tokens(tokens) => {
            let text = app.scheduler.tokenizer().decode(tokens, false);
            text.map_err(|error| ApiError::invalid("prompt", error))
        }
        Prompt::Text(text) => Ok(text.clone()),
        Prompt::Chat(..) => Ok(String::new()),
    }
}

/// The `n` most likely of several answers, by the mean log-probability of their tokens; as they are if none is to be
/// left out.
fn best(tried: &[Whole], n: usize) -> Vec<&Whole> {
    let mut best: Vec<&Whole> = tried.iter().collect();
    if n < best.len() {
        let mean = |whole: &Whole| {
            let all = whole.logprobs.iter().map(|token| f64::from(token.chosen.logprob));
            all.sum::<f64>() / whole.logprobs.len().max(1) as f64
        };
        best.sort_by(|a, b| mean(b).total_cmp(&mean(a)));
        best.truncate(n);
    }
    best
}

impl CompletionRequest {
    fn ask(self) -> Result<Ask, ApiError> {
        fields::refuse(&self.more)?;
        let n = self.n.unwrap_or(1);
        let tried = self.best_of.unwrap_or(n);
        if self.echo == Some(true) && self.logprobs.is_some() {
            return Err(ApiError::invalid("echo", "log-probabilities of prompts are not supported"));
        }
        if self.suffix.is_some_and(|suffix| !suffix.is_empty()) {
            return Err(ApiError::invalid("suffix", "is not supported"));
        }
        if n == 0 || tried < n {
            return Err(ApiError::invalid("best_of", "expected at least n, and n at least 1"));
        }
        if tried > n && self.stream == Some(true) {
            return Err(ApiError::invalid(
                "best_of",
                "the best answer cannot be streamed before it is known",
            ));
        }
        if self.logprobs.is_some_and(|count| count > MAX_LOGPROBS) {
            return Err(ApiError::invalid("logprobs", format!("expected at most {MAX_LOGPROBS}")));
        }
        let prompts: Vec<Prompt> = match self.prompt {
            PromptField::Text(text) => vec![Prompt::Text(text)],
            PromptField::Texts(texts) => texts.into_iter().map(Prompt::Text).collect(),
            PromptField::Tokens(tokens) => vec![Prompt::Tokens(tokens)],
            PromptField::TokenLists(lists) => lists.into_iter().map(Prompt::Tokens).collect(),
        };
        if prompts.is_empty() || prompts.len() > MAX_PROMPTS {
            return Err(ApiError::invalid("prompt", format!("expected 1 to {MAX_PROMPTS} prompts")));
        }
        Ok(Ask {
            sampling: self.sampling,
            max_tokens: Some(self.max_tokens.unwrap_or(16)),
            stop: self.stop.map(Texts::list).unwrap_or_default(),
            answers: tried,
            logprobs: if tried > n { Some(self.logprobs.unwrap_or(0)) } else { self.logprobs },
            form: fields::form(&self.more, Form::parse(self.response_format.as_ref(), "response_format")?)?,
            conversation: self.prompt_cache_key,
            ..Ask::new(prompts)
        })
    }
}

struct Head {
    id: String,
    created: u64,
    /// Answers to each prompt; not 0.
    n: usize,
    /// What stands before the answers to each prompt, if anything does.
    echo: Vec<String>,
    app: Arc<App>,
}

impl Head {
    /// What stands before an answer.
    fn before(&self, index: usize) -> &str {
        self.echo.get(index / self.n).map_or("", String::as_str)
    }

    fn object(&self, choices: Value) -> Value {
        json!({
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.app.name,
            "choices": choices,
        })
    }

    fn choice(&self, index: usize, text: &str, logprobs: &[TokenLogprobs], reason: Value) -> Value {
        let logprobs = if logprobs.is_empty() { Value::Null } else { self.logprobs(logprobs) };
        json!({"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason})
    }

    /// Log-probabilities in the form of this interface: lists side by side.
    fn logprobs(&self, logprobs: &[TokenLogprobs]) -> Value {
        let tokenizer = self.app.scheduler.tokenizer();
        let text = |token| token_text(tokenizer, token).0;
        let tokens: Vec<String> = logprobs.iter().map(|l| text(l.chosen.token)).collect();
        let offsets = tokens.iter().scan(0, |at, token| {
            let start = *at;
            *at += token.chars().count();
            Some(start)
        });
        let top = |l: &TokenLogprobs| {
            l.top.iter().map(|l| (text(l.token), json!(l.logprob))).collect::<Map<String, Value>>()
        };
        json!({
            "text_offset": offsets.collect::<Vec<_>>(),
            "token_logprobs": logprobs.iter().map(|l| l.chosen.logprob).collect::<Vec<_>>(),
            "top_logprobs": logprobs.iter().map(top).collect::<Vec<_>>(),
            "tokens": tokens,
        })
    }
}

struct Chunks {
    head: Head,
    with_usage: bool,
    /// Answers that have started.
    begun: Vec<usize>,
    /// With the number of its prompt.
    dones: Vec<(usize, Done)>,
}

impl Render for Chunks {
    fn update(&mut self, index: usize, update: Update, events: &mut Events) {
        if !matches!(update, Update::Progress(_) | Update::Failed(_)) && !self.begun.contains(&index) {
            self.begun.push(index);
            let before = self.head.before(index);
            if !before.is_empty() {
                let choice = self.head.choice(index, before, &[], Value::Null);
                events.data(&self.head.object(json!([choice])));
            }
        }
        let choice = match update {
            Update::Delta(Delta::Text(text) | Delta::Reasoning(text)) => {
                self.head.choice(index, &text, &[], Value::Null)
            }
            // There are no functions, and nobody asked how far the prompt is.
            Update::Delta(_) => return,
            Update::Progress(progress) => return events.raw(&progress.comment()),
            Update::Logprobs(logprobs) => self.head.choice(index, "", &[logprobs], Value::Null),
            Update::Done(done) => {
                let reason = json!(finish_reason(&done, false));
                self.dones.push((index / self.head.n, done));
                self.head.choice(index, "", &[], reason)
            }
            Update::Failed(error) => return events.data(&error.json(Dialect::OpenAi)),
        };
        events.data(&self.head.object(json!([choice])));
    }

    fn end(&mut self, events: &mut Events) {
        if self.with_usage {
            let mut object = self.head.object(json!([]));
            object["usage"] = usage(self.dones.iter().map(|(prompt, done)| (*prompt, done)));
            events.data(&object);
        }
        events.raw("data: [DONE]\n\n");
    }
}
