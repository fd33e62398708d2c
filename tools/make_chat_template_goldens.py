#!/usr/bin/env python3
"""Renders the chat templates of the tests with transformers.

    python tools/make_chat_template_goldens.py FOLDER

FOLDER has the templates, and one_liners.txt with a template a line; it gets cases.json: for each case the input, and
what transformers prints or how it refuses.
"""

import argparse
import datetime
import json
from pathlib import Path

from transformers.utils import chat_template_utils

# 2024-02-29 12:34:56 UTC.
NOW = 1_709_210_096

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather at a place.\nOf today, in °C – or <b>°F</b> & 'others'.",
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string", "description": "Name of the place, e.g. \"São Paulo\""},
                    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
                    "days": {"type": "array", "items": {"type": "integer"}, "nullable": True},
                    "box": {
                        "type": "object",
                        "properties": {"lat": {"type": "number"}, "lon": {"type": ["number", "null"]}},
                        "required": ["lat"],
                    },
                    "any": {"oneOf": [{"type": "string", "description": "text"}, {"type": "boolean"}], "default": None},
                },
                "required": ["place"],
            },
            "returns": {"type": "string"},
        },
    },
    {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": {}}},
]
CALL = {"type": "function", "id": "abcdef123", "function": {"name": "get_weather", "arguments": {"place": "Zürich", "n": 1.0}}}


def text_call(call: dict) -> dict:
    """`call` with its arguments written out."""
    arguments = json.dumps(call["function"]["arguments"])
    return call | {"function": call["function"] | {"arguments": arguments}}


def turn(role: str, content: object, **fields: object) -> dict:
    return {"role": role, "content": content, **fields}


PLAIN = [turn("user", "Hi"), turn("assistant", "Hello!"), turn("user", "  How are you?\n")]
WITH_SYSTEM = [turn("system", "  Be brief. \n"), *PLAIN]
THOUGHT = [
    turn("user", "1 + 1?"),
    turn("assistant", "<think>\nEasy.\n</think>\n\n2"),
    turn("user", "2 + 2?"),
    turn("assistant", "4", reasoning_content="\nDoubled.\n"),
]
CALLED = [
    turn("user", "Weather in Zürich?"),
    turn("assistant", None, tool_calls=[CALL]),
    turn("tool", "22 °C, \"sunny\"", tool_call_id="abcdef123"),
]
ANSWERED = [*CALLED, turn("assistant", "It is sunny."), turn("user", "Thanks")]
TWO_CALLS = [
    turn("user", "Both?"),
    turn("assistant", "Let me see.", tool_calls=[CALL, CALL | {"id": "zzzzzz999"}]),
    turn("tool", "one", tool_call_id="abcdef123"),
    turn("tool", "two", tool_call_id="zzzzzz999"),
]
PARTS = [turn("user", [{"type": "text", "text": "What is "}, "this", {"type": "image"}, {"type": "text", "text": "?"}])]
RESULT_PARTS = [*CALLED[:2], turn("tool", [{"output": {"t": 22.5}}]), turn("assistant", "x")]
RESULT_MAP = [*CALLED[:2], turn("tool", {"t": 22.5, "ok": True})]

VALUES = [
    {"b": 1, "a": [1, 2.5, -0.0, 1e-7, 1e16, 1e22, 123456789, True, None, "é\n\"\u2028\u007f😀<>&'"], "": {}},
    [],
    [[], {}, [[1]], {"z": {"y": {"x": []}}}],
    "text",
    7,
]
TREE = [{"name": "a", "children": [{"name": "b"}, {"name": "c", "children": [{"name": "d"}]}]}, {"name": "e"}]


def case(template: str, messages: list, *, tools: list | None = None, prompt: bool = False, **variables: object) -> dict:
    return {
        "template": template,
        "messages": messages,
        "tools": tools,
        "add_generation_prompt": prompt,
        "variables": variables,
    }


