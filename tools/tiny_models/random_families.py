"""Random small configurations, a function a family: sizes that are no multiple of anything, and every option that
changes what is computed."""

from collections.abc import Callable
from typing import Any

from . import random_hybrid, random_multimodal, random_normed
from .random_draw import PLAIN_KINDS, ROPE_KINDS, TOKENIZER_SIZE, Draw


def qwen3_moe(d: Draw) -> dict[str, Any]:
    config = d.base() | d.heads() | d.experts("num_experts")
    config |= {
        "intermediate_size": d.width(3, 60),
        "moe_intermediate_size": d.width(1, 40),
        "norm_topk_prob": d.chance(0.7),
        "rope_parameters": d.rope(config["head_dim"]),
    }
    d.only(gguf=config["norm_topk_prob"])
    d.maybe(config, "attention_bias", True, mlx=False)
    d.maybe(config, "decoder_sparse_step", 2, gguf=False)
    layers = config["num_hidden_layers"]
    d.maybe(config, "mlp_only_layers", [d.rng.randrange(layers)], gguf=False)
    if d.chance(0.25):
        config |= {"use_sliding_window": True, "sliding_window": d.rng.randint(1, 50)}
        d.only(gguf=False, mlx=False)
    return config


def mixtral(d: Draw) -> dict[str, Any]:
    config = d.base() | d.heads() | d.experts("num_local_experts")
    if d.chance():
        heads = d.few_heads(config)
        del config["head_dim"]
        step = d.aligned if d.aligned > 1 else 2
        config["hidden_size"] = heads * step * d.rng.randint(1, 6 if d.aligned == 1 else 1)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    # transformers cannot scale dynamically what is not configured.
    kinds = ROPE_KINDS if "head_dim" in config else tuple(k for k in ROPE_KINDS if k != "dynamic")
    config |= {"intermediate_size": d.width(1, 50), "rope_parameters": d.rope(head_dim, kinds=kinds)}
    config["sliding_window"] = None
    d.maybe(config, "sliding_window", d.rng.randint(1, 50), gguf=False, mlx=False)
    d.only(mlx="head_dim" not in config and config["rope_parameters"]["rope_type"] == "default")
    return config


def olmoe(d: Draw) -> dict[str, Any]:
    config = d.base() | d.heads() | d.experts("num_experts")
    heads = d.few_heads(config)
    del config["head_dim"]
    head_dim = 2 * d.rng.randint(1, 8) if d.aligned == 1 else d.aligned
    config |= {
        "hidden_size": heads * head_dim,
        "intermediate_size": d.width(1, 40),
        "norm_topk_prob": d.chance(0.3),
        "rope_parameters": d.rope(head_dim),
        "pad_token_id": 0,
    }
    # llama.cpp's converter writes the published models' epsilon.
    d.only(gguf=not config["norm_topk_prob"] and config["rms_norm_eps"] == 1e-5)
    d.maybe(config, "clip_qkv", round(d.rng.uniform(0.3, 2.0), 2), mlx=False, gguf=False)
    d.maybe(config, "attention_bias", True, gguf=False, mlx=False)
    return config


def _latent(d: Draw) -> dict[str, Any]:
    config = d.base() | d.groups()
    heads = d.rng.randint(1, 6)
    config |= {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": d.width(5, 40) if d.chance(0.6) else None,
        "kv_lora_rank": d.width(5, 40),
        "qk_nope_head_dim": d.width(1, 30),
        "qk_rope_head_dim": 2 * d.rng.randint(1, 12),
        "v_head_dim": d.width(1, 30),
        "intermediate_size": d.width(3, 60),
        "moe_intermediate_size": d.width(1, 30),
        "n_shared_experts": d.rng.randint(1, 3),
        "first_k_dense_replace": d.rng.randint(0, config["num_hidden_layers"]),
    }
    rope = d.rope(config["qk_rope_head_dim"], kinds=("default", "yarn", "yarn", "yarn"))
    if rope["rope_type"] == "yarn":
        rope.pop("truncate", None)
        all_dim = round(d.rng.uniform(0.5, 1.2), 3)
        rope |= {"mscale": all_dim, "mscale_all_dim": all_dim}
        if d.chance(0.3):
            rope["mscale"] = 1.0
            d.only(gguf=False)
    config["rope_parameters"] = rope
    d.maybe(config, "attention_bias", True, gguf=False, mlx=False)
    return config


