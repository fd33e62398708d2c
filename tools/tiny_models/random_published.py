"""Random configurations in the forms in which models are published, where those are not what transformers saves: what
converters to GGUF and MLX read. As in `random_families`, a function a family."""

from collections.abc import Callable
from typing import Any

from .random_draw import TOKENIZER_SIZE, Draw
from .random_streams import deepseek_v4, glm5_next, minimax_m3_vl_text, qwen4_exp_text

VISION = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 4,
    "patch_size": 2,
}


def deepseek_v4_published(d: Draw) -> dict[str, Any]:
    """Experts in FP4, and mostly the rest in FP8; layers chosen by the token's id come first."""
    d.aligned = max(d.aligned, 32)
    config = deepseek_v4(d)
    layers, rotary = config["num_hidden_layers"], int(config["head_dim"] * config["partial_rotary_factor"])
    by_token = d.rng.randint(0, layers - 1)
    compress = d.rope(rotary, kinds=("default", "yarn", "yarn"))
    compress.pop("truncate", None)
    if compress["rope_type"] == "yarn":
        # Published models leave YaRN's magnitude out.
        compress["attention_factor"] = 1.0
    main = {"rope_type": "default", "rope_theta": float(d.rng.randint(100, 50000))}
    part = {"partial_rotary_factor": config["partial_rotary_factor"]}
    config |= {
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        "mlp_layer_types": ["hash_moe"] * by_token + ["moe"] * (layers - by_token),
        "scoring_func": "sqrtsoftplus",
        "rope_parameters": {"main": main | part, "compress": compress | part},
        "tie_word_embeddings": False,
    }
    d.gguf = True
    fp4 = d.pick("experts", "experts", "all")
    # The converter rounds FP8 to Q8_0.
    d.only(gguf=fp4 == "experts")
    d.case = {"family": "deepseek_v4", "published_keys": True, "fp4": fp4, "max_shard_bytes": None}
    d.case["stacked_experts"] = False
    return config


