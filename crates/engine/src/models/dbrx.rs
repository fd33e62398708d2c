//! DBRX. Layer norms without biases; queries, keys and values in one matrix, clipped; many chosen experts, whose weights are
//! divided by their sum unless it says otherwise.
//!
//! Source: transformers `modeling_dbrx.py`, mlx-lm `dbrx.py`; GGUF architecture `dbrx`. Hugging Face checkpoints have the
//! experts of a layer as rows of one tensor a projection, down transposed. Of published configurations only those of attention
//! have the base of the rotation, which transformers 5 does not look for there; the model was trained with it.

use moeflux_compute::graph::{Activation, Attention, Precision, RopeStyle, Route, Value};

use super::blocks::{self, Decoder, Moe};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::names::{NameMap, Names};
use super::recorder::{ExpertNames, Recorder};
use super::{Family, SILU};
use crate::Result;
use crate::checkpoint::Format;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "DBRX",
    model_types: &["dbrx"],
    gguf_architectures: &["dbrx"],
    hidden_act: SILU,
    names: &Names {
        gguf_tensors: &[GGUF_TENSORS],
        gguf_keys: &[GGUF_KEYS],
        other_keys: OTHER_KEYS,
        prefixes: &["transformer."],
        top: &["wte", "norm_f"],
        layers: "blocks",
        renamed: &[("embed_tokens", "wte"), ("norm", "norm_f")],
        ..Names::COMMON
    },
    record,
};

/// Modules of GGUF files.
const GGUF_TENSORS: NameMap = &[
    ("norm_attn_norm.norm_1", "attn_norm"),
    ("norm_attn_norm.attn.Wqkv", "attn_qkv"),
    ("norm_attn_norm.attn.out_proj", "attn_output"),
    ("norm_attn_norm.norm_2", "attn_output_norm"),
    ("ffn.router.layer", "ffn_gate_inp"),
];

/// Keys of GGUF files.
const GGUF_KEYS: NameMap =
    &[("clip_qkv", "attention.clamp_kqv"), ("layer_norm_eps", "attention.layer_norm_epsilon")];

/// Other keys of configurations.
const OTHER_KEYS: NameMap = &[
    ("hidden_size", "d_model"),
    ("num_hidden_layers", "n_layers"),
    ("num_attention_heads", "n_heads"),
    ("num_key_value_heads", "kv_n_heads"),
    ("max_position_embeddings", "max_seq_len"),
    ("num_experts", "moe_num_experts"),
    ("num_experts_per_tok", "moe_top_k"),
    ("moe_intermediate_size", "ffn_hidden_size"),
];

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("hidden_size", DefaultValue::Count(2048)),
    ("num_hidden_layers", DefaultValue::Count(24)),
    ("num_attention_heads", DefaultValue::Count(16)),
    ("max_position_embeddings", DefaultValue::Count(2048)),
];

/// The matrices of experts in Hugging Face checkpoints: gate, up, and down transposed.
const ROWS: [&str; 3] = ["ffn.experts.mlp.w1", "ffn.experts.mlp.v1", "ffn.experts.mlp.w2"];
const EXPERTS: ExpertNames = ExpertNames { module: "ffn.experts", projections: ["w1", "v1", "w2"] };

/// Attention of all layers.
#[derive(Debug, Clone, Copy)]
struct Heads {
    d: Decoder,
    rope: usize,
    /// Limit on the magnitude of q, k and v.
    clip: Option<f32>,
}

impl Heads {
    /// The shape, by the configuration and the object in it that is attention's.
    fn new(config: &Config<'_>, own: Option<Config<'_>>, r: &mut Recorder) -> Result<Self> {
        let (hidden_size, heads) = (config.size("hidden_size")?, config.size("num_attention_heads")?);
        let (gguf, key) = (config.format() == Format::Gguf, "num_key_value_heads");
        let kv_heads = own.map_or(Ok(None), |own| own.optional_size(key))?.unwrap_or(1);
        if heads % kv_heads != 0 {
            let expected = format!("a divisor of the {heads} heads");
            return Err(own.unwrap_or(*config).unsupported(key, &expected));
        }
        if !hidden_size.is_multiple_of(heads) {
            return Err(config.unsupported("hidden_size", &format!("a multiple of the {heads} heads")));
        }
        let head_dim = hidden_size / heads;
        if config.optional_size("head_dim")?.is_some_and(|dim| dim != head_dim) {
            return Err(config.unsupported("head_dim", &format!("{head_dim}")));
        }
        let beside = own.map(|own| own.without_rope_objects());
        let theta = beside.map_or(Ok(None), |own| own.number("rope_theta"))?.unwrap_or(1e4);
        let rope = match (config.format(), beside) {
            // mlx-lm looks nowhere else.
            (Format::Mlx, Some(own)) => blocks::rotation(r, &own, head_dim, RopeStyle::HalfSplit, 1e4)?,
            _ => blocks::rotation(r, config, head_dim, RopeStyle::HalfSplit, theta)?,
        };
        let clip = own.map_or(Ok(None), |own| own.magnitude("clip_qkv"))?;
        // GGUF files that clip nothing say so with 0.
        let clip = clip.filter(|clip| !gguf || *clip > 0.0).map(|clip| clip as f32);
        let eps = if gguf { config.magnitude("layer_norm_eps")? } else { None }.unwrap_or(1e-5) as f32;
        let d = Decoder { hidden_size, layers: blocks::layers(config)?, heads, kv_heads, head_dim, eps };
        Ok(Self { d, rope, clip })
    }

