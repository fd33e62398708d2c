"""Attention over tokens, pools or blocks of tokens that an indexer chooses: Hunyuan 4, MiniMax-M3, GLM-5.3-Flash,
Mistral Large 4, dots3-note."""

from typing import Any

from ..hf_case import HfCase
from ..published import HY_V4_RENAMES
from .shapes import yarn


def _latent(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=61,
        hidden_size=24,
        intermediate_size=20,
        moe_intermediate_size=8,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=18,
        kv_lora_rank=16,
        qk_nope_head_dim=12,
        v_head_dim=10,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=3,
        hc_mult=3,
        index_n_heads=12,
        index_head_dim=14,
        swiglu_limit=1.5,
        max_position_embeddings=512,
        pad_token_id=None,
        eos_token_id=60,
    )
    return base | changes


def _hy_v4(**changes: Any) -> dict[str, Any]:
    base = dict(
        qk_rope_head_dim=6,
        indexer_types=["full", "shared", "full", "shared"],
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        index_topk=13,
        hc_magnitude=1.7,
        bos_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 900.0},
    )
    return _latent(**(base | changes))


def _minimax_m3(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=61,
        hidden_size=24,
        intermediate_size=8,
        dense_intermediate_size=20,
        shared_intermediate_size=12,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=12,
        num_local_experts=7,
        num_experts_per_tok=3,
        layer_types=["full_attention", "minimax_m3_sparse", "minimax_m3_sparse", "full_attention"],
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        index_n_heads=2,
        index_head_dim=10,
        index_block_size=6,
        index_topk_blocks=4,
        swiglu_limit=1.5,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=60,
        rope_parameters={"rope_type": "default", "rope_theta": 900.0, "partial_rotary_factor": 0.5},
    )
    return base | changes


def _glm5_next(vision: bool = True, **changes: Any) -> dict[str, Any]:
    base = dict(
        layer_types=["linear_attention", "indexed_attention", "indexed_attention", "linear_attention"],
        indexer_types=["full", "full", "shared", "full"],
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        index_kpool=4,
        index_topk=20,
        linear_num_heads=3,
        linear_head_dim=8,
        linear_lower_bound=-2.0,
        hc_sinkhorn_iters=4,
    )
    tower = dict(
        depth=1,
        hidden_size=8,
        num_heads=2,
        intermediate_size=8,
        out_hidden_size=24,
        projection_intermediate_size=8,
        patch_size=2,
        image_size=4,
    )
    return {"text_config": _latent(**(base | changes)), "vision_config": tower}


def _mistral_large4(**changes: Any) -> dict[str, Any]:
    text = dict(
        vocab_size=61,
        hidden_size=24,
        intermediate_size=20,
        moe_intermediate_size=8,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=16,
        qk_nope_head_dim=6,
        qk_rope_head_dim=8,
        v_head_dim=10,
        n_routed_experts=6,
        num_experts_per_tok=2,
        index_topk=128,
        index_n_heads=5,
        index_head_dim=12,
        max_position_embeddings=512,
        final_logit_softcapping=3.0,
        rope_parameters=yarn(attention_factor=1.0),
        bos_token_id=0,
        eos_token_id=60,
    )
    tower = dict(
        model_type="pixtral",
        hidden_size=4,
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=1,
        patch_size=1,
        image_size=2,
    )
    return {"text_config": text | changes, "vision_config": tower, "tie_word_embeddings": False}


# Of dots3-note's layers with a window, by published keys.
_SLIDING = dict(
    swa_num_attention_heads=3,
    swa_num_key_value_heads=3,
    swa_q_lora_rank=14,
    swa_kv_lora_rank=20,
    swa_head_dim=13,
    swa_qk_nope_head_dim=5,
    swa_v_head_dim=7,
    swa_rope_theta=70.0,
)


def _dots3_note(**changes: Any) -> dict[str, Any]:
    base = _latent(
        qk_rope_head_dim=6,
        head_dim=18,
        index_topk=13,
        n_group=1,
        topk_group=1,
        shared_experts_intermediate_size=12,
        sliding_window=9,
        rope_theta=900.0,
        bos_token_id=0,
        **_SLIDING,
    )
    for key in ("hc_mult", "swiglu_limit"):
        del base[key]
    return base | changes


