#!/usr/bin/env python3
"""Compares what `moeflux plan` predicts with what `moeflux bench` measures, interleaved.

    python3 bench/validate_plan.py --moeflux target/release/moeflux --resident MODEL ... [--turns 3] [--json FILE]
    sudo python3 bench/validate_plan.py --moeflux target/release/moeflux --capped MODEL --caps 1.5,2,3 [--trace FILE]
    python3 bench/validate_plan.py --moeflux target/release/moeflux --cuda MODEL [--turns 3]
    sudo python3 bench/validate_plan.py --moeflux target/release/moeflux --tiers MODEL --pairs 7:8,10:8 [--skew 0.8]

--resident: everything in memory, on the processor. --capped: each program alone in a memory control group of that many
GiB, in which page cache counts too, after the system's caches were dropped. --cuda: everything in the GPU's memory, and
with the memory of half of the experts; needs a GPU. --tiers: pairs of GiB of the GPU and of the host, in a control group
of the host's and --tier-margin GiB more.

In every turn plan runs first, then bench with the same memory, context and prompt. Predictions are those for uniform
routing, or with --skew those for skewed routing, or with --trace replayed hits. The table has the medians over the turns and the median of the turns' ratios
of predicted to measured.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys

from capped import GIB, run as run_capped


class Settings:
    """How both programs run."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.moeflux, self.prompt, self.tokens = args.moeflux, args.prompt, args.tokens
        self.context = args.prompt + args.tokens
        self.threads = args.threads
        self.repetitions = args.repetitions

    def plan(self, model: pathlib.Path, more: list) -> list:
        command = [self.moeflux, "plan", model, "--json", "--context", self.context, "--prompt", self.prompt]
        return [str(part) for part in command + ["--threads", self.threads] + more]

    def bench(self, model: pathlib.Path, turn: int, more: list) -> list:
        command = [self.moeflux, "bench", model, "--json", "--context", self.context, "--seed", 100 * turn]
        command += ["-p", self.prompt, "-n", self.tokens, "-r", self.repetitions, "--threads", self.threads]
        return [str(part) for part in command + more]


def output(command: list, cap: int | None) -> dict:
    """What `command` prints, as JSON; with `cap`, in a control group of so many bytes."""
    if cap is None:
        return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    out, _ = run_capped(command, cap)
    if out is None:
        sys.exit(f"killed for memory: {' '.join(command)}")
    return json.loads(out)


def compare(settings: Settings, model: pathlib.Path, turns: int, options: dict) -> list[dict]:
    """Predicted and measured figures of each turn."""
    found = []
    for turn in range(turns):
        print(f"{model.name}, {options['label']}, turn {turn + 1}", file=sys.stderr)
        plan = output(settings.plan(model, options["plan"]), options.get("cap"))
        bench = output(settings.bench(model, turn, options["bench"]), options.get("cap"))
        budget = plan["budgets"][-1]
        predicted = budget["predicted_if_uneven"] if options.get("skewed") else budget["predicted"]
        tests = {test["kind"]: test for test in bench["tests"]}
        found.append(
            {
                "decode": [predicted["decode_tokens_per_second"], tests["generate"]["tokens_per_second"]["median"]],
                "prefill": [predicted["prefill_tokens_per_second"], tests["prompt"]["tokens_per_second"]["median"]],
                "read": [predicted["bytes_per_token"], tests["generate"]["bytes_read_per_token"]],
                "disk": [plan["machine"]["disk"]["bandwidth"], tests["generate"]["read_bandwidth"]],
                "plan": plan,
                "bench": bench,
            }
        )
    return found


def row(model: pathlib.Path, label: str, found: list[dict]) -> str:
    """A line of the table."""
    cells = [model.name, label]
    for kind in ["decode", "prefill"]:
        predicted, measured = (statistics.median(f[kind][i] for f in found) for i in (0, 1))
        ratios = [f[kind][0] / f[kind][1] for f in found]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        cells += [f"{predicted:.1f}", f"{measured:.1f}", spread]
    read = [statistics.median(f["read"][i] for f in found) / 1e6 for i in (0, 1)]
    cells.append(f"{read[0]:.0f}, {read[1]:.0f} MB")
    return f"| {' | '.join(cells)} |"


