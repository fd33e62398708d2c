//! Kimi-Linear (48B-A3B). Linear attention whose channels decay on their own, and every few layers multi-head latent
//! attention without any position; DeepSeek-V3's experts.
//!
//! Source: transformers `modeling_kimi_linear.py`; published checkpoints and configurations have names of their own, and so
//! have GGUF files (architecture `kimi-linear`) and what mlx-lm writes.

use moeflux_compute::graph::{
    DeltaInputs, DeltaRule, HeadPairing, Precision, RopeStyle, Route, Value, WeightId,
};

use super::Family;
use super::blocks::{self, Decoder, Moe};
use super::config::Config;
use super::latent::{self, Latent};
use super::recorder::{ExpertNames, Form, Recorder};
use crate::Result;
use crate::checkpoint::Format;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "Kimi-Linear",
    model_types: &["kimi_linear"],
    gguf_architectures: &["kimi-linear"],
    record,
};

/// Object of published configurations.
const LINEAR: &str = "linear_attn_config";

/// Linear attention of all layers.
#[derive(Debug, Clone, Copy)]
struct Linear {
    heads: usize,
    head_dim: usize,
    /// Tokens that convolutions see.
    kernel: usize,
}

impl Linear {
    fn new(config: &Config<'_>) -> Result<Self> {
        let size = |key: &str, published: &str, default: usize| -> Result<usize> {
            let own = config.optional_size(key)?;
            Ok(config.size_in(LINEAR, published)?.or(own).unwrap_or(default))
        };
        // GGUF files have one number for the heads of both kinds of attention.
        let heads = match config.format() {
            Format::Gguf => config.size("num_attention_heads")?,
            _ => size("linear_num_heads", "num_heads", 32)?,
        };
        Ok(Self {
            heads,
            head_dim: size("linear_head_dim", "head_dim", 128)?,
            kernel: size("linear_conv_kernel_dim", "short_conv_kernel_size", 4)?,
        })
    }

    /// Norm, linear attention, residual.
    fn attention(&self, r: &mut Recorder, d: &Decoder, layer: usize, x: Value) -> Result<Value> {
        let Self { heads, head_dim, kernel } = *self;
        let width = heads * head_dim;
        let base = format!("model.layers.{layer}");
        let module = |name: &str| format!("{base}.self_attn.{name}");
        r.graph.scope(format!("layers.{layer}.self_attn"));
        let h = r.rms_norm(x, &format!("{base}.input_layernorm"), 1, d.eps)?;
        // transformers keeps what makes the decay in a module, and the three kernels in one tensor.
        let of_gate = |r: &Recorder, name: &str| match r.has(&module("forget_gate.f_a_proj")) {
            true => module(&format!("forget_gate.{name}")),
            false => module(name),
        };
        let mixed = |r: &mut Recorder, place: usize, name: &str| -> Result<Value> {
            let x = r.linear(h, &module(&format!("{name}_proj")), width, Precision::Fast)?;
            let of_mlx = format!("{name}_conv.conv");
            let taps: WeightId = if r.has(&module("conv1d")) {
                let part = place * width..(place + 1) * width;
                r.constants_part(&module("conv1d.weight"), [3 * width, kernel], part)?
            } else {
                let name = if r.has(&module(&of_mlx)) { of_mlx } else { format!("{name}_conv1d") };
                r.constants(&module(&format!("{name}.weight")), &[width, kernel], Form::F32)?
            };
            Ok(r.graph.causal_conv1d(x, taps, kernel)?)
        };
        let (q, k, v) = (mixed(r, 0, "q")?, mixed(r, 1, "k")?, mixed(r, 2, "v")?);
        let low = r.linear(h, &of_gate(r, "f_a_proj"), head_dim, Precision::F32)?;
        let a = r.linear(low, &of_gate(r, "f_b_proj"), width, Precision::F32)?;
        let b = r.linear(h, &module("b_proj"), heads, Precision::F32)?;
        // GGUF keeps A itself.
        let form = if r.format() == Format::Gguf { Form::F32 } else { Form::F32NegativeExp };
        let decay = r.constants(&of_gate(r, "A_log"), &[heads], form)?;
        let dt_bias = r.constants(&of_gate(r, "dt_bias"), &[width], Form::F32)?;
        let pairing = HeadPairing::Grouped;
        let shape = DeltaRule {
            key_heads: heads,
            value_heads: heads,
            key_dim: head_dim,
            value_dim: head_dim,
            pairing,
        };
        let mixed = r.graph.gated_delta_rule(DeltaInputs { q, k, v, a, b }, decay, dt_bias, shape)?;
        let normed = r.rms_norm(mixed, &module("o_norm"), heads, d.eps)?;
        let low = r.linear(h, &module("g_a_proj"), head_dim, Precision::Fast)?;
        let gate = r.linear(low, &module("g_b_proj"), width, Precision::Fast)?;
        let gated = r.graph.sigmoid_gate(normed, gate)?;
        let out = r.linear(gated, &module("o_proj"), d.hidden_size, Precision::Fast)?;
        Ok(r.graph.add(x, out)?)
    }
}

