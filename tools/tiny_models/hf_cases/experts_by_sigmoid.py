"""Full attention, experts scored by a sigmoid or with a correction bias: GLM-4.5, Sarvam-30B, MiniMax-M2, Solar Open, dots.llm1, Hy3, ERNIE 4.5."""

from typing import Any

from ..hf_case import HfCase
from .shapes import yarn


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


def _sarvam_moe(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=59,
        hidden_size=24,
        intermediate_size=18,
        moe_intermediate_size=7,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=2,
        max_position_embeddings=512,
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


def _exaone_moe(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=59,
        hidden_size=24,
        intermediate_size=18,
        moe_intermediate_size=7,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=10,
        max_position_embeddings=512,
        num_experts=8,
        num_experts_per_tok=3,
        sliding_window=11,
        rope_parameters={"rope_type": "default", "rope_theta": 90.0},
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return base | changes


CASES = [
    # As published: three layers with a window that rotate, one without that does not.
    HfCase("exaone_moe_basic", "exaone_moe", 231, _exaone_moe()),
    # Groups, two shared experts, kinds of layers and of feed-forward as lists, embeddings that are the head too.
    HfCase(
        "exaone_moe_groups",
        "exaone_moe",
        232,
        _exaone_moe(
            num_hidden_layers=3,
            n_group=4,
            topk_group=2,
            num_shared_experts=2,
            norm_topk_prob=False,
            routed_scaling_factor=1.5,
            mlp_layer_types=["sparse", "dense", "sparse"],
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            tie_word_embeddings=True,
            rms_norm_eps=0.01,
            rope_parameters={"rope_type": "linear", "rope_theta": 90.0, "factor": 3.0},
        ),
        dtype="float32",
        stacked_experts=True,
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
    # As published: names of tensors and keys that Ling has; every default that there is.
    HfCase(
        "sarvam_moe_basic",
        "sarvam_moe",
        311,
        _sarvam_moe(),
        published_keys=True,
        config_edits={"architectures": ["SarvamMoEForCausalLM"], "score_function": "sigmoid"}
        | {"num_experts": 8, "n_routed_experts": None, "num_shared_experts": 2, "n_shared_experts": None}
        | {"moe_router_enable_expert_bias": True, "use_qkv_bias": False, "attention_bias": None}
        | dict.fromkeys(("first_k_dense_replace", "n_group", "topk_group", "use_qk_norm", "partial_rotary_factor"))
        | dict.fromkeys(("routed_scaling_factor", "norm_topk_prob", "rope_theta", "rope_scaling", "rms_norm_eps")),
    ),
    # Names of transformers 5; groups; biases, no norms of queries and keys; half of each head rotates, stretched by YaRN; tied.
    HfCase(
        "sarvam_moe_groups",
        "sarvam_moe",
        312,
        _sarvam_moe(
            num_hidden_layers=2,
            first_k_dense_replace=0,
            num_key_value_heads=1,
            n_group=4,
            topk_group=2,
            n_shared_experts=1,
            norm_topk_prob=False,
            routed_scaling_factor=1.4,
            attention_bias=True,
            use_qk_norm=False,
            tie_word_embeddings=True,
            rms_norm_eps=0.01,
            rope_parameters=yarn(partial_rotary_factor=0.5),
        ),
        dtype="float32",
        stacked_experts=True,
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
            rope_parameters=yarn(),
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
