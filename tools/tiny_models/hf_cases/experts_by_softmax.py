"""Full attention, experts scored by a softmax: DBRX, Granite-MoE, Hunyuan-A13B, JetMoE, Qwen2-MoE, Qwen3-MoE, Mixtral, OLMoE."""

from typing import Any

from ..hf_case import HfCase


def _qwen3_moe(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=44,
        moe_intermediate_size=20,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        num_experts=7,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=1,
        eos_token_id=2,
    )
    return base | changes


def _mixtral(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=5,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        sliding_window=None,
    )
    return base | changes


def _olmoe(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=103,
        hidden_size=32,
        intermediate_size=18,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts=9,
        num_experts_per_tok=3,
        norm_topk_prob=False,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        pad_token_id=1,
        eos_token_id=2,
    )
    return base | changes


def _granitemoe(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=20,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=6,
        num_experts_per_tok=2,
        embedding_multiplier=3.0,
        attention_multiplier=0.2,
        residual_multiplier=0.6,
        logits_scaling=1.5,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return base | changes


def _hunyuan_v1_moe(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=87,
        hidden_size=24,
        intermediate_size=14,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        num_experts=6,
        moe_topk=2,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 5.0, "factor": 1.0},
    )
    return base | changes


def _phimoe(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=41,
        hidden_size=32,
        intermediate_size=9,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        num_local_experts=6,
        router_jitter_noise=0.1,
        attention_bias=True,
        lm_head_bias=True,
        sliding_window=None,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 90.0,
            "short_factor": [1.0, 1.5, 2.0, 3.0],
            "long_factor": [2.0, 4.0, 8.0, 16.0],
            "short_mscale": 1.1,
            "long_mscale": 1.3,
            "original_max_position_embeddings": 128,
        },
        bos_token_id=1,
        eos_token_id=2,
    )
    return base | changes


def _dbrx(attention: dict[str, Any] | None = None, experts: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=43,
        d_model=32,
        n_heads=4,
        n_layers=2,
        max_seq_len=512,
        attn_config=dict(clip_qkv=0.9, kv_n_heads=2, rope_theta=90.0) | (attention or {}),
        ffn_config=dict(ffn_hidden_size=14, moe_num_experts=6, moe_top_k=3) | (experts or {}),
        rope_parameters={"rope_type": "default", "rope_theta": 90.0},
        bos_token_id=1,
        eos_token_id=2,
    )
    return base | changes


def _jetmoe(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=83,
        hidden_size=24,
        intermediate_size=10,
        num_hidden_layers=3,
        num_key_value_heads=2,
        kv_channels=8,
        num_local_experts=5,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 3000.0},
    )
    return base | changes


