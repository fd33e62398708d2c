#!/usr/bin/env python3
"""Generates under a memory budget inside a memory control group, and checks both.

    sudo python3 bench/budget.py MOEFLUX MODEL --memory 3GiB --limit 3.5GiB [--tokens 32]

Makes a control group (v1 or v2) of LIMIT bytes in which page cache counts too, runs `moeflux bench` in it with
--memory, and prints whether it survived, its peak resident set against the budget, and its figures.
"""

import argparse
import json
import os
import pathlib
import resource
import subprocess
import sys

UNITS = {"GiB": 2**30, "MiB": 2**20}


def size(text):
    for unit, scale in UNITS.items():
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * scale)
    return int(text)


class ControlGroup:
    """A memory control group that processes started with `enter` live in."""

    def __init__(self, name, limit):
        v1 = pathlib.Path("/sys/fs/cgroup/memory")
        self.v1 = v1.is_dir()
        self.path = (v1 if self.v1 else pathlib.Path("/sys/fs/cgroup")) / name
        self.path.mkdir(exist_ok=True)
        self.write("memory.limit_in_bytes" if self.v1 else "memory.max", limit)

    def write(self, file, value):
        (self.path / file).write_text(str(value))

    def enter(self):
        self.write("cgroup.procs", os.getpid())

    def peak(self):
        file = "memory.max_usage_in_bytes" if self.v1 else "memory.peak"
        return int((self.path / file).read_text())

    def remove(self):
        self.path.rmdir()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("moeflux")
    parser.add_argument("model")
    parser.add_argument("--memory", default="3GiB")
    parser.add_argument("--limit", default="3.5GiB")
    parser.add_argument("--tokens", type=int, default=32)
    args = parser.parse_args()

    group = ControlGroup(f"moeflux-budget-{os.getpid()}", size(args.limit))
    command = [args.moeflux, "bench", args.model, "--memory", args.memory, "-p", "64", "-n", str(args.tokens),
               "-r", "1", "--json"]
    done = subprocess.run(command, preexec_fn=group.enter, stdout=subprocess.PIPE, text=True)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    charged = group.peak()
    group.remove()
    if done.returncode != 0:
        sys.exit(f"failed with status {done.returncode}")
    print(json.dumps(json.loads(done.stdout), indent=1))
    gib = 2**30
    print(f"peak resident set {peak / gib:.2f} GiB, budget {args.memory}; control group peak {charged / gib:.2f} of {args.limit}")
    if peak > size(args.memory):
        sys.exit("the resident set exceeded the budget")


if __name__ == "__main__":
    main()
