"""Measures a few layers of published shapes on a GPU, beside llama.cpp's `llama-bench` on the same file.

    python3 bench/shapes.py MOEFLUX --shape NAME=LAYERS[:ENCODING]... [--llama-bench BINARY] [--work FOLDER] [--seconds S]

Each shape's file is made under FOLDER, measured by both programs, one after the other, and deleted. What was measured is kept in
FOLDER/shapes.json: a call that ends because of its time is gone on with by the same call again. Prints a table in Markdown, of
tokens/s.
"""

import argparse
import json
import subprocess
import time
from pathlib import Path

TESTS = ["pp512", "pp2048", "tg128"]


def run(command, seconds):
    """What a command prints, or None and the end of its errors."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return None, f"more than {seconds} s"
    lines = (done.stderr or done.stdout).strip().splitlines()
    return (done.stdout, "") if done.returncode == 0 else (None, (lines or ["no message"])[-1][:160])


def moeflux_speeds(binary, file, options):
    """Tokens/s of each test."""
    sizes = ["-p", "512,2048", "-n", "128", "-r", "2", "--chunk", "2048", "--backend", "cuda", "--json"]
    text, error = run([binary, "bench", file, *sizes], options.limit)
    if text is None:
        return {}, error
    results = json.loads(text)["tests"]
    return {result["test"]: result["tokens_per_second"]["mean"] for result in results}, ""


def llama_speeds(binary, file, options):
    """The same of llama-bench."""
    sizes = ["-p", "512,2048", "-n", "128", "-r", "2", "-ub", "2048", "-fa", "1", "-ngl", "99", "-o", "json"]
    text, error = run([binary, "-m", file, *sizes], options.limit)
    if text is None:
        return {}, error
    of = {}
    for result in json.loads(text):
        prompt, generated = result["n_prompt"], result["n_gen"]
        of[f"pp{prompt}" if prompt else f"tg{generated}"] = result["avg_ts"]
    return of, ""


def measure(shape, options):
    """Both programs' speeds with the shape `NAME=LAYERS[:ENCODING]`."""
    name, _, rest = shape.partition("=")
    layers, _, encoding = rest.partition(":")
    file = options.work / "shape.gguf"
    quant = ["--quant", encoding] if encoding else []
    made, error = run([options.moeflux, "synth", name, file, "--layers", layers, "--force", *quant], 120)
    if made is None:
        return {"error": error}
    of = {"layers": int(layers), "encoding": encoding or "q4_k_m"}
    of["moeflux"], of["moeflux_error"] = moeflux_speeds(options.moeflux, file, options)
    if options.llama_bench:
        of["llama.cpp"], of["llama.cpp_error"] = llama_speeds(options.llama_bench, file, options)
    file.unlink()
    return of


def table(results):
    """The results as Markdown."""
    programs = ["llama.cpp", "moeflux"]
    heads = [f"{test}: {program}" for test in TESTS for program in programs]
    lines = ["| shape | layers | " + " | ".join(heads) + " |", "| :-- | --: |" + " --: |" * len(heads)]
    errors = []
    for shape, of in results.items():
        if "error" in of:
            errors.append(f"{shape}: {of['error']}")
            continue
        speeds = [of.get(program, {}).get(test) for test in TESTS for program in programs]
        cells = [f"{speed:.0f}" if speed else "" for speed in speeds]
        name = shape.partition("=")[0] + ("" if of["encoding"] == "q4_k_m" else f", {of['encoding']}")
        lines.append(f"| {name} | {of['layers']} | " + " | ".join(cells) + " |")
        errors += [f"{name}, {p}: {of[p + '_error']}" for p in programs if of.get(p + "_error")]
    return "\n".join(lines + [""] + errors)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("moeflux", type=Path)
    parser.add_argument("--shape", action="append", required=True, help="NAME=LAYERS[:ENCODING]; may be repeated")
    parser.add_argument("--llama-bench", type=Path)
    parser.add_argument("--work", type=Path, default=Path("/tmp/moeflux-shapes"))
    parser.add_argument("--seconds", type=float, default=1e9, help="start no shape after so many seconds")
    parser.add_argument("--limit", type=float, default=90, help="seconds for one program's run")
    options = parser.parse_args()
    options.moeflux = options.moeflux.resolve()
    options.work.mkdir(parents=True, exist_ok=True)
    kept = options.work / "shapes.json"
    results = json.loads(kept.read_text()) if kept.exists() else {}
    end = time.monotonic() + options.seconds
    for shape in options.shape:
        if shape not in results and time.monotonic() < end:
            results[shape] = measure(shape, options)
            kept.write_text(json.dumps(results, indent=1))
    print(table(results))


if __name__ == "__main__":
    main()
