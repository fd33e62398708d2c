#!/usr/bin/env python3
"""Logits of every test model on the GPU against those on the processor.

    python bench/compare_backends.py MOEFLUX [MODEL ...] [--jobs N]

Needs numpy and safetensors. Runs each model in both precisions, on 70 tokens in batches of 48 (products on tensor
cores) and in batches of 4 (matrix-vector products). Prints the largest error relative to the largest logit, the median
KL divergence and the share of positions with the same top token; ends with 1 if one is beyond what rounding explains.
"""

import argparse
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import numpy as np
from compare_logits import log_softmax
from safetensors.numpy import load_file

FIXTURES = Path(__file__).resolve().parents[1] / "crates/engine/tests/fixtures"
# f32: sums in other orders. int8: f16 activations on the GPU, 8 bits on the processor; experts may be chosen otherwise.
LARGEST_ERROR = {"f32": 1e-3, "int8": 0.5}
LARGEST_KL = {"f32": 1e-6, "int8": 2e-2}


def logits(binary: str, model: str, backend: str, mode: str, chunk: int, out: Path) -> np.ndarray | str:
    tokens = ",".join(str(1 + i * 7 % 50) for i in range(70))
    command = [binary, "logits", model, "--tokens", tokens, "--out", out, "--backend", backend, "--activations", mode,
               "--chunk", str(chunk), "--kv", "f32" if mode == "f32" else "f16"]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode != 0:
        return run.stderr.strip().splitlines()[-1] if run.stderr.strip() else f"exit {run.returncode}"
    return load_file(out)["logits"]


def compare(binary: str, model: Path | str, mode: str, chunk: int) -> tuple[bool, str]:
    name = f"{Path(model).parent.name}/{Path(model).name} {mode} by {chunk}"
    with tempfile.TemporaryDirectory() as folder:
        right = logits(binary, str(model), "cpu", mode, chunk, Path(folder) / "cpu")
        got = logits(binary, str(model), "cuda", mode, chunk, Path(folder) / "cuda")
    for value in (right, got):
        if isinstance(value, str):
            return False, f"{name}: {value}"
    error = np.abs(got - right).max() / np.abs(right).max()
    a, b = log_softmax(got), log_softmax(right)
    kl = np.median((np.exp(b) * (b - a)).sum(axis=-1))
    top = (got.argmax(-1) == right.argmax(-1)).mean()
    fine = error <= LARGEST_ERROR[mode] and kl <= LARGEST_KL[mode]
    return bool(fine), f"{name}: error {error:.1e}, KL {kl:.1e}, top-1 {100 * top:.0f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("binary")
    parser.add_argument("models", nargs="*")
    parser.add_argument("--jobs", type=int, default=8)
    options = parser.parse_args()
    folders = sorted(f for kind in ("gguf", "hf", "mlx") for f in (FIXTURES / kind).iterdir() if f.is_dir())
    found = [next(iter(sorted(f.glob("*.gguf"))), f) for f in folders]
    models = options.models or ["demo", *found]
    jobs = [(m, mode, chunk) for m in models for mode in ("f32", "int8") for chunk in (48, 4)]
    with ThreadPoolExecutor(options.jobs) as pool:
        outcomes = list(pool.map(lambda job: compare(options.binary, *job), jobs))
    for fine, text in outcomes:
        print(text if fine else f"BAD {text}")
    bad = sum(not fine for fine, _ in outcomes)
    print(f"{len(outcomes) - bad} of {len(outcomes)} agree")
    sys.exit(1 if bad else 0)


main()
