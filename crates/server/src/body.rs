//! Reading JSON requests within limits.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, StatusCode, header};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::Site;
use crate::error::ApiError;
use crate::intake::Room;
use crate::log::Tally;

/// Reads and parses the body of `request`, which takes room until it is in the queue.
pub(crate) async fn json<T: DeserializeOwned>(site: &Site, request: Request) -> Result<(T, Room), ApiError> {
    let (parts, body) = request.into_parts();
    check_type(&parts.headers)?;
    let said = parts.headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
    let (most, patience) = (site.options.max_body, site.options.body_timeout);
    let _arriving = site.intake.arriving(said.unwrap_or(most).min(most), patience).await?;
    let bytes = read(site, body).await?;
    let mut room = site.intake.preparing(bytes.len(), patience).await?;
    room.tally = parts.extensions.get::<Arc<Tally>>().cloned().unwrap_or_default();
    let parsed = serde_json::from_slice(&bytes);
    parsed.map(|parsed| (parsed, room)).map_err(|error| match wrong_field::<T>(&bytes) {
        Some((field, reason)) => ApiError::invalid(&field, reason),
        None => {
            ApiError::new(StatusCode::BAD_REQUEST, format!("request body: {}", plain(&error.to_string())))
        }
    })
}

/// Refuses what is not said to be JSON. Programs that say nothing, or what `curl -d` says by itself, are believed, but not
/// pages: one of another origin may send such types without asking first.
fn check_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let content_type = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let essence = content_type.unwrap_or_default().split(';').next().unwrap_or_default().trim();
    let is = |kind: &str| essence.eq_ignore_ascii_case(kind);
    let by_page = headers.contains_key(header::ORIGIN) || headers.contains_key("sec-fetch-site");
    let untyped = is("") || is("application/x-www-form-urlencoded");
    if is("application/json") || (untyped && !by_page) {
        return Ok(());
    }
    let message = format!("content-type: expected application/json, got {essence:?}");
    Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message))
}

/// The field that keeps `body` from being a `T`, and what is wrong with it. Large bodies are not worth the search.
fn wrong_field<T: DeserializeOwned>(body: &[u8]) -> Option<(String, String)> {
    const MOST_BYTES: usize = 64 << 10;
    const MOST_FIELDS: usize = 64;
    if body.len() > MOST_BYTES {
        return None;
    }
    let whole: Map<String, Value> = serde_json::from_slice(body).ok()?;
    if whole.len() > MOST_FIELDS {
        return None;
    }
    let error_of = |fields: Map<String, Value>| serde_json::from_value::<T>(fields.into()).err();
    let reason = error_of(whole.clone())?.to_string();
    let error_without = |field: &str| {
        let mut rest = whole.clone();
        rest.remove(field);
        error_of(rest).map(|error| error.to_string())
    };
    // Without it there is no error; if there is no such field, only that it is missing.
    let cause = || whole.keys().find(|field| error_without(field).is_none());
    let missed = |field: &&String| error_without(field) == Some(format!("missing field `{field}`"));
    let field = cause().or_else(|| whole.keys().find(missed))?;
    Some((field.clone(), plain(&reason)))
}

/// `reason` without the names of this program's types.
fn plain(reason: &str) -> String {
    if reason.starts_with("recursion limit exceeded") {
        return "nested deeper than 128 levels".into();
    }
    let (before, expected) = reason.split_once("expected ").unwrap_or((reason, ""));
    let (what, after) = expected.split_once(' ').unwrap_or((expected, ""));
    let plain = match what {
        "usize" | "u64" | "u32" => "a non-negative integer",
        "i64" | "i32" => "an integer",
        "f32" | "f64" => "a number",
        "struct" => {
            let after = after.split_once(' ').map(|(_, after)| format!(" {after}")).unwrap_or_default();
            return format!("{before}expected an object{after}");
        }
        _ => return reason.to_owned(),
    };
    let space = if after.is_empty() { "" } else { " " };
    format!("{before}expected {plain}{space}{after}")
}

async fn read(site: &Site, body: Body) -> Result<axum::body::Bytes, ApiError> {
    let collected = Limited::new(body, site.options.max_body).collect();
    match tokio::time::timeout(site.options.body_timeout, collected).await {
        Err(_) => Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "the request took too long to arrive")),
        Ok(Err(error)) if error.is::<LengthLimitError>() => {
            let message = format!("the request has more than {} bytes", site.options.max_body);
            Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message))
        }
        Ok(Err(error)) => Err(ApiError::new(StatusCode::BAD_REQUEST, format!("request body: {error}"))),
        Ok(Ok(body)) => Ok(body.to_bytes()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_name_fields_and_no_types() {
        #[derive(Debug, serde::Deserialize)]
        #[allow(dead_code, reason = "read by nobody")]
        struct Asked {
            messages: Vec<String>,
            max_tokens: Option<usize>,
            temperature: Option<f32>,
            #[serde(flatten)]
            more: More,
        }
        #[derive(Debug, serde::Deserialize)]
        #[allow(dead_code, reason = "read by nobody")]
        struct More {
            top_p: Option<f32>,
        }
        for (body, expected) in [
            (r#"{"messages": []}"#, None),
            (
                r#"{"messages": [], "max_tokens": -1}"#,
                Some(("max_tokens", "expected a non-negative integer")),
            ),
            (r#"{"messages": [], "temperature": "hot"}"#, Some(("temperature", "expected a number"))),
            (r#"{"messages": [], "top_p": "0.7"}"#, Some(("top_p", "expected a number"))),
            (r#"{"messages": 1}"#, Some(("messages", "expected a sequence"))),
            (r#"{"max_tokens": 1}"#, None),
        ] {
            let found = wrong_field::<Asked>(body.as_bytes());
            let short = found.as_ref().map(|(field, reason)| (&field[..], reason));
            match (short, expected) {
                (None, None) => {}
                (Some((field, reason)), Some((wanted, end))) => {
                    assert!(field == wanted && reason.ends_with(end), "{body}: {field}: {reason}");
                }
                other => panic!("{body}: {other:?}"),
            }
        }
        let whole = "invalid type: sequence, expected struct Asked at line 1 column 0";
        assert_eq!(plain(whole), "invalid type: sequence, expected an object at line 1 column 0");
        assert_eq!(plain("EOF while parsing"), "EOF while parsing");
    }
}
