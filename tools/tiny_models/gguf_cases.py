"""The GGUF fixtures: one row a file.

The `SMALL` ones lie in the repository. The `WIDE` ones are the same families with rows of 256, so that
llama.cpp quantises every matrix the way it does for real models; they are some megabytes each and made on
demand.
"""

from dataclasses import dataclass, field
from typing import Any

from . import gguf_configs as configs


@dataclass(frozen=True)
class GgufCase:
    """One file with its golden."""

    name: str
    family: str
    seed: int
    config: dict[str, Any]
    # Name of a llama.cpp file type: F32, F16, Q8_0, Q4_K_M, …
    file_type: str
    # "bpe" (gpt2-style, pre-tokeniser qwen2) or "spm" (llama-style with scores and byte tokens).
    vocabulary: str = "bpe"
    # Tensor types that differ from the file type: regular expression over the tensor name → ggml type name.
    overrides: dict[str, str] = field(default_factory=dict)
    # Tensors in one file; more make a split file.
    tensors_per_split: int = 0
    n_tokens: int = 32
    # kv_b_proj as files had it before llama.cpp took its two parts apart.
    joint_kv_b: bool = False
    # Keep llama.cpp's logits whole, not only their distance from the golden.
    keep_peer_logits: bool = False
    # Made by llama.cpp's own converter from a Hugging Face folder, in BF16, Q8_0 or F32: for what `gguf_files` does not write.
    converted: bool = False
    # Keys of config.json that the converter wants besides those that transformers writes.
    published: dict[str, Any] = field(default_factory=dict)
    # Whether llama.cpp runs it.
    peer: bool = True
    # Run llama.cpp with flash attention, which some of its sparse attention needs.
    flash_attention: bool = False


# Every block format in one file.
_MIXED = {
    r"blk\.0\.ffn_gate_exps": "Q3_K",
    r"blk\.0\.ffn_up_exps": "Q4_0",
    r"blk\.0\.ffn_down_exps": "Q6_K",
    r"blk\.1\.ffn_gate_exps": "Q2_K",
    r"blk\.1\.ffn_up_exps": "Q3_K",
    r"blk\.1\.ffn_down_exps": "Q4_K",
    r"attn_q\.": "Q5_K",
    r"attn_k\.": "Q5_0",
    r"attn_v\.": "Q8_0",
    r"attn_output": "Q4_K",
    r"token_embd": "Q2_K",
}

# Codebooks, and blocks with minima; the encodings that llama.cpp makes without an importance matrix.
_CODEBOOKS = {
    r"blk\.0\.ffn_gate_exps": "IQ3_S",
    r"blk\.0\.ffn_up_exps": "IQ4_XS",
    r"blk\.0\.ffn_down_exps": "IQ4_XS",
    r"blk\.1\.ffn_gate_exps": "IQ3_S",
    r"blk\.1\.ffn_up_exps": "IQ4_NL",
    r"blk\.1\.ffn_down_exps": "Q5_1",
    r"attn_q\.": "IQ4_XS",
    r"attn_k\.": "Q4_1",
    r"attn_v\.": "Q5_1",
    r"attn_output": "IQ4_NL",
    r"token_embd": "Q4_1",
}

