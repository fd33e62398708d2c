"""Random small configurations of multimodal models, of which the text part is compared; towers as small as can be."""

from typing import Any

from .hf_cases.multimodal import MUSE_SPARK_AUDIO, MUSE_SPARK_VISION
from .published import HY_V4_RENAMES
from .random_draw import Draw
from .random_streams import hy_v4

QWEN_TOWER = {
    "depth": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_heads": 2,
    "patch_size": 2,
    "num_position_embeddings": 4,
    "deepstack_visual_indexes": [0],
}


def qwen3_vl_moe(d: Draw) -> dict[str, Any]:
    text = d.base() | d.heads() | d.experts("num_experts")
    layers = text["num_hidden_layers"]
    # The channels of a head are divided between time, height and width.
    half = text["head_dim"] // 2
    rope = d.rope(text["head_dim"], kinds=("default", "default", "linear", "yarn"))
    text |= {
        "intermediate_size": d.width(3, 60),
        "moe_intermediate_size": d.width(1, 40),
        "rope_parameters": rope | {"mrope_section": [half - 2 * (half // 3), half // 3, half // 3]},
    }
    hidden = text["hidden_size"]
    if d.chance(0.3):
        text["moe_intermediate_size"] = d.pick(hidden, max(1, hidden // 2))
    # transformers takes a square matrix for one with rows as rows.
    square = hidden in (text["moe_intermediate_size"], 2 * text["moe_intermediate_size"])
    d.maybe(text, "attention_bias", True)
    d.maybe(text, "decoder_sparse_step", 2, gguf=False)
    d.maybe(text, "mlp_only_layers", [d.rng.randrange(layers)], gguf=False)
    # mlx-lm reads keys that transformers does not write.
    d.only(mlx=False)
    tied = text["tie_word_embeddings"]
    d.case = {"stacked_experts": True, "transposed_experts": not square and d.chance(0.7), "max_shard_bytes": None}
    tower = QWEN_TOWER | {"out_hidden_size": text["hidden_size"]}
    return {"text_config": text, "vision_config": tower, "tie_word_embeddings": tied}


def glm4v_moe(d: Draw) -> dict[str, Any]:
    text = d.base() | d.heads() | d.groups()
    text["head_dim"] = 4 * max(1, text["head_dim"] // 4)
    while d.aligned > 1 and text["num_attention_heads"] * text["head_dim"] % d.aligned:
        text["num_attention_heads"] *= 2
    # Where it is not given it is 0.5.
    part = d.pick(0.5, 0.5, 1.0)
    rotary_dim = int(text["head_dim"] * part)
    rope = d.rope(rotary_dim, kinds=("default", "default", "linear", "yarn")) | {"partial_rotary_factor": part}
    text |= {
        "intermediate_size": d.width(3, 60),
        "moe_intermediate_size": d.width(1, 40),
        "n_shared_experts": d.rng.randint(1, 3),
        "first_k_dense_replace": d.rng.randint(0, text["num_hidden_layers"]),
        "norm_topk_prob": d.chance(0.8),
        "routed_scaling_factor": d.pick(1.0, 2.5, 0.4),
        "attention_bias": d.chance(0.7),
        "rope_parameters": rope | {"mrope_section": [rotary_dim // 2, 0, 0]},
    }
    d.only(gguf=False, mlx=False)
    tied = text["tie_word_embeddings"]
    d.case = {"stacked_experts": d.chance()}
    tower = {
        "depth": 1,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_heads": 2,
        "patch_size": 2,
        "image_size": 4,
        "out_hidden_size": text["hidden_size"],
    }
    return {"text_config": text, "vision_config": tower, "tie_word_embeddings": tied}


def muse_spark(d: Draw) -> dict[str, Any]:
    text = d.base(5) | d.heads() | d.experts("num_local_experts")
    layers = text["num_hidden_layers"]
    # What is divided into heads, by a check of transformers alone.
    text["hidden_size"] = text["num_attention_heads"] * max(1, text["hidden_size"] // text["num_attention_heads"])
    while d.aligned > 1 and text["hidden_size"] % d.aligned:
        text["hidden_size"] += text["num_attention_heads"]
    del text["tie_word_embeddings"]
    text |= {
        "intermediate_size": d.width(3, 50),
        "moe_intermediate_size": d.width(1, 30),
        "moe_hidden_size": d.width(3, 50),
        "sliding_window": d.rng.randint(1, 50),
        "layer_types": d.pick(None, [d.pick("sliding_attention", "full_attention") for _ in range(layers)]),
        "mlp_layer_types": d.pick(None, [d.pick("sparse", "sparse", "dense") for _ in range(layers)]),
        "layer_rope_theta": d.pick(None, [d.pick(0, 700.0) for _ in range(layers)]),
        "qk_scale_factor": d.pick(1.0, 1.3, 2.0),
        "output_multiplier": d.pick(0.18, 0.5, 1.3),
        "final_logit_softcapping": d.pick(20.0, 3.0),
        "routed_scaling_factor": d.pick(1.0, 2.5),
        "residual_gate_temperature": d.pick(0.3, 1.0),
        "post_norm_eps": d.pick(1e-8, 0.01),
        "rope_parameters": d.rope(text["head_dim"], kinds=("default", "linear", "yarn")),
        "pad_token_id": None,
    }
    d.maybe(text, "attention_bias", True)
    # Neither llama.cpp nor mlx-lm has it.
    d.only(gguf=False, mlx=False)
    d.case = {"stacked_experts": True}
    others = {"out_hidden_size": 8, "projector_hidden_size": 4, "image_token_id": 901, "video_token_id": 902, "audio_token_id": 903}
    audio = MUSE_SPARK_AUDIO | {"out_hidden_size": text["hidden_size"]}
    return {"text_config": text, "vision_config": MUSE_SPARK_VISION, "audio_config": audio} | others


def hy_v4_vl(d: Draw) -> dict[str, Any]:
    text = hy_v4(d)
    half = text["qk_rope_head_dim"] // 2
    text["rope_parameters"] |= {"mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
    tied = text["tie_word_embeddings"]
    d.case = {"stacked_experts": d.chance(), "renames": HY_V4_RENAMES if d.chance() else (), "max_shard_bytes": None}
    tower = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "out_hidden_size": text["hidden_size"],
        "patch_size": 2,
        "spatial_merge_size": 1,
        "max_image_size": 4,
    }
    return {"text_config": text, "vision_config": tower, "tie_word_embeddings": tied}
