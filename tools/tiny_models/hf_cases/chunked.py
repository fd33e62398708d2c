"""Attention within chunks, experts whose input is weighted: Llama 4. Values of another width than keys: MiMo-V2-Flash."""

from typing import Any

from ..hf_case import HfCase


def _llama4(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=61,
        hidden_size=24,
        intermediate_size=10,
        intermediate_size_mlp=28,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=6,
        num_experts_per_tok=1,
        attention_chunk_size=23,
        floor_scale=17,
        attn_scale=0.3,
        max_position_embeddings=512,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 900.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        bos_token_id=1,
        eos_token_id=2,
    )
    return base | changes


def _mimo(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=61,
        hidden_size=24,
        intermediate_size=28,
        moe_intermediate_size=8,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=14,
        v_head_dim=10,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=1,
        topk_group=1,
        sliding_window=19,
        attention_value_scale=0.6,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        max_position_embeddings=512,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.45},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.6},
        },
        bos_token_id=1,
        eos_token_id=2,
    )
    return base | changes


CASES = [
    # The fourth layer sees everything and rotates nothing, its queries grow; norms of queries and keys; experts as
    # published, columns as rows.
    HfCase("llama4_basic", "llama4_text", 83, _llama4()),
    # Within a multimodal checkpoint, as published.
    HfCase("llama4_multimodal", "llama4_text", 84, _llama4(num_hidden_layers=2, no_rope_layer_interval=2), multimodal=True),
    # Dense layers in turn; several experts a token; listed layers without rotation; no norms of queries and keys; no
    # growth; biases; tied.
    HfCase(
        "llama4_interleaved",
        "llama4_text",
        184,
        _llama4(
            interleave_moe_layer_step=2,
            num_experts_per_tok=2,
            no_rope_layers=[0, 1, 1, 0],
            use_qk_norm=False,
            attn_temperature_tuning=False,
            attention_bias=True,
            tie_word_embeddings=True,
            rms_norm_eps=0.01,
            rope_parameters={"rope_type": "default", "rope_theta": 900.0},
        ),
        dtype="float32",
    ),
    # Full and sliding layers with different key heads, rotations and sinks; values narrower than keys.
    HfCase("mimo_v2_flash_basic", "mimo_v2_flash", 85, _mimo()),
    # Keys and FP8 as published; heads of a width that blocks end within.
    HfCase(
        "mimo_v2_flash_fp8",
        "mimo_v2_flash",
        87,
        _mimo(
            num_hidden_layers=3,
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
            head_dim=50,
            v_head_dim=36,
            rope_parameters={
                "full_attention": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.334},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.334},
            },
        ),
        published_keys=True,
        fp8=True,
    ),
    # Groups; values wider than keys, not scaled; weights of experts as they are; biases; tied; stacked.
    HfCase(
        "mimo_v2_flash_wide",
        "mimo_v2_flash",
        86,
        _mimo(
            num_hidden_layers=3,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            mlp_layer_types=["sparse", "dense", "sparse"],
            head_dim=8,
            v_head_dim=13,
            n_group=4,
            topk_group=2,
            norm_topk_prob=False,
            routed_scaling_factor=1.7,
            attention_value_scale=None,
            attention_bias=True,
            tie_word_embeddings=True,
            rms_norm_eps=0.01,
        ),
        dtype="float32",
        stacked_experts=True,
    ),
]
