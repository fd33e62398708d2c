"""DeepSeek-V4.1 as published: configurations and weights."""

import random
from typing import Any

import numpy as np

from .mlx_lm_weights import Weights


def _config(**changes: Any) -> dict[str, Any]:
    base = dict(
        model_type="deepseek_v41",
        vocab_size=59,
        hidden_size=18,
        num_hidden_layers=5,
        num_attention_heads=4,
        head_dim=16,
        q_lora_rank=18,
        qk_rope_head_dim=6,
        o_groups=2,
        o_lora_rank=10,
        moe_intermediate_size=6,
        n_routed_experts=5,
        num_experts_per_tok=2,
        scoring_func="sqrtsoftplus",
        gate_temp=1.0,
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
        swiglu_limit=10.0,
        rms_norm_eps=1e-20,
        sliding_window=11,
        # A window; entries of one token; entries of the layer before, chosen anew; its choice; entries of four tokens.
        compress_ratios=[0, 1, 1, 1, 4],
        kv_source_layer_ids=[1, 4],
        index_source_layer_ids=[1, 2, 4],
        compress_rope_theta=900.0,
        index_n_heads=5,
        index_head_dim=12,
        index_topk=9,
        rope_theta=90.0,
        rope_scaling=None,
        max_position_embeddings=512,
        hc_mult=3,
        hc_sinkhorn_iters=20,
        hc_eps=1e-6,
    )
    return {key: value for key, value in (base | changes).items() if value is not None}


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 8, "beta_slow": 1}

CASES = [
    ("deepseek_v41_basic", 15, _config()),
    # Blocks that are rounded; YaRN; sigmoid scores that are not normalised, limits that show; two streams.
    (
        "deepseek_v41_rounded",
        2,
        _config(
            num_hidden_layers=2,
            head_dim=32,
            index_head_dim=32,
            index_n_heads=8,
            num_attention_heads=2,
            compress_ratios=[2, 2],
            kv_source_layer_ids=[0],
            index_source_layer_ids=[0],
            candidate_source_layer_id=0,
            rope_scaling=YARN,
            scoring_func="sigmoid",
            norm_topk_prob=False,
            gate_temp=0.7,
            swiglu_limit=0.5,
            hc_mult=2,
            hc_sinkhorn_iters=3,
            hc_eps=0.01,
            rms_norm_eps=1e-5,
        ),
    ),
    # For mlx-lm's converter.
    (
        "deepseek_v41_wide",
        3,
        _config(
            vocab_size=64,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            head_dim=32,
            index_head_dim=24,
            index_n_heads=4,
            q_lora_rank=32,
            o_lora_rank=32,
            moe_intermediate_size=32,
            n_routed_experts=4,
            compress_ratios=[0, 2],
            kv_source_layer_ids=[1],
            index_source_layer_ids=[1],
            hc_mult=2,
        ),
    ),
]


def draw(rng: random.Random) -> dict[str, Any]:
    """A random configuration."""
    layers = rng.randint(1, 6)
    stride = rng.choice([1, 2, 4, 7])
    ratios = [rng.choice([0, stride, stride]) for _ in range(rng.choice([layers, layers, max(1, layers - 1)]))]
    compressing = [layer for layer, ratio in enumerate(ratios) if ratio]
    chosen = [layer for layer in compressing if rng.random() < 0.6]
    groups = rng.randint(1, 3)
    experts = rng.randint(2, 9)
    rope = 2 * rng.randint(1, 5)
    return _config(
        vocab_size=rng.randint(20, 90),
        hidden_size=rng.randint(9, 60),
        num_hidden_layers=layers,
        num_attention_heads=groups * rng.randint(1, 3),
        head_dim=rope + rng.randint(1, 15),
        q_lora_rank=rng.randint(3, 20),
        qk_rope_head_dim=rope,
        o_groups=groups,
        o_lora_rank=rng.randint(3, 20),
        moe_intermediate_size=rng.randint(3, 20),
        n_routed_experts=experts,
        num_experts_per_tok=rng.randint(1, experts),
        scoring_func=rng.choice(["sqrtsoftplus", "sigmoid", "softmax"]),
        gate_temp=rng.choice([1.0, 0.6]),
        norm_topk_prob=rng.random() < 0.6,
        routed_scaling_factor=rng.choice([1.0, 2.5]),
        swiglu_limit=rng.choice([0.0, 0.6, 10.0]),
        rms_norm_eps=rng.choice([1e-20, 1e-6, 1e-2]),
        sliding_window=rng.randint(1, 40),
        compress_ratios=ratios,
        kv_source_layer_ids=[layer for layer in compressing if rng.random() < 0.6],
        index_source_layer_ids=chosen,
        candidate_source_layer_id=rng.choice([-1, *chosen]),
        rope_scaling=rng.choice([None, YARN]),
        index_n_heads=rng.randint(6, 12),
        index_head_dim=rope + rng.randint(1, 9),
        index_topk=rng.choice([5, 17, 300]),
        hc_mult=rng.randint(1, 4),
        hc_sinkhorn_iters=rng.choice([1, 5, 20]),
        hc_eps=rng.choice([1e-6, 1e-2]),
    )


