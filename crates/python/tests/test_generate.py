"""Answers: the command line's, alone and in company, whole and in pieces."""

import json
import re

import moeflux
import pytest

STORY = "Tell me a short story about a fox."
QUESTIONS = [STORY, "What is 17 + 25?", "Hello!", "Reverse the word: lantern", "Sort these numbers: 7 3 9 1"]


def ask(text):
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 1}, {"seed": 7, "temperature": 1.2, "min_p": 0.05}])
def test_answers_are_those_of_the_command_line(model, cli, options):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    common = ["--backend=cpu", "--context=512", "--max-tokens=60", *flags]
    assert cli("run", "demo", STORY, *common).stdout.strip() == model.generate(ask(STORY), max_tokens=60, **options).text.strip()
    raw = cli("run", "demo", "--raw", "Once upon a time", *common).stdout
    assert raw.strip() == model.generate("Once upon a time", max_tokens=60, **options).text.strip()


def test_an_answer_says_how_it_came_about(model):
    answer = model.generate(ask("What is 17 + 25?"), temperature=0)
    assert answer.text.strip() == "17 + 25 = 42" == str(answer).strip()
    assert answer.finish == "end_of_text" and answer.stopped_by is None and answer.reasoning == ""
    assert model.tokenizer.decode(answer.tokens) == answer.text
    assert answer.usage.completion_tokens == len(answer.tokens)
    assert answer.usage.prompt_tokens == len(model.encode(ask("What is 17 + 25?")))
    assert 0 < answer.usage.first_token_seconds <= answer.usage.total_seconds
    again = model.generate(ask(STORY), max_tokens=20)
    assert again.finish == "max_tokens" and len(again.tokens) == 20
    assert model.generate(ask(STORY), max_tokens=20, seed=again.seed).tokens == again.tokens


def test_pieces_are_the_answer(model):
    stream = model.stream(ask(STORY), seed=3, max_tokens=50)
    pieces = list(stream)
    answer = stream.answer()
    assert len(pieces) > 10 and not any(piece.reasoning for piece in pieces)
    assert "".join(piece.text for piece in pieces) == "".join(map(str, pieces)) == answer.text
    assert answer.tokens == model.generate(ask(STORY), seed=3, max_tokens=50).tokens


def test_a_stream_that_is_stopped_keeps_what_was_said(model):
    stream = model.stream(ask(STORY), seed=3, max_tokens=400, logit_bias=dict.fromkeys(model.tokenizer.eos_ids, float("-inf")))
    first = [next(stream) for _ in range(3)]
    stream.stop()
    rest = list(stream)
    answer = stream.answer()
    assert answer.finish == "stopped" and len(answer.tokens) < 400
    assert "".join(piece.text for piece in first + rest) == answer.text


def test_batches_are_what_each_would_be_alone(model):
    prompts = [ask(question) for question in QUESTIONS] * 3
    batch = model.generate_batch(prompts, seed=5, max_tokens=30)
    alone = [model.generate(prompt, seed=5, max_tokens=30).tokens for prompt in prompts[: len(QUESTIONS)]]
    assert [answer.tokens for answer in batch] == alone * 3
    # More than are ever queued at once, from an iterator.
    many = model.generate_batch((question for question in QUESTIONS * 20), temperature=0, max_tokens=2)
    assert len(many) == 100 and [answer.tokens for answer in many[:5]] == [answer.tokens for answer in many[5:10]]


def test_failures_in_a_batch(model):
    prompts = ["Hello", [10**6], "Hello", "word " * 600]
    outcome = model.generate_batch(prompts, return_exceptions=True, max_tokens=3, temperature=0)
    assert [type(each) for each in outcome] == [moeflux.Answer, moeflux.OptionError, moeflux.Answer, moeflux.ContextFullError]
    assert outcome[0].tokens == outcome[2].tokens
    with pytest.raises(moeflux.OptionError, match="1000000"):
        model.generate_batch(prompts, max_tokens=3)


def test_prompts_are_texts_tokens_or_messages(model):
    text = "Once upon a time"
    tokens = model.encode(text)
    assert tokens == model.tokenizer.encode(text)
    expected = model.generate(text, temperature=0, max_tokens=8).tokens
    import numpy

    for prompt in (tokens, tuple(tokens), numpy.array(tokens)):
        assert model.generate(prompt, temperature=0, max_tokens=8).tokens == expected
    rendered = model.apply_chat_template(ask("Hello!"))
    assert "Hello!" in rendered and len(rendered) > len("Hello!")
    assert model.tokenizer.encode(rendered, add_special=False) == model.encode(ask("Hello!"))
    for prompt in (3, None, [1.5], ["a", "b"], {"role": "user"}):
        with pytest.raises(TypeError, match="a prompt is"):
            model.generate(prompt)


def test_forms_of_answers(model):
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["n"], "additionalProperties": False}
    answer = model.generate(ask("What is 17 + 25?"), json_schema=schema, seed=1, max_tokens=40)
    assert isinstance(json.loads(answer.text)["n"], int)
    assert re.fullmatch("[a-z]{3} [0-9]+", model.generate("x", regex="[a-z]{3} [0-9]+", seed=1, max_tokens=20).text)
    assert model.generate("x", choice=["yes", "no"], seed=1).text in ("yes", "no")
    assert re.fullmatch("(ab){2,3}", model.generate("x", grammar='start: "ab"{2,3}', seed=1).text)
    with pytest.raises(TypeError, match="only one of"):
        model.generate("x", regex="a", choice=["b"])
    with pytest.raises(moeflux.ConstraintError, match="regex"):
        model.generate("x", regex="(?=a)b")
    with pytest.warns(UserWarning, match="not enforced: uniqueItems"):
        model.generate("x", json_schema={"type": "array", "maxItems": 1, "uniqueItems": True}, max_tokens=20)


def test_stop_texts_and_logprobs(model):
    whole = model.generate(ask(STORY), temperature=0, max_tokens=60)
    stop = whole.text[10:16]
    answer = model.generate(ask(STORY), temperature=0, max_tokens=60, stop=stop)
    assert answer.text == whole.text[: whole.text.index(stop)] and answer.stopped_by == stop and answer.finish == "stopped"
    answer = model.generate(ask(STORY), temperature=0, max_tokens=5, logprobs=3)
    assert [each.token for each in answer.logprobs] == answer.tokens
    for each in answer.logprobs:
        assert each.top[0] == (each.token, each.logprob) and len(each.top) == 3 and each.logprob <= 0


def test_sessions_are_reused(model):
    first = model.encode("A text that no other test has: " + "one two three " * 10)
    model.generate(first, max_tokens=1)
    answer = model.generate(first + [1, 2], max_tokens=1)
    assert answer.usage.cached_tokens >= len(first)


def test_options(model):
    with pytest.raises(TypeError, match='unexpected keyword argument "temprature"'):
        model.generate("x", temprature=1)
    with pytest.raises(moeflux.OptionError, match="temperature: expected a number from 0, got -1"):
        model.generate("x", temperature=-1)
    assert model.generate("x", temperature=None, seed=1, max_tokens=4).tokens == model.generate("x", seed=1, max_tokens=4).tokens