/// For each layer whether its attention is linear: as `layer_types` says, or lists of layers counted from one, else all
/// but every fourth after the first. In GGUF files such layers have no key heads.
fn linear_layers(config: &Config<'_>, layers: usize) -> Result<Vec<bool>> {
    if config.format() == Format::Gguf {
        let Some(kv_heads) = config.per_layer("num_key_value_heads", layers)? else {
            let expected = format!("a number for each of {layers} layers");
            return Err(config.unsupported("num_key_value_heads", &expected));
        };
        return Ok(kv_heads.iter().take(layers).map(|heads| *heads == 0).collect());
    }
    if let Some(kinds) = config.words("layer_types")? {
        let known = ["linear_attention", "full_attention"];
        if kinds.len() < layers || kinds.iter().any(|kind| !known.contains(&kind.as_str())) {
            let expected = format!("linear_attention or full_attention for each of {layers} layers");
            return Err(config.unsupported("layer_types", &expected));
        }
        return Ok(kinds.iter().take(layers).map(|kind| kind == known[0]).collect());
    }
    let (full, linear) =
        (config.sizes_in(LINEAR, "full_attn_layers")?, config.sizes_in(LINEAR, "kda_layers")?);
    let (Some(full), Some(linear)) = (full, linear) else {
        return Ok((0..layers).map(|layer| layer == 0 || !layer.is_multiple_of(4)).collect());
    };
    let kind = |layer: usize| match (full.contains(&layer), linear.contains(&layer)) {
        (true, false) => Ok(false),
        (false, true) => Ok(true),
        _ => Err(config.unsupported(LINEAR, &format!("layer {layer} in one list of kinds"))),
    };
    (1..=layers).map(kind).collect()
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let heads = config.size("num_attention_heads")?;
    let latent = Latent::new(config, r, heads, RopeStyle::Interleaved)?.not_rotated();
    let d = Decoder {
        hidden_size: config.size("hidden_size")?,
        layers: blocks::layers(config)?,
        heads,
        kv_heads: heads,
        head_dim: config.size("qk_rope_head_dim")?,
        eps: config.magnitude("rms_norm_eps")?.unwrap_or(1e-5) as f32,
    };
    let linear = Linear::new(config)?;
    let is_linear = linear_layers(config, d.layers)?;
    let dense = blocks::dense_layers(config, d.layers, 1)?;
    let published = config.format() != Format::Gguf
        && (0..d.layers).any(|layer| r.has(&format!("model.layers.{layer}.block_sparse_moe.gate")));
    let name = |published_name, own| if published { published_name } else { own };
    // What GGUF files leave out scales nothing.
    let scale = if config.format() == Format::Gguf { 1.0 } else { 2.446 };
    let scale = config.magnitude("routed_scaling_factor")?.unwrap_or(scale) as f32;
    let mut shared = blocks::shared_experts(config, "n_shared_experts", 1)?;
    if let Some(shared) = &mut shared {
        shared.module = name("block_sparse_moe.shared_experts", "mlp.shared_experts");
    }
    // mlx-lm keeps the bias beside the router.
    let beside = (0..d.layers)
        .any(|layer| r.has_parameter(&format!("model.layers.{layer}.mlp.e_score_correction_bias")));
    let moe = Moe {
        route: Route { scale, ..blocks::sigmoid_route(config)? },
        router: name("block_sparse_moe.gate", "mlp.gate"),
        correction_bias: Some(if beside { "mlp" } else { name("block_sparse_moe.gate", "mlp.gate") }),
        experts: ExpertNames {
            module: name("block_sparse_moe.experts", "mlp.experts"),
            projections: ["w1", "w3", "w2"],
        },
        shared,
    };

    let (mut x, table) = blocks::embed(r, d.hidden_size)?;
    for (layer, linear_layer) in is_linear.into_iter().enumerate() {
        x = match linear_layer {
            true => linear.attention(r, &d, layer, x)?,
            false => latent::attention(r, &d, layer, x, &latent)?,
        };
        x = match dense[layer] {
            true => {
                // transformers writes dense layers under the experts' name.
                let renamed = r.has(&format!("model.layers.{layer}.block_sparse_moe.gate_proj"));
                let module = if renamed { "block_sparse_moe" } else { "mlp" };
                blocks::dense_mlp_of(r, &d, layer, x, config.size("intermediate_size")?, module)?
            }
            false => blocks::moe(r, &d, layer, x, &moe)?,
        };
    }
    blocks::head(r, config, x, table, d.eps)
}
