"""Linear attention beside full attention: Qwen3-Next, Qwen3.5, Kimi-Linear, Lara Mini."""

from typing import Any

from ..hf_case import HfCase


def _qwen3_next(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=44,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=20,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
        num_experts=7,
        num_experts_per_tok=3,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        bos_token_id=1,
        eos_token_id=2,
    )
    return base | changes


def _qwen3_5_moe(**changes: Any) -> dict[str, Any]:
    base = _qwen3_next(vocab_size=103)
    del base["intermediate_size"]
    return base | changes


def _kimi_linear(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=61,
        hidden_size=24,
        intermediate_size=28,
        moe_intermediate_size=8,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=16,
        qk_nope_head_dim=12,
        qk_rope_head_dim=6,
        v_head_dim=10,
        linear_head_dim=10,
        linear_num_heads=2,
        num_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        mlp_layer_types=["dense", "sparse", "sparse"],
        max_position_embeddings=512,
        pad_token_id=None,
        bos_token_id=1,
        eos_token_id=2,
    )
    return base | changes


def _lara_mini(**changes: Any) -> dict[str, Any]:
    base = _qwen3_next(num_hidden_layers=5, sliding_window=23, rope_parameters={"rope_type": "default", "rope_theta": 900.0})
    del base["intermediate_size"]
    return base | changes


CASES = [
    # Three layers of linear attention to one of full attention, as published: kinds of layers from the interval; two
    # value heads to a key head, of other widths; rotary on 4 of 16 channels; normalised top-3 of 7.
    HfCase(
        "qwen3_next_basic",
        "qwen3_next",
        141,
        _qwen3_next(),
        published_keys=True,
        config_edits={"layer_types": None, "full_attention_interval": 4, "norm_topk_prob": None},
    ),
    # Listed kinds of layers, full attention first; a dense layer; biases on q (and its gate), k, v and o; three value
    # heads to one key head; a convolution over 3 tokens; one kv head; linear rope scaling on half the channels;
    # unnormalised; tied; stacked experts; an epsilon that shows; f32.
    HfCase(
        "qwen3_next_bias_dense",
        "qwen3_next",
        42,
        _qwen3_next(
            hidden_size=24,
            num_hidden_layers=3,
            layer_types=["full_attention", "linear_attention", "linear_attention"],
            mlp_only_layers=[1],
            attention_bias=True,
            num_key_value_heads=1,
            head_dim=12,
            linear_num_key_heads=1,
            linear_num_value_heads=3,
            linear_key_head_dim=20,
            linear_value_head_dim=6,
            linear_conv_kernel_dim=3,
            moe_intermediate_size=12,
            num_experts=5,
            num_experts_per_tok=2,
            norm_topk_prob=False,
            tie_word_embeddings=True,
            rms_norm_eps=0.01,
            rope_parameters={
                "rope_type": "linear",
                "rope_theta": 777.0,
                "factor": 2.5,
                "partial_rotary_factor": 0.5,
            },
        ),
        dtype="float32",
        stacked_experts=True,
    ),
    # Separate projections of linear attention; sections of multimodal rotary embedding, which text does not see.
    HfCase(
        "qwen3_5_moe_text",
        "qwen3_5_moe_text",
        43,
        _qwen3_5_moe(
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            }
        ),
        max_shard_bytes=60_000,
    ),
    # The text part of a multimodal checkpoint; as many value heads as key heads; full attention in every second layer;
    # a convolution over 5 tokens; tied; top-1.
    HfCase(
        "qwen3_5_moe_multimodal",
        "qwen3_5_moe_text",
        44,
        _qwen3_5_moe(
            num_hidden_layers=3,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            linear_num_key_heads=3,
            linear_num_value_heads=3,
            linear_conv_kernel_dim=5,
            num_experts=4,
            num_experts_per_tok=1,
            tie_word_embeddings=True,
        ),
        multimodal=True,
        config_edits={"layer_types": None, "full_attention_interval": 2},
    ),
    # FP8 whose blocks of rows end within the heads that projections are taken apart by.
    HfCase(
        "qwen3_next_fp8",
        "qwen3_next",
        59,
        _qwen3_next(
            vocab_size=47,
            hidden_size=30,
            num_hidden_layers=2,
            layer_types=["full_attention", "linear_attention"],
            num_attention_heads=5,
            num_key_value_heads=1,
            linear_num_key_heads=3,
            linear_num_value_heads=6,
            linear_key_head_dim=9,
            linear_value_head_dim=11,
            num_experts=4,
            num_experts_per_tok=2,
        ),
        published_keys=True,
        fp8=True,
    ),
    # Channels that decay on their own, latent attention without positions in the second layer; groups; a dense first
    # layer; names as published.
    HfCase("kimi_linear_basic", "kimi_linear", 89, _kimi_linear()),
    # Latent attention first, queries with a latent of their own; a convolution over 3 tokens; weights as they are; names
    # of modules and stacked tensors as transformers has them.
    HfCase(
        "kimi_linear_stacked",
        "kimi_linear",
        90,
        _kimi_linear(
            num_hidden_layers=2,
            layer_types=["full_attention", "linear_attention"],
            mlp_layer_types=["sparse", "sparse"],
            q_lora_rank=10,
            linear_num_heads=3,
            linear_head_dim=7,
            linear_conv_kernel_dim=3,
            n_group=1,
            topk_group=1,
            norm_topk_prob=False,
            rms_norm_eps=0.01,
        ),
        dtype="float32",
        stacked_experts=True,
    ),
    # As published: what enters linear attention in one tensor, the published order of layers, tied.
    HfCase("lara_mini_basic", "lara_mini", 333, _lara_mini(), config_edits={"layer_types": None, "tie_word_embeddings": None}),
    # Names of modules as transformers has them; layers in another order, full attention first; biases; as many value heads as key
    # heads, of other widths; a convolution over 3 tokens; unnormalised weights; stretched positions; an epsilon that shows.
    HfCase(
        "lara_mini_modules",
        "lara_mini",
        334,
        _lara_mini(
            hidden_size=24,
            num_hidden_layers=4,
            layer_types=["full_attention", "sliding_attention", "sliding_attention", "linear_attention"],
            num_attention_heads=6,
            num_key_value_heads=3,
            head_dim=10,
            sliding_window=5,
            linear_num_key_heads=3,
            linear_num_value_heads=3,
            linear_key_head_dim=7,
            linear_value_head_dim=6,
            linear_conv_kernel_dim=3,
            num_experts=5,
            num_experts_per_tok=1,
            norm_topk_prob=False,
            attention_bias=True,
            tie_word_embeddings=False,
            rms_norm_eps=0.01,
            rope_parameters={"rope_type": "linear", "rope_theta": 777.0, "factor": 2.5},
        ),
        dtype="float32",
        stacked_experts=True,
    ),
]
