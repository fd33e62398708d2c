"""Functions that answers call."""

import json

import moeflux
import pytest

CITIES = ["Oslo", "Paris"]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": CITIES}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
QUESTION = [{"role": "user", "content": "Weather in Oslo?"}]


def is_call(call):
    return call.name == "get_weather" and call.arguments["city"] in CITIES and 1 <= call.arguments["days"] <= 7


def test_calls_are_structured(model):
    answer = model.generate(QUESTION, tools=[WEATHER], tool_choice="required", temperature=0)
    (call,) = answer.tool_calls
    assert is_call(call) and call.id.isalnum() and len(call.id) == 9
    assert answer.text.strip() == "" and answer.finish == "end_of_text"
    named = {"type": "function", "function": {"name": "get_weather"}}
    stream = model.stream(QUESTION, tools=[WEATHER], tool_choice=named, temperature=0)
    assert "".join(piece.text for piece in stream).strip() == ""
    assert stream.answer().tool_calls[0].arguments == call.arguments
    batch = model.generate_batch([QUESTION] * 3, tools=[WEATHER], tool_choice="required", seed=1)
    assert all(is_call(answer.tool_calls[0]) for answer in batch)


def test_nothing_is_called_unless_there_are_functions(model):
    plain = model.generate(QUESTION, temperature=0, max_tokens=20)
    none = model.generate(QUESTION, tools=[WEATHER], tool_choice="none", temperature=0, max_tokens=20)
    assert plain.tool_calls == none.tool_calls == [] and plain.tokens == none.tokens


def test_a_call_that_is_cut_off_has_no_arguments(model):
    answer = model.generate(QUESTION, tools=[WEATHER], tool_choice="required", temperature=0, max_tokens=12)
    assert answer.finish == "max_tokens"
    assert all(call.arguments is None for call in answer.tool_calls)


def test_conversations_go_on_from_results(model, tmp_path):
    chat = model.chat()
    (call,) = chat.ask("Weather in Oslo?", tools=[WEATHER], tool_choice="required", temperature=0).tool_calls
    said = chat.messages[-1]["tool_calls"][0]
    assert said["id"] == call.id and json.loads(said["function"]["arguments"]) == call.arguments
    chat.push("tool", json.dumps({"sky": "clear"}), tool_call_id=call.id)
    answer = chat.ask(tools=[WEATHER], temperature=0, max_tokens=30)
    assert [message["role"] for message in chat.messages] == ["user", "assistant", "tool", "assistant"]
    assert answer.usage.cached_tokens > 0 and chat.messages[-1]["content"] == answer.text
    chat.save(tmp_path / "called")
    assert model.load_chat(tmp_path / "called").messages == chat.messages
    # A refusal leaves the conversation as it was.
    with pytest.raises(moeflux.OptionError):
        chat.ask(tools=[WEATHER], temperature=-1)
    assert len(chat.messages) == 4


def test_what_is_no_function_is_refused(model):
    for options in [
        {"tools": [{"name": "get_weather"}]},
        {"tools": {"name": "get_weather"}},
        {"tools": [WEATHER], "tool_choice": "perhaps"},
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "other"}}},
    ]:
        with pytest.raises(moeflux.OptionError, match="tool"):
            model.generate(QUESTION, **options)
    with pytest.raises(moeflux.ConstraintError, match="grammar"):
        model.generate(QUESTION, tools=[WEATHER], grammar='start: "yes"')
