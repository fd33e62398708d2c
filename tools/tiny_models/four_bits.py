"""Matrices in four bits: INT4 and NVFP4, packed and unpacked by compressed-tensors itself.

A function gives what is stored, by name, and the float32 values that it stands for.
"""

import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

Quantised = tuple[dict[str, torch.Tensor], torch.Tensor]

# Of e4m3 and e2m1.
LARGEST = 448.0
LARGEST_ELEMENT = 6.0
ELEMENTS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FP4_BLOCK = 16


def int4(name: str, weight: torch.Tensor, group: int = 32, dtype: torch.dtype = torch.bfloat16) -> Quantised:
    """Symmetric groups, as Kimi-K2-Thinking is published."""
    groups = weight.float().unflatten(-1, (-1, group))
    scales = (groups.abs().amax(-1) / 7.5).to(dtype)
    wide = scales.float()[..., None]
    codes = (groups / wide).round().clamp(-8, 7).to(torch.int8).flatten(-2)
    packed = pack_to_int32(codes, 4)
    module = name.removesuffix(".weight")
    stored = {
        f"{module}.weight_packed": packed,
        f"{module}.weight_scale": scales,
        f"{module}.weight_shape": torch.tensor(weight.shape),
    }
    back = unpack_from_int32(packed, 4, weight.shape).float().unflatten(-1, (-1, group))
    return stored, (back * wide).flatten(-2)


def _nvfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packed elements, scales of blocks and what those are divided by."""
    blocks = weight.float().unflatten(-1, (-1, FP4_BLOCK))
    whole = LARGEST * LARGEST_ELEMENT / weight.float().abs().max()
    scales = (blocks.abs().amax(-1) / LARGEST_ELEMENT * whole).to(torch.float8_e4m3fn)
    ratios = (blocks / (scales.float() / whole)[..., None]).nan_to_num(0.0)
    nearest = ELEMENTS[(ratios.abs()[..., None] - ELEMENTS).abs().argmin(-1)]
    # compressed-tensors packs elements as bf16, which holds them.
    elements = torch.copysign(nearest, ratios).flatten(-2)
    return pack_fp4_to_uint8(elements.to(torch.bfloat16)), scales, whole


def _nvfp4_values(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    rows, half = packed.shape
    elements = unpack_fp4_from_uint8(packed, rows, 2 * half, dtype=torch.float32)
    return (elements.unflatten(-1, (-1, FP4_BLOCK)) * scales[..., None]).flatten(-2)


def nvfp4(name: str, weight: torch.Tensor) -> Quantised:
    """compressed-tensors: scales are divided by the matrix's."""
    packed, scales, whole = _nvfp4(weight)
    module = name.removesuffix(".weight")
    stored = {
        f"{module}.weight_packed": packed,
        f"{module}.weight_scale": scales,
        f"{module}.weight_global_scale": whole.reshape(1),
        f"{module}.input_global_scale": torch.tensor([100.0]),
    }
    return stored, _nvfp4_values(packed, scales.float() / whole)


def modelopt_nvfp4(name: str, weight: torch.Tensor) -> Quantised:
    """ModelOpt: scales are multiplied by the matrix's."""
    packed, scales, whole = _nvfp4(weight)
    module = name.removesuffix(".weight")
    factor = 1 / whole
    stored = {
        name: packed,
        f"{module}.weight_scale": scales,
        f"{module}.weight_scale_2": factor,
        f"{module}.input_scale": torch.tensor(0.01),
    }
    return stored, _nvfp4_values(packed, scales.float() * factor)


def compressed_tensors(layout: str, weights: dict[str, object]) -> dict[str, object]:
    """What such a folder says of itself."""
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "quantization_status": "compressed",
    }


_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "actorder": None}
_NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": FP4_BLOCK, "symmetric": True}
_MODELOPT = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": FP4_BLOCK, "exclude_modules": ["lm_head"]}

KINDS = {
    "int4": (int4, compressed_tensors("pack-quantized", _INT4)),
    "nvfp4": (nvfp4, compressed_tensors("nvfp4-pack-quantized", _NVFP4)),
    # Said in hf_quant_config.json.
    "modelopt_nvfp4": (modelopt_nvfp4, {"producer": {"name": "modelopt"}, "quantization": _MODELOPT}),
}
