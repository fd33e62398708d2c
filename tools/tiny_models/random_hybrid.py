"""Random small configurations of families whose layers are of several kinds: Gemma 4, AFMoE, EXAONE-MoE, Granite 4 hybrid,
Jamba, LFM2, ZAYA1."""

from typing import Any

from .random_draw import PLAIN_KINDS, Draw


def _kinds(d: Draw, layers: int, *kinds: str) -> list[str]:
    return [d.pick(*kinds) for _ in range(layers)]


def gemma4_text(d: Draw) -> dict[str, Any]:
    config = d.base(4) | d.heads() | d.experts("num_experts")
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    kv = config["num_key_value_heads"]
    config["top_k_experts"] = config.pop("num_experts_per_tok")
    kinds = _kinds(d, layers, "sliding_attention", "full_attention")
    kinds[-1] = "full_attention"
    full: dict[str, Any] = {"rope_type": "proportional", "rope_theta": 5000.0}
    if d.chance(0.7):
        full["partial_rotary_factor"] = d.pick(0.25, 0.5, 0.33, 1.0)
    config |= {
        "intermediate_size": d.width(3, 50),
        "moe_intermediate_size": d.width(1, 40),
        "global_head_dim": d.pick(config["head_dim"], 2 * config["head_dim"]),
        "num_global_key_value_heads": d.pick(None, 1, kv, heads),
        "attention_k_eq_v": d.chance(),
        "sliding_window": d.rng.randint(1, 50),
        "layer_types": kinds if d.chance(0.7) else None,
        "enable_moe_block": True,
        "hidden_size_per_layer_input": d.width(1, 20) if d.chance(0.4) else 0,
        "vocab_size_per_layer_input": config["vocab_size"],
        "final_logit_softcapping": d.pick(None, 3.0, 30.0),
        "use_bidirectional_attention": d.pick(None, "vision"),
        "rope_parameters": {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 80.0}},
    }
    d.maybe(config, "attention_bias", True, gguf=False, mlx=False)
    if d.chance(0.2):
        del config["rope_parameters"]
    d.only(gguf="partial_rotary_factor" in full and "rope_parameters" in config, mlx=config["layer_types"] is not None)
    d.case = {"stacked_experts": True, "max_shard_bytes": None}
    return config


def afmoe(d: Draw) -> dict[str, Any]:
    config = d.base(5) | d.heads() | d.experts("num_experts")
    layers = config["num_hidden_layers"]
    kinds = _kinds(d, layers, "sliding_attention", "full_attention")
    config |= {
        "intermediate_size": d.width(3, 50),
        "moe_intermediate_size": d.width(1, 30),
        "num_dense_layers": d.rng.randint(0, max(0, layers - 1)),
        "num_shared_experts": d.rng.randint(1, 3),
        "route_scale": d.pick(1.0, 2.5, 0.4),
        "sliding_window": d.rng.randint(1, 50),
        "layer_types": d.pick(None, kinds),
        "global_attn_every_n_layers": d.pick(2, 4),
        "mup_enabled": d.chance(),
        "rope_parameters": d.rope(config["head_dim"], kinds=PLAIN_KINDS),
    }
    d.maybe(config, "attention_bias", True)
    d.only(gguf=False, mlx=False)
    d.case = {"stacked_experts": d.chance()}
    return config


def exaone_moe(d: Draw) -> dict[str, Any]:
    config = d.base(5) | d.heads() | d.groups()
    config["num_experts"] = config.pop("n_routed_experts")
    layers = config["num_hidden_layers"]
    config |= {
        "intermediate_size": d.width(3, 50),
        "moe_intermediate_size": d.width(1, 30),
        "first_k_dense_replace": d.rng.randint(0, layers),
        "num_shared_experts": d.rng.randint(1, 3),
        "norm_topk_prob": d.chance(0.7),
        "routed_scaling_factor": d.pick(1.0, 2.5, 0.4),
        "sliding_window": d.rng.randint(1, 50),
        "sliding_window_pattern": d.pick(2, 4),
        "rope_parameters": d.rope(config["head_dim"], kinds=PLAIN_KINDS),
    }
    if d.chance():
        config["layer_types"] = _kinds(d, layers, "sliding_attention", "full_attention")
    if d.chance(0.4):
        config["mlp_layer_types"] = _kinds(d, layers, "sparse", "dense")
    d.only(gguf=False, mlx=False)
    d.case = {"stacked_experts": d.chance()}
    return config


