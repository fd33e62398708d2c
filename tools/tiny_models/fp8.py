"""FP8 as DeepSeek publishes it: float8_e4m3fn with a float32 scale for each block of 128 × 128 weights."""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

BLOCK = 128
LARGEST = 448.0
# Matrices of the layers; routers, embeddings, head and norms stay as they are.
QUANTISED = re.compile(r"layers\..*_proj(_with_mqa|_qkvz|_qkv|_z)?\.weight$")


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and the float32 values that they stand for."""
    rows, cols = weight.shape
    padded = torch.zeros(-(-rows // BLOCK) * BLOCK, -(-cols // BLOCK) * BLOCK)
    padded[:rows, :cols] = weight.float()
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scales = blocks.abs().amax(dim=(1, 3)) / LARGEST
    wide = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :cols]
    codes = (weight.float() / wide).to(torch.float8_e4m3fn)
    return codes, scales, codes.float() * wide


def quantise_folder(folder: Path, model: torch.nn.Module) -> None:
    """Rewrites model.safetensors in FP8 and gives `model` the same values."""
    path = folder / "model.safetensors"
    stored, values = {}, {}
    for name, tensor in load_file(path).items():
        if QUANTISED.search(name):
            stored[name], stored[f"{name}_scale_inv"], values[name] = quantise(tensor)
        else:
            stored[name], values[name] = tensor, tensor.float()
    save_file(stored, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".mlp.experts." not in name:
                # The others are as they were, some under other names.
                if QUANTISED.search(name):
                    parameter.copy_(values[name])
                continue
            module, _, kind = name.rpartition(".")
            parts = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else ["down_proj"]
            for expert in range(parameter.shape[0]):
                parameter[expert] = torch.cat([values[f"{module}.{expert}.{part}.weight"] for part in parts])
