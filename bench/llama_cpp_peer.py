"""Measures llama.cpp's speed through llama-cpp-python's low-level calls; started by compare_llama_cpp.py.

    llama_cpp_peer.py '{"model": ..., "load": "mmap", "repack": true, "flash": true, "threads": 2, "repetitions": 1,
                        "tests": [{"kind": "prompt", "tokens": 512, "depth": 0}, ...]}'

Without "flash", llama.cpp decides. Prints one JSON array: for each test the tokens per second of every repetition. As in llama-bench each test
runs once before it counts, tokens are random, others in each repetition, and only the last token of a batch has
logits.
"""

import ctypes
import json
import random
import sys
import time

import llama_cpp

BATCH = 512


@llama_cpp.llama_log_callback
def _quiet(level: int, text: bytes, user_data: ctypes.c_void_p) -> None:
    """Keeps errors only (ggml's level 4)."""
    if level == 4:
        sys.stderr.write(text.decode(errors="replace"))


class Context:
    """A loaded model with one sequence."""

    def __init__(self, request: dict) -> None:
        tests = request["tests"]
        parameters = llama_cpp.llama_model_default_params()
        mmap = request["load"] == "mmap"
        if hasattr(parameters, "load_mode"):
            parameters.load_mode = llama_cpp.LLAMA_LOAD_MODE_MMAP if mmap else llama_cpp.LLAMA_LOAD_MODE_NONE
        else:
            parameters.use_mmap = mmap
        parameters.use_extra_bufts = request["repack"]
        parameters.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(request["model"].encode(), parameters)
        if not self.model:
            raise SystemExit(f"llama.cpp does not load {request['model']}")
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = max(test["tokens"] + test["depth"] for test in tests)
        options.n_batch = options.n_ubatch = BATCH
        if "flash" in request:
            kind = "ENABLED" if request["flash"] else "DISABLED"
            options.flash_attn_type = getattr(llama_cpp, f"LLAMA_FLASH_ATTN_TYPE_{kind}")
        options.n_threads = options.n_threads_batch = request["threads"]
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        if not self.context:
            raise SystemExit("llama.cpp gives no context")
        self.memory = llama_cpp.llama_get_memory(self.context)
        vocab = llama_cpp.llama_model_get_vocab(self.model)
        vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        source = random.Random(request.get("seed", 0))
        most = max(test["depth"] + test["tokens"] * (request["repetitions"] + 1) for test in tests)
        ids = [source.randrange(vocab_size) for _ in range(most)]
        self.tokens = (llama_cpp.llama_token * len(ids))(*ids)

    def decode(self, first: int, end: int, step: int) -> None:
        """Appends tokens number `first..end`, `step` at a time."""
        size = ctypes.sizeof(llama_cpp.llama_token)
        for start in range(first, end, step):
            count = min(step, end - start)
            part = (llama_cpp.llama_token * count).from_buffer(self.tokens, start * size)
            status = llama_cpp.llama_decode(self.context, llama_cpp.llama_batch_get_one(part, count))
            if status != 0:
                raise SystemExit(f"llama_decode gave {status}")
        llama_cpp.llama_synchronize(self.context)

    def measure(self, kind: str, tokens: int, depth: int, repetitions: int) -> list[float]:
        """Tokens per second of each repetition at a context of `depth` tokens."""
        llama_cpp.llama_memory_clear(self.memory, True)
        self.decode(0, depth, BATCH)
        step = BATCH if kind == "prompt" else 1
        speeds = []
        for repetition in range(repetitions + 1):
            first = depth + repetition * tokens
            start = time.perf_counter()
            self.decode(first, first + tokens, step)
            speeds.append(tokens / (time.perf_counter() - start))
            llama_cpp.llama_memory_seq_rm(self.memory, 0, depth, -1)
        return speeds[1:]


def main() -> None:
    request = json.loads(sys.argv[1])
    llama_cpp.llama_log_set(_quiet, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    context = Context(request)
    speeds = [
        context.measure(test["kind"], test["tokens"], test["depth"], request["repetitions"])
        for test in request["tests"]
    ]
    print(json.dumps(speeds))


if __name__ == "__main__":
    main()