def deepseek_v3(d: Draw) -> dict[str, Any]:
    config = _latent(d)
    config |= {
        "norm_topk_prob": d.chance(0.8),
        "routed_scaling_factor": d.pick(1.0, 2.5, 0.4),
    }
    d.only(mlx=config["norm_topk_prob"] and config["n_group"] == 1)
    d.maybe(config, "rope_interleave", False, p=0.15, gguf=False, mlx=False)
    return config


def deepseek_v2(d: Draw) -> dict[str, Any]:
    config = _latent(d)
    config["hidden_size"] = config["num_attention_heads"] * d.width(2, 12)
    # transformers rotates this family in complex numbers, which it reads from even places.
    for key in ("kv_lora_rank", "qk_nope_head_dim"):
        config[key] += config[key] % 2
    limited = config["n_group"] > 1 and d.chance(0.7)
    config |= {
        "topk_method": "group_limited_greedy" if limited else "greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": d.pick(1.0, 16.0, 0.4),
    }
    d.only(gguf=not limited, mlx=not limited)
    return config


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


def gpt_oss(d: Draw) -> dict[str, Any]:
    config = d.base() | d.heads() | d.experts("num_local_experts")
    config |= {
        "intermediate_size": d.width(1, 40),
        "sliding_window": d.rng.randint(1, 60),
        "rope_parameters": d.rope(config["head_dim"], kinds=PLAIN_KINDS),
    }
    if config["rope_parameters"]["rope_type"] == "yarn":
        config["rope_parameters"]["truncate"] = False
    # llama.cpp's converter takes anything else for YaRN; mlx-lm reads keys of older configurations only, and rounds
    # YaRN's range to whole channels.
    d.only(gguf=config["rope_parameters"]["rope_type"] == "yarn", mlx=False)
    if d.chance(0.3):
        kinds = ("sliding_attention", "full_attention")
        config["layer_types"] = [d.pick(*kinds) for _ in range(config["num_hidden_layers"])]
        d.only(gguf=False)
    d.maybe(config, "swiglu_limit", 2.5, gguf=False, mlx=False)
    return config


def glm4_moe_lite(d: Draw) -> dict[str, Any]:
    config = _latent(d)
    layers = config["num_hidden_layers"]
    config |= {
        "norm_topk_prob": d.chance(0.8),
        "routed_scaling_factor": d.pick(1.0, 1.8),
    }
    if d.chance():
        config["mlp_layer_types"] = [d.pick("dense", "sparse", "sparse") for _ in range(layers)]
        del config["first_k_dense_replace"]
        # Layers' kinds are not read by converters.
        d.only(gguf=False, mlx=False)
    else:
        dense = config["first_k_dense_replace"]
        config["mlp_layer_types"] = ["dense"] * dense + ["sparse"] * (layers - dense)
    # mlx-lm has no model of this family without a query's latent, nor with a tied head.
    d.only(mlx=config["n_group"] == 1 and not config["tie_word_embeddings"])
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


def _indexed(d: Draw) -> dict[str, Any]:
    config = _latent(d)
    config["q_lora_rank"] = config["q_lora_rank"] or d.width(5, 40)
    config |= {
        "norm_topk_prob": d.chance(0.8),
        "routed_scaling_factor": d.pick(1.0, 2.5),
        # Mostly as many keys as there are tokens: attention is dense.
        "index_topk": d.pick(9, 256, 256),
        "index_n_heads": d.rng.randint(3, 9),
        "index_head_dim": config["qk_rope_head_dim"] + d.rng.randint(1, 9),
    }
    config.pop("attention_bias", None)
    dense = config["index_topk"] == 256
    d.only(mlx=dense and config["n_group"] == 1 and not config["tie_word_embeddings"])
    return config


