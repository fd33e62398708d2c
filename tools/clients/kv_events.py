"""A subscriber to events of the key-value cache, which decodes what vLLM publishes: ZeroMQ's own library and msgspec, with the
structures that vLLM documents."""

import json
import re
import urllib.request

import msgspec
import zmq

BLOCK = 64
TOPIC = "kv@demo"
OPTIONS = ["--kv-events", "tcp://127.0.0.1:0", "--kv-events-replay", "tcp://127.0.0.1:0", "--kv-events-topic", TOPIC]
OPTIONS += ["--kept-sessions", "1"]


class Event(msgspec.Struct, omit_defaults=True, tag=True):
    pass


class BlockStored(Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(Event):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(Event):
    pass


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


DECODE = msgspec.msgpack.Decoder(type=Batch).decode


class Index:
    """Which prefixes a server has, by its events."""

    def __init__(self):
        self.blocks: dict[int, tuple[int | None, list[int]]] = {}
        self.cleared = 0

    def add(self, batch: Batch) -> None:
        assert batch.ts > 1.7e9 and batch.data_parallel_rank == 0, batch
        for event in batch.events:
            match event:
                case BlockStored(block_hashes=hashes, parent_block_hash=parent, token_ids=tokens):
                    assert event.block_size == BLOCK and len(tokens) == BLOCK * len(hashes) and event.medium == "GPU"
                    assert parent is None or parent in self.blocks
                    for number, name in enumerate(hashes):
                        assert name not in self.blocks, "stored twice"
                        self.blocks[name] = parent, tokens[number * BLOCK : (number + 1) * BLOCK]
                        parent = name
                case BlockRemoved(block_hashes=hashes):
                    for name in hashes:
                        del self.blocks[name]
                case AllBlocksCleared():
                    self.blocks.clear()
                    self.cleared += 1

    def has(self, tokens: list[int]) -> int:
        """Blocks of `tokens` that are there."""
        parent, found = None, 0
        while len(block := tokens[found * BLOCK : (found + 1) * BLOCK]) == BLOCK:
            parent = next((name for name, held in self.blocks.items() if held == (parent, block)), None)
            if parent is None:
                break
            found += 1
        return found


def ask(url: str, path: str, key: str, **body) -> dict:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    return json.load(urllib.request.urlopen(urllib.request.Request(url + path, json.dumps(body).encode(), headers)))


def check(server, key: str) -> None:
    """`server` has been started with OPTIONS; it is stopped at the end."""
    missed = re.search(r"missed key-value cache events on (tcp://\S+)", server.said)[1]
    address = re.search(r"\n[^\n]*?(?<!missed )key-value cache events on (tcp://\S+)", server.said)[1]
    context, index, seen = zmq.Context(), Index(), []
    subscriber = context.socket(zmq.SUB)
    subscriber.connect(address)
    subscriber.setsockopt_string(zmq.SUBSCRIBE, TOPIC)

    def listen(until) -> None:
        while not until():
            assert subscriber.poll(20_000), "no event came"
            topic, number, payload = subscriber.recv_multipart()
            batch = int.from_bytes(number), payload
            assert topic.decode() == TOPIC
            if batch not in seen:
                assert batch[0] == seen[-1][0] + 1
                seen.append(batch)
                index.add(DECODE(payload))

    prompts = [" ".join(f"{word} {i}" for i in range(90)) for word in ("fox", "moon")]
    tokens = [ask(server.url, "/tokenize", key, prompt=prompt)["tokens"] for prompt in prompts]
    replay = context.socket(zmq.DEALER)
    replay.connect(missed)

    def replayed(start: int) -> list[tuple[int, bytes]]:
        replay.send_multipart([b"", start.to_bytes(8)])
        batches = []
        while True:
            assert replay.poll(20_000), "no replay came"
            empty, number, payload = replay.recv_multipart()
            assert empty == b""
            if int.from_bytes(number, signed=True) == -1:
                assert payload == b""
                return batches
            batches.append((int.from_bytes(number), payload))

    # What came before the subscription is lost, but for the replay.
    ask(server.url, "/v1/completions", key, model="demo", prompt=prompts[0], max_tokens=2)
    while not any(isinstance(event, BlockStored) for _, payload in replayed(0) for event in DECODE(payload).events):
        pass
    history = replayed(0)
    assert [number for number, _ in history] == list(range(len(history)))
    seen += history
    for _, payload in history:
        index.add(DECODE(payload))
    assert index.cleared == 1 and index.has(tokens[0]) == len(tokens[0]) // BLOCK > 2
    ask(server.url, "/v1/completions", key, model="demo", prompt=prompts[1], max_tokens=2)
    # One session is kept.
    listen(lambda: index.has(tokens[1]) == len(tokens[1]) // BLOCK and index.has(tokens[0]) == 0)
    # A request socket can have one answer: enough to learn of the end.
    asking = context.socket(zmq.REQ)
    asking.connect(missed)
    asking.send((seen[-1][0] + 1).to_bytes(8))
    assert asking.poll(20_000) and asking.recv_multipart() == [b"\xff" * 8, b""]
    assert replayed(seen[-1][0]) == seen[-1:] and replayed(0) == seen
    cleared = index.cleared
    assert server.stop() == 0
    listen(lambda: index.cleared > cleared)
    assert not index.blocks
    context.destroy(linger=0)
