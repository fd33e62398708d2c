#!/usr/bin/env python3
"""Compares the error of int8 activations with llama.cpp's, on the same GGUF files and prompts, and with mlx-lm's on the same
MLX folders.

    python tools/compare_int8.py FOLDER MOEFLUX --llama-python PYTHON [--prompts N] [--tokens N] [NAME ...]

Every GGUF file and MLX folder with a golden below FOLDER (see make_tiny_models.py) is given the same random prompts by both
engines, in their default modes; mlx-lm runs on the CPU, in the folder's own element type. The reference is `moeflux logits --activations f32`, which agrees with
transformers to 1e-5. Columns, for either engine: KL divergence from the reference in nats, as mean with its
standard error and as median; then ours by theirs. A mean hangs on the few tokens where the router chooses
otherwise, so it takes many tokens to tell two engines apart by it; the median does not.

Fails if a mean is above the other engine's by more than two standard errors and the median is above it too.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np
from check_parity import model_path, run_logits
from compare_logits import log_softmax
from mlx_lm.utils import load_model
from safetensors.numpy import load_file

PEER = Path(__file__).parent / "tiny_models" / "llama_cpp_peer.py"
# Below are special tokens, and the last ids may be padding.
FIRST_ID, LAST_IDS = 3, 10


def divergence(logits: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """KL(softmax reference ‖ softmax logits) of every token, in nats."""
    ours, right = log_softmax(logits.astype(np.float64)), log_softmax(reference.astype(np.float64))
    return (np.exp(right) * (right - ours)).sum(axis=-1)


def peer_logits(python: str, model: Path, prompts: list[list[int]]) -> list[np.ndarray]:
    """The other engine's logits (T, V) of every prompt: llama.cpp's of a file, mlx-lm's of a folder."""
    if model.is_dir():
        run, _ = load_model(model)
        return [np.array(run(mx.array(prompt)[None])[0].astype(mx.float32)) for prompt in prompts]
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "logits.npy"
        command = [python, PEER, "logits", model, "-", out]
        subprocess.run(command, check=True, input=json.dumps(prompts), text=True, stdout=subprocess.DEVNULL)
        return np.split(np.load(out), np.cumsum([len(prompt) for prompt in prompts])[:-1])


def spread(values: np.ndarray) -> tuple[float, float]:
    """Mean and its standard error."""
    return float(values.mean()), float(values.std() / np.sqrt(len(values)))


def is_quantised(model: Path) -> bool:
    """Whether it is a GGUF file or an MLX folder."""
    return model.is_file() or "quantization" in json.loads((model / "config.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("moeflux", type=Path)
    parser.add_argument("names", nargs="*", help="fixtures whose path contains one of these; all when absent")
    parser.add_argument("--llama-python", required=True, help="interpreter that has llama-cpp-python")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()

    failed = []
    print(f"{'':28}{'moeflux mean':>22}{'median':>10}{'other mean':>22}{'median':>10}{'ratios':>14}")
    for golden in sorted(args.folder.rglob("golden.safetensors")):
        model, name = model_path(golden.parent), golden.parent.name
        if not is_quantised(model) or (args.names and not any(part in str(golden.parent) for part in args.names)):
            continue
        vocab_size = load_file(golden)["logits"].shape[1]
        random = np.random.default_rng(7)
        prompts = random.integers(FIRST_ID, vocab_size - LAST_IDS, (args.prompts, args.tokens)).tolist()
        ours, theirs = [], []
        for prompt, peer in zip(prompts, peer_logits(args.llama_python, model, prompts), strict=True):
            tokens = np.array(prompt)
            reference = run_logits(args.moeflux, golden.parent, tokens, "--activations", "f32")
            fast = run_logits(args.moeflux, golden.parent, tokens, "--activations", "int8")
            ours.append(divergence(fast, reference))
            theirs.append(divergence(peer, reference))
        own, other = np.concatenate(ours), np.concatenate(theirs)
        (mean, error), (peer_mean, peer_error) = spread(own), spread(other)
        median, peer_median = float(np.median(own)), float(np.median(other))
        worse = mean - peer_mean > 2 * np.hypot(error, peer_error) and median > peer_median
        failed += [name] if worse else []
        print(
            f"{name:28}{mean:>12.2e} ± {error:.1e}{median:>10.1e}{peer_mean:>12.2e} ± {peer_error:.1e}"
            f"{peer_median:>10.1e}{mean / peer_mean:>7.2f}{median / peer_median:>7.2f}{' !' if worse else ''}",
            flush=True,
        )
    if failed:
        raise SystemExit(f"int8 activations are worse than the other engine's on {', '.join(failed)}")


if __name__ == "__main__":
    main()
