//! `/v1/embeddings`.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::embeddings::{Embed, Embedded, Input, Pooling};
use crate::error::{ApiError, Dialect};
use crate::{Site, body, fields};

#[derive(Debug, Deserialize)]
struct EmbeddingRequest {
    model: Option<String>,
    input: InputField,
    encoding_format: Option<Encoding>,
    dimensions: Option<usize>,
    pooling: Option<Pooling>,
    #[serde(flatten)]
    more: Map<String, Value>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "input: expected a string, token ids, or a list of either")]
enum InputField {
    Text(String),
    Texts(Vec<String>),
    Tokens(Vec<u32>),
    TokenLists(Vec<Vec<u32>>),
}

#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Encoding {
    #[default]
    Float,
    Base64,
}

/// Written as it is: values of JSON would take many times the memory of so many numbers.
#[derive(Debug, Serialize)]
struct EmbeddingList<'a> {
    object: &'static str,
    data: Vec<Item>,
    model: &'a str,
    usage: EmbeddingUsage,
}

#[derive(Debug, Serialize)]
struct Item {
    object: &'static str,
    index: usize,
    embedding: Encoded,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Encoded {
    Float(Vec<f32>),
    Base64(String),
}

#[derive(Debug, Serialize)]
struct EmbeddingUsage {
    prompt_tokens: usize,
    total_tokens: usize,
}

pub(crate) async fn handle(State(site): State<Arc<Site>>, request: Request) -> Response {
    embed(&site, request).await.unwrap_or_else(|error| error.response(Dialect::OpenAi))
}

async fn embed(site: &Site, request: Request) -> Result<Response, ApiError> {
    let (request, room) = body::json::<EmbeddingRequest>(site, request).await?;
    let model = site.find(request.model.as_deref())?;
    fields::refuse(&request.more)?;
    let inputs = match request.input {
        InputField::Text(text) => vec![Input::Text(text)],
        InputField::Texts(texts) => texts.into_iter().map(Input::Text).collect(),
        InputField::Tokens(tokens) => vec![Input::Tokens(tokens)],
        InputField::TokenLists(lists) => lists.into_iter().map(Input::Tokens).collect(),
    };
    let (pooling, dimensions) = (request.pooling.unwrap_or_default(), request.dimensions);
    let embed = Embed { param: "input", inputs, pooling, dimensions };
    let app = site.get(model).await?;
    let Embedded { embeddings, tokens } = embed.run(&app, room).await?;
    let encoding = request.encoding_format.unwrap_or_default();
    let item =
        |(index, embedding)| Item { object: "embedding", index, embedding: encoding.encode(embedding) };
    let list = EmbeddingList {
        object: "list",
        data: embeddings.into_iter().enumerate().map(item).collect(),
        model: &app.name,
        usage: EmbeddingUsage { prompt_tokens: tokens, total_tokens: tokens },
    };
    Ok(Json(list).into_response())
}

impl Encoding {
    fn encode(self, embedding: Vec<f32>) -> Encoded {
        match self {
            Self::Float => Encoded::Float(embedding),
            Self::Base64 => {
                let bytes: Vec<u8> = embedding.iter().flat_map(|value| value.to_le_bytes()).collect();
                Encoded::Base64(base64(&bytes))
            }
        }
    }
}

/// Base64 with padding, RFC 4648 section 4.
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let byte = |at: usize| u32::from(group.get(at).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for digit in 0..4 {
            let value = bits >> (18 - 6 * digit) & 63;
            text.push(if digit <= group.len() { char::from(DIGITS[value as usize]) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The examples of RFC 4648, and what none of them has.
    #[test]
    fn base64_as_specified() {
        for (bytes, expected) in [
            (&b""[..], ""),
            (b"f", "Zg=="),
            (b"fo", "Zm8="),
            (b"foo", "Zm9v"),
            (b"foobar", "Zm9vYmFy"),
            (&[0xff, 0xff, 0xfe, 0xfb], "///++w=="),
        ] {
            assert_eq!(base64(bytes), expected);
        }
    }
}
