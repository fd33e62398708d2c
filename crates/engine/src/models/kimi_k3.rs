//! Kimi-K3. Kimi-Linear's two kinds of attention, with gates; attention residuals, by which what a layer takes is a mixture of the
//! sums of blocks of layers before it; experts in a latent space of their own; SiTU in place of SwiGLU.
//!
//! Source: mlx-lm `kimi_k3.py`; transformers does not have it. Published inside multimodal checkpoints. GGUF architecture
//! `kimi-k3`, whose files have one vector for the norm and the linear function of each mixture.

use moeflux_compute::graph::{Activation, Decay, ExpertMlp, Precision, Route, Value, WeightId};

use super::Family;
use super::blocks::delta::{self, KimiDelta, LINEAR};
use super::blocks::{self, SharedExpert};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::kimi_linear;
use super::latent::{self, Latent, More};
use super::names::{NameMap, Names};
use super::recorder::{ExpertNames, Form, Recorder};
use crate::Result;
use crate::checkpoint::Format;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "Kimi-K3",
    model_types: &["kimi_k3"],
    gguf_architectures: &["kimi-k3"],
    hidden_act: &["situ"],
    names: &Names {
        gguf_tensors: &[latent::GGUF_TENSORS, delta::GGUF_TENSORS, GGUF_TENSORS],
        gguf_keys: &[latent::GGUF_KEYS, delta::GGUF_KEYS, GGUF_KEYS],
        other_keys: &[("scoring_func", "moe_router_activation_func")],
        first_keys: kimi_linear::FIRST_KEYS,
        other_tensors: OTHER_TENSORS,
        ..Names::COMMON
    },
    record,
};

/// Modules of GGUF files.
const GGUF_TENSORS: NameMap = &[
    // Linear attention's, and the other's.
    ("self_attn.g_proj", "ssm_g"),
    ("self_attn.g_proj", "attn_gate"),
    ("self_attention_res", "attn_res_score"),
    ("mlp_res", "ffn_res_score"),
    ("model.output_attn_res", "output_res_score"),
    ("mlp.routed_expert_down_proj", "ffn_routed_down"),
    ("mlp.routed_expert_up_proj", "ffn_routed_up"),
    ("mlp.routed_expert_norm", "ffn_routed_norm"),
];

/// Keys of GGUF files.
const GGUF_KEYS: NameMap = &[
    ("attn_res_block_size", "attn_res.block_size"),
    ("activation_situ_beta", "activation.situ_beta"),
    ("activation_situ_linear_beta", "activation.situ_linear_beta"),
    ("routed_expert_hidden_size", "expert_latent_length"),
    ("gate_lower_bound", "kda.gate_lower_bound"),
];

/// Names of published checkpoints.
const OTHER_TENSORS: NameMap = &[
    ("mlp.gate", "block_sparse_moe.gate"),
    ("mlp.shared_experts.gate_proj", "block_sparse_moe.shared_experts.gate_proj"),
    ("mlp.shared_experts.up_proj", "block_sparse_moe.shared_experts.up_proj"),
    ("mlp.shared_experts.down_proj", "block_sparse_moe.shared_experts.down_proj"),
    ("mlp.routed_expert_down_proj", "block_sparse_moe.routed_expert_down_proj"),
    ("mlp.routed_expert_up_proj", "block_sparse_moe.routed_expert_up_proj"),
    ("mlp.routed_expert_norm", "block_sparse_moe.routed_expert_norm"),
];

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("hidden_size", DefaultValue::Count(7168)),
    ("intermediate_size", DefaultValue::Count(33792)),
    ("num_hidden_layers", DefaultValue::Count(93)),
    ("num_attention_heads", DefaultValue::Count(96)),
    ("num_experts_per_tok", DefaultValue::Count(16)),
    ("max_position_embeddings", DefaultValue::Count(1_048_576)),
];

