//! Mamba-2 (Dao & Gu, *Transformers are SSMs*, 2024) as hybrid models have it: one projection to gate, channels and time
//! steps; a convolution over the channels; the state space model; a gated norm.

use moeflux_compute::graph::{Precision, SsmInputs, SsmScan, SsmWeights, Value};
use serde_json::Value as Json;

use crate::Result;
use crate::checkpoint::{Format, json};
use crate::models::config::Config;
use crate::models::names::NameMap;
use crate::models::recorder::{Form, Recorder};

/// Keys of GGUF files.
pub const GGUF_KEYS: NameMap = &[
    ("conv_kernel", "ssm.conv_kernel"),
    ("ssm_state_size", "ssm.state_size"),
    ("n_groups", "ssm.group_count"),
    ("mamba_num_heads", "ssm.time_step_rank"),
    ("mamba_inner_size", "ssm.inner_size"),
];

/// Least and most time step, of which the second may be infinite, as [`json`] has it; nothing if the key is absent.
///
/// # Errors
/// [`crate::Error::Config`] if it is something else.
pub fn time_step_limit(config: &Config<'_>, key: &str) -> Result<Option<(f32, f32)>> {
    let number = |v: &Json| match v.as_f64() {
        Some(n) => Some(n as f32).filter(|n| n.is_finite()),
        None => json::is_infinity(v).then_some(f32::INFINITY),
    };
    let expected = "two numbers, the larger one last";
    config.read(key, expected, |v| match v.as_array()?.as_slice() {
        [least, most] => Some((number(least)?, number(most)?)).filter(|(least, most)| least <= most),
        _ => None,
    })
}

/// Mamba-2 layers.
#[derive(Debug, Clone, Copy)]
pub struct Mamba2 {
    /// Heads and their widths.
    pub shape: SsmScan,
    /// Tokens that the convolution sees.
    pub kernel: usize,
    /// Whether it has a bias.
    pub bias: bool,
    /// Parts of a row that the gated norm is of, each on its own.
    pub norm_groups: usize,
    /// Epsilon of that norm.
    pub eps: f32,
}

impl Mamba2 {
    /// Mamba-2 of normed h, whose weights are below `module`.
    ///
    /// # Errors
    /// If weights are missing or do not fit.
    pub fn mix(&self, r: &mut Recorder, module: &str, h: Value) -> Result<Value> {
        let Self { shape, kernel, bias, norm_groups, eps } = *self;
        let module = |name: &str| format!("{module}.{name}");
        let (inner, group) = (shape.heads * shape.head_dim, shape.groups * shape.state_size);
        let channels = inner + 2 * group;
        let rows = inner + channels + shape.heads;
        let mut part = |part, precision| r.linear_part(h, &module("in_proj"), rows, &[part], precision);
        let gate = part(0..inner, Precision::Fast)?;
        let mixed = part(inner..inner + channels, Precision::Fast)?;
        let dt = part(inner + channels..rows, Precision::F32)?;

        let taps = r.constants(&module("conv1d.weight"), &[channels, kernel], Form::F32)?;
        let mixed = if bias {
            let bias = r.vector(&module("conv1d"), "bias", channels)?;
            r.graph.biased_conv1d(mixed, taps, bias, kernel)?
        } else {
            r.graph.causal_conv1d(mixed, taps, kernel)?
        };
        let x = r.graph.slice(mixed, 1, 0, inner)?;
        let b = r.graph.slice(mixed, 1, inner, group)?;
        let c = r.graph.slice(mixed, 1, inner + group, group)?;
        // GGUF keeps A itself.
        let decay = if r.format() == Format::Gguf { Form::F32 } else { Form::F32NegativeExp };
        let scalars: &[usize] = if r.format() == Format::Gguf { &[shape.heads, 1] } else { &[shape.heads] };
        let weights = SsmWeights {
            a: r.constants(&module("A_log"), scalars, decay)?,
            d: r.constants(&module("D"), scalars, Form::F32)?,
            dt_bias: r.constants(&module("dt_bias"), &[shape.heads], Form::F32)?,
        };
        let mixed = r.graph.ssm_scan(SsmInputs { x, b, c, dt }, weights, shape)?;
        let gated = r.graph.swiglu(gate, mixed)?;
        let norm: &[usize] = match r.format() {
            Format::Gguf => &[norm_groups, inner / norm_groups],
            _ => &[inner],
        };
        let norm = r.constants(&module("norm.weight"), norm, Form::F32)?;
        let normed = r.graph.rms_norm(gated, norm, norm_groups, eps)?;
        r.linear(normed, &module("out_proj"), h.width(), Precision::Fast)
    }
}