def deepseek_v32(d: Draw) -> dict[str, Any]:
    return _indexed(d)


def glm_moe_dsa(d: Draw) -> dict[str, Any]:
    # What published configurations say and mlx-lm asks for.
    return _indexed(d) | {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}


def deepseek_v4(d: Draw) -> dict[str, Any]:
    config = d.base(layers=4)
    layers = config["num_hidden_layers"]
    groups = d.rng.randint(1, 3)
    rotary = 2 * d.rng.randint(1, 6)
    heads = groups * d.rng.randint(1, 3)
    head_dim = rotary + d.rng.randint(0, 20)
    experts = d.experts("n_routed_experts")
    rates = {"compressed_sparse_attention": d.pick(1, 2, 4, 4, 5), "heavily_compressed_attention": d.pick(1, 6, 11, 128)}
    kinds = ("sliding_attention", *rates)
    config |= experts | {
        "num_attention_heads": heads,
        "num_key_value_heads": 1,
        "head_dim": head_dim,
        # transformers makes it from the part that rotates.
        "partial_rotary_factor": (rotary + 0.5) / head_dim,
        "q_lora_rank": d.width(5, 40),
        "moe_intermediate_size": d.width(1, 40),
        "o_groups": groups,
        "o_lora_rank": d.width(1, 20),
        "index_n_heads": d.rng.randint(1, 9),
        "index_head_dim": rotary + d.rng.randint(0, 9),
        # Mostly more than there are.
        "index_topk": d.pick(3, 8, 150, 150),
        "compress_rates": rates,
        "layer_types": [d.pick(*kinds) for _ in range(layers)],
        "mlp_layer_types": [d.pick("hash_moe", "moe", "moe") for _ in range(layers - 1)] + ["moe"],
        "hc_mult": d.rng.randint(2, 5),
        "hc_sinkhorn_iters": d.pick(1, 2, 20),
        "hc_eps": d.pick(1e-6, 1e-3),
        "swiglu_limit": d.pick(10.0, 0.7),
        "sliding_window": d.pick(1, 7, 33, 128),
        "routed_scaling_factor": d.pick(1.0, 1.5),
        "scoring_func": d.pick("sqrtsoftplus", "sqrtsoftplus", "sigmoid"),
        "num_nextn_predict_layers": 0,
    }
    main, compress = (d.rope(rotary, kinds=("default", "default", "yarn", "linear")) for _ in range(2))
    for rope in (main, compress):
        # Not read by transformers where there are several sets of parameters.
        rope.pop("truncate", None)
        rope["partial_rotary_factor"] = config["partial_rotary_factor"]
    config["rope_parameters"] = {"main": main, "compress": compress}
    d.only(gguf=False, mlx=False)
    return config


def ernie4_5_moe(d: Draw) -> dict[str, Any]:
    config = d.base() | d.heads()
    del config["head_dim"]
    step = d.aligned if d.aligned > 1 else 2
    config["hidden_size"] = d.few_heads(config) * step * d.rng.randint(1, 6 if d.aligned == 1 else 1)
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    experts = d.experts("moe_num_experts")
    layers = config["num_hidden_layers"]
    config |= {
        "moe_num_experts": experts["moe_num_experts"],
        "moe_k": experts["num_experts_per_tok"],
        "intermediate_size": d.width(3, 60),
        "moe_intermediate_size": d.width(1, 30),
        "moe_num_shared_experts": d.rng.randint(0, 2),
        "moe_layer_start_index": d.rng.randint(0, layers - 1),
        "moe_layer_interval": 1,
        "use_bias": d.chance(0.3),
        "rope_parameters": d.rope(head_dim, kinds=("default", "default", "linear", "yarn")),
    }
    # mlx-lm leaves the correction bias out.
    d.only(gguf=not config["use_bias"], mlx=False)
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


