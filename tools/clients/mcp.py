"""Functions as servers of the Model Context Protocol describe them: `mcp_tools.json`, in the style of the best known.

Each is given to a model through all three interfaces with `auto`, which must be accepted; and through one of them, by turns,
as the one that has to be called, whose arguments must be valid by the function's own schema.
"""

import functools
import json
import pathlib

import anthropic
import jsonschema
import openai

TOOLS = json.loads((pathlib.Path(__file__).parent / "mcp_tools.json").read_text())
ASKED = [{"role": "user", "content": "Weather in Oslo?"}]
# The demo model's free text and lists may run on: what ends them is made likelier, and an answer that is cut off is asked
# for again.
ENDS = ['"', '"]', '"}', "]", "}", "]}", "}]"]
BIAS = 5
MOST, TRIES = 400, 12


@functools.cache
def steered(client) -> dict:
    """Fields that make the ends of texts, lists and objects likelier."""
    url = str(client.base_url).removesuffix("/").removesuffix("/v1") + "/tokenize"
    ids = [client.post(url, body={"content": end}, cast_to=object)["tokens"] for end in ENDS]
    return {"logit_bias": {str(tokens[0]): BIAS for tokens in ids if len(tokens) == 1}}


def chat(client: openai.OpenAI, tool: dict, forced: bool, seed: int):
    function = {"name": tool["name"], "description": tool["description"], "parameters": tool["inputSchema"]}
    choice = {"type": "function", "function": {"name": tool["name"]}} if forced else "auto"
    answer = client.chat.completions.create(
        model="demo", messages=ASKED, tools=[{"type": "function", "function": function}], tool_choice=choice,
        max_completion_tokens=MOST if forced else 4, seed=seed, **steered(client))
    if not forced or answer.choices[0].finish_reason == "length":
        return None
    return [(call.function.name, json.loads(call.function.arguments)) for call in answer.choices[0].message.tool_calls]


def responses(client: openai.OpenAI, tool: dict, forced: bool, seed: int):
    function = {"type": "function", "name": tool["name"], "description": tool["description"],
                "parameters": tool["inputSchema"], "strict": False}
    answer = client.responses.create(
        model="demo", input=ASKED, tools=[function], tool_choice={"type": "function", "name": tool["name"]} if forced else "auto",
        max_output_tokens=MOST if forced else 4, extra_body={"seed": seed, **steered(client)})
    if not forced or answer.status != "completed":
        return None
    return [(item.name, json.loads(item.arguments)) for item in answer.output if item.type == "function_call"]


def messages(client: anthropic.Anthropic, tool: dict, forced: bool, seed: int):
    choice = {"type": "tool", "name": tool["name"]} if forced else {"type": "auto"}
    described = {"name": tool["name"], "description": tool["description"], "input_schema": tool["inputSchema"]}
    answer = client.messages.create(
        model="demo", messages=ASKED, tools=[described], tool_choice=choice, max_tokens=MOST if forced else 4,
        extra_body={"seed": seed, **steered(client)})
    if not forced or answer.stop_reason == "max_tokens":
        return None
    return [(part.name, part.input) for part in answer.content if part.type == "tool_use"]


def check(openai_client: openai.OpenAI, anthropic_client: anthropic.Anthropic) -> None:
    interfaces = [(chat, openai_client), (responses, openai_client), (messages, anthropic_client)]
    made = {}
    for turn, tool in enumerate(TOOLS):
        validator = jsonschema.validators.validator_for(tool["inputSchema"], jsonschema.Draft202012Validator)(
            tool["inputSchema"], format_checker=jsonschema.FormatChecker())
        validator.check_schema(tool["inputSchema"])
        for ask, client in interfaces:
            ask(client, tool, False, 0)
        ask, client = interfaces[turn % len(interfaces)]
        calls = next((calls for seed in range(TRIES) if (calls := ask(client, tool, True, seed))), None)
        assert calls, f"{tool['name']}: no call within {MOST} tokens in {TRIES} attempts"
        for name, arguments in calls:
            assert name == tool["name"], (name, tool)
            validator.validate(arguments)
        made[ask.__name__] = made.get(ask.__name__, 0) + 1
    assert sum(made.values()) == len(TOOLS) and len(made) == len(interfaces), made
    print("  " + ", ".join(f"{kind}: {count}" for kind, count in made.items()) + f" of {len(TOOLS)}")
