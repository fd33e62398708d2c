//! Kimi Delta Attention (Kimi Team, *Kimi Linear*, 2025) as families record it: a gated delta rule whose channels decay on
//! their own, behind causal convolutions, normed and gated.
//!
//! transformers keeps what makes the decay in a module, and the three kernels in one tensor; published checkpoints do not.

use moeflux_compute::graph::{Decay, DeltaInputs, DeltaRule, HeadPairing, Precision, Value, WeightId};

use crate::Result;
use crate::checkpoint::Format;
use crate::models::config::Config;
use crate::models::names::NameMap;
use crate::models::recorder::{Form, Recorder};

/// Object of published configurations.
pub const LINEAR: &str = "linear_attn_config";

/// Modules and tensors of GGUF files.
pub const GGUF_TENSORS: NameMap = &[
    ("self_attn.q_conv1d", "ssm_conv1d_q"),
    ("self_attn.k_conv1d", "ssm_conv1d_k"),
    ("self_attn.v_conv1d", "ssm_conv1d_v"),
    ("self_attn.f_a_proj", "ssm_f_a"),
    ("self_attn.f_b_proj", "ssm_f_b"),
    ("self_attn.g_a_proj", "ssm_g_a"),
    ("self_attn.g_b_proj", "ssm_g_b"),
    ("self_attn.b_proj", "ssm_beta"),
    ("self_attn.o_norm", "ssm_norm"),
    ("self_attn.A_log", "ssm_a"),
    ("self_attn.dt_bias", "ssm_dt.bias"),
];

/// Keys of GGUF files.
pub const GGUF_KEYS: NameMap =
    &[("linear_conv_kernel_dim", "ssm.conv_kernel"), ("linear_head_dim", "kda.head_dim")];

/// Linear attention of all layers.
#[derive(Debug, Clone, Copy)]
pub struct KimiDelta {
    heads: usize,
    head_dim: usize,
    /// Tokens that convolutions see.
    kernel: usize,
    decay: Decay,
    /// Epsilon of the norm of what heads give.
    eps: f32,
    /// Whether decays go through as few channels as a head has, and whether gates do.
    low_rank: [bool; 2],
    /// Whether the rates of decays may be followed by others, which are nobody's.
    padded: bool,
    /// What GGUF files keep of those rates.
    gguf_rates: Form,
}

impl KimiDelta {
    /// Reads the shape; `heads` is the family's default.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for what does not fit.
    pub fn new(config: &Config<'_>, heads: usize, decay: Decay, eps: f32) -> Result<Self> {
        let size = |key: &str, published: &str, default: usize| -> Result<usize> {
            let own = config.optional_size(key)?;
            Ok(config.size_in(LINEAR, published)?.or(own).unwrap_or(default))
        };
        // GGUF files have one number for the heads of both kinds of attention.
        let heads = match config.format() {
            Format::Gguf => config.size("num_attention_heads")?,
            _ => size("linear_num_heads", "num_heads", heads)?,
        };
        Ok(Self {
            heads,
            head_dim: size("linear_head_dim", "head_dim", 128)?,
            kernel: size("linear_conv_kernel_dim", "short_conv_kernel_size", 4)?,
            decay,
            eps,
            low_rank: [true; 2],
            padded: false,
            gguf_rates: Form::F32,
        })
    }

    /// Of so many heads of so many channels behind kernels of so many tokens, with one layer to decays and one to gates; GGUF files
    /// keep rates without their sign.
    pub fn full_rank([heads, head_dim, kernel]: [usize; 3], decay: Decay, eps: f32) -> Self {
        let gguf_rates = Form::F32Negative;
        Self { heads, head_dim, kernel, decay, eps, low_rank: [false; 2], padded: false, gguf_rates }
    }

    /// The same with decays through as few channels as a head has, and gates too unless they are `full`; rates may be followed by
    /// others.
    pub fn low_rank([heads, head_dim, kernel]: [usize; 3], decay: Decay, eps: f32, full: bool) -> Self {
        let gguf_rates = Form::F32;
        Self { heads, head_dim, kernel, decay, eps, low_rank: [true, !full], padded: true, gguf_rates }
    }

