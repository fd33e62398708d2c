//! `/tokenize` and `/detokenize`, with the fields of vLLM's and of llama.cpp's server.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use moeflux::tokenizer::AddSpecial;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::error::{ApiError, Dialect};
use crate::openai::chat::normal;
use crate::{App, Site, body};

#[derive(Debug, Deserialize)]
struct TokenizeRequest {
    model: Option<String>,
    #[serde(alias = "content")]
    prompt: Option<String>,
    messages: Option<Vec<Value>>,
    #[serde(alias = "add_special")]
    add_special_tokens: Option<bool>,
    #[serde(alias = "with_pieces")]
    return_token_strs: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct DetokenizeRequest {
    model: Option<String>,
    tokens: Vec<u32>,
}

pub(crate) async fn tokenize(State(site): State<Arc<Site>>, request: Request) -> Response {
    let made = async {
        let (request, room) = body::json::<TokenizeRequest>(&site, request).await?;
        let app = site.model(request.model.as_deref()).await?;
        let theirs = Arc::clone(&app);
        let made = tokio::task::spawn_blocking(move || {
            let _room = room;
            request.tokens(&theirs)
        });
        made.await.unwrap_or_else(|_| Err(ApiError::invalid("prompt", "cannot be tokenised")))
    };
    made.await.unwrap_or_else(|error| error.response(Dialect::OpenAi))
}

impl TokenizeRequest {
    fn tokens(&self, app: &App) -> Result<Response, ApiError> {
        let tokenizer = app.scheduler.tokenizer();
        let tokens = match (&self.prompt, &self.messages) {
            (Some(text), None) => {
                let add =
                    if self.add_special_tokens == Some(false) { AddSpecial::No } else { AddSpecial::Yes };
                tokenizer.encode(text, add)?
            }
            (None, Some(messages)) => {
                let messages = messages.iter().enumerate();
                let messages: Vec<Value> =
                    messages.map(|(index, message)| normal(index, message)).collect::<Result<_, _>>()?;
                app.markup.encode(&app.scheduler, &messages, None, &Map::new())?.tokens
            }
            _ => return Err(ApiError::invalid("prompt", "expected either a prompt or messages")),
        };
        let mut made = json!({
            "count": tokens.len(),
            "max_model_len": app.scheduler.description().context,
            "tokens": tokens,
        });
        if self.return_token_strs == Some(true) {
            let text = |id: &u32| {
                String::from_utf8_lossy(&tokenizer.token_bytes(*id).unwrap_or_default()).into_owned()
            };
            made["token_strs"] = tokens.iter().map(text).collect();
        }
        Ok(Json(made).into_response())
    }
}

pub(crate) async fn detokenize(State(site): State<Arc<Site>>, request: Request) -> Response {
    let made = async {
        let (request, _room) = body::json::<DetokenizeRequest>(&site, request).await?;
        let app = site.model(request.model.as_deref()).await?;
        let text = app.scheduler.tokenizer().decode(&request.tokens, false);
        let text = text.map_err(|error| ApiError::invalid("tokens", error))?;
        Ok(Json(json!({"prompt": text, "content": text})).into_response())
    };
    made.await.unwrap_or_else(|error: ApiError| error.response(Dialect::OpenAi))
}
