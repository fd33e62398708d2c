"""Attention over entries that stand for older tokens, residual streams, experts by token: DeepSeek-V4."""

from typing import Any

from ..hf_case import HfCase
from .shapes import yarn


def _deepseek(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=61,
        hidden_size=24,
        moe_intermediate_size=8,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=14,
        # 6 channels rotate.
        partial_rotary_factor=0.45,
        q_lora_rank=16,
        n_routed_experts=7,
        num_experts_per_tok=3,
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        mlp_layer_types=["hash_moe", "moe", "moe"],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 11},
        hc_mult=3,
        hc_sinkhorn_iters=4,
        sliding_window=9,
        swiglu_limit=1.5,
        o_groups=2,
        o_lora_rank=10,
        index_n_heads=12,
        index_head_dim=10,
        index_topk=5,
        max_position_embeddings=512,
        eos_token_id=60,
        rope_parameters={
            "main": {"rope_type": "default", "rope_theta": 900.0, "partial_rotary_factor": 0.45},
            "compress": yarn(partial_rotary_factor=0.45, attention_factor=1.0),
        },
    )
    return base | changes


CASES = [
    # All kinds of layers; an indexer that leaves entries out; names of modules as published.
    HfCase("deepseek_v4_basic", "deepseek_v4", 70, _deepseek()),
    # As published: keys, experts in FP4, other matrices in FP8 with powers of two for scales, of which one ends within
    # the groups of the output projection; entries of 4 and 128 tokens.
    HfCase(
        "deepseek_v4_published",
        "deepseek_v4",
        72,
        _deepseek(
            hidden_size=32,
            moe_intermediate_size=32,
            q_lora_rank=32,
            head_dim=34,
            partial_rotary_factor=0.48,
            o_lora_rank=70,
            compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
            index_head_dim=20,
            rope_parameters={
                "main": {"rope_type": "default", "rope_theta": 900.0, "partial_rotary_factor": 0.48},
                "compress": yarn(partial_rotary_factor=0.48, attention_factor=1.0),
            },
        ),
        published_keys=True,
        fp4="all",
        n_tokens=140,
    ),
    # Names and stacked experts as transformers has them; entries of every token; other scores; a tied head; one head a
    # group; an epsilon that shows.
    HfCase(
        "deepseek_v4_stacked",
        "deepseek_v4",
        71,
        _deepseek(
            num_hidden_layers=4,
            layer_types=[
                "heavily_compressed_attention",
                "compressed_sparse_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
            ],
            mlp_layer_types=["moe", "hash_moe", "moe", "moe"],
            compress_rates={"compressed_sparse_attention": 1, "heavily_compressed_attention": 128},
            hc_mult=2,
            hc_sinkhorn_iters=1,
            index_topk=101,
            scoring_func="sigmoid",
            o_groups=4,
            rms_norm_eps=0.01,
            tie_word_embeddings=True,
        ),
        dtype="float16",
        stacked_experts=True,
    ),
]
