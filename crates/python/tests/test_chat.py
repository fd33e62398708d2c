"""Conversations: turns, files, and the command line's."""

import json
import shutil

import moeflux
import pytest

from conftest import FIXTURES


def test_turns_evaluate_what_is_new(model):
    chat = model.chat("You are brief.")
    first = chat.ask("What is 17 + 25?", temperature=0)
    second = chat.ask("Tell me a short story about a fox.", temperature=0, max_tokens=30)
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert chat.messages[2]["content"] == first.text and chat.messages[4]["content"] == second.text
    assert second.usage.cached_tokens >= first.usage.prompt_tokens
    assert second.tokens == model.generate(chat.messages[:4], temperature=0, max_tokens=30).tokens
    assert chat.take_back() == "Tell me a short story about a fox."
    chat.push("user", "Hello!")
    assert len(chat.messages) == 4
    assert model.chat().take_back() is None


def test_what_was_said_stays(model):
    chat = model.chat()
    stream = chat.stream("Tell me a short story about a fox.", seed=1)
    with pytest.raises(RuntimeError, match="still being answered"):
        chat.ask("Hello!")
    said = str(next(stream))
    del stream
    assert len(chat.messages) == 2 and chat.messages[1]["content"].startswith(said)
    with pytest.raises(moeflux.OptionError):
        chat.ask("Hello!", temperature=-1)
    with pytest.raises(moeflux.ContextFullError):
        chat.ask("word " * 2000)
    assert len(chat.messages) == 2
    assert chat.ask("Hello!", temperature=0).text


def test_conversations_in_files_are_the_command_lines(model, cli, tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    flags = ["--backend=cpu", "--context=512", "--temperature=0", "--max-tokens=40"]
    chat = model.chat()
    answer = chat.ask("Tell me a short story about a fox.", temperature=0, max_tokens=40)
    chat.save(ours)
    assert cli("run", "demo", "Tell me a short story about a fox.", "--session", theirs, *flags).stdout.strip() == answer.text.strip()
    loaded = model.load_chat(theirs)
    assert loaded.messages == chat.messages
    expected = chat.ask("What is 17 + 25?", temperature=0).text
    assert loaded.ask("What is 17 + 25?", temperature=0).text == expected
    assert cli("run", "demo", "What is 17 + 25?", "--session", ours, *flags).stdout.strip() == expected.strip()
    # A model that has just been opened has nothing of it cached, and resumes it without evaluating it again.
    with moeflux.open("demo", backend="cpu", context=512) as other:
        resumed = other.load_chat(theirs)
        again = resumed.ask("What is 17 + 25?", temperature=0)
        assert again.text == expected and again.usage.cached_tokens > 40
        resumed.save(ours)
        assert other.load_chat(ours).messages == resumed.messages
    session = model.session()
    session.save(ours, note="no messages")
    with pytest.raises(moeflux.CheckpointError, match="messages beside the session"):
        model.load_chat(ours)


def test_what_is_no_longer_cached_is_saved_all_the_same(tmp_path):
    with moeflux.open("demo", backend="cpu", context=256, kept_sessions=0) as model:
        chat = model.chat()
        chat.ask("What is 17 + 25?", temperature=0)
        chat.save(tmp_path / "chat")
        loaded = model.load_chat(tmp_path / "chat")
        assert loaded.messages == chat.messages
        assert model.load_session(tmp_path / "chat").position > 10


@pytest.fixture
def thinker(tmp_path):
    """A tiny model whose template has it think first."""
    for file in (FIXTURES / "hf/qwen3_moe_tokenizer").iterdir():
        shutil.copy(file, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text()) if (tmp_path / "tokenizer_config.json").exists() else {}
    config["chat_template"] = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n{# </think> #}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with moeflux.open(tmp_path, backend="cpu", context=64) as model:
        yield model


def test_reasoning_is_apart(thinker):
    chat = thinker.chat()
    stream = chat.stream("hello", max_tokens=8, temperature=0)
    pieces = list(stream)
    answer = stream.answer()
    assert pieces and all(piece.reasoning for piece in pieces)
    assert answer.text == "" and answer.reasoning == "".join(map(str, pieces))
    assert chat.messages[-1]["reasoning_content"] == answer.reasoning
    # Text that no template made is not taken apart.
    assert thinker.generate("hello", max_tokens=8, temperature=0).reasoning == ""
