"""Step-3.5 and Step-3.7: sliding layers with more heads, gates by head, limited SwiGLU."""

from typing import Any

from ..hf_case import HfCase

# As small as its shapes allow; nothing of it is read.
_VISION = dict(width=8, layers=1, heads=1, image_size=28, patch_size=14)


def _published(**changes: Any) -> dict[str, Any]:
    """A text configuration with the keys of published ones."""
    base = dict(
        vocab_size=61,
        hidden_size=24,
        intermediate_size=20,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_attention_groups=2,
        attention_other_setting={
            "attention_type": "sliding_attention",
            "num_attention_heads": 6,
            "num_attention_groups": 2,
            "head_dim": 12,
        },
        head_dim=12,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        sliding_window=9,
        rope_theta=[5000.0, 700.0, 700.0, 5000.0],
        partial_rotary_factors=[0.5, 1.0, 1.0, 0.5],
        rope_scaling={
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 8.0,
            "original_max_position_embeddings": 32,
        },
        yarn_only_types=["full_attention"],
        max_position_embeddings=512,
        moe_layers_enum="1,2,3",
        moe_num_experts=7,
        moe_top_k=3,
        moe_intermediate_size=10,
        share_expert_dim=14,
        moe_router_scaling_factor=3.0,
        norm_expert_weight=True,
        use_head_wise_attn_gate=True,
        swiglu_limits=[0.0, None, 0.4, 0.7],
        swiglu_limits_shared=[0.5, None, 0.0, 0.6],
        bos_token_id=0,
        eos_token_id=[1, 2],
    )
    return base | changes


# With an entry of layers that predict further tokens in each list.
_PADDED = _published(
    num_nextn_predict_layers=1,
    layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    rope_theta=[5000.0, 700.0, 700.0, 5000.0, 700.0],
    partial_rotary_factors=[0.5, 1.0, 1.0, 0.5, 1.0],
    swiglu_limits=[0.0, None, 0.4, 0.7, 0.0],
    swiglu_limits_shared=[0.5, None, 0.0, 0.6, 0.0],
)
_TEXT_ONLY = _published(vocab_size=53, moe_layers_enum=[0, 2], num_hidden_layers=3)
for key in ("layer_types", "rope_theta", "partial_rotary_factors", "swiglu_limits", "swiglu_limits_shared"):
    _TEXT_ONLY[key] = _TEXT_ONLY[key][1:]

CASES = [
    # Names and keys as published.
    HfCase(
        "step3p7_basic",
        "step3p7",
        181,
        dict(text_config=_PADDED, vision_config=_VISION),
        config_edits={"text_config": _PADDED},
    ),
    # Names, stacked tensors and keys as transformers has them; YaRN on a part of the channels, an odd number rotates in
    # sliding layers; one key head; scores scaled otherwise; biases; tied; an epsilon that shows.
    HfCase(
        "step3p7_stacked",
        "step3p7",
        182,
        dict(
            text_config=dict(
                vocab_size=47,
                hidden_size=20,
                intermediate_size=18,
                num_hidden_layers=3,
                num_attention_heads=3,
                num_sliding_attention_heads=5,
                num_key_value_heads=1,
                head_dim=10,
                layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                mlp_layer_types=["sparse", "dense", "sparse"],
                sliding_window=33,
                rope_parameters={
                    "full_attention": {
                        "rope_type": "yarn",
                        "rope_theta": 900.0,
                        "partial_rotary_factor": 0.8,
                        "factor": 4.0,
                        "original_max_position_embeddings": 32,
                        "beta_fast": 2.0,
                        "beta_slow": 0.5,
                        # transformers looks for it beside the kinds of layers, so it says nothing here.
                        "truncate": False,
                    },
                    "sliding_attention": {
                        "rope_type": "default",
                        "rope_theta": 10000.0,
                        "partial_rotary_factor": 0.5,
                    },
                },
                max_position_embeddings=512,
                query_pre_attn_scalar=23,
                attention_bias=True,
                mlp_bias=True,
                n_routed_experts=6,
                num_experts_per_tok=2,
                moe_intermediate_size=9,
                share_expert_dim=11,
                moe_router_scaling_factor=1.7,
                swiglu_limits=[0.8, 0.0, 0.0],
                rms_norm_eps=0.01,
                bos_token_id=0,
                eos_token_id=1,
            ),
            vision_config=_VISION,
            tie_word_embeddings=True,
        ),
        dtype="float32",
        stacked_experts=True,
    ),
    # Step-3.5: the text model alone; no layer beyond those that are listed.
    HfCase(
        "step3p5_text",
        "step3p7",
        183,
        dict(text_config=_TEXT_ONLY, vision_config=_VISION),
        config_edits={"text_config": _TEXT_ONLY},
        text_only=True,
    ),
]
