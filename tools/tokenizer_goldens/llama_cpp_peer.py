"""Tokenizes with llama.cpp; runs in the interpreter that has llama-cpp-python.

    python llama_cpp_peer.py JOBS RESULTS

JOBS is a JSON list of {"gguf": path, "texts": [text, …]}. RESULTS gets, for each, the ids of every text: "parsed" with
special tokens parsed, "plain" without, "with_special" as parsed with the tokens around a text; "pieces", the bytes of
every token as Latin-1; and "ends", the tokens that end a generation.
"""

import ctypes
import json
import sys
from pathlib import Path

import llama_cpp


@llama_cpp.llama_log_callback
def _quiet(level: int, text: bytes, user_data: ctypes.c_void_p) -> None:
    """Keeps errors only (ggml's level 4)."""
    if level == 4:
        sys.stderr.write(text.decode(errors="replace"))


def ids_of(vocab: object, text: str, add_special: bool, parse_special: bool) -> list[int]:
    data = text.encode()
    room = len(data) + 8
    ids = (llama_cpp.llama_token * room)()
    count = llama_cpp.llama_tokenize(vocab, data, len(data), ids, room, add_special, parse_special)
    assert count >= 0, (text, count)
    return list(ids[:count])


def piece_of(vocab: object, token: int) -> str:
    room = 256
    buffer = ctypes.create_string_buffer(room)
    count = llama_cpp.llama_token_to_piece(vocab, token, buffer, room, 0, True)
    assert count >= 0, (token, count)
    return buffer.raw[:count].decode("latin-1")


def tokenize(job: dict) -> dict:
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(job["gguf"].encode(), params)
    assert model, job["gguf"]
    vocab = llama_cpp.llama_model_get_vocab(model)
    texts = job["texts"]
    tokens = range(llama_cpp.llama_vocab_n_tokens(vocab))
    result = {
        "parsed": [ids_of(vocab, text, False, True) for text in texts],
        "plain": [ids_of(vocab, text, False, False) for text in texts],
        "with_special": [ids_of(vocab, text, True, True) for text in texts],
        "pieces": [piece_of(vocab, token) for token in tokens],
        "ends": [token for token in tokens if llama_cpp.llama_vocab_is_eog(vocab, token)],
    }
    llama_cpp.llama_model_free(model)
    return result


def main() -> None:
    llama_cpp.llama_log_set(_quiet, ctypes.c_void_p(0))
    jobs = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(sys.argv[2]).write_text(json.dumps([tokenize(job) for job in jobs]), encoding="utf-8")


main()