CASES = [
    # As published: older keys, tied; an epsilon that only the last norm has.
    HfCase("jetmoe_basic", "jetmoe", 281, _jetmoe(rms_norm_eps=0.05), published_keys=True),
    # All experts chosen, a single head, YaRN, a head of its own.
    HfCase(
        "jetmoe_all",
        "jetmoe",
        282,
        _jetmoe(
            num_hidden_layers=2,
            num_key_value_heads=1,
            kv_channels=14,
            num_local_experts=3,
            num_experts_per_tok=3,
            tie_word_embeddings=False,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        ),
        dtype="float32",
    ),
    # A base stretched for an alpha; as published, with lists that transformers does not read and a number of experts for
    # each layer; tied.
    HfCase(
        "hunyuan_v1_moe_basic",
        "hunyuan_v1_moe",
        36,
        _hunyuan_v1_moe(moe_topk=[2, 3], tie_word_embeddings=True),
        config_edits={"moe_intermediate_size": [14, 14], "num_shared_expert": [1, 1], "use_qk_norm": True},
    ),
    # Biases on q, k, v and o; not scaled; stacked experts.
    HfCase(
        "hunyuan_v1_moe_bias",
        "hunyuan_v1_moe",
        37,
        _hunyuan_v1_moe(attention_bias=True, rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
        stacked_experts=True,
    ),
    # head_dim 12 against hidden/heads = 8; kv heads below heads; bf16; published key names.
    HfCase("qwen3_moe_basic", "qwen3_moe", 11, _qwen3_moe(), published_keys=True),
    # As compressed-tensors and ModelOpt publish: a scale a row, 4-bit integers, 4-bit floats in both conventions; integers
    # with zero points and of 8 bits; as GPTQ's and AWQ's programs do.
    *(
        HfCase(
            f"qwen3_moe_{kind}",
            "qwen3_moe",
            150 + i,
            _qwen3_moe(
                hidden_size=64, num_hidden_layers=2, moe_intermediate_size=32, head_dim=16, num_experts=4
            ),
            published_keys=True,
            quantised=kind.removeprefix("fp8_"),
        )
        for i, kind in enumerate(
            ["fp8_rows", "int4", "nvfp4", "modelopt_nvfp4", "int4_zeros", "int8_rows", "gptq", "gptq_v2_int8", "awq"]
        )
    ),
    # Biases on q, k, v and o; one kv head; dense layers from both mlp_only_layers and decoder_sparse_step
    # (only layers 3 and 5 route); tied embeddings; unnormalised top-3 of 5; stacked experts; f32.
    HfCase(
        "qwen3_moe_dense_bias",
        "qwen3_moe",
        12,
        _qwen3_moe(
            num_hidden_layers=6,
            hidden_size=24,
            num_key_value_heads=1,
            head_dim=8,
            intermediate_size=28,
            moe_intermediate_size=12,
            num_experts=5,
            num_experts_per_tok=3,
            norm_topk_prob=False,
            attention_bias=True,
            tie_word_embeddings=True,
            decoder_sparse_step=2,
            mlp_only_layers=[1],
            rope_parameters={"rope_type": "default", "rope_theta": 777.0},
        ),
        dtype="float32",
        stacked_experts=True,
    ),
    # Every layer windowed although max_window_layers says 1 (transformers does not read it); linear rope
    # scaling; one kv head; an epsilon that shows; several shards; top-4 of 9.
    HfCase(
        "qwen3_moe_window",
        "qwen3_moe",
        13,
        _qwen3_moe(
            use_sliding_window=True,
            sliding_window=16,
            max_window_layers=1,
            num_key_value_heads=1,
            num_experts=9,
            num_experts_per_tok=4,
            moe_intermediate_size=16,
            rms_norm_eps=0.01,
            rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
        ),
        max_shard_bytes=40_000,
    ),
    # YaRN under the older key names with `type`; a sliding_window that use_sliding_window = false turns
    # off; top-1 without normalisation, so that the weight is not one; tied embeddings; stacked experts in
    # bf16.
    HfCase(
        "qwen3_moe_yarn",
        "qwen3_moe",
        14,
        _qwen3_moe(
            num_experts=6,
            num_experts_per_tok=1,
            norm_topk_prob=False,
            tie_word_embeddings=True,
            head_dim=16,
            moe_intermediate_size=24,
            max_position_embeddings=160,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 5000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 40,
            },
        ),
        published_keys=True,
        stacked_experts=True,
        config_edits={"sliding_window": 8, "use_sliding_window": False},
    ),
    # A tokenizer and a chat template beside the model, its vocabulary smaller than the embedding.
    HfCase(
        "qwen3_moe_tokenizer",
        "qwen3_moe",
        15,
        _qwen3_moe(
            vocab_size=297,
            num_hidden_layers=2,
            num_experts=4,
            moe_intermediate_size=16,
            bos_token_id=None,
            eos_token_id=292,
        ),
        published_keys=True,
        tokenizer_size=293,
        n_tokens=48,
    ),
    # As published: no head_dim (so hidden/heads), most keys left to their defaults; window absent.
    HfCase(
        "mixtral_basic",
        "mixtral",
        21,
        _mixtral(),
        published_keys=True,
        config_edits={
            "rope_theta": None,
            "rms_norm_eps": None,
            "head_dim": None,
            "num_experts_per_tok": None,
        },
    ),
    # Window of 13; head_dim 16 against hidden/heads = 8; one kv head; an epsilon that shows; f32 in several
    # shards; top-3 of 7.
    HfCase(
        "mixtral_window",
        "mixtral",
        22,
        _mixtral(
            sliding_window=13,
            head_dim=16,
            num_key_value_heads=1,
            num_hidden_layers=2,
            intermediate_size=16,
            num_local_experts=7,
            num_experts_per_tok=3,
            rms_norm_eps=0.02,
            rope_parameters={"rope_type": "default", "rope_theta": 12345.0},
        ),
        dtype="float32",
        max_shard_bytes=60_000,
    ),
    # llama3 rope scaling; tied embeddings; top-1 of 3 (weight one); stacked experts; kv heads = heads.
    HfCase(
        "mixtral_llama3",
        "mixtral",
        23,
        _mixtral(
            head_dim=16,
            num_key_value_heads=4,
            num_local_experts=3,
            num_experts_per_tok=1,
            tie_word_embeddings=True,
            max_position_embeddings=256,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        ),
        stacked_experts=True,
    ),
    # YaRN with its own betas, an explicit attention_factor, and no rounding of the ramp; f16.
    HfCase(
        "mixtral_yarn",
        "mixtral",
        24,
        _mixtral(
            head_dim=16,
            num_hidden_layers=2,
            num_local_experts=6,
            num_experts_per_tok=4,
            max_position_embeddings=256,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 20000.0,
                "factor": 6.0,
                "original_max_position_embeddings": 48,
                "beta_fast": 2.0,
                "beta_slow": 0.5,
                "attention_factor": 1.3,
                "truncate": False,
            },
        ),
        dtype="float16",
    ),
    # Norms over the whole q and k vectors; unnormalised top-3 of 9; published key names.
    HfCase("olmoe_basic", "olmoe", 31, _olmoe(), published_keys=True),
    # clip_qkv well inside the range of q, k and v; biases on q, k, v and o; fewer kv heads; normalised;
    # tied; f32.
    HfCase(
        "olmoe_clip_bias",
        "olmoe",
        32,
        _olmoe(
            num_hidden_layers=2,
            num_key_value_heads=2,
            clip_qkv=0.8,
            attention_bias=True,
            norm_topk_prob=True,
            tie_word_embeddings=True,
            intermediate_size=14,
            rms_norm_eps=0.01,
            rope_parameters={"rope_type": "default", "rope_theta": 333.0},
        ),
        dtype="float32",
    ),
    # Dynamic rope scaling, which changes nothing below max_position_embeddings; one kv head; stacked; top-4
    # of 6.
    HfCase(
        "olmoe_dynamic",
        "olmoe",
        33,
        _olmoe(
            num_key_value_heads=1,
            num_experts=6,
            num_experts_per_tok=4,
            intermediate_size=22,
            rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0},
        ),
        stacked_experts=True,
        max_shard_bytes=50_000,
    ),
    # A dense layer in between; weights that are not normalised.
    HfCase(
        "qwen2_moe_basic",
        "qwen2_moe",
        55,
        dict(
            vocab_size=69,
            hidden_size=36,
            intermediate_size=20,
            moe_intermediate_size=13,
            shared_expert_intermediate_size=17,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=3,
            num_experts=6,
            num_experts_per_tok=4,
            mlp_only_layers=[1],
            max_position_embeddings=256,
            rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        ),
        published_keys=True,
    ),
    # Rotary scaling that depends on the context, which is longer than the original one here.
    HfCase(
        "mixtral_longrope",
        "mixtral",
        56,
        _mixtral(
            hidden_size=21,
            num_hidden_layers=1,
            num_attention_heads=3,
            num_key_value_heads=1,
            head_dim=10,
            num_local_experts=3,
            num_experts_per_tok=3,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 3000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "short_factor": [1.0, 1.1, 1.2, 1.4, 2.0],
                "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0],
            },
        ),
    ),
    HfCase(
        "olmoe_dynamic_long",
        "olmoe",
        57,
        _olmoe(
            num_hidden_layers=1,
            max_position_embeddings=48,
            rope_parameters={"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 3.0},
        ),
    ),
    # As published: experts in one tensor each of gate with up and of down, under names that transformers translates.
    HfCase("granitemoe_basic", "granitemoe", 58, _granitemoe(), published_keys=True),
    # A shared expert; tied embeddings; biases on q, k, v and o; one kv head; transformers' own names; f32.
    HfCase(
        "granitemoeshared_tied",
        "granitemoeshared",
        59,
        _granitemoe(
            hidden_size=24,
            num_hidden_layers=2,
            num_key_value_heads=1,
            shared_intermediate_size=14,
            attention_bias=True,
            tie_word_embeddings=True,
            rms_norm_eps=0.01,
            residual_multiplier=0.4,
            logits_scaling=0.7,
        ),
        dtype="float32",
        stacked_experts=True,
    ),
    # As published: biases everywhere, a rotation for the original context.
    HfCase("phimoe_basic", "phimoe", 235, _phimoe()),
    # As it is pruned: a plain rotation. A window; a head that is the embeddings, with a bias, and no others.
    HfCase(
        "phimoe_window",
        "phimoe",
        238,
        _phimoe(
            num_key_value_heads=4,
            router_jitter_noise=0.01,
            attention_bias=False,
            lm_head_bias=True,
            tie_word_embeddings=True,
            sliding_window=23,
            rope_parameters={"rope_type": "default", "rope_theta": 90.0},
        ),
        dtype="float16",
        stacked_experts=True,
    ),
    # As published: a limit on queries, keys and values, the base of their rotation among the keys of attention.
    HfCase("dbrx_basic", "dbrx", 240, _dbrx(), late_edits={"rope_parameters": None}),
    # Weights as the softmax has them, one head of keys; a stretched rotation, whose base is not that of the keys of attention.
    HfCase(
        "dbrx_plain",
        "dbrx",
        241,
        _dbrx(
            attention=dict(clip_qkv=8, kv_n_heads=1, rope_theta=77.0),
            experts=dict(moe_normalize_expert_weights=None, moe_num_experts=5, moe_top_k=2, ffn_hidden_size=9),
            rope_parameters={"rope_type": "yarn", "rope_theta": 90.0, "factor": 4.0, "original_max_position_embeddings": 64},
        ),
        dtype="float32",
    ),
]
