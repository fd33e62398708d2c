#!/usr/bin/env python3
"""Checks that GPTQModel and AutoAWQ read what `tiny_models/integers.py` packs as the values that it says.

    pip install numpy torch compressed-tensors==0.20.0
    pip install --no-deps gptqmodel==7.7.0 autoawq==0.2.9
    python tools/check_integers.py

Both packages need more to be imported whole (pypcre, logbar, accelerate, device-smi, tokenicer, defuser, pillow, …); of AutoAWQ
only the file with its unpacking is loaded.
"""

import importlib.util
from pathlib import Path

import torch
from tiny_models import integers


def of_autoawq():
    """AutoAWQ's functions for packed words, without the package around them."""
    spec = importlib.util.find_spec("awq")
    path = Path(spec.submodule_search_locations[0]) / "utils/packing_utils.py"
    file = importlib.util.spec_from_file_location("packing_utils", path)
    module = importlib.util.module_from_spec(file)
    file.loader.exec_module(module)
    return module


def check(what: str, got: torch.Tensor, values: torch.Tensor) -> None:
    error = (got.float() - values).abs().max().item()
    print(f"{what:32} largest difference {error:.1e}")
    if error > 1e-6:
        raise SystemExit(f"{what}: other values")


def main() -> None:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(64, 256, generator=generator)
    # Zero points at both ends of their range.
    weight[::3] += 3.0
    weight[1::3] -= 3.0
    for bits in (4, 8):
        for group in (32, 128, 0):
            for less in (True, False):
                stored, values = integers.gptq("w.weight", weight, bits, group, less, torch.float32)
                layer = TorchLinear(
                    bits=bits,
                    group_size=group or -1,
                    sym=False,
                    desc_act=False,
                    in_features=256,
                    out_features=64,
                    bias=False,
                    register_buffers=True,
                )
                for name, tensor in stored.items():
                    setattr(layer, name.removeprefix("w."), tensor)
                if less:
                    convert_gptq_v1_to_v2_format_module(layer, bits=bits, pack_dtype=torch.int32)
                name = f"GPTQ {bits} bits, group {group}, {'gptq' if less else 'gptq_v2'}"
                check(name, layer.dequantize_weight().T, values)
    awq = of_autoawq()
    for group in (32, 128):
        stored, values = integers.awq("w.weight", weight, group, torch.float32)
        parts = [stored[f"w.{name}"] for name in ("qweight", "qzeros", "scales")]
        check(f"AWQ group {group}", awq.dequantize_gemm(*parts, 4, group).T, values)


if __name__ == "__main__":
    main()
