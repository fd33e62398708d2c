//! Pictures in messages: what interfaces write, as parts that chat templates know, and reading them.
//!
//! A part is `{"type": "image", "data": BASE64}` from the interface until the messages are encoded; templates see no data.
//! Pictures are read on the engine's thread between two steps, one at a time.

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use moeflux::{Picture, Scheduler};
use serde_json::{Value, json};

use crate::error::ApiError;
use crate::prompt::content_text;

/// Most pictures of one request.
const MOST: usize = 16;

/// The content of a user's message as chat templates expect it: a text, or if it shows pictures a list of parts.
///
/// # Errors
/// What is neither text nor a picture that came along.
pub(crate) fn content(content: &Value, param: &str) -> Result<Value, ApiError> {
    let is_picture =
        |part: &Value| matches!(part["type"].as_str(), Some("image_url" | "input_image" | "image"));
    let Some(parts) = content.as_array().filter(|parts| parts.iter().any(is_picture)) else {
        return Ok(json!(content_text(content, param)?));
    };
    let part = |part: &Value| {
        if is_picture(part) {
            return Ok(json!({"type": "image", "data": data(part, param)?}));
        }
        Ok(json!({"type": "text", "text": content_text(&json!([part]), param)?}))
    };
    parts.iter().map(part).collect()
}

/// The base64 of a part that shows a picture.
fn data<'a>(part: &'a Value, param: &str) -> Result<&'a str, ApiError> {
    let fault = |message: &str| ApiError::invalid(param, message);
    if part["type"] == "image" {
        let source = &part["source"];
        return match source["type"].as_str() {
            Some("base64") => {
                source["data"].as_str().ok_or_else(|| fault("an image's source: expected base64 in data"))
            }
            _ => {
                Err(fault("an image's source: expected type base64; pictures are not fetched from elsewhere"))
            }
        };
    }
    let url = &part["image_url"];
    let url = url.as_str().or_else(|| url["url"].as_str());
    let url = url.ok_or_else(|| fault("image_url: expected a url"))?;
    let beyond = url.strip_prefix("data:").and_then(|rest| rest.split_once(','));
    match beyond.filter(|(head, _)| head.ends_with(";base64")) {
        Some((_, data)) => Ok(data),
        None => Err(fault("image_url: expected data:…;base64,…; pictures are not fetched from elsewhere")),
    }
}

/// Takes the pictures out of messages and has them read.
///
/// # Errors
/// What is no picture, and what the model cannot read.
pub(crate) fn read(scheduler: &Scheduler, messages: &mut [Value]) -> Result<Vec<Arc<Picture>>, ApiError> {
    let mut pictures = vec![];
    for (index, message) in messages.iter_mut().enumerate() {
        let param = format!("messages[{index}]");
        let parts = message.get_mut("content").and_then(Value::as_array_mut);
        for part in parts.into_iter().flatten() {
            let Some(data) = part.as_object_mut().and_then(|part| part.remove("data")) else { continue };
            if !scheduler.description().reads_pictures {
                let message = "this server reads no pictures: it needs --image-pixels, and a model that can";
                return Err(ApiError::invalid(&param, message));
            }
            if pictures.len() == MOST {
                return Err(ApiError::invalid(&param, format!("expected at most {MOST} pictures")));
            }
            let bytes = STANDARD.decode(data.as_str().unwrap_or_default().trim());
            let bytes = bytes.map_err(|error| ApiError::invalid(&param, format!("base64: {error}")))?;
            let read = scheduler.visit(move |visit| visit.engine.read_picture(&bytes))?;
            let picture = read.recv().map_err(|_| moeflux::Error::ShuttingDown)?;
            pictures.push(picture.map_err(|error| match error {
                moeflux::Error::Picture { .. } => ApiError::invalid(&param, error),
                other => other.into(),
            })?);
        }
    }
    Ok(pictures)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_those_of_templates() {
        let text = json!({"type": "text", "text": "What is it?"});
        let image = json!({"type": "image", "data": "AAAA"});
        for part in [
            json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"}}),
            json!({"type": "image_url", "image_url": "data:;base64,AAAA"}),
            json!({"type": "input_image", "image_url": "data:image/gif;base64,AAAA"}),
            json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}),
        ] {
            assert_eq!(content(&json!([part, text]), "m").unwrap(), json!([image, text]), "{part}");
        }
        assert_eq!(content(&json!([text]), "m").unwrap(), "What is it?");
        for (part, expected) in [
            (json!({"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}), "not fetched"),
            (json!({"type": "image_url", "image_url": {"url": "data:image/png,AAAA"}}), "expected data:"),
            (json!({"type": "image_url"}), "expected a url"),
            (
                json!({"type": "image", "source": {"type": "url", "url": "https://a.b"}}),
                "expected type base64",
            ),
            (json!({"type": "image", "source": {"type": "base64"}}), "expected base64"),
        ] {
            let error = content(&json!([text, part]), "messages[3]").unwrap_err();
            assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some("messages[3]")));
            assert!(error.message.contains(expected), "{}", error.message);
        }
    }
}
