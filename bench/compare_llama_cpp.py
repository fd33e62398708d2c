#!/usr/bin/env python3
"""Compares moeflux's speed on the CPU with llama.cpp's on the same GGUF files.

    python bench/compare_llama_cpp.py MODEL.gguf ... --moeflux target/release/moeflux --workdir DIR

Installs PyPI's llama-cpp-python (CPU build, compiled here) into a virtual environment under the work
directory unless --llama-python names an interpreter that has it. Engines run interleaved, one after the other, so
that a change of the machine's speed meets all of them; within a turn each test runs once before it counts.
llama.cpp runs in several variants (weights mapped or read into memory, repacked for the CPU or not, with flash
attention or without); its best median counts. Prints a Markdown table; --json writes every figure. Needs Python 3.11 and nothing else.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import venv
from dataclasses import dataclass, field
from pathlib import Path

PEER = Path(__file__).with_name("llama_cpp_peer.py")


@dataclass(frozen=True)
class Test:
    """What is measured: `kind` is "prompt" or "generate"."""

    kind: str
    tokens: int
    depth: int

    def __str__(self) -> str:
        at = f"@d{self.depth}" if self.depth else ""
        return f"{'pp' if self.kind == 'prompt' else 'tg'}{self.tokens}{at}"


@dataclass(frozen=True)
class Variant:
    """A way to run llama.cpp."""

    load: str
    repack: bool
    flash: bool

    def __str__(self) -> str:
        return f"llama.cpp {self.load}{' repack' if self.repack else ''}{' flash' if self.flash else ''}"


@dataclass
class Speeds:
    """Tokens per second of each turn, by engine or variant and by test."""

    of: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, engine: str, test: Test, speeds: list[float]) -> None:
        self.of.setdefault(engine, {}).setdefault(str(test), []).extend(speeds)

    def median(self, engine: str, test: Test) -> float:
        return statistics.median(self.of[engine][str(test)])


def llama_python(workdir: Path) -> Path:
    """The interpreter of a virtual environment with llama-cpp-python, made if it is not there."""
    folder = workdir / "venv-llama-cpp"
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    if subprocess.run([python, "-c", "import llama_cpp"], capture_output=True).returncode != 0:
        print("installing llama-cpp-python; compiling it takes minutes", file=sys.stderr)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "llama-cpp-python"], check=True)
    return python


def run_llama(
    python: Path, model: Path, variant: Variant, tests: list[Test], threads: int
) -> list[list[float]]:
    """Tokens per second of each test, one repetition each."""
    request = {
        "model": str(model),
        "load": variant.load,
        "repack": variant.repack,
        "flash": variant.flash,
        "threads": threads,
        "repetitions": 1,
        "tests": [vars(test) for test in tests],
    }
    done = subprocess.run(
        [python, PEER, json.dumps(request)], check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def run_moeflux(binary: Path, model: Path, tests: list[Test], threads: int, extra: list[str]) -> dict:
    """The report of `moeflux bench --json`."""

    def values(kind: str) -> str:
        return ",".join(dict.fromkeys(str(t.tokens) for t in tests if t.kind == kind)) or "0"

    depths = ",".join(dict.fromkeys(str(test.depth) for test in tests))
    command = [binary, "bench", model, "--json", "-r", "1", "--threads", str(threads)]
    command += ["-p", values("prompt"), "-n", values("generate"), "-d", depths, *extra]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def compare(
    args: argparse.Namespace, python: Path, model: Path, tests: list[Test]
) -> tuple[Speeds, list[dict]]:
    """Runs the engines interleaved."""
    speeds, reports = Speeds(), []
    variants = [Variant(*settings) for settings in itertools.product(args.load, args.repack, args.flash)]
    for turn in range(args.repetitions):
        for variant in variants:
            print(f"{model.name}: turn {turn + 1}, {variant}", file=sys.stderr)
            found = run_llama(python, model, variant, tests, args.threads)
            for test, of_test in zip(tests, found, strict=True):
                speeds.add(str(variant), test, of_test)
        print(f"{model.name}: turn {turn + 1}, moeflux", file=sys.stderr)
        report = run_moeflux(args.moeflux, model, tests, args.threads, args.moeflux_args.split())
        reports.append(report)
        for test in tests:
            found = next(t for t in report["tests"] if t["test"] == str(test))
            speeds.add("moeflux", test, [r["tokens_per_second"] for r in found["repetitions"]])
    return speeds, reports


def table(model: Path, tests: list[Test], speeds: Speeds) -> str:
    """Medians in tokens per second and the ratio of moeflux to llama.cpp's best."""
    variants = [engine for engine in speeds.of if engine != "moeflux"]
    heads = [model.stem, *variants, "moeflux", "ratio to best"]
    rows = [heads, [":--"] + ["--:"] * (len(heads) - 1)]
    for test in tests:
        theirs = [speeds.median(variant, test) for variant in variants]
        ours = speeds.median("moeflux", test)
        figures = [*(f"{speed:.2f}" for speed in theirs), f"{ours:.2f}", f"{ours / max(theirs):.2f}"]
        rows.append([str(test), *figures])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL.gguf")
    parser.add_argument("--moeflux", type=Path, required=True, help="the moeflux program")
    parser.add_argument("--workdir", type=Path, help="where to make the virtual environment")
    parser.add_argument("--llama-python", type=Path, help="interpreter that has llama-cpp-python")
    parser.add_argument("--threads", type=int, default=2, help="threads of both (default: 2)")
    parser.add_argument("-p", "--prompt", type=numbers, default=[512], help="prompt lengths (default: 512)")
    parser.add_argument(
        "-n", "--generate", type=numbers, default=[64], help="generation lengths (default: 64)"
    )
    parser.add_argument("-d", "--depth", type=numbers, default=[0], help="context depths (default: 0)")
    parser.add_argument("-r", "--repetitions", type=int, default=3, help="turns (default: 3)")
    parser.add_argument(
        "--load",
        nargs="+",
        choices=["mmap", "read"],
        default=["mmap", "read"],
        help="llama.cpp's ways to load (default: both)",
    )
    parser.add_argument(
        "--no-repack-variants",
        dest="repack",
        action="store_const",
        const=[True],
        default=[False, True],
        help="run llama.cpp with its default repacking only",
    )
    parser.add_argument(
        "--no-flash-variants",
        dest="flash",
        action="store_const",
        const=[True],
        default=[False, True],
        help="run llama.cpp with flash attention only",
    )
    parser.add_argument("--moeflux-args", default="", help="further options of moeflux bench, in one string")
    parser.add_argument("--json", type=Path, help="where to write every figure")
    args = parser.parse_args()
    if not args.workdir and not args.llama_python:
        parser.error("give --workdir or --llama-python")
    if args.repetitions < 1:
        parser.error("--repetitions: expected a positive number")
    args.moeflux = args.moeflux.resolve()
    return args


def main() -> None:
    args = parse()
    python = args.llama_python or llama_python(args.workdir)
    tests = [
        Test(kind, tokens, depth)
        for depth in args.depth
        for kind, lengths in (("prompt", args.prompt), ("generate", args.generate))
        for tokens in lengths
        if tokens > 0
    ]
    ask = [python, "-c", "import llama_cpp; print(llama_cpp.__version__)"]
    version = subprocess.run(ask, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    record = {
        "machine": {"processor": processor(), "cores": os.cpu_count(), "system": platform.platform()},
        "llama_cpp_python": version,
        "threads": args.threads,
        "models": [],
    }
    print(f"{processor()}, {args.threads} threads, llama-cpp-python {version}")
    print(f"tokens/s, medians of {args.repetitions}")
    for model in args.models:
        speeds, reports = compare(args, python, model, tests)
        print(f"\n{table(model, tests, speeds)}", flush=True)
        entry = {"model": model.name, "bytes": model.stat().st_size, "speeds": speeds.of, "moeflux": reports}
        record["models"].append(entry)
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def processor() -> str:
    """The processor's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    main()
