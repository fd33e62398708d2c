//! `/v1/models`.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::App;
use crate::error::Dialect;

fn describe(app: &App) -> Value {
    json!({
        "id": app.options.model,
        "object": "model",
        "created": app.created,
        "owned_by": "moeflux",
        "context_length": app.scheduler.description().context,
    })
}

pub(crate) async fn list(State(app): State<Arc<App>>) -> Response {
    Json(json!({"object": "list", "data": [describe(&app)]})).into_response()
}

pub(crate) async fn one(State(app): State<Arc<App>>, Path(model): Path<String>) -> Response {
    match app.check_model(Some(&model)) {
        Ok(()) => Json(describe(&app)).into_response(),
        Err(error) => error.response(Dialect::OpenAi),
    }
}
