"""Two workers of NVIDIA Dynamo behind its frontend on this machine: conversations, cancelling, a worker that dies; and what its
prefix routing gains.

    pip install -r tools/requirements-dynamo.txt && pip install --no-deps ai-dynamo==1.6.1
    (cd crates/dynamo && cargo build)
    python tools/check_dynamo.py target/dynamo/debug/moeflux-dynamo [--model demo] [--rounds 2]

Discovery is a folder and events go over ZeroMQ, so neither etcd nor NATS is needed. 32 conversations begin with a long text each
and have three follow-up turns; their time to the first token is compared between round robin and routing by key-value events.
"""

import argparse
import concurrent.futures
import http.client
import json
import os
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
from collections.abc import Callable
from typing import Any

CONVERSATIONS = 32
FOLLOW_UPS = 3
CLIENTS = 4
ANIMALS = ["fox", "hen", "bear", "owl", "frog", "cat", "mole", "duck"]


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 120) -> Any:
    end = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > end:
            sys.exit(f"waited {seconds} s for {what}")
        time.sleep(0.1)
    return found


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Deployment:
    """A frontend and its workers."""

    def __init__(self, arguments: argparse.Namespace, mode: str, folder: pathlib.Path):
        self.arguments, self.folder, self.port = arguments, folder, free_port()
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("DYN_")} | {
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(folder / "store"),
            "DYN_EVENT_PLANE": "zmq",
            "DYN_REQUEST_PLANE": "tcp",
            # Workers offer their cards and figures on ports of their own.
            "DYN_SYSTEM_PORT": "-1",
        }
        self.processes: list[subprocess.Popen] = []
        frontend = [sys.executable, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(self.port)]
        # An answer whose worker dies is finished by another.
        # Evaluating a beginning anew costs more here than one answer more in a batch.
        router = ["--router-mode", mode, "--router-prefill-load-scale", str(arguments.prefill_load_scale)]
        self.start("frontend", [*frontend, *router, "--migration-limit", "3"])
        self.workers = [self.start_worker(number) for number in range(2)]

    def wait(self) -> None:
        """Until the frontend sends requests to both workers, which it may learn of one after the other."""
        wait_for(lambda: len(self.instances()) == 2 and self.models(), "two workers")
        self.name = self.models()[0]

        def answered() -> bool:
            self.ask([{"role": "user", "content": f"{time.monotonic()} nuts?"}], max_tokens=1)
            return all(self.requests(number) for number in range(2))

        wait_for(answered, "both workers to answer")

    def requests(self, number: int) -> int:
        """Requests for answers that a worker has had, by its log."""
        log = re.sub(r"\x1b\[[0-9;]*m", "", (self.folder / f"worker-{number}.log").read_text(errors="replace"))
        return len(re.findall(r"request received.*endpoint=\"generate\"", log))

    def start(self, name: str, command: list[str]) -> subprocess.Popen:
        with open(self.folder / f"{name}.log", "ab") as log:
            process = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)
        self.processes.append(process)
        return process

    def start_worker(self, number: int) -> subprocess.Popen:
        command = [self.arguments.binary, self.arguments.model, "--cpu", "--threads", "1", "--memory", self.arguments.memory]
        options = ["--sequences", "4", "--context", "2048", "--kept-sessions", "32", "--kv-tokens", "65536"]
        return self.start(f"worker-{number}", [*command, *options])

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-1500:] for path in self.folder.glob("*.log"))

    def get(self, path: str) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("GET", path)
            return connection.getresponse().read().decode()
        except OSError:
            return ""
        finally:
            connection.close()

    def models(self) -> list[str]:
        try:
            return [model["id"] for model in json.loads(self.get("/v1/models"))["data"]]
        except (ValueError, KeyError):
            return []

    def instances(self) -> set[str]:
        """Workers that offer to answer, by the files in which they say so."""
        return {path.name for path in (self.folder / "store").glob("v1/instances/*%2Fgenerate%2F*")}

    def ask(self, messages: list[dict[str, str]], **options: Any) -> dict[str, Any]:
        """Streams an answer: its text, cached tokens and seconds to the first token."""
        body = {"model": self.name, "messages": messages, "stream": True, "stream_options": {"include_usage": True},
                "max_tokens": 16, "seed": 1, **options}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        began, first, text, usage = time.monotonic(), None, "", {}
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"{response.status}: {response.read(500)!r}")
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "choices" not in event:
                    raise RuntimeError(event)
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    if piece := choice["delta"].get("content"):
                        first = first or time.monotonic() - began
                        text += piece
        finally:
            connection.close()
        details = usage.get("prompt_tokens_details") or {}
        return {"text": text, "first": first, "prompt": usage.get("prompt_tokens", 0),
                "cached": details.get("cached_tokens") or 0, "answered": usage.get("completion_tokens", 0)}

    def stop(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def beginning(number: int) -> dict[str, str]:
    """Some 700 tokens that no other conversation begins with."""
    rng = random.Random(number)
    giver, nuts = (lambda: rng.choice(ANIMALS)), (lambda: rng.randrange(100))
    lines = [f"Day {day}: the {giver()} gave the {giver()} {nuts()} nuts." for day in range(40)]
    return {"role": "user", "content": f"Diary {number}.\n" + "\n".join(lines) + "\nWho is kind?"}


def conversations(deployment: Deployment) -> list[dict[str, Any]]:
    """The follow-up turns of all conversations, a few at a time, in another order each round."""
    chats = [[beginning(number)] for number in range(CONVERSATIONS)]
    order, follow_ups = list(range(CONVERSATIONS)), []

    def turn(number: int) -> dict[str, Any]:
        answer = deployment.ask(chats[number])
        chats[number] += [{"role": "assistant", "content": answer["text"]}, {"role": "user", "content": "And then?"}]
        return answer

    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
        for round_number in range(1 + FOLLOW_UPS):
            random.Random(round_number).shuffle(order)
            answers = list(pool.map(turn, order))
            if round_number:
                follow_ups += answers
    return follow_ups


def check_faults(deployment: Deployment, folder: pathlib.Path) -> None:
    """A client that goes away, requests that are refused, and a worker that dies while it answers."""
    question = [{"role": "user", "content": "Tell me a story about a fox."}]
    expected = deployment.ask(question, max_tokens=100, temperature=0)["text"]
    try:
        deployment.ask([{"role": "user", "content": "nuts " * 5000}])
        sys.exit("a prompt longer than the context was accepted")
    except RuntimeError as error:
        print(f"a prompt that is too long: {str(error)[:90]}")

    answers: list[str] = []
    lost: list[str] = []

    def client() -> None:
        for _ in range(12):
            while True:
                try:
                    answers.append(deployment.ask(question, max_tokens=100, temperature=0)["text"])
                    break
                except RuntimeError as error:
                    lost.append(str(error))
                    time.sleep(0.2)

    clients = [threading.Thread(target=client) for _ in range(4)]
    for one in clients:
        one.start()
    wait_for(lambda: len(answers) > 8, "answers")
    before = [deployment.requests(number) for number in range(2)]
    victim = before.index(max(before))
    deployment.workers[victim].send_signal(signal.SIGKILL)
    for one in clients:
        one.join()
    right = sum(answer == expected for answer in answers)
    assert deployment.requests(1 - victim) > before[1 - victim], "the other worker had nothing to do"
    print(f"a worker killed while four clients ask: {len(answers)} answers, {right} as before, {len(lost)} asked again", *lost[:1])
    assert len(answers) == right == 48


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", help="moeflux-dynamo")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--memory", default="256MiB")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prefill-load-scale", type=float, default=8, help="the router's --router-prefill-load-scale")
    arguments = parser.parse_args()
    arguments.binary = os.path.abspath(arguments.binary)

    for number in range(arguments.rounds):
        for mode in "round-robin", "kv":
            with tempfile.TemporaryDirectory() as folder:
                deployment = Deployment(arguments, mode, pathlib.Path(folder))
                try:
                    deployment.wait()
                    answers = conversations(deployment)
                    first = sorted(answer["first"] for answer in answers)
                    new = sum(answer["cached"] < answer["prompt"] / 2 for answer in answers)
                    print(f"{mode}: {len(answers)} follow-up turns of {statistics.median(a['prompt'] for a in answers):.0f} "
                          f"tokens, {new} where another worker had the beginning; first token after "
                          f"{statistics.mean(first) * 1e3:.0f} ms (mean), {statistics.median(first) * 1e3:.0f} ms (median), "
                          f"{first[len(first) * 9 // 10] * 1e3:.0f} ms (90 %)", flush=True)
                    if mode == "kv" and number == 0:
                        check_faults(deployment, pathlib.Path(folder))
                except BaseException:
                    print(deployment.logs(), file=sys.stderr)
                    raise
                finally:
                    deployment.stop()


if __name__ == "__main__":
    main()
