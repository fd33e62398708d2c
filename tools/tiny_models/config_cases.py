"""Configurations that say the same or something else in another place, for the weights of fixtures that there are.

A row is a name and what is done to the fixture's config.json: keys that are set, or removed. Goldens are what
transformers makes of the result, so the rows need not say what is right. They were found by `fuzz_configs.py`.
"""

from collections.abc import Iterator
from typing import Any

from .config_variants import YARN, Change, both, drop, into, put, without

Row = tuple[str, Change]


def rope(theta: float = 77.0) -> list[Row]:
    """Rotary parameters in one object, of any family."""
    yarn = {key: value for key, value in YARN.items() if key != "original_max_position_embeddings"}
    return [
        ("a base beside the parameters' own", put("rope_theta", theta)),
        ("a base beside parameters without", both(without(None, "rope_theta"), put("rope_theta", theta))),
        ("YARN added, without a base", put("rope_scaling", YARN)),
        ("YARN added, with a base", put("rope_scaling", YARN | {"rope_theta": theta})),
        ("an empty object added", put("rope_scaling", {})),
        ("parameters left out", both(drop("rope_parameters"), drop("rope_scaling"), put("rope_theta", theta))),
        ("parameters null", both(put("rope_parameters", None), put("rope_scaling", None), put("rope_theta", theta))),
        ("YARN without its original length", both(put("rope_scaling", yarn), put("max_position_embeddings", 64))),
        ("YARN with a length beside", both(put("rope_scaling", YARN), put("original_max_position_embeddings", 24))),
        ("YARN with truncate: null", put("rope_scaling", YARN | {"truncate": None})),
    ]


def part(value: float = 0.25) -> list[Row]:
    """The part of a head that rotates."""
    return [
        ("a part beside the parameters' own", put("partial_rotary_factor", value)),
        ("a part beside parameters without", both(without(None, "partial_rotary_factor"), put("partial_rotary_factor", value))),
        ("no part", both(without(None, "partial_rotary_factor"), drop("partial_rotary_factor"))),
        ("a number of channels", put("rotary_dim", 2)),
    ]


def keys(*names: str, **values: Any) -> list[Row]:
    """Keys left out, and keys set."""
    rows = [(f"{name} left out", drop(name)) for name in names]
    return rows + [(f"{name}: {value!r}", put(name, value)) for name, value in values.items()]


SETS = {
    "full_attention": {"rope_type": "llama3", "rope_theta": 300.0, "partial_rotary_factor": 0.5} | {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
}
LONG = {"short_factor": [1.5, 2.0, 3.0], "long_factor": [2.0, 3.0, 4.0], "original_max_position_embeddings": 4096}
TIED = [("tied, with a head in the file", put("tie_word_embeddings", True))]
SCALED = keys("routed_scaling_factor", "norm_topk_prob", "n_group", "topk_group")

SETS_OF_KINDS = [
    ("sets of both kinds", put("rope_parameters", SETS)),
    ("a set left out", put("rope_parameters", {"full_attention": SETS["full_attention"]})),
    ("a set without a base", both(put("rope_parameters", SETS), without("sliding_attention", "rope_theta"))),
    ("YARN of one kind with truncate", put("rope_scaling", YARN | {"truncate": False})),
]
ODD = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0, "partial_rotary_factor": 0.5}

