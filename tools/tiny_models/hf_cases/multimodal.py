"""Text parts of multimodal models that have no class of their own: Qwen3-VL-MoE, GLM-4.5V."""

from typing import Any

from ..hf_case import HfCase

_TOWER = dict(
    depth=1,
    hidden_size=4,
    intermediate_size=4,
    num_heads=1,
    patch_size=1,
    temporal_patch_size=1,
    spatial_merge_size=1,
    num_position_embeddings=4,
    out_hidden_size=24,
    deepstack_visual_indexes=[],
)


def _qwen3_vl_moe(**changes: Any) -> dict[str, Any]:
    text = dict(
        vocab_size=83,
        hidden_size=24,
        intermediate_size=28,
        moe_intermediate_size=10,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        num_experts=7,
        num_experts_per_tok=3,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 3000.0, "mrope_section": [2, 2, 2]},
    )
    return {"text_config": text | changes, "vision_config": _TOWER, "tie_word_embeddings": False}


def _glm4v_moe(**changes: Any) -> dict[str, Any]:
    text = dict(
        vocab_size=83,
        hidden_size=24,
        intermediate_size=28,
        moe_intermediate_size=12,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        n_shared_experts=2,
        routed_scaling_factor=1.5,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 3000.0}
        | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 1]},
    )
    tower = dict(
        depth=1,
        hidden_size=4,
        intermediate_size=4,
        num_heads=1,
        patch_size=1,
        temporal_patch_size=1,
        spatial_merge_size=1,
        image_size=2,
        out_hidden_size=24,
    )
    return {"text_config": text | changes, "vision_config": tower, "tie_word_embeddings": False}


CASES = [
    # Biases on q, k and v; groups; a dense first layer; two shared experts. The model does not read `use_qk_norm`.
    HfCase("glm4v_moe_basic", "glm4v_moe", 93, _glm4v_moe(), config_edits={"text_config": {"use_qk_norm": True}}),
    # Matrices of experts with columns as rows, as published; a dense layer.
    HfCase(
        "qwen3_vl_moe_basic",
        "qwen3_vl_moe",
        91,
        _qwen3_vl_moe(mlp_only_layers=[1]),
        stacked_experts=True,
        transposed_experts=True,
    ),
    # Rows as rows, as transformers 5 writes them; biases; every second layer dense; YaRN; experts as wide as the hidden
    # state.
    HfCase(
        "qwen3_vl_moe_rows",
        "qwen3_vl_moe",
        92,
        _qwen3_vl_moe(
            moe_intermediate_size=24,
            attention_bias=True,
            decoder_sparse_step=2,
            num_experts=4,
            num_experts_per_tok=2,
            rope_parameters={"rope_type": "yarn", "rope_theta": 3000.0, "factor": 4.0}
            | {"original_max_position_embeddings": 40, "mrope_section": [2, 2, 2]},
        ),
        stacked_experts=True,
        dtype="float16",
    ),
]
