"""Random small configurations of families whose routers have softmax scores."""

from typing import Any

from .random_draw import PLAIN_KINDS, ROPE_KINDS, Draw


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


def aria_text(d: Draw) -> dict[str, Any]:
    config = d.base() | d.heads() | d.experts("moe_num_experts")
    config["moe_topk"] = config.pop("num_experts_per_tok")
    config |= {
        "intermediate_size": d.width(1, 40),
        "moe_num_shared_experts": d.rng.randint(1, 3),
        "rope_parameters": d.rope(config["head_dim"]),
    }
    d.maybe(config, "attention_bias", True)
    d.maybe(config, "mlp_bias", True)
    # Neither llama.cpp nor mlx-lm has it.
    d.only(gguf=False, mlx=False)
    return config


def jetmoe(d: Draw) -> dict[str, Any]:
    config = d.base() | d.heads() | d.experts("num_local_experts")
    del config["num_attention_heads"]
    config |= {
        "kv_channels": config.pop("head_dim"),
        "num_local_experts": min(config["num_local_experts"], 12),
        "num_experts_per_tok": min(config["num_experts_per_tok"], 12),
        "intermediate_size": d.width(1, 40),
    }
    config["rope_parameters"] = d.rope(config["kv_channels"])
    # Neither llama.cpp nor mlx-lm has it.
    d.only(gguf=False, mlx=False)
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


def dbrx(d: Draw) -> dict[str, Any]:
    config = d.base() | d.heads() | d.experts("moe_num_experts")
    for key in ("head_dim", "rms_norm_eps", "tie_word_embeddings"):
        config.pop(key, None)
    heads = d.few_heads(config)
    head_dim = 2 * d.rng.randint(1, 8) if d.aligned == 1 else d.aligned
    rope = d.rope(head_dim)
    attention = {"kv_n_heads": config.pop("num_key_value_heads"), "rope_theta": rope["rope_theta"]}
    attention["clip_qkv"] = d.pick(0.5, 1.5, 8)
    experts = {"moe_num_experts": config.pop("moe_num_experts"), "moe_top_k": config.pop("num_experts_per_tok")}
    experts |= {"ffn_hidden_size": d.width(1, 40), "moe_normalize_expert_weights": d.pick(None, 1.0, 1.0)}
    said = rope["rope_type"] == "default" and experts["moe_normalize_expert_weights"] is not None
    d.only(gguf=said, mlx=said)
    return {
        "vocab_size": config["vocab_size"],
        "d_model": heads * head_dim,
        "n_heads": heads,
        "n_layers": config["num_hidden_layers"],
        "max_seq_len": 512,
        "attn_config": attention,
        "ffn_config": experts,
        "rope_parameters": rope,
        "eos_token_id": config["eos_token_id"],
        "tie_word_embeddings": False,
    }


def phimoe(d: Draw) -> dict[str, Any]:
    config = d.base() | d.heads() | d.experts("num_local_experts")
    del config["head_dim"]
    heads = d.few_heads(config)
    head_dim = 2 * d.rng.randint(1, 8) if d.aligned == 1 else d.aligned
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 90.0}
    if d.chance():
        factors = [[round(d.rng.uniform(1, 9), 2) for _ in range(head_dim // 2)] for _ in range(2)]
        rope |= {"rope_type": "longrope", "short_factor": factors[0], "long_factor": factors[1]}
        # More than the tokens that are run: beyond, transformers has the magnitude for long contexts, but not their factors.
        rope |= {"short_mscale": 1.1, "long_mscale": 1.3, "original_max_position_embeddings": 256}
    config |= {
        "hidden_size": heads * head_dim,
        "intermediate_size": d.width(1, 40),
        "num_experts_per_tok": 2,
        "router_jitter_noise": d.pick(0.01, 0.1, 0.5),
        "sliding_window": d.pick(None, d.rng.randint(1, 50)),
        "rope_parameters": rope,
    }
    d.maybe(config, "attention_bias", True)
    d.maybe(config, "lm_head_bias", True)
    d.only(gguf=False, mlx=False)
    d.case = {"stacked_experts": d.chance()}
    return config