def qwen2_moe(d: Draw) -> dict[str, Any]:
    config = d.base() | d.heads() | d.experts("num_experts")
    if config.pop("head_dim"):
        step = d.aligned if d.aligned > 1 else 2
        config["hidden_size"] = d.few_heads(config) * step * d.rng.randint(1, 6 if d.aligned == 1 else 1)
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    config |= {
        "intermediate_size": d.width(3, 60),
        "moe_intermediate_size": d.width(1, 40),
        "shared_expert_intermediate_size": d.width(1, 40),
        "norm_topk_prob": d.chance(0.3),
        "qkv_bias": True,
        "rope_parameters": d.rope(head_dim, kinds=("default", "linear", "yarn", "llama3")),
    }
    d.only(gguf=not config["norm_topk_prob"], mlx=not config["norm_topk_prob"])
    # llama.cpp's converter leaves the frequencies out.
    d.only(gguf=config["rope_parameters"]["rope_type"] != "llama3")
    d.maybe(config, "decoder_sparse_step", 2, p=0.2, gguf=False)
    return config


def qwen4_exp_text(d: Draw) -> dict[str, Any]:
    config = qwen3_next(d)
    for key in ("intermediate_size", "mlp_only_layers", "full_attention_interval"):
        config.pop(key, None)
    layers = config["num_hidden_layers"]
    kinds = {"linear_attention": "linear_attention", "full_attention": "indexed_attention"}
    config["layer_types"] = [kinds[kind] for kind in config["layer_types"]]
    linear = [layer + 1 for layer, kind in enumerate(config["layer_types"]) if kind == "linear_attention"]
    size, each = d.rng.randint(2, 4), d.rng.randint(1, 3)
    ratio = d.rng.randint(1, 9)
    config |= {
        "hc_count": d.rng.randint(2, 5),
        "hc_lowrank": d.width(1, 20),
        "ple_layer_ids": sorted(d.rng.sample(linear, d.rng.randint(0, len(linear)))),
        "ple_embed_dim": (size - 1) * each * d.width(1, 9),
        "ple_conv_kernel_size": d.rng.randint(2, 5),
        "ngram_size": size,
        "heads_per_ngram": each,
        "ngram_vocab_size_base": d.rng.randint(2, 99),
        "make_ngram_vocab_size_divisible_by": d.pick(1, 8, 128),
        "split_ngram_parts": d.rng.randint(1, 6),
        "seed": d.rng.randint(0, 10**12),
        "indexer_n_heads": d.rng.randint(1, 9),
        "indexer_kv_heads": 1,
        "indexer_head_dim": config["head_dim"] + d.rng.randint(0, 5),
        "indexer_budget": ratio * d.pick(3, 8, 150, 150),
        "indexer_compress_ratio": ratio,
        "output_gate_type": d.pick(None, "silu", "sigmoid"),
        "eos_token_id": d.rng.randint(0, TOKENIZER_SIZE - 1),
    }
    d.only(gguf=False, mlx=False)
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


def mistral4(d: Draw) -> dict[str, Any]:
    config = _latent(d)
    config |= {"norm_topk_prob": d.chance(0.7), "routed_scaling_factor": d.pick(1.0, 2.5)}
    # transformers rotates all channels of a head without scaling, of which there are too many.
    while (rope := d.rope(config["qk_rope_head_dim"], kinds=("yarn",))).get("truncate") is False:
        pass
    config["rope_parameters"] = rope
    rope["llama_4_scaling_beta"] = d.pick(0.1, 0.5)
    rope.setdefault("original_max_position_embeddings", d.rng.randint(8, 64))
    if config["first_k_dense_replace"] == config["num_hidden_layers"]:
        config["first_k_dense_replace"] = 0
    d.maybe(config, "rope_interleave", False, gguf=False)
    # llama.cpp's converter leaves it out; published models have this one.
    d.only(gguf=rope["llama_4_scaling_beta"] == 0.1, mlx=config["n_group"] == 1)
    return config


