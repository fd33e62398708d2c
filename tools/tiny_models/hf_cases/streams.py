"""Gated residual streams, embeddings of n-grams, attention over chosen blocks: Qwen4-Exp."""

from typing import Any

from ..hf_case import HfCase


def _qwen4_exp(**changes: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=61,
        hidden_size=24,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=12,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=6,
        num_experts=7,
        num_experts_per_tok=3,
        hc_count=3,
        hc_lowrank=10,
        ple_layer_ids=[1, 3],
        heads_per_ngram=2,
        ngram_vocab_size_base=50,
        make_ngram_vocab_size_divisible_by=8,
        split_ngram_parts=5,
        indexer_n_heads=6,
        indexer_kv_heads=1,
        indexer_head_dim=10,
        indexer_budget=20,
        indexer_compress_ratio=4,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 900.0, "partial_rotary_factor": 0.5},
        eos_token_id=7,
    )
    return base | changes


CASES = [
    # Two layers with n-grams of two and three tokens, whose tables are in parts; an end among the tokens; an indexer
    # that leaves blocks out.
    HfCase("qwen4_exp_basic", "qwen4_exp_text", 81, _qwen4_exp(), config_edits={"layer_types": None, "full_attention_interval": 4}),
    # Tables of n-grams in FP8, with one scale for all parts of one.
    HfCase(
        "qwen4_exp_fp8",
        "qwen4_exp_text",
        83,
        _qwen4_exp(num_hidden_layers=2, layer_types=["linear_attention", "indexed_attention"], ple_layer_ids=[1]),
        whole_scales="ngram_embedding",
        published_keys=True,
    ),
    # Within a multimodal checkpoint.
    HfCase(
        "qwen4_exp_multimodal",
        "qwen4_exp_text",
        84,
        _qwen4_exp(num_hidden_layers=2, layer_types=["linear_attention", "indexed_attention"], ple_layer_ids=[1]),
        multimodal=True,
    ),
    # Full attention first, by its published name; embeddings wider than the hidden state, of pairs only; several ends; a
    # sigmoid for an output gate; blocks of seven tokens; scaled rotation; tied; stacked; an epsilon that shows.
    HfCase(
        "qwen4_exp_pairs",
        "qwen4_exp_text",
        82,
        _qwen4_exp(
            num_hidden_layers=3,
            layer_types=["indexed_attention", "linear_attention", "indexed_attention"],
            ple_layer_ids=[2],
            ple_embed_dim=30,
            ple_conv_kernel_size=3,
            ngram_size=2,
            heads_per_ngram=3,
            seed=99,
            split_ngram_parts=1,
            eos_token_id=[5, 3],
            output_gate_type="sigmoid",
            hc_count=2,
            indexer_n_heads=12,
            indexer_head_dim=12,
            indexer_budget=49,
            indexer_compress_ratio=7,
            norm_topk_prob=False,
            linear_conv_kernel_dim=3,
            tie_word_embeddings=True,
            rms_norm_eps=0.01,
            rope_parameters={
                "rope_type": "linear",
                "rope_theta": 777.0,
                "factor": 2.5,
                "partial_rotary_factor": 1.0,
            },
        ),
        dtype="float32",
        stacked_experts=True,
        config_edits={"layer_types": ["full_attention", "linear_attention", "full_attention"]},
    ),
]
