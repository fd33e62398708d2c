"""Kimi-K3 as published: configurations and weights."""

import random
from typing import Any

import numpy as np

from .mlx_lm_weights import Weights


def _config(linear: dict[str, Any] | None = None, tie: bool = False, **changes: Any) -> dict[str, Any]:
    shape = dict(num_heads=3, head_dim=8, short_conv_kernel_size=4, use_full_rank_gate=True, gate_lower_bound=-5.0)
    text = dict(
        model_type="kimi_linear",
        vocab_size=59,
        hidden_size=24,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=20,
        rms_norm_eps=1e-5,
        max_position_embeddings=512,
        linear_attn_config=shape | dict(kda_layers=[1, 2, 4, 5], full_attn_layers=[3]) | (linear or {}),
        hidden_act="situ",
        activation_situ_beta=4.0,
        activation_situ_linear_beta=25.0,
        attn_res_block_size=2,
        q_lora_rank=18,
        kv_lora_rank=16,
        qk_nope_head_dim=12,
        qk_rope_head_dim=6,
        v_head_dim=10,
        mla_use_nope=True,
        mla_use_output_gate=True,
        num_experts=8,
        num_experts_per_token=3,
        num_shared_experts=1,
        moe_intermediate_size=7,
        routed_scaling_factor=1.7,
        first_k_dense_replace=1,
        routed_expert_hidden_size=14,
        latent_moe_use_norm=True,
        tie_word_embeddings=tie,
    )
    text |= changes
    return {"model_type": "kimi_k3", "text_config": {key: value for key, value in text.items() if value is not None}}


CASES = [
    # As published: gates, blocks of residuals of which the last is not full, experts in a latent space.
    ("kimi_k3_basic", 7, _config()),
    # No blocks, low-rank gates, queries without a latent, no shared experts, experts at the residual stream's width in groups,
    # every second layer dense, limits that show, embeddings that are the head too.
    (
        "kimi_k3_plain",
        2,
        _config(
            dict(use_full_rank_gate=False, gate_lower_bound=None, kda_layers=[2], full_attn_layers=[1, 3]),
            tie=True,
            num_hidden_layers=3,
            attn_res_block_size=None,
            q_lora_rank=None,
            routed_expert_hidden_size=None,
            latent_moe_use_norm=None,
            mla_use_output_gate=False,
            num_shared_experts=0,
            num_expert_group=4,
            topk_group=2,
            first_k_dense_replace=0,
            moe_layer_freq=2,
            activation_situ_beta=0.6,
            activation_situ_linear_beta=None,
            moe_renormalize=False,
        ),
    ),
    # For llama.cpp's converter: both kinds of attention have as many heads.
    (
        "kimi_k3_gguf",
        7,
        _config(
            dict(num_heads=4, kda_layers=[1, 2, 4], gate_lower_bound=-0.7),
            num_hidden_layers=4,
            moe_router_activation_func="sigmoid",
            moe_renormalize=True,
            intermediate_size=16,
            num_experts=5,
        ),
    ),
    # For mlx-lm's converter.
    (
        "kimi_k3_wide",
        15,
        _config(
            dict(num_heads=2, head_dim=32, kda_layers=[1, 3], full_attn_layers=[2]),
            vocab_size=64,
            hidden_size=64,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=2,
            intermediate_size=64,
            q_lora_rank=32,
            kv_lora_rank=32,
            qk_nope_head_dim=32,
            qk_rope_head_dim=32,
            v_head_dim=32,
            num_experts=4,
            num_experts_per_token=2,
            moe_intermediate_size=32,
            routed_expert_hidden_size=32,
        ),
    ),
]


def convertible(config: dict[str, Any]) -> bool:
    """Whether llama.cpp's converter can make a file of it."""
    c = config["text_config"]
    linear = c["linear_attn_config"]
    return (
        linear["num_heads"] == c["num_attention_heads"]
        and linear["use_full_rank_gate"]
        and {"attn_res_block_size", "activation_situ_beta", "activation_situ_linear_beta"} <= c.keys()
        and c.get("num_expert_group", 1) == 1
        and c.get("moe_layer_freq", 1) == 1
        and c["num_shared_experts"] > 0
        and not c["tie_word_embeddings"]
        and c["first_k_dense_replace"] < c["num_hidden_layers"]
    )


