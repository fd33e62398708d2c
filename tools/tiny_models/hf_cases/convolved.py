"""Attention whose queries and keys pass through convolutions over tokens: ZAYA1."""

from typing import Any

from ..hf_case import HfCase


def _zaya(**changes: Any) -> dict[str, Any]:
    config = dict(
        vocab_size=83,
        hidden_size=24,
        moe_intermediate_size=10,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        num_experts=6,
        router_hidden_size=14,
        bos_token_id=1,
        eos_token_id=2,
        max_position_embeddings=512,
        layer_types=["hybrid", "hybrid_sliding", "hybrid"],
        sliding_window=17,
        rope_parameters={
            "hybrid": {"rope_type": "default", "rope_theta": 3000.0, "partial_rotary_factor": 0.5},
            "hybrid_sliding": {"rope_type": "default", "rope_theta": 70.0, "partial_rotary_factor": 0.5},
        },
    )
    return config | changes


CASES = [
    # As published: a kind of scaling beside those of the kinds of layers, which nobody reads; tied; two heads of keys.
    HfCase(
        "zaya_basic",
        "zaya",
        274,
        _zaya(),
        config_edits={"rope_parameters": _zaya()["rope_parameters"] | {"rope_type": "default"}},
    ),
    # Biases everywhere and a head of its own, one head of keys, convolutions over three tokens, rotations and kinds of layers left
    # out, few experts.
    HfCase(
        "zaya_biases",
        "zaya",
        276,
        _zaya(
            num_hidden_layers=2,
            layer_types=None,
            sliding_window=None,
            rope_parameters=None,
            attention_bias=True,
            lm_head_bias=True,
            tie_word_embeddings=False,
            num_attention_heads=3,
            num_key_value_heads=1,
            cca_time0=3,
            cca_time1=3,
            num_experts=3,
            rms_norm_eps=0.01,
        ),
        config_edits={"layer_types": None, "rope_parameters": None, "num_experts_per_tok": None},
        dtype="float32",
    ),
]