HEADS = ["model", "memory", "decode predicted", "measured", "ratio", "prefill predicted", "measured", "ratio", "read/token"]


def cases(args: argparse.Namespace, settings: Settings) -> list[tuple[pathlib.Path, dict]]:
    """Models, and how they are run."""
    trace = ["--trace", args.trace] if args.trace else []
    cpu = ["--backend", "cpu"]
    found = []
    for model in args.resident:
        # More than the model needs: everything is in memory.
        memory = ["--memory", 2 * model.stat().st_size + GIB]
        found.append((model, {"label": "all", "plan": cpu + memory, "bench": cpu + memory}))
    for model in args.capped:
        for cap in args.caps:
            memory = cpu + ["--memory", int(cap * GIB - args.margin * 2**20)]
            options = {"label": f"{cap:g} GiB", "cap": int(cap * GIB), "plan": memory + trace, "bench": memory}
            found.append((model, options))
    for model in args.tiers:
        for device, host in args.pairs:
            memory = ["--backend", "cuda", "--memory", int(host * GIB), "--device-memory", int(device * GIB)]
            skew = ["--skew", args.skew] if args.skew else []
            options = {"label": f"{device:g} + {host:g} GiB", "cap": int((host + args.tier_margin) * GIB)}
            options |= {"plan": memory + skew + trace, "bench": memory, "skewed": bool(args.skew)}
            found.append((model, options))
    for model in args.cuda:
        gpu = ["--backend", "cuda", "--memory", 2 * model.stat().st_size + GIB]
        needs = output(settings.plan(model, gpu), None)["needs"]
        beside = needs["trunk"] + needs["context"] + needs["scratch"]
        for label, part in [("GPU, all", 1.05), ("GPU, half of the experts", 0.5)]:
            memory = gpu + ["--device-memory", int(beside + part * needs["experts"])]
            found.append((model, {"label": label, "plan": memory + trace, "bench": memory}))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moeflux", required=True, help="the moeflux program")
    for name in ["resident", "capped", "cuda", "tiers"]:
        parser.add_argument(f"--{name}", type=pathlib.Path, nargs="+", default=[], metavar="MODEL")
    parser.add_argument("--caps", type=lambda t: [float(c) for c in t.split(",")], default=[1.5, 2, 3], help="GiB")
    pairs = lambda text: [tuple(float(gib) for gib in pair.split(":")) for pair in text.split(",")]
    parser.add_argument("--pairs", type=pairs, default=[(7.0, 8.0)], help="GiB of the GPU and of the host, as 7:8,10:8")
    parser.add_argument("--tier-margin", type=float, default=2.0, metavar="GIB", help="the cap beyond the host's budget")
    parser.add_argument("--skew", type=float, help="the skew of the model's routing, with --tiers")
    parser.add_argument("--margin", type=int, default=200, metavar="MIB", help="the budget below the cap")
    parser.add_argument("--trace", help="a trace of the model, to predict hits from")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--prompt", type=int, default=256, metavar="N")
    parser.add_argument("--tokens", type=int, default=96, metavar="N")
    parser.add_argument("--repetitions", type=int, default=2, metavar="N")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=pathlib.Path, help="where to write every figure")
    args = parser.parse_args()
    if (args.capped or args.tiers) and os.geteuid() != 0:
        sys.exit("--capped and --tiers need root: they make control groups and drop caches")
    settings = Settings(args)
    record = []
    print(f"| {' | '.join(HEADS)} |\n| :-- | :-- | {' | '.join(['--:'] * (len(HEADS) - 2))} |", flush=True)
    for model, options in cases(args, settings):
        found = compare(settings, model, args.turns, options)
        print(row(model, options["label"], found), flush=True)
        record.append({"model": model.name, "label": options["label"], "turns": found})
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
