#!/usr/bin/env python3
"""Writes the goldens of crates/compute/tests/it/quant.rs from independent implementations.

    pip install numpy safetensors gguf==0.19.0 "mlx[cpu]==0.32.4" llama-cpp-python==0.3.36 torch
    pip install compressed-tensors==0.20.0
    python tools/make_quant_goldens.py

Six files in crates/compute/tests/goldens/quant/:

ggml.safetensors      `NAME.bytes` u8 and `NAME.values` f32 (one row): random and extreme blocks through
                      `gguf.quants.dequantize`.
affine.safetensors    `bB.gG.HALF.{weight,scales,biases}` as MLX stores them (as bytes) and `.values` f32:
                      random bits through `mlx.core.dequantize` with the scales widened to f32.
fp8.safetensors       `weight` u8, every code of float8_e4m3fn among them, with `KIND.scale_inv` in f32, bf16 and e8m0
                      for blocks of 128 × 128 and edges of 2, f32 for `rows` and one for the `whole`, and `KIND.values` f32: torch's
                      product.
four_bits.safetensors `KIND.`: what compressed-tensors and ModelOpt store, and `KIND.values` f32.
mxfp8.safetensors     `weight` u8 and `scales` u8, and `values` f32 through `mlx.core.dequantize`.
quantize.safetensors  `input.KIND` f32, one row of weights of each kind, and what the reference quantisers make of
                      it: `q8_0.KIND` and `q4_0.KIND` u8, llama.cpp's blocks; `q4_k.KIND.rms`, `q6_k.KIND.rms`
                      and `affine.BITS.KIND.rms` f64, the root mean square error after dequantisation of
                      llama.cpp's and of mlx.core.quantize's (groups of 64, bf16).
"""

import ctypes
import importlib.util
import pathlib

import gguf
import mlx.core as mx
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch_file
from tiny_models import four_bits, integers

OUT = pathlib.Path(__file__).parent.parent / "crates/compute/tests/goldens/quant"
# Type: byte offsets of the f16 fields of a block.
HALVES = {
    Type.Q4_0: [0],
    Type.Q5_0: [0],
    Type.Q8_0: [0],
    Type.Q2_K: [80, 82],
    Type.Q3_K: [108],
    Type.Q4_K: [0, 2],
    Type.Q5_K: [0, 2],
    Type.Q6_K: [208],
    Type.Q4_1: [0, 2],
    Type.Q5_1: [0, 2],
    Type.IQ1_S: [0],
    Type.IQ1_M: [],
    Type.IQ2_XXS: [0],
    Type.IQ2_XS: [0],
    Type.IQ2_S: [0],
    Type.IQ3_XXS: [0],
    Type.IQ3_S: [0],
    Type.IQ4_NL: [0],
    Type.IQ4_XS: [0],
}
ORDINARY = [0.0123, -0.0371]
# Largest, subnormal and smallest normal, zeros, infinity and NaN, in pairs for d and dmin.
EXTREME = [(65504.0, 65504.0), (5.96e-08, -6.104e-05), (-0.0, 0.0), (np.inf, 1.0), (np.nan, 1.0)]


