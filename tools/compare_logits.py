#!/usr/bin/env python3
"""Compares two files of logits position by position.

    python tools/compare_logits.py A.safetensors B.safetensors [--key-a NAME] [--key-b NAME]

Prints, for `logits` (n_tokens, vocab_size) f32 in each: the largest relative error max|a−b| / max|b|,
KL(softmax b ‖ softmax a) in nats as mean and median over positions (one routing decision that falls the
other way moves the mean alone), the mean cosine and the share of positions with the same top token. B is
the reference.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file


@dataclass(frozen=True)
class Comparison:
    """How far logits are from a reference."""

    relative_error: float
    kl_nats: float
    median_kl_nats: float
    cosine: float
    top1: float

    def __str__(self) -> str:
        return (
            f"max relative error {self.relative_error:.3e}  "
            f"KL mean {self.kl_nats:.2e} median {self.median_kl_nats:.2e} nats  "
            f"cosine {self.cosine:.9f}  top-1 {100 * self.top1:.1f} %"
        )


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis, in float64."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def compare(a: np.ndarray, reference: np.ndarray) -> Comparison:
    """Compares `a` with `reference`, both (n_tokens, vocab_size)."""
    if a.shape != reference.shape:
        raise ValueError(f"shapes differ: {a.shape} and {reference.shape}")
    if not np.isfinite(a).all():
        raise ValueError("the first logits hold NaN or infinity")
    a, b = a.astype(np.float64), reference.astype(np.float64)
    log_a, log_b = log_softmax(a), log_softmax(b)
    lengths = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    kl = (np.exp(log_b) * (log_b - log_a)).sum(axis=-1)
    return Comparison(
        relative_error=float(np.abs(a - b).max() / np.abs(b).max()),
        kl_nats=float(kl.mean()),
        median_kl_nats=float(np.median(kl)),
        cosine=float(((a * b).sum(axis=-1) / lengths).mean()),
        top1=float((a.argmax(axis=-1) == b.argmax(axis=-1)).mean()),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("a", type=Path)
    parser.add_argument("b", type=Path, help="the reference")
    parser.add_argument("--key-a", default="logits", help="array of A (default: logits)")
    parser.add_argument("--key-b", default="logits", help="array of B (default: logits)")
    args = parser.parse_args()
    print(compare(load_file(args.a)[args.key_a], load_file(args.b)[args.key_b]))


if __name__ == "__main__":
    main()