# By fixture.
ROWS: dict[str, list[Row]] = {
    "qwen3_moe_basic": rope() + TIED + keys("use_sliding_window", "sliding_window", "norm_topk_prob"),
    "gpt_oss_bf16": rope() + TIED + keys("sliding_window", "layer_types", "swiglu_limit", sliding_window=9, rope_parameters=None),
    "deepseek_v3_basic": rope() + TIED + keys("routed_scaling_factor", "rope_interleave", norm_topk_prob=None, rope_interleave=None)
    + [("a slope of another family", put("rope_scaling", YARN | {"llama_4_scaling_beta": 0.3}))],
    "glm4_moe_basic": rope() + part(1.0) + TIED + keys("routed_scaling_factor", "use_qk_norm", "norm_topk_prob"),
    "mixtral_basic": rope() + TIED + keys("sliding_window", sliding_window=9),
    "qwen3_next_basic": rope() + part() + TIED + keys("norm_topk_prob", "layer_types", full_attention_interval=2),
    "qwen3_5_moe_text": rope() + part() + TIED,
    "granitemoe_basic": rope()
    + TIED
    + keys(
        "embedding_multiplier",
        "attention_multiplier",
        "residual_multiplier",
        "logits_scaling",
        residual_multiplier=-0.5,
        num_experts_per_tok=3,
        head_dim=8,
    ),
    "olmoe_basic": rope() + TIED + keys("norm_topk_prob", clip_qkv=0.0),
    "deepseek_v2_lite": rope() + TIED + keys("routed_scaling_factor", norm_topk_prob=True),
    "minimax_m2_basic": rope() + part(0.5) + TIED + keys(norm_topk_prob=False, routed_scaling_factor=3.0),
    "glm4_moe_lite_groups": rope() + TIED + keys("routed_scaling_factor", "norm_topk_prob"),
    "solar_open_yarn": rope() + part(0.5) + TIED + SCALED,
    "sarvam_moe_groups": rope()
    + part(1.0)
    + TIED
    + keys("routed_scaling_factor", "norm_topk_prob", "rms_norm_eps", num_mtp_layers=1),
    "sarvam_mla_basic": rope()
    + TIED
    + keys(routed_scaling_factor=1.2, rope_interleave=False, norm_topk_prob=False)
    + [("YaRN by its other name, of transformers' kind", put("rope_scaling", YARN | {"rope_type": "deepseek_yarn"}))],
    "dots1_window": rope() + TIED + keys("sliding_window", "layer_types", max_window_layers=1) + SCALED,
    "hy_v3_basic": rope() + TIED + keys("router_scaling_factor"),
    "qwen2_moe_basic": rope()
    + TIED
    + keys("norm_topk_prob")
    + [
        ("windows", both(put("use_sliding_window", True), put("sliding_window", 9), drop("layer_types"))),
        ("windows of the first", both(put("use_sliding_window", True), put("sliding_window", 9), put("max_window_layers", 0), drop("layer_types"))),
    ],
    "deepseek_v32_dense": rope() + TIED + SCALED,
    "glm_moe_dsa_sparse": rope() + TIED + SCALED + keys("rms_norm_eps"),
    "ernie4_5_moe_bias": rope() + TIED + keys("tie_word_embeddings"),
    "llama4_basic": rope() + TIED + keys("floor_scale", "attn_scale", attention_chunk_size=None),
    "mistral4_plain": rope() + TIED + keys("rope_parameters", "norm_topk_prob", "routed_scaling_factor"),
    "mimo_v2_flash_basic": [("a part beside a set without", both(without("full_attention", "partial_rotary_factor"), put("partial_rotary_factor", 1.0)))]
    + [("a stretched set without a part", put("rope_parameters", SETS | {"sliding_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 333.0}}))]
    + [("an odd number of channels, stretched", both(put("max_position_embeddings", 16), put("rope_parameters", SETS | {"full_attention": ODD})))]
    + TIED
    + keys("attention_value_scale", "routed_scaling_factor", rotary_dim=2),
    "deepseek_v4_basic": TIED
    + keys("routed_scaling_factor", "swiglu_limit")
    + [
        ("one set, YARN", put("rope_parameters", YARN | {"truncate": False})),
        ("one set with a base", both(put("rope_parameters", YARN | {"rope_theta": 333.0}), put("rope_theta", 77.0))),
        ("one set, divided by frequency", put("rope_parameters", {"rope_type": "longrope", "factor": 2.0} | LONG)),
    ],
    "qwen4_exp_basic": rope() + TIED,
    "minimax_m3_vl_text": rope() + part(0.5) + TIED + keys("routed_scaling_factor", hidden_act="swigluoai"),
    "glm5_next_basic": keys("routed_scaling_factor", layer_types=["linear_attention", *["deepseek_sparse_attention"] * 2, "linear_attention"]),
    "kimi_linear_basic": TIED + keys("routed_scaling_factor", num_experts_per_tok=1, moe_renormalize=None),
    "nemotron_h_basic": keys("routed_scaling_factor", "norm_topk_prob"),
    "step3p7_basic": SETS_OF_KINDS
    + [("scaling by its older key", both(drop("rope_parameters"), put("rope_scaling", {"type": "linear", "factor": 3.0})))]
    + keys("moe_router_scaling_factor", "rms_norm_eps"),
    "zaya_basic": TIED
    + keys("num_experts_per_tok", "cca_time0", "rope_parameters", "layer_types", sliding_window=9, rope_theta=77.0)
    + [
        ("a set without a part", without("hybrid_sliding", "partial_rotary_factor")),
        ("scaling by its older key", put("rope_scaling", YARN)),
        ("a part beside a set without", both(without("hybrid", "partial_rotary_factor"), put("partial_rotary_factor", 0.5))),
        ("YaRN of one kind", put("rope_parameters", {"hybrid": YARN | {"rope_theta": 333.0}, "hybrid_sliding": ODD | {"rope_type": "linear"}})),
    ],
    "jetmoe_basic": rope() + TIED + keys("rms_norm_eps", "num_experts_per_tok", num_attention_heads=7, num_experts_per_tok=3),
    "hy_v4_basic": rope() + TIED + keys("routed_scaling_factor", "hc_magnitude"),
    "dots3_note_basic": TIED
    + SCALED
    + keys(
        "layer_types",
        "use_dsa",
        "first_k_dense_replace",
        "rope_theta",
        "swa_rope_theta",
        "swa_qk_rope_head_dim",
        moe_layer_freq=[0, 1, 1, 1],
        sliding_window=5,
        swa_qk_rope_head_dim=8,
        use_dsa=False,
    )
    + [
        ("a base for all kinds", put("rope_parameters", {"rope_theta": 77.0})),
        ("an empty object", put("rope_parameters", {})),
        ("YARN of all kinds, with truncate", put("rope_parameters", YARN | {"truncate": False, "beta_fast": 8.0})),
        ("sets, one without a base", put("rope_parameters", {"indexed_attention": {"rope_type": "linear", "factor": 3.0}, "sliding_attention": YARN})),
        ("kinds as transformers calls them", put("layer_types", ["indexed_attention", "deepseek_sparse_attention", *["sliding_attention"] * 2])),
    ],
    "dots3_note_stacked": keys("routed_scaling_factor", "norm_topk_prob", "sliding_window", "rms_norm_eps", sliding_window=None)
    + [("another base for windows", into("sliding_attention", {"rope_theta": 333.0}))],
    "muse_spark_basic": rope()
    + keys("output_multiplier", "layer_types", "layer_rope_theta", "residual_gate_temperature", sliding_window=7),
    "lara_mini_basic": rope() + part(0.5) + TIED + keys("norm_topk_prob", "sliding_window", sliding_window=7),
}


def rows() -> Iterator[tuple[str, list[Row]]]:
    """Fixtures with what is done to their configurations."""
    yield from ROWS.items()