def weights(c: dict[str, Any], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Weights under published names."""
    w = Weights(rng)
    hidden, heads, dim, rank = c["hidden_size"], c["num_attention_heads"], c["head_dim"], c["q_lora_rank"]
    w.normal("embed.weight", (c["vocab_size"], hidden), min(0.6, 3 / hidden**0.5))
    w.matrix("head", c["vocab_size"], hidden, 2.4)
    w.norm("norm", hidden)
    streams, ratios = c["hc_mult"], c["compress_ratios"]
    mixes = (2 + streams) * streams
    for layer in range(c["num_hidden_layers"]):
        base = f"layers.{layer}"
        for part in ("attn", "ffn"):
            w.norm(f"{base}.{part}_norm", hidden)
            w.normal(f"{base}.hc_{part}_fn", (mixes, streams * hidden), 1 / (streams * hidden) ** 0.5)
            w.normal(f"{base}.hc_{part}_base", (mixes,), 0.5)
            w.tensor(f"{base}.hc_{part}_scale", rng.uniform(0.5, 1.5, 3))
        attention, ratio = f"{base}.attn", ratios[layer] if layer < len(ratios) else 0
        w.matrix(f"{attention}.wq_a", rank, hidden)
        w.norm(f"{attention}.q_norm", rank)
        w.matrix(f"{attention}.wq_b", heads * dim, rank)
        w.matrix(f"{attention}.wkv", dim, hidden)
        w.norm(f"{attention}.kv_norm", dim)
        groups, low = c["o_groups"], c["o_lora_rank"]
        w.matrix(f"{attention}.wo_a", groups * low, heads // groups * dim)
        w.matrix(f"{attention}.wo_b", hidden, groups * low)
        w.normal(f"{attention}.attn_sink", (heads,), 1.0)
        if layer in c["kv_source_layer_ids"]:
            w.matrix(f"{attention}.compressor.wkv", dim, hidden)
            if ratio > 1:
                w.matrix(f"{attention}.compressor.wgate", dim, hidden)
            w.norm(f"{attention}.compressor.norm", dim)
        if layer in c["index_source_layer_ids"]:
            index, count = c["index_head_dim"], c["index_n_heads"]
            w.matrix(f"{attention}.indexer.wq_b", count * index, rank)
            w.matrix(f"{attention}.indexer.weights_proj", count, hidden)
            if layer in c["kv_source_layer_ids"]:
                w.matrix(f"{attention}.indexer.wk", index, dim)
                w.norm(f"{attention}.indexer.k_norm", index)
        w.matrix(f"{base}.ffn.gate", c["n_routed_experts"], hidden, 2.0)
        w.normal(f"{base}.ffn.gate.bias", (c["n_routed_experts"],), 0.3)
        for expert in range(c["n_routed_experts"]):
            w.mlp(f"{base}.ffn.experts.{expert}", hidden, c["moe_intermediate_size"], ("w1", "w3", "w2"))
        w.mlp(f"{base}.ffn.shared_experts", hidden, c["moe_intermediate_size"], ("w1", "w3", "w2"))
    return w.found
