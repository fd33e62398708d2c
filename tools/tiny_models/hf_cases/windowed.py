"""Layers with a window between those that see everything: Cohere2-MoE, Mellum 2, Granite MoE with windows, Laguna, Flint."""

from typing import Any

from ..hf_case import HfCase


def _cohere2_moe(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=41,
        hidden_size=26,
        intermediate_size=7,
        prefix_dense_intermediate_size=18,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        num_experts=6,
        num_experts_per_tok=3,
        num_shared_experts=2,
        expert_selection_fn="sigmoid",
        first_k_dense_replace=1,
        sliding_window=11,
        logit_scale=0.7,
        rope_theta=90.0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return base | changes


def _mellum(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=41,
        hidden_size=26,
        intermediate_size=18,
        moe_intermediate_size=7,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        num_experts=6,
        num_experts_per_tok=3,
        sliding_window=11,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        mlp_layer_types=["sparse", "sparse", "dense", "sparse"],
        rope_parameters={
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 900.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
        },
    )
    return base | changes


def _granitemoe_swa(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=41,
        hidden_size=24,
        intermediate_size=9,
        shared_intermediate_size=10,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        num_local_experts=7,
        num_experts_per_tok=3,
        embedding_multiplier=3.0,
        attention_multiplier=0.3,
        residual_multiplier=0.6,
        logits_scaling=2.0,
        sliding_window=11,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 90.0},
        pad_token_id=0,
    )
    return base | changes


def _laguna(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=41,
        hidden_size=26,
        intermediate_size=18,
        moe_intermediate_size=7,
        shared_expert_intermediate_size=9,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_attention_heads_per_layer=[4, 6, 2, 4],
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        num_experts=6,
        num_experts_per_tok=3,
        moe_routed_scaling_factor=2.5,
        sliding_window=11,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        rope_parameters={
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 900.0,
                "partial_rotary_factor": 0.5,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
        },
    )
    return base | changes


def _inkling(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=41,
        hidden_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        swa_num_attention_heads=6,
        swa_num_key_value_heads=3,
        swa_head_dim=4,
        sliding_window_size=9,
        d_rel=5,
        rel_extent=13,
        layer_types=["hybrid_sliding", "hybrid", "hybrid_sliding"],
        max_position_embeddings=512,
        mlp_layer_types=["dense", "sparse", "sparse"],
        intermediate_size=20,
        moe_intermediate_size=8,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_shared_experts=2,
        logits_mup_width_multiplier=1.5,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=None,
    )
    return base | changes


def _flint(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=41,
        hidden_size=26,
        intermediate_size=18,
        moe_intermediate_size=7,
        shared_expert_intermediate_size=10,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        num_experts=6,
        num_experts_per_tok=3,
        sliding_window=11,
        rope_parameters={"rope_type": "default", "rope_theta": 90.0},
        bos_token_id=1,
        eos_token_id=2,
    )
    return base | changes


CASES = [
    # As published: sigmoid scores, shared experts that are averaged with the others, a dense first layer that rotates although
    # it sees everything.
    HfCase("cohere2_moe_basic", "cohere2_moe", 221, _cohere2_moe()),
    # RMS norms, softmax over the chosen, no shared expert, a head of its own, biases, kinds of layers as lists.
    HfCase(
        "cohere2_moe_softmax",
        "cohere2_moe",
        222,
        _cohere2_moe(
            num_key_value_heads=None,
            num_hidden_layers=4,
            rms_norm_eps=0.02,
            expert_selection_fn="softmax",
            num_shared_experts=0,
            first_k_dense_replace=0,
            tie_word_embeddings=False,
            attention_bias=True,
            layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            mlp_layer_types=["dense", "sparse", "dense", "sparse"],
            prefix_dense_sliding_window_pattern=2,
            rope_parameters={"rope_type": "linear", "rope_theta": 90.0, "factor": 3.0},
        ),
        stacked_experts=True,
    ),
    # As published: rotations of their own for layers of each kind.
    HfCase("mellum_basic", "mellum", 223, _mellum()),
    # The default kinds of layers, weights that are not normalised, biases, tied embeddings.
    HfCase(
        "mellum_default",
        "mellum",
        224,
        _mellum(
            num_hidden_layers=2,
            layer_types=None,
            mlp_layer_types=None,
            norm_topk_prob=False,
            attention_bias=True,
            tie_word_embeddings=True,
            rms_norm_eps=0.01,
        ),
        dtype="float16",
        stacked_experts=True,
    ),
    # Every fourth layer sees everything; sinks.
    HfCase("granitemoe_swa_basic", "granitemoe_swa", 225, _granitemoe_swa()),
    # A base for each layer, one without positions; no shared expert.
    HfCase(
        "granitemoe_swa_bases",
        "granitemoe_swa",
        226,
        _granitemoe_swa(
            num_hidden_layers=3,
            shared_intermediate_size=0,
            attention_bias=True,
            tie_word_embeddings=True,
            layer_types=["sliding_attention", "full_attention", "full_attention"],
            layer_rope_theta=[50.0, 0, 400.0],
            rope_parameters={"rope_type": "linear", "rope_theta": 90.0, "factor": 2.0},
        ),
    ),
    # As published: a gate a head, more heads in layers with a window, which rotate otherwise; a dense first layer.
    HfCase(
        "laguna_basic",
        "laguna",
        231,
        _laguna(),
        renames=(
            (r"mlp\.gate\.e_score_correction_bias", "mlp.experts.e_score_correction_bias"),
            (r"mlp\.shared_experts\.", "mlp.shared_expert."),
        ),
    ),
    # A gate a channel, capped logits of the router, kinds of layers as a list, all that has a default by default.
    HfCase(
        "laguna_elements",
        "laguna",
        232,
        _laguna(
            num_hidden_layers=3,
            num_attention_heads_per_layer=None,
            gating="per-element",
            moe_router_logit_softcapping=0.7,
            layer_types=None,
            mlp_layer_types=["sparse", "dense", "sparse"],
            attention_bias=True,
            tie_word_embeddings=True,
            rope_parameters=None,
            rms_norm_eps=0.01,
        ),
        dtype="float16",
        stacked_experts=True,
    ),
    HfCase("inkling_basic", "inkling_text", 341, _inkling()),
    # Layers by their numbers, a longer sight than the distances that count, another kernel, one shared expert, a head without
    # rows for padding's logits.
    HfCase(
        "inkling_padded",
        "inkling_text",
        342,
        _inkling(
            num_hidden_layers=2,
            layer_types=None,
            mlp_layer_types=None,
            local_layer_ids=[1],
            sliding_window_size=30,
            conv_kernel_size=3,
            n_shared_experts=1,
            unpadded_vocab_size=37,
            log_scaling_n_floor=400,
            rms_norm_eps=0.01,
        ),
        dtype="float32",
    ),
    # As published: dense first layers, which see everything, as do every fourth and the last; the others rotate.
    HfCase("flint_basic", "flint", 311, _flint()),
    # Kinds of layers as lists, every second layer dense, weights as they are, embeddings that are the head too.
    HfCase(
        "flint_lists",
        "flint",
        312,
        _flint(
            num_hidden_layers=4,
            layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            mlp_only_layers=[],
            decoder_sparse_step=2,
            norm_topk_prob=False,
            attention_bias=True,
            tie_word_embeddings=True,
        ),
        stacked_experts=True,
        dtype="float32",
    ),
]
