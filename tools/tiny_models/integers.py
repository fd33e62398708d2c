"""Integers in groups with zero points: as compressed-tensors packs them (by its own functions), and as GPTQ's and AWQ's
programs do.

GPTQ's layout is that of AutoGPTQ and GPTQModel: codes along the input dimension, zero points along the output dimension, in
the format `gptq` less one. AWQ's is that of AutoAWQ's `gemm`: both along the output dimension, in the order of `AWQ_ORDER`.
Values are computed from the codes before packing.

A function gives what is stored, by name, and the float32 values that it stands for.
"""

import numpy as np
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

Quantised = tuple[dict[str, torch.Tensor], torch.Tensor]

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def asymmetric(weight: torch.Tensor, bits: int, group: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Codes [rows, columns], zero points and scales [rows, groups], and values; a group of 0 is a row."""
    largest = 2**bits - 1
    groups = weight.float().unflatten(-1, (-1, group or weight.shape[-1]))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low) / largest).clamp(min=1e-4).to(dtype)
    zeros = (-low / scales.float()).round().clamp(0, largest)
    codes = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, largest)
    values = (codes - zeros[..., None]) * scales.float()[..., None]
    return codes.flatten(-2).int(), zeros.int(), scales, values.flatten(-2)


def packed(
    name: str, weight: torch.Tensor, bits: int = 4, group: int = 32, dtype: torch.dtype = torch.bfloat16
) -> Quantised:
    """compressed-tensors, asymmetric."""
    codes, zeros, scales, values = asymmetric(weight, bits, group, dtype)
    module, middle = name.removesuffix(".weight"), 2 ** (bits - 1)
    stored = {
        f"{module}.weight_packed": pack_to_int32((codes - middle).to(torch.int8), bits),
        f"{module}.weight_scale": scales,
        f"{module}.weight_zero_point": pack_to_int32((zeros - middle).to(torch.int8), bits, packed_dim=0).contiguous(),
        f"{module}.weight_shape": torch.tensor(weight.shape),
    }
    return stored, values


def packed_rows(name: str, weight: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> Quantised:
    """compressed-tensors, symmetric, 8 bits, a scale a row."""
    scales = (weight.float().abs().amax(-1, keepdim=True) / 127.5).to(dtype)
    codes = (weight.float() / scales.float()).round().clamp(-128, 127)
    module = name.removesuffix(".weight")
    stored = {
        f"{module}.weight_packed": pack_to_int32(codes.to(torch.int8), 8),
        f"{module}.weight_scale": scales,
        f"{module}.weight_shape": torch.tensor(weight.shape),
    }
    return stored, codes * scales.float()


def _words(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """(…, n) as words of 32 bits, the first in the lowest bits."""
    per_word = 32 // bits
    parts = numbers.numpy().astype(np.uint64).reshape(*numbers.shape[:-1], -1, per_word)
    shifts = np.arange(per_word, dtype=np.uint64) * np.uint64(bits)
    return torch.from_numpy((parts << shifts).sum(-1).astype(np.uint32).view(np.int32))


def gptq(
    name: str,
    weight: torch.Tensor,
    bits: int = 4,
    group: int = 32,
    less: bool = True,
    dtype: torch.dtype = torch.float16,
) -> Quantised:
    """GPTQ; zero points are stored `less` one in words, as GPTQModel makes them."""
    codes, zeros, scales, values = asymmetric(weight, bits, group, dtype)
    module = name.removesuffix(".weight")
    words = _words(zeros.T.contiguous(), bits).numpy().view(np.uint32)
    if less:
        words = words - np.uint32(0xFFFFFFFF // (2**bits - 1))
    cols = weight.shape[-1]
    stored = {
        f"{module}.qweight": _words(codes, bits).T.contiguous(),
        f"{module}.qzeros": torch.from_numpy(words.view(np.int32)),
        f"{module}.scales": scales.T.contiguous(),
        f"{module}.g_idx": torch.arange(cols, dtype=torch.int32) // (group or cols),
    }
    return stored, values


def awq(name: str, weight: torch.Tensor, group: int = 32, dtype: torch.dtype = torch.float16) -> Quantised:
    """AWQ."""
    codes, zeros, scales, values = asymmetric(weight, 4, group, dtype)
    module = name.removesuffix(".weight")

    def words(numbers: torch.Tensor) -> torch.Tensor:
        return _words(numbers.T.unflatten(-1, (-1, 8))[..., AWQ_ORDER].flatten(-2), 4)

    stored = {
        f"{module}.qweight": words(codes),
        f"{module}.qzeros": words(zeros),
        f"{module}.scales": scales.T.contiguous(),
    }
    return stored, values


_PACKED = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False, "actorder": None}
_ROWS = {"num_bits": 8, "type": "int", "strategy": "channel", "group_size": None, "symmetric": True}


def _compressed(weights: dict[str, object]) -> dict[str, object]:
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "quantization_status": "compressed",
    }


def _gptq(bits: int, group: int, layout: str) -> dict[str, object]:
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group or -1,
        "desc_act": False,
        "sym": False,
        "checkpoint_format": layout,
        "lm_head": False,
    }


KINDS = {
    "int4_zeros": (packed, _compressed(_PACKED)),
    "int8_rows": (packed_rows, _compressed(_ROWS)),
    "gptq": (gptq, _gptq(4, 32, "gptq")),
    "gptq_v2_int8": (
        lambda name, weight: gptq(name, weight, 8, 0, less=False, dtype=torch.bfloat16),
        _gptq(8, 0, "gptq_v2"),
    ),
    "awq": (
        awq,
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 32,
            "version": "gemm",
            "zero_point": True,
            "modules_to_not_convert": ["mlp.gate"],
        },
    ),
}
