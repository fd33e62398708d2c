"""Norms after blocks too, or only there, or gated: Gemma 4, AFMoE, FlexOlmo, A.X-K1 and K2, Kolibri-1 and Beam."""

from typing import Any

from ..hf_case import HfCase
from .shapes import yarn


def _gemma4(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=59,
        hidden_size=22,
        intermediate_size=14,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        global_head_dim=10,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        sliding_window=13,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=7,
        top_k_experts=3,
        moe_intermediate_size=9,
        final_logit_softcapping=4.0,
        use_bidirectional_attention="vision",
        rope_parameters={
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.45, "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
        },
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return base | changes


def _afmoe(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=61,
        hidden_size=26,
        intermediate_size=18,
        moe_intermediate_size=7,
        num_hidden_layers=5,
        num_dense_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        num_experts=9,
        num_experts_per_tok=3,
        num_shared_experts=1,
        route_scale=2.5,
        global_attn_every_n_layers=4,
        sliding_window=11,
        mup_enabled=True,
        rope_parameters={"rope_type": "default", "rope_theta": 90.0},
    )
    return base | changes


def _flex_olmo(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=41,
        hidden_size=24,
        intermediate_size=9,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        num_experts=7,
        num_experts_per_tok=5,
        rope_parameters={"rope_type": "default", "rope_theta": 90.0},
        pad_token_id=0,
        eos_token_id=2,
    )
    return base | changes


def _axk1(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=41,
        hidden_size=26,
        intermediate_size=18,
        moe_intermediate_size=7,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        max_position_embeddings=512,
        q_lora_rank=14,
        kv_lora_rank=10,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=5,
        rope_parameters={"rope_type": "default", "rope_theta": 90.0},
        bos_token_id=1,
        eos_token_id=2,
    )
    return base | changes


def _axk2(**changes: Any) -> dict[str, Any]:
    own = dict(
        n_group=None,
        topk_group=None,
        gated_norm_rank=5,
        index_topk=128,
        index_n_heads=5,
        index_head_dim=9,
    )
    config = _axk1(**(own | changes))
    # As `mlp_layer_types`.
    if "mlp_layer_types" in config:
        del config["first_k_dense_replace"]
    return config


def _kolibri1(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=41,
        hidden_size=26,
        moe_intermediate_size=7,
        shared_expert_intermediate_size=10,
        num_hidden_layers=5,
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


def _beam(**changes: Any) -> dict[str, Any]:
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
        num_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        sliding_window=11,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": 90.0}, "full_attention": None},
        final_logit_softcapping=4.0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return base | changes


CASES = [
    # As published: full layers have wider heads whose keys are values too.
    HfCase("gemma4_basic", "gemma4_text", 201, _gemma4()),
    # Layers with inputs of their own, values of their own, biases, a head of its own, the default order of layers of which
    # the last is full.
    HfCase(
        "gemma4_inputs",
        "gemma4_text",
        202,
        _gemma4(
            vocab_size=53,
            hidden_size=18,
            num_hidden_layers=3,
            num_key_value_heads=4,
            global_head_dim=12,
            attention_k_eq_v=False,
            attention_bias=True,
            layer_types=None,
            hidden_size_per_layer_input=5,
            vocab_size_per_layer_input=53,
            final_logit_softcapping=None,
            tie_word_embeddings=False,
            rms_norm_eps=0.02,
            rope_parameters={
                "full_attention": {"rope_type": "proportional", "rope_theta": 5000.0, "factor": 2.0},
                "sliding_attention": {"rope_type": "linear", "rope_theta": 70.0, "factor": 3.0},
            },
        ),
        dtype="float32",
    ),
    # As published: a tensor an expert.
    HfCase("afmoe_basic", "afmoe", 203, _afmoe()),
    # Two shared experts, two dense layers, kinds of layers as a list, unscaled embeddings that are the head too, biases.
    HfCase(
        "afmoe_tied",
        "afmoe",
        204,
        _afmoe(
            num_hidden_layers=4,
            num_dense_layers=2,
            num_key_value_heads=None,
            num_shared_experts=2,
            mup_enabled=False,
            tie_word_embeddings=True,
            attention_bias=True,
            layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            rms_norm_eps=0.01,
            rope_parameters={"rope_type": "linear", "rope_theta": 90.0, "factor": 3.0},
        ),
        dtype="float16",
        stacked_experts=True,
    ),
    HfCase("flex_olmo_basic", "flex_olmo", 205, _flex_olmo()),
    # Normalised weights, biases, as many heads of keys as of queries, a tied head.
    HfCase(
        "flex_olmo_tied",
        "flex_olmo",
        206,
        _flex_olmo(
            num_key_value_heads=None,
            norm_topk_prob=True,
            attention_bias=True,
            tie_word_embeddings=True,
            rms_norm_eps=0.02,
            rope_parameters={"rope_type": "linear", "rope_theta": 90.0, "factor": 3.0},
        ),
        stacked_experts=True,
    ),
    HfCase("axk1_basic", "axk1", 207, _axk1()),
    # Weights that are not normalised, two shared experts, halves that rotate, kinds of layers as a list.
    HfCase(
        "axk1_list",
        "axk1",
        208,
        _axk1(
            n_group=1,
            topk_group=1,
            n_shared_experts=2,
            norm_topk_prob=False,
            routed_scaling_factor=0.7,
            rope_interleave=False,
            attention_bias=True,
            mlp_layer_types=["sparse", "dense", "sparse"],
            rms_norm_eps=0.01,
        ),
        dtype="float16",
        stacked_experts=True,
    ),
    # As the light model: no groups; more keys than tokens.
    HfCase("axk2_basic", "axk2", 331, _axk2()),
    # Fewer keys than tokens; groups, of which those left out can be chosen by zero; two shared experts, biases, YaRN.
    HfCase(
        "axk2_indexed",
        "axk2",
        332,
        _axk2(
            index_topk=13,
            index_n_heads=12,
            n_group=4,
            topk_group=2,
            num_experts_per_tok=2,
            n_shared_experts=2,
            norm_topk_prob=False,
            attention_bias=True,
            mlp_layer_types=["sparse", "dense", "sparse"],
            rope_parameters=yarn(mscale=1.0, mscale_all_dim=0.7),
        ),
        stacked_experts=True,
        n_tokens=61,
    ),
    # As published: all but every fifth layer slide and rotate.
    HfCase("kolibri1_basic", "kolibri1", 333, _kolibri1(norm_topk_prob=True)),
    # No layer slides or rotates; weights as they are, embeddings that are the head too.
    HfCase(
        "kolibri1_full",
        "kolibri1",
        334,
        _kolibri1(
            num_hidden_layers=2,
            layer_types=["full_attention"] * 2,
            tie_word_embeddings=True,
            rms_norm_eps=0.01,
        ),
        dtype="float32",
        stacked_experts=True,
    ),
    # As published: queries of full layers grow with positions in place of rotating.
    HfCase("beam_basic", "beam", 233, _beam()),
    # Full layers that rotate, the default kinds of layers, weights that are not normalised, no cap, biases.
    HfCase(
        "beam_rotated",
        "beam",
        234,
        _beam(
            num_hidden_layers=5,
            layer_types=None,
            mlp_layer_types=None,
            n_group=1,
            topk_group=1,
            norm_topk_prob=False,
            routed_scaling_factor=1.5,
            final_logit_softcapping=None,
            attention_bias=True,
            tie_word_embeddings=True,
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 900.0, "factor": 3.0},
            },
            rms_norm_eps=0.01,
        ),
        dtype="float16",
        stacked_experts=True,
    ),
]