CASES = [
    *(case("chatml_thinking", m, prompt=p) for m in (PLAIN, WITH_SYSTEM, THOUGHT, TWO_CALLS) for p in (False, True)),
    case("chatml_thinking", PLAIN, prompt=True, enable_thinking=False),
    case("chatml_thinking", PLAIN, prompt=True, enable_thinking=True),
    case("chatml_thinking", WITH_SYSTEM, tools=TOOLS, prompt=True),
    case("chatml_thinking", ANSWERED, tools=TOOLS, prompt=True),
    case("chatml_thinking", [*CALLED[:1], turn("assistant", "", tool_calls=[text_call(CALL)]), CALLED[2]], tools=TOOLS),
    case("chatml_thinking", [turn("user", "?"), turn("assistant", "!", thinking="older name")]),
    case("chatml_thinking", [turn("user", "?"), turn("assistant", "!", reasoning="another name")]),
    *(case("bracketed", m) for m in (PLAIN, WITH_SYSTEM, CALLED, ANSWERED, TWO_CALLS)),
    case("bracketed", WITH_SYSTEM, tools=TOOLS),
    case("bracketed", [turn("assistant", "first"), turn("user", "second")]),
    case("bracketed", [turn("user", "a"), turn("user", "b")]),
    case("bracketed", [turn("user", "a"), turn("assistant", None, tool_calls=[CALL | {"id": "short"}])]),
    *(case("plain_turns", m, prompt=p) for m in (PLAIN, WITH_SYSTEM) for p in (False, True)),
    *(case("one_line", m, prompt=p, thinking=t) for m in (PLAIN, THOUGHT) for p in (False, True) for t in (False, True)),
    case("one_line", [turn("system", "One."), turn("user", "x"), turn("system", "Two.")], prompt=True),
    case("one_line", [CALLED[0], turn("assistant", None, tool_calls=[text_call(CALL)] * 2), *ANSWERED[2:]], prompt=True),
    case("one_line", [turn("user", "x"), turn("assistant", "Let", prefix=True)], thinking=True),
    case("one_line", [turn("user", "x"), turn("assistant", "y", tool_calls=[CALL])]),
    *(case("tagged_arguments", m, prompt=True) for m in (PLAIN, WITH_SYSTEM, THOUGHT, ANSWERED, TWO_CALLS, PARTS, RESULT_PARTS)),
    case("tagged_arguments", PLAIN, tools=TOOLS, prompt=True, enable_thinking=False),
    case("tagged_arguments", [turn("user", "x /nothink")], prompt=True, enable_thinking=False),
    *(case("typescript_tools", m, prompt=p) for m in (PLAIN, WITH_SYSTEM, THOUGHT, ANSWERED) for p in (False, True)),
    case("typescript_tools", CALLED, tools=TOOLS, prompt=True, reasoning_effort="high", model_identity=""),
    case("typescript_tools", [turn("user", "x"), turn("assistant", "y", thinking="z", tool_calls=[CALL])]),
    case("typescript_tools", [turn("user", "x"), turn("assistant", None, thinking="z", tool_calls=[CALL])]),
    case("typescript_tools", [turn("tool", "x")]),
    *(case("dated_headers", m, prompt=p) for m in (PLAIN, WITH_SYSTEM, CALLED, RESULT_MAP) for p in (False, True)),
    case("dated_headers", WITH_SYSTEM, tools=TOOLS, prompt=True),
    case("dated_headers", CALLED, builtin_tools=["python", "get_weather", "a"], date_string="today"),
    case("dated_headers", TWO_CALLS),
    case("dated_headers", WITH_SYSTEM[:1], tools=TOOLS),
    case("expressions", WITH_SYSTEM),
    case("json", [], values=VALUES),
    case("blocks", PLAIN, tree=TREE),
]


class FixedDate(datetime.datetime):
    """The time of every rendering."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(NOW, datetime.UTC).replace(tzinfo=None)


def render(template: str, case: dict) -> dict:
    """`case` with what transformers makes of it."""
    try:
        rendered, _ = chat_template_utils.render_jinja_template(
            conversations=[case["messages"]],
            tools=case["tools"],
            chat_template=template,
            add_generation_prompt=case["add_generation_prompt"],
            **(TOKENS | case["variables"]),
        )
    except Exception as error:  # noqa: BLE001: templates raise whatever they run into
        return case | {"error": f"{type(error).__name__}: {error}"}
    return case | {"rendered": rendered[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    chat_template_utils.datetime = FixedDate
    cases = [render((folder / f"{c['template']}.jinja").read_text(encoding="utf-8"), c) for c in CASES]
    one_liners = (folder / "one_liners.txt").read_text(encoding="utf-8").splitlines()
    one_liners = [render(source, case(source, PLAIN)) for source in one_liners]
    golden = {
        "now": NOW,
        "special_tokens": TOKENS,
        "cases": cases,
        "one_liners": {
            "messages": PLAIN,
            "rendered": {c["template"]: c["rendered"] for c in one_liners if "rendered" in c},
            "refused": [c["template"] for c in one_liners if "error" in c],
        },
    }
    (folder / "cases.json").write_text(json.dumps(golden, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
    for refused in (case for case in cases + one_liners if "error" in case):
        print(f"{refused['template']} refuses: {refused['error']}")


if __name__ == "__main__":
    main()
