"""Mamba, Mamba-2 or short convolutions beside attention and experts: Jamba, Nemotron-H, Granite 4 hybrid, LFM2."""

from typing import Any

from ..hf_case import HfCase


def _nemotron_h(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=59,
        hidden_size=24,
        layers_block_type=["mamba", "moe", "mamba", "attention", "moe"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=10,
        max_position_embeddings=512,
        intermediate_size=28,
        ssm_state_size=7,
        mamba_num_heads=6,
        mamba_head_dim=9,
        n_groups=3,
        # Sums are not made in one go by transformers either.
        chunk_size=16,
        n_routed_experts=9,
        moe_intermediate_size=11,
        moe_shared_expert_intermediate_size=13,
        num_experts_per_tok=3,
        routed_scaling_factor=2.5,
        rescale_prenorm_residual=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return base | changes


def _granitemoehybrid(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=57,
        hidden_size=24,
        intermediate_size=10,
        num_hidden_layers=4,
        layer_types=["mamba", "attention", "mamba", "mamba"],
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        embedding_multiplier=3.0,
        logits_scaling=2.0,
        residual_multiplier=0.6,
        attention_multiplier=0.3,
        num_local_experts=7,
        num_experts_per_tok=3,
        shared_intermediate_size=13,
        position_embedding_type="nope",
        mamba_n_heads=6,
        mamba_n_groups=1,
        mamba_d_state=7,
        mamba_d_head=8,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_chunk_size=16,
        rope_parameters={"rope_type": "default", "rope_theta": 90.0},
        tie_word_embeddings=True,
    )
    return base | changes


def _jamba(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=37,
        hidden_size=24,
        intermediate_size=9,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        num_experts=5,
        num_experts_per_tok=2,
        attn_layer_period=3,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=7,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_dt_rank=5,
    )
    return base | changes


def _lfm2_moe(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=55,
        hidden_size=20,
        intermediate_size=15,
        moe_intermediate_size=9,
        num_hidden_layers=5,
        layer_types=["conv", "conv", "full_attention", "conv", "full_attention"],
        num_attention_heads=5,
        num_key_value_heads=1,
        max_position_embeddings=512,
        conv_L_cache=3,
        num_dense_layers=1,
        num_experts=8,
        num_experts_per_tok=3,
        rope_parameters={"rope_type": "default", "rope_theta": 90.0},
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return base | changes


CASES = [
    # As published: no positions, embeddings that are the head too.
    HfCase(
        "granitemoehybrid_basic",
        "granitemoehybrid",
        211,
        _granitemoehybrid(),
        config_edits={"layer_types": ["mamba", "attention", "mamba", "mamba"]},
    ),
    # Rotation, groups of heads, biases of projections but not of the convolution, limits of time steps, a head of its own.
    HfCase(
        "granitemoehybrid_rope",
        "granitemoehybrid",
        212,
        _granitemoehybrid(
            hidden_size=20,
            layer_types=["attention", "mamba", "attention", "mamba"],
            num_attention_heads=5,
            num_key_value_heads=None,
            position_embedding_type="rope",
            attention_bias=True,
            mamba_n_groups=2,
            mamba_n_heads=4,
            mamba_d_head="auto",
            mamba_expand=3,
            mamba_d_conv=2,
            mamba_conv_bias=False,
            mamba_proj_bias=True,
            time_step_limit=[0.3, 1.5],
            rms_norm_eps=0.01,
            tie_word_embeddings=False,
        ),
        dtype="float32",
        stacked_experts=True,
    ),
    # As published.
    HfCase("lfm2_moe_basic", "lfm2_moe", 213, _lfm2_moe()),
    # Biases of convolutions over 4 tokens, no bias for choosing, weights that are not normalised, a head of its own, no
    # dense layer.
    HfCase(
        "lfm2_moe_plain",
        "lfm2_moe",
        214,
        _lfm2_moe(
            num_hidden_layers=3,
            layer_types=["full_attention", "conv", "conv"],
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=6,
            conv_bias=True,
            conv_L_cache=4,
            num_dense_layers=0,
            use_expert_bias=False,
            norm_topk_prob=False,
            routed_scaling_factor=1.7,
            norm_eps=0.01,
            tie_word_embeddings=False,
            rope_parameters={"rope_type": "linear", "rope_theta": 90.0, "factor": 3.0},
        ),
        dtype="float32",
        stacked_experts=True,
    ),
    # Names, kinds of layers as letters and a limit that is infinite as published.
    HfCase(
        "nemotron_h_basic",
        "nemotron_h",
        171,
        _nemotron_h(),
        config_edits={
            "layers_block_type": None,
            "layer_types": None,
            "hybrid_override_pattern": "MEM*E",
            "num_hidden_layers": 5,
            "time_step_limit": [0.0, float("inf")],
        },
    ),
    # FP8 with one scale a matrix, as published; projections of Mamba-2 too.
    HfCase(
        "nemotron_h_fp8",
        "nemotron_h",
        173,
        _nemotron_h(hidden_size=28, layers_block_type=["mamba", "moe", "attention"], moe_latent_size=18),
        quantised="modelopt",
    ),
    # Experts on fewer channels, in groups, unnormalised; a dense layer; biases everywhere but in the convolution over 3
    # tokens; one group of heads, one key head; time steps at their limit; an epsilon that shows; names and stacked tensors
    # as transformers has them; kinds of layers only as a list.
    HfCase(
        "nemotron_h_latent",
        "nemotron_h",
        172,
        _nemotron_h(
            vocab_size=53,
            hidden_size=20,
            layers_block_type=["moe", "linear_attention", "mlp", "full_attention", "linear_attention"],
            num_key_value_heads=1,
            mamba_num_heads=3,
            mamba_head_dim=18,
            n_groups=1,
            ssm_state_size=10,
            conv_kernel=3,
            use_bias=True,
            use_conv_bias=False,
            mlp_bias=True,
            time_step_min=0.4,
            chunk_size=32,
            n_routed_experts=8,
            n_group=4,
            topk_group=2,
            norm_topk_prob=False,
            routed_scaling_factor=1.5,
            moe_latent_size=14,
            layer_norm_epsilon=0.01,
        ),
        dtype="float32",
        stacked_experts=True,
    ),
    # Attention in layer 1 of every three, experts in every second; a bias of the convolution alone.
    HfCase("jamba_basic", "jamba", 242, _jamba()),
    # A rank that the width says, biases of projections and none of the convolution, other positions of layers; tied.
    HfCase(
        "jamba_biased",
        "jamba",
        243,
        _jamba(
            num_hidden_layers=3,
            num_key_value_heads=4,
            attn_layer_offset=2,
            expert_layer_offset=0,
            mamba_d_state=16,
            mamba_d_conv=3,
            mamba_expand=1,
            num_experts=4,
            mamba_dt_rank="auto",
            mamba_conv_bias=False,
            mamba_proj_bias=True,
            rms_norm_eps=0.01,
            tie_word_embeddings=True,
        ),
        dtype="float32",
        stacked_experts=True,
    ),
]
