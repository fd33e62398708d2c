"""Random small configurations of families with linear attention or state spaces."""

from typing import Any

from .random_draw import PLAIN_KINDS, Draw
from .random_latent import latent


def qwen3_next(d: Draw) -> dict[str, Any]:
    config = d.base(layers=5) | d.heads() | d.experts("num_experts")
    config["head_dim"] = 4 * max(2, config["head_dim"] // 4)
    key_heads = d.rng.randint(1, 3)
    while d.aligned > 1 and config["num_attention_heads"] * config["head_dim"] % d.aligned:
        config["head_dim"] *= 2
    config |= {
        "intermediate_size": d.width(3, 60),
        "moe_intermediate_size": d.width(1, 30),
        "shared_expert_intermediate_size": d.width(1, 30),
        "norm_topk_prob": d.chance(0.7),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * d.rng.randint(1, 3),
        "linear_key_head_dim": d.rng.randint(2, 24),
        "linear_value_head_dim": d.width(2, 24),
        "linear_conv_kernel_dim": d.rng.randint(2, 5),
        "rope_parameters": d.rope(config["head_dim"] // 4 * 2, kinds=PLAIN_KINDS),
    }
    partial = d.pick(0.5, 0.5, 1.0)
    config["rope_parameters"]["partial_rotary_factor"] = partial
    # Rotary factors over half of the head; yarn's range is that of the rotated channels.
    layers = config["num_hidden_layers"]
    if d.chance(0.4):
        kinds = ["linear_attention", "full_attention"]
        config["layer_types"] = [d.pick(*kinds) for _ in range(layers)]
        d.only(mlx=False)
    else:
        interval = d.rng.randint(1, 4)
        config["full_attention_interval"] = interval
        full = lambda layer: (layer + 1) % interval == 0  # noqa: E731
        config["layer_types"] = [
            "full_attention" if full(layer) else "linear_attention" for layer in range(layers)
        ]
    d.only(gguf=config["norm_topk_prob"])
    d.maybe(config, "attention_bias", True, p=0.2, gguf=False, mlx=False)
    d.maybe(config, "mlp_only_layers", [d.rng.randrange(layers)], p=0.2, gguf=False, mlx=False)
    return config


def qwen3_5_moe_text(d: Draw) -> dict[str, Any]:
    config = qwen3_next(d)
    for key in ("intermediate_size", "norm_topk_prob", "mlp_only_layers"):
        config.pop(key, None)
    d.only(gguf=not config.get("attention_bias"))
    return config


def lara_mini(d: Draw) -> dict[str, Any]:
    config = qwen3_next(d)
    layers = config["num_hidden_layers"]
    for key in ("intermediate_size", "mlp_only_layers", "full_attention_interval"):
        config.pop(key, None)
    config |= {
        "sliding_window": d.rng.randint(1, 50),
        "layer_types": d.pick(None, [d.pick("linear_attention", "sliding_attention", "full_attention") for _ in range(layers)]),
        "rope_parameters": d.rope(config["head_dim"], kinds=PLAIN_KINDS),
    }
    # Neither llama.cpp nor mlx-lm has it.
    d.only(gguf=False, mlx=False)
    d.case = {"stacked_experts": d.chance()}
    return config


def kimi_linear(d: Draw) -> dict[str, Any]:
    config = latent(d)
    layers = config["num_hidden_layers"]
    for key in ("first_k_dense_replace", "rope_parameters", "attention_bias"):
        config.pop(key, None)
    config["num_experts"] = config.pop("n_routed_experts")
    config |= {
        "norm_topk_prob": d.chance(0.8),
        "routed_scaling_factor": d.pick(1.0, 2.446),
        "linear_num_heads": d.rng.randint(1, 4),
        "linear_head_dim": d.width(2, 24),
        "linear_conv_kernel_dim": d.rng.randint(2, 5),
        "layer_types": [d.pick("linear_attention", "linear_attention", "full_attention") for _ in range(layers)],
        "mlp_layer_types": ["sparse", *(d.pick("sparse", "dense") for _ in range(layers - 1))],
        "tie_word_embeddings": False,
        "pad_token_id": None,
    }
    if d.chance(0.6):
        # What published keys can say, and one number of heads for both kinds of layers.
        dense = d.rng.randint(0, layers - 1)
        config["mlp_layer_types"] = ["dense"] * dense + ["sparse"] * (layers - dense)
        config["linear_num_heads"] = config["num_attention_heads"]
        both = len(set(config["layer_types"])) == 2
        alone = config["q_lora_rank"] is None and config["n_group"] == 1
        # llama.cpp's converter leaves the number of groups out.
        d.only(gguf=config["norm_topk_prob"] and config["n_group"] == 1, mlx=both and alone)
    else:
        d.only(gguf=False, mlx=False)
    return config


def nemotron_h(d: Draw) -> dict[str, Any]:
    config = d.base(layers=6) | d.heads() | d.groups()
    groups = d.rng.randint(1, 4)
    layers = config.pop("num_hidden_layers")
    kinds = ("linear_attention", "linear_attention", "full_attention", "moe", "moe", "mlp")
    config |= {
        "layer_norm_epsilon": config.pop("rms_norm_eps"),
        "layers_block_type": ["moe", *(d.pick(*kinds) for _ in range(layers))],
        "intermediate_size": d.width(3, 60),
        "moe_intermediate_size": d.width(1, 30),
        "moe_shared_expert_intermediate_size": d.width(1, 30),
        "norm_topk_prob": d.chance(0.8),
        "routed_scaling_factor": d.pick(1.0, 2.5),
        "n_groups": groups,
        "mamba_num_heads": groups * d.rng.randint(1, 3),
        "mamba_head_dim": d.width(1, 24),
        "ssm_state_size": d.rng.randint(1, 40),
        "conv_kernel": d.rng.randint(2, 5),
        "chunk_size": d.pick(16, 128),
        "use_conv_bias": d.chance(0.8),
        "time_step_min": 1e-9,
        "rescale_prenorm_residual": False,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
    }
    d.maybe(config, "moe_latent_size", d.width(1, 30))
    d.maybe(config, "time_step_min", d.pick(0.001, 0.2), gguf=False, mlx=False)
    d.maybe(config, "use_bias", True, gguf=False, mlx=False)
    d.maybe(config, "mlp_bias", True, gguf=False, mlx=False)
    # llama.cpp has neither groups of experts nor dense layers here, and wants a convolution's bias; its converter pads
    # vocabularies.
    config["vocab_size"] = config["vocab_size"] // 8 * 8 + 8
    d.only(gguf=config["n_group"] == 1 and "mlp" not in config["layers_block_type"] and config["use_conv_bias"])
    d.only(gguf=config["mamba_num_heads"] * config["mamba_head_dim"] % 64 == 0)
    # mlx-lm masks with zeros.
    d.only(mlx=config["n_group"] == 1)
    return config
