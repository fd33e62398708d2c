#!/usr/bin/env python3
"""Writes the codebooks of ggml's IQ encodings: crates/compute/src/quant/codebooks.bin, a byte a magnitude, and
crates/compute/src/gpu/kernels/codebooks.h, two or three bits a magnitude.

    pip install numpy gguf==0.19.0
    python tools/make_codebooks.py
"""

import pathlib

import numpy as np
from gguf import quants

OUT = pathlib.Path(__file__).parent.parent / "crates/compute/src/quant/codebooks.bin"
KERNELS = OUT.parents[1] / "gpu/kernels/codebooks.h"
ENCODINGS = [quants.IQ2_XXS, quants.IQ2_XS, quants.IQ2_S, quants.IQ3_XXS, quants.IQ3_S, quants.IQ1_S]


HEAD = """// Codebooks of ggml's IQ encodings, written by `tools/make_codebooks.py`: an entry is the ranks of its magnitudes among
// all of its book, the first one's in the lowest bits. Eight ranks of two bits of IQ2_XXS (256 entries), IQ2_XS (512) and
// IQ2_S (1024), four of three bits of IQ3_XXS (256) and IQ3_S (512), eight of two bits of IQ1 (2048).
#pragma once

// Where books begin.
CONSTANT uint IQ2_XXS_BOOK = 0, IQ2_XS_BOOK = 256, IQ2_S_BOOK = 768, IQ3_XXS_BOOK = 1792, IQ3_S_BOOK = 2048,
              IQ1_BOOK = 2560;

"""


def ranks(book: np.ndarray) -> list[int]:
    """Entries of a book in the kernels' form."""
    values = np.unique(book)
    bits = 2 if len(values) <= 4 else 3
    places = np.searchsorted(values, book).astype(np.int64)
    return [int(entry) for entry in (places << (bits * np.arange(book.shape[1]))).sum(axis=1)]


def main() -> None:
    books = []
    for encoding in ENCODINGS:
        encoding.init_grid()
        grid = encoding.grid.astype(np.int8)
        books.append(grid.reshape(-1, grid.shape[-1]))
    OUT.write_bytes(b"".join(book.tobytes() for book in books))
    entries = [entry for book in books for entry in ranks(book)]
    rows = [", ".join(map(str, entries[i : i + 20])) for i in range(0, len(entries), 20)]
    text = ",\n    ".join(rows)
    KERNELS.write_text(f"{HEAD}CONSTANT ushort CODEBOOKS[{len(entries)}] = {{\n    {text}}};\n")


if __name__ == "__main__":
    main()
