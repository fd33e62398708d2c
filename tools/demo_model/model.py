"""The demo model's shape and its training-time forward pass.

Parameters of one kind are stacked over layers. The feed-forward computes every expert and multiplies by the router's
weight, which is zero for the experts not chosen: at 16 experts of width 256 one large product is several times faster
on a GPU than sorting tokens by expert, and the result is that of `Qwen3MoeForCausalLM`. It is a training trick only:
the saved checkpoint is an ordinary sparse one.
"""

import json
import math
import os
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


@dataclass(frozen=True)
class Shape:
    """Sizes, in Hugging Face words."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 7
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 64
    num_experts: int = 16
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 256
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 2048

    def config(self):
        """The transformers configuration of the saved checkpoint."""
        from transformers import Qwen3MoeConfig
        sizes = asdict(self)
        theta = sizes.pop("rope_theta")
        return Qwen3MoeConfig(
            **sizes, intermediate_size=self.moe_intermediate_size, decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True,
            tie_word_embeddings=True, attention_bias=False, hidden_act="silu", router_aux_loss_coef=0.001, use_sliding_window=False,
            bos_token_id=None, eos_token_id=2, pad_token_id=0, rope_parameters={"rope_type": "default", "rope_theta": theta})


def quantization(s: Shape) -> dict[str, list[str]]:
    """Block type of each weight kind by layer: what llama.cpp's Q4_K_M gives a model of this depth."""
    n = s.num_hidden_layers
    more = [i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2 for i in range(n)]
    mixed = ["Q6_K" if m else "Q4_K" for m in more]
    plain = ["Q4_K"] * n
    return {"q": plain, "k": plain, "v": mixed, "o": plain, "gate_up": plain, "down": mixed, "embed": ["Q6_K"]}


