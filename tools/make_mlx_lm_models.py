#!/usr/bin/env python3
"""Makes the tiny checkpoints of families that mlx-lm defines and transformers does not, with golden logits of mlx-lm in float32.

    python tools/make_mlx_lm_models.py OUT [--llama-cpp SOURCE] [NAME ...]
    python tools/make_mlx_lm_models.py OUT [--llama-cpp SOURCE] FAMILY ... --random SEEDS

OUT gets a folder below `hf` for each checkpoint, under published names, and one below `mlx` for each that mlx-lm's converter
quantises. With `--random`, as many random configurations of a family, below OUT/hf. With llama.cpp's source tree, what its
converter makes of those that it can convert is below OUT/gguf.
"""

import argparse
import contextlib
import io
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
from compare_logits import compare
from make_bailing_models import CONVERT
from mlx.utils import tree_map
from mlx_lm.utils import dequantize_model, load_model
from safetensors.numpy import load_file, save_file
from tiny_models.mlx_lm_cases import CASES, CONVERTED, QUANTISED, Case, draw

# Files of a folder; mlx-lm also writes a model card.
KEPT = {"config.json", "model.safetensors", "model.safetensors.index.json"}


def wide(array: mx.array) -> mx.array:
    """Floats in float32."""
    return array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array


def golden(folder: Path, n_tokens: int, seed: int) -> None:
    """Writes tokens i32 (T,) and logits f32 (T, V) of the checkpoint, whose weights are widened first; of quantised ones also how
    far mlx-lm is from that as they are."""
    model, config = load_model(folder)
    vocabulary = config.get("text_config", config)["vocab_size"]
    tokens = np.random.default_rng(seed).integers(0, vocabulary, n_tokens).astype(np.int32)

    def evaluate() -> np.ndarray:
        return np.array(model(mx.array(tokens)[None])[0].astype(mx.float32))

    peer = evaluate() if "quantization" in config else None
    model.update(tree_map(wide, model.parameters()))
    if "quantization" in config:
        model = dequantize_model(model)
    logits = evaluate()
    assert np.isfinite(logits).all()
    arrays = {"tokens": tokens, "logits": logits}
    if peer is not None:
        arrays["peer_kl"] = np.array([compare(peer, logits).kl_nats], dtype=np.float64)
    save_file(arrays, folder / "golden.safetensors")


def write(out: Path, case: Case) -> Path:
    """Writes the checkpoint under published names."""
    folder = out / "hf" / case.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    weights = case.weights(case.config, np.random.default_rng(case.seed))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(case.config, indent=2) + "\n")
    golden(folder, case.n_tokens, case.seed)
    return folder


def quantise(out: Path, source: Path, name: str, bits: int, group_size: int, n_tokens: int) -> None:
    """Has mlx-lm's converter quantise the checkpoint `source`."""
    folder = out / "mlx" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.redirect_stdout(io.StringIO()):
        load_tokenizer = mlx_lm.utils.load_tokenizer
        # There is none.
        mlx_lm.utils.load_tokenizer = lambda *_, **__: type("None", (), {"save_pretrained": lambda *_: None})()
        mlx_lm.convert(str(source), mlx_path=folder, quantize=True, q_bits=bits, q_group_size=group_size, dtype="bfloat16")
        mlx_lm.utils.load_tokenizer = load_tokenizer
    for file in folder.iterdir():
        if file.name not in KEPT:
            file.unlink()
    golden(folder, n_tokens, 1)


def convert(llama_cpp: Path, source: Path, folder: Path) -> None:
    """Has llama.cpp's converter make a file of the checkpoint `source`, with the same golden."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        copy = shutil.copytree(source, Path(scratch) / "hf")
        weights = load_file(copy / "model.safetensors")
        # The converter knows rates as lists.
        weights = {name: array.ravel() if name.endswith(".A_log") else array for name, array in weights.items()}
        save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((copy / "config.json").read_text())
        config |= {"architectures": [CONVERTED[config["model_type"]]]}
        (copy / "config.json").write_text(json.dumps(config))
        text = CONVERT.replace("lambda self: None", "lambda self: self._set_vocab_none()")
        command = [sys.executable, "-c", text, llama_cpp, copy, folder / "model.gguf"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    shutil.copy(source / "golden.safetensors", folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--llama-cpp", type=Path, help="llama.cpp's source tree, for GGUF files")
    parser.add_argument("--random", type=int, metavar="SEEDS", help="how many random configurations")
    parser.add_argument("names", nargs="*", help="fixtures to make, all when absent; with --random a family")
    args = parser.parse_args()
    if args.random:
        for family in args.names:
            for seed in range(args.random):
                case = draw(family, seed)
                source = write(args.out, case)
                if args.llama_cpp and case.convertible:
                    convert(args.llama_cpp, source, args.out / "gguf" / case.name)
        return
    for case in CASES:
        if args.names and case.name not in args.names:
            continue
        source = write(args.out, case)
        if case.name in QUANTISED:
            name, bits, group_size = QUANTISED[case.name]
            quantise(args.out, source, name, bits, group_size, case.n_tokens)
        if args.llama_cpp and case.name.endswith("_gguf"):
            convert(args.llama_cpp, source, args.out / "gguf" / case.name.replace("_gguf", "_f32"))
        if not case.kept:
            shutil.rmtree(source)


if __name__ == "__main__":
    main()
