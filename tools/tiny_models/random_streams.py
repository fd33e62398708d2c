"""Random small configurations of families with several residual streams, or that choose what they see."""

from typing import Any

from .random_draw import TOKENIZER_SIZE, Draw
from .random_latent import latent
from .random_linear import qwen3_next


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


def _streamed(d: Draw) -> dict[str, Any]:
    """Latent attention over chosen tokens, between residual streams."""
    config = latent(d)
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
