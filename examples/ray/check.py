"""Runs the examples on a cluster of two nodes on this machine, kills what runs in the middle, and prints the speeds.

    python examples/ray/check.py batch [--rows 1600] [--rounds 2]
    python examples/ray/check.py serve
"""

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # Nothing but this machine reaches the cluster.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet
import ray
from ray.cluster_utils import Cluster

import moeflux

HERE = pathlib.Path(__file__).parent
MEMORY = "64MiB"
TOKENS = 128
SEED = 7


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 120) -> Any:
    """Waits until a condition is true, and returns what it gave."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > end:
            sys.exit(f"waited {seconds} s for {what}")
        time.sleep(0.05)
    return found


def workers(title: str) -> list[int]:
    """Worker processes of our cluster with this in their title."""
    parents, found = {}, []
    for folder in pathlib.Path("/proc").iterdir():
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if title in (folder / "cmdline").read_text():
                found.append(int(folder.name))
        except (ValueError, OSError):
            continue

    def ours(pid: int) -> bool:
        while pid not in (0, os.getpid()):
            pid = parents.get(pid, 0)
        return pid != 0

    return [pid for pid in found if ours(pid)]


def prompts(rows: int) -> pa.Table:
    animals = ["fox", "hen", "bear", "owl", "frog"]
    texts = [f"Tell me a short story about a {animals[n % 5]} and {n} nuts." for n in range(rows)]
    return pa.table({"id": range(rows), "prompt": [[{"role": "user", "content": text}] for text in texts]})


def one_process(path: str) -> None:
    """The same rows in one process without Ray, on both cores; prints the answers."""
    table = pyarrow.parquet.read_table(path)
    with moeflux.open("demo", backend="cpu", memory="128MiB", threads=2, sequences=16) as model:
        began = time.monotonic()
        answers = model.generate_batch(table["prompt"].to_pylist(), seed=SEED, max_tokens=TOKENS)
        seconds = time.monotonic() - began
    tokens = sum(len(answer.tokens) for answer in answers)
    by_id = dict(zip(table["id"].to_pylist(), (answer.text for answer in answers), strict=True))
    json.dump({"speed": tokens / seconds, "answers": by_id}, sys.stdout)


def start(source: pathlib.Path, output: pathlib.Path, address: str) -> subprocess.Popen:
    """The batch, by two workers with a core each."""
    command = [sys.executable, HERE / "batch.py", source, output, "--workers", "2", "--threads", "1"]
    command += ["--memory", MEMORY, "--backend", "cpu", "--max-tokens", str(TOKENS), "--seed", str(SEED)]
    environment = os.environ | {"RAY_ADDRESS": address, "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def finish(process: subprocess.Popen) -> str:
    said, _ = process.communicate(timeout=600)
    if process.returncode != 0:
        sys.exit(f"the batch ended with {process.returncode}: {said}")
    return said


def compare(output: pathlib.Path, expected: dict[str, str], what: str) -> None:
    """Every row is there once, with the answer that one process gave."""
    rows = pyarrow.dataset.dataset(sorted(output.glob("*.parquet"))).to_table()
    ids = [str(one) for one in rows["id"].to_pylist()]
    assert sorted(ids) == sorted(expected), f"{what}: {len(ids)} rows, {len(set(ids))} different, {len(expected)} expected"
    different = sum(expected[one] != text for one, text in zip(ids, rows["answer"].to_pylist(), strict=True))
    assert different == 0, f"{what}: {different} answers are not those of one process"
    print(f"{what}: {len(ids)} rows, each once, all with the answers of one process", flush=True)


def check_batch(rows: int, rounds: int, folder: pathlib.Path, address: str) -> None:
    source = folder / "prompts.parquet"
    pyarrow.parquet.write_table(prompts(rows), source)
    alone, together = [], []
    for turn in range(rounds):
        command = [sys.executable, __file__, "one-process", source]
        single = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        alone.append(single["speed"])
        said = finish(start(source, folder / f"answers-{turn}", address))
        together.append(float(said.split()[-2]))
        print(f"one process {alone[-1]:.0f} tokens/s, two workers {together[-1]:.0f}", flush=True)
        compare(folder / f"answers-{turn}", single["answers"], "two workers")
    expected = single["answers"]

    output = folder / "worker-killed"
    process = start(source, output, address)
    wait_for(lambda: len(list(output.glob("*.parquet"))) * 32 > rows / 4, "a quarter of the rows")
    before = set(workers("ray::MapWorker"))
    victim = min(before)
    os.kill(victim, signal.SIGKILL)
    after = wait_for(lambda: set(workers("ray::MapWorker")) - before, "a new worker")
    print(f"killed worker {victim} of {sorted(before)} after {len(list(output.glob('*.parquet')))} parts, new: {after}")
    finish(process)
    compare(output, expected, "a worker killed")

    output = folder / "driver-killed"
    process = start(source, output, address)
    wait_for(lambda: len(list(output.glob("*.parquet"))) * 32 > rows / 4, "a quarter of the rows")
    process.kill()
    process.wait()
    wait_for(lambda: not workers("ray::MapWorker"), "the end of the killed program's workers")
    first = finish(start(source, output, address)).splitlines()[0]
    assert not first.startswith("0 "), first
    print(f"started again after the program was killed: {first}")
    compare(output, expected, "the program killed")

    for what, speeds in ("one process, two threads", alone), ("two workers, a thread each", together):
        print(f"{what}: {' '.join(f'{speed:.0f}' for speed in speeds)} tokens/s")


def request(url: str, question: str, **options: Any) -> Any:
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": TOKENS, "seed": SEED} | options
    headers = {"content-type": "application/json"}
    return urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60)


def events(response: Any) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


def check_serve() -> None:
    from ray import serve

    sys.path.insert(0, str(HERE))
    import serve_app

    port = 18000 + os.getpid() % 1000
    # Both nodes have the same address here.
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    serve.run(serve_app.app(serve_app.Options(memory=MEMORY, backend="cpu")))
    url = f"http://127.0.0.1:{port}/v1/chat/completions"

    question = "Tell me a short story about a fox."
    times, text, began = [], "", time.monotonic()
    with request(url, question, stream=True) as response:
        for said in events(response):
            times.append(time.monotonic() - began)
            text += said["choices"][0]["delta"].get("content", "")
    with moeflux.open("demo", backend="cpu") as model:
        alone = model.generate([{"role": "user", "content": question}], seed=SEED, max_tokens=TOKENS)
        endless = {str(token): -100 for token in model.tokenizer.eos_ids}
    assert text == alone.text, f"{text!r} is not {alone.text!r}"
    with request(url, question) as response:
        whole = json.load(response)
    assert whole["choices"][0]["message"]["content"] == text
    print(f"streaming: {len(times)} events, first after {times[0] * 1e3:.0f} ms, last after {times[-1] * 1e3:.0f} ms")

    for wrong in {"messages": [{"role": "user", "content": "x " * 9000}]}, {"messages": "x"}:
        try:
            body = urllib.request.Request(url, json.dumps(wrong).encode(), {"content-type": "application/json"})
            urllib.request.urlopen(body, timeout=60)
            sys.exit(f"{str(wrong)[:60]} was accepted")
        except urllib.error.HTTPError as error:
            assert 400 <= error.code < 500, error.code

    def statistics(pids: set[int]) -> dict[int, dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        end = time.monotonic() + 30
        while set(found) != pids and time.monotonic() < end:
            with urllib.request.urlopen(url.replace("chat/completions", "stats"), timeout=60) as response:
                one = json.load(response)
            found[one["replica"]] = one
        return found

    replicas = set(wait_for(lambda: len(found := workers("ray::ServeReplica")) == 2 and found, "two replicas"))
    leaving = request(url, question, stream=True, max_tokens=1900, logit_bias=endless)
    next(events(leaving))
    leaving.close()
    wait_for(lambda: sum(one["cancelled"] for one in statistics(replicas).values()) == 1, "the end of a dropped answer", 20)
    print("a client that goes away ends its answer")

    # 200 requests by eight clients, one replica killed in the middle; clients ask again if they lose their answer.
    remaining = list(range(200))
    answers: dict[int, str] = {}
    lost, by_replica = [], {}

    def client() -> None:
        while remaining:
            try:
                number = remaining.pop()
            except IndexError:
                return
            try:
                with request(url, f"What is {number} + 25?") as response:
                    answers[number] = json.load(response)["choices"][0]["message"]["content"]
                    by_replica[response.headers["x-replica"]] = by_replica.get(response.headers["x-replica"], 0) + 1
            except (OSError, ValueError) as error:
                lost.append(repr(error))
                remaining.append(number)
                time.sleep(0.2)

    clients = [threading.Thread(target=client) for _ in range(8)]
    for one in clients:
        one.start()
    wait_for(lambda: len(answers) > 60, "60 answers")
    victim = min(replicas)
    os.kill(victim, signal.SIGKILL)
    for one in clients:
        one.join()
    assert len(answers) == 200, len(answers)
    new = wait_for(lambda: len(found := set(workers("ray::ServeReplica"))) == 2 and found - replicas, "a new replica")
    print(f"killed replica {victim}, new: {new}; 200 answers, {len(lost)} asked again; by replica: {by_replica}")
    serve.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["batch", "serve", "one-process"])
    parser.add_argument("source", nargs="?")
    parser.add_argument("--rows", type=int, default=1600)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.what == "one-process":
        return one_process(arguments.source)

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    try:
        if arguments.what == "batch":
            with tempfile.TemporaryDirectory() as folder:
                check_batch(arguments.rows, arguments.rounds, pathlib.Path(folder), cluster.address)
        else:
            ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
            check_serve()
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
