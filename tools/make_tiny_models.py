#!/usr/bin/env python3
"""Makes the tiny checkpoints and golden logits that the parity tests read.

    python tools/make_tiny_models.py hf OUT [NAME ...]
    python tools/make_tiny_models.py gguf OUT --llama-python PYTHON [--llama-cpp SOURCE] [--wide] [NAME ...]
    python tools/make_tiny_models.py mlx OUT [--wide] [NAME ...]
    python tools/make_tiny_models.py configs --weights FIXTURES OUT [NAME ...]

OUT gets one folder a fixture, each with the checkpoint and golden.safetensors: `tokens` i32 (T,), `logits`
f32 (T, V) and, where another engine can read the file, `peer_kl` f64 (1,): the mean KL in nats of that
engine's logits from `logits`. The large ones also keep its `peer_logits` f32 (T, V).

`configs` writes two files a fixture instead, for the weights of those below FIXTURES that `hf` made: configurations by
their names, and the logits of the last tokens with each.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import transformers
from tiny_models import config_files, gguf_cases, gguf_files, hf_cases, hf_files, mlx_cases, mlx_files


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    hf = commands.add_parser("hf", help="Hugging Face safetensors folders")
    gguf = commands.add_parser("gguf", help="GGUF files, quantised by llama.cpp")
    gguf.add_argument("--llama-python", required=True, help="interpreter that has llama-cpp-python")
    gguf.add_argument("--llama-cpp", type=Path, help="llama.cpp's source tree, for what its converter makes")
    mlx = commands.add_parser("mlx", help="MLX folders, quantised by mlx-lm")
    for command in (gguf, mlx):
        command.add_argument(
            "--wide", action="store_true", help="the large ones, which the repository does not hold"
        )
    configs = commands.add_parser("configs", help="other configurations of Hugging Face fixtures")
    configs.add_argument("--weights", type=Path, required=True, help="folder of the Hugging Face fixtures")
    for command in (hf, gguf, mlx, configs):
        command.add_argument("out", type=Path)
        command.add_argument("names", nargs="*", help="fixtures to make; all when absent")
    return parser.parse_args()


def make(cases: Sequence[Any], write: Callable[[Any], dict[str, str]], args: argparse.Namespace) -> None:
    """Writes the chosen cases and prints a line on each."""
    unknown = set(args.names) - {case.name for case in cases}
    if unknown:
        raise SystemExit(f"no fixture is called {', '.join(sorted(unknown))}")
    for case in cases:
        if args.names and case.name not in args.names:
            continue
        report = write(case)
        folder = args.out / case.name
        size = sum(file.stat().st_size for file in folder.iterdir())
        line = (
            f"{case.name:28} {size / 1024:6.0f} KiB  float64 error {report['float64_relative_error']}  "
            f"router margin {report['router_margin']}  logit std {report['logit_std']}"
        )
        if "peer" in report:
            line += f"  {report['peer']}"
        print(line, flush=True)


def main() -> None:
    args = parse_args()
    transformers.utils.logging.disable_progress_bar()
    if args.command == "hf":
        make(hf_cases.HF_CASES, lambda case: hf_files.write_case(case, args.out), args)
    elif args.command == "configs":
        config_files.write_variants(args.weights, args.out, args.names)
    elif args.command == "mlx":
        cases = mlx_cases.WIDE if args.wide else mlx_cases.SMALL
        make(cases, lambda case: mlx_files.write_case(case, args.out), args)
    else:
        cases = gguf_cases.WIDE if args.wide else gguf_cases.SMALL
        make(cases, lambda case: gguf_files.write_case(case, args.out, args.llama_python, args.llama_cpp), args)


if __name__ == "__main__":
    main()
