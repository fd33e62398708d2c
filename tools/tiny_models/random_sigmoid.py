"""Random small configurations of families whose routers have sigmoid scores."""

from typing import Any

from .random_draw import PLAIN_KINDS, Draw


def glm4_moe(d: Draw) -> dict[str, Any]:
    config = d.base() | d.heads() | d.groups()
    config["head_dim"] = 4 * max(1, config["head_dim"] // 4)
    while d.aligned > 1 and config["num_attention_heads"] * config["head_dim"] % d.aligned:
        config["head_dim"] *= 2
    config |= {
        "intermediate_size": d.width(3, 60),
        "moe_intermediate_size": d.width(1, 30),
        "n_shared_experts": d.rng.randint(1, 3),
        "first_k_dense_replace": d.rng.randint(0, config["num_hidden_layers"]),
        "norm_topk_prob": d.chance(0.7),
        "routed_scaling_factor": d.pick(1.0, 2.5, 0.4),
        "attention_bias": d.chance(),
        "use_qk_norm": d.chance(),
        "num_mtp_layers": 0,
        "rope_parameters": d.rope(config["head_dim"] // 2, kinds=PLAIN_KINDS),
    }
    config["rope_parameters"]["partial_rotary_factor"] = 0.5
    d.only(mlx=config["norm_topk_prob"] and config["n_group"] == 1)
    return config


def sarvam_moe(d: Draw) -> dict[str, Any]:
    config = glm4_moe(d) | {"attention_bias": d.chance(0.2), "use_qk_norm": d.chance(0.8)}
    part = d.pick(1.0, 1.0, 0.5)
    config["rope_parameters"] = d.rope(int(config["head_dim"] * part), kinds=PLAIN_KINDS)
    if part != 1.0:
        config["rope_parameters"]["partial_rotary_factor"] = part
    d.only(mlx=False)
    if d.chance(0.3):
        # As transformers saves it, by names that converters to GGUF do not know.
        d.only(gguf=False)
        return config
    published = {"num_experts": config["n_routed_experts"], "num_shared_experts": config["n_shared_experts"]}
    published |= {"use_qkv_bias": config["attention_bias"], "architectures": ["SarvamMoEForCausalLM"]}
    published |= {"score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    unset = dict.fromkeys(("n_routed_experts", "n_shared_experts", "attention_bias"))
    d.case = {"config_edits": published | unset, "stacked_experts": False}
    # llama.cpp's converter takes all of a head to rotate, and wants norms of queries and keys, and no biases.
    d.only(gguf=part == 1.0 and config["use_qk_norm"] and not config["attention_bias"])
    return config


def minimax_m2(d: Draw) -> dict[str, Any]:
    config = d.base() | d.heads() | d.experts("num_local_experts")
    config["head_dim"] = 4 * max(1, config["head_dim"] // 4)
    while d.aligned > 1 and config["num_attention_heads"] * config["head_dim"] % d.aligned:
        config["head_dim"] *= 2
    partial = d.pick(0.5, 1.0)
    config |= {
        "intermediate_size": d.width(1, 40),
        "rope_parameters": d.rope(int(config["head_dim"] * partial), kinds=PLAIN_KINDS),
    }
    config["rope_parameters"]["partial_rotary_factor"] = partial
    return config


def solar_open(d: Draw) -> dict[str, Any]:
    config = glm4_moe(d)
    for key in ("use_qk_norm", "num_mtp_layers"):
        del config[key]
    # Converters want them; there are no dense layers.
    config["first_k_dense_replace"] = 0
    # The whole head rotates.
    config["rope_parameters"] = d.rope(config["head_dim"], kinds=PLAIN_KINDS)
    config["rope_parameters"]["partial_rotary_factor"] = 1.0
    return config


def dots1(d: Draw) -> dict[str, Any]:
    config = d.base() | d.heads() | d.groups()
    config |= {
        "intermediate_size": d.width(3, 60),
        "moe_intermediate_size": d.width(1, 30),
        "n_shared_experts": d.rng.randint(1, 3),
        "first_k_dense_replace": d.rng.randint(0, config["num_hidden_layers"] - 1),
        "norm_topk_prob": d.chance(),
        "routed_scaling_factor": d.pick(1.0, 2.5),
        "sliding_window": d.rng.randint(1, 50),
        "rope_parameters": d.rope(config["head_dim"]),
    }
    d.only(gguf=config["n_group"] == 1, mlx=config["n_group"] == 1 and config["norm_topk_prob"])
    kinds = ("sliding_attention", "full_attention")
    if d.chance(0.3):
        config["layer_types"] = [d.pick(*kinds) for _ in range(config["num_hidden_layers"])]
        d.only(gguf=False, mlx=False)
    d.maybe(config, "attention_bias", True, p=0.2, gguf=False, mlx=False)
    return config


def hy_v3(d: Draw) -> dict[str, Any]:
    config = d.base() | d.heads() | d.experts("num_experts")
    layers = config["num_hidden_layers"]
    config |= {
        "intermediate_size": d.width(3, 60),
        "moe_intermediate_size": d.width(1, 30),
        "num_shared_experts": d.rng.randint(1, 3),
        "router_scaling_factor": d.pick(1.0, 2.826),
        "mlp_layer_types": [d.pick("dense", "sparse", "sparse") for _ in range(layers - 1)] + ["sparse"],
        "rope_parameters": d.rope(config["head_dim"]),
    }
    d.maybe(config, "attention_bias", True, p=0.2, gguf=False)
    # llama.cpp's converter leaves the frequencies of llama3 scaling out.
    d.only(mlx=False, gguf=config["rope_parameters"]["rope_type"] != "llama3")
    return config


def llama4_text(d: Draw) -> dict[str, Any]:
    config = d.base(layers=5) | d.heads() | d.experts("num_local_experts")
    layers = config["num_hidden_layers"]
    rope = d.rope(config["head_dim"], kinds=("default", "llama3", "llama3", "linear", "yarn"))
    config |= {
        "intermediate_size": d.width(3, 40),
        "intermediate_size_mlp": d.width(3, 60),
        "attention_chunk_size": d.pick(1, 13, 64, 65, 8192),
        "floor_scale": d.pick(5, 30, 8192),
        "attn_scale": d.pick(0.1, 0.5),
        "attn_temperature_tuning": d.chance(0.8),
        "use_qk_norm": d.chance(0.7),
        "interleave_moe_layer_step": d.pick(1, 1, 2),
        "no_rope_layer_interval": d.pick(2, 3, 4),
        "rope_parameters": rope,
    }
    d.maybe(config, "no_rope_layers", [d.rng.randint(0, 1) for _ in range(layers)])
    d.maybe(config, "attention_bias", True)
    if config["interleave_moe_layer_step"] > layers:
        config["interleave_moe_layer_step"] = 1
    if d.chance():
        # What llama.cpp takes to be always so.
        config |= {
            "attention_chunk_size": 8192,
            "floor_scale": 8192,
            "attn_scale": 0.1,
            "attn_temperature_tuning": True,
            "use_qk_norm": True,
            "no_rope_layer_interval": 4,
        }
        config.pop("no_rope_layers", None)
        d.only(mlx=False)
    else:
        d.only(gguf=False, mlx=False)
    return config


def mimo_v2_flash(d: Draw) -> dict[str, Any]:
    config = d.base(layers=5) | d.heads() | d.groups()
    layers = config["num_hidden_layers"]
    config["num_attention_heads"] *= 2
    ropes = {}
    for kind in ("full_attention", "sliding_attention"):
        part = d.pick(0.334, 0.5, 1.0)
        while int(config["head_dim"] * part) == 0:
            part = 1.0
        ropes[kind] = d.rope(2, kinds=("default",)) | {"partial_rotary_factor": part}
    config |= {
        "intermediate_size": d.width(3, 60),
        "moe_intermediate_size": d.width(1, 30),
        "v_head_dim": d.width(1, 30),
        "sliding_window": d.pick(1, 9, 33, 129),
        "attention_value_scale": d.pick(0.707, 0.5, None),
        "norm_topk_prob": d.chance(0.8),
        "routed_scaling_factor": d.pick(1.0, 2.5),
        "layer_types": [d.pick(*ropes) for _ in range(layers)],
        "mlp_layer_types": ["sparse", *(d.pick("sparse", "dense") for _ in range(layers - 1))],
        "rope_parameters": ropes,
    }
    d.maybe(config, "attention_bias", True, mlx=False)
    if d.chance(0.6):
        # What published keys can say: one part for both kinds. Of channels in pairs, as other engines rotate.
        parts = [part for part in (0.334, 0.5, 1.0) if (n := int(config["head_dim"] * part)) and n % 2 == 0]
        part = d.pick(*parts)
        for rope in ropes.values():
            rope["partial_rotary_factor"] = part
        both = len(set(config["layer_types"])) == 2
        # llama.cpp's converter leaves the factor out, which published models do not have.
        d.only(gguf=config["norm_topk_prob"] and config["routed_scaling_factor"] == 1.0)
        d.only(mlx=both and config["n_group"] == 1 and not config["tie_word_embeddings"])
    else:
        d.only(gguf=False, mlx=False)
    return config


def step3p7(d: Draw) -> dict[str, Any]:
    config = d.base(layers=5) | d.heads() | d.experts("n_routed_experts")
    layers = config["num_hidden_layers"]
    ropes = {
        kind: d.rope(2, kinds=("default", "yarn", "llama3", "linear")) | {"partial_rotary_factor": d.pick(0.5, 1.0)}
        for kind in ("full_attention", "sliding_attention")
    }
    limits = (None, 0.0, 0.3, 1.5)
    config |= {
        "intermediate_size": d.width(3, 60),
        "moe_intermediate_size": d.width(1, 30),
        "share_expert_dim": d.width(1, 30),
        "num_sliding_attention_heads": config["num_key_value_heads"] * d.rng.randint(1, 4),
        "layer_types": [d.pick(*ropes) for _ in range(layers)],
        "mlp_layer_types": ["sparse", *(d.pick("sparse", "dense") for _ in range(layers - 1))],
        "sliding_window": d.pick(1, 9, 33, 129),
        "rope_parameters": ropes,
        "moe_router_scaling_factor": d.pick(1.0, 3.0),
        "tie_word_embeddings": False,
        "pad_token_id": 0,
    }
    d.maybe(config, "swiglu_limits", [d.pick(*limits) for _ in range(layers)])
    d.maybe(config, "swiglu_limits_shared", [d.pick(*limits) for _ in range(layers)])
    d.maybe(config, "attention_bias", True)
    d.maybe(config, "mlp_bias", True)
    d.maybe(config, "query_pre_attn_scalar", d.rng.randint(1, 40))
    d.only(gguf=False, mlx=False)
    vision = dict(width=8, layers=1, heads=1, image_size=28, patch_size=14)
    return {"text_config": config, "vision_config": vision, "tie_word_embeddings": d.chance(0.3)}
