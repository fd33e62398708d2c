#!/usr/bin/env python3
"""Runs `moeflux logits` on every fixture below a folder and prints how close it comes to the goldens.

    python tools/check_parity.py FOLDER MOEFLUX [--slots N] [NAME ...]

A fixture is a folder with golden.safetensors beside a checkpoint (see make_tiny_models.py). Each is run
with f32 activations in one go, in chunks of 7, token by token, and with a small expert cache; then with
int8 activations. Columns: the largest relative error of the logits (max|a−b| / max|b|) of the first three
runs; the mean KL of the first; whether the small cache gave the same bits as the first; the mean KL with
int8 activations, and beside it that of the peer engine on the same file (llama.cpp for GGUF, mlx-lm for
MLX).

A run fails on a relative error above 1e-3, a KL in f32 above 1e-4, other bits with the small cache, or an
int8 KL above llama.cpp's. The last depends on a few routing decisions when the golden is short: judge it on
the large fixtures.
"""

import argparse
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from compare_logits import compare
from safetensors.numpy import load_file

MAX_RELATIVE_ERROR = 1e-3
MAX_KL_NATS = 1e-4
CHUNKS = (7, 1)


class RunFailed(Exception):
    """moeflux ended with an error."""


@dataclass
class Row:
    """One line of the table."""

    name: str
    cells: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def judged(self, text: str, good: bool, what: str) -> None:
        """Adds a cell, marked if it breaks its limit."""
        self.cells.append(text if good else f"{text} !")
        if not good:
            self.failures.append(what)


def model_path(folder: Path) -> Path:
    """What to hand to moeflux: the folder, or its GGUF file (the first of several)."""
    return min(folder.glob("*.gguf"), default=folder)


def run_logits(moeflux: Path, folder: Path, tokens: np.ndarray, *flags: str) -> np.ndarray:
    """Logits (T, V) f32 of one run."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "logits.safetensors"
        ids = ",".join(str(token) for token in tokens)
        command = [moeflux, "logits", model_path(folder), "--tokens", ids, "--out", out, *flags]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RunFailed(done.stderr.strip() or f"exit status {done.returncode}")
        return load_file(out)["logits"]


def check(moeflux: Path, folder: Path, name: str, slots: int) -> Row:
    """All runs of one fixture."""
    golden = load_file(folder / "golden.safetensors")
    tokens, expected = golden["tokens"], golden["logits"]
    row = Row(name)
    f32 = ("--activations", "f32")

    whole = run_logits(moeflux, folder, tokens, *f32)
    found = compare(whole, expected)
    row.judged(f"{found.relative_error:.1e}", found.relative_error <= MAX_RELATIVE_ERROR, "relative error")
    for chunk in CHUNKS:
        chunked = compare(run_logits(moeflux, folder, tokens, *f32, "--chunk", str(chunk)), expected)
        good = chunked.relative_error <= MAX_RELATIVE_ERROR
        row.judged(f"{chunked.relative_error:.1e}", good, f"relative error in chunks of {chunk}")
    row.judged(f"{found.kl_nats:.1e}", found.kl_nats <= MAX_KL_NATS, "KL")
    streamed = run_logits(moeflux, folder, tokens, *f32, "--expert-cache", str(slots))
    same = streamed.tobytes() == whole.tobytes()
    row.judged("same" if same else "differs", same, "bits with a small expert cache")

    fast = compare(run_logits(moeflux, folder, tokens, "--activations", "int8"), expected)
    if "peer_kl" in golden:
        peer = float(golden["peer_kl"][0])
        # mlx-lm does not quantise activations: its figure is shown, not a limit.
        good = fast.kl_nats <= peer or model_path(folder) == folder
        row.judged(f"{fast.kl_nats:.1e}", good, "int8 KL above llama.cpp's")
        row.cells.append(f"{peer:.1e}")
    else:
        row.cells += [f"{fast.kl_nats:.1e}", "-"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("moeflux", type=Path)
    parser.add_argument("names", nargs="*", help="fixtures whose path contains one of these; all when absent")
    parser.add_argument(
        "--slots",
        type=int,
        default=4,
        help="experts in the small cache (default: 4, the most any fixture uses)",
    )
    args = parser.parse_args()

    folders = sorted(golden.parent for golden in args.folder.rglob("golden.safetensors"))
    named = [(folder, str(folder.relative_to(args.folder))) for folder in folders]
    chosen = [(f, name) for f, name in named if not args.names or any(part in name for part in args.names)]
    if not chosen:
        raise SystemExit(f"no fixture below {args.folder}")
    chunks = [f"chunk {chunk}" for chunk in CHUNKS]
    headings = ["one go", *chunks, "KL", f"{args.slots} slots", "int8 KL", "peer KL"]
    width = max(len(name) for _, name in chosen)
    print(f"{'':{width}}  " + "".join(f"{heading:>11}" for heading in headings))
    failures = []
    for folder, name in chosen:
        try:
            row = check(args.moeflux, folder, name, args.slots)
        except (RunFailed, ValueError) as error:
            print(f"{name:{width}}  {error}", flush=True)
            failures.append(f"{name}: {error}")
            continue
        print(f"{name:{width}}  " + "".join(f"{cell:>11}" for cell in row.cells), flush=True)
        failures += [f"{name}: {what}" for what in row.failures]
    if failures:
        print(f"\n{len(failures)} failed:", *failures, sep="\n  ", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