def init(s: Shape, seed: int) -> dict[str, torch.Tensor]:
    """Fresh f32 parameters, each stacked over layers: [L, …]; embed [V, H]."""
    g = torch.Generator().manual_seed(seed)
    n, h, e, i = s.num_hidden_layers, s.hidden_size, s.num_experts, s.moe_intermediate_size
    qd, kd = s.num_attention_heads * s.head_dim, s.num_key_value_heads * s.head_dim
    out = 0.5 / math.sqrt(2 * n)

    def normal(*shape: int, gain: float = 0.5) -> torch.Tensor:
        return torch.randn(*shape, generator=g) * gain / math.sqrt(shape[-1])

    return {"embed": torch.randn(s.vocab_size, h, generator=g) * 0.02, "q": normal(n, qd, h), "k": normal(n, kd, h),
         "v": normal(n, kd, h), "o": normal(n, h, qd, gain=out), "gate_up": normal(n, e, 2 * i, h), "down": normal(n, e, h, i, gain=out),
         "router": normal(n, e, h), "q_norm": torch.ones(n, s.head_dim), "k_norm": torch.ones(n, s.head_dim),
         "attn_norm": torch.ones(n, h), "ffn_norm": torch.ones(n, h), "final_norm": torch.ones(h)}


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm in f32, in the order transformers rounds."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Half-split rotation of (B, heads, T, D)."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def rope_tables(s: Shape, length: int, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each (length, head_dim)."""
    inv = 1.0 / s.rope_theta ** (torch.arange(0, s.head_dim, 2, dtype=torch.float32, device=device) / s.head_dim)
    t = torch.outer(torch.arange(length, dtype=torch.float32, device=device), inv)
    t = torch.cat([t, t], -1)
    return t.cos().to(dtype), t.sin().to(dtype)


def conversation_mask(number: torch.Tensor, block: bool):
    """Causal attention within conversations; `number` (B, T) tells them apart. A flex block mask or a dense one."""
    b, t = number.shape
    if block:
        def allowed(bi, _h, q, k):
            return (q >= k) & (number[bi, q] == number[bi, k])
        return create_block_mask(allowed, b, None, t, t, device=number.device)
    i = torch.arange(t, device=number.device)
    return ((i[:, None] >= i[None, :]) & (number[:, :, None] == number[:, None, :]))[:, None]


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Attention with a dense mask. Heads share keys by copies, for which CUDA has faster kernels than for `enable_gqa`."""
    shared = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(shared, 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def forward(s: Shape, p: dict[str, torch.Tensor], ids: torch.Tensor, mask, cos: torch.Tensor, sin: torch.Tensor,
            flex: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Final hidden states (B, T, H), the load-balancing loss, and chosen-expert counts (L, E)."""
    b, t = ids.shape
    e, k = s.num_experts, s.num_experts_per_tok
    layers = {n: w.unbind(0) for n, w in p.items() if n not in ("embed", "final_norm")}
    x = F.embedding(ids, p["embed"])
    balance, counts = x.new_zeros((), dtype=torch.float32), []
    for i in range(s.num_hidden_layers):
        w = {n: v[i] for n, v in layers.items()}
        h = rms_norm(x, w["attn_norm"], s.rms_norm_eps)
        q = rope(rms_norm((h @ w["q"].T).view(b, t, -1, s.head_dim), w["q_norm"], s.rms_norm_eps).transpose(1, 2), cos, sin)
        kk = rope(rms_norm((h @ w["k"].T).view(b, t, -1, s.head_dim), w["k_norm"], s.rms_norm_eps).transpose(1, 2), cos, sin)
        v = (h @ w["v"].T).view(b, t, -1, s.head_dim).transpose(1, 2)
        if flex:
            a = flex_attention(q, kk, v, block_mask=mask, enable_gqa=True)
        else:
            a = attention(q, kk, v, mask)
        x = x + a.transpose(1, 2).reshape(b, t, -1) @ w["o"].T
        h = rms_norm(x, w["ffn_norm"], s.rms_norm_eps).view(b * t, -1)
        prob = torch.softmax((h @ w["router"].T).float(), -1)
        top, chosen = prob.topk(k, -1)
        one = F.one_hot(chosen, e).float()
        gate = (one * (top / top.sum(-1, keepdim=True))[..., None]).sum(1).to(h.dtype)
        share = one.sum(1).mean(0)
        balance = balance + e / k * (share.detach() * prob.mean(0)).sum() / s.num_hidden_layers
        counts.append(share)
        g = (h @ w["gate_up"].flatten(0, 1).T).view(b * t, e, 2, -1)
        m = F.silu(g[:, :, 0]) * g[:, :, 1] * gate[..., None]
        x = x + (m.flatten(1) @ w["down"].transpose(1, 2).reshape(-1, s.hidden_size)).view(b, t, -1)
    return rms_norm(x, p["final_norm"], s.rms_norm_eps), balance, torch.stack(counts)


NAMES = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
         "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm", "attn_norm": "input_layernorm",
         "ffn_norm": "post_attention_layernorm", "router": "mlp.gate"}


def save(s: Shape, p: dict[str, torch.Tensor], folder: str) -> None:
    """The parameters as a bf16 transformers checkpoint in shards of at most 15 MB."""
    from transformers import Qwen3MoeForCausalLM
    state = {"model.embed_tokens.weight": p["embed"], "model.norm.weight": p["final_norm"], "lm_head.weight": p["embed"]}
    for i in range(s.num_hidden_layers):
        layer = f"model.layers.{i}."
        state |= {f"{layer}{name}.weight": p[key][i] for key, name in NAMES.items()}
        state[layer + "mlp.experts.gate_up_proj"], state[layer + "mlp.experts.down_proj"] = p["gate_up"][i], p["down"][i]
    m = Qwen3MoeForCausalLM(s.config()).bfloat16()
    m.load_state_dict({k: v.detach().to("cpu", torch.bfloat16) for k, v in state.items()}, strict=True)
    m.save_pretrained(folder, max_shard_size="15MB")
    add_classic_keys(s, os.path.join(folder, "config.json"))


def add_classic_keys(s: Shape, path: str) -> None:
    """Adds the names that transformers 4 gave two sizes to a config.json: mlx-lm knows them by these alone."""
    with open(path, encoding="utf-8") as f:
        config = json.load(f)
    with open(path, "w", encoding="utf-8") as f:
        json.dump(config | {"num_experts": s.num_experts, "rope_theta": s.rope_theta}, f, indent=2, sort_keys=True)
        f.write("\n")


def load(s: Shape, folder: str) -> dict[str, torch.Tensor]:
    """The parameters of a checkpoint that `save` wrote, f32."""
    from safetensors.torch import load_file
    t: dict[str, torch.Tensor] = {}
    for f in sorted(os.listdir(folder)):
        if f.endswith(".safetensors"):
            t |= {k: v.float() for k, v in load_file(os.path.join(folder, f)).items()}
    layers = [f"model.layers.{i}." for i in range(s.num_hidden_layers)]
    p = {key: torch.stack([t[f"{layer}{name}.weight"] for layer in layers]) for key, name in NAMES.items()}

    def experts(layer: str, *names: str) -> torch.Tensor:
        return torch.stack([torch.cat([t[f"{layer}mlp.experts.{e}.{n}_proj.weight"] for n in names]) for e in range(s.num_experts)])
    p["gate_up"] = torch.stack([experts(layer, "gate", "up") for layer in layers])
    p["down"] = torch.stack([experts(layer, "down") for layer in layers])
    return p | {"embed": t["model.embed_tokens.weight"], "final_norm": t["model.norm.weight"]}
