"""Load on `moeflux serve`: many streaming clients that come and go, and how throughput grows with the batch.

    python bench/serve_load.py load [MODEL …] --binary target/release/moeflux [--memory 900MiB]   # 64 clients, 3 minutes
    python bench/serve_load.py scale MODEL --binary … [--cap 4] [--memory 3900MiB] [--tokens 64] [--sequences 1 2 4 8 16]
           [--sampling '{"temperature": 0}'] [options of `serve`]
    python bench/serve_load.py beside MODEL --binary … [--clients 4] [--prompt 1000] [--every 1] [options of `serve`]

`load` asks every model alike and gives up a fifth of the answers while they are written. It fails if a request errs, a
client starves, the process takes more than a tenth above `--memory`, memory grows after the first minute, or pages do not
come back. `scale --cap` runs the server in a memory control group of so many GiB, in which page cache counts too; that
needs root. `beside` tells how long answers wait for their next piece alone, and while a long prompt comes every so many
seconds, and how long its answer takes to begin. Only the standard library is used; the server listens on loopback.
"""

import argparse
import collections
import http.client
import json
import random
import re
import selectors
import socket
import statistics
import subprocess
import sys
import threading
import time

from capped import GIB, ControlGroup, drop_caches

TOPICS = ["a fox", "a boat", "the moon", "a lost key", "two friends", "a red kite", "an old bear", "the sea"]