/// The activation of all MLPs.
fn activation(config: &Config<'_>) -> Result<Activation> {
    // Zero means one.
    let beta = config.magnitude("activation_situ_beta")?.filter(|beta| *beta > 0.0).unwrap_or(1.0) as f32;
    let key = "activation_situ_linear_beta";
    if config.format() == Format::Gguf {
        // What is not above 0 limits nothing.
        let linear_beta = config.number(key)?.filter(|beta| *beta > 0.0).map(|beta| beta as f32);
        return Ok(Activation::SituGlu { beta, linear_beta });
    }
    match config.magnitude(key)? {
        Some(0.0) => Err(config.unsupported(key, "more than 0")),
        linear_beta => Ok(Activation::SituGlu { beta, linear_beta: linear_beta.map(|beta| beta as f32) }),
    }
}

/// How fast linear attention forgets, by the bound that `config` has for it.
fn decay(config: &Config<'_>) -> Result<Decay> {
    match config.number("gate_lower_bound")? {
        None => Ok(Decay::Softplus),
        Some(bound) if bound > 0.0 => {
            Err(config.unsupported("gate_lower_bound", "a number that is not above 0"))
        }
        Some(bound) => Ok(Decay::Bounded(bound as f32)),
    }
}

/// Linear attention of all layers that have it.
fn linear_attention(config: &Config<'_>, eps: f32) -> Result<KimiDelta> {
    if config.format() == Format::Gguf {
        let size = |key: &str| config.size(key);
        let shape = [size("num_attention_heads")?, size("linear_head_dim")?, size("linear_conv_kernel_dim")?];
        return Ok(KimiDelta::low_rank(shape, decay(config)?, eps, true).not_padded());
    }
    let size = |name: &str| {
        let expected = format!("an object with {name}");
        config.size_in(LINEAR, name)?.ok_or_else(|| config.unsupported(LINEAR, &expected))
    };
    let shape = [size("num_heads")?, size("head_dim")?, size("short_conv_kernel_size")?];
    let Some(own) = config.within(LINEAR)? else {
        return Err(config.unsupported(LINEAR, "an object"));
    };
    Ok(KimiDelta::low_rank(shape, decay(&own)?, eps, own.flag("use_full_rank_gate", false)?))
}

/// For each layer whether its attention is linear.
fn linear_layers(config: &Config<'_>, layers: usize) -> Result<Vec<bool>> {
    if config.format() == Format::Gguf {
        return kimi_linear::gguf_linear_layers(config, layers);
    }
    let key = "kda_layers";
    let expected = format!("an object with {key}");
    let linear = config.sizes_in(LINEAR, key)?.ok_or_else(|| config.unsupported(LINEAR, &expected))?;
    Ok((1..=layers).map(|layer| linear.contains(&layer)).collect())
}

/// The gate of latent attention, of all of its `layers` or none.
fn output_gate(config: &Config<'_>, r: &Recorder, mut layers: impl Iterator<Item = usize>) -> Result<bool> {
    match config.format() {
        Format::Gguf => Ok(layers.any(|layer| r.has(&format!("model.layers.{layer}.self_attn.g_proj")))),
        _ => config.flag("mla_use_output_gate", false),
    }
}

/// Routed experts and what goes with them.
struct Moe {
    route: Route,
    activation: Activation,
    /// Width of what experts take, if that is not the residual stream's, and whether what they give is normed.
    latent: Option<(usize, bool)>,
    shared: Option<SharedExpert>,
    eps: f32,
}

impl Moe {
    fn new(config: &Config<'_>, r: &Recorder, layers: usize, eps: f32) -> Result<Self> {
        let gguf = config.format() == Format::Gguf;
        let own = if gguf { config.assuming("norm_topk_prob", false) } else { *config };
        let route = blocks::sigmoid_route(&own)?;
        let key = "routed_expert_hidden_size";
        let width =
            if gguf { config.count(key)?.filter(|width| *width > 0) } else { config.optional_size(key)? };
        let norm = |layer: usize| format!("model.layers.{layer}.mlp.routed_expert_norm");
        let latent = match width {
            Some(width) if gguf => Some((width, (0..layers).any(|layer| r.has(&norm(layer))))),
            Some(width) => Some((width, config.flag("latent_moe_use_norm", false)?)),
            None => None,
        };
        Ok(Self {
            // The weight of one expert stays what it is.
            route: Route { renormalize: route.renormalize && route.top_k > 1, ..route },
            activation: activation(config)?,
            latent,
            shared: blocks::shared_experts(config, "n_shared_experts", 0)?,
            eps,
        })
    }

