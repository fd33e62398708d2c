"""gpt-oss: sinks, sliding window, biased experts, MXFP4."""

from typing import Any

from ..hf_case import HfCase


def _gpt_oss(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=5,
        num_experts_per_tok=2,
        sliding_window=12,
        max_position_embeddings=256,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 5000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    )
    return base | changes


CASES = [
    # As published: MXFP4 experts, YaRN with an unrounded ramp, every second layer within a window.
    HfCase("gpt_oss_mxfp4", "gpt_oss", 46, _gpt_oss(), published_keys=True, mxfp4=True),
    # Experts in bf16, stored with columns as rows, whose width is no multiple of 32; layer types in another order; a
    # limit and a factor of the activation that show; one kv head; YaRN with a rounded ramp.
    HfCase(
        "gpt_oss_bf16",
        "gpt_oss",
        47,
        _gpt_oss(
            hidden_size=24,
            intermediate_size=14,
            num_key_value_heads=1,
            num_local_experts=7,
            num_experts_per_tok=3,
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
            swiglu_limit=1.5,
            swiglu_alpha=1.2,
            rms_norm_eps=0.01,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 20000.0,
                "factor": 6.0,
                "original_max_position_embeddings": 48,
                "truncate": True,
            },
        ),
    ),
    # Experts stored with columns as rows, in odd widths; every expert chosen.
    HfCase(
        "gpt_oss_odd",
        "gpt_oss",
        58,
        _gpt_oss(
            vocab_size=53,
            hidden_size=33,
            intermediate_size=15,
            num_hidden_layers=2,
            head_dim=10,
            num_local_experts=3,
            num_experts_per_tok=3,
            sliding_window=31,
        ),
        dtype="float16",
    ),
]
