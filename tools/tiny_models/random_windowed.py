"""Random small configurations of families with windows in some layers: Cohere2-MoE, Mellum 2, Granite MoE with windows,
Laguna, Flint."""

from typing import Any

from .random_draw import PLAIN_KINDS, Draw


def _kinds(d: Draw, layers: int, *kinds: str) -> list[str]:
    return [d.pick(*kinds) for _ in range(layers)]


def cohere2_moe(d: Draw) -> dict[str, Any]:
    config = d.base(5) | d.heads() | d.experts("num_experts")
    layers, eps = config["num_hidden_layers"], config.pop("rms_norm_eps")
    config |= {
        "rms_norm_eps": d.pick(None, eps),
        "layer_norm_eps": eps,
        "intermediate_size": d.width(1, 40),
        "prefix_dense_intermediate_size": d.width(3, 50),
        "num_shared_experts": d.rng.randint(0, 3),
        "shared_expert_combination_strategy": d.pick("average", "sum"),
        "expert_selection_fn": d.pick("softmax", "sigmoid"),
        "norm_topk_prob": d.chance(0.7),
        "prefix_dense_sliding_window_pattern": d.pick(1, 2),
        "sliding_window_pattern": d.pick(2, 4),
        "sliding_window": d.rng.randint(1, 50),
        "logit_scale": d.pick(0.0625, 0.7, 1.0),
        "first_k_dense_replace": d.rng.randint(0, layers - 1),
        "rope_parameters": d.rope(config["head_dim"], kinds=PLAIN_KINDS),
    }
    if d.chance():
        config["layer_types"] = _kinds(d, layers, "sliding_attention", "full_attention")
    if d.chance(0.4):
        config["mlp_layer_types"] = _kinds(d, layers, "sparse", "sparse", "dense")
    d.maybe(config, "attention_bias", True)
    d.only(gguf=False, mlx=False)
    d.case = {"stacked_experts": d.chance()}
    return config


def mellum(d: Draw) -> dict[str, Any]:
    config = d.base(4) | d.heads() | d.experts("num_experts")
    layers = config["num_hidden_layers"]
    config |= {
        "intermediate_size": d.width(3, 50),
        "moe_intermediate_size": d.width(1, 30),
        "norm_topk_prob": d.chance(0.7),
        "sliding_window": d.rng.randint(1, 50),
        "layer_types": d.pick(None, _kinds(d, layers, "sliding_attention", "full_attention")),
        "mlp_layer_types": d.pick(None, _kinds(d, layers, "sparse", "sparse", "dense")),
    }
    if d.chance(0.8):
        config["rope_parameters"] = {
            kind: d.rope(config["head_dim"], kinds=PLAIN_KINDS) for kind in ("full_attention", "sliding_attention")
        }
    d.maybe(config, "attention_bias", True)
    d.only(gguf=False, mlx=False)
    d.case = {"stacked_experts": d.chance()}
    return config


def granitemoe_swa(d: Draw) -> dict[str, Any]:
    config = d.base(5) | d.heads() | d.experts("num_local_experts")
    layers, heads = config["num_hidden_layers"], d.few_heads(config)
    del config["head_dim"]
    head_dim = 2 * d.rng.randint(1, 8) if d.aligned == 1 else d.aligned
    config |= {
        "hidden_size": heads * head_dim,
        "intermediate_size": d.width(1, 40),
        "shared_intermediate_size": 0 if d.chance(0.3) else d.width(1, 30),
        "embedding_multiplier": d.pick(1.0, 3.0),
        "attention_multiplier": d.pick(0.2, 0.5),
        "residual_multiplier": d.pick(1.0, 0.3),
        "logits_scaling": d.pick(1.0, 2.0),
        "sliding_window": d.rng.randint(1, 50),
        "layer_types": d.pick(None, _kinds(d, layers, "sliding_attention", "full_attention")),
        "layer_rope_theta": d.pick(None, [d.pick(0, 50.0, 700.0) for _ in range(layers)]),
        "rope_parameters": d.rope(head_dim, kinds=PLAIN_KINDS),
    }
    d.maybe(config, "attention_bias", True)
    # GGUF files have one base.
    d.only(gguf=config["layer_rope_theta"] is None, mlx=False)
    d.case = {"stacked_experts": d.chance()}
    return config


