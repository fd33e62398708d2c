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
    d.only(gguf=False, mlx=False)
    # In float32, as transformers reads the powers of decays from the file.
    d.case = {"stacked_experts": d.chance(), "dtype": "float32"}
    return config


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
    d.only(gguf=False, mlx=False)
    d.case = {"stacked_experts": d.chance()}
    return config