def ggml_blocks(rng, dtype):
    """Blocks of random bits with ordinary scales, of constant bytes, and with extreme scales."""
    cols, size = gguf.GGML_QUANT_SIZES[dtype]
    ordinary = rng.integers(0, 256, (max(2, 128 // cols), size), dtype=np.uint8)
    constant = np.repeat(np.array([[0xFF], [0x80]], dtype=np.uint8), size, axis=1)
    extreme = rng.integers(0, 256, (len(EXTREME), size), dtype=np.uint8)
    for blocks, scales in ((ordinary, [ORDINARY] * len(ordinary)), (extreme, EXTREME)):
        for block, pair in zip(blocks, scales):
            for at, value in zip(HALVES[dtype], pair):
                block[at : at + 2] = np.array([value], dtype=np.float16).view(np.uint8)
    return np.concatenate([ordinary, constant, extreme]).reshape(1, -1)


def write_ggml(rng):
    tensors = {}
    for dtype in HALVES:
        data = ggml_blocks(rng, dtype)
        with np.errstate(all="ignore"):
            values = gguf.quants.dequantize(data, dtype)
        tensors[f"{dtype.name.lower()}.bytes"] = data[0]
        tensors[f"{dtype.name.lower()}.values"] = values[0]
    save_file(tensors, OUT / "ggml.safetensors")


def write_affine(rng):
    tensors = {}
    for bits in (2, 3, 4, 5, 6, 8):
        for group in (32, 64, 128):
            for half in (mx.float16, mx.bfloat16):
                cols = 2 * group
                packed = mx.array(rng.integers(0, 2**32, (1, cols * bits // 32), dtype=np.uint32))
                scales = mx.array(rng.normal(0, 0.02, (1, 2)).astype(np.float32)).astype(half)
                biases = mx.array(rng.normal(0, 0.2, (1, 2)).astype(np.float32)).astype(half)
                values = mx.dequantize(
                    packed, scales.astype(mx.float32), biases.astype(mx.float32), group_size=group, bits=bits
                )
                name = f"b{bits}.g{group}.{'f16' if half == mx.float16 else 'bf16'}"
                tensors[f"{name}.weight"] = np.array(packed).view(np.uint8)[0]
                tensors[f"{name}.scales"] = np.array(scales.view(mx.uint8))[0]
                tensors[f"{name}.biases"] = np.array(biases.view(mx.uint8))[0]
                tensors[f"{name}.values"] = np.array(values)[0]
    save_file(tensors, OUT / "affine.safetensors")


def llama_quantize(values, dtype):
    """`values` through llama.cpp's own quantiser, without an importance matrix."""
    package = pathlib.Path(importlib.util.find_spec("llama_cpp").origin).parent
    ggml = ctypes.CDLL(str(package / "lib/libggml-base.so"))
    ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
    ggml.ggml_quantize_chunk.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_void_p,
    ]
    block, size = gguf.GGML_QUANT_SIZES[dtype]
    out = np.zeros(values.size // block * size, dtype=np.uint8)
    ggml.ggml_quantize_chunk(int(dtype), values.ctypes.data, out.ctypes.data, 0, 1, values.size, None)
    return out.reshape(1, -1)


def inputs(rng):
    """Rows of 512 weights of different character."""
    n = 512
    rare = rng.normal(0, 0.02, n)
    rare[::97] *= 30
    return {
        "normal": rng.normal(0, 0.02, n),
        "heavy": rng.standard_t(3, n) * 0.02,
        "outliers": rare,
        "positive": rng.uniform(0.1, 1.0, n),
        "negative": -rng.gamma(2, 0.1, n),
        "sparse": rng.normal(0, 1, n) * (rng.random(n) < 0.1),
        "tiny": rng.normal(0, 3e-6, n),
        "huge": rng.normal(0, 3e3, n),
    }


def write_fp8(rng):
    rows, cols, block = 130, 130, 128
    codes = torch.from_numpy(rng.integers(0, 256, (rows, cols), dtype=np.uint8))
    codes[:2, :128] = torch.arange(256, dtype=torch.uint8).reshape(2, 128)
    tensors = {"weight": codes}
    for kind, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
        scales = torch.from_numpy(rng.normal(0, 0.02, (2, 2)).astype(np.float32)).to(dtype)
        wide = scales.float().repeat_interleave(block, 0).repeat_interleave(block, 1)[:rows, :cols]
        tensors[f"{kind}.scale_inv"] = scales
        tensors[f"{kind}.values"] = codes.view(torch.float8_e4m3fn).float() * wide
    exponents = torch.from_numpy(np.random.default_rng(7).integers(0, 255, (2, 2), dtype=np.uint8))
    wide = torch.exp2(exponents.double() - 127).repeat_interleave(block, 0).repeat_interleave(block, 1)
    tensors["e8m0.scale_inv"] = exponents
    values = codes.view(torch.float8_e4m3fn).double() * wide[:rows, :cols]
    tensors["e8m0.values"] = values.float()
    rows_scales = torch.from_numpy(np.random.default_rng(9).normal(0, 0.02, (rows, 1)).astype(np.float32))
    tensors["rows.scale_inv"] = rows_scales
    tensors["rows.values"] = codes.view(torch.float8_e4m3fn).float() * rows_scales
    tensors["whole.scale_inv"] = torch.tensor([0.0173])
    tensors["whole.values"] = codes.view(torch.float8_e4m3fn).float() * tensors["whole.scale_inv"]
    save_torch_file(tensors, OUT / "fp8.safetensors")


def write_four_bits(seed):
    weight = torch.randn(10, 256, generator=torch.Generator().manual_seed(seed))
    weight[3, ::50] *= 40
    weight[5, 16:48] = 0.0
    stored, tensors = {}, {}
    stored["int4_32"] = four_bits.int4("w.weight", weight)
    stored["int4_128"] = four_bits.int4("w.weight", weight, 128, torch.float16)
    stored["int4_zeros"] = integers.packed("w.weight", weight, 4, 64)
    stored["int8_rows"] = integers.packed_rows("w.weight", weight)
    stored["int8_zeros"] = integers.packed("w.weight", weight, 8, 32, torch.float16)
    stored["nvfp4"] = four_bits.nvfp4("w.weight", weight)
    stored["modelopt_nvfp4"] = four_bits.modelopt_nvfp4("w.weight", weight)
    for kind, (parts, values) in stored.items():
        tensors |= {f"{kind}.{name.removeprefix('w.')}": part.contiguous() for name, part in parts.items()}
        tensors[f"{kind}.values"] = values
    save_torch_file(tensors, OUT / "four_bits.safetensors")


def write_mxfp8(rng):
    codes = np.arange(256, dtype=np.uint8).repeat(2)
    # Without NaN, which MLX does not have here.
    codes[(codes & 127) == 127] = 0
    codes = rng.permutation(codes).reshape(8, 64)
    scales = rng.integers(100, 150, (8, 2), dtype=np.uint8)
    words = mx.array(codes.view(np.uint32))
    values = mx.dequantize(words, mx.array(scales), group_size=32, bits=8, mode="mxfp8", dtype=mx.float32)
    tensors = {"weight": codes, "scales": scales, "values": np.array(values)}
    save_file(tensors, OUT / "mxfp8.safetensors")


def write_quantize(rng):
    tensors = {}
    for kind, values in inputs(rng).items():
        # As in a checkpoint: what mlx sees is then what the others see.
        values = np.array(mx.array(values.astype(np.float32)).astype(mx.bfloat16).astype(mx.float32))
        tensors[f"input.{kind}"] = values

        def rms(back):
            return np.array(np.sqrt(np.mean((back.ravel().astype(np.float64) - values) ** 2)))

        for dtype in (Type.Q8_0, Type.Q4_0):
            tensors[f"{dtype.name.lower()}.{kind}"] = llama_quantize(values, dtype)[0]
        for dtype in (Type.Q4_K, Type.Q6_K):
            back = gguf.quants.dequantize(llama_quantize(values, dtype), dtype)
            tensors[f"{dtype.name.lower()}.{kind}.rms"] = rms(back)
        for bits in (2, 3, 4, 5, 6, 8):
            planes = mx.quantize(mx.array(values[None]).astype(mx.bfloat16), group_size=64, bits=bits)
            planes = (planes[0], planes[1].astype(mx.float32), planes[2].astype(mx.float32))
            back = np.array(mx.dequantize(*planes, group_size=64, bits=bits))
            tensors[f"affine.{bits}.{kind}.rms"] = rms(back)
    save_file(tensors, OUT / "quantize.safetensors")


if __name__ == "__main__":
    OUT.mkdir(parents=True, exist_ok=True)
    write_ggml(np.random.default_rng(1))
    write_affine(np.random.default_rng(2))
    write_quantize(np.random.default_rng(3))
    write_fp8(np.random.default_rng(4))
    write_mxfp8(np.random.default_rng(8))
    write_four_bits(10)
    for path in sorted(OUT.iterdir()):
        print(f"{path.stat().st_size:8} {path.name}")
