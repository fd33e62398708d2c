"""Checkpoints in four bits and in 8-bit floats (e4m3) with other scales than DeepSeek's: MXFP8 as MiniMax-M3 is published, a power
of two (E8M0, stored as bytes) for each 32 weights of a row; ModelOpt's FP8 as Nemotron 3 is published, one scale a matrix, beside
one for activations; and that of compressed-tensors as GLM-4.5 is published, one a row."""

import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from . import four_bits, golden, integers

BLOCK = 32
LARGEST = 448.0
# Exponent of the largest power of two that e4m3 holds.
LARGEST_EXPONENT = 8
# Matrices of the layers; routers, indexers, embeddings, head and norms stay as they are.
QUANTISED = re.compile(r"layers\.\d+\..*((?<!index_[qk])_proj|\.w[123])\.weight$")
# Stacks of them that transformers does not take apart where it writes them.
STACKED = re.compile(r"^(?P<module>.*layers\.\d+\.mlp\.experts)\.(?P<name>gate_up_proj|down_proj)$")

Quantise = Callable[[str, torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor]]


def mxfp8(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What is stored and the float32 values that it stands for: the Open Compute Project's rule."""
    blocks = weight.float().unflatten(-1, (-1, BLOCK))
    exponents = blocks.abs().amax(-1).log2().floor() - LARGEST_EXPONENT
    wide = torch.exp2(exponents)[..., None]
    codes = (blocks / wide).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    stored = {name: codes.flatten(-2), f"{name}_scale_inv": (exponents + 127).to(torch.uint8)}
    return stored, (codes.float() * wide).flatten(-2)


def modelopt(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The same with one scale."""
    scale = weight.float().abs().max() / LARGEST
    codes = (weight.float() / scale).to(torch.float8_e4m3fn)
    module = name.removesuffix(".weight")
    stored = {name: codes, f"{module}.weight_scale": scale, f"{module}.input_scale": torch.tensor(0.01)}
    return stored, codes.float() * scale


def rows(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The same with a bfloat16 scale for each row."""
    scales = (weight.float().abs().amax(-1, keepdim=True) / LARGEST).to(torch.bfloat16)
    codes = (weight.float() / scales.float()).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return {name: codes, f"{name}_scale": scales}, codes.float() * scales.float()


ROWS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
KINDS = {
    "rows": (rows, four_bits.compressed_tensors("float-quantized", ROWS)),
    "mxfp8": (mxfp8, {"quant_method": "mxfp8", "weight_block_size": [1, BLOCK]}),
    "modelopt": (modelopt, {"quant_method": "modelopt", "quant_algo": "FP8"}),
} | four_bits.KINDS | integers.KINDS


def quantise_stack(quantise: Quantise, stack: re.Match[str], tensor: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The same of stacked experts (experts, rows, columns), of which what is stored has a matrix each."""
    projections = ["gate_proj", "up_proj"] if stack["name"] == "gate_up_proj" else ["down_proj"]
    stored, values = {}, []
    for expert, both in enumerate(tensor):
        halves = []
        for projection, matrix in zip(projections, both.chunk(len(projections))):
            parts, value = quantise(f"{stack['module']}.{expert}.{projection}.weight", matrix)
            stored |= parts
            halves.append(value)
        values.append(torch.cat(halves))
    return stored, torch.stack(values)


def quantise_folder(folder: Path, kind: str) -> torch.nn.Module:
    """Rewrites model.safetensors; the model that transformers reads from the values that it then stands for."""
    quantise, said = KINDS[kind]
    path = folder / "model.safetensors"
    stored, values = {}, {}
    for name, tensor in load_file(path).items():
        stored[name], values[name] = tensor, tensor.float()
        if QUANTISED.search(name) and "vision" not in name:
            parts, values[name] = quantise(name, tensor)
            del stored[name]
            stored |= parts
        elif stack := STACKED.search(name):
            parts, values[name] = quantise_stack(quantise, stack, tensor)
            del stored[name]
            stored |= parts
    if len(stored) == len(values):
        raise ValueError("nothing to quantise")
    config = (folder / "config.json").read_text()
    with tempfile.TemporaryDirectory() as scratch:
        plain = Path(scratch)
        (plain / "config.json").write_text(config)
        save_file(values, plain / "model.safetensors", metadata={"format": "pt"})
        model = golden.open_model(plain)
    save_file(stored, path, metadata={"format": "pt"})
    if "producer" in said:
        (folder / "hf_quant_config.json").write_text(json.dumps(said, indent=2) + "\n")
        return model
    config = json.loads(config) | {"quantization_config": said}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return model