def kimi_linear(d: Draw) -> dict[str, Any]:
    config = _latent(d)
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


def _streamed(d: Draw) -> dict[str, Any]:
    """Latent attention over chosen tokens, between residual streams."""
    config = _latent(d)
    layers = config["num_hidden_layers"]
    config.pop("first_k_dense_replace")
    config["q_lora_rank"] = config["q_lora_rank"] or d.width(5, 40)
    config |= {
        "norm_topk_prob": d.chance(0.8),
        "routed_scaling_factor": d.pick(1.0, 2.5),
        "mlp_layer_types": ["sparse", *(d.pick("sparse", "dense") for _ in range(layers - 1))],
        "index_n_heads": d.rng.randint(3, 12),
        "indexer_types": ["full", *(d.pick("full", "shared") for _ in range(layers - 1))],
        "hc_mult": d.rng.randint(1, 5),
        "hc_eps": d.pick(1e-6, 1e-3),
        "swiglu_limit": d.pick(10.0, 0.7),
        "pad_token_id": None,
    }
    d.rng.shuffle(config["mlp_layer_types"])
    return config


def hy_v4(d: Draw) -> dict[str, Any]:
    config = _streamed(d)
    config |= {
        "index_topk": d.pick(5, 17, 150, 150),
        "index_head_dim": config["qk_rope_head_dim"] + d.rng.randint(0, 9),
        "hc_magnitude": d.pick(2.0, 0.7),
    }
    if d.chance(0.3):
        config["rope_parameters"] = d.rope(config["qk_rope_head_dim"])
    d.only(gguf=False, mlx=False)
    return config


