"""Multi-head latent attention: DeepSeek, Kimi, GLM-4.7-Flash, Sarvam-105B."""

from typing import Any

from ..hf_case import HfCase
from .shapes import yarn, yarn_scaling


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


def _longcat_flash(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=61,
        hidden_size=24,
        ffn_hidden_size=20,
        expert_ffn_hidden_size=8,
        num_layers=2,
        num_attention_heads=4,
        q_lora_rank=18,
        kv_lora_rank=16,
        qk_nope_head_dim=12,
        qk_rope_head_dim=6,
        v_head_dim=10,
        head_dim=6,
        n_routed_experts=5,
        zero_expert_num=4,
        moe_topk=3,
        routed_scaling_factor=1.7,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 900.0},
        bos_token_id=0,
        eos_token_id=60,
    )
    return base | changes


CASES = [
    # Query latent; groups of experts; YaRN past its original context with mscale other than mscale_all_dim; a
    # dense first layer; an epsilon that shows, as the norms of latents do not use it; published key names.
    HfCase(
        "deepseek_v3_basic",
        "deepseek_v3",
        34,
        _deepseek(
            max_position_embeddings=128,
            rms_norm_eps=0.01,
            rope_parameters=yarn(mscale=1.0, mscale_all_dim=0.7, beta_fast=8.0, beta_slow=0.5),
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
            rope_parameters=yarn(mscale=0.707, mscale_all_dim=0.707),
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
            rope_parameters=yarn(factor=6.0, truncate=False),
        ),
        dtype="float16",
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
    # As published: another name for YaRN, widths of heads that nothing is made of, keys that Ling has; every default that there is.
    HfCase(
        "sarvam_mla_basic",
        "sarvam_mla",
        313,
        _deepseek(
            q_lora_rank=None,
            n_group=1,
            topk_group=1,
            max_position_embeddings=128,
            rope_parameters=yarn(mscale=1.0, mscale_all_dim=0.7),
        ),
        published_keys=True,
        config_edits={"architectures": ["SarvamMLAForCausalLM"], "head_dim": 24, "q_head_dim": 20}
        | {"num_experts": 8, "n_routed_experts": None, "num_shared_experts": 2, "n_shared_experts": None}
        | {"rope_scaling": {"type": "deepseek_yarn"} | yarn_scaling(mscale=1.0, mscale_all_dim=0.7)}
        | dict.fromkeys(("first_k_dense_replace", "n_group", "topk_group", "q_lora_rank", "qk_head_dim"))
        | dict.fromkeys(("routed_scaling_factor", "norm_topk_prob", "rope_interleave", "rms_norm_eps")),
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
            rope_parameters=yarn(mscale=1.0, mscale_all_dim=1.0),
        ),
    ),
    # An indexer that leaves keys out; YaRN on its channels too.
    HfCase(
        "deepseek_v32_sparse",
        "deepseek_v32",
        110,
        _deepseek(
            num_hidden_layers=2,
            mlp_layer_types=["dense", "sparse"],
            index_topk=19,
            index_n_heads=9,
            index_head_dim=14,
            rope_parameters=yarn(mscale=1.0, mscale_all_dim=0.7),
        ),
    ),
    # Layers that see what the one before them chose, by the keys of published configurations; neighbouring channels of the
    # index form pairs.
    HfCase(
        "glm_moe_dsa_sparse",
        "glm_moe_dsa",
        120,
        _deepseek(
            num_hidden_layers=4,
            index_topk=19,
            index_n_heads=9,
            index_head_dim=8,
            n_group=1,
            topk_group=1,
            rms_norm_eps=0.01,
            index_topk_pattern="FSFS",
        ),
        config_edits={"indexer_types": None, "mlp_layer_types": None, "index_topk_pattern": "FSFS"},
    ),
    # Softmax routing within groups; queries that grow with their position; YaRN; no dense layer.
    HfCase(
        "mistral4_basic",
        "mistral4",
        87,
        _deepseek(
            n_shared_experts=1,
            first_k_dense_replace=0,
            rope_parameters=yarn(
                mscale=1.0,
                mscale_all_dim=1.0,
                beta_fast=8.0,
                beta_slow=0.5,
                llama_4_scaling_beta=0.3,
            ),
        ),
    ),
    # Half-split rotation, queries straight from the hidden state, a dense layer, no groups; tied; stacked.
    HfCase(
        "mistral4_plain",
        "mistral4",
        88,
        _deepseek(
            q_lora_rank=None,
            n_group=1,
            topk_group=1,
            rope_interleave=False,
            norm_topk_prob=False,
            routed_scaling_factor=1.6,
            tie_word_embeddings=True,
            rope_parameters=yarn(original_max_position_embeddings=9, llama_4_scaling_beta=0.2),
        ),
        dtype="float32",
        stacked_experts=True,
    ),
    # FP8 with one scale a matrix, one each for stacked experts, as published.
    HfCase(
        "mistral4_fp8",
        "mistral4",
        90,
        _deepseek(
            num_hidden_layers=2,
            n_shared_experts=1,
            first_k_dense_replace=0,
            n_group=1,
            topk_group=1,
            rope_parameters=yarn(mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1),
        ),
        stacked_experts=True,
        whole_scales="_proj",
    ),
    # Two attentions and MLPs a layer, experts that return what they take; as published, these have no tensors.
    HfCase(
        "longcat_flash_basic",
        "longcat_flash",
        301,
        _longcat_flash(),
        published_keys=True,
        config_edits={"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity"}
        | {"router_bias": False, "attention_method": "MLA"},
    ),
    # More experts of that kind than of others, all of one token's at times; YaRN, biases, embeddings that are the head too.
    HfCase(
        "longcat_flash_zeros",
        "longcat_flash",
        302,
        _longcat_flash(
            num_layers=1,
            n_routed_experts=2,
            zero_expert_num=7,
            moe_topk=2,
            attention_bias=True,
            tie_word_embeddings=True,
            rms_norm_eps=0.01,
            rope_parameters=yarn(mscale=1.0, mscale_all_dim=0.7),
        ),
        dtype="float32",
    ),
]
