#!/usr/bin/env python3
"""Compares moeflux with llama.cpp where the model does not fit memory.

    sudo python3 bench/capped.py MODEL.gguf ... --moeflux target/release/moeflux --llama-python VENV/bin/python \\
        [--caps 4,6,10] [--turns 3] [--json FILE]

For every model and cap (GiB) the engines run interleaved, each in a memory control group (v1 or v2) of that size, in which
page cache counts too, after the system's caches were dropped:

- moeflux with --memory a little below the cap;
- llama.cpp with mapped weights and without repacking (with it, it is killed), in its good case: through a loop device
  with direct I/O, so that nothing is cached outside the group, and a read-ahead of 128 KiB, or with --read-ahead system
  whatever the system has.

Before and after moeflux the disk's speed is measured: direct reads of expert size at random places. The floor beside the
figures is what a perfect overlap of reading and computing would give: the time to read a token's misses, or to compute a
token, whichever is longer. Reading is taken to be as fast as was measured or as moeflux found it, whichever is faster.
Tokens are random, others in every repetition and turn, and each engine evaluates as many before those that count. Needs Python 3.11, root, and a model whose size is a multiple of 512 bytes
(truncate -s %4096 MODEL makes it so).

With --against OPTIONS, which may be given several times, moeflux also runs with these options in every turn.
"""

import argparse
import json
import mmap
import os
import pathlib
import random
import statistics
import subprocess
import sys
import threading
import time

GIB = 2**30
PEER = pathlib.Path(__file__).with_name("llama_cpp_peer.py")
READ_BYTES = 864 * 1024


class ControlGroup:
    """A memory control group that processes started with `enter` live in."""

    def __init__(self, limit: int) -> None:
        v1 = pathlib.Path("/sys/fs/cgroup/memory")
        self.v1 = v1.is_dir()
        root = v1 if self.v1 else pathlib.Path("/sys/fs/cgroup")
        self.path = root / f"moeflux-capped-{os.getpid()}"
        self.path.mkdir(exist_ok=True)
        self.write("memory.limit_in_bytes" if self.v1 else "memory.max", limit)
        if not self.v1:
            self.write("memory.swap.max", 0)

    def write(self, file: str, value: int) -> None:
        (self.path / file).write_text(str(value))

    def enter(self) -> None:
        self.write("cgroup.procs", os.getpid())

    def peak(self) -> int:
        file = "memory.max_usage_in_bytes" if self.v1 else "memory.peak"
        return int((self.path / file).read_text())

    def remove(self) -> None:
        if self.v1:
            # Otherwise what it has cached stays charged to it, and it stays.
            self.write("memory.force_empty", 0)
        self.path.rmdir()


class Loop:
    """A read-only loop device with direct I/O and a read-ahead of its own."""

    def __init__(self, model: pathlib.Path, read_ahead_kib: int | None) -> None:
        command = ["losetup", "--find", "--show", "--read-only", "--direct-io=on", str(model)]
        self.device = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
        if read_ahead_kib is not None:
            queue = pathlib.Path("/sys/block") / pathlib.Path(self.device).name / "queue"
            (queue / "read_ahead_kb").write_text(str(read_ahead_kib))

    def remove(self) -> None:
        subprocess.run(["losetup", "--detach", self.device], check=True)


def drop_caches() -> None:
    os.sync()
    pathlib.Path("/proc/sys/vm/drop_caches").write_text("3")


