#!/usr/bin/env python3
"""Speed where neither a GPU's memory nor the host's holds all experts, nor both together.

    sudo python3 bench/tiers.py MODEL --moeflux target/release/moeflux [--device 6,7,10] [--host 8] [--turns 1] [--json FILE]

For every pair of budgets (GiB) and for the processor alone with each host budget, `moeflux bench` runs in a memory control
group of the host's budget and --margin GiB more, in which page cache counts too, after the system's caches were dropped.
Turns are interleaved. Before and after each run the disk's speed is measured: direct reads of expert size at random places.

With --against OPTIONS, which may be given several times, moeflux also runs with these options in every turn, with a GPU only.

The floor is what would be reached if nothing took time but reading from disk what a token reads. Columns of hits are the
shares of chosen experts that the device and the host held. Needs Python 3.11 and root.
"""

import argparse
import json
import pathlib
import statistics
import sys

from capped import GIB, disk_speed, run


def measure(args: argparse.Namespace, device: float | None, host: float, options: str, turn: int) -> dict | None:
    """Figures of one run with more `options`; without `device` on the processor alone. None if it was killed."""
    disk = disk_speed(args.model)
    command = [args.moeflux, "bench", args.model, "--json", "--memory", str(int(host * GIB)), "-r", "1"]
    command += ["-p", str(args.prompt), "-n", str(args.tokens), "--seed", str(100 * turn)]
    if device is None:
        command += ["--backend", "cpu"]
    else:
        command += ["--backend", "cuda", "--device-memory", str(int(device * GIB))]
    command += options.split()
    out, peak = run(command, int((host + args.margin) * GIB))
    if out is None:
        return None
    disk = (disk + disk_speed(args.model)) / 2
    figures = {"disk": disk, "peak": peak, "tests": {}}
    for test in json.loads(out)["tests"]:
        one = test["repetitions"][0]
        asked = one["expert_hits"] + one["expert_misses"]
        counts = one["device"] or {}
        chosen = counts.get("experts_chosen") or asked
        speed = max(disk, test["read_bandwidth"] or 0)
        figures["tests"][test["kind"]] = {
            "tokens_per_second": one["tokens_per_second"],
            "floor": one["tokens"] * speed / one["bytes_read"] if one["bytes_read"] else float("inf"),
            "bytes_per_token": one["bytes_read"] / one["tokens"],
            "device_hits": 1 - (counts.get("experts_fetched", chosen) + counts.get("experts_computed", 0)) / max(chosen, 1),
            "host_hits": one["expert_hits"] / max(chosen, 1),
            "stall_ms_per_token": 1e3 * one["stall_seconds"] / one["tokens"],
            "read_ahead": one["prefetches"] / one["tokens"],
            "read_ahead_in_vain": (one["prefetches"] - one["prefetch_hits"] - one["late"]) / one["tokens"],
        }
    return figures


def rows(name: str, host: float, runs: list[dict]) -> list[str]:
    out = []
    for kind in runs[0]["tests"]:
        def median(figure: str) -> float:
            return statistics.median(run["tests"][kind][figure] for run in runs)

        cells = [
            name,
            f"{host:g} GiB",
            kind,
            f"{median('tokens_per_second'):.2f}",
            f"{median('floor'):.2f}",
            f"{100 * median('device_hits'):.0f} %",
            f"{100 * median('host_hits'):.0f} %",
            f"{median('bytes_per_token') / 1e6:.0f} MB",
            f"{median('stall_ms_per_token'):.1f} ms",
            f"{statistics.median(run['disk'] for run in runs) / 1e9:.2f} GB/s",
            f"{max(run['peak'] for run in runs) / GIB:.2f} GiB",
        ]
        out.append("| " + " | ".join(cells) + " |")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--moeflux", required=True)
    parser.add_argument("--device", default="6,7,10", help="GiB of the GPU, separated by commas")
    parser.add_argument("--host", default="8", help="GiB of the host")
    parser.add_argument("--margin", type=float, default=2.0, help="GiB of the control group beyond the host's budget")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--against", action="append", default=[], metavar="OPTIONS", help="run with these, too")
    parser.add_argument("--no-cpu", action="store_true", help="leave out the processor alone")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    devices = [*([] if args.no_cpu else [None]), *(float(gib) for gib in args.device.split(","))]
    pairs = [(device, float(host)) for host in args.host.split(",") for device in devices]
    cases = [(*pair, options) for pair in pairs for options in ["", *(args.against if pair[0] is not None else [])]]
    found: dict[tuple, list[dict]] = {case: [] for case in cases}
    for turn in range(args.turns):
        for case in cases:
            figures = measure(args, *case, turn)
            if figures is None:
                print(f"{case}: killed", file=sys.stderr)
            else:
                found[case].append(figures)
                speeds = {kind: round(test["tokens_per_second"], 2) for kind, test in figures["tests"].items()}
                print(f"{case}: {speeds}", file=sys.stderr, flush=True)
    print("| device | host | test | tokens/s | floor | device hits | host hits | read a token | stall | disk | peak |")
    print("|:--|:--|:--|--:|--:|--:|--:|--:|--:|--:|--:|")
    for (device, host, options), runs in found.items():
        name = " ".join(["none" if device is None else f"{device:g} GiB", options]).strip()
        for row in rows(name, host, runs) if runs else []:
            print(row)
    if args.json:
        args.json.write_text(json.dumps([[*case, runs] for case, runs in found.items()], indent=1))


if __name__ == "__main__":
    main()
