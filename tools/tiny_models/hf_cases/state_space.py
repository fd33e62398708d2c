"""Mamba-2 beside attention and experts: Nemotron-H."""

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


CASES = [
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
]
