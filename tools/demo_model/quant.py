"""Q4_K and Q6_K: the numbers a block can hold, for training against them and for writing them.

`q4_k` and `q6_k` return the integer parts; `dequantize` turns parts into weights exactly as a GGUF reader does, and
`pack` writes them as GGUF bytes. Training rounds through the same parts that the file stores, so the shipped file is
the function the loss was last measured on. The price: a plain minimum/maximum fit without llama.cpp's search, which
a model trained through the rounding does not need.
"""

import torch


def _div(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.where(b > 0, a / torch.where(b > 0, b, 1.0), 0.0)


def q4_k(w: torch.Tensor) -> dict[str, torch.Tensor]:
    """Parts of `w` (…, 256·n) f32: d, dmin (…, n, 1) f16 values; scale, minimum (…, n, 8, 1) in 0..63; q in 0..15."""
    x = w.unflatten(-1, (-1, 8, 32))
    low = x.amin(-1, keepdim=True).clamp(max=0.0)
    high = x.amax(-1, keepdim=True).clamp(min=0.0)
    step, offset = (high - low) / 15.0, -low
    d = (step.amax(-2, keepdim=True) / 63.0).half().float()
    dmin = (offset.amax(-2, keepdim=True) / 63.0).half().float()
    scale = torch.round(_div(step, d)).clamp(0, 63)
    minimum = torch.round(_div(offset, dmin)).clamp(0, 63)
    q = torch.round(_div(x + dmin * minimum, d * scale)).clamp(0, 15)
    return {"d": d, "dmin": dmin, "scale": scale, "minimum": minimum, "q": q}


def q6_k(w: torch.Tensor) -> dict[str, torch.Tensor]:
    """Parts of `w` (…, 256·n) f32: d (…, n, 1, 1) f16 values; scale (…, n, 16, 1) in 0..127; q in -32..31."""
    x = w.unflatten(-1, (-1, 16, 16))
    step = x.abs().amax(-1, keepdim=True) / 31.0
    d = (step.amax(-2, keepdim=True) / 127.0).half().float()
    scale = torch.round(_div(step, d)).clamp(0, 127)
    q = torch.round(_div(x, d * scale)).clamp(-32, 31)
    return {"d": d, "scale": scale, "q": q}


def dequantize(p: dict[str, torch.Tensor]) -> torch.Tensor:
    """The weights the parts stand for, f32."""
    w = p["d"] * p["scale"] * p["q"]
    if "dmin" in p:
        w = w - p["dmin"] * p["minimum"]
    return w.flatten(-3)


def rounded(w: torch.Tensor, kind: str) -> torch.Tensor:
    """`w` as a file of type `kind` would hold it."""
    return dequantize(q4_k(w) if kind == "Q4_K" else q6_k(w))


def rounded_stack(w: torch.Tensor, kinds: list[str]) -> torch.Tensor:
    """A weight stacked over layers, each layer in its own type; a single type rounds all of `w`."""
    if len(set(kinds)) == 1:
        return rounded(w, kinds[0])
    return torch.stack([rounded(x, t) for x, t in zip(w, kinds)])


def pack(w: torch.Tensor, kind: str) -> torch.Tensor:
    """GGUF bytes of `w` (rows, 256·n) f32: u8 (rows, n·144) for Q4_K, (rows, n·210) for Q6_K."""
    rows = w.shape[0]
    if kind == "Q4_K":
        p = q4_k(w)
        s, m = (p[k].squeeze(-1).to(torch.uint8) for k in ("scale", "minimum"))
        packed = torch.empty((*s.shape[:-1], 12), dtype=torch.uint8)
        packed[..., 0:4] = s[..., :4] | (s[..., 4:] >> 4) << 6
        packed[..., 4:8] = m[..., :4] | (m[..., 4:] >> 4) << 6
        packed[..., 8:12] = (s[..., 4:] & 15) | (m[..., 4:] & 15) << 4
        q = p["q"].to(torch.uint8)
        nibbles = (q[..., 0::2, :] | q[..., 1::2, :] << 4).flatten(-2)
        head = torch.cat([p["d"].flatten(-2), p["dmin"].flatten(-2)], -1).half().view(torch.uint8)
        return torch.cat([head, packed, nibbles], -1).reshape(rows, -1)
    p = q6_k(w)
    q = (p["q"] + 32).to(torch.uint8).flatten(-2).unflatten(-1, (2, 4, 32))  # half, quarter, lane
    low = torch.cat([q[..., 0, :] & 15 | (q[..., 2, :] & 15) << 4, q[..., 1, :] & 15 | (q[..., 3, :] & 15) << 4], -1).flatten(-2)
    high = (q[..., 0, :] >> 4 | (q[..., 1, :] >> 4) << 2 | (q[..., 2, :] >> 4) << 4 | (q[..., 3, :] >> 4) << 6).flatten(-2)
    scales = p["scale"].squeeze(-1).to(torch.int8).view(torch.uint8)
    d = p["d"].flatten(-2).half().view(torch.uint8)
    return torch.cat([low, high, scales, d], -1).reshape(rows, -1)
