#!/usr/bin/env python3
"""Makes the tiny checkpoints and golden logits that the parity tests read.

    python tools/make_tiny_models.py hf OUT [NAME ...]
"""

import argparse
from pathlib import Path

import transformers
from tiny_models.hf_cases import HF_CASES
from tiny_models.hf_files import write_case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    hf = commands.add_parser("hf", help="Hugging Face safetensors folders")
    hf.add_argument("out", type=Path)
    hf.add_argument("names", nargs="*", help="fixtures to make; all when absent")
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()

    for case in HF_CASES:
        if args.names and case.name not in args.names:
            continue
        report = write_case(case, args.out)
        size = sum(file.stat().st_size for file in (args.out / case.name).iterdir())
        print(f"{case.name:28} {size / 1024:6.0f} KiB  {report}")


if __name__ == "__main__":
    main()
