//! `/v1/models`.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::Site;
use crate::error::Dialect;
use crate::models::Place;

/// Whether a model is loaded, and how far loading is.
pub(crate) fn status(site: &Site, model: usize) -> Value {
    site.models.look(model, |place, _, _| match place {
        Place::Absent => json!({"value": "unloaded"}),
        Place::Loading { loaded, total } => {
            json!({"value": "loading", "loaded_bytes": loaded, "total_bytes": total})
        }
        Place::Leaving(_) => json!({"value": "unloading"}),
        Place::Ready(_) => json!({"value": "loaded"}),
    })
}

fn describe(site: &Site, model: usize, name: &str) -> Value {
    let mut object = json!({"id": name, "object": "model", "created": site.created, "owned_by": "moeflux"});
    object["status"] = status(site, model);
    if let Some(app) = site.models.loaded(model) {
        object["context_length"] = json!(app.scheduler.description().context);
        if app.adapter.is_some() {
            object["parent"] = json!(site.models.name(0));
        }
    }
    object
}

pub(crate) async fn list(State(site): State<Arc<Site>>) -> Response {
    let models = site.models.names().enumerate().map(|(model, name)| describe(&site, model, name));
    Json(json!({"object": "list", "data": models.collect::<Vec<Value>>()})).into_response()
}

pub(crate) async fn one(State(site): State<Arc<Site>>, Path(model): Path<String>) -> Response {
    match site.find(Some(&model)) {
        Ok(index) => Json(describe(&site, index, site.models.name(index))).into_response(),
        Err(error) => error.response(Dialect::OpenAi),
    }
}
