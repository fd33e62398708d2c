"""Puts routers that exist, vllm-router and sglang-router, in front of two `moeflux serve demo` and checks what they do there:
requests are spread, follow-up turns go to the worker that has the conversation, and no request is lost with a worker.

    python3 -m venv target/routers && target/routers/bin/pip install -r tools/requirements-routers.txt
    target/routers/bin/python tools/check_routers.py target/debug/moeflux [--measure] [--rounds 3]

`--measure` adds the time to the first token of follow-up turns, with each way of routing in turn.
"""

import argparse
import atexit
import concurrent.futures
import json
import pathlib
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

HOST = "127.0.0.1"
BIN = pathlib.Path(sys.executable).parent
BLOCK = 64
"""Tokens in a block of the workers' events."""
CONTEXT = 2048
"""What the demo model was made for."""


class Worker:
    """`moeflux serve demo` on free ports, with one thread: the workers share this machine."""

    def __init__(self, binary: str, conversations: int):
        command = [binary, "serve", "demo", "--port", "0", "--threads", "1", "--context", str(CONTEXT)]
        command += ["--kept-sessions", str(conversations), "--kv-tokens", str(conversations * CONTEXT)]
        command += ["--kv-events", f"tcp://{HOST}:0", "--kv-events-replay", f"tcp://{HOST}:0"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        atexit.register(self.process.kill)
        said = ""
        for line in self.process.stderr:
            said += line
            if found := re.search(r"on (http://\S+)", line):
                self.url = found[1]
                break
        else:
            sys.exit(f"the worker did not start: {said}")
        self.replay, self.events = (
            re.search(rf"{what} on (tcp://\S+)", said)[1] for what in ("missed key-value cache events", "(?<!missed )key-value cache events")
        )
        # A full pipe would cost the lines that follow.
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def finished(self) -> int:
        text = urllib.request.urlopen(f"{self.url}/metrics", timeout=30).read().decode()
        return int(re.search(r'moeflux_requests_total\{model="demo",outcome="finished"\} (\d+)', text)[1])

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)


def free_port() -> int:
    with socket.socket() as found:
        found.bind((HOST, 0))
        return found.getsockname()[1]


class Router:
    """A router over the workers, with a policy of its own."""

    def __init__(self, kind: str, policy: str, workers: list[Worker]):
        port = free_port()
        self.name, self.url = f"{kind} {policy}", f"http://{HOST}:{port}"
        command = {
            "vllm-router": [BIN / "vllm-router"],
            "sglang-router": [sys.executable, "-m", "sglang_router.launch_router"],
        }[kind]
        command += ["--worker-urls", *(worker.url for worker in workers), "--policy", policy]
        command += ["--host", HOST, "--port", str(port), "--prometheus-port", str(free_port())]
        command += ["--worker-startup-check-interval", "1", "--health-check-interval-secs", "5"]
        if policy == "kv_aware":
            for worker in workers:
                command += ["--kv-event-source", f"{worker.url}={worker.events}"]
                command += ["--kv-event-replay-source", f"{worker.url}={worker.replay}"]
            command += ["--kv-event-block-size", str(BLOCK), "--kv-event-model", "demo"]
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT)
        atexit.register(self.process.kill)
        deadline = time.monotonic() + 120
        while not self.ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.log.seek(0)
                sys.exit(f"{self.name} did not start:\n{self.log.read()[-4000:]}")
            time.sleep(0.2)

    def ready(self) -> bool:
        try:
            state = json.load(urllib.request.urlopen(f"{self.url}/readiness", timeout=5))
            return state.get("healthy_workers") == 2
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


class Reply:
    """An answer, what it took, and how much of its prompt was cached."""

    def __init__(self, url: str, messages: list[dict], max_tokens: int = 8):
        body = {"model": "demo", "messages": messages, "max_tokens": max_tokens, "stream": True, "temperature": 0}
        body["stream_options"] = {"include_usage": True}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
        self.text, self.first, usage, begun = "", None, None, time.perf_counter()
        with urllib.request.urlopen(request, timeout=120) as response:
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                if event.get("choices") and (piece := event["choices"][0]["delta"].get("content")):
                    self.first = self.first or time.perf_counter() - begun
                    self.text += piece
        self.prompt, self.cached = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


WORDS = "fox river stone apple winter garden silver music window paper orange yellow mountain little house green".split()


class Conversation:
    """Turns of which every one has all before it, from a beginning that no other conversation has."""

    def __init__(self, seed: str, words: int):
        self.draw = random.Random(seed)
        self.messages = [{"role": "user", "content": self.text(words)}]

    def text(self, words: int) -> str:
        return " ".join(self.draw.choice(WORDS) for _ in range(words)) + "."

    def turn(self, url: str, words: int = 10) -> Reply:
        reply = Reply(url, self.messages)
        self.messages += [
            {"role": "assistant", "content": reply.text},
            {"role": "user", "content": self.text(words)},
        ]
        return reply