def laguna(d: Draw) -> dict[str, Any]:
    config = d.base(4) | d.heads() | d.experts("num_experts")
    layers, kv_heads = config["num_hidden_layers"], config["num_key_value_heads"]
    heads = [kv_heads * d.rng.randint(1, 4) for _ in range(layers)]
    config |= {
        "intermediate_size": d.width(3, 50),
        "moe_intermediate_size": d.width(1, 30),
        "shared_expert_intermediate_size": d.width(1, 30),
        "num_attention_heads_per_layer": d.pick(None, heads),
        "gating": d.pick(True, "per-head", "per-element"),
        "moe_routed_scaling_factor": d.pick(1.0, 2.5, 0.4),
        "moe_router_logit_softcapping": d.pick(0.0, 0.5, 4.0),
        "sliding_window": d.rng.randint(1, 50),
        "layer_types": d.pick(None, _kinds(d, layers, "sliding_attention", "full_attention")),
        "mlp_layer_types": d.pick(None, _kinds(d, layers, "sparse", "sparse", "dense")),
    }
    if d.chance(0.8):
        config["rope_parameters"] = {
            kind: d.rope(config["head_dim"], kinds=PLAIN_KINDS) for kind in ("full_attention", "sliding_attention")
        }
    d.maybe(config, "attention_bias", True)
    d.only(gguf=False, mlx=False)
    d.case = {"stacked_experts": d.chance()}
    return config


def inkling_text(d: Draw) -> dict[str, Any]:
    config = d.base(5) | d.heads() | d.experts("n_routed_experts")
    layers, sliding = config["num_hidden_layers"], d.heads()
    del config["tie_word_embeddings"]
    config |= {
        "swa_num_attention_heads": sliding["num_attention_heads"],
        "swa_num_key_value_heads": sliding["num_key_value_heads"],
        "swa_head_dim": sliding["head_dim"],
        "sliding_window_size": d.rng.randint(1, 50),
        "d_rel": d.rng.randint(1, 12),
        "rel_extent": d.rng.randint(1, 200),
        "layer_types": d.pick(None, _kinds(d, layers, "hybrid_sliding", "hybrid")),
        "mlp_layer_types": d.pick(None, _kinds(d, layers, "sparse", "dense")),
        "intermediate_size": d.width(3, 50),
        "moe_intermediate_size": d.width(1, 30),
        "n_shared_experts": d.rng.randint(1, 3),
        "conv_kernel_size": d.rng.randint(2, 6),
        "route_scale": d.pick(1.0, 8.0),
        "logits_mup_width_multiplier": d.pick(1.0, 24.0),
        "unpadded_vocab_size": d.pick(None, 300),
        "pad_token_id": None,
    }
    d.only(gguf=False, mlx=False)
    d.case = {"stacked_experts": d.chance()}
    return config


def flint(d: Draw) -> dict[str, Any]:
    config = d.base(5) | d.heads() | d.experts("num_experts")
    layers = config["num_hidden_layers"]
    config |= {
        "intermediate_size": d.width(3, 50),
        "moe_intermediate_size": d.width(1, 30),
        "shared_expert_intermediate_size": d.width(1, 30),
        "norm_topk_prob": d.chance(0.7),
        "sliding_window": d.rng.randint(1, 50),
        "layer_types": d.pick(None, _kinds(d, layers, "sliding_attention", "full_attention")),
        "mlp_only_layers": d.pick(None, [], [layers - 1]),
        "decoder_sparse_step": d.pick(1, 1, 2),
        "rope_parameters": d.rope(config["head_dim"], kinds=PLAIN_KINDS),
    }
    d.maybe(config, "attention_bias", True)
    d.only(gguf=False, mlx=False)
    d.case = {"stacked_experts": d.chance()}
    return config
