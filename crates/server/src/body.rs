//! Reading JSON requests within limits.

use axum::body::Body;
use axum::extract::Request;
use axum::http::{StatusCode, header};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::de::DeserializeOwned;

use crate::App;
use crate::error::ApiError;

/// Reads and parses the body of `request`.
///
/// Only `application/json` is taken: a page of another origin may send other types without asking first.
pub(crate) async fn json<T: DeserializeOwned>(app: &App, request: Request) -> Result<T, ApiError> {
    let (parts, body) = request.into_parts();
    let content_type = parts.headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let essence = content_type.unwrap_or_default().split(';').next().unwrap_or_default().trim();
    if !essence.eq_ignore_ascii_case("application/json") {
        let message = format!("content-type: expected application/json, got {essence:?}");
        return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
    }
    let bytes = read(app, body).await?;
    serde_json::from_slice(&bytes)
        .map_err(|error| ApiError::new(StatusCode::BAD_REQUEST, format!("request body: {error}")))
}

async fn read(app: &App, body: Body) -> Result<axum::body::Bytes, ApiError> {
    let collected = Limited::new(body, app.options.max_body).collect();
    match tokio::time::timeout(app.options.body_timeout, collected).await {
        Err(_) => Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "the request took too long to arrive")),
        Ok(Err(error)) if error.is::<LengthLimitError>() => {
            let message = format!("the request has more than {} bytes", app.options.max_body);
            Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message))
        }
        Ok(Err(error)) => Err(ApiError::new(StatusCode::BAD_REQUEST, format!("request body: {error}"))),
        Ok(Ok(body)) => Ok(body.to_bytes()),
    }
}
