#!/usr/bin/env python3
"""Checks that a long generation within a memory cap neither slows down nor grows.

    sudo python3 bench/flatness.py MODEL.gguf --moeflux target/release/moeflux [--cap 6] [--tokens 1000]

Generates as many tokens twice in a memory control group; of the second time it prints the speed of the first and of the
last hundred tokens, and of both the resident set in the middle and at the end.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

from capped import GIB, ControlGroup, drop_caches


def resident(pid: int) -> int | None:
    """Resident bytes of a process; None if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    sizes = [line.split()[1] for line in lines if line.startswith("VmRSS:")]
    return int(sizes[0]) * 1024 if sizes else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--moeflux", required=True, help="the moeflux program")
    parser.add_argument("--cap", type=float, default=6, help="GiB")
    parser.add_argument("--margin", type=int, default=200, metavar="MIB", help="the budget below the cap")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    drop_caches()
    group = ControlGroup(int(args.cap * GIB))
    command = [args.moeflux, "bench", args.model, "--json", "--memory", str(int(args.cap * GIB - args.margin * 2**20))]
    command += ["-r", "1", "-p", "0", "-n", str(args.tokens), "--threads", str(args.threads)]
    process = subprocess.Popen(command, preexec_fn=group.enter, stdout=subprocess.PIPE, text=True)
    sizes = []

    def sample() -> None:
        while process.poll() is None:
            sizes.append(resident(process.pid) or 0)
            time.sleep(0.5)

    sampler = threading.Thread(target=sample)
    sampler.start()
    out, _ = process.communicate()
    sampler.join()
    group.remove()
    if process.returncode != 0:
        sys.exit(f"moeflux ended with status {process.returncode}")
    seconds = json.loads(out)["tests"][0]["repetitions"][0]["step_seconds"]
    first, last = 100 / sum(seconds[:100]), 100 / sum(seconds[-100:])
    print(f"first 100 tokens {first:.2f} tokens/s, last 100 {last:.2f} tokens/s, ratio {last / first:.3f}")
    hundreds = [100 / sum(seconds[at : at + 100]) for at in range(0, len(seconds) - 99, 100)]
    print("by hundreds: " + ", ".join(f"{speed:.2f}" for speed in hundreds))
    sizes = [size for size in sizes if size]
    # Slots are written as they are first used, so the beginning says nothing.
    tenth = max(len(sizes) // 10, 1)
    middle, end = max(sizes[4 * tenth : 5 * tenth]), max(sizes[-tenth:])
    print(f"resident set in the middle {middle / GIB:.3f} GiB, at the end {end / GIB:.3f} GiB")


if __name__ == "__main__":
    main()
