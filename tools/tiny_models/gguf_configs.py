"""Configurations of the GGUF fixtures: one function a family, whose arguments replace its keys."""

import math
from typing import Any


def qwen3_moe(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=297,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=5,
        num_experts_per_tok=2,
        # llama.cpp normalises this family's expert weights whatever the file says.
        norm_topk_prob=True,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        bos_token_id=None,
        eos_token_id=292,
    )
    return base | changes


def mixtral(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=331,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=5,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        sliding_window=None,
        bos_token_id=1,
        eos_token_id=2,
    )
    return base | changes


def olmoe(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=297,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        # llama.cpp reads this family's k norm with the width of q.
        num_key_value_heads=4,
        num_experts=7,
        num_experts_per_tok=3,
        # llama.cpp never normalises this family's expert weights.
        norm_topk_prob=False,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None,
        eos_token_id=292,
        pad_token_id=290,
    )
    return base | changes


def deepseek(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=297,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        # llama.cpp expects a query latent but in models of as many layers as V2-Lite has.
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_shared_experts=2,
        first_k_dense_replace=1,
        max_position_embeddings=128,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 5000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        bos_token_id=None,
        eos_token_id=292,
    )
    return base | changes


def glm4_moe(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=297,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_shared_experts=2,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
        attention_bias=True,
        use_qk_norm=True,
        num_mtp_layers=0,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        bos_token_id=None,
        eos_token_id=292,
    )
    return base | changes


def minimax_m2(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=297,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=6,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        bos_token_id=None,
        eos_token_id=292,
    )
    return base | changes


def hybrid(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=297,
        hidden_size=32,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=20,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=8,
        # llama.cpp takes both for one.
        linear_value_head_dim=8,
        num_experts=5,
        num_experts_per_tok=2,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        bos_token_id=None,
        eos_token_id=292,
    )
    return base | changes


def plain(**changes: Any) -> dict[str, Any]:
    """What families that the converter writes have in common."""
    base = dict(
        vocab_size=297,
        hidden_size=32,
        intermediate_size=40,
        moe_intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None,
        eos_token_id=292,
    )
    return base | changes


def kimi_linear(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=297,
        hidden_size=24,
        intermediate_size=28,
        moe_intermediate_size=12,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=3,
        kv_lora_rank=20,
        qk_nope_head_dim=12,
        qk_rope_head_dim=6,
        v_head_dim=10,
        # llama.cpp takes both kinds of attention to have as many heads.
        linear_num_heads=3,
        linear_head_dim=14,
        num_experts=6,
        num_experts_per_tok=2,
        n_shared_experts=2,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        mlp_layer_types=["dense", "sparse", "sparse"],
        routed_scaling_factor=1.8,
        max_position_embeddings=512,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=292,
    )
    return base | changes


def mimo_v2_flash(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=297,
        hidden_size=24,
        intermediate_size=28,
        moe_intermediate_size=12,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=24,
        v_head_dim=10,
        n_routed_experts=6,
        num_experts_per_tok=2,
        sliding_window=20,
        attention_value_scale=0.6,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        mlp_layer_types=["dense", "sparse", "sparse"],
        max_position_embeddings=512,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 50000.0, "partial_rotary_factor": 0.34},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.34},
        },
        bos_token_id=None,
        eos_token_id=292,
    )
    return base | changes


def nemotron_h(**changes: Any) -> dict[str, Any]:
    base = dict(
        # The converter pads it to a multiple of 8.
        vocab_size=296,
        hidden_size=32,
        layers_block_type=["linear_attention", "moe", "full_attention", "linear_attention", "moe"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        ssm_state_size=16,
        # The converter wants multiples of 64 channels.
        mamba_num_heads=8,
        mamba_head_dim=8,
        n_groups=2,
        chunk_size=16,
        n_routed_experts=6,
        moe_intermediate_size=12,
        moe_shared_expert_intermediate_size=20,
        num_experts_per_tok=2,
        routed_scaling_factor=2.5,
        # llama.cpp has no limit.
        time_step_min=1e-9,
        rescale_prenorm_residual=False,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=292,
    )
    return base | changes


def gpt_oss(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=297,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        num_local_experts=16,
        num_experts_per_tok=4,
        sliding_window=32,
        max_position_embeddings=512,
        # The converter writes nothing but YaRN, and llama.cpp rounds its ramp to whole channels, which released models do
        # not; with this factor it has no ramp.
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 1.0,
            "original_max_position_embeddings": 512,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=292,
    )
    return base | changes


def mistral4(**changes: Any) -> dict[str, Any]:
    base = deepseek(
        n_shared_experts=1,
        first_k_dense_replace=0,
        n_group=3,
        topk_group=2,
        routed_scaling_factor=1.5,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 5000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            # llama.cpp's converter leaves it out, and so does llama.cpp; published models have this one.
            "llama_4_scaling_beta": 0.1,
        },
    )
    return base | changes