    /// What is added to scores for choosing.
    fn correction_bias(&self, r: &mut Recorder, layer: usize) -> Result<WeightId> {
        if r.format() == Format::Gguf {
            return r.correction_bias(&format!("model.layers.{layer}.mlp.gate"), self.route.experts);
        }
        // mlx-lm keeps the bias beside the router.
        let within = format!("model.layers.{layer}.block_sparse_moe.gate.e_score_correction_bias");
        let beside = ["block_sparse_moe", "mlp"]
            .map(|parent| format!("model.layers.{layer}.{parent}.e_score_correction_bias"));
        let found = beside.into_iter().find(|name| r.has_parameter(name)).unwrap_or(within);
        r.constants(&found, &[self.route.experts], Form::F32)
    }

    /// Router, experts, shared experts of normed h.
    fn mix(&self, r: &mut Recorder, layer: usize, h: Value) -> Result<Value> {
        let module = |name: &str| format!("model.layers.{layer}.mlp.{name}");
        let logits = r.linear(h, &module("gate"), self.route.experts, Precision::F32)?;
        let bias = self.correction_bias(r, layer)?;
        let routing = r.graph.route(logits, Some(bias), self.route)?;
        let taken = match self.latent {
            Some((width, _)) => r.linear(h, &module("routed_expert_down_proj"), width, Precision::Fast)?,
            None => h,
        };
        // Before the experts, so that it is computed while they are read.
        let shared = match &self.shared {
            Some(shared) => {
                let base = format!("model.layers.{layer}.{}", shared.module);
                Some(blocks::mlp(r, h, &base, shared.width, self.activation)?)
            }
            None => None,
        };
        let published = r.has(&format!("model.layers.{layer}.block_sparse_moe.gate"));
        let names = ExpertNames {
            module: if published { "block_sparse_moe.experts" } else { "mlp.experts" },
            projections: ["w1", "w3", "w2"],
        };
        let experts = r.experts(layer, self.route.experts, taken.width(), &names)?;
        let body = ExpertMlp { activation: self.activation, ..ExpertMlp::default() };
        let mut out = r.graph.moe_experts_with(taken, routing, experts, body)?;
        if let Some((_, normed)) = self.latent {
            if normed {
                out = r.rms_norm(out, &module("routed_expert_norm"), 1, self.eps)?;
            }
            out = r.linear(out, &module("routed_expert_up_proj"), h.width(), Precision::Fast)?;
        }
        match shared {
            Some(shared) => Ok(r.graph.add(out, shared)?),
            None => Ok(out),
        }
    }
}

/// The residual stream: the sum of the layers of a block, and those of the blocks before it.
struct Residuals {
    /// Layers of a block; there is one block without end if there are no attention residuals.
    block: Option<usize>,
    /// What blocks before the current one began with.
    before: Vec<Value>,
    /// What the layers of the current block add up to so far; nothing at its start.
    sum: Option<Value>,
    width: usize,
    eps: f32,
}

impl Residuals {
    /// What `module` makes of all sums: their mean, weighted by the softmax over a linear function of each once normed.
    fn mixed(&self, r: &mut Recorder, module: &str) -> Result<Option<Value>> {
        if self.before.is_empty() && self.block.is_some() && r.format() == Format::Gguf {
            // Files have them for the first block too, which has nothing to mix.
            r.outline_values(&format!("{module}.weight"), &vec![0.0; self.width])?;
        }
        let Some(sum) = self.sum else { return Ok(None) };
        if self.block.is_none() || self.before.is_empty() {
            return Ok(Some(sum));
        }
        let mut values = self.before.clone();
        values.push(sum);
        let (norm, proj) = (format!("{module}_norm"), format!("{module}_proj"));
        let joint = format!("{module}.norm_weight");
        let weights = if r.format() == Format::Gguf {
            let ones = r.made_up(&format!("{module}.weight"), [sum.width(); 2], Form::Ones)?;
            [ones, r.matrix(module, Some(1), sum.width())?]
        } else if r.has(&proj) || !r.has_parameter(&joint) {
            let norm = r.vector(&norm, "weight", sum.width())?;
            [norm, r.matrix(&proj, Some(1), sum.width())?]
        } else {
            let norm = r.constants(&joint, &[sum.width()], Form::F32)?;
            [norm, r.parameter(&format!("{module}.proj_weight"), 1, sum.width())?]
        };
        let [norm, proj] = weights;
        let mut logits = vec![];
        for value in &values {
            let normed = r.graph.rms_norm(*value, norm, 1, self.eps)?;
            logits.push(r.graph.linear(normed, proj, None, Precision::F32)?);
        }
        Ok(Some(r.graph.softmax_mix(values, logits)?))
    }

