#!/usr/bin/env python3
"""Logits of every test model on the GPU against those on the processor.

    python bench/compare_backends.py MOEFLUX [MODEL ...] [--jobs N] [--tokens N] [--chunks N,N] [--devices 0,1]

Needs numpy and safetensors. Runs each model in both precisions, on 70 tokens in batches of 48 (products on tensor
cores) and in batches of 4 (matrix-vector products); with `--tokens 300 --chunks 300` as long prompts. In f32 prints the largest error relative to the largest logit, the
median KL divergence and the share of positions with the same top token; with rounded activations, where the two round
differently, the median divergence of either from the processor's exact logits. Then runs some with as little memory of the
GPU as they take, experts coming and going, which must not change a bit. With `--devices` compares instead the bits on the first of
several GPUs with those on all of them, where each has the least memory that does and a tenth more. Ends with 1 if something is
beyond what rounding explains.
"""

import argparse
import random
import re
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
# Sums in other orders.
LARGEST_ERROR = 1e-3
LARGEST_KL = 1e-6
# What f16 or 8 bits cost the GPU, to what 8 bits cost the processor, and what one term of 8 bits may cost such models where the
# processor has two.
LARGEST_RATIO = 2
LARGEST_ROUNDED_KL = 3e-3
# Beside the embedded one, of which the experts stream.
STREAMED = ["qwen3_moe_q4_k_m", "gpt_oss_mxfp4", "nemotron_h_bf16"]
# Set by an option.
count_of_tokens = 70


def logits(binary: str, model: str, backend: str, mode: str, chunk: int, out: Path, *more: str) -> np.ndarray | str:
    # The smallest vocabulary has 37 tokens. None that repeat themselves: an index would then choose among keys that differ by
    # rounding alone.
    draw = random.Random(1)
    tokens = ",".join(str(draw.randint(1, 36)) for _ in range(count_of_tokens))
    command = [binary, "logits", model, "--tokens", tokens, "--out", out, "--backend", backend, "--activations", mode,
               "--chunk", str(chunk), "--kv", "f32" if mode == "f32" else "f16", *more]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode != 0:
        return run.stderr.strip().splitlines()[-1] if run.stderr.strip() else f"exit {run.returncode}"
    return load_file(out)["logits"]


def divergence(got: np.ndarray, right: np.ndarray) -> float:
    a, b = log_softmax(got), log_softmax(right)
    return float(np.median((np.exp(b) * (b - a)).sum(axis=-1)))


def compare(binary: str, model: Path | str, mode: str, chunk: int) -> tuple[bool, str]:
    name = f"{Path(model).parent.name}/{Path(model).name} {mode} by {chunk}"
    with tempfile.TemporaryDirectory() as folder:
        runs = [("cuda", mode, chunk), ("cpu", mode, chunk)] + [("cpu", "f32", chunk)] * (mode == "int8")
        values = [logits(binary, str(model), *run, Path(folder) / "out") for run in runs]
    for value in values:
        if isinstance(value, str):
            return False, f"{name}: {value}"
    got, right = values[0], values[-1]
    kl = divergence(got, right)
    if mode == "int8":
        of_cpu = divergence(values[1], right)
        return kl <= max(LARGEST_RATIO * of_cpu, LARGEST_ROUNDED_KL), f"{name}: KL {kl:.1e}, of the processor {of_cpu:.1e}"
    error = float(np.abs(got - right).max() / np.abs(right).max())
    top = (got.argmax(-1) == right.argmax(-1)).mean()
    fine = error <= LARGEST_ERROR and kl <= LARGEST_KL
    return fine, f"{name}: error {error:.1e}, KL {kl:.1e}, top-1 {100 * top:.0f} %"


def stream(binary: str, model: Path | str, mode: str, chunk: int) -> tuple[bool, str]:
    """Logits with the least memory that the model runs in, to a 64th."""
    name = f"{Path(model).parent.name}/{Path(model).name} {mode} by {chunk}"
    with tempfile.TemporaryDirectory() as folder:
        def with_memory(size: int) -> np.ndarray | str:
            return logits(binary, str(model), "cuda", mode, chunk, Path(folder) / "cuda", "--device-memory", str(size))

        enough = 1 << 30
        right = least = with_memory(enough)
        if isinstance(right, str):
            return False, f"{name}: {right}"
        too_little = 0
        while enough - too_little > enough >> 6:
            middle = (enough + too_little) // 2
            got = with_memory(middle)
            if isinstance(got, str):
                too_little = middle
            else:
                enough, least = middle, got
    same = np.array_equal(least.view(np.uint32), right.view(np.uint32))
    return bool(same), f"{name} in {enough / 2**20:.2f} MiB of the GPU: {'the same' if same else 'other'} bits"


UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def divide(binary: str, model: Path | str, mode: str, chunk: int, devices: str) -> tuple[bool, str]:
    """Logits on several GPUs, between which layers are divided since each has too little memory for all."""
    name = f"{Path(model).parent.name}/{Path(model).name} {mode} by {chunk}"
    with tempfile.TemporaryDirectory() as folder:
        def on(devices: str, *more: str) -> np.ndarray | str:
            return logits(binary, str(model), "cuda", mode, chunk, Path(folder) / "cuda", "--devices", devices, *more)

        one, refused = on(devices.split(",")[0]), on(devices, "--device-memory", "1000")
        if isinstance(one, str):
            return False, f"{name}: {one}"
        found = re.search(r"at least ([0-9.]+) (B|KiB|MiB|GiB)", refused) if isinstance(refused, str) else None
        if found is None:
            return False, f"{name}: no least memory: {refused}"
        least = int(1.1 * float(found[1]) * UNITS[found[2]])
        several = on(devices, "--device-memory", str(least))
    if isinstance(several, str):
        return False, f"{name} on {devices}: {several}"
    same = np.array_equal(one.view(np.uint32), several.view(np.uint32))
    return bool(same), f"{name} in {least / 2**20:.2f} MiB of {devices}: {'the same' if same else 'other'} bits"


def main() -> None:
    global count_of_tokens
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("binary")
    parser.add_argument("models", nargs="*")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=count_of_tokens)
    parser.add_argument("--chunks", default="48,4")
    parser.add_argument("--devices")
    options = parser.parse_args()
    count_of_tokens = options.tokens
    chunks = [int(chunk) for chunk in options.chunks.split(",")]
    folders = sorted(f for kind in ("gguf", "hf", "mlx") for f in (FIXTURES / kind).iterdir() if f.is_dir())
    found = [next(iter(sorted(f.glob("*.gguf"))), f) for f in folders]
    models = options.models or ["demo", *found]
    jobs = [(m, mode, chunk) for m in models for mode in ("f32", "int8") for chunk in chunks]
    streamed = [(m, mode, chunk) for m, mode, chunk in jobs if m == "demo" or Path(m).parent.name in STREAMED]
    bad = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        if options.devices:
            outcomes = [pool.submit(divide, options.binary, *job, options.devices) for job in jobs]
        else:
            outcomes = [pool.submit(compare, options.binary, *job) for job in jobs]
            outcomes += [pool.submit(stream, options.binary, *job) for job in streamed]
        # As they come: whoever has to stop this sees how far it got.
        for outcome in outcomes:
            fine, text = outcome.result()
            bad += not fine
            print(text if fine else f"BAD {text}", flush=True)
    print(f"{len(outcomes) - bad} of {len(outcomes)} agree")
    sys.exit(1 if bad else 0)


main()
