"""gpt-oss experts in MXFP4, in the forms of Hugging Face and of GGUF.

`gguf.quants` rounds the weights; transformers' own dequantiser says what the Hugging Face form of the result
means.
"""

from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

PROJECTIONS = ("gate_up_proj", "down_proj")


def ggml_blocks(weight: torch.Tensor) -> np.ndarray:
    """Rows of f32 as ggml's blocks: (..., cols / 32 · 17) u8."""
    return quantize(weight.detach().numpy(), gguf.GGMLQuantizationType.MXFP4)


def planes(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of f32 as Hugging Face has them: (..., cols / 32, 16) u8 and scales (..., cols / 32) u8."""
    blocks = ggml_blocks(weight).reshape(*weight.shape[:-1], -1, 17)
    scales, packed = blocks[..., 0], blocks[..., 1:]
    # ggml keeps elements 0..16 in low nibbles and 16..32 in high ones.
    codes = np.concatenate([packed & 15, packed >> 4], axis=-1)
    pairs = codes[..., ::2] | codes[..., 1::2] << 4
    return torch.from_numpy(pairs.copy()), torch.from_numpy(scales.copy())


def values(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What blocks and scales of `planes` stand for, in float32: transformers' table of values."""
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2).long()
    table = torch.tensor(Fp8Dequantize._FP4_E2M1_LUT)
    return (table[codes] * torch.exp2(scales.float() - 127)[..., None]).flatten(-2)


def pack_experts(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Rounds a gpt-oss model's experts in place; the tensors that stand for them in a published checkpoint."""
    packed = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(PROJECTIONS):
                blocks, scales = planes(parameter.transpose(1, 2).contiguous())
                parameter.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
                packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    return packed


def replace_experts(folder: Path, packed: dict[str, torch.Tensor]) -> None:
    """Puts packed experts in place of a saved checkpoint's."""
    path = folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if not name.endswith(PROJECTIONS)}
    save_file(tensors | packed, path, metadata={"format": "pt"})