def qwen4_exp_published(d: Draw) -> dict[str, Any]:
    """With tables of n-grams in one layer at most, as llama.cpp has them."""
    config = qwen4_exp_text(d)
    rotary = int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]) // 2
    config["ple_layer_ids"] = config["ple_layer_ids"][:1]
    config["output_gate_type"] = "sigmoid"
    config["norm_topk_prob"] = True
    config.pop("attention_bias", None)
    config["rope_parameters"] |= {"mrope_section": [rotary - 2 * (rotary // 3), rotary // 3, rotary // 3]}
    config["rope_parameters"] |= {"mrope_interleaved": True}
    d.gguf, d.mlx = True, False
    d.case = {"family": "qwen4_exp_text", "published_keys": True, "dtype": "float32"}
    return config


def glm5_next_published(d: Draw) -> dict[str, Any]:
    """With as many heads in linear layers as in the others, and dense layers first."""
    config = glm5_next(d)
    text = config["text_config"]
    layers = text["num_hidden_layers"]
    dense = d.rng.randint(0, layers - 1)
    text |= {
        "linear_num_heads": text["num_attention_heads"],
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (layers - dense),
    }
    d.gguf = True
    linear = {
        "num_heads": text["linear_num_heads"],
        "head_dim": text["linear_head_dim"],
        "short_conv_kernel_size": text["linear_conv_kernel_dim"],
        "gate_lower_bound": text["linear_lower_bound"],
        "safe_gate": text["linear_lower_bound"] is not None,
    }
    published = {"mla_use_nope": True, "first_k_dense_replace": dense, "linear_attn_config": linear}
    d.case = {"family": "glm5_next", "late_edits": {"text_config": published}}
    return config


def minimax_m3_vl(d: Draw) -> dict[str, Any]:
    """The multimodal model; every layer but the dense first ones chooses blocks."""
    text = minimax_m3_vl_text(d)
    layers, rope = text["num_hidden_layers"], text["rope_parameters"]
    dense = d.rng.randint(0, layers - 1)
    part = rope.get("partial_rotary_factor", 1.0)
    rope = {"rope_type": "default", "rope_theta": rope["rope_theta"], "partial_rotary_factor": part}
    text |= {
        "layer_types": ["full_attention"] * dense + ["minimax_m3_sparse"] * (layers - dense),
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (layers - dense),
        "rope_parameters": rope,
    }
    d.gguf = d.mlx = True
    if d.chance():
        # What llama.cpp takes to be always so.
        text |= {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
    else:
        d.only(gguf=False)
    shared = d.rng.randint(1, 2)
    text["shared_intermediate_size"] = shared * text["intermediate_size"]
    published = {
        "rotary_dim": int(text["head_dim"] * part),
        "n_shared_experts": shared,
        "moe_layer_freq": [0] * dense + [1] * (layers - dense),
        "scoring_func": "sigmoid",
        "sparse_attention_config": {
            "sparse_num_index_heads": text["index_n_heads"],
            "sparse_index_dim": text["index_head_dim"],
            "sparse_block_size": text["index_block_size"],
            "sparse_topk_blocks": text["index_topk_blocks"],
            "sparse_local_block": text["index_local_blocks"],
        },
    }
    d.case = {"family": "minimax_m3_vl", "late_edits": {"text_config": published}}
    # One is added to norm weights in the type that they are stored in.
    d.case["dtype"] = d.pick("bfloat16", "float32")
    tied = text.pop("tie_word_embeddings")
    d.only(gguf=not tied, mlx=not tied and d.aligned != 32)
    return {
        "text_config": text,
        "vision_config": VISION,
        "projector_hidden_size": 8,
        "tie_word_embeddings": tied,
    }


def step3p5(d: Draw) -> dict[str, Any]:
    """The text model by itself, with published keys."""
    text = d.base(layers=5) | d.heads()
    text["head_dim"] = 4 * max(1, text["head_dim"] // 4)
    groups, layers = text.pop("num_key_value_heads"), text["num_hidden_layers"]
    while d.aligned > 1 and text["num_attention_heads"] * text["head_dim"] % d.aligned:
        text["num_attention_heads"] *= 2
    experts = d.experts("moe_num_experts")
    # llama.cpp's converter takes the bases of the first two layers for those of both kinds.
    kinds = ["full_attention", "sliding_attention", *(d.pick("full_attention", "sliding_attention") for _ in range(5))]
    kinds = kinds[:layers]
    full, sliding = (round(10 ** d.rng.uniform(2.0, 6.5), 1) for _ in range(2))
    first = d.rng.randint(0, layers - 1)
    limits = (0.0, 0.0, 0.3, 1.5)
    text |= {
        "num_attention_groups": groups,
        "attention_other_setting": {
            "num_attention_heads": text["num_attention_heads"] * d.pick(1, 2),
            "num_attention_groups": groups,
        },
        "intermediate_size": d.width(3, 60),
        "layer_types": kinds,
        "partial_rotary_factors": [0.5 if kind == "full_attention" else 1.0 for kind in kinds],
        "rope_theta": [full if kind == "full_attention" else sliding for kind in kinds],
        "sliding_window": d.pick(1, 9, 33, 129),
        "moe_layers_enum": ",".join(str(layer) for layer in range(first, layers)),
        "moe_num_experts": experts["moe_num_experts"],
        "moe_top_k": experts["num_experts_per_tok"],
        "moe_intermediate_size": d.width(1, 30),
        "share_expert_dim": d.width(1, 30),
        "moe_router_scaling_factor": d.pick(1.0, 3.0),
        "norm_expert_weight": True,
        "use_head_wise_attn_gate": True,
        "swiglu_limits": [d.pick(*limits) for _ in range(layers)],
        "swiglu_limits_shared": [d.pick(*limits) for _ in range(layers)],
        "tie_word_embeddings": False,
        "eos_token_id": TOKENIZER_SIZE - 1,
    }
    if d.chance(0.7):
        text |= {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": round(d.rng.uniform(1.5, 8.0), 2),
                "low_freq_factor": 1.0,
                "high_freq_factor": d.pick(2.0, 32.0),
                "original_max_position_embeddings": d.rng.randint(16, 128),
            },
            "yarn_only_types": ["full_attention"],
        }
    # mlx-lm quantises routers in groups of 64.
    d.only(gguf=layers > 1, mlx=d.aligned != 32)
    d.case = {
        "family": "step3p7",
        "text_only": True,
        # One is added to norm weights, in the type that they are stored in: another model where it rounds.
        "dtype": "float32" if d.aligned == 1 else d.pick("bfloat16", "float32"),
        "config_edits": {"text_config": text},
        "max_shard_bytes": None,
        "stacked_experts": False,
    }
    return {"text_config": text, "vision_config": dict(width=8, layers=1, heads=1, image_size=28, patch_size=14)}


PUBLISHED: dict[str, Callable[[Draw], dict[str, Any]]] = {
    draw.__name__: draw
    for draw in (deepseek_v4_published, qwen4_exp_published, glm5_next_published, minimax_m3_vl, step3p5)
}
