"""Random small configurations of families with multi-head latent attention."""

from typing import Any

from .random_draw import PLAIN_KINDS, Draw


def latent(d: Draw) -> dict[str, Any]:
    """What those of DeepSeek's kind have in common."""
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
    config = latent(d)
    config |= {
        "norm_topk_prob": d.chance(0.8),
        "routed_scaling_factor": d.pick(1.0, 2.5, 0.4),
    }
    d.only(mlx=config["norm_topk_prob"] and config["n_group"] == 1)
    d.maybe(config, "rope_interleave", False, p=0.15, gguf=False, mlx=False)
    return config


def sarvam_mla(d: Draw) -> dict[str, Any]:
    config = deepseek_v3(d)
    d.only(gguf=False, mlx=False)
    if d.chance(0.3):
        return config
    rope = dict(config["rope_parameters"])
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    published = {"num_experts": config["n_routed_experts"], "num_shared_experts": config["n_shared_experts"]}
    published |= {"head_dim": config["kv_lora_rank"] + config["qk_rope_head_dim"]}
    published |= {"q_head_dim": config["qk_nope_head_dim"] + config["qk_rope_head_dim"]}
    published |= {"rope_theta": theta, "rope_scaling": {"type": "deepseek_yarn"} | rope if kind == "yarn" else None}
    unset = dict.fromkeys(("n_routed_experts", "n_shared_experts", "qk_head_dim", "rope_parameters"))
    d.case = {"config_edits": published | unset, "stacked_experts": False}
    return config


def deepseek_v2(d: Draw) -> dict[str, Any]:
    config = latent(d)
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


def glm4_moe_lite(d: Draw) -> dict[str, Any]:
    config = latent(d)
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


def mistral4(d: Draw) -> dict[str, Any]:
    config = latent(d)
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


def _indexed(d: Draw) -> dict[str, Any]:
    config = latent(d)
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


def longcat_flash(d: Draw) -> dict[str, Any]:
    config = latent(d)
    config["num_layers"] = config.pop("num_hidden_layers")
    for key in ("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace", "num_experts_per_tok"):
        del config[key]
    experts, identities = config["n_routed_experts"], d.rng.randint(0, 9)
    config |= {
        "q_lora_rank": config["q_lora_rank"] or d.width(5, 40),
        "ffn_hidden_size": config.pop("intermediate_size"),
        "expert_ffn_hidden_size": config.pop("moe_intermediate_size"),
        "head_dim": config["qk_rope_head_dim"],
        "zero_expert_num": identities,
        "moe_topk": d.rng.randint(1, min(8, experts + identities)),
        "routed_scaling_factor": d.pick(1.0, 6.0, 0.4),
    }
    # mlx-lm has another epsilon in norms of latents, and no tied head.
    d.only(gguf=False, mlx=False)
    d.case = {"published_keys": d.chance()}
    return config


def mistral_large4(d: Draw) -> dict[str, Any]:
    config = latent(d)
    layers = config["num_hidden_layers"] = d.rng.randint(1, 5)
    del config["q_lora_rank"]
    rotates = [int(d.chance(0.7)) for _ in range(layers)]
    # Latents of other layers are those of the last one of a kind that is its own source and shared.
    sources = list(range(layers))
    for layer in range(1, layers):
        before = [own for own in range(layer) if sources[own] == own and rotates[own] == rotates[layer]]
        shared = [own for own in before if own in sources[own + 1 : layer]]
        if before and d.chance(0.4):
            sources[layer] = (shared or before)[-1]
    text = config | {
        "first_k_dense_replace": d.rng.randint(0, layers),
        "routed_scaling_factor": d.pick(1.0, 2.5),
        "no_rope_layers": rotates,
        "kv_source_layers": sources,
        "indexer_types": ["full"] + [d.pick("full", "shared") for _ in range(layers - 1)],
        # Mostly as many keys as there are tokens: attention is dense.
        "index_topk": d.pick(9, 256, 256),
        "index_n_heads": d.rng.randint(10, 18),
        "index_head_dim": config["qk_rope_head_dim"] + d.rng.randint(1, 9),
        "final_logit_softcapping": d.pick(30.0, 3.0),
    }
    tower = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1}
    tower |= {"model_type": "pixtral", "patch_size": 1, "image_size": 2}
    d.only(gguf=False, mlx=False)
    d.case = {"stacked_experts": d.chance(0.3), "max_shard_bytes": None}
    tied = text.pop("tie_word_embeddings")
    return {"text_config": text, "vision_config": tower, "tie_word_embeddings": tied}