def granitemoehybrid(d: Draw) -> dict[str, Any]:
    config = d.base(5) | d.experts("num_local_experts")
    layers = config["num_hidden_layers"]
    kv, groups = d.rng.randint(1, 3), d.pick(1, 1, 2, 3)
    heads, mamba_heads = kv * d.rng.randint(1, 3), groups * d.rng.randint(1, 4)
    head_dim = 2 * d.rng.randint(1, 6)
    config["hidden_size"] = heads * head_dim * mamba_heads
    config |= {
        "num_attention_heads": heads,
        "num_key_value_heads": d.pick(kv, None),
        "intermediate_size": d.width(1, 30),
        "shared_intermediate_size": d.width(1, 30),
        "layer_types": d.pick(_kinds(d, layers, "mamba", "attention"), _kinds(d, layers, "mamba", "attention"), None),
        "position_embedding_type": d.pick("rope", "nope", None),
        "embedding_multiplier": d.pick(1.0, 3.0),
        "logits_scaling": d.pick(1.0, 2.0),
        "residual_multiplier": d.pick(1.0, 0.3),
        "attention_multiplier": d.pick(0.2, 0.4),
        "mamba_n_heads": mamba_heads,
        "mamba_n_groups": groups,
        "mamba_d_state": d.rng.randint(1, 20),
        "mamba_d_head": "auto",
        "mamba_d_conv": d.rng.randint(2, 5),
        "mamba_expand": d.pick(1, 2),
        "mamba_chunk_size": 16,
        "mamba_conv_bias": d.chance(0.7),
        "mamba_proj_bias": d.chance(0.3),
        "attention_bias": d.chance(0.3),
        "rope_parameters": d.rope(head_dim * mamba_heads, kinds=PLAIN_KINDS),
    }
    if d.chance(0.3):
        config["time_step_limit"] = [0.1, 2.0]
    d.only(gguf=False, mlx=False)
    d.case = {"stacked_experts": d.chance()}
    return config


def jamba(d: Draw) -> dict[str, Any]:
    config = d.base(6) | d.experts("num_experts")
    kv = d.rng.randint(1, 3)
    heads = kv * d.rng.randint(1, 3)
    config["hidden_size"] = heads * (d.aligned if d.aligned > 1 else d.rng.randint(1, 12))
    attention, experts = d.rng.randint(1, 4), d.rng.randint(1, 3)
    config |= {
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": d.width(1, 40),
        "attn_layer_period": attention,
        "attn_layer_offset": d.rng.randrange(attention),
        "expert_layer_period": experts,
        "expert_layer_offset": d.rng.randrange(experts),
        "mamba_d_state": d.rng.randint(1, 20),
        "mamba_d_conv": d.rng.randint(2, 5),
        "mamba_expand": d.pick(1, 2, 3),
        "mamba_dt_rank": d.pick("auto", d.rng.randint(1, 9)),
        "mamba_conv_bias": d.chance(0.7),
        "mamba_proj_bias": d.chance(0.3),
    }
    d.maybe(config, "head_dim", d.rng.randint(1, 9), gguf=False, mlx=False)
    if d.chance(0.1):
        config |= {"num_experts": 1, "num_experts_per_tok": 1}
    # llama.cpp's converter stacks experts, and its files have a bias of the convolution and a rank.
    d.only(gguf=config["mamba_conv_bias"] and config["num_experts"] > 1 and not config["mamba_proj_bias"], mlx=False)
    # The converter rounds decays of checkpoints in f16 to f16.
    d.case = {"stacked_experts": d.chance(0.4), "dtype": d.pick("bfloat16", "float32")}
    return config


def lfm2_moe(d: Draw) -> dict[str, Any]:
    config = d.base(5) | d.heads() | d.experts("num_experts")
    layers = config["num_hidden_layers"]
    config["norm_eps"] = config.pop("rms_norm_eps")
    config |= {
        "intermediate_size": d.width(3, 50),
        "moe_intermediate_size": d.width(1, 30),
        "layer_types": _kinds(d, layers, "conv", "full_attention"),
        "num_dense_layers": d.rng.randint(0, layers),
        "conv_L_cache": d.rng.randint(1, 5),
        "conv_bias": d.chance(0.3),
        "use_expert_bias": d.chance(0.7),
        "norm_topk_prob": d.chance(0.7),
        "routed_scaling_factor": d.pick(1.0, 2.5, 0.4),
        "rope_parameters": d.rope(config["head_dim"], kinds=PLAIN_KINDS),
    }
    d.only(gguf=False, mlx=False)
    d.case = {"stacked_experts": d.chance()}
    return config


def zaya(d: Draw) -> dict[str, Any]:
    config = d.base(4) | d.heads() | d.experts("num_experts")
    layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    kinds = _kinds(d, layers, "hybrid", "hybrid_sliding")
    config |= {
        "num_experts_per_tok": 1,
        "moe_intermediate_size": d.width(1, 40),
        "router_hidden_size": d.width(1, 40),
        "cca_time0": d.pick(1, 2, 2, 3, 5),
        "cca_time1": d.pick(1, 2, 2, 3, 4),
        "sliding_window": d.rng.randint(1, 50),
        "layer_types": d.pick(None, kinds),
    }
    if d.chance(0.8):
        part = d.pick(0.5, 1.0) if head_dim % 4 == 0 else 1.0
        config["rope_parameters"] = {
            kind: d.rope(int(part * head_dim), kinds=PLAIN_KINDS) | {"partial_rotary_factor": part}
            for kind in ("hybrid", "hybrid_sliding")
        }
    elif head_dim % 4:
        config["head_dim"] = 12
    d.maybe(config, "attention_bias", True)
    d.maybe(config, "lm_head_bias", True)
    d.only(gguf=False, mlx=False)
    d.case = {"stacked_experts": True}
    return config
