#!/usr/bin/env python3
"""Makes the small GGUF and MLX checkpoints that the checkpoint tests read, and what they must find in them.

    python tools/make_checkpoint_goldens.py crates/engine/tests/goldens/checkpoint

GGUF files are written by the `gguf` package and described by reading them back with it; the MLX folder is
written by `mlx_lm` and described from the modules of the model in memory. Versions: tools/requirements.txt.
"""

import argparse
import json
import shutil
import zlib
from pathlib import Path

import gguf
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from gguf import GGMLQuantizationType as Ggml
from gguf import GGUFValueType as Kind
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_moe
from mlx_lm.utils import quantize_model, save_config, save_model

USABLE = [
    Ggml.F32, Ggml.F16, Ggml.BF16, Ggml.Q4_0, Ggml.Q5_0, Ggml.Q8_0,
    Ggml.Q2_K, Ggml.Q3_K, Ggml.Q4_K, Ggml.Q5_K, Ggml.Q6_K,
]  # fmt: skip
UNUSABLE = [Ggml.TQ1_0, Ggml.TQ2_0, Ggml.I32]

SCALARS = [
    ("test.u8", 200, Kind.UINT8),
    ("test.i8", -100, Kind.INT8),
    ("test.u16", 60000, Kind.UINT16),
    ("test.i16", -30000, Kind.INT16),
    ("test.u32", 4000000000, Kind.UINT32),
    ("test.i32", -2000000000, Kind.INT32),
    ("test.f32", 0.15625, Kind.FLOAT32),
    ("test.bool", True, Kind.BOOL),
    ("test.string", "naïve – 文", Kind.STRING),
    ("test.u64", 2**63, Kind.UINT64),
    ("test.i64", -(2**62), Kind.INT64),
    ("test.f64", 1e-300, Kind.FLOAT64),
]
ARRAYS = [
    ("test.array.u8", [0, 1, 255], Kind.UINT8),
    ("test.array.i32", [-1, 0, 7], Kind.INT32),
    ("test.array.f32", [0.5, -2.0], Kind.FLOAT32),
    ("test.array.bool", [True, False, True], Kind.BOOL),
    ("test.array.string", ["", "a", "Ġthe", "日本"], Kind.STRING),
    ("test.array.u64", [1, 2**40], Kind.UINT64),
]


def crc(data: bytes) -> int:
    return zlib.crc32(data)


def random_tensor(rng: np.random.Generator, kind: Ggml, shape: tuple[int, ...]) -> np.ndarray:
    """Bytes of a tensor of row-major `shape`; their meaning does not matter here."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return rng.integers(0, 256, (*shape[:-1], shape[-1] // block * size), dtype=np.uint8)


def add_tensor(writer: gguf.GGUFWriter, rng: np.random.Generator, name: str, kind: Ggml, shape: tuple) -> None:
    data = random_tensor(rng, kind, shape)
    native = {Ggml.F32: np.float32, Ggml.F16: np.float16, Ggml.I32: np.int32}.get(kind)
    if native is None:
        writer.add_tensor(name, data, raw_dtype=kind)
    else:
        writer.add_tensor(name, data.view(native))


def write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def describe_gguf(path: Path) -> dict:
    reader = gguf.GGUFReader(path)
    tensors = [
        {
            "name": t.name,
            "dtype": t.tensor_type.name,
            "shape": [int(n) for n in reversed(t.shape)],
            "planes": [crc(t.data.tobytes())],
        }
        for t in reader.tensors
    ]
    values = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    return {"metadata": values, "tensors": tensors}


def make_gguf(out: Path) -> dict:
    rng = np.random.default_rng(1)
    single = out / "single.gguf"
    writer = gguf.GGUFWriter(single, "qwen3moe")
    writer.add_custom_alignment(64)
    for key, value, kind in SCALARS:
        writer.add_key_value(key, value, kind)
    for key, value, kind in ARRAYS:
        writer.add_key_value(key, value, Kind.ARRAY, sub_type=kind)
    for kind in USABLE + UNUSABLE:
        columns = max(gguf.GGML_QUANT_SIZES[kind][0], 8)
        add_tensor(writer, rng, f"{kind.name.lower()}.weight", kind, (2, columns))
    add_tensor(writer, rng, "vector.weight", Ggml.F32, (5,))
    add_tensor(writer, rng, "stack.weight", Ggml.Q8_0, (3, 2, 64))
    write(writer)

    split = out / "split.gguf"
    writer = gguf.GGUFWriter(split, "qwen3moe", split_max_tensors=2)
    for i in range(5):
        add_tensor(writer, rng, f"blk.{i}.weight", Ggml.F16, (2, i + 1))
    write(writer)
    shards = [describe_gguf(path) for path in sorted(out.glob("split-*.gguf"))]
    return {
        "single.gguf": describe_gguf(single),
        "split-00002-of-00003.gguf": {
            "metadata": {"general.architecture": "qwen3moe"},
            "tensors": [tensor for shard in shards for tensor in shard["tensors"]],
        },
    }


def make_mlx(out: Path) -> dict:
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "intermediate_size": 64,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "rms_norm_eps": 1e-6,
        "vocab_size": 8,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "max_position_embeddings": 64,
        "norm_topk_prob": True,
    }
    mx.random.seed(1)
    model = qwen3_moe.Model(qwen3_moe.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())

    def settings(path: str, _: nn.Module) -> bool | dict:
        special = {
            "mlp.gate": {"bits": 8, "group_size": 64},
            "q_proj": {"bits": 3, "group_size": 64},
            "k_proj": {"bits": 6, "group_size": 32},
            "v_proj": {"bits": 2, "group_size": 64},
            "up_proj": {"bits": 5, "group_size": 32},
            "lm_head": False,
        }
        return next((value for name, value in special.items() if path.endswith(name)), True)

    model, config = quantize_model(model, config, group_size=32, bits=4, quant_predicate=settings)
    shutil.rmtree(out / "mlx", ignore_errors=True)
    (out / "mlx").mkdir()
    save_model(out / "mlx", model, donate_model=False)
    save_config(config, out / "mlx" / "config.json")

    def raw(array: mx.array) -> int:
        return crc(np.array(array.view(mx.uint8)).tobytes())

    tensors = []
    for path, module in tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module):
        weight = getattr(module, "weight", None)
        if weight is None:
            continue
        entry = {"name": f"{path}.weight", "dtype": "BF16", "shape": list(weight.shape), "planes": [raw(weight)]}
        if hasattr(module, "scales"):
            entry["dtype"] = f"affine {module.bits}-bit g{module.group_size} bf16"
            entry["shape"][-1] = weight.shape[-1] * 32 // module.bits
            entry["planes"] += [raw(module.scales), raw(module.biases)]
        tensors.append(entry)
    return {"mlx": {"metadata": {}, "tensors": sorted(tensors, key=lambda t: t["name"])}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    expected = {**make_gguf(out), **make_mlx(out)}
    text = json.dumps(expected, indent=1, ensure_ascii=False)
    (out / "expected.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
