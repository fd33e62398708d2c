"""The MLX fixtures: affine-quantised folders as mlx-lm writes them, one row a folder.

`SMALL` ones lie in the repository, `WIDE` ones are made on demand.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Affine:
    """Affine quantisation of one module."""

    bits: int
    group_size: int


@dataclass(frozen=True)
class MlxCase:
    """One quantised folder with its golden."""

    name: str
    family: str
    seed: int
    config: dict[str, Any]
    default: Affine
    # Element type of scales, biases and unquantised tensors.
    dtype: str = "bfloat16"
    # Regular expression over the module path → its own quantisation, or None to leave it unquantised. The
    # first match counts; modules that none matches follow mlx-lm's own rule for the family.
    overrides: dict[str, Affine | None] = field(default_factory=dict)
    # Keys of config.json that mlx-lm wants besides those that transformers writes.
    published: dict[str, Any] = field(default_factory=dict)
    n_tokens: int = 32
    keep_peer_logits: bool = False


def _qwen3_moe(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=297,
        hidden_size=128,
        intermediate_size=192,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=48,
        num_experts=5,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        bos_token_id=None,
        eos_token_id=292,
    )
    return base | changes


def _mixtral(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=297,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        num_local_experts=3,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        sliding_window=None,
        bos_token_id=None,
        eos_token_id=292,
    )
    return base | changes


def _olmoe(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=297,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=6,
        num_experts_per_tok=3,
        norm_topk_prob=False,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        pad_token_id=290,
        bos_token_id=None,
        eos_token_id=292,
    )
    return base | changes


def _qwen3_next(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=297,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_hidden_layers=2,
        full_attention_interval=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=24,
        linear_value_head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
        bos_token_id=None,
        eos_token_id=292,
    )
    return base | changes


def _deepseek(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=297,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=32,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_shared_experts=1,
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


def _qwen3_5_moe(**changes: Any) -> dict[str, Any]:
    base = _qwen3_next(**changes)
    del base["intermediate_size"]
    return base


def _glm4_moe(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=297,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
        # mlx-lm zeroes the scores of other groups, which is not what transformers does.
        n_group=1,
        attention_bias=True,
        use_qk_norm=True,
        num_mtp_layers=0,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        bos_token_id=None,
        eos_token_id=292,
    )
    return base | changes


def _kimi_linear(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=297,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        linear_head_dim=32,
        linear_num_heads=3,
        num_experts=5,
        num_experts_per_tok=2,
        n_shared_experts=1,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        mlp_layer_types=["dense", "sparse", "sparse"],
        max_position_embeddings=512,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=292,
    )
    return base | changes


def _mimo_v2_flash(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=297,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=24,
        v_head_dim=16,
        n_routed_experts=5,
        num_experts_per_tok=2,
        sliding_window=20,
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


def _minimax_m2(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=297,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        bos_token_id=None,
        eos_token_id=292,
    )
    return base | changes


def _nemotron_h(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=297,
        hidden_size=64,
        layers_block_type=["linear_attention", "moe", "mlp", "full_attention", "linear_attention", "moe"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        intermediate_size=96,
        ssm_state_size=24,
        mamba_num_heads=6,
        mamba_head_dim=16,
        n_groups=3,
        chunk_size=16,
        n_routed_experts=5,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=64,
        moe_latent_size=32,
        num_experts_per_tok=2,
        routed_scaling_factor=2.5,
        # mlx-lm has another key for it.
        time_step_min=1e-9,
        rescale_prenorm_residual=False,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=292,
    )
    return base | changes


def _step3p7(**changes: Any) -> dict[str, Any]:
    text = dict(
        vocab_size=297,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_attention_groups=2,
        attention_other_setting={"num_attention_heads": 6, "num_attention_groups": 2},
        head_dim=32,
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
        moe_intermediate_size=32,
        share_expert_dim=32,
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


# Every width, every group size, and a projection left as it is.
_MIXED: dict[str, Affine | None] = {
    r"layers\.0\..*switch_mlp\.gate_proj": Affine(3, 32),
    r"layers\.0\..*switch_mlp\.up_proj": Affine(2, 32),
    r"layers\.0\..*switch_mlp\.down_proj": Affine(6, 64),
    r"layers\.1\..*switch_mlp\.gate_proj": Affine(4, 128),
    r"layers\.1\..*switch_mlp\.up_proj": Affine(8, 64),
    r"layers\.1\..*switch_mlp\.down_proj": Affine(5, 32),
    r"q_proj": Affine(6, 128),
    r"k_proj": Affine(8, 32),
    r"layers\.1\..*v_proj": None,
    r"lm_head": Affine(5, 128),
    r"embed_tokens": Affine(3, 64),
}

SMALL = [
    # A dense first layer; the router at 8 bits, which is mlx-lm's own rule for this family.
    MlxCase(
        "qwen3_moe_4bit_dense",
        "qwen3_moe",
        81,
        _qwen3_moe(
            hidden_size=64,
            intermediate_size=64,
            moe_intermediate_size=64,
            head_dim=32,
            mlp_only_layers=[0],
            num_experts=6,
            rms_norm_eps=0.01,
        ),
        Affine(4, 64),
    ),
    MlxCase("qwen3_moe_mixed", "qwen3_moe", 82, _qwen3_moe(num_experts=4), Affine(4, 64), overrides=_MIXED),
    # Scales and biases in f16; an intermediate size that no group of 64 divides; the router at 4 bits.
    MlxCase("mixtral_4bit", "mixtral", 83, _mixtral(), Affine(4, 32), dtype="float16"),
    # Rows of an interleaved projection of linear attention, taken apart in quantised form; router and shared gate at
    # 8 bits, which is mlx-lm's own rule; norms stored around one.
    MlxCase("qwen3_next_4bit", "qwen3_next", 85, _qwen3_next(), Affine(4, 32), n_tokens=101),
    # Separate projections, one level down as in multimodal checkpoints; f16.
    MlxCase(
        "qwen3_5_moe_4bit",
        "qwen3_5_moe_text",
        86,
        _qwen3_5_moe(tie_word_embeddings=True),
        Affine(4, 32),
        dtype="float16",
        n_tokens=101,
    ),
    # Tied quantised embeddings.
    # Factors everywhere; the router, o, down and the head at 8 bits, which is mlx-lm's own rule for this family.
    MlxCase(
        "granitemoe_4bit",
        "granitemoe",
        111,
        dict(
            vocab_size=297,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=5,
            num_experts_per_tok=2,
            embedding_multiplier=3.0,
            attention_multiplier=0.2,
            residual_multiplier=0.6,
            logits_scaling=1.5,
            max_position_embeddings=512,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            bos_token_id=None,
            eos_token_id=292,
        ),
        Affine(4, 32),
    ),
    MlxCase("olmoe_8bit_tied", "olmoe", 84, _olmoe(tie_word_embeddings=True, num_experts=4), Affine(8, 64)),
    # kv_b_proj as embed_q and unembed_out, with widths of their own; groups of experts; a correction bias.
    MlxCase(
        "deepseek_v3_4bit",
        "deepseek_v3",
        85,
        _deepseek(n_group=3, topk_group=2),
        Affine(4, 32),
        overrides={r"embed_q": Affine(8, 32), r"layers\.1\..*unembed_out": Affine(6, 64)},
        n_tokens=96,
    ),
    # kv_b_proj in one piece; mscale other than mscale_all_dim.
    MlxCase(
        "deepseek_v2_8bit",
        "deepseek_v2",
        86,
        _deepseek(
            q_lora_rank=None,
            n_group=1,
            topk_group=1,
            norm_topk_prob=False,
            routed_scaling_factor=1.5,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 5000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "mscale": 0.9,
                "mscale_all_dim": 0.5,
            },
        ),
        Affine(8, 32),
        dtype="float16",
        n_tokens=96,
    ),
    # The router in full precision, which is mlx-lm's own rule for this family.
    MlxCase("glm4_moe_4bit", "glm4_moe", 85, _glm4_moe(), Affine(4, 32)),
    # The router at 8 bits.
    MlxCase("minimax_m2_4bit", "minimax_m2", 86, _minimax_m2(), Affine(4, 32)),
    # Within the multimodal model; more tokens than blocks that are chosen have.
    MlxCase(
        "minimax_m3_4bit",
        "minimax_m3_vl",
        99,
        {
            "text_config": dict(
                vocab_size=297,
                hidden_size=64,
                intermediate_size=32,
                dense_intermediate_size=64,
                shared_intermediate_size=32,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                num_local_experts=5,
                num_experts_per_tok=2,
                layer_types=["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
                mlp_layer_types=["dense", "sparse", "sparse"],
                index_n_heads=2,
                index_head_dim=16,
                index_block_size=8,
                index_topk_blocks=4,
                max_position_embeddings=512,
                bos_token_id=None,
                eos_token_id=292,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            ),
            "vision_config": dict(
                hidden_size=8,
                intermediate_size=8,
                num_hidden_layers=1,
                num_attention_heads=1,
                image_size=4,
                patch_size=2,
            ),
            "projector_hidden_size": 8,
        },
        Affine(4, 32),
        n_tokens=96,
        published={"text_config": {"rotary_dim": 8}},
    ),
    # A gate a head, other rotations and more heads where there is a window; the router at 8 bits, one level down.
    MlxCase(
        "laguna_4bit",
        "laguna",
        100,
        dict(
            vocab_size=297,
            hidden_size=64,
            intermediate_size=64,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_attention_heads_per_layer=[2, 4, 2],
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=512,
            num_experts=5,
            num_experts_per_tok=2,
            moe_routed_scaling_factor=2.5,
            moe_router_logit_softcapping=2.0,
            sliding_window=11,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            rope_parameters={
                "full_attention": {"rope_type": "default", "rope_theta": 900.0, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
            },
            bos_token_id=None,
            eos_token_id=292,
        ),
        Affine(4, 32),
        n_tokens=40,
    ),
    # Layer norms and biases; SparseMixer.
    MlxCase(
        "phimoe_4bit",
        "phimoe",
        101,
        dict(
            vocab_size=297,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            num_local_experts=5,
            router_jitter_noise=0.1,
            attention_bias=True,
            lm_head_bias=True,
            sliding_window=None,
            rope_parameters={"rope_type": "default", "rope_theta": 900.0},
            bos_token_id=None,
            eos_token_id=292,
        ),
        Affine(4, 32),
        dtype="float16",
        n_tokens=40,
        published={"rope_theta": 900.0, "rope_scaling": None},
    ),
    # Experts a module each; the base of rotations among the keys of attention.
    MlxCase(
        "dbrx_4bit",
        "dbrx",
        102,
        dict(
            vocab_size=297,
            d_model=64,
            n_heads=4,
            n_layers=2,
            max_seq_len=512,
            attn_config=dict(clip_qkv=0.9, kv_n_heads=2, rope_theta=90.0),
            ffn_config=dict(ffn_hidden_size=32, moe_num_experts=4, moe_top_k=2),
            rope_parameters={"rope_type": "default", "rope_theta": 90.0},
            eos_token_id=292,
        ),
        Affine(4, 32),
        n_tokens=40,
    ),
    # Experts that return what they take; mlx-lm has another epsilon in norms of latents.
    MlxCase(
        "longcat_flash_4bit",
        "longcat_flash",
        104,
        dict(
            vocab_size=297,
            hidden_size=64,
            ffn_hidden_size=64,
            expert_ffn_hidden_size=32,
            num_layers=1,
            num_attention_heads=2,
            q_lora_rank=32,
            kv_lora_rank=32,
            qk_nope_head_dim=32,
            qk_rope_head_dim=8,
            v_head_dim=32,
            head_dim=8,
            n_routed_experts=4,
            zero_expert_num=3,
            moe_topk=2,
            routed_scaling_factor=1.7,
            max_position_embeddings=512,
            rope_parameters={"rope_type": "default", "rope_theta": 900.0},
            bos_token_id=None,
            eos_token_id=292,
        ),
        Affine(4, 32),
        published={"attention_method": "MLA", "zero_expert_type": "identity", "mla_scale_q_lora": True, "mla_scale_kv_lora": True},
        n_tokens=40,
    ),
    # Layers of Mamba; mlx-lm has weights of chosen experts add up to one, as those of all do.
    MlxCase(
        "jamba_4bit",
        "jamba",
        103,
        dict(
            vocab_size=297,
            hidden_size=64,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            num_experts=3,
            num_experts_per_tok=3,
            attn_layer_period=2,
            attn_layer_offset=1,
            mamba_d_state=8,
            mamba_dt_rank=32,
            mamba_expand=1,
            bos_token_id=None,
            pad_token_id=0,
            eos_token_id=292,
        ),
        Affine(4, 32),
        n_tokens=40,
    ),
    # Convolutions apart, the correction bias beside the router, latent attention in two parts.
    MlxCase("kimi_linear_4bit", "kimi_linear", 87, _kimi_linear(), Affine(4, 32), n_tokens=101),
    # Sinks; the window of configurations leaves out the newest token.
    MlxCase("mimo_v2_flash_6bit", "mimo_v2_flash", 88, _mimo_v2_flash(), Affine(6, 32), n_tokens=96),
    # Within a multimodal checkpoint; queries that grow; f16.
    MlxCase(
        "mistral4_4bit",
        "mistral4",
        89,
        _deepseek(
            n_group=1,
            topk_group=1,
            first_k_dense_replace=0,
            routed_scaling_factor=1.5,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 5000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 8.0,
                "beta_slow": 0.5,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
            },
        ),
        Affine(4, 32),
        dtype="float16",
        n_tokens=96,
    ),
    # Projections of Mamba-2, taken apart in quantised form; experts without a gate, on fewer channels.
    MlxCase("nemotron_h_4bit", "nemotron_h", 87, _nemotron_h(), Affine(4, 32), n_tokens=101),
    # Routers at 8 bits, which is mlx-lm's own rule for this family; norms stored around one.
    MlxCase("step3p5_4bit", "step3p7", 88, _step3p7(), Affine(4, 32), n_tokens=101),
]


def _wide() -> list[MlxCase]:
    families = [
        ("qwen3_moe", _qwen3_moe(hidden_size=256, moe_intermediate_size=256, head_dim=128, num_experts=6)),
        ("mixtral", _mixtral(hidden_size=256, intermediate_size=256, num_local_experts=4, head_dim=64)),
        ("olmoe", _olmoe(hidden_size=256, intermediate_size=256)),
    ]
    encodings: list[tuple[str, Affine, dict[str, Affine | None]]] = [
        ("4bit", Affine(4, 64), {}),
        ("8bit", Affine(8, 64), {}),
        ("mixed", Affine(4, 64), _MIXED),
    ]
    return [
        MlxCase(
            f"wide_{family}_{suffix}",
            family,
            91 + i,
            config,
            default,
            overrides=overrides,
            n_tokens=256,
            keep_peer_logits=True,
        )
        for i, (family, config) in enumerate(families)
        for suffix, default, overrides in encodings
    ]


WIDE = _wide()