def minimax_m3_vl_text(d: Draw) -> dict[str, Any]:
    config = d.base(layers=4) | d.heads() | d.experts("num_local_experts")
    layers = config["num_hidden_layers"]
    config["head_dim"] = 4 * max(1, config["head_dim"] // 4)
    while d.aligned > 1 and config["num_attention_heads"] * config["head_dim"] % d.aligned:
        config["num_attention_heads"] *= 2
    part = d.pick(0.5, 0.5, 1.0)
    rotary_dim = int(config["head_dim"] * part)
    heads = config["num_attention_heads"]
    topk = d.rng.randint(1, 6)
    config |= {
        "intermediate_size": d.width(1, 30),
        "dense_intermediate_size": d.width(3, 60),
        "shared_intermediate_size": d.width(1, 30),
        "layer_types": [d.pick("minimax_m3_sparse", "minimax_m3_sparse", "full_attention") for _ in range(layers)],
        "mlp_layer_types": ["sparse", *(d.pick("sparse", "dense") for _ in range(layers - 1))],
        "index_n_heads": d.pick(*(n for n in range(1, heads + 1) if heads % n == 0)),
        "index_head_dim": rotary_dim + d.rng.randint(0, 9),
        "index_block_size": d.pick(1, 3, 8, 16, 70),
        "index_topk_blocks": topk,
        "index_local_blocks": d.rng.randint(0, min(2, topk)),
        "swiglu_alpha": d.pick(1.702, 0.9),
        "swiglu_limit": d.pick(7.0, 0.8),
        "routed_scaling_factor": d.pick(1.0, 2.0),
        "rope_parameters": d.rope(rotary_dim),
    }
    d.rng.shuffle(config["mlp_layer_types"])
    if part < 1 or d.chance():
        config["rope_parameters"]["partial_rotary_factor"] = part
    d.only(gguf=False, mlx=False)
    return config


def glm5_next(d: Draw) -> dict[str, Any]:
    text = _streamed(d)
    layers = text["num_hidden_layers"]
    for key in ("rope_parameters", "qk_rope_head_dim"):
        text.pop(key)
    kinds = [d.pick("linear_attention", "indexed_attention") for _ in range(layers)]
    pool = d.pick(1, 2, 5, 16)
    text |= {
        "layer_types": kinds,
        # transformers hands a choice on to the next layer only.
        "indexer_types": [
            "shared" if layer and kinds[layer - 1] == kinds[layer] and layer % 2 and d.chance() else "full"
            for layer in range(layers)
        ],
        "index_kpool": pool,
        "index_topk": pool * d.pick(1, 4, 50),
        "index_head_dim": d.width(1, 20),
        "linear_num_heads": d.rng.randint(1, 4),
        "linear_head_dim": d.width(2, 24),
        "linear_conv_kernel_dim": d.rng.randint(2, 5),
        "linear_lower_bound": d.pick(-5.0, -0.8, None),
        "hc_sinkhorn_iters": d.pick(1, 2, 20),
        "tie_word_embeddings": False,
    }
    tower = {
        "depth": 1,
        "hidden_size": 8,
        "num_heads": 2,
        "intermediate_size": 8,
        "out_hidden_size": text["hidden_size"],
        "projection_intermediate_size": 8,
        "patch_size": 2,
        "image_size": 4,
    }
    d.only(gguf=False, mlx=False)
    return {"text_config": text, "vision_config": tower}


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


def granitemoe(d: Draw) -> dict[str, Any]:
    config = d.base() | d.heads() | d.experts("num_local_experts")
    if d.chance(0.7):
        heads = d.few_heads(config)
        del config["head_dim"]
        step = d.aligned if d.aligned > 1 else 2
        config["hidden_size"] = heads * step * d.rng.randint(1, 6 if d.aligned == 1 else 1)
    else:
        # Neither form has a key for it.
        d.only(gguf=False, mlx=False)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    # transformers cannot scale dynamically what is not configured.
    kinds = ROPE_KINDS if "head_dim" in config else tuple(k for k in ROPE_KINDS if k != "dynamic")
    config |= {
        "intermediate_size": d.width(1, 50),
        "embedding_multiplier": d.pick(1.0, 12.0, round(d.rng.uniform(0.3, 8.0), 2)),
        "attention_multiplier": d.pick(1.0, head_dim**-0.5, round(d.rng.uniform(0.02, 0.9), 4)),
        "residual_multiplier": d.pick(1.0, 0.22, round(d.rng.uniform(0.1, 1.5), 3)),
        "logits_scaling": d.pick(1.0, 6.0, round(d.rng.uniform(0.2, 9.0), 2)),
        "rope_parameters": d.rope(head_dim, kinds=kinds),
    }
    d.maybe(config, "attention_bias", True, gguf=False)
    return config


def granitemoeshared(d: Draw) -> dict[str, Any]:
    """With a shared expert, mostly."""
    d.only(mlx=False)
    return granitemoe(d) | {"shared_intermediate_size": 0 if d.chance(0.2) else d.width(1, 40)}


FAMILIES: dict[str, Callable[[Draw], dict[str, Any]]] = {
    draw.__name__: draw
    for draw in (
        qwen3_moe,
        mixtral,
        olmoe,
        deepseek_v3,
        deepseek_v2,
        qwen3_next,
        qwen3_5_moe_text,
        glm4_moe,
        minimax_m2,
        gpt_oss,
        glm4_moe_lite,
        solar_open,
        dots1,
        hy_v3,
        qwen2_moe,
        deepseek_v32,
        glm_moe_dsa,
        deepseek_v4,
        ernie4_5_moe,
        qwen4_exp_text,
        llama4_text,
        mimo_v2_flash,
        mistral4,
        kimi_linear,
        hy_v4,
        minimax_m3_vl_text,
        glm5_next,
        nemotron_h,
        step3p7,
        granitemoe,
        granitemoeshared,
        random_multimodal.qwen3_vl_moe,
        random_normed.hunyuan_v1_moe,
        random_multimodal.glm4v_moe,
        random_hybrid.gemma4_text,
        random_hybrid.afmoe,
        random_hybrid.exaone_moe,
        random_hybrid.granitemoehybrid,
        random_hybrid.lfm2_moe,
    )
}