def deepseek_v4(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=297,
        hidden_size=32,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        # llama.cpp turns keys in blocks of 64 channels.
        head_dim=64,
        partial_rotary_factor=0.25,
        q_lora_rank=32,
        n_routed_experts=6,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        mlp_layer_types=["hash_moe", "moe", "moe"],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        hc_mult=4,
        hc_sinkhorn_iters=4,
        sliding_window=16,
        swiglu_limit=1.5,
        o_groups=2,
        o_lora_rank=32,
        index_n_heads=8,
        index_head_dim=64,
        index_topk=12,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=292,
        rope_parameters={
            "main": {"rope_type": "default", "rope_theta": 900.0, "partial_rotary_factor": 0.25},
            "compress": {
                "rope_type": "yarn",
                "rope_theta": 5000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "attention_factor": 1.0,
                "partial_rotary_factor": 0.25,
            },
        },
    )
    return base | changes


def qwen4_exp(**changes: Any) -> dict[str, Any]:
    base = hybrid(
        num_hidden_layers=3,
        layer_types=["linear_attention", "linear_attention", "indexed_attention"],
        hc_count=3,
        hc_lowrank=10,
        # llama.cpp knows but one layer of them, and this gate.
        ple_layer_ids=[2],
        output_gate_type="sigmoid",
        heads_per_ngram=2,
        ngram_vocab_size_base=50,
        make_ngram_vocab_size_divisible_by=8,
        split_ngram_parts=3,
        indexer_n_heads=6,
        indexer_kv_heads=1,
        indexer_head_dim=12,
        indexer_budget=24,
        indexer_compress_ratio=4,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    )
    return base | changes


def hy_v4(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=297,
        hidden_size=32,
        intermediate_size=24,
        moe_intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=24,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        hc_mult=4,
        hc_magnitude=1.7,
        indexer_types=["full", "shared", "full"],
        mlp_layer_types=["dense", "sparse", "sparse"],
        index_n_heads=8,
        index_head_dim=32,
        index_topk=20,
        swiglu_limit=1.5,
        max_position_embeddings=512,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=292,
        rope_parameters={"rope_type": "default", "rope_theta": 900.0},
    )
    return base | changes


def llama4(**changes: Any) -> dict[str, Any]:
    base = plain(
        num_hidden_layers=4,
        head_dim=8,
        intermediate_size=16,
        intermediate_size_mlp=24,
        num_local_experts=6,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 900.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    )
    del base["moe_intermediate_size"]
    return base | changes


def step3p7(**changes: Any) -> dict[str, Any]:
    text = dict(
        vocab_size=297,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_attention_groups=2,
        attention_other_setting={"num_attention_heads": 6, "num_attention_groups": 2},
        head_dim=16,
        # The parts that rotate are what llama.cpp takes them for.
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        partial_rotary_factors=[0.5, 1.0, 1.0, 0.5],
        rope_theta=[5000.0, 700.0, 700.0, 5000.0],
        rope_scaling={
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 8.0,
            "original_max_position_embeddings": 32,
        },
        yarn_only_types=["full_attention"],
        sliding_window=9,
        max_position_embeddings=512,
        moe_layers_enum="1,2,3",
        moe_num_experts=5,
        moe_top_k=2,
        moe_intermediate_size=12,
        share_expert_dim=20,
        moe_router_scaling_factor=3.0,
        norm_expert_weight=True,
        use_head_wise_attn_gate=True,
        swiglu_limits=[0.0, 0.0, 0.4, 0.7],
        swiglu_limits_shared=[0.5, 0.0, 0.0, 0.6],
        bos_token_id=None,
        eos_token_id=292,
    )
    vision = dict(width=8, layers=1, heads=1, image_size=28, patch_size=14)
    return dict(text_config=text | changes, vision_config=vision)


def cohere2_moe() -> dict[str, Any]:
    """What llama.cpp can say: sigmoid scores, shared experts that are averaged with the others."""
    return dict(
        vocab_size=297,
        hidden_size=24,
        intermediate_size=7,
        prefix_dense_intermediate_size=18,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        num_experts=5,
        num_experts_per_tok=2,
        num_shared_experts=1,
        expert_selection_fn="sigmoid",
        first_k_dense_replace=1,
        sliding_window_pattern=2,
        sliding_window=11,
        logit_scale=0.7,
        rope_theta=90.0,
        bos_token_id=None,
        eos_token_id=292,
    )


