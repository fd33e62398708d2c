#!/usr/bin/env python3
"""Writes crates/compute/src/quant/codebooks.bin: the codebooks of ggml's IQ encodings, a byte a magnitude.

    pip install numpy gguf==0.19.0
    python tools/make_codebooks.py
"""

import pathlib

import numpy as np
from gguf import quants

OUT = pathlib.Path(__file__).parent.parent / "crates/compute/src/quant/codebooks.bin"
ENCODINGS = [quants.IQ2_XXS, quants.IQ2_XS, quants.IQ2_S, quants.IQ3_XXS, quants.IQ3_S, quants.IQ1_S]


def main() -> None:
    books = []
    for encoding in ENCODINGS:
        encoding.init_grid()
        books.append(encoding.grid.astype(np.int8).tobytes())
    OUT.write_bytes(b"".join(books))


if __name__ == "__main__":
    main()
