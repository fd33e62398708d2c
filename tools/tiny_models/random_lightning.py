"""Random small configurations of families with lightning attention, and of Ling 3.0."""

from typing import Any

from .random_draw import PLAIN_KINDS, Draw


def _kinds(d: Draw, layers: int, *kinds: str) -> list[str]:
    return [d.pick(*kinds) for _ in range(layers)]


def minimax(d: Draw) -> dict[str, Any]:
    config = d.base(4) | d.heads() | d.experts("num_local_experts")
    layers = config["num_hidden_layers"]
    config |= {
        "intermediate_size": d.width(1, 40),
        "layer_types": d.pick(None, _kinds(d, layers, "linear_attention", "full_attention")),
        "block_size": d.pick(8, 16),
        "rope_parameters": d.rope(config["head_dim"], kinds=PLAIN_KINDS),
    }
    for block in ("full_attn", "linear_attn", "mlp"):
        for name in ("alpha", "beta"):
            config[f"{block}_{name}_factor"] = d.pick(1, round(d.rng.uniform(0.5, 3.0), 2))
    # In float32, as transformers reads the powers of decays from the file.
    d.case = {"stacked_experts": d.chance(), "dtype": "float32"}
    if d.chance():
        _convertible_minimax(d, config)
    else:
        d.only(gguf=False)
    d.only(mlx=False)
    return config


def _convertible_minimax(d: Draw, config: dict[str, Any]) -> None:
    """What GGUF files can say: one factor, and attention in every eighth layer."""
    config["num_hidden_layers"] = layers = d.rng.randint(1, 9)
    kinds = ["linear_attention" if (layer + 1) % 8 else "full_attention" for layer in range(layers)]
    config["layer_types"] = kinds
    alpha = config["mlp_alpha_factor"]
    published = {"rotary_dim": config["head_dim"]}
    for block, name in (("full_attn", "full_attention"), ("linear_attn", "linear_attention"), ("mlp", "mlp")):
        config |= {f"{block}_alpha_factor": alpha, f"{block}_beta_factor": 1}
        published |= {f"layernorm_{name}_alpha": alpha, f"layernorm_{name}_beta": 1.0}
    d.case |= {"late_edits": published, "stacked_experts": False}


def bailing_hybrid(d: Draw) -> dict[str, Any]:
    config = d.base(4) | d.groups()
    config["num_local_experts"] = config.pop("n_routed_experts")
    layers, heads = config["num_hidden_layers"], d.rng.randint(1, 5)
    config |= {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": d.rng.randint(2, 16),
        "kv_lora_rank": d.width(5, 40),
        "qk_nope_head_dim": d.width(1, 30),
        "qk_rope_head_dim": 2 * d.rng.randint(1, 12),
        "v_head_dim": d.width(1, 30),
        "intermediate_size": d.width(3, 50),
        "moe_intermediate_size": d.width(1, 30),
        "n_shared_experts": d.rng.randint(1, 3),
        "first_k_dense_replace": d.rng.randint(0, layers),
        "norm_topk_prob": d.chance(0.7),
        "routed_scaling_factor": d.pick(1.0, 2.5, 0.4),
        "short_conv_kernel_size": d.rng.randint(2, 5),
        "layer_group_size": d.rng.randint(1, 4),
        "kda_safe_gate": d.chance(),
        "kda_lower_bound": d.pick(-0.2, -0.6),
        "num_mtp_layers": 0,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "rope_parameters": d.rope(2, kinds=PLAIN_KINDS),
    }
    if d.chance(0.4):
        config["layer_types"] = _kinds(d, layers, "linear_attention", "full_attention")
    if d.chance(0.4):
        config["mlp_layer_types"] = _kinds(d, layers, "sparse", "dense")
    d.maybe(config, "attention_bias", True)
    d.case = {"stacked_experts": d.chance()}
    if d.chance(0.4):
        _convertible_bailing_hybrid(d, config)
    else:
        d.only(gguf=False)
    d.only(mlx=False)
    return config


def _convertible_bailing_hybrid(d: Draw, config: dict[str, Any]) -> None:
    """What GGUF files can say: whole groups of layers, dense layers first, bounded decays."""
    group = d.rng.randint(2, 3)
    config["num_hidden_layers"] = layers = group * d.rng.randint(1, 2)
    config |= {
        "layer_group_size": group,
        "first_k_dense_replace": d.rng.randint(0, layers - 1),
        "kda_safe_gate": True,
        "rope_parameters": d.rope(2, kinds=("default",)),
    }
    for key in ("layer_types", "mlp_layer_types", "attention_bias"):
        config.pop(key, None)
    d.case |= {
        "stacked_experts": False,
        "late_edits": {
            "no_kda_lora": True,
            "gated_attention_proj_granularity_type": "head_wise",
            "moe_shared_expert_intermediate_size": config["n_shared_experts"] * config["moe_intermediate_size"],
            "norm_topk_prob": config["norm_topk_prob"],
            "score_function": "sigmoid",
            "num_experts_per_tok": config["num_experts_per_tok"],
            "n_group": config["n_group"],
            "head_dim": config["head_dim"],
        },
    }