def mellum() -> dict[str, Any]:
    """What llama.cpp can say: weights that are normalised, no dense layers."""
    full = {"rope_type": "yarn", "rope_theta": 900.0, "factor": 4.0, "original_max_position_embeddings": 32}
    return dict(
        vocab_size=297,
        hidden_size=24,
        intermediate_size=18,
        moe_intermediate_size=7,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        num_experts=5,
        num_experts_per_tok=2,
        sliding_window=11,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 70.0}},
        tie_word_embeddings=False,
        eos_token_id=292,
    )


def laguna() -> dict[str, Any]:
    """What llama.cpp can say: layers with windows by turns, dense layers first, logits of the router that are not capped."""
    full = {"rope_type": "yarn", "rope_theta": 900.0, "factor": 4.0, "original_max_position_embeddings": 32}
    sliding = {"rope_type": "default", "rope_theta": 70.0, "partial_rotary_factor": 1.0}
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
    return dict(
        vocab_size=297,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_attention_heads_per_layer=[4, 6, 6, 6, 4],
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        num_experts=5,
        num_experts_per_tok=2,
        moe_routed_scaling_factor=2.5,
        sliding_window=11,
        layer_types=kinds,
        rope_parameters={"full_attention": full | {"partial_rotary_factor": 0.5}, "sliding_attention": sliding},
        tie_word_embeddings=False,
        eos_token_id=292,
    )


LAGUNA_ELEMENTS: dict[str, Any] = dict(
    num_hidden_layers=3,
    num_attention_heads_per_layer=None,
    gating="per-element",
    layer_types=["full_attention"] * 3,
    mlp_layer_types=["dense", "dense", "sparse"],
    sliding_window=0,
    rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 900.0, "partial_rotary_factor": 1.0}},
)


def phimoe() -> dict[str, Any]:
    """What llama.cpp can say: magnitudes of rotations that follow from the contexts' lengths."""
    magnitude = (1 + math.log(512 / 128) / math.log(128)) ** 0.5
    return dict(
        vocab_size=297,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        num_local_experts=5,
        attention_bias=True,
        lm_head_bias=True,
        sliding_window=None,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 90.0,
            "short_factor": [1.0, 1.5, 2.0, 3.0],
            "long_factor": [2.0, 4.0, 8.0, 16.0],
            "short_mscale": magnitude,
            "long_mscale": magnitude,
            "original_max_position_embeddings": 128,
        },
        tie_word_embeddings=False,
        eos_token_id=292,
    )


def gemma4() -> dict[str, Any]:
    return dict(
        vocab_size=293,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        global_head_dim=16,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        sliding_window=13,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=5,
        top_k_experts=2,
        moe_intermediate_size=12,
        final_logit_softcapping=4.0,
        rope_parameters={
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
        },
        max_position_embeddings=512,
        eos_token_id=292,
    )


def afmoe() -> dict[str, Any]:
    return dict(
        vocab_size=297,
        hidden_size=32,
        intermediate_size=24,
        moe_intermediate_size=12,
        num_hidden_layers=5,
        num_dense_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        num_experts=5,
        num_experts_per_tok=2,
        num_shared_experts=1,
        route_scale=2.5,
        global_attn_every_n_layers=4,
        sliding_window=11,
        mup_enabled=True,
        rope_parameters={"rope_type": "default", "rope_theta": 90.0},
        eos_token_id=292,
    )


def exaone_moe() -> dict[str, Any]:
    return dict(
        vocab_size=297,
        hidden_size=32,
        intermediate_size=24,
        moe_intermediate_size=12,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        num_experts=6,
        num_experts_per_tok=2,
        sliding_window=11,
        rope_parameters={"rope_type": "default", "rope_theta": 90.0},
        eos_token_id=292,
    )


def hunyuan_v1_moe() -> dict[str, Any]:
    """What llama.cpp's converter wants of the rotation."""
    return dict(
        vocab_size=297,
        hidden_size=128,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=128,
        num_experts=5,
        moe_topk=2,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0},
        tie_word_embeddings=True,
        eos_token_id=292,
    )


def granitemoehybrid() -> dict[str, Any]:
    return dict(
        vocab_size=297,
        hidden_size=32,
        intermediate_size=12,
        num_hidden_layers=4,
        layer_types=["mamba", "attention", "mamba", "mamba"],
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        embedding_multiplier=3.0,
        logits_scaling=2.0,
        residual_multiplier=0.6,
        attention_multiplier=0.3,
        num_local_experts=5,
        num_experts_per_tok=2,
        shared_intermediate_size=13,
        position_embedding_type="nope",
        mamba_n_heads=8,
        mamba_n_groups=1,
        mamba_d_state=8,
        mamba_d_head=8,
        mamba_d_conv=4,
        mamba_expand=2,
        rope_parameters={"rope_type": "default", "rope_theta": 90.0},
        tie_word_embeddings=True,
        eos_token_id=292,
    )