SMALL = [
    GgufCase("qwen3_moe_q8_0", "qwen3_moe", 51, configs.qwen3_moe(rms_norm_eps=0.01), "Q8_0"),
    # Rows of 256 everywhere but in ffn_down_exps and attn_output, which llama.cpp gives another type.
    GgufCase(
        "qwen3_moe_q4_k_m",
        "qwen3_moe",
        52,
        configs.qwen3_moe(hidden_size=256, moe_intermediate_size=64, head_dim=32, num_experts=4),
        "Q4_K_M",
    ),
    # Tied embeddings, every block format.
    GgufCase(
        "qwen3_moe_mixed",
        "qwen3_moe",
        53,
        configs.qwen3_moe(
            hidden_size=256,
            moe_intermediate_size=256,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=64,
            num_experts=3,
            tie_word_embeddings=True,
        ),
        "Q4_K_M",
        overrides=_MIXED,
    ),
    GgufCase(
        "qwen3_moe_codebooks",
        "qwen3_moe",
        91,
        configs.qwen3_moe(
            hidden_size=256,
            moe_intermediate_size=256,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=64,
            num_experts=3,
            tie_word_embeddings=True,
        ),
        "Q4_K_M",
        overrides=_CODEBOOKS,
    ),
    # YaRN past its original context, tied embeddings and top-1 in F16.
    GgufCase(
        "qwen3_moe_yarn_f16",
        "qwen3_moe",
        54,
        configs.qwen3_moe(
            hidden_size=32,
            moe_intermediate_size=20,
            head_dim=16,
            num_experts_per_tok=1,
            tie_word_embeddings=True,
            max_position_embeddings=80,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 5000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 20,
            },
        ),
        "F16",
    ),
    # Permuted q and k, llama3 frequency factors, a SentencePiece vocabulary, F32.
    GgufCase(
        "mixtral_llama3_f32",
        "mixtral",
        55,
        configs.mixtral(
            hidden_size=32,
            intermediate_size=20,
            head_dim=16,
            num_hidden_layers=1,
            num_local_experts=3,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        ),
        "F32",
        vocabulary="spm",
    ),
    GgufCase("mixtral_q8_0", "mixtral", 56, configs.mixtral(rms_norm_eps=0.02), "Q8_0", vocabulary="spm"),
    # Three files; linear rope scaling.
    GgufCase(
        "olmoe_split_f16",
        "olmoe",
        57,
        configs.olmoe(
            hidden_size=32,
            intermediate_size=20,
            rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
        ),
        "F16",
        tensors_per_split=11,
    ),
    # Groups of experts, correction bias, YaRN past its original context, kv_b in two parts.
    GgufCase(
        "deepseek_v3_q8_0",
        "deepseek_v3",
        58,
        configs.deepseek(n_group=3, topk_group=2),
        "Q8_0",
        n_tokens=96,
    ),
    # Softmax routing, kv_b in one piece.
    GgufCase(
        "deepseek_v2_joint_f16",
        "deepseek_v2",
        59,
        configs.deepseek(
            hidden_size=24,
            moe_intermediate_size=12,
            kv_lora_rank=24,
            qk_nope_head_dim=20,
            v_head_dim=28,
            norm_topk_prob=False,
            routed_scaling_factor=1.5,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
            },
        ),
        "F16",
        joint_kv_b=True,
        n_tokens=96,
    ),
    GgufCase("glm4_moe_q8_0", "glm4_moe", 58, configs.glm4_moe(), "Q8_0"),
    # Groups, and no query and key norms.
    GgufCase(
        "glm4_moe_f16",
        "glm4_moe",
        59,
        configs.glm4_moe(
            hidden_size=32, head_dim=16, intermediate_size=40, use_qk_norm=False, n_group=3, topk_group=2
        ),
        "F16",
    ),
    GgufCase("minimax_m2_q8_0", "minimax_m2", 60, configs.minimax_m2(), "Q8_0"),
    # Value heads grouped by key head.
    GgufCase(
        "qwen3_next_bf16",
        "qwen3_next",
        61,
        configs.hybrid(intermediate_size=24, norm_topk_prob=True),
        "BF16",
        n_tokens=96,
        converted=True,
    ),
    # Three value heads to a key head, which this architecture's files have in another order.
    GgufCase(
        "qwen3_5_moe_bf16",
        "qwen3_5_moe_text",
        62,
        configs.hybrid(
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            }
        ),
        "BF16",
        n_tokens=96,
        converted=True,
    ),
    # Tokens that an indexer leaves out, the choice shared by the next layer.
    GgufCase(
        "glm_dsa_bf16",
        "glm_moe_dsa",
        102,
        dict(
            vocab_size=297,
            hidden_size=32,
            intermediate_size=40,
            moe_intermediate_size=16,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            q_lora_rank=32,
            kv_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=16,
            v_head_dim=16,
            n_routed_experts=6,
            num_experts_per_tok=2,
            first_k_dense_replace=1,
            index_topk=19,
            index_n_heads=8,
            # What llama.cpp can rotate.
            index_head_dim=64,
            indexer_types=["full", "full", "shared"],
            max_position_embeddings=512,
            bos_token_id=None,
            eos_token_id=292,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
        "BF16",
        n_tokens=96,
        converted=True,
    ),
    # Blocks that an indexer leaves out; one added to norm weights; the activation's constants are llama.cpp's.
    GgufCase(
        "minimax_m3_bf16",
        "minimax_m3_vl",
        97,
        {
            "text_config": dict(
                vocab_size=297,
                hidden_size=32,
                intermediate_size=16,
                dense_intermediate_size=24,
                shared_intermediate_size=16,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=32,
                num_local_experts=5,
                num_experts_per_tok=2,
                layer_types=["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
                mlp_layer_types=["dense", "sparse", "sparse"],
                routed_scaling_factor=1.3,
                index_n_heads=2,
                index_head_dim=32,
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
        "BF16",
        n_tokens=96,
        converted=True,
        flash_attention=True,
        published={
            "text_config": {
                "rotary_dim": 16,
                "n_shared_experts": 1,
                "moe_layer_freq": [0, 1, 1],
                "scoring_func": "sigmoid",
                "sparse_attention_config": {
                    "sparse_num_index_heads": 2,
                    "sparse_index_dim": 32,
                    "sparse_block_size": 8,
                    "sparse_topk_blocks": 4,
                    "sparse_local_block": 1,
                },
            }
        },
    ),
    # Pools that an indexer leaves out, their choice shared by the next layer that sees tokens; linear attention; limits of
    # activations that show.
    GgufCase(
        "glm5_next_bf16",
        "glm5_next",
        98,
        {
            "text_config": dict(
                vocab_size=297,
                hidden_size=32,
                intermediate_size=40,
                moe_intermediate_size=16,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=4,
                q_lora_rank=32,
                kv_lora_rank=32,
                qk_nope_head_dim=16,
                v_head_dim=16,
                n_routed_experts=6,
                num_experts_per_tok=2,
                n_shared_experts=2,
                layer_types=["linear_attention", "indexed_attention", "indexed_attention", "linear_attention"],
                indexer_types=["full", "full", "shared", "full"],
                mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
                index_n_heads=8,
                index_head_dim=16,
                index_kpool=4,
                index_topk=20,
                linear_num_heads=4,
                linear_head_dim=16,
                linear_lower_bound=-2.0,
                hc_mult=4,
                hc_sinkhorn_iters=4,
                swiglu_limit=1.5,
                max_position_embeddings=512,
                pad_token_id=None,
                eos_token_id=292,
            ),
            "vision_config": dict(
                depth=1,
                hidden_size=8,
                num_heads=2,
                intermediate_size=8,
                out_hidden_size=32,
                projection_intermediate_size=8,
                patch_size=2,
                image_size=4,
            ),
        },
        "BF16",
        n_tokens=96,
        converted=True,
        published={
            "text_config": {
                "mla_use_nope": True,
                "first_k_dense_replace": 1,
                "linear_attn_config": {
                    "num_heads": 4,
                    "head_dim": 16,
                    "short_conv_kernel_size": 4,
                    "gate_lower_bound": -2.0,
                },
            }
        },
    ),
    # Its correction bias has no suffix; nothing says which layers are dense.
    GgufCase(
        "hy_v3_bf16",
        "hy_v3",
        63,
        configs.plain(
            head_dim=16,
            num_experts=6,
            num_shared_experts=2,
            router_scaling_factor=1.7,
            mlp_layer_types=["dense", "sparse"],
        ),
        "BF16",
        n_tokens=96,
        converted=True,
    ),
    # Its key of the shared experts' width is another number.
    GgufCase(
        "ernie4_5_moe_bf16",
        "ernie4_5_moe",
        64,
        configs.plain(
            intermediate_size=48,
            moe_num_experts=6,
            moe_k=2,
            moe_num_shared_experts=2,
            moe_layer_start_index=1,
            moe_layer_interval=1,
            tie_word_embeddings=False,
        ),
        "BF16",
        n_tokens=96,
        converted=True,
    ),
    # Not normalised, which is left out.
    GgufCase(
        "qwen2_moe_bf16",
        "qwen2_moe",
        65,
        configs.plain(num_experts=6, norm_topk_prob=False, shared_expert_intermediate_size=20, qkv_bias=True),
        "BF16",
        n_tokens=96,
        converted=True,
    ),
    # Not normalised, and scaled; one layer dense; llama.cpp wants as many key heads as query heads.
    GgufCase(
        "dots1_bf16",
        "dots1",
        66,
        configs.plain(
            head_dim=16,
            num_key_value_heads=4,
            n_routed_experts=6,
            n_shared_experts=2,
            first_k_dense_replace=1,
            norm_topk_prob=False,
            routed_scaling_factor=1.5,
            n_group=1,
            topk_group=1,
        ),
        "BF16",
        n_tokens=96,
        converted=True,
        published={"scoring_func": "sigmoid"},
    ),
    # An indexer that leaves tokens out; llama.cpp fails an assertion of its own on so small a model.
    GgufCase(
        "deepseek_v32_bf16",
        "deepseek_v32",
        76,
        configs.deepseek(
            hidden_size=24,
            moe_intermediate_size=12,
            q_lora_rank=24,
            n_group=1,
            topk_group=1,
            index_topk=20,
            index_n_heads=8,
            index_head_dim=32,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
        "BF16",
        n_tokens=96,
        converted=True,
        peer=False,
        published={"scoring_func": "sigmoid"},
    ),
    # A layer that does not rotate; dense layers in turn.
    GgufCase("llama4_bf16", "llama4_text", 77, configs.llama4(), "BF16", n_tokens=96, converted=True),
    # As DeepSeek-V3 to llama.cpp.
    GgufCase(
        "glm4_moe_lite_bf16",
        "glm4_moe_lite",
        67,
        configs.deepseek(
            hidden_size=24,
            moe_intermediate_size=12,
            mlp_layer_types=["dense", "sparse"],
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
        "BF16",
        n_tokens=96,
        converted=True,
    ),
    # As GLM-4.5 to llama.cpp.
    GgufCase(
        "solar_open_bf16",
        "solar_open",
        68,
        configs.plain(
            head_dim=16,
            n_routed_experts=6,
            n_shared_experts=2,
            first_k_dense_replace=0,
            routed_scaling_factor=1.5,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        ),
        "BF16",
        n_tokens=96,
        converted=True,
    ),
    # llama.cpp wants as many key heads as query heads, and a head of its own.
    # A decay for each channel, convolutions apart; key heads say which layers are linear.
    GgufCase("kimi_linear_bf16", "kimi_linear", 69, configs.kimi_linear(), "BF16", n_tokens=101, converted=True),
    GgufCase(
        "kimi_linear_q8_0",
        "kimi_linear",
        70,
        configs.kimi_linear(hidden_size=64, intermediate_size=64, moe_intermediate_size=32, linear_head_dim=32),
        "Q8_0",
        n_tokens=96,
        converted=True,
    ),
    # Key heads by layer; sinks where layers slide.
    GgufCase("mimo_v2_flash_bf16", "mimo_v2_flash", 71, configs.mimo_v2_flash(), "BF16", n_tokens=101, converted=True),
    GgufCase(
        "mimo_v2_flash_q8_0",
        "mimo_v2_flash",
        72,
        configs.mimo_v2_flash(
            hidden_size=64,
            intermediate_size=64,
            moe_intermediate_size=32,
            v_head_dim=32,
            n_group=3,
            topk_group=2,
            attention_value_scale=None,
        ),
        "Q8_0",
        n_tokens=96,
        converted=True,
    ),
    GgufCase("mistral4_q8_0", "mistral4", 73, configs.mistral4(hidden_size=64), "Q8_0", n_tokens=96, converted=True),
    # Experts in MXFP4 as published.
    GgufCase("deepseek_v4_mxfp4", "deepseek_v4", 74, configs.deepseek_v4(), "Q8_0", n_tokens=140, converted=True),
    # Three value heads to a key head, in another order than in transformers; hashes as the file says.
    GgufCase("qwen4_exp_bf16", "qwen4_exp_text", 75, configs.qwen4_exp(), "BF16", n_tokens=96, converted=True),
    # Neighbouring channels rotate; layers share a choice of tokens.
    GgufCase(
        "hy_v4_bf16",
        "hy_v4",
        103,
        configs.hy_v4(),
        "BF16",
        n_tokens=96,
        converted=True,
        flash_attention=True,
        published={"gated_mla": True},
    ),
    GgufCase("nemotron_h_bf16", "nemotron_h", 69, configs.nemotron_h(), "BF16", n_tokens=96, converted=True),
    # Experts on fewer channels.
    GgufCase(
        "nemotron_h_latent_bf16",
        "nemotron_h",
        70,
        configs.nemotron_h(moe_latent_size=24, num_key_value_heads=1, conv_kernel=3),
        "BF16",
        n_tokens=96,
        converted=True,
    ),
    # Divisors of frequencies for full layers only; limits of SwiGLU.
    GgufCase("step3p5_bf16", "step3p7", 71, configs.step3p7(), "BF16", n_tokens=96, converted=True),
    # Factors everywhere; a shared expert.
    GgufCase(
        "granitemoe_bf16",
        "granitemoeshared",
        76,
        configs.plain(
            moe_intermediate_size=None,
            num_local_experts=6,
            shared_intermediate_size=28,
            embedding_multiplier=3.0,
            attention_multiplier=0.2,
            residual_multiplier=0.6,
            logits_scaling=1.5,
            tie_word_embeddings=True,
        ),
        "BF16",
        n_tokens=96,
        converted=True,
    ),
    # Sigmoid scores, an averaged shared expert, a dense first layer that rotates; layer norms.
    GgufCase(
        "cohere2moe_bf16",
        "cohere2_moe",
        77,
        configs.cohere2_moe(),
        "BF16",
        n_tokens=96,
        converted=True,
        peer=False,
    ),
    # A base for layers with a window, and one for the others, which are scaled.
    GgufCase("mellum_bf16", "mellum", 78, configs.mellum(), "BF16", n_tokens=96, converted=True, peer=False),
    # A gate a head; every fourth layer from the first on sees everything, and has another number of heads and a rotation of
    # half of each.
    GgufCase("laguna_bf16", "laguna", 79, configs.laguna(), "BF16", n_tokens=96, converted=True, peer=False),
    # A gate a channel, no windows.
    GgufCase(
        "laguna_elements_q8_0",
        "laguna",
        80,
        configs.laguna() | configs.LAGUNA_ELEMENTS,
        "Q8_0",
        n_tokens=48,
        converted=True,
        peer=False,
    ),
    # Layer norms without biases, queries, keys and values in one; experts whose down is transposed elsewhere.
    GgufCase("dbrx_bf16", "dbrx", 84, configs.dbrx(), "BF16", n_tokens=48, converted=True, peer=False),
    # Layers of Mamba, of attention by their key heads, dense ones by the lack of a router.
    GgufCase("jamba_bf16", "jamba", 85, configs.jamba(), "BF16", n_tokens=48, converted=True, peer=False),
    # llama.cpp weighs experts by a softmax, not as the model does.
    GgufCase("phimoe_q8_0", "phimoe", 81, configs.phimoe(), "Q8_0", n_tokens=48, converted=True, peer=False),
    GgufCase("gemma4_bf16", "gemma4_text", 82, configs.gemma4(), "BF16", n_tokens=96, converted=True, peer=False),
    GgufCase(
        "afmoe_bf16",
        "afmoe",
        83,
        configs.afmoe(),
        "BF16",
        n_tokens=96,
        converted=True,
        published={"route_norm": True},
        peer=False,
    ),
    GgufCase("exaone_moe_bf16", "exaone_moe", 84, configs.exaone_moe(), "BF16", n_tokens=96, converted=True, peer=False),
    GgufCase(
        "hunyuan_bf16",
        "hunyuan_v1_moe",
        85,
        configs.hunyuan_v1_moe(),
        "BF16",
        converted=True,
        published={"moe_intermediate_size": [16, 16], "moe_topk": [2, 2], "num_shared_expert": [1, 1]},
        peer=False,
    ),
    GgufCase(
        "granitemoehybrid_bf16",
        "granitemoehybrid",
        86,
        configs.granitemoehybrid(),
        "BF16",
        n_tokens=48,
        converted=True,
        published={"layer_types": ["mamba", "attention", "mamba", "mamba"]},
        peer=False,
    ),
    GgufCase("lfm2_moe_bf16", "lfm2_moe", 87, configs.lfm2_moe(), "BF16", n_tokens=48, converted=True, peer=False),
    # Windows, sinks, layers that do not rotate, gate and up in one.
    GgufCase(
        "granitemoe_swa_bf16",
        "granitemoe_swa",
        88,
        configs.granitemoe_swa(),
        "BF16",
        n_tokens=48,
        converted=True,
        published={"no_rope_layers": [0, 1, 1, 1, 0]},
    ),
    # Rates of decays without their sign; gates of heads.
    GgufCase(
        "bailing_hybrid_bf16",
        "bailing_hybrid",
        89,
        configs.bailing_hybrid(),
        "BF16",
        n_tokens=48,
        converted=True,
        published=configs.BAILING_HYBRID,
    ),
    # As Ling 2.0, with heads that rotate whole and biases around zero.
    GgufCase(
        "sarvam_moe_bf16",
        "sarvam_moe",
        92,
        configs.sarvam_moe(),
        "BF16",
        n_tokens=48,
        converted=True,
        published=configs.SARVAM_MOE,
    ),
    # One factor; kinds of layers by default.
    GgufCase(
        "minimax_f32",
        "minimax",
        90,
        configs.minimax(),
        "F32",
        n_tokens=48,
        converted=True,
        published=configs.MINIMAX,
    ),
]


_NEMOTRON_WIDE = dict(
    layers_block_type=["linear_attention", "moe", "linear_attention", "moe"]
    + ["full_attention", "moe", "linear_attention", "moe"],
    num_attention_heads=8,
    head_dim=64,
    ssm_state_size=64,
    mamba_num_heads=16,
    mamba_head_dim=32,
    n_groups=4,
    n_routed_experts=16,
    moe_intermediate_size=256,
    moe_shared_expert_intermediate_size=512,
    num_experts_per_tok=4,
)


def _wide() -> list[GgufCase]:
    wide = dict(hidden_size=256)
    families = [
        ("qwen3_moe", "bpe", configs.qwen3_moe(**wide, moe_intermediate_size=256, head_dim=128, num_experts=6)),
        ("mixtral", "spm", configs.mixtral(**wide, intermediate_size=256, num_local_experts=4)),
        ("olmoe", "bpe", configs.olmoe(**wide, intermediate_size=256, num_experts=5)),
    ]
    encodings: list[tuple[str, str, dict[str, str]]] = [
        ("f32", "F32", {}),
        ("f16", "F16", {}),
        ("q8_0", "Q8_0", {}),
        ("q4_0", "Q4_0", {}),
        ("q4_k_m", "Q4_K_M", {}),
        ("q6_k", "Q6_K", {}),
        ("mixed", "Q4_K_M", _MIXED),
    ]
    grown = [
        GgufCase(
            f"wide_{family}_{suffix}",
            family,
            71 + i,
            config,
            file_type,
            vocabulary,
            overrides,
            n_tokens=256,
            keep_peer_logits=True,
        )
        for i, (family, vocabulary, config) in enumerate(families)
        for suffix, file_type, overrides in encodings
    ]
    converted = [
        GgufCase(name, family, seed, config, "Q8_0", n_tokens=256, keep_peer_logits=True, converted=True)
        for name, family, seed, config in [
            ("wide_gpt_oss_mxfp4", "gpt_oss", 81, configs.gpt_oss(**wide, intermediate_size=256)),
            ("wide_gpt_oss_deep_mxfp4", "gpt_oss", 82, configs.gpt_oss(num_hidden_layers=8, intermediate_size=64)),
            ("wide_nemotron_h_q8_0", "nemotron_h", 83, configs.nemotron_h(**wide, **_NEMOTRON_WIDE)),
        ]
    ]
    return grown + converted


WIDE = _wide()
