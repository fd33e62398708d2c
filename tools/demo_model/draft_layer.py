"""Trains a layer that drafts tokens for the demo model on one GPU, and writes the model's file with that layer.

    draft_layer.py --model demo.gguf --out drafting.gguf
    draft_layer.py --model demo.gguf --out drafting.gguf --device cpu --seconds 60 --rows 4 --workers 1

The formula is that of DeepSeek-V3 (2024), section 2.2: entry q is a linear layer over the norm of the embedding of token q + 1 beside
the norm of the model's hidden state at q, then a decoder layer with a dense feed-forward, a norm and the model's head. The hidden
state is the one after the final norm.

The model is frozen, and its probabilities of the token after the next one are the targets. The layer's drafts after the first are
made of its own hidden states, so it is trained in passes: in pass p the entry at q has the hidden state of pass p - 1 at q - 1. It
sees the keys of pass 0 up to q - p, then one of each pass, as an entry does that is made after p drafts.

All that the file has of the model is copied as it is stored, so its answers have the same bits; the layer's matrices are Q8_0.
"""

import argparse
import math
import os
import tempfile
import time

import gguf
import numpy as np
import torch
import torch.nn.functional as F

import export
import generate
import model
import train

WIDTH = 512
# Tokens of a row.
ROW = 512
# Share of the time in which the learning rate rises.
WARM_UP = 0.03
# GGUF's names in the layer. Those of matrices have `gguf.GGMLQuantizationType.Q8_0`.
MATRICES = {"eh_proj": "nextn.eh_proj", "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "down": "ffn_down"}
NORMS = {"enorm": "nextn.enorm", "hnorm": "nextn.hnorm", "attn_norm": "attn_norm", "q_norm": "attn_q_norm", "k_norm": "attn_k_norm",
         "ffn_norm": "ffn_norm", "norm": "nextn.shared_head_norm"}


def init(s: model.Shape, final_norm: torch.Tensor, seed: int) -> dict[str, torch.Tensor]:
    """Fresh f32 parameters, each with a leading 1 as train.py stacks layers; gate_up [1, 1, 2·WIDTH, H]."""
    g = torch.Generator().manual_seed(seed)
    h, qd, kd = s.hidden_size, s.num_attention_heads * s.head_dim, s.num_key_value_heads * s.head_dim

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(1, *shape, generator=g) * 0.5 / math.sqrt(shape[-1])

    matrices = {"eh_proj": normal(h, 2 * h), "q": normal(qd, h), "k": normal(kd, h), "v": normal(kd, h), "o": normal(h, qd),
                "gate_up": normal(1, 2 * WIDTH, h), "down": normal(h, WIDTH)}
    norms = {k: torch.ones(1, s.head_dim if k in ("q_norm", "k_norm") else h) for k in NORMS}
    return matrices | norms | {"norm": final_norm[None].clone()}


def pass_mask(number: torch.Tensor, p: int) -> torch.Tensor:
    """What entries of pass `p` see of its keys and those of the passes before, side by side; `number` (B, T) tells conversations
    apart."""
    at = torch.arange(number.shape[1], device=number.device)
    before = at[:, None] - at
    seen = torch.cat([before >= p] + [before == p - of for of in range(1, p + 1)], 1)
    return (seen & (number[:, :, None] == number[:, None]).repeat(1, 1, p + 1))[:, None]


def entries(s: model.Shape, w: dict[str, torch.Tensor], embedded: torch.Tensor, hidden: torch.Tensor, seen: list, mask: torch.Tensor,
            cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Normed hidden states (B, T, H) of a pass; its keys and values join those of the passes before in `seen`."""
    b, t = hidden.shape[:2]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return model.rms_norm(x, w[name], s.rms_norm_eps)

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.view(b, t, -1, s.head_dim)
    x = torch.cat([norm(embedded, "enorm"), norm(hidden, "hnorm")], -1) @ w["eh_proj"].T
    h = norm(x, "attn_norm")
    q = model.rope(norm(heads(h @ w["q"].T), "q_norm").transpose(1, 2), cos, sin)
    k = model.rope(norm(heads(h @ w["k"].T), "k_norm").transpose(1, 2), cos, sin)
    seen.append((k, heads(h @ w["v"].T).transpose(1, 2)))
    keys, values = (torch.cat(x, 2) for x in zip(*seen))
    a = model.attention(q, keys, values, mask)
    x = x + a.transpose(1, 2).reshape(b, t, -1) @ w["o"].T
    gate, up = (norm(x, "ffn_norm") @ w["gate_up"][0].T).chunk(2, -1)
    return norm(x + (F.silu(gate) * up) @ w["down"].T, "norm")


def losses(s: model.Shape, p: dict[str, torch.Tensor], table: torch.Tensor, ids: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor,
           number: torch.Tensor, masks: list, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each pass: the cross entropy against the model's probabilities, and the share of entries whose likeliest token is the
    model's. `hidden` (B, T, H) is the model's; `weight` (B, T) that of the token after each."""
    w = {k: v[0] for k, v in p.items()}
    embedded = F.embedding(ids.roll(-1, 1), table)
    probable = torch.softmax(hidden.roll(-1, 1) @ table.T, -1, dtype=torch.float32)
    best = probable.argmax(-1)
    weight = weight.roll(-1, 1)
    weight[:, -2:] = 0
    seen, ce, right = [], [], []
    for i, mask in enumerate(masks):
        hidden = entries(s, w, embedded, hidden, seen, mask, cos, sin)
        logits = hidden @ table.T
        counted = weight * (number.roll(i, 1) == number.roll(-2, 1))
        counted[:, :i] = 0
        each = -(probable * torch.log_softmax(logits, -1, dtype=torch.float32)).sum(-1)
        ce.append((counted * each).sum() / counted.sum().clamp(min=1.0))
        asked = counted > 0
        right.append((asked & (logits.argmax(-1) == best)).sum() / asked.sum().clamp(min=1))
        hidden = hidden.roll(1, 1)
    return torch.stack(ce), torch.stack(right)


def write(source: str, layer: dict[str, torch.Tensor], out: str) -> None:
    """The GGUF file `source` with `layer` as one more block, checked by reading it back."""
    reader, arch, number = gguf.GGUFReader(source), "qwen3moe", model.Shape().num_hidden_layers
    sizes = {f"{arch}.block_count": number + 1, f"{arch}.nextn_predict_layers": 1, f"{arch}.feed_forward_length": WIDTH}
    w = gguf.GGUFWriter(out, arch)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in ("general.architecture", *sizes):
            kind = field.types[0]
            w.add_key_value(field.name, field.contents(), kind, sub_type=field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
    for key, size in sizes.items():
        w.add_uint32(key, size)
    q8_0, f32 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F32
    stored = [(t.name, t.data, t.tensor_type) for t in reader.tensors]
    gate, up = layer["gate_up"][0, 0].chunk(2)
    matrices = {name: layer[k][0] for k, name in MATRICES.items()} | {"ffn_gate": gate, "ffn_up": up}
    stored += [(f"blk.{number}.{name}.weight", gguf.quantize(x.numpy(), q8_0), q8_0) for name, x in matrices.items()]
    stored += [(f"blk.{number}.{name}.weight", layer[k][0].numpy(), f32) for k, name in NORMS.items()]
    for name, data, kind in stored:
        w.add_tensor(name, data, raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    back = {t.name: t for t in gguf.GGUFReader(out).tensors}
    for name, data, kind in stored:
        if back[name].tensor_type != kind or not np.array_equal(back[name].data, data):
            raise SystemExit(f"{out}: {name} reads back differently")


def main() -> None:
    """Command line."""
    start = time.time()
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--model", required=True, help="GGUF file that export.py wrote")
    ap.add_argument("--out", required=True, help="the GGUF file with the layer")
    ap.add_argument("--seconds", type=float, default=60.0, help="for all but the last check and writing the file")
    ap.add_argument("--drafts", type=int, default=4, help="passes, the most tokens that the layer is trained to draft at a time")
    ap.add_argument("--rows", type=int, default=32, help=f"rows of {ROW} tokens a step")
    ap.add_argument("--muon-lr", type=float, default=0.02)
    ap.add_argument("--adam-lr", type=float, default=0.003)
    ap.add_argument("--decay", type=float, default=0.02)
    ap.add_argument("--decay-from", type=float, default=0.3, help="share of the time after which the learning rate falls to zero")
    ap.add_argument("--first-shard", type=int, default=60_000_000, help="other data than the model was trained on")
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--workers", type=int, default=8)
    ap.add_argument("--shard-rows", type=int, default=512)
    ap.add_argument("--device", default="cuda")
    a = ap.parse_args()

    s, cuda = model.Shape(), a.device == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    # cuDNN would plan attention anew for each shape.
    torch.backends.cuda.enable_cudnn_sdp(False)
    frozen = {k: v.to(a.device) for k, v in export.read(a.model).items()}
    master = {k: v.to(a.device) for k, v in init(s, frozen["final_norm"].cpu(), a.seed).items()}
    frozen = {k: v.to(dtype) for k, v in frozen.items()}
    print(f"{sum(v.numel() for v in master.values()) / 1e6:.2f} M parameters", flush=True)
    tokenizer = tempfile.TemporaryDirectory()
    export.save_tokenizer(a.model, tokenizer.name)
    data = train.Rows(a.workers, a.shard_rows, a.rows, tokenizer.name, a.device, a.first_shard, ROW)
    ids, weights, number = generate.shard(10**7, a.rows + 40, tokenizer.name, ROW)
    held = train.to_device(np.stack([ids, weights.astype(np.uint16) << 8 | number])[:, :a.rows], a.device)
    cos, sin = model.rope_tables(s, ROW, a.device, dtype)

    def both(p: dict[str, torch.Tensor], batch) -> tuple[torch.Tensor, torch.Tensor]:
        ids, _, weight, number = batch
        with torch.no_grad():
            masks = [pass_mask(number, i) for i in range(a.drafts)]
            hidden = model.forward(s, frozen, ids, masks[0], cos, sin, False)[0]
        return losses(s, p, frozen["embed"], ids, hidden, weight, number, masks, cos, sin)

    opt = train.Optimizer(master, a.muon_lr, a.adam_lr, a.decay)
    step, begun, tokens = 0, 0.0, 0
    while True:
        now = (time.time() - begun) / max(1.0, start + a.seconds - begun) if step else 0.0
        if now >= 1:
            break
        p = {k: v.to(dtype, copy=True).requires_grad_() for k, v in master.items()}
        ce, right = both(p, data.next())
        # The first draft counts most: the others are of use after it alone.
        (ce[0] + ce.mean()).backward()
        scale = min(1.0, max(now, 0.001) / WARM_UP, (1 - now) / (1 - a.decay_from))
        opt.step({k: v.grad for k, v in p.items()}, scale, 0.85 + 0.1 * min(1.0, step / 300))
        tokens += a.rows * ROW
        if step % (100 if cuda else 1) == 0:
            shown = " ".join(f"{x:.3f}" for x in ce.tolist()) + " right " + " ".join(f"{x:.3f}" for x in right.tolist())
            print(f"step {step} {time.time() - start:.0f}s {tokens / 1e6:.1f}M tok wait {data.waited:.1f}s loss {shown}", flush=True)
            if not math.isfinite(ce.sum().item()):
                raise FloatingPointError(f"loss {ce.tolist()} at step {step}")
        # The first step loads kernels.
        begun, step = begun or time.time(), step + 1
    data.close()
    with torch.no_grad():
        _, right = both({k: v.to(dtype) for k, v in master.items()}, held)
    shown = ", ".join(f"{100 * x:.1f} %" for x in right.tolist())
    print(f"{step} steps, {tokens / 1e6:.1f} M tokens, {time.time() - start:.0f} s; right in held-out rows, by draft: {shown}", flush=True)
    write(a.model, {k: v.cpu() for k, v in master.items()}, a.out)
    print(f"{a.out}: {os.path.getsize(a.out)} bytes, {os.path.getsize(a.out) - os.path.getsize(a.model)} more than the model")


if __name__ == "__main__":
    main()