class Server:
    """A running server on a free port."""

    def __init__(self, binary: str, models: list[str], *arguments: str, group: ControlGroup | None = None):
        command = [binary, "serve", *models, "--port", "0", *arguments]
        enter = group.enter if group else None
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=enter)
        self.said = []
        for line in self.process.stderr:
            self.said.append(line.rstrip())
            if found := re.search(r"on http://([\d.]+):(\d+)", line):
                self.host, self.port = found[1], int(found[2])
                break
        else:
            sys.exit("the server did not start: " + "\n".join(self.said))
        threading.Thread(target=lambda: [self.said.append(line) for line in self.process.stderr], daemon=True).start()

    def names(self) -> list[str]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=30)
        connection.request("GET", "/v1/models")
        listed = json.load(connection.getresponse())["data"]
        connection.close()
        return [model["id"] for model in listed]

    def peak(self) -> int:
        """Bytes that the process has had in memory at most."""
        with open(f"/proc/{self.process.pid}/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))

    def metrics(self) -> dict[str, float]:
        """By name and labels, over all models."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=30)
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        connection.close()
        values = collections.Counter()
        for line in lines:
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                values[re.sub(r'\{model="[^"]*"\}$', "", re.sub(r'\{model="[^"]*",', "{", name))] += float(value)
        return values

    def stream(self, body: dict):
        """Sends a chat request and yields (seconds since it was sent, event)."""
        start = time.monotonic()
        connection = http.client.HTTPConnection(self.host, self.port, timeout=170)
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps({**body, "stream": True}),
                               {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"status {response.status}: {response.read(500)}")
            for line in response:
                if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise RuntimeError(event["error"]["message"])
                    yield time.monotonic() - start, event
        finally:
            connection.close()

    def stop(self):
        self.process.terminate()
        if self.process.wait(60) != 0:
            sys.exit(f"the server ended with {self.process.returncode}")


class Stream:
    """An answer that is being read."""

    PIECE = b'"delta":{"content":'

    def __init__(self, connection: socket.socket):
        self.connection, self.times, self.last = connection, [], b""

    def read(self) -> bool:
        """Takes what has come; false at the end."""
        data = self.connection.recv(1 << 16)
        # What is kept for the end holds less than a piece of text that was counted.
        fresh = self.last[-len(self.PIECE) + 1:] + data
        if count := fresh.count(self.PIECE):
            self.times.append((time.monotonic(), count))
        self.last = (self.last + data)[-4096:]
        return bool(data)

    def tokens(self) -> int:
        found = re.search(rb'"completion_tokens":(\d+)', self.last)
        if not found or not self.times:
            sys.exit(f"an answer is not complete: {self.last[-500:]}")
        return int(found[1])


def question(rng: random.Random) -> str:
    return f"Tell me a story about {rng.choice(TOPICS)}. " + "Make it nice. " * rng.choice([0, 0, 1, 20])


def size(text: str) -> int:
    number, unit = re.fullmatch(r"([\d.]+)([KMG]iB)", text).groups()
    return int(float(number) * 1024 ** (1 + "KMG".index(unit[0])))


def settled(server: Server) -> dict[str, float]:
    """Metrics once nothing runs."""
    for _ in range(600):
        found = server.metrics()
        if found["moeflux_requests_running"] == found["moeflux_requests_waiting"] == 0:
            return found
        time.sleep(0.1)
    sys.exit(f"requests do not end: {found}")


def load(arguments) -> None:
    memory = ["--memory", arguments.memory] if arguments.memory else []
    server = Server(arguments.binary, arguments.model, "--queue", "128", "--context", "512", *memory, *arguments.rest)
    names = server.names()
    end = time.monotonic() + arguments.seconds
    errors, waits, counts, resident = [], [], [0] * arguments.clients, []

    def client(number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < end:
            body = {"model": rng.choice(names), "messages": [{"role": "user", "content": question(rng)}],
                    "max_tokens": rng.choice([8, 32, 96])}
            leave_after = rng.choice([0, 1, 5, 7]) if rng.random() < 0.2 else None
            try:
                for seen, (seconds, _) in enumerate(server.stream(body)):
                    if seen == 0:
                        waits.append(seconds)
                    if seen == leave_after:
                        break
                counts[number] += 1
            except Exception as error:
                errors.append(f"client {number}: {error!r}")

    threads = [threading.Thread(target=client, args=(number,)) for number in range(arguments.clients)]
    [thread.start() for thread in threads]
    baseline = None
    while any(thread.is_alive() for thread in threads):
        time.sleep(1)
        resident.append(server.metrics()["moeflux_resident_bytes"])
        if baseline is None and time.monotonic() > end - arguments.seconds * 2 / 3:
            baseline = max(resident)
    last, peak = settled(server), server.peak()
    server.stop()
    waits.sort()
    print(f"{sum(counts)} requests by {arguments.clients} clients in {arguments.seconds} s, {len(errors)} errors")
    outcomes = {name: last[f'moeflux_requests_total{{outcome="{name}"}}'] for name in ("finished", "cancelled", "failed")}
    generated = last['moeflux_tokens_total{kind="generated"}']
    print(f"finished {outcomes['finished']:.0f}, cancelled {outcomes['cancelled']:.0f}, "
          f"preemptions {last['moeflux_preemptions_total']:.0f}, generated {generated:.0f} tokens")
    print(f"requests a client: least {min(counts)}, median {statistics.median(counts)}, most {max(counts)}")
    print(f"first event: median {waits[len(waits) // 2]:.2f} s, 99 % {waits[len(waits) * 99 // 100]:.2f} s, worst {waits[-1]:.2f} s")
    print(f"resident: {baseline / 2**20:.1f} MiB at most in the first third, {resident[-1] / 2**20:.1f} MiB at the end, "
          f"peak {peak / 2**20:.1f} MiB" + (f" of {size(arguments.memory) / 2**20:.1f} MiB" if arguments.memory else ""))
    if len(names) > 1:
        print(f"models were loaded {last['moeflux_model_loads_total']:.0f} times")
    print(f"pages of requests {last['moeflux_kv_pages_running']:.0f}, of kept sessions {last['moeflux_kv_pages_used']:.0f}")
    problems = errors[:5]
    if last["moeflux_kv_pages_running"] != 0:
        problems.append("pages are still held")
    if outcomes["failed"] != 0:
        problems.append("requests failed")
    if arguments.memory and peak > 1.1 * size(arguments.memory):
        problems.append("more memory than it was given")
    if resident[-1] > baseline * 1.05 + 4 * 2**20:
        problems.append("memory grew")
    if min(counts) == 0 or min(counts) < statistics.median(counts) / 4:
        problems.append("a client starved")
    if problems:
        sys.exit("FAILED: " + "; ".join(problems))
    print("ok")


def scale(arguments) -> None:
    most = max(arguments.sequences)
    memory = ["--memory", arguments.memory] if arguments.memory else []
    group = ControlGroup(int(arguments.cap * GIB)) if arguments.cap else None
    if group:
        drop_caches()
    server = Server(arguments.binary, [arguments.model], "--sequences", str(most), "--context", "512",
                    "--kept-sessions", "0", *memory, *arguments.rest, group=group)
    print("\n".join(server.said))
    forbidden = {str(token): -100 for token in arguments.forbid}

    def once(count: int) -> tuple[float, float, float]:
        """Tokens a second of all together while all generate, bytes read a token, and tokens a second of evaluation
        alone. One loop reads all answers, and counts pieces of text without parsing them: small models are fast, and
        this program shares the processor with them."""
        before = server.metrics()
        selector, streams = selectors.DefaultSelector(), []
        for number in range(count):
            body = {"messages": [{"role": "user", "content": f"{number} {TOPICS[number % 8]}: tell me a story."}],
                    "max_tokens": arguments.tokens, "seed": number, **arguments.sampling,
                    "stream": True, "stream_options": {"include_usage": True}}
            if forbidden:
                body["logit_bias"] = forbidden
            body = json.dumps(body).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" \
                   f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            connection = socket.create_connection((server.host, server.port))
            streams.append(Stream(connection))
            selector.register(connection, selectors.EVENT_READ, streams[-1])
            connection.sendall(head.encode() + body)
        while selector.get_map():
            for key, _ in selector.select():
                if not key.data.read():
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
        after = settled(server)
        # Nearly every token has a text of its own.
        begin, end = max(s.times[0][0] for s in streams), min(s.times[-1][0] for s in streams)
        tokens = sum(n for stream in streams for at, n in stream.times if begin < at <= end)
        read = after["moeflux_expert_bytes_read_total"] - before["moeflux_expert_bytes_read_total"]
        done = sum(stream.tokens() for stream in streams)
        busy = after["moeflux_busy_seconds_total"] - before["moeflux_busy_seconds_total"]
        return tokens / (end - begin), read / done, done / busy

    once(most)
    table = {count: [] for count in arguments.sequences}
    for _ in range(arguments.rounds):
        for count in arguments.sequences:
            table[count].append(once(count))
    server.stop()
    if group:
        print(f"peak of the control group: {group.peak() / GIB:.2f} of {arguments.cap} GiB")
        group.remove()
    first = None
    print("| sequences | tokens/s | times one | evaluated tokens/s | times one | MiB read a token |\n|" + " --: |" * 6)
    for count, rows in table.items():
        speed, read, evaluated = (statistics.median(column) for column in zip(*rows))
        first = first or (speed, evaluated)
        print(f"| {count} | {speed:.1f} | {speed / first[0]:.2f} | {evaluated:.1f} | {evaluated / first[1]:.2f} | {read / 2**20:.2f} |")


def beside(arguments) -> None:
    server = Server(arguments.binary, [arguments.model], "--sequences", str(arguments.clients + 4), "--kept-sessions", "0",
                    *arguments.rest)
    print("\n".join(server.said))
    errors = []

    def answers(number: int, end: float, gaps: list[float]) -> None:
        try:
            while time.monotonic() < end:
                body = {"messages": [{"role": "user", "content": f"{number}: {TOPICS[number % 8]}."}], "max_tokens": 4000,
                        "temperature": 1, "ignore_eos": True}
                last = None
                for seconds, _ in server.stream(body):
                    if last is not None:
                        gaps.append(seconds - last)
                    last = seconds
                    if time.monotonic() > end:
                        break
        except Exception as error:
            errors.append(repr(error))

    def prompt(rng: random.Random, begins: list[float]) -> None:
        words = " ".join(rng.choice(TOPICS).split()[-1] for _ in range(arguments.prompt))
        try:
            body = {"messages": [{"role": "user", "content": f"{rng.random()} {words}"}], "max_tokens": 1}
            begins.append(next(server.stream(body))[0])
        except Exception as error:
            errors.append(repr(error))

    def once(every: float | None, seed: int) -> tuple[list[float], list[float]]:
        gaps, begins, end = [], [], time.monotonic() + arguments.seconds
        threads = [threading.Thread(target=answers, args=(number, end, gaps)) for number in range(arguments.clients)]
        [thread.start() for thread in threads]
        rng = random.Random(seed)
        while every and time.monotonic() < end - every:
            time.sleep(every)
            threads.append(threading.Thread(target=prompt, args=(rng, begins)))
            threads[-1].start()
        [thread.join() for thread in threads]
        settled(server)
        return gaps, begins

    once(arguments.every, 0)
    found = {None: ([], []), arguments.every: ([], [])}
    for turn in range(arguments.rounds):
        for every, all_of in found.items():
            for more, of in zip(once(every, turn + 1), all_of):
                of.extend(more)
    server.stop()
    if errors:
        sys.exit("FAILED: " + "; ".join(errors[:5]))
    print("| prompts | pieces/s | p50 ms between pieces | p99 ms | a prompt's answer begins after s |\n|" + " :-- |" + " --: |" * 4)
    for every, (gaps, begins) in found.items():
        gaps.sort()
        p50, p99 = (1000 * gaps[len(gaps) * part // 100] for part in (50, 99))
        name = f"{arguments.prompt} words every {every} s" if every else "none"
        begin = f"{statistics.median(begins):.2f}" if begins else ""
        print(f"| {name} | {len(gaps) / arguments.seconds / arguments.rounds:.1f} | {p50:.1f} | {p99:.1f} | {begin} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("load")
    one.add_argument("model", nargs="*", default=["demo"])
    one.add_argument("--memory", help="such as 900MiB")
    one.add_argument("--clients", type=int, default=64)
    one.add_argument("--seconds", type=float, default=180)
    one.set_defaults(run=load)
    two = commands.add_parser("scale")
    two.add_argument("model")
    two.add_argument("--memory")
    two.add_argument("--cap", type=float, help="GiB of the server's memory control group")
    two.add_argument("--tokens", type=int, default=64)
    two.add_argument("--rounds", type=int, default=3)
    two.add_argument("--sequences", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    two.add_argument("--forbid", type=int, nargs="*", default=[], help="token ids that would end answers early")
    two.add_argument("--sampling", type=json.loads, default={"temperature": 1}, help="JSON: fields of the requests")
    two.set_defaults(run=scale)
    three = commands.add_parser("beside")
    three.add_argument("model")
    three.add_argument("--clients", type=int, default=4)
    three.add_argument("--prompt", type=int, default=1000, help="words of a prompt")
    three.add_argument("--every", type=float, default=1, help="seconds between two prompts")
    three.add_argument("--seconds", type=float, default=15)
    three.add_argument("--rounds", type=int, default=2)
    three.set_defaults(run=beside)
    for command in (one, two, three):
        command.add_argument("--binary", default="target/release/moeflux")
    arguments, arguments.rest = parser.parse_known_args()
    arguments.rest = [argument for argument in arguments.rest if argument != "--"]
    arguments.run(arguments)


if __name__ == "__main__":
    main()