CASES = [
    # Layers that share a choice of tokens; groups of experts; YaRN past its original context; names as published.
    HfCase(
        "hy_v4_basic",
        "hy_v4",
        91,
        _hy_v4(
            max_position_embeddings=128,
            rope_parameters=yarn(mscale=1.0, mscale_all_dim=0.7, beta_fast=8.0, beta_slow=0.5),
        ),
        renames=HY_V4_RENAMES,
    ),
    # Channels in the published order, with a configuration that says so.
    HfCase(
        "hy_v4_published",
        "hy_v4",
        102,
        _hy_v4(num_hidden_layers=2, indexer_types=["full", "shared"], mlp_layer_types=["dense", "sparse"]),
        renames=HY_V4_RENAMES,
        interleaved=True,
        late_edits={"gated_mla": True},
    ),
    # Names and stacked experts as transformers has them; every token chosen; a tied head; biases; an epsilon that shows, as
    # the norms of latents do not use it; two shared experts; unnormalised weights; the default order of indexers.
    HfCase(
        "hy_v4_stacked",
        "hy_v4",
        92,
        _hy_v4(
            num_hidden_layers=3,
            indexer_types=None,
            mlp_layer_types=None,
            index_topk=200,
            n_shared_experts=2,
            n_group=1,
            topk_group=1,
            norm_topk_prob=False,
            routed_scaling_factor=1.4,
            hc_mult=2,
            v_head_dim=20,
            attention_bias=True,
            tie_word_embeddings=True,
            rms_norm_eps=0.01,
        ),
        dtype="float32",
        stacked_experts=True,
        config_edits={"indexer_types": None, "mlp_layer_types": None, "layer_types": None},
    ),
    # Within the multimodal model, as published: neighbouring channels rotate; an epsilon that shows in the norms of latents too.
    HfCase(
        "hy_v4_vl_basic",
        "hy_v4_vl",
        314,
        {
            "text_config": _hy_v4(
                num_hidden_layers=2,
                indexer_types=["full", "shared"],
                mlp_layer_types=["dense", "sparse"],
                rms_norm_eps=0.01,
                rope_parameters={"rope_type": "default", "rope_theta": 900.0, "mrope_section": [1, 1, 1]},
            ),
            "vision_config": dict(
                hidden_size=8,
                intermediate_size=8,
                num_hidden_layers=1,
                num_attention_heads=1,
                out_hidden_size=24,
                patch_size=2,
                spatial_merge_size=1,
                max_image_size=4,
            ),
        },
        renames=HY_V4_RENAMES,
    ),
    # Within the multimodal model, by its published names.
    HfCase(
        "minimax_m3_vl_basic",
        "minimax_m3_vl",
        93,
        {
            "text_config": _minimax_m3(),
            "vision_config": dict(
                hidden_size=8,
                intermediate_size=8,
                num_hidden_layers=1,
                num_attention_heads=1,
                image_size=4,
                patch_size=2,
            ),
            "projector_hidden_size": 8,
        },
    ),
    # MXFP8 as published; the first layer's MLP too.
    HfCase(
        "minimax_m3_vl_mxfp8",
        "minimax_m3_vl",
        101,
        {
            "text_config": _minimax_m3(
                hidden_size=64,
                intermediate_size=32,
                dense_intermediate_size=64,
                shared_intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                head_dim=16,
                num_local_experts=5,
                layer_types=["full_attention", "minimax_m3_sparse"],
                mlp_layer_types=["dense", "sparse"],
            ),
            "vision_config": dict(
                hidden_size=8,
                intermediate_size=8,
                num_hidden_layers=1,
                num_attention_heads=1,
                image_size=4,
                patch_size=2,
            ),
            "projector_hidden_size": 8,
        },
        quantised="mxfp8",
    ),
    # Choices of heads that do not share keys; blocks of a page's length and one token more; whole heads rotate, by linear
    # scaling; keys as published; tied; an epsilon that shows.
    HfCase(
        "minimax_m3_vl_text",
        "minimax_m3_vl_text",
        94,
        _minimax_m3(
            num_hidden_layers=3,
            layer_types=["minimax_m3_sparse", "full_attention", "minimax_m3_sparse"],
            mlp_layer_types=["sparse", "dense", "sparse"],
            index_n_heads=3,
            index_head_dim=16,
            index_block_size=17,
            index_topk_blocks=3,
            index_local_blocks=2,
            swiglu_alpha=1.1,
            routed_scaling_factor=1.3,
            tie_word_embeddings=True,
            rms_norm_eps=0.01,
            rope_parameters={"rope_type": "linear", "rope_theta": 777.0, "factor": 2.5},
        ),
        dtype="float32",
        stacked_experts=True,
        config_edits={
            "layer_types": None,
            "mlp_layer_types": None,
            "moe_layer_freq": [1, 0, 1],
            "sparse_attention_config": {
                "sparse_num_index_heads": 3,
                "sparse_index_dim": 16,
                "sparse_block_size": 17,
                "sparse_topk_blocks": 3,
                "sparse_local_block": 2,
                "sparse_attention_freq": [1, 0, 1],
            },
        },
    ),
    # Pools that layers share the choice of, tokens of none; decays with a bound; names as published.
    HfCase("glm5_next_basic", "glm5_next", 95, _glm5_next()),
    # Tokens on their own; decays without a bound; stacked experts under transformers' names; biases; an epsilon that
    # shows; the default order of layers.
    HfCase(
        "glm5_next_stacked",
        "glm5_next",
        96,
        _glm5_next(
            num_hidden_layers=5,
            layer_types=None,
            indexer_types=None,
            mlp_layer_types=None,
            index_kpool=1,
            index_topk=9,
            linear_lower_bound=None,
            linear_conv_kernel_dim=3,
            n_group=1,
            topk_group=1,
            norm_topk_prob=False,
            hc_mult=2,
            attention_bias=True,
            rms_norm_eps=0.01,
        ),
        dtype="float32",
        stacked_experts=True,
    ),
    # The text model alone.
    HfCase("glm5_next_text", "glm5_next", 97, _glm5_next(num_hidden_layers=2, layer_types=None, indexer_types=None, mlp_layer_types=["dense", "sparse"]), text_only=True),
    # Names as published; a layer without positions, after which a layer attends to the latents of the second.
    HfCase(
        "mistral_large4_basic",
        "mistral_large4",
        324,
        _mistral_large4(kv_source_layers=[0, 1, 1, 3]),
    ),
    # Fewer keys than tokens, by an indexer that two layers share, of both kinds; latents of both kinds shared; groups of
    # experts; biases.
    HfCase(
        "mistral_large4_indexed",
        "mistral_large4",
        322,
        _mistral_large4(
            num_hidden_layers=5,
            index_topk=13,
            index_n_heads=12,
            indexer_types=["full", "shared", "shared", "full", "shared"],
            no_rope_layers=[1, 0, 1, 0, 0],
            kv_source_layers=[0, 1, 0, 1, 4],
            n_group=3,
            topk_group=2,
            num_experts_per_tok=3,
            n_shared_experts=2,
            attention_bias=True,
        ),
        n_tokens=61,
    ),
    # As published: the text model's configuration and names beside those of a tower and of a layer that drafts tokens, which is not
    # counted; keys of its own for layers with a window; layers with an indexer that are called full.
    HfCase(
        "dots3_note_basic",
        "dots3_note_text",
        331,
        _dots3_note(),
        config_edits={
            **_SLIDING,
            "rope_theta": 900.0,
            "rope_parameters": None,
            "per_layer_config": None,
            "layer_types": ["full_attention", "full_attention", "sliding_attention", "sliding_attention"],
            "mlp_layer_types": None,
            "first_k_dense_replace": 1,
            "sliding_window": None,
            "sliding_window_size": 9,
            "shared_experts_intermediate_size": None,
            "moe_shared_expert_intermediate_size": 12,
            "use_dsa": True,
        },
        beside=("model.layers.4.eh_proj.weight", "model.mtp.embed_tokens.weight", "vision_encoder.adapter.ln_q.weight"),
        late_edits={
            "model_type": "dots3_note",
            "architectures": ["Dots3NoteForConditionalGeneration"],
            "vision_config": {"adapter_out_dim": 24},
            "audio_config": {"adapter_out_dim": 24},
        },
    ),
    # As transformers writes it: sizes by layer, rotations by kind, of which one is stretched; layers of all three kinds; a window
    # with more rotated channels than others and wide keys; groups of experts; two shared experts; unnormalised weights; biases;
    # an epsilon that shows; tied.
    HfCase(
        "dots3_note_stacked",
        "dots3_note_text",
        332,
        _dots3_note(
            num_hidden_layers=5,
            use_dsa=None,
            layer_types=["sliding_attention", "full_attention", "indexed_attention", "full_attention", "sliding_attention"],
            mlp_layer_types=["sparse", "dense", "sparse", "sparse", "sparse"],
            swa_head_dim=19,
            swa_qk_nope_head_dim=3,
            swa_v_head_dim=11,
            sliding_window=17,
            n_group=4,
            topk_group=2,
            n_shared_experts=2,
            norm_topk_prob=False,
            routed_scaling_factor=1.4,
            attention_bias=True,
            tie_word_embeddings=True,
            rms_norm_eps=0.01,
            rope_parameters={
                "full_attention": yarn(mscale=1.0, mscale_all_dim=0.7),
                "indexed_attention": {"rope_type": "default", "rope_theta": 300.0},
                "sliding_attention": {"rope_type": "linear", "rope_theta": 77.0, "factor": 2.5},
            },
        ),
        dtype="float32",
        stacked_experts=True,
    ),
]