def check_spread(router: Router, workers: list[Worker]) -> str:
    before = [worker.finished() for worker in workers]
    for number in range(8):
        Conversation(f"{router.name} spread {number}", 20).turn(router.url)
    shares = [worker.finished() - was for worker, was in zip(workers, before)]
    assert shares == [4, 4], shares
    return "8 requests: 4 and 4"


def at_once(number: int, router: Router, conversations: list[Conversation]) -> list[Reply]:
    """A turn of every conversation, so many at a time."""
    with concurrent.futures.ThreadPoolExecutor(number) as pool:
        replies = list(pool.map(lambda conversation: conversation.turn(router.url), conversations))
    # Events of the last answers are on their way.
    time.sleep(0.1)
    return replies


def check_prefixes(router: Router, workers: list[Worker]) -> str:
    conversations = [Conversation(f"{router.name} prefixes {number}", 200) for number in range(8)]
    before = [worker.finished() for worker in workers]
    order = random.Random(router.name)
    for turn in range(3):
        order.shuffle(conversations)
        # New prompts go to the worker that has the least to do; where there is a lot to do, that counts more than a prefix.
        for reply in at_once(8 if turn == 0 else 1, router, conversations):
            assert turn == 0 or reply.cached > 0.8 * reply.prompt, (turn, reply.cached, reply.prompt)
    shares = [worker.finished() - was for worker, was in zip(workers, before)]
    assert sum(shares) == 24 and min(shares) > 0, shares
    return f"16 follow-up turns of 8 conversations, each where it was cached; requests: {shares[0]} and {shares[1]}"


def check_failover(kind: str, policy: str, binary: str) -> str:
    workers = [Worker(binary, 8) for _ in range(2)]
    router = Router(kind, policy, workers)
    conversations = [Conversation(f"{kind} failover {number}", 50) for number in range(8)]
    at_once(8, router, conversations)
    assert min(worker.finished() for worker in workers) > 0
    workers[0].kill()
    # The router finds out by the requests that fail.
    assert all(reply.text for reply in at_once(4, router, conversations))
    router.stop()
    workers[1].kill()
    return "8 conversations continued after a worker was killed, none lost"


def measure(routers: list[Router], conversations: int, rounds: int, words: int) -> None:
    """Every round has new conversations for every router; the routers take turns with the same workers."""
    times, cached = {router.name: [] for router in routers}, {router.name: [] for router in routers}
    prompts = []
    for number in range(rounds):
        for router in routers if number % 2 == 0 else reversed(routers):
            order = random.Random(f"{number} {router.name}")
            talks = [Conversation(f"{number} {router.name} {talk}", words) for talk in range(conversations)]
            for turn in range(3):
                # In a fixed order round robin would meet the same worker again.
                order.shuffle(talks)
                replies = at_once(2, router, talks)
                if turn > 0:
                    times[router.name] += [reply.first for reply in replies]
                    cached[router.name] += [reply.cached / reply.prompt for reply in replies]
                    prompts += [reply.prompt for reply in replies]
    print(f"\nfollow-up turns of {conversations} conversations, {rounds} rounds, prompts of {min(prompts)} to {max(prompts)} tokens")
    print("\n| router and policy | prompt cached | first token, median (ms) | 90 % (ms) | against round robin |")
    print("| :-- | --: | --: | --: | --: |")
    base = {}
    for router in routers:
        kind, policy = router.name.split()
        middle = statistics.median(times[router.name])
        most = statistics.quantiles(times[router.name], n=10)[-1]
        base.setdefault(kind, middle)
        share = statistics.mean(cached[router.name])
        print(f"| {router.name} | {share:.0%} | {1e3 * middle:.0f} | {1e3 * most:.0f} | {base[kind] / middle:.1f} × |")


POLICIES = {"vllm-router": ["round_robin", "cache_aware", "kv_aware"], "sglang-router": ["round_robin", "cache_aware"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--measure", action="store_true", help="time follow-up turns too")
    parser.add_argument("--conversations", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--words", type=int, default=800, help="length of a conversation's first message")
    parser.add_argument("--only", help="a single router, as in vllm-router")
    arguments = parser.parse_args()
    workers = [Worker(arguments.binary, 2 * arguments.conversations) for _ in range(2)]
    routers = []
    for kind, policies in POLICIES.items():
        if arguments.only in (None, kind):
            for policy in policies:
                router = Router(kind, policy, workers)
                check = check_spread if policy == "round_robin" else check_prefixes
                print(f"{router.name}: {check(router, workers)}", flush=True)
                routers.append(router)
            for policy in policies[:2]:
                print(f"{kind} {policy}: {check_failover(kind, policy, arguments.binary)}", flush=True)
    if arguments.measure:
        measure(routers, arguments.conversations, arguments.rounds, arguments.words)
    for router in routers:
        router.stop()


if __name__ == "__main__":
    main()
