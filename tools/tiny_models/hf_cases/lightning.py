"""Lightning attention, and delta rules between latent attention: MiniMax-Text-01 and Ling 3.0."""

from typing import Any

from ..hf_case import HfCase


def _minimax(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=41,
        hidden_size=24,
        intermediate_size=7,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        max_position_embeddings=512,
        num_local_experts=5,
        num_experts_per_tok=2,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        block_size=8,
        full_attn_alpha_factor=1.7,
        full_attn_beta_factor=0.8,
        linear_attn_alpha_factor=1.4,
        linear_attn_beta_factor=0.9,
        mlp_alpha_factor=1.2,
        mlp_beta_factor=1.1,
        rope_parameters={"rope_type": "default", "rope_theta": 90.0},
    )
    return base | changes


def _bailing_hybrid(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=41,
        hidden_size=26,
        intermediate_size=18,
        moe_intermediate_size=7,
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
        kv_lora_rank=10,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=5,
        head_dim=6,
        layer_group_size=2,
        rope_theta=90.0,
        num_mtp_layers=0,
        pad_token_id=0,
        eos_token_id=2,
    )
    return base | changes


CASES = [
    # In float32, as transformers reads the powers of decays from the file.
    HfCase("minimax_basic", "minimax", 231, _minimax(), dtype="float32"),
    # The default kinds of layers, factors of one, heads as wide as the hidden state allows, tied embeddings.
    HfCase(
        "minimax_default",
        "minimax",
        232,
        _minimax(
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=3,
            head_dim=None,
            layer_types=None,
            full_attn_alpha_factor=1,
            full_attn_beta_factor=1,
            linear_attn_alpha_factor=1,
            linear_attn_beta_factor=1,
            mlp_alpha_factor=1,
            mlp_beta_factor=1,
            tie_word_embeddings=True,
            rms_norm_eps=0.02,
        ),
        dtype="float32",
        stacked_experts=True,
    ),
    # As published but for the bound of decays: with random weights, what a state that forgets at once gives is next to nothing,
    # whose norm is of rounding.
    HfCase("bailing_hybrid_basic", "bailing_hybrid", 236, _bailing_hybrid(kda_lower_bound=-0.3)),
    # Decays without a bound, kinds of layers as lists, two shared experts, scaled rotation.
    HfCase(
        "bailing_hybrid_softplus",
        "bailing_hybrid",
        234,
        _bailing_hybrid(
            num_hidden_layers=3,
            kda_safe_gate=False,
            n_group=1,
            topk_group=1,
            n_shared_experts=2,
            norm_topk_prob=False,
            routed_scaling_factor=0.8,
            short_conv_kernel_size=3,
            layer_types=["full_attention", "linear_attention", "full_attention"],
            mlp_layer_types=["sparse", "dense", "sparse"],
            attention_bias=True,
            rms_norm_eps=0.01,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 900.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        ),
        stacked_experts=True,
    ),
]