def disk_speed(model: pathlib.Path, seconds: float = 1.5, threads: int = 4) -> float:
    """Bytes per second of direct reads at random places."""
    handle = os.open(model, os.O_RDONLY | os.O_DIRECT)
    last = os.fstat(handle).st_size // 4096 - READ_BYTES // 4096
    end = time.perf_counter() + seconds
    counts = [0] * threads

    def read(thread: int) -> None:
        source = random.Random(time.time_ns() + thread)
        buffer = mmap.mmap(-1, READ_BYTES)
        while time.perf_counter() < end:
            counts[thread] += os.preadv(handle, [buffer], source.randrange(last) * 4096)

    start = time.perf_counter()
    workers = [threading.Thread(target=read, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    os.close(handle)
    return sum(counts) / (time.perf_counter() - start)


def run(command: list, cap: int) -> tuple[str | None, int]:
    """What `command` prints within `cap` bytes, and the group's peak; None if it was killed."""
    drop_caches()
    group = ControlGroup(cap)
    done = subprocess.run(command, preexec_fn=group.enter, stdout=subprocess.PIPE, text=True)
    peak = group.peak()
    group.remove()
    if done.returncode < 0:
        return None, peak
    if done.returncode != 0:
        sys.exit(f"{command[0]} failed with status {done.returncode}")
    return done.stdout, peak


def run_moeflux(args: argparse.Namespace, model: pathlib.Path, cap: float, turn: int, options: str) -> dict | None:
    """Figures of one run of `moeflux bench` with further `options`."""
    disk = disk_speed(model)
    memory = int(cap * GIB - args.margin * 2**20)
    command = [args.moeflux, "bench", model, "--json", "--memory", str(memory), "-r", "1"]
    command += ["--seed", str(100 * turn), "--threads", str(args.threads), "-p", str(args.prompt), "-n", str(args.tokens)]
    out, peak = run(command + options.split(), int(cap * GIB))
    if out is None:
        return None
    disk = (disk + disk_speed(model)) / 2
    report = json.loads(out)
    figures = {"disk": disk, "peak": peak, "reads": report["reads"], "tests": {}}
    for test in report["tests"]:
        one = test["repetitions"][0]
        reading = one["bytes_read"] / one["tokens"] / max(disk, test["read_bandwidth"] or 0)
        computing = (one["seconds"] - one["stall_seconds"]) / one["tokens"]
        figures["tests"][test["kind"]] = {
            "tokens_per_second": one["tokens_per_second"],
            "floor": 1 / max(reading, computing),
            "computing_ms_per_token": 1e3 * computing,
            "reading_ms_per_token": 1e3 * reading,
            "bytes_per_token": one["bytes_read"] / one["tokens"],
            "hit_rate": test["hit_rate"],
            "stall_ms_per_token": test["stall_ms_per_token"],
            "read_bandwidth": test["read_bandwidth"],
        }
    return figures


def run_llama(args: argparse.Namespace, model: pathlib.Path, cap: float, turn: int) -> dict | None:
    """Figures of one run of llama.cpp."""
    read_ahead = None if args.read_ahead == "system" else int(args.read_ahead)
    disk = disk_speed(model)
    tests = [("prompt", args.prompt), ("generate", args.peer_tokens or args.tokens)]
    tests = [{"kind": kind, "tokens": n, "depth": 0} for kind, n in tests if n]
    loop = Loop(model, read_ahead)
    request = {"model": loop.device, "load": "mmap", "repack": False, "threads": args.threads}
    request |= {"repetitions": 1, "seed": turn}
    out, peak = run([args.llama_python, PEER, json.dumps(request | {"tests": tests})], int(cap * GIB))
    loop.remove()
    if out is None:
        return None
    speeds = json.loads(out.splitlines()[-1])
    by_kind = {t["kind"]: {"tokens_per_second": s[0]} for t, s in zip(tests, speeds, strict=True)}
    return {"disk": disk, "peak": peak, "tests": by_kind}


def median(runs: list[dict], kind: str, figure: str) -> float:
    values = [run["tests"][kind][figure] for run in runs if kind in run["tests"]]
    values = [value for value in values if value is not None]
    return statistics.median(values) if values else float("nan")


def rows(cap: float, options: str, ours: list[dict], theirs: list[dict]) -> list[str]:
    """Table rows, one a test, of medians over the turns of moeflux with `options`."""
    out = []
    for kind in ours[0]["tests"]:
        speed, peer = median(ours, kind, "tokens_per_second"), median(theirs, kind, "tokens_per_second")
        shares = [r["tests"][kind]["tokens_per_second"] / r["tests"][kind]["floor"] for r in ours]
        cells = [
            f"{cap:g} GiB",
            f"{kind} {options}".strip(),
            f"{peer:.2f}",
            f"{speed:.2f}",
            f"{speed / peer:.2f}",
            f"{median(ours, kind, 'floor'):.2f}",
            f"{100 * statistics.median(shares):.0f} %",
            f"{100 * median(ours, kind, 'hit_rate'):.1f} %",
            f"{median(ours, kind, 'bytes_per_token') / 1e6:.0f} MB",
            f"{median(ours, kind, 'computing_ms_per_token'):.0f} ms",
            f"{median(ours, kind, 'reading_ms_per_token'):.0f} ms",
            f"{median(ours, kind, 'stall_ms_per_token'):.0f} ms",
            f"{statistics.median([r['disk'] for r in ours]) / 1e9:.2f} GB/s",
        ]
        out.append(f"| {' | '.join(cells)} |")
    return out


HEADS = ["cap", "test", "llama.cpp", "moeflux", "ratio", "floor", "of the floor", "hits", "read/token", "computing", "reading", "stall", "disk"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=pathlib.Path, nargs="+", metavar="MODEL.gguf")
    parser.add_argument("--moeflux", required=True, help="the moeflux program")
    parser.add_argument("--llama-python", help="interpreter that has llama-cpp-python; without it, moeflux alone")
    parser.add_argument("--caps", type=lambda t: [float(c) for c in t.split(",")], default=[4, 6, 10], help="GiB")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=0, metavar="N", help="tokens of a prompt test")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="tokens to generate")
    parser.add_argument("--peer-tokens", type=int, metavar="N", help="the same for llama.cpp (default: as many)")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--margin", type=int, default=200, metavar="MIB", help="moeflux's budget below the cap")
    parser.add_argument("--read-ahead", default="128", metavar="KIB", help="llama.cpp's read-ahead, or system")
    parser.add_argument("--moeflux-args", default="", help="further options of moeflux bench, in one string")
    parser.add_argument("--against", action="append", default=[], metavar="OPTIONS", help="run moeflux with these too")
    parser.add_argument("--json", type=pathlib.Path, help="where to write every figure")
    args = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("needs root: it makes control groups and drops caches")

    record = {"threads": args.threads, "arguments": sys.argv[1:], "models": []}
    for model in args.models:
        if model.stat().st_size % 512:
            sys.exit(f"{model}: a loop device would cut its end; truncate -s %4096 makes it whole blocks")
        print(f"\n{model.name}, {model.stat().st_size / 1e9:.1f} GB, tokens/s, medians of {args.turns} turns\n")
        print(f"| {' | '.join(HEADS)} |\n| {' | '.join(['--:'] * len(HEADS))} |", flush=True)
        for cap in args.caps:
            ours, theirs = {options: [] for options in [args.moeflux_args, *args.against]}, []
            for turn in range(args.turns):
                print(f"{model.name}, {cap:g} GiB, turn {turn + 1}", file=sys.stderr)
                for options, runs in ours.items():
                    runs.append(run_moeflux(args, model, cap, turn, options))
                if args.llama_python:
                    theirs.append(run_llama(args, model, cap, turn))
            entry = {"model": model.name, "cap": cap, "moeflux": ours, "llama.cpp": theirs}
            record["models"].append(entry)
            everything = theirs + [run for runs in ours.values() for run in runs]
            killed = [run for run in everything if run is None]
            if killed:
                print(f"| {cap:g} GiB | killed for memory in {len(killed)} of {len(everything)} runs |")
                continue
            for options, runs in ours.items():
                print("\n".join(rows(cap, options, runs, theirs)), flush=True)
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
