//! Residual streams joined by hyper-connections, as families record them.

use moeflux_compute::graph::{HyperConnection, Precision, Value};

use crate::Result;
use crate::models::names::NameMap;
use crate::models::recorder::{Form, Recorder};

/// Tensors of GGUF files.
pub const GGUF_TENSORS: NameMap = &[
    ("attn_hc.fn", "hc_attn_fn.weight"),
    ("attn_hc.base", "hc_attn_base.weight"),
    ("attn_hc.scale", "hc_attn_scale.weight"),
    ("ffn_hc.fn", "hc_ffn_fn.weight"),
    ("ffn_hc.base", "hc_ffn_base.weight"),
    ("ffn_hc.scale", "hc_ffn_scale.weight"),
];

/// Keys of GGUF files.
pub const GGUF_KEYS: NameMap = &[
    ("hc_mult", "hyper_connection.count"),
    ("hc_sinkhorn_iters", "hyper_connection.sinkhorn_iterations"),
    ("hc_eps", "hyper_connection.epsilon"),
];

/// A hyper-connection around a block.
#[derive(Debug, Clone)]
pub struct Connection {
    /// Tensors of the matrix, the base and the factors.
    pub names: [String; 3],
    /// The norm of what the block takes.
    pub norm: String,
    /// Epsilon of that norm.
    pub eps: f32,
    /// Streams, and what is done to them.
    pub shape: HyperConnection,
}

impl Connection {
    /// The streams x after `block`, which takes their normed collapse.
    ///
    /// # Errors
    /// If weights are missing or do not fit, and what `block` returns.
    pub fn around(
        self,
        r: &mut Recorder,
        x: Value,
        block: impl FnOnce(&mut Recorder, Value) -> Result<Value>,
    ) -> Result<Value> {
        let Self { names, norm, eps, shape } = self;
        let weights = weights(r, x, names, shape)?;
        let h = r.graph.hyper_collapse(x, weights, shape.streams)?;
        let h = r.rms_norm(h, &norm, 1, eps)?;
        let out = block(r, h)?;
        Ok(r.graph.hyper_expand(x, out, weights, shape.streams)?)
    }
}

/// The weights of a hyper-connection of the streams x with the tensors `names`: matrix, base and factors.
///
/// # Errors
/// If tensors are missing or do not fit.
pub fn weights(r: &mut Recorder, x: Value, names: [String; 3], shape: HyperConnection) -> Result<Value> {
    let matrix = r.parameter(&names[0], shape.weights(), x.width())?;
    let base = r.constants(&names[1], &[shape.weights()], Form::F32)?;
    let factors = r.constants(&names[2], &[shape.kinds()], Form::F32)?;
    let mix = r.graph.linear(x, matrix, None, Precision::F32)?;
    Ok(r.graph.hyper_weights(x, mix, [base, factors], shape)?)
}
