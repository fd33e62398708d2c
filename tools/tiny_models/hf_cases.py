"""The Hugging Face fixtures: a table of small configurations, each turning over several corners.

`transformers` writes the configuration and the weights; `published_keys`, `config_edits` and
`stacked_experts` then give the folder the form that published checkpoints have (older `rope_theta` and
`rope_scaling` keys, keys left out because they equal the default) or the stacked expert tensors that
transformers 5 also reads. The golden is computed from the folder as it lies on disk, so an edit that changed
the meaning would show as a difference from the model in memory.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class HfCase:
    """One fixture folder."""

    name: str
    family: str
    seed: int
    config: dict[str, Any]
    # Element type of the file: "float32", "bfloat16" or "float16".
    dtype: str = "bfloat16"
    # Expert tensors as one matrix an expert (published checkpoints) or as stacked gate_up_proj and down_proj.
    stacked_experts: bool = False
    # Largest shard in bytes; several shards bring a model.safetensors.index.json.
    max_shard_bytes: int | None = None
    # Configuration keys as published checkpoints have them, in place of transformers 5's `rope_parameters`.
    published_keys: bool = False
    # Keys set or, with the value None, removed in config.json after transformers wrote it.
    config_edits: dict[str, Any] = field(default_factory=dict)
    # The same, once the golden is made: for names that transformers does not know.
    late_edits: dict[str, Any] = field(default_factory=dict)
    # The text model as part of a multimodal checkpoint, beside tensors that are not the text model's.
    multimodal: bool = False
    # Matrices of the layers but routers in FP8 with scales for blocks of 128 × 128, as DeepSeek publishes.
    fp8: bool = False
    # Size of a byte-level BPE vocabulary written beside the model; none when 0.
    tokenizer_size: int = 0
    # gpt-oss experts as published: MXFP4 blocks and scales.
    mxfp4: bool = False
    # Number of tokens in the golden; longer than every sliding window here.
    n_tokens: int = 101


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


def _deepseek(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=61,
        hidden_size=24,
        intermediate_size=28,
        moe_intermediate_size=8,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=10,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=2,
        first_k_dense_replace=1,
        n_group=4,
        topk_group=2,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return base | changes


def _yarn(**changes: Any) -> dict[str, Any]:
    base = dict(rope_type="yarn", rope_theta=5000.0, factor=4.0, original_max_position_embeddings=32)
    return base | changes


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


def _glm4_moe(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=44,
        moe_intermediate_size=20,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        attention_bias=True,
        use_qk_norm=False,
        num_mtp_layers=0,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    )
    return base | changes


def _minimax_m2(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=20,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=6,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        bos_token_id=1,
        eos_token_id=2,
    )
    return base | changes


def _gpt_oss(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=5,
        num_experts_per_tok=2,
        sliding_window=12,
        max_position_embeddings=256,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 5000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    )
    return base | changes


HF_CASES = [
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
    # head_dim 12 against hidden/heads = 8; kv heads below heads; bf16; published key names.
    HfCase("qwen3_moe_basic", "qwen3_moe", 11, _qwen3_moe(), published_keys=True),
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
    # Query latent; groups of experts; YaRN past its original context with mscale other than mscale_all_dim; a
    # dense first layer; an epsilon that shows, as the norms of latents do not use it; published key names.
    HfCase(
        "deepseek_v3_basic",
        "deepseek_v3",
        34,
        _deepseek(
            max_position_embeddings=128,
            rms_norm_eps=0.01,
            rope_parameters=_yarn(mscale=1.0, mscale_all_dim=0.7, beta_fast=8.0, beta_slow=0.5),
        ),
        published_keys=True,
        config_edits={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    ),
    # Queries straight from the hidden state; no groups; unnormalised weights; biases; tied; half-split rotation;
    # values wider than keys; stacked experts in f32; Kimi-K2's name.
    HfCase(
        "deepseek_v3_kimi",
        "deepseek_v3",
        35,
        _deepseek(
            hidden_size=32,
            num_hidden_layers=2,
            q_lora_rank=None,
            n_group=1,
            topk_group=1,
            n_routed_experts=6,
            n_shared_experts=1,
            num_experts_per_tok=2,
            first_k_dense_replace=0,
            norm_topk_prob=False,
            routed_scaling_factor=1.7,
            v_head_dim=24,
            attention_bias=True,
            tie_word_embeddings=True,
            rope_interleave=False,
        ),
        dtype="float32",
        stacked_experts=True,
        late_edits={"model_type": "kimi_k2"},
    ),
    # FP8: rows and columns that end within a block, blocks that end within a head of kv_b_proj.
    HfCase(
        "deepseek_v3_fp8",
        "deepseek_v3",
        38,
        _deepseek(
            vocab_size=41,
            num_hidden_layers=1,
            first_k_dense_replace=0,
            hidden_size=132,
            moe_intermediate_size=22,
            n_shared_experts=6,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            q_lora_rank=None,
            qk_nope_head_dim=24,
            v_head_dim=18,
            kv_lora_rank=32,
        ),
        published_keys=True,
        fp8=True,
    ),
    # As V2-Lite: no query latent, no groups although n_group is set, mscale = mscale_all_dim.
    HfCase(
        "deepseek_v2_lite",
        "deepseek_v2",
        36,
        _deepseek(
            q_lora_rank=None,
            n_group=2,
            topk_group=1,
            num_experts_per_tok=4,
            topk_method="greedy",
            norm_topk_prob=False,
            routed_scaling_factor=1.0,
            max_position_embeddings=128,
            rope_parameters=_yarn(mscale=0.707, mscale_all_dim=0.707),
        ),
        published_keys=True,
        config_edits={"scoring_func": "softmax", "moe_layer_freq": 1},
    ),
    # As V2: groups ranked by their best expert, weights scaled; YaRN without mscale; biases everywhere; tied; norm
    # asked for, which transformers does not do.
    HfCase(
        "deepseek_v2_groups",
        "deepseek_v2",
        37,
        _deepseek(
            num_hidden_layers=2,
            topk_method="group_limited_greedy",
            n_routed_experts=9,
            n_group=3,
            topk_group=2,
            n_shared_experts=1,
            norm_topk_prob=True,
            routed_scaling_factor=4.0,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
            rope_parameters=_yarn(factor=6.0, truncate=False),
        ),
        dtype="float16",
    ),
    # As published: biases on q, k, v; half of an odd number of pairs rotates; a dense layer, then shared experts.
    HfCase("glm4_moe_basic", "glm4_moe", 41, _glm4_moe(), published_keys=True),
    # Query and key norms; the best 2 of 4 groups; a factor; two dense layers; shared experts of double width; tied;
    # an epsilon that shows; stacked.
    HfCase(
        "glm4_moe_groups",
        "glm4_moe",
        42,
        _glm4_moe(
            num_hidden_layers=4,
            hidden_size=24,
            intermediate_size=28,
            head_dim=16,
            num_key_value_heads=1,
            use_qk_norm=True,
            n_routed_experts=12,
            num_experts_per_tok=3,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
            n_shared_experts=2,
            first_k_dense_replace=2,
            moe_intermediate_size=12,
            tie_word_embeddings=True,
            rms_norm_eps=0.01,
            rope_parameters={"rope_type": "default", "rope_theta": 777.0, "partial_rotary_factor": 0.25},
        ),
        stacked_experts=True,
    ),
    # No dense layer; weights that are not normalised; no biases; YaRN over part of the head; several shards.
    HfCase(
        "glm4_moe_yarn",
        "glm4_moe",
        43,
        _glm4_moe(
            head_dim=32,
            num_hidden_layers=2,
            first_k_dense_replace=0,
            norm_topk_prob=False,
            attention_bias=False,
            routed_scaling_factor=0.7,
            n_group=2,
            topk_group=1,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 5000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 40,
                "partial_rotary_factor": 0.5,
            },
        ),
        max_shard_bytes=40_000,
    ),
    # As published: rotary_dim, block_sparse_moe names; norms over the whole q and k vectors.
    HfCase("minimax_m2_basic", "minimax_m2", 44, _minimax_m2(), published_keys=True),
    # Names of transformers 5; the whole head rotates; one kv head; tied; top-3 of 7.
    HfCase(
        "minimax_m2_stacked",
        "minimax_m2",
        45,
        _minimax_m2(
            num_hidden_layers=2,
            hidden_size=24,
            num_key_value_heads=1,
            head_dim=12,
            num_local_experts=7,
            num_experts_per_tok=3,
            tie_word_embeddings=True,
            rms_norm_eps=0.02,
            rope_parameters={"rope_type": "default", "rope_theta": 333.0},
        ),
        stacked_experts=True,
    ),
    # As published: MXFP4 experts, YaRN with an unrounded ramp, every second layer within a window.
    HfCase("gpt_oss_mxfp4", "gpt_oss", 46, _gpt_oss(), published_keys=True, mxfp4=True),
    # Experts in bf16, stored with columns as rows, whose width is no multiple of 32; layer types in another order; a
    # limit and a factor of the activation that show; one kv head; YaRN with a rounded ramp.
    HfCase(
        "gpt_oss_bf16",
        "gpt_oss",
        47,
        _gpt_oss(
            hidden_size=24,
            intermediate_size=14,
            num_key_value_heads=1,
            num_local_experts=7,
            num_experts_per_tok=3,
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
            swiglu_limit=1.5,
            swiglu_alpha=1.2,
            rms_norm_eps=0.01,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 20000.0,
                "factor": 6.0,
                "original_max_position_embeddings": 48,
                "truncate": True,
            },
        ),
    ),
    # Latent attention without query latents; dense where listed; grouped routing with a bias.
    HfCase(
        "glm4_moe_lite_groups",
        "glm4_moe_lite",
        51,
        _deepseek(
            first_k_dense_replace=None,
            mlp_layer_types=["sparse", "dense", "sparse"],
            q_lora_rank=None,
            v_head_dim=14,
            rms_norm_eps=0.01,
            routed_scaling_factor=1.8,
        ),
    ),
    # Yarn; groups; no normalisation of weights.
    HfCase(
        "solar_open_yarn",
        "solar_open",
        52,
        dict(
            vocab_size=71,
            hidden_size=27,
            moe_intermediate_size=10,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=3,
            head_dim=10,
            n_routed_experts=6,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            n_shared_experts=2,
            norm_topk_prob=False,
            routed_scaling_factor=1.4,
            max_position_embeddings=256,
            rope_parameters=_yarn(),
        ),
        published_keys=True,
    ),
    # A dense first layer; layers within a window; stacked; tied.
    HfCase(
        "dots1_window",
        "dots1",
        53,
        dict(
            vocab_size=67,
            hidden_size=30,
            intermediate_size=26,
            moe_intermediate_size=9,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=14,
            n_routed_experts=7,
            num_experts_per_tok=3,
            n_shared_experts=1,
            first_k_dense_replace=1,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
            sliding_window=17,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            tie_word_embeddings=True,
            max_position_embeddings=256,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        ),
        stacked_experts=True,
    ),
    # As published: the hub's names.
    HfCase(
        "hy_v3_basic",
        "hy_v3",
        54,
        dict(
            vocab_size=73,
            hidden_size=28,
            intermediate_size=22,
            moe_intermediate_size=11,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=12,
            num_experts=7,
            num_experts_per_tok=3,
            num_shared_experts=2,
            max_position_embeddings=256,
            rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        ),
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
    # Experts stored with columns as rows, in odd widths; every expert chosen.
    HfCase(
        "gpt_oss_odd",
        "gpt_oss",
        58,
        _gpt_oss(
            vocab_size=53,
            hidden_size=33,
            intermediate_size=15,
            num_hidden_layers=2,
            head_dim=10,
            num_local_experts=3,
            num_experts_per_tok=3,
            sliding_window=31,
        ),
        dtype="float16",
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
    # An indexer that chooses as many keys as there are.
    HfCase(
        "deepseek_v32_dense",
        "deepseek_v32",
        60,
        _deepseek(
            num_hidden_layers=2,
            mlp_layer_types=["dense", "sparse"],
            index_topk=101,
            index_n_heads=2,
            index_head_dim=12,
            rope_parameters=_yarn(mscale=1.0, mscale_all_dim=1.0),
        ),
    ),
    # A dense first layer; biases; a shared expert; tied.
    HfCase(
        "ernie4_5_moe_bias",
        "ernie4_5_moe",
        62,
        dict(
            vocab_size=63,
            hidden_size=36,
            intermediate_size=25,
            moe_intermediate_size=10,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            moe_num_experts=7,
            moe_k=3,
            moe_num_shared_experts=1,
            moe_layer_start_index=1,
            use_bias=True,
            tie_word_embeddings=True,
            max_position_embeddings=256,
            rope_parameters={"rope_type": "default", "rope_theta": 3000.0},
        ),
        published_keys=True,
    ),
]
