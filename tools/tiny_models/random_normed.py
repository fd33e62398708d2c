"""Random small configurations of families whose norms are elsewhere than usual: Hunyuan-A13B, FlexOlmo, A.X-K1
and Beam."""

from typing import Any

from .random_draw import PLAIN_KINDS, Draw
from .random_latent import latent


def hunyuan_v1_moe(d: Draw) -> dict[str, Any]:
    config = d.base() | d.heads() | d.experts("num_experts")
    layers = config["num_hidden_layers"]
    top_k = config.pop("num_experts_per_tok")
    rope = d.rope(config["head_dim"], kinds=("default", "default", "linear", "dynamic", "yarn", "llama3"))
    if d.chance(0.4):
        rope = {"rope_type": "dynamic", "rope_theta": rope["rope_theta"], "alpha": d.pick(1000.0, 7.5), "factor": 1.0}
        # llama.cpp's converter wants the published model's numbers.
        d.only(gguf=False)
    config |= {
        "moe_topk": [d.rng.randint(1, top_k) for _ in range(layers)] if d.chance(0.3) else top_k,
        "intermediate_size": d.width(1, 50),
        "rope_parameters": rope,
    }
    d.maybe(config, "attention_bias", True, gguf=False)
    d.only(mlx=False, gguf=not isinstance(config["moe_topk"], list))
    # As published; transformers does not read the first two.
    edits: dict[str, Any] = {"num_shared_expert": [1] * layers}
    edits["moe_intermediate_size"] = [config["intermediate_size"]] * layers
    if not isinstance(config["moe_topk"], list):
        edits["moe_topk"] = [top_k] * layers
    d.case = {"config_edits": edits, "stacked_experts": False}
    return config


def flex_olmo(d: Draw) -> dict[str, Any]:
    config = d.base() | d.heads() | d.experts("num_experts")
    heads = d.few_heads(config)
    del config["head_dim"]
    head_dim = 2 * d.rng.randint(1, 8) if d.aligned == 1 else d.aligned
    config |= {
        "hidden_size": heads * head_dim,
        "intermediate_size": d.width(1, 40),
        "norm_topk_prob": d.chance(0.3),
        "rope_parameters": d.rope(head_dim, kinds=PLAIN_KINDS),
        "pad_token_id": 0,
    }
    d.maybe(config, "attention_bias", True)
    d.only(gguf=False, mlx=False)
    d.case = {"stacked_experts": d.chance()}
    return config


def axk1(d: Draw) -> dict[str, Any]:
    config = latent(d)
    layers = config["num_hidden_layers"]
    config |= {
        "q_lora_rank": config["q_lora_rank"] or d.width(5, 40),
        "bos_token_id": 1,
        "norm_topk_prob": d.chance(0.8),
        "routed_scaling_factor": d.pick(1.0, 2.5, 0.4),
    }
    if d.chance(0.4):
        config["mlp_layer_types"] = [d.pick("sparse", "dense") for _ in range(layers)]
        del config["first_k_dense_replace"]
    elif d.chance(0.3):
        config["moe_layer_freq"] = 2
    d.maybe(config, "rope_interleave", False, p=0.3)
    d.only(gguf=False, mlx=False)
    d.case = {"stacked_experts": d.chance()}
    return config


def axk2(d: Draw) -> dict[str, Any]:
    config = axk1(d)
    if d.chance():
        config |= {"n_group": None, "topk_group": None}
    config |= {
        "gated_norm_rank": d.rng.randint(1, 20),
        # Mostly as many keys as there are tokens: attention is dense.
        "index_topk": d.pick(9, 256, 256),
        "index_n_heads": d.rng.randint(10, 18),
        "index_head_dim": config["qk_rope_head_dim"] + d.rng.randint(1, 9),
    }
    config.pop("rope_interleave", None)
    return config


def kolibri1(d: Draw) -> dict[str, Any]:
    config = d.base(6) | d.heads() | d.experts("num_experts")
    layers = config["num_hidden_layers"]
    config |= {
        "moe_intermediate_size": d.width(1, 30),
        "shared_expert_intermediate_size": d.width(1, 30),
        "norm_topk_prob": d.chance(),
        "sliding_window": d.rng.randint(1, 50),
        "layer_types": d.pick(None, [d.pick("sliding_attention", "full_attention") for _ in range(layers)]),
        "rope_parameters": d.rope(config["head_dim"], kinds=PLAIN_KINDS),
    }
    d.only(gguf=False, mlx=False)
    d.case = {"stacked_experts": d.chance()}
    return config


def beam(d: Draw) -> dict[str, Any]:
    config = d.base(4) | d.heads() | d.groups()
    config["num_experts"] = config.pop("n_routed_experts")
    layers = config["num_hidden_layers"]
    sliding = d.rope(config["head_dim"], kinds=PLAIN_KINDS)
    full = d.pick(None, d.rope(config["head_dim"], kinds=PLAIN_KINDS))
    config |= {
        "intermediate_size": d.width(3, 50),
        "moe_intermediate_size": d.width(1, 30),
        "norm_topk_prob": d.chance(0.7),
        "routed_scaling_factor": d.pick(1.0, 2.5),
        "sliding_window": d.rng.randint(1, 50),
        "layer_types": d.pick(None, [d.pick("sliding_attention", "full_attention") for _ in range(layers)]),
        "mlp_layer_types": d.pick(None, [d.pick("sparse", "sparse", "dense") for _ in range(layers)]),
        "final_logit_softcapping": d.pick(None, 3.0, 30.0),
    }
    if d.chance(0.8):
        config["rope_parameters"] = {"sliding_attention": sliding, "full_attention": full}
    d.maybe(config, "attention_bias", True)
    d.only(gguf=False, mlx=False)
    d.case = {"stacked_experts": d.chance()}
    return config