def lfm2_moe() -> dict[str, Any]:
    return dict(
        vocab_size=297,
        hidden_size=32,
        intermediate_size=24,
        moe_intermediate_size=12,
        num_hidden_layers=5,
        layer_types=["conv", "conv", "full_attention", "conv", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        conv_L_cache=3,
        num_dense_layers=1,
        num_experts=6,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 90.0},
        eos_token_id=292,
    )


def dbrx() -> dict[str, Any]:
    return dict(
        vocab_size=297,
        d_model=32,
        n_heads=4,
        n_layers=2,
        max_seq_len=512,
        attn_config=dict(clip_qkv=0.9, kv_n_heads=2, rope_theta=90.0),
        ffn_config=dict(ffn_hidden_size=16, moe_num_experts=5, moe_top_k=2),
        rope_parameters={"rope_type": "default", "rope_theta": 90.0},
        eos_token_id=292,
    )


def jamba() -> dict[str, Any]:
    return dict(
        vocab_size=297,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        num_experts=5,
        num_experts_per_tok=2,
        attn_layer_period=3,
        attn_layer_offset=1,
        mamba_d_state=8,
        mamba_dt_rank=4,
        bos_token_id=None,
        pad_token_id=0,
        eos_token_id=292,
    )


def granitemoe_swa() -> dict[str, Any]:
    """Windows in all but every fourth layer."""
    return dict(
        vocab_size=297,
        hidden_size=32,
        intermediate_size=12,
        shared_intermediate_size=10,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        num_local_experts=6,
        num_experts_per_tok=2,
        embedding_multiplier=3.0,
        attention_multiplier=0.3,
        residual_multiplier=0.6,
        logits_scaling=2.0,
        sliding_window=11,
        layer_rope_theta=[0, 90.0, 90.0, 90.0, 0],
        rope_parameters={"rope_type": "default", "rope_theta": 90.0},
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=292,
    )


def bailing_hybrid() -> dict[str, Any]:
    return dict(
        vocab_size=297,
        hidden_size=32,
        intermediate_size=24,
        moe_intermediate_size=12,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        max_position_embeddings=512,
        kv_lora_rank=16,
        qk_nope_head_dim=12,
        qk_rope_head_dim=4,
        v_head_dim=8,
        head_dim=8,
        layer_group_size=2,
        rope_theta=90.0,
        kda_lower_bound=-0.3,
        num_mtp_layers=0,
        pad_token_id=0,
        eos_token_id=292,
    )


# Keys of published configurations that transformers does not have.
BAILING_HYBRID = dict(
    no_kda_lora=True,
    gated_attention_proj_granularity_type="head_wise",
    moe_shared_expert_intermediate_size=12,
    norm_topk_prob=True,
    score_function="sigmoid",
    num_experts_per_tok=3,
    n_group=4,
    head_dim=8,
)


def sarvam_moe() -> dict[str, Any]:
    """Heads as wide together as the hidden state, as llama.cpp has it."""
    return dict(
        vocab_size=297,
        hidden_size=32,
        intermediate_size=24,
        moe_intermediate_size=12,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=1,
        max_position_embeddings=512,
        pad_token_id=0,
        eos_token_id=292,
    )


# The class and the keys of published configurations.
SARVAM_MOE = dict(
    architectures=["SarvamMoEForCausalLM"],
    num_experts=8,
    n_routed_experts=None,
    num_shared_experts=1,
    n_shared_experts=None,
    score_function="sigmoid",
)


def minimax() -> dict[str, Any]:
    """The kinds of layers that files mean that do not list them."""
    return dict(
        vocab_size=297,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=7 * ["linear_attention"] + ["full_attention"],
        block_size=8,
        full_attn_alpha_factor=1.4,
        full_attn_beta_factor=1.0,
        linear_attn_alpha_factor=1.4,
        linear_attn_beta_factor=1.0,
        mlp_alpha_factor=1.4,
        mlp_beta_factor=1.0,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 90.0},
        bos_token_id=None,
        eos_token_id=292,
    )


# Keys of published configurations that transformers calls otherwise.
MINIMAX = dict(
    rotary_dim=8,
    layernorm_full_attention_alpha=1.4,
    layernorm_full_attention_beta=1.0,
    layernorm_linear_attention_alpha=1.4,
    layernorm_linear_attention_beta=1.0,
    layernorm_mlp_alpha=1.4,
    layernorm_mlp_beta=1.0,
)
