//! What routers ask a worker about itself: `/get_server_info` and `/get_model_info`, with the fields of SGLang's server, and the
//! configuration that vLLM's shows at `/server_info`. Of a server of several models they say what its first one is.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use moeflux::scheduler::BLOCK_TOKENS;
use serde_json::{Value, json};

use crate::{App, Site};

/// There is no path of a tokenizer: routers would look for it on their own machine, or on the Hub.
pub(crate) async fn model(State(site): State<Arc<Site>>) -> Response {
    let mut info = json!({"model_path": site.models.name(0), "served_model_name": site.models.name(0), "is_generation": true});
    if let Some(app) = site.models.loaded(0) {
        let what = app.scheduler.description();
        info["max_context_length"] = json!(what.context);
        info["vocab_size"] = json!(what.vocab_size);
    }
    Json(info).into_response()
}

pub(crate) async fn server(State(site): State<Arc<Site>>) -> Response {
    let name = site.models.name(0);
    let mut info = json!({
        "model_id": name,
        "model_path": name,
        "served_model_name": name,
        "version": env!("CARGO_PKG_VERSION"),
        "tp_size": 1,
        "dp_size": 1,
    });
    if let Some(app) = site.models.loaded(0) {
        add_sizes(&mut info, name, &app);
    }
    Json(info).into_response()
}

fn add_sizes(info: &mut Value, name: &str, app: &App) {
    let what = app.scheduler.description();
    info["context_length"] = json!(what.context);
    info["max_running_requests"] = json!(what.sequences);
    info["max_total_tokens"] = json!(what.pages * BLOCK_TOKENS);
    info["page_size"] = json!(BLOCK_TOKENS);
    info["vllm_config"] = json!({
        "model_config": {"model": name, "max_model_len": what.context},
        "cache_config": {"block_size": BLOCK_TOKENS, "num_gpu_blocks": what.pages, "enable_prefix_caching": true},
    });
}