def draw(rng: random.Random) -> dict[str, Any]:
    """A random configuration, now and then one that llama.cpp's converter can make a file of."""
    config = _draw(rng)
    if rng.random() < 0.4:
        c = config["text_config"]
        c["linear_attn_config"] |= dict(num_heads=c["num_attention_heads"], use_full_rank_gate=True)
        c |= dict(num_key_value_heads=c["num_attention_heads"], moe_router_activation_func="sigmoid", moe_layer_freq=1)
        c |= dict(num_expert_group=1, topk_group=1, num_shared_experts=max(1, c["num_shared_experts"]), tie_word_embeddings=False)
        c["first_k_dense_replace"] = min(c["first_k_dense_replace"], c["num_hidden_layers"] - 1)
        for key, value in (("attn_res_block_size", 3), ("activation_situ_beta", 0.5), ("activation_situ_linear_beta", 0.8)):
            c.setdefault(key, value)
    return config


def _draw(rng: random.Random) -> dict[str, Any]:
    layers = rng.randint(1, 7)
    linear = sorted(rng.sample(range(1, layers + 1), rng.randint(0, layers)))
    groups = rng.choice([1, 1, 2, 3])
    experts = groups * rng.randint(2, 5)
    kept = rng.randint(1, groups)
    latent = rng.choice([None, rng.randint(3, 30)])
    return _config(
        dict(
            num_heads=rng.randint(1, 5),
            head_dim=rng.choice([4, 7, 16, 32]),
            short_conv_kernel_size=rng.randint(2, 5),
            use_full_rank_gate=rng.random() < 0.5,
            gate_lower_bound=rng.choice([None, -5.0, -0.7]),
            kda_layers=linear,
            full_attn_layers=[layer for layer in range(1, layers + 1) if layer not in linear],
        ),
        tie=rng.random() < 0.4,
        vocab_size=rng.randint(20, 90),
        hidden_size=rng.randint(9, 70),
        num_hidden_layers=layers,
        num_attention_heads=rng.randint(1, 6),
        intermediate_size=rng.randint(3, 40),
        rms_norm_eps=rng.choice([1e-6, 1e-5, 1e-2]),
        activation_situ_beta=rng.choice([None, 0.5, 4.0]),
        activation_situ_linear_beta=rng.choice([None, 0.8, 25.0]),
        attn_res_block_size=rng.choice([None, 1, 2, 3, 9]),
        q_lora_rank=rng.choice([None, rng.randint(3, 20)]),
        kv_lora_rank=rng.randint(3, 24),
        qk_nope_head_dim=rng.randint(2, 20),
        qk_rope_head_dim=rng.randint(1, 10),
        v_head_dim=rng.randint(2, 20),
        mla_use_output_gate=rng.random() < 0.5,
        num_experts=experts,
        num_experts_per_token=rng.randint(1, max(1, kept * experts // groups)),
        num_shared_experts=rng.randint(0, 2),
        moe_intermediate_size=rng.randint(3, 20),
        moe_renormalize=rng.random() < 0.6,
        routed_scaling_factor=rng.choice([1.0, 2.5]),
        num_expert_group=groups,
        topk_group=kept,
        first_k_dense_replace=rng.randint(0, 2),
        moe_layer_freq=rng.choice([1, 1, 2]),
        routed_expert_hidden_size=latent,
        latent_moe_use_norm=rng.random() < 0.5,
    )


def weights(config: dict[str, Any], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Weights under published names."""
    c = config["text_config"]
    w = Weights(rng)
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    root = "language_model.model"

    def residual(name: str) -> None:
        w.norm(f"{name}_norm", hidden)
        w.matrix(f"{name}_proj", 1, hidden, 2.0)

    w.normal(f"{root}.embed_tokens.weight", (c["vocab_size"], hidden), min(0.6, 3 / hidden**0.5))
    if not c["tie_word_embeddings"]:
        w.matrix("language_model.lm_head", c["vocab_size"], hidden, 2.4)
    w.norm(f"{root}.norm", hidden)
    if "attn_res_block_size" in c:
        residual(f"{root}.output_attn_res")
    for layer in range(c["num_hidden_layers"]):
        base = f"{root}.layers.{layer}"
        w.norm(f"{base}.input_layernorm", hidden)
        w.norm(f"{base}.post_attention_layernorm", hidden)
        if "attn_res_block_size" in c:
            residual(f"{base}.self_attention_res")
            residual(f"{base}.mlp_res")
        attention = f"{base}.self_attn"
        if layer + 1 in c["linear_attn_config"]["kda_layers"]:
            _linear(w, c, attention)
        else:
            _latent(w, c, attention, heads)
        if layer < c["first_k_dense_replace"] or layer % c.get("moe_layer_freq", 1):
            w.mlp(f"{base}.mlp", hidden, c["intermediate_size"])
            continue
        moe = f"{base}.block_sparse_moe"
        w.matrix(f"{moe}.gate", c["num_experts"], hidden, 2.0)
        # mlx-lm has zero for experts of other groups: below all that can be chosen.
        w.tensor(f"{moe}.gate.e_score_correction_bias", rng.uniform(0, 0.4, c["num_experts"]))
        width = c.get("routed_expert_hidden_size")
        if width:
            w.matrix(f"{moe}.routed_expert_down_proj", width, hidden)
            w.matrix(f"{moe}.routed_expert_up_proj", hidden, width)
            if c.get("latent_moe_use_norm"):
                w.norm(f"{moe}.routed_expert_norm", width)
        for expert in range(c["num_experts"]):
            w.mlp(f"{moe}.experts.{expert}", width or hidden, c["moe_intermediate_size"], ("w1", "w3", "w2"))
        if c["num_shared_experts"]:
            w.mlp(f"{moe}.shared_experts", hidden, c["moe_intermediate_size"] * c["num_shared_experts"])
    return w.found


def _linear(w: Weights, c: dict[str, Any], attention: str) -> None:
    shape = c["linear_attn_config"]
    heads, dim, hidden = shape["num_heads"], shape["head_dim"], c["hidden_size"]
    width = heads * dim
    for part in "qkv":
        w.matrix(f"{attention}.{part}_proj", width, hidden)
        w.normal(f"{attention}.{part}_conv1d.weight", (width, 1, shape["short_conv_kernel_size"]), 0.6)
    w.matrix(f"{attention}.f_a_proj", dim, hidden)
    w.matrix(f"{attention}.f_b_proj", width, dim)
    w.matrix(f"{attention}.b_proj", heads, hidden)
    if shape["use_full_rank_gate"]:
        w.matrix(f"{attention}.g_proj", width, hidden)
    else:
        w.matrix(f"{attention}.g_a_proj", dim, hidden)
        w.matrix(f"{attention}.g_b_proj", width, dim)
    w.tensor(f"{attention}.A_log", w.rng.uniform(np.log(0.005), np.log(2), (1, 1, heads, 1)))
    w.normal(f"{attention}.dt_bias", (width,), 1.0)
    w.norm(f"{attention}.o_norm", dim)
    w.matrix(f"{attention}.o_proj", hidden, width)


def _latent(w: Weights, c: dict[str, Any], attention: str, heads: int) -> None:
    hidden, rank, nope, rope, value = (
        c[key] for key in ("hidden_size", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    q_rank = c.get("q_lora_rank")
    if q_rank:
        w.matrix(f"{attention}.q_a_proj", q_rank, hidden)
        w.norm(f"{attention}.q_a_layernorm", q_rank)
        w.matrix(f"{attention}.q_b_proj", heads * (nope + rope), q_rank)
    else:
        w.matrix(f"{attention}.q_proj", heads * (nope + rope), hidden)
    w.matrix(f"{attention}.kv_a_proj_with_mqa", rank + rope, hidden)
    w.norm(f"{attention}.kv_a_layernorm", rank)
    w.matrix(f"{attention}.kv_b_proj", heads * (nope + value), rank)
    w.matrix(f"{attention}.o_proj", hidden, heads * value)
    if c["mla_use_output_gate"]:
        w.matrix(f"{attention}.g_proj", heads * value, hidden)
