"""Measures a few layers of published shapes on a GPU, beside llama.cpp's `llama-bench` on the same file.

    python3 bench/shapes.py MOEFLUX --shape NAME=LAYERS[:ENCODING]... [--llama-bench BINARY] [--work FOLDER] [--seconds S]
        [--prompts LENGTHS] [--depths DEPTHS] [--sequences COUNTS]

Each shape's file is made under FOLDER, measured by both programs, one after the other, and deleted; encodings that llama.cpp's
format does not have are made in memory (`synth:NAME:ENCODING`) and measured by moeflux alone. What was measured is kept in
FOLDER/shapes.json: a call that ends because of its time is gone on with by the same call again. Prints a table in Markdown, of
tokens/s; several sequences, which llama-bench does not have, are those of moeflux alone.
"""

import argparse
import json
import subprocess
import time
from pathlib import Path

# Encodings of MLX's and Hugging Face's folders.
OF_FOLDERS = ["4bit", "8bit", "bf16", "fp8", "fp8_channel", "mxfp8", "nvfp4", "int4", "gptq", "awq"]


def run(command, seconds):
    """What a command prints, or None and the end of its errors."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return None, f"more than {seconds} s"
    if done.returncode == 0:
        return done.stdout, ""
    lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
    # The first that says so is the cause of others.
    return None, next((line for line in lines if "error" in line.lower()), lines[-1])[:200]


def sizes(options):
    """Arguments that both programs take: those of prompts, then those of generated tokens."""
    prompts = ["-p", options.prompts, "-n", "0", "-r", "2"]
    return prompts, ["-p", "0", "-n", str(options.generated), "-d", options.depths, "-r", "2"]


def moeflux_speeds(binary, model, options):
    """Tokens/s of each test of `model`: a file, or a shape and its layers."""
    of = {}
    prompts, generated = sizes(options)
    for arguments in [prompts, [*generated, "-b", options.sequences]]:
        text, error = run(
            [binary, "bench", *model, *arguments, "--chunk", "2048", "--backend", "cuda", "--json"], options.limit
        )
        if text is None:
            return of, error
        of |= {result["test"]: result["tokens_per_second"]["mean"] for result in json.loads(text)["tests"]}
    return of, ""


def llama_speeds(binary, file, options):
    """The same of llama-bench."""
    of = {}
    for arguments in sizes(options):
        text, error = run(
            [binary, "-m", file, *arguments, "-ub", "2048", "-fa", "1", "-ngl", "99", "-o", "json"], options.limit
        )
        if text is None:
            return of, error
        for result in json.loads(text):
            prompt, generated, depth = result["n_prompt"], result["n_gen"], result["n_depth"]
            name = f"pp{prompt}" if prompt else f"tg{generated}" + (f"@d{depth}" if depth else "")
            of[name] = result["avg_ts"]
    return of, ""


def measure(shape, options):
    """Both programs' speeds with the shape `NAME=LAYERS[:ENCODING]`."""
    name, _, rest = shape.partition("=")
    layers, _, encoding = rest.partition(":")
    if encoding in OF_FOLDERS:
        of = {"layers": int(layers), "encoding": encoding}
        model = [f"synth:{name}:{encoding}", "--layers", layers]
        of["moeflux"], of["moeflux_error"] = moeflux_speeds(options.moeflux, model, options)
        return of
    file = options.work / "shape.gguf"
    quant = ["--quant", encoding] if encoding else []
    made, error = run([options.moeflux, "synth", name, file, "--layers", layers, "--force", *quant], 120)
    if made is None:
        return {"error": error}
    of = {"layers": int(layers), "encoding": encoding or "q4_k_m"}
    of["moeflux"], of["moeflux_error"] = moeflux_speeds(options.moeflux, [file], options)
    if options.llama_bench:
        of["llama.cpp"], of["llama.cpp_error"] = llama_speeds(options.llama_bench, file, options)
    file.unlink()
    return of


def table(results):
    """The results as Markdown."""
    programs = ["llama.cpp", "moeflux"]
    tests = list(dict.fromkeys(test for of in results.values() for program in programs for test in of.get(program, {})))
    columns = [
        (test, program)
        for test in tests
        for program in programs
        if any(test in of.get(program, {}) for of in results.values())
    ]
    heads = [f"{test}: {program}" for test, program in columns]
    lines = ["| shape | layers | " + " | ".join(heads) + " |", "| :-- | --: |" + " --: |" * len(heads)]
    errors = []
    for shape, of in results.items():
        if "error" in of:
            errors.append(f"{shape}: {of['error']}")
            continue
        speeds = [of.get(program, {}).get(test) for test, program in columns]
        cells = [f"{speed:.0f}" if speed else "" for speed in speeds]
        name = shape.partition("=")[0] + ("" if of["encoding"] == "q4_k_m" else f", {of['encoding']}")
        lines.append(f"| {name} | {of['layers']} | " + " | ".join(cells) + " |")
        errors += [f"{name}, {p}: {of[p + '_error']}" for p in programs if of.get(p + "_error")]
    return "\n".join(lines + [""] + errors)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("moeflux", type=Path)
    parser.add_argument("--shape", action="append", required=True, help="NAME=LAYERS[:ENCODING]; may be repeated")
    parser.add_argument("--prompts", default="512,2048", help="lengths of prompts")
    parser.add_argument("--generated", type=int, default=128, help="tokens generated")
    parser.add_argument("--depths", default="0", help="tokens before the generated ones")
    parser.add_argument("--sequences", default="1", help="sequences that generate together")
    parser.add_argument("--llama-bench", type=Path)
    parser.add_argument("--work", type=Path, default=Path("/tmp/moeflux-shapes"))
    parser.add_argument("--seconds", type=float, default=1e9, help="start no shape after so many seconds")
    parser.add_argument("--limit", type=float, default=90, help="seconds for one program's run")
    options = parser.parse_args()
    options.moeflux = options.moeflux.resolve()
    options.llama_bench = options.llama_bench and options.llama_bench.resolve()
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
