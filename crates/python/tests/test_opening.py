"""Opening models: options, files that are none, the Hub's cache."""

import os
import shutil
import signal
import threading

import moeflux
import pytest

from conftest import DEMO, FIXTURES


def words(cli, *arguments):
    """What the command line says of an error."""
    done = cli(*arguments, check=False)
    assert done.returncode != 0
    return done.stderr.strip().splitlines()[-1].removeprefix("error: ")


def test_files_that_are_none(cli, tmp_path):
    text, short, empty = tmp_path / "text.gguf", tmp_path / "short.gguf", tmp_path / "empty"
    text.write_text("This is not a model.")
    short.write_bytes(DEMO.read_bytes()[:100_000])
    empty.mkdir()
    for path, error in (
        (tmp_path / "missing.gguf", moeflux.MissingFileError),
        (text, moeflux.CheckpointError),
        (short, moeflux.CheckpointError),
        (empty, moeflux.Error),
    ):
        with pytest.raises(error) as raised:
            moeflux.open(path, backend="cpu")
        assert str(path) in str(raised.value)
        assert words(cli, "run", path, "x", "--backend=cpu") == str(raised.value)
    with pytest.raises(FileNotFoundError) as raised:
        moeflux.open(str(tmp_path / "missing.gguf"))
    assert raised.value.errno == 2 and isinstance(raised.value, moeflux.Error)


def test_budgets_that_are_too_small(cli):
    with pytest.raises(MemoryError) as raised:
        moeflux.open("demo", backend="cpu", memory=1 << 20, context=512, sequences=1)
    assert isinstance(raised.value, moeflux.BudgetError)
    assert words(cli, "run", "demo", "x", "--backend=cpu", "--memory=1MiB", "--context=512") == str(raised.value)
    with moeflux.open("demo", backend="cpu", memory=raised.value.minimum, context=512, sequences=1) as model:
        assert model.generate("x", max_tokens=2, temperature=0).tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "abacus"}, "option backend: expected auto, cpu or cuda, got abacus"),
        ({"activations": "int4"}, "option activations: expected int8 or f32, got int4"),
        ({"kv": "q4"}, "option kv: expected f16, f32 or q8_0, got q4"),
        ({"prefetch": "maybe"}, "option prefetch: expected auto, off or always, got maybe"),
        ({"simd": "mmx"}, "option simd: expected portable, neon, avx2 or avx512, got mmx"),
        ({"threads": 0}, "option threads: expected a positive number"),
        ({"memory": "6 parsecs"}, "unknown unit"),
        ({"backend": "cpu", "device_memory": "1GiB"}, "option device-memory: expected a usable GPU"),
    ],
)
def test_options_without_meaning(options, message):
    with pytest.raises(ValueError, match=message):
        moeflux.open("demo", **options)


def test_options_change_what_they_say(model):
    opened = moeflux.open(
        DEMO, backend="cpu", memory="64MiB", context=64, sequences=2, threads=1, simd="portable", kv="f32", read_queue="pread",
        read_mode="buffered", prefetch="off", cache_policy="lru", expert_cache=40, mirrors=[DEMO],
    )
    with opened:
        assert (opened.context, opened.sequences, opened.path) == (64, 2, DEMO)
        assert "1 thread" in opened.backend and opened.backend in repr(opened)
        assert opened.generate("Once", temperature=0, max_tokens=8).usage.expert_misses > 0
    assert opened.path != model.path and model.vocab_size >= model.tokenizer.vocab_size


def test_progress_is_told():
    calls = []
    moeflux.open(DEMO, backend="cpu", context=64, progress=lambda *loaded: calls.append(loaded)).close()
    assert calls == sorted(calls) and calls[-1][0] == calls[-1][1]
    with pytest.raises(ZeroDivisionError):
        moeflux.open(DEMO, backend="cpu", context=64, progress=lambda *loaded: 1 / 0)


def test_control_c_does_not_wait_for_loading():
    def loading(*_):
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(10)

    with pytest.raises(KeyboardInterrupt):
        moeflux.open(DEMO, backend="cpu", context=64, progress=loading)


def test_models_in_the_cache_of_the_hub(tmp_path, monkeypatch):
    commit = "0" * 40
    repository = tmp_path / "models--org--tiny"
    snapshot = repository / "snapshots" / commit
    (repository / "refs").mkdir(parents=True)
    (repository / "blobs").mkdir()
    snapshot.mkdir(parents=True)
    (repository / "refs/main").write_text(commit)
    shutil.copy(DEMO, repository / "blobs/content")
    (snapshot / "tiny-Q4_K_M.gguf").symlink_to("../../blobs/content")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with moeflux.open("org/tiny:Q4_K_M", backend="cpu", context=64) as model:
        assert model.path == snapshot / "tiny-Q4_K_M.gguf"
    with pytest.raises(moeflux.Error, match="org/tiny has no Q8_0"):
        moeflux.open("org/tiny:Q8_0")
    with pytest.raises(moeflux.Error, match="org/other is not.*moeflux pull org/other"):
        moeflux.open("org/other")
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    with pytest.raises(moeflux.Error, match=str(tmp_path / "home/hub")):
        moeflux.open("org/tiny")


def test_gpus_are_listed():
    for gpu in moeflux.gpus():
        assert gpu["name"] and 0 <= gpu["free"] <= gpu["memory"]
    if not moeflux.gpus():
        with pytest.raises(moeflux.Error, match="usable GPU"):
            moeflux.open("demo", backend="cuda")


def test_a_checkpoint_of_every_kind_opens():
    for name in ("gguf/qwen3_moe_q4_k_m", "hf/qwen3_moe_tokenizer"):
        folder = FIXTURES / name
        path = next(folder.glob("*.gguf"), folder)
        with moeflux.open(path, backend="cpu", context=32) as model:
            assert model.logits([1, 2, 3]).shape == (3, model.vocab_size)
