"""Text parts of multimodal models: Qwen3-VL-MoE, GLM-4.5V, Qwen3-Omni, ERNIE 4.5 VL, Aria, Muse Spark."""

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


def _qwen3_omni_moe(**changes: Any) -> dict[str, Any]:
    text = dict(
        vocab_size=53,
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
    vision = dict(depth=1, hidden_size=4, intermediate_size=4, num_heads=1, patch_size=1, temporal_patch_size=1)
    vision |= dict(spatial_merge_size=1, num_position_embeddings=4, out_hidden_size=24, deepstack_visual_indexes=[])
    audio = dict(d_model=4, encoder_layers=1, encoder_attention_heads=1, encoder_ffn_dim=4, num_mel_bins=8)
    audio |= dict(output_dim=24, downsample_hidden_size=2, max_source_positions=4, n_window=2, n_window_infer=4)
    return {"text_config": text | changes, "vision_config": vision, "audio_config": audio}


def _ernie4_5_vl_moe(**changes: Any) -> dict[str, Any]:
    text = dict(
        vocab_size=57,
        hidden_size=24,
        intermediate_size=18,
        moe_intermediate_size=[10, 6],
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        moe_num_experts=7,
        moe_k=3,
        moe_num_shared_experts=2,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 3000.0, "mrope_section": [1, 1, 1]},
    )
    text |= changes
    vision = dict(depth=1, hidden_size=4, intermediate_size=4, num_heads=1, patch_size=1, spatial_merge_size=1)
    vision |= dict(temporal_merge_size=1)
    return {"text_config": text, "vision_config": vision, "tie_word_embeddings": text.get("tie_word_embeddings", True)}


def _aria(**changes: Any) -> dict[str, Any]:
    config = dict(
        vocab_size=83,
        hidden_size=24,
        intermediate_size=10,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        moe_num_experts=7,
        moe_topk=3,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 3000.0},
    )
    return config | changes


# One layer of pictures, one of sound.
MUSE_SPARK_VISION = dict(patch_size=1, pos_emb_height=2, pos_emb_width=2, num_attention_heads=1, num_hidden_layers=1, hidden_size=8)
MUSE_SPARK_VISION |= dict(intermediate_size=4, merge_size=1, max_position_embeddings=4)
MUSE_SPARK_AUDIO = dict(patch_sizes=[2], hidden_sizes=[4], depths=[1], num_hidden_layers=1, mlp_ratio=1.0, conv_kernel_size=3)


def _muse_spark(**changes: Any) -> dict[str, Any]:
    text = dict(
        vocab_size=83,
        hidden_size=24,
        intermediate_size=28,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=11,
        moe_hidden_size=18,
        moe_intermediate_size=10,
        num_local_experts=7,
        num_experts_per_tok=3,
        max_position_embeddings=512,
        qk_scale_factor=1.5,
        output_multiplier=0.6,
        rope_parameters={"rope_type": "default", "rope_theta": 900.0},
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=82,
    )
    text |= changes
    others = dict(out_hidden_size=8, projector_hidden_size=4, image_token_id=901, video_token_id=902, audio_token_id=903)
    audio = MUSE_SPARK_AUDIO | dict(out_hidden_size=text["hidden_size"])
    return {"text_config": text, "vision_config": MUSE_SPARK_VISION, "audio_config": audio} | others


CASES = [
    # As published, with the default kinds of layers, of which the first and the last see everything.
    HfCase("muse_spark_basic", "muse_spark", 352, _muse_spark(), stacked_experts=True),
    # A dense layer, listed kinds of layers with bases of their own, biases, all experts chosen, factors and epsilons that show.
    HfCase(
        "muse_spark_dense",
        "muse_spark",
        342,
        _muse_spark(
            num_hidden_layers=3,
            mlp_layer_types=["sparse", "dense", "sparse"],
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
            layer_rope_theta=[900.0, 0, 900.0],
            attention_bias=True,
            num_local_experts=3,
            moe_hidden_size=32,
            qk_scale_factor=1.7,
            output_multiplier=1.3,
            final_logit_softcapping=2.5,
            routed_scaling_factor=0.4,
            residual_gate_temperature=0.7,
            rms_norm_eps=0.02,
            post_norm_eps=0.01,
            rope_parameters={"rope_type": "linear", "rope_theta": 90.0, "factor": 3.0},
        ),
        dtype="float32",
        stacked_experts=True,
    ),
    # In four bits, as some publish other models of this size: an expert's matrices by themselves.
    HfCase(
        "muse_spark_int4",
        "muse_spark",
        365,
        _muse_spark(
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=8,
            moe_hidden_size=64,
            moe_intermediate_size=64,
            num_local_experts=6,
        ),
        stacked_experts=True,
        quantised="int4",
    ),
    # As published: below a multimodal model, experts by other names with columns as rows.
    HfCase("aria_multimodal", "aria_text", 225, _aria(), multimodal=True),
    # Biases everywhere, a single shared expert, experts as wide as the hidden state.
    HfCase(
        "aria_biases",
        "aria_text",
        229,
        _aria(
            attention_bias=True,
            mlp_bias=True,
            moe_num_shared_experts=1,
            intermediate_size=24,
            moe_num_experts=4,
            moe_topk=1,
            num_key_value_heads=4,
            rms_norm_eps=0.01,
            tie_word_embeddings=True,
        ),
        dtype="float32",
    ),
    # As published, but for what is around the part that thinks.
    HfCase("qwen3_omni_moe_thinker", "qwen3_omni_moe_thinker", 221, _qwen3_omni_moe()),
    # The same within the whole model; a dense layer, biases, weights that are not normalised.
    HfCase(
        "qwen3_omni_moe_whole",
        "qwen3_omni_moe_thinker",
        222,
        _qwen3_omni_moe(mlp_only_layers=[1], attention_bias=True, norm_topk_prob=False, rms_norm_eps=0.01),
        dtype="float32",
        within="thinker",
    ),
    # As published: routers with columns as rows, experts of both kinds in one list.
    HfCase("ernie4_5_vl_moe_basic", "ernie4_5_vl_moe", 223, _ernie4_5_vl_moe()),
    # As transformers has it; biases, a head of its own, no shared experts, a dense layer in the middle.
    HfCase(
        "ernie4_5_vl_moe_stacked",
        "ernie4_5_vl_moe",
        224,
        _ernie4_5_vl_moe(
            use_bias=True,
            moe_num_shared_experts=0,
            mlp_layer_types=["sparse", "dense", "sparse"],
            tie_word_embeddings=False,
            rms_norm_eps=0.01,
        ),
        dtype="float32",
        stacked_experts=True,
    ),
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
