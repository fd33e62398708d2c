#!/usr/bin/env python3
"""Compares `moeflux logits` with transformers on random small models of every family, in every form.

    python tools/fuzz_models.py MOEFLUX [--count N] [--seed S] [--llama-cpp SOURCE] [--keep FOLDER] [FAMILY ...]

Every model is written as a Hugging Face folder; where the forms can hold it, llama.cpp's converter (from the source
tree SOURCE) makes a GGUF file of it and mlx-lm an MLX folder, quantised or not. Each is run with f32 activations in
one go, in chunks and with the smallest expert cache (the latter two must be as good, the last the same bits), and once
with int8 activations, which must run. Models that have a routing decision too close to a tie are left out.

Prints a line a model; ends with status 1 if any differs by more than 1e-4 of the largest logit.
"""

import argparse
import contextlib
import io
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import mlx_lm
import numpy as np
import torch
import transformers
from check_parity import RunFailed, run_logits
from compare_logits import compare
from mlx_lm.utils import load_model
from safetensors.numpy import load_file
from tiny_models import golden, hf_files, mlx_files
from tiny_models.random_cases import FAMILIES, RandomCase, draw_case

MAX_RELATIVE_ERROR = 1e-4
CHUNK = 7
# What configurations call the experts of a token.
TOP_K_KEYS = ("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k", "top_k_experts")
CONVERT = Path(__file__).with_name("tiny_models") / "llama_cpp_convert.py"


def forms(cases: list[RandomCase], out: Path, llama_cpp: Path | None) -> list[tuple[str, Path, Path, int]]:
    """Writes all folders and files: (name, model, folder of its golden, experts a token)."""
    written = []
    for case in cases:
        name = case.hf.name
        try:
            hf_files.write_case(case.hf, out)
        except ValueError as error:
            print(f"{name:28} left out: {error}", flush=True)
            continue
        except Exception as error:
            reason = str(error).strip().splitlines()[-1]
            print(f"{name:28} cannot be made: {type(error).__name__}: {reason}", flush=True)
            continue
        written.append(case)

    found = [(f"{c.hf.name} hf", out / c.hf.name, out / c.hf.name, top_k(c)) for c in written]
    ggufs = [c for c in written if c.gguf] if llama_cpp else []
    # Every second one with projections fused, but where experts have biases or llama.cpp does not read it.
    fused = [c for c in ggufs[1::2] if c.hf.family not in ("gpt_oss", "qwen4_exp_text")]
    for kind, some in (("f32", [c for c in ggufs if c not in fused]), ("f32,fused", fused)):
        if not some:
            continue
        paths = [str(p) for c in some for p in (out / c.hf.name, out / f"{c.hf.name}.gguf")]
        command = [sys.executable, CONVERT, llama_cpp, kind, *paths]
        converter = subprocess.run(command, capture_output=True, text=True)
        print(converter.stdout, end="", flush=True)
        if converter.returncode != 0:
            reason = converter.stderr.strip().splitlines()[-1:]
            sys.exit(f"{llama_cpp}: its converter fails: {' '.join(reason)}")
    for c in ggufs:
        file = out / f"{c.hf.name}.gguf"
        if file.exists():
            found.append((f"{c.hf.name} gguf", file, out / c.hf.name, top_k(c)))
    for c in written:
        if c.mlx:
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    folder, reference = write_mlx(c, out)
                found.append((f"{c.hf.name} mlx", folder, reference, top_k(c)))
            except Exception as error:
                print(f"{c.hf.name:28} no MLX: {type(error).__name__}: {error}", flush=True)
    return found


def top_k(case: RandomCase) -> int:
    config = case.hf.config.get("text_config", case.hf.config)
    config = config.get("ffn_config", config)
    found = next(config[key] for key in TOP_K_KEYS if config.get(key))
    return max(found) if isinstance(found, list) else found


def write_mlx(case: RandomCase, out: Path) -> tuple[Path, Path]:
    """An MLX folder, and the folder with its golden: its own if quantisation made it another model."""
    source, folder = out / case.hf.name, out / f"{case.hf.name}_mlx"
    if case.aligned == 1:
        mlx_lm.convert(str(source), mlx_path=folder, quantize=False, dtype=case.hf.dtype)
        return folder, source
    own_rule = getattr(load_model(source, lazy=True)[0], "quant_predicate", lambda path, module: True)
    mlx_lm.convert(
        str(source),
        mlx_path=folder,
        quantize=True,
        q_group_size=32,
        q_bits=(2, 3, 4, 5, 6, 8)[case.hf.seed % 6],
        dtype="bfloat16" if case.hf.dtype == "float32" else case.hf.dtype,
        quant_predicate=own_rule,
    )
    model = hf_files.build_model(
        case.hf.family, case.hf.config, getattr(torch, case.hf.dtype), case.hf.seed
    )
    mlx_files.load_dequantised(model, folder)
    golden.save(folder, golden.reference(model, case.hf.n_tokens, case.hf.seed))
    return folder, folder


def check(moeflux: Path, model: Path, reference: Path, slots: int) -> tuple[str, bool]:
    """A line on one model and whether it is right."""
    expected = load_file(reference / "golden.safetensors")
    tokens, logits = expected["tokens"], expected["logits"]
    f32 = ("--activations", "f32")
    try:
        whole = run_logits(moeflux, model, tokens, *f32)
        chunked = run_logits(moeflux, model, tokens, *f32, "--chunk", str(CHUNK))
        streamed = run_logits(moeflux, model, tokens, *f32, "--expert-cache", str(slots))
        fast = run_logits(moeflux, model, tokens, "--activations", "int8")
    except RunFailed as error:
        return str(error), False
    errors = [compare(run, logits).relative_error for run in (whole, chunked)]
    same = streamed.tobytes() == whole.tobytes()
    kl = compare(fast, logits).kl_nats
    good = max(errors) <= MAX_RELATIVE_ERROR and same and bool(np.isfinite(fast).all())
    streamed_says = "same bits" if same else "OTHER BITS"
    line = f"{errors[0]:.1e}  in chunks {errors[1]:.1e}  streamed {streamed_says}  int8 KL {kl:.1e}"
    return line, good


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("moeflux", type=Path)
    parser.add_argument("families", nargs="*", choices=[*FAMILIES, []], help="all when absent")
    parser.add_argument("--count", type=int, default=10, help="models of each family (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="number of the first one")
    parser.add_argument("--llama-cpp", type=Path, help="source tree whose converter makes GGUF files")
    parser.add_argument("--keep", type=Path, help="leave models here rather than in a temporary folder")
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)

    tally, failed = Counter(), []
    for family in args.families or FAMILIES:
        cases = [draw_case(family, args.seed + i) for i in range(args.count)]
        with contextlib.ExitStack() as stack:
            out = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
            out.mkdir(parents=True, exist_ok=True)
            for name, model, reference, slots in forms(cases, out, args.llama_cpp):
                line, good = check(args.moeflux.resolve(), model, reference, slots)
                tally[name.split()[1], good] += 1
                if not good:
                    failed.append(name)
                print(f"{name:28} {line}{'' if good else '  !'}", flush=True)
    for form in ("hf", "gguf", "mlx"):
        print(f"{form}: {tally[form, True]} right, {tally[form, False]} wrong")
    if failed:
        raise SystemExit("wrong: " + ", ".join(failed))


if __name__ == "__main__":
    main()