    /// What attention of `layer` takes. Its block begins here if it is the first of it.
    fn before_attention(&mut self, r: &mut Recorder, layer: usize) -> Result<Option<Value>> {
        let h = self.mixed(r, &format!("model.layers.{layer}.self_attention_res"))?;
        if self.block.is_some_and(|block| layer.is_multiple_of(block)) {
            self.before.extend(self.sum.take());
        }
        Ok(h)
    }

    /// Adds to the current block.
    fn add(&mut self, r: &mut Recorder, x: Value) -> Result<()> {
        self.sum = Some(match self.sum {
            Some(sum) => r.graph.add(sum, x)?,
            None => x,
        });
        Ok(())
    }

    /// The rows whose logits are asked for.
    fn gathered(self, r: &mut Recorder) -> Self {
        let mut rows = |value: Value| r.graph.gather_rows(value);
        Self {
            before: self.before.into_iter().map(&mut rows).collect(),
            sum: self.sum.map(&mut rows),
            ..self
        }
    }
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    if !config.flag("mla_use_nope", true)? {
        return Err(config.unsupported("mla_use_nope", "true"));
    }
    let hidden_size = config.size("hidden_size")?;
    let layers = blocks::layers(config)?;
    let eps = config.magnitude("rms_norm_eps")?.unwrap_or(1e-5) as f32;
    let is_linear = linear_layers(config, layers)?;
    let gated = output_gate(config, r, (0..layers).filter(|layer| !is_linear[*layer]))?;
    let latent = Latent::unrotated(config, r, config.size("num_attention_heads")?)?;
    let latent = latent.with(More { gate: gated.then_some("g_proj"), ..More::default() });
    let linear = linear_attention(config, eps)?;
    let first = config.count("first_k_dense_replace")?.unwrap_or(0);
    let step = config.optional_size("moe_layer_freq")?.unwrap_or(1);
    let moe = Moe::new(config, r, layers, eps)?;

    let (x, table) = blocks::embed(r, hidden_size)?;
    let key = "attn_res_block_size";
    let block = match config.format() {
        Format::Gguf => config.count(key)?.filter(|block| *block > 0),
        _ => config.optional_size(key)?,
    };
    let mut x = Residuals { block, before: vec![], sum: Some(x), width: x.width(), eps };
    let nothing = || config.unsupported(key, "a number of layers");
    for (layer, is_linear) in is_linear.into_iter().enumerate() {
        let base = format!("model.layers.{layer}");
        r.graph.scope(format!("layers.{layer}.self_attn"));
        let h = x.before_attention(r, layer)?.ok_or_else(nothing)?;
        let h = r.rms_norm(h, &format!("{base}.input_layernorm"), 1, eps)?;
        let out = if is_linear {
            linear.attention(r, layer, h)?
        } else {
            latent::attention_of(r, layer, h, &latent, |_, _| Ok(None))?
        };
        x.add(r, out)?;
        r.graph.scope(format!("layers.{layer}.mlp"));
        let h = x.mixed(r, &format!("{base}.mlp_res"))?.ok_or_else(nothing)?;
        let h = r.rms_norm(h, &format!("{base}.post_attention_layernorm"), 1, eps)?;
        let out = if layer >= first && layer.is_multiple_of(step) {
            moe.mix(r, layer, h)?
        } else {
            let width = config.size("intermediate_size")?;
            blocks::mlp(r, h, &format!("{base}.mlp"), width, moe.activation)?
        };
        x.add(r, out)?;
    }
    r.graph.scope("lm_head");
    let h = x.gathered(r).mixed(r, "model.output_attn_res")?.ok_or_else(nothing)?;
    let h = r.rms_norm(h, "model.norm", 1, eps)?;
    blocks::logits(r, config, h, table)
}
