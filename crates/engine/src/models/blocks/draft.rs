//! What surrounds the decoder layer that drafts tokens. Its source is that of [`Draft`](crate::models::Draft).

use moeflux_compute::graph::{Precision, Value, WeightId};

use super::Decoder;
use crate::Result;
use crate::models::blocks;
use crate::models::config::Config;
use crate::models::recorder::Recorder;

/// What enters the layer: embedding and hidden state, each normed, side by side through a linear layer to (rows, hidden_size); also
/// the table of embeddings, which is the model's.
///
/// # Errors
/// If weights are missing or do not fit.
pub fn input(r: &mut Recorder, d: &Decoder, layer: usize) -> Result<(Value, WeightId)> {
    let module = |name: &str| format!("model.layers.{layer}.{name}");
    let (embedded, table) = blocks::embed(r, d.hidden_size)?;
    r.graph.scope(format!("layers.{layer}.eh_proj"));
    let embedded = r.rms_norm(embedded, &module("enorm"), 1, d.eps)?;
    let hidden = r.graph.input_rows(d.hidden_size);
    let hidden = r.rms_norm(hidden, &module("hnorm"), 1, d.eps)?;
    let both = r.graph.join(embedded, hidden);
    Ok((r.linear(both, &module("eh_proj"), d.hidden_size, Precision::Fast)?, table))
}

/// Output rows, the norm of the layer, logits by the model's head, which is `table` if the embeddings are tied.
///
/// # Errors
/// If weights are missing or do not fit.
pub fn head(
    r: &mut Recorder,
    config: &Config<'_>,
    d: &Decoder,
    layer: usize,
    x: Value,
    table: WeightId,
) -> Result<Value> {
    r.graph.scope("lm_head");
    let rows = r.graph.gather_rows(x);
    let h = r.rms_norm(rows, &format!("model.layers.{layer}.shared_head.norm"), 1, d.eps)?;
    blocks::logits(r, config, h, table)
}