    /// The same with as many rates as heads.
    pub fn not_padded(self) -> Self {
        Self { padded: false, ..self }
    }

    /// Linear attention of normed h.
    ///
    /// # Errors
    /// If weights are missing or do not fit.
    pub fn attention(&self, r: &mut Recorder, layer: usize, h: Value) -> Result<Value> {
        let Self { heads, head_dim, kernel, decay, eps, low_rank, padded, gguf_rates } = *self;
        let [low_decay, low_gate] = low_rank;
        let width = heads * head_dim;
        let module = |name: &str| format!("model.layers.{layer}.self_attn.{name}");
        let of_gate = |r: &Recorder, name: &str| {
            if ["f_a_proj", "f_proj"].iter().any(|name| r.has(&module(&format!("forget_gate.{name}")))) {
                module(&format!("forget_gate.{name}"))
            } else {
                module(name)
            }
        };
        let mixed = |r: &mut Recorder, place: usize, name: &str| -> Result<Value> {
            let part = place * width..(place + 1) * width;
            let joint = module("qkv_proj");
            let x = if r.has(&joint) {
                r.linear_part(h, &joint, 3 * width, std::slice::from_ref(&part), Precision::Fast)?
            } else {
                r.linear(h, &module(&format!("{name}_proj")), width, Precision::Fast)?
            };
            let of_mlx = format!("{name}_conv.conv");
            let joint = module("qkv_conv.conv");
            let taps: WeightId = if r.has(&joint) {
                // One value a row.
                let part = part.start * kernel..part.end * kernel;
                r.constants_part(&format!("{joint}.weight"), [3 * width * kernel, 1], part)?
            } else if r.has(&module("conv1d")) {
                r.constants_part(&module("conv1d.weight"), [3 * width, kernel], part)?
            } else {
                let name = if r.has(&module(&of_mlx)) { of_mlx } else { format!("{name}_conv1d") };
                r.constants(&module(&format!("{name}.weight")), &[width, kernel], Form::F32)?
            };
            Ok(r.graph.causal_conv1d(x, taps, kernel)?)
        };
        let (q, k, v) = (mixed(r, 0, "q")?, mixed(r, 1, "k")?, mixed(r, 2, "v")?);
        let a = if low_decay {
            let low = r.linear(h, &of_gate(r, "f_a_proj"), head_dim, Precision::F32)?;
            r.linear(low, &of_gate(r, "f_b_proj"), width, Precision::F32)?
        } else {
            r.linear(h, &of_gate(r, "f_proj"), width, Precision::F32)?
        };
        let b = r.linear(h, &module("b_proj"), heads, Precision::F32)?;
        let form = if r.format() == Format::Gguf { gguf_rates } else { Form::F32NegativeExp };
        let name = of_gate(r, "A_log");
        let rate = match (padded, low_rank) {
            (true, _) => r.first_constants(&name, heads, form)?,
            // Kimi-K3's.
            (false, [true, false]) => r.constants(&name, &[heads], form)?,
            (false, _) => r.constants(&name, &[heads, 1], form)?,
        };
        let dt_bias = r.constants(&of_gate(r, "dt_bias"), &[width], Form::F32)?;
        let shape = DeltaRule {
            key_heads: heads,
            value_heads: heads,
            key_dim: head_dim,
            value_dim: head_dim,
            pairing: HeadPairing::Grouped,
            decay,
        };
        let mixed = r.graph.gated_delta_rule(DeltaInputs { q, k, v, a, b }, rate, dt_bias, shape)?;
        let normed = r.rms_norm(mixed, &module("o_norm"), heads, eps)?;
        let gate = if low_gate {
            let low = r.linear(h, &module("g_a_proj"), head_dim, Precision::Fast)?;
            r.linear(low, &module("g_b_proj"), width, Precision::Fast)?
        } else {
            r.linear(h, &module("g_proj"), width, Precision::Fast)?
        };
        let gated = r.graph.sigmoid_gate(normed, gate)?;
        // Other attention's layer of this name may have a bias.
        let out = r.matrix(&module("o_proj"), Some(h.width()), width)?;
        Ok(r.graph.linear(gated, out, None, Precision::Fast)?)
    }
}