    /// Attention of normed h.
    fn mix(&self, r: &mut Recorder, layer: usize, h: Value) -> Result<Value> {
        let Self { d: Decoder { heads, kv_heads, head_dim, .. }, rope, clip } = *self;
        let module = |name: &str| format!("model.layers.{layer}.norm_attn_norm.attn.{name}");
        let ends = [heads, heads + kv_heads, heads + 2 * kv_heads].map(|all| all * head_dim);
        let mut part = |rows| -> Result<Value> {
            let part = r.linear_part(h, &module("Wqkv"), ends[2], &[rows], Precision::Fast)?;
            Ok(clip.map_or(part, |limit| r.graph.clamp(part, limit)))
        };
        let [q, k, v] = [part(0..ends[0])?, part(ends[0]..ends[1])?, part(ends[1]..ends[2])?];
        let (q, k) = (r.graph.rope(q, heads, rope)?, r.graph.rope(k, kv_heads, rope)?);
        let scale = (head_dim as f32).sqrt().recip();
        let mixed = r.graph.attention(q, k, v, Attention::grouped(heads, kv_heads, head_dim, scale))?;
        r.linear(mixed, &module("out_proj"), h.width(), Precision::Fast)
    }
}

/// The router, by the configuration of the feed-forward.
fn moe(config: &Config<'_>, own: &Config<'_>) -> Result<Moe> {
    let experts = own.optional_size("num_experts")?.unwrap_or(4);
    let top_k = own.optional_size("num_experts_per_tok")?.unwrap_or(1);
    blocks::check_experts(own, experts, blocks::layers(config)?)?;
    if top_k > experts {
        return Err(own.unsupported("num_experts_per_tok", &format!("at most the {experts} experts")));
    }
    own.read("ffn_act_fn", "{\"name\": \"silu\"}", |function| {
        let name = function.as_object()?.get("name").map_or(Some("silu"), |name| name.as_str())?;
        SILU.contains(&name).then_some(())
    })?;
    // Weights are positive, so that their sum is their norm of order 1.
    let key = "moe_normalize_expert_weights";
    let renormalize = match own.number(key)? {
        _ if config.format() != Format::HuggingFace => true,
        None => !own.is_null(key),
        Some(1.0) => true,
        Some(_) => return Err(own.unsupported(key, "1 or null")),
    };
    Ok(Moe {
        route: Route::softmax(experts, top_k, renormalize),
        router: "ffn.router.layer",
        correction_bias: None,
        experts: EXPERTS,
        shared: None,
    })
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    // GGUF files have all keys side by side.
    let part = |key| match config.format() {
        Format::Gguf => Ok(Some(*config)),
        _ => config.within(key),
    };
    let heads = Heads::new(config, part("attn_config")?, r)?;
    let of_experts = part("ffn_config")?.ok_or_else(|| config.unsupported("ffn_config", "an object"))?;
    let moe = moe(config, &of_experts)?;
    let key = if config.format() == Format::Gguf { "intermediate_size" } else { "moe_intermediate_size" };
    let width = of_experts.optional_size(key)?.unwrap_or(3584);
    if config.flag("tie_word_embeddings", false)? {
        return Err(config.unsupported("tie_word_embeddings", "false"));
    }

    let (mut x, table) = blocks::embed(r, heads.d.hidden_size)?;
    for layer in 0..heads.d.layers {
        let base = format!("model.layers.{layer}");
        r.graph.scope(format!("layers.{layer}.self_attn"));
        let h = r.layer_norm(x, &format!("{base}.norm_attn_norm.norm_1"), heads.d.eps)?;
        let mixed = heads.mix(r, layer, h)?;
        x = r.graph.add(x, mixed)?;
        r.graph.scope(format!("layers.{layer}.mlp"));
        let h = r.layer_norm(x, &format!("{base}.norm_attn_norm.norm_2"), heads.d.eps)?;
        let shape = [moe.route.experts, width, h.width()];
        let in_rows = r.has_parameter(&format!("{base}.{}", ROWS[0]));
        let declare = |r: &mut Recorder| {
            if in_rows {
                r.experts_in_rows(layer, shape, ROWS)
            } else {
                r.experts(layer, shape[0], shape[2], &moe.experts)
            }
        };
        let out = blocks::moe_from(r, layer, h, (&moe, [Activation::SwiGlu; 2]), declare)?;
        blocks::check_expert_width(r, &of_experts, key, width)?;
        x = r.graph.add(x, out)?;
    }
    r.graph.scope("lm_head");
    let rows = r.graph.gather_rows(x);
    let h = r.layer_norm(rows, "model.norm", heads.d.eps)?;
    blocks::logits(r, config, h, table)
}