def dots3_note_text(d: Draw) -> dict[str, Any]:
    config = latent(d)
    layers = config["num_hidden_layers"] = d.rng.randint(1, 6)
    heads, nope, rope = d.rng.randint(1, 6), d.width(1, 30), 2 * d.rng.randint(1, 12)
    dense, every, shared = config.pop("first_k_dense_replace"), d.pick(1, 1, 2), d.width(1, 30)
    sliding = {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": d.width(5, 40),
        "kv_lora_rank": d.width(5, 40),
        "head_dim": nope + rope,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": d.width(1, 30),
    }
    kinds = [d.pick("indexed_attention", "full_attention", "sliding_attention") for _ in range(layers)]
    config |= {
        "q_lora_rank": config["q_lora_rank"] or d.width(5, 40),
        "head_dim": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
        "mlp_layer_types": ["sparse" if i >= dense and i % every == 0 else "dense" for i in range(layers)],
        "shared_experts_intermediate_size": shared,
        "layer_types": kinds,
        "per_layer_config": {i: sliding for i, kind in enumerate(kinds) if kind == "sliding_attention"},
        "norm_topk_prob": d.chance(0.8),
        "routed_scaling_factor": d.pick(1.0, 2.5),
        "sliding_window": d.rng.randint(1, 50),
        # Mostly as many keys as there are tokens: attention is dense.
        "index_topk": d.pick(9, 256, 256),
        "index_n_heads": d.rng.randint(10, 18),
        "index_head_dim": config["qk_rope_head_dim"] + d.rng.randint(1, 9),
        "pad_token_id": None,
    }
    d.only(gguf=False, mlx=False)
    d.case = {"stacked_experts": d.chance(0.3)}
    if d.chance():
        config["rope_parameters"] = {
            kind: d.rope(rope if kind == "sliding_attention" else config["qk_rope_head_dim"], kinds=PLAIN_KINDS)
            for kind in sorted(set(kinds))
        }
        return config
    # Keys as published, which have one kind beside that with a window.
    one, bases = d.pick("indexed_attention", "full_attention"), (d.pick(50.0, 3000.0), d.pick(90.0, 8000.0))
    kinds = [kind if kind == "sliding_attention" else one for kind in kinds]
    config["layer_types"] = kinds
    config["rope_parameters"] = {
        kind: {"rope_type": "default", "rope_theta": bases[kind == "sliding_attention"]} for kind in sorted(set(kinds))
    }
    published = {f"swa_{key}": value for key, value in sliding.items() if key != "qk_rope_head_dim"}
    published |= {"rope_theta": bases[0], "swa_rope_theta": bases[1], "sliding_window_size": config["sliding_window"]}
    published |= {"first_k_dense_replace": dense, "moe_layer_freq": every, "moe_shared_expert_intermediate_size": shared}
    published |= {"use_dsa": one == "indexed_attention"}
    published |= {"layer_types": ["full_attention" if kind == one else kind for kind in kinds]}
    unset = dict.fromkeys(("per_layer_config", "rope_parameters", "mlp_layer_types", "sliding_window"))
    d.case |= {"config_edits": published | unset | {"shared_experts_intermediate_size": None}}
    return config
