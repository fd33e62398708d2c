"""Logits, hidden states and router choices: the engine's bits, whole and in parts."""

import json
import struct

import moeflux
import numpy as np
import pytest

from conftest import DEMO, FIXTURES

TOKENS = [5, 17, 250, 31, 8, 99, 4, 120, 77, 15, 6]


def read_safetensors(path):
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    tensor = json.loads(data[8 : 8 + length])["logits"]
    begin, end = (8 + length + offset for offset in tensor["data_offsets"])
    return np.frombuffer(data[begin:end], np.float32).reshape(tensor["shape"])


@pytest.mark.parametrize("checkpoint", [DEMO, FIXTURES / "gguf/qwen3_moe_q4_k_m"])
def test_logits_have_the_bits_of_the_command_line(cli, tmp_path, checkpoint):
    path = checkpoint if checkpoint.is_file() else next(checkpoint.glob("*.gguf"))
    tokens = [token % 90 for token in TOKENS]
    out = tmp_path / "logits.safetensors"
    cli("logits", path, "--backend=cpu", "--tokens", ",".join(map(str, tokens)), "--out", out)
    with moeflux.open(path, backend="cpu", activations="f32", context=64) as model:
        logits = model.logits(tokens)
    expected = read_safetensors(out)
    assert logits.dtype == np.float32 and logits.shape == expected.shape
    assert logits.tobytes() == expected.tobytes()


def test_streamed_is_resident_bit_for_bit(model):
    with moeflux.open("demo", backend="cpu", context=512, memory="14MiB", sequences=1) as streamed:
        assert streamed.logits(TOKENS * 9).tobytes() == model.logits(TOKENS * 9).tobytes()
        expected = model.generate("Once upon a time", seed=1, max_tokens=40)
        answer = streamed.generate("Once upon a time", seed=1, max_tokens=40)
        assert answer.tokens == expected.tokens
        assert answer.usage.expert_misses > 0 and answer.usage.bytes_read > 0
    assert streamed.path == model.path


def test_arrays_are_the_engines_memory(model):
    for array, width in ((model.logits(TOKENS), model.vocab_size), (model.hidden_states(TOKENS), model.hidden_size)):
        assert array.shape == (len(TOKENS), width) and array.dtype == np.float32
        assert array.flags.c_contiguous and array.flags.writeable
        # NumPy has not allocated it: Rust's vector is behind it, which lives as long as the array.
        assert not array.flags.owndata and "PySliceContainer" in repr(owner(array))


def owner(array):
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array.base


def test_parts_give_what_the_whole_does(model):
    whole = model.logits(TOKENS)
    session = model.session()
    assert session.eval(TOKENS[:4], "all").tobytes() == whole[:4].tobytes()
    fork = session.fork()
    assert session.eval(TOKENS[4:]).tobytes() == whole[-1:].tobytes()
    assert session.tokens == TOKENS and session.position == len(TOKENS)
    # Branches share what was there and do not disturb each other.
    assert fork.position == 4
    fork.eval([1, 2, 3])
    assert session.fork(4).eval(TOKENS[4:]).tobytes() == whole[-1:].tobytes()
    session.truncate(6)
    assert session.eval(TOKENS[6:], "all").tobytes() == whole[6:].tobytes()
    hidden = model.hidden_states(TOKENS)
    again = model.session()
    again.eval(TOKENS[:5])
    assert again.eval_hidden(TOKENS[5:], "all").tobytes() == hidden[5:].tobytes()
    assert model.logits(TOKENS, outputs="last").tobytes() == whole[-1:].tobytes()


def test_long_inputs_are_cut_into_chunks(model):
    tokens = [7 * i % 900 + 1 for i in range(200)]
    with moeflux.open("demo", backend="cpu", context=512, chunk=32) as small:
        assert small.logits(tokens).tobytes() == model.logits(tokens).tobytes()
        ours, theirs = small.routing(tokens), model.routing(tokens)
        assert all((a.experts == b.experts).all() for a, b in zip(ours, theirs, strict=True))


def test_routers_choose(model):
    logits, choices = model.session().eval_with_routing(TOKENS, "all")
    assert logits.tobytes() == model.logits(TOKENS).tobytes()
    assert [layer.layer for layer in choices] == sorted({layer.layer for layer in choices}) and len(choices) > 1
    for layer in choices:
        assert layer.experts.dtype == np.uint32 and layer.experts.shape[0] == len(TOKENS)
        assert layer.experts.shape[1] > 1 and all(len(set(row)) == len(row) for row in layer.experts.tolist())
    assert all((a.experts == b.experts).all() for a, b in zip(choices, model.routing(TOKENS), strict=True))


def test_embeddings_have_length_one(model):
    embeddings = model.embed(["A fox.", "A fox!", TOKENS], pooling="mean")
    assert embeddings.shape == (3, model.hidden_size)
    assert np.allclose(np.linalg.norm(embeddings, axis=1), 1, atol=1e-5)
    hidden = model.hidden_states(TOKENS).astype(np.float64).sum(0)
    assert np.allclose(embeddings[2], hidden / np.linalg.norm(hidden), atol=1e-6)


def test_sessions_in_files(model, tmp_path):
    session, file = model.session(), tmp_path / "session"
    session.eval(TOKENS[:7])
    session.save(file, note="so far")
    loaded = model.load_session(file)
    assert loaded.tokens == TOKENS[:7] and loaded.note == "so far"
    assert loaded.eval(TOKENS[7:]).tobytes() == session.eval(TOKENS[7:]).tobytes()
    model.keep(session)
    assert model.generate(TOKENS + [1], max_tokens=1).usage.cached_tokens == len(TOKENS)
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(moeflux.CheckpointError, match="session file"):
        model.load_session(file)


def test_what_fails_leaves_a_session_as_it_was(model):
    session = model.session()
    session.eval(TOKENS[:3])
    for tokens, error, words in (
        ([10**6], moeflux.OptionError, "token id 1000000"),
        ([1] * 600, moeflux.ContextFullError, "603 tokens do not fit in the context of 512 tokens"),
    ):
        with pytest.raises(error, match=words):
            session.eval(tokens)
        assert session.tokens == TOKENS[:3]
    with pytest.raises(moeflux.OptionError, match="outputs: expected last or all, got first"):
        session.eval([1], "first")
    assert session.eval([], "all").shape == (0, model.vocab_size)
    with pytest.raises(OverflowError):
        session.eval([-1])
