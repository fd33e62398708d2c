"""What a control group, such as a Kubernetes pod's, must allow `moeflux serve` beyond `--memory`.

    sudo python3 bench/pod_memory.py MODEL --binary target/release/moeflux [--budgets 1GiB 2GiB] [--clients 12] [--seconds 40]
           [options of `serve`]

For every budget the server answers streaming clients in a memory control group with `--headroom` more than the budget, twice:
reading experts past the page cache, and through it. Printed are the peaks above the budget of the process's resident set, of
what the kernel has for it besides (sockets, page tables, …), and of the working set, by which Kubernetes evicts: all that is
charged less file pages that were not used lately. The kernel drops file pages before it kills, so the first two count for
the limit. It fails if the server is killed or a request errs. Only the standard library is used; needs root.
"""

import argparse
import os
import pathlib
import random
import sys
import threading
import time

from capped import ControlGroup
from serve_load import Server, question, size

MIB = 2**20


class Peaks:
    """Highest values while a server runs."""

    def __init__(self, group: ControlGroup, pid: int):
        self.group, self.status = group, pathlib.Path(f"/proc/{pid}/status")
        self.resident = self.kernel = self.working = self.charged = 0
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()

    def watch(self) -> None:
        while not self.ended.wait(0.1):
            self.look()

    def look(self) -> None:
        lines = self.status.read_text().splitlines()
        stat = dict(line.split() for line in (self.group.path / "memory.stat").read_text().splitlines())
        if self.group.v1:
            charged = int((self.group.path / "memory.usage_in_bytes").read_text())
            kernel = int((self.group.path / "memory.kmem.usage_in_bytes").read_text())
            inactive = int(stat["total_inactive_file"])
        else:
            charged = int((self.group.path / "memory.current").read_text())
            kernel = int(stat["kernel"]) + int(stat["sock"])
            inactive = int(stat["inactive_file"])
        self.resident = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
        self.kernel = max(self.kernel, kernel)
        self.working = max(self.working, charged - inactive)
        self.charged = max(self.charged, charged)

    def end(self) -> None:
        self.ended.set()
        self.thread.join()


def forget(model: str) -> None:
    """Drops the model's file from the page cache, so that its pages are charged to who reads them next."""
    if pathlib.Path(model).is_file():
        with open(model, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(arguments: argparse.Namespace, budget: str, mode: str) -> Peaks:
    group = ControlGroup(size(budget) + size(arguments.headroom))
    forget(arguments.model)
    server = Server(arguments.binary, [arguments.model], "--memory", budget, "--read-mode", mode, "--queue", "256",
                    *arguments.rest, group=group)
    peaks = Peaks(group, server.process.pid)
    end = time.monotonic() + arguments.seconds
    errors: list[str] = []
    answered = [0]

    def client(number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < end:
            words = rng.choice([0, 0, 20, 200])
            messages = [{"role": "user", "content": question(rng) + "Well. " * words}]
            body = {"messages": messages, "max_tokens": rng.choice([4, 16])}
            try:
                for _ in server.stream(body):
                    if time.monotonic() > end:
                        break
                answered[0] += 1
            except Exception as error:
                errors.append(f"client {number}: {error!r}")
                return

    threads = [threading.Thread(target=client, args=(number,)) for number in range(arguments.clients)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    peaks.end()
    server.stop()
    group.remove()
    if errors or not answered[0]:
        sys.exit(f"{len(errors)} clients failed, {answered[0]} answers: {errors[:2]} {server.said[-2:]}")
    return peaks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--binary", default="target/release/moeflux")
    parser.add_argument("--budgets", nargs="+", default=["1GiB", "2GiB"])
    parser.add_argument("--headroom", default="256MiB", help="of the group's limit above the budget")
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=40)
    arguments, arguments.rest = parser.parse_known_args()
    print("| --memory | reads | resident − budget | kernel | resident + kernel − budget | working set − budget |\n|" + " --: |" * 6)
    for budget in arguments.budgets:
        for mode in "direct", "buffered":
            peaks, given = measure(arguments, budget, mode), size(budget)
            row = peaks.resident - given, peaks.kernel, peaks.resident + peaks.kernel - given, peaks.working - given
            print(f"| {budget} | {mode} | " + " | ".join(f"{value / MIB:+.0f} MiB" for value in row) + " |", flush=True)


if __name__ == "__main__":
    main()
