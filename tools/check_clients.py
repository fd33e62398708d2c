"""Runs the official OpenAI, Anthropic and Ollama clients, functions of MCP servers, and a fuzzer of the published interface
against `moeflux serve demo`, and a subscriber to its events.

    pip install -r tools/requirements-clients.txt
    python tools/check_clients.py target/debug/moeflux [--fuzz EXAMPLES] [--node] [--frameworks PYTHON]

`--node` adds clients for Node, after `npm install` in tools/clients; `--frameworks` adds those that other programs are made
with, in an environment of their own with what tools/requirements-frameworks.txt names.
"""

import argparse
import array
import asyncio
import atexit
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

import anthropic
import jsonschema
import ollama
import openai

from clients import kv_events, mcp

KEY = "a key for tests"
QUESTION = [{"role": "user", "content": "What is 17 + 25?"}]
STORY = [{"role": "user", "content": "Tell me a short story about a fox."}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["kind", "tall", "old"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


class Server:
    """`moeflux serve demo` on a free port."""

    def __init__(self, binary: str, *arguments: str):
        command = [binary, "serve", "demo", "--port", "0", *arguments]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        atexit.register(self.process.kill)
        self.said = ""
        for line in self.process.stderr:
            self.said += line
            if found := re.search(r"on (http://\S+)", line):
                self.url = found[1]
                # A full pipe would cost the lines that follow.
                threading.Thread(target=self.process.stderr.read, daemon=True).start()
                return
        sys.exit(f"the server did not start: {self.said}")

    def metric(self, name: str) -> float:
        request = urllib.request.Request(f"{self.url}/metrics", headers={"Authorization": f"Bearer {KEY}"})
        text = urllib.request.urlopen(request).read().decode()
        return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"moeflux_{name}"))

    def stop(self, how: int = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return self.process.wait(60)


def eventually(check) -> None:
    for _ in range(1000):
        if check():
            return
        time.sleep(0.01)
    raise AssertionError("it never came about")


def raises(error: type, call) -> Exception:
    try:
        call()
    except error as raised:
        return raised
    raise AssertionError(f"expected {error.__name__}")


def openai_chat(server: Server, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    answer = client.chat.completions.create(model="demo", messages=QUESTION, temperature=0)
    assert answer.choices[0].message.content == "17 + 25 = 42" and answer.choices[0].finish_reason == "stop", answer
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    request = {"model": "demo", "messages": STORY, "seed": 5, "max_completion_tokens": 60}
    whole = client.chat.completions.create(**request, n=2, logprobs=True, top_logprobs=2)
    assert len(whole.choices) == 2 and len(whole.choices[0].logprobs.content[0].top_logprobs) == 2
    stream = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices)
    assert text == whole.choices[0].message.content, (text, whole)
    assert stream[-1].usage.completion_tokens > 0 and len(stream) > 20
    assert client.completions.create(model="demo", prompt="Once upon", max_tokens=4).choices[0].text


def openai_responses(server: Server, client: openai.OpenAI) -> None:
    answer = client.responses.create(model="demo", input="What is 17 + 25?", temperature=0)
    assert answer.output_text == "17 + 25 = 42" and answer.status == "completed", answer
    with client.responses.stream(model="demo", input="What is 17 + 25?", temperature=0) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == "17 + 25 = 42"
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed", kinds


def openai_agent(server: Server, client: openai.OpenAI) -> None:
    tools = [{"type": "function", "name": "get_weather", "description": "Weather", "parameters": WEATHER, "strict": True}]
    items = [{"role": "user", "content": "Weather in Oslo?"}]
    request = {"model": "demo", "tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "store": False}
    answer = client.responses.create(**request, input=items)
    call = answer.output[0]
    assert call.type == "function_call" and call.name == "get_weather" and answer.status == "completed", answer
    jsonschema.validate(json.loads(call.arguments), WEATHER)
    with client.responses.stream(**request, input=items) as stream:
        kinds = [event.type for event in stream]
        jsonschema.validate(json.loads(stream.get_final_response().output[0].arguments), WEATHER)
    assert kinds.count("response.function_call_arguments.delta") > 3, kinds
    items += [call.model_dump(), {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    assert client.responses.create(model="demo", tools=tools, input=items, max_output_tokens=40).output
    refused = raises(openai.BadRequestError, lambda: client.responses.create(model="demo", input="Hi", background=True))
    assert refused.param == "background", refused


def openai_schemas(server: Server, client: openai.OpenAI) -> None:
    """Schemas that validators know and grammars do not: served with a warning, refused if they are to be strict."""
    schema = {"type": "object", "properties": {"tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
              "secret": {"type": "string", "format": "password"}}, "required": []}
    tool = lambda strict: {"type": "function", "function": {"name": "f", "parameters": schema, "strict": strict}}
    ask = client.chat.completions.with_raw_response.create
    answer = ask(model="demo", messages=QUESTION, tools=[tool(False)], max_tokens=40)
    assert answer.headers["x-moeflux-warning"] == "not enforced: f: uniqueItems, format password", answer.headers
    raises(openai.BadRequestError, lambda: ask(model="demo", messages=QUESTION, tools=[tool(True)]))


def openai_forms(server: Server, client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
    made = []
    for seed in range(0, 100, 10):
        answer = client.chat.completions.create(model="demo", messages=STORY, response_format=form, temperature=1, n=10, seed=seed)
        made += [json.loads(choice.message.content) for choice in answer.choices]
    for value in made:
        jsonschema.validate(value, PERSON)
    assert len(made) == 100 and len({json.dumps(value) for value in made}) > 50, "they differ"
    print(f"  {len(made)} of 100 valid")


def openai_tools(server: Server, client: openai.OpenAI) -> None:
    tools = [{"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": WEATHER}}]
    request = {"model": "demo", "messages": [{"role": "user", "content": "Weather in Oslo?"}], "tools": tools}
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        for seed in range(5):
            answer = client.chat.completions.create(**request, tool_choice=choice, seed=seed)
            assert answer.choices[0].finish_reason == "tool_calls", answer
            for call in answer.choices[0].message.tool_calls:
                assert call.function.name == "get_weather"
                jsonschema.validate(json.loads(call.function.arguments), WEATHER)
    stream = client.chat.completions.create(**request, tool_choice="required", stream=True)
    calls = [call for chunk in stream for choice in chunk.choices for call in choice.delta.tool_calls or []]
    assert calls and calls[0].index == 0 and calls[0].id, calls
    arguments = "".join(call.function.arguments or "" for call in calls if call.index == 0)
    assert len(calls) > 3, "arguments come piece by piece"
    jsonschema.validate(json.loads(arguments), WEATHER)
    made = {"id": calls[0].id, "type": "function", "function": {"name": calls[0].function.name, "arguments": arguments}}
    history = [*request["messages"], {"role": "assistant", "tool_calls": [made]},
               {"role": "tool", "tool_call_id": calls[0].id, "content": "sunny"}]
    answer = client.chat.completions.create(**{**request, "messages": history}, tool_choice="auto", max_tokens=40)
    assert answer.choices[0].message


def openai_errors(server: Server, client: openai.OpenAI) -> None:
    ask = client.chat.completions.create
    assert raises(openai.NotFoundError, lambda: ask(model="nothing", messages=QUESTION)).code == "model_not_found"
    raises(openai.BadRequestError, lambda: ask(model="demo", messages=QUESTION, temperature=9))
    long = [{"role": "user", "content": "word " * 5000}]
    assert raises(openai.BadRequestError, lambda: ask(model="demo", messages=long)).code == "context_length_exceeded"
    wrong = openai.OpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0)
    raises(openai.AuthenticationError, lambda: wrong.models.list())


def openai_cancel(server: Server, client: openai.OpenAI) -> None:
    before = server.metric('requests_total{model="demo",outcome="cancelled"}')
    # Long enough not to end by itself before the client goes away.
    form = {"type": "json_schema", "json_schema": {"name": "long", "schema": {"type": "string", "minLength": 10000}}}
    stream = client.chat.completions.create(model="demo", messages=STORY, stream=True, max_tokens=1900, response_format=form)
    next(iter(stream))
    stream.close()
    eventually(lambda: server.metric("requests_running") == 0)
    assert server.metric('requests_total{model="demo",outcome="cancelled"}') == before + 1


def openai_at_once(server: Server, client: openai.OpenAI) -> None:
    async def all_of_them():
        several = openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0)
        ask = lambda seed: several.chat.completions.create(model="demo", messages=STORY, max_tokens=30, seed=seed)
        return [answer.choices[0].message.content for answer in await asyncio.gather(*map(ask, range(12)))]

    together = asyncio.run(all_of_them())
    alone = [client.chat.completions.create(model="demo", messages=STORY, max_tokens=30, seed=seed) for seed in range(12)]
    assert together == [answer.choices[0].message.content for answer in alone]


def openai_embeddings(server: Server, client: openai.OpenAI) -> None:
    texts = ["Tell me a short story about a fox.", "What is 17 + 25?"]
    # This client asks for base64 unless told otherwise.
    coded = client.embeddings.create(model="demo", input=texts)
    plain = client.embeddings.create(model="demo", input=texts, encoding_format="float")
    # Numbers of 32 bits, which JSON has with as few digits as tell them apart.
    bits = lambda answer: [array.array("f", item.embedding) for item in answer.data]
    assert bits(coded) == bits(plain) and coded.usage == plain.usage
    for item in coded.data:
        assert abs(sum(value * value for value in item.embedding) - 1) < 1e-5
    one = client.embeddings.create(model="demo", input=texts[1], dimensions=len(coded.data[0].embedding))
    assert bits(one)[0] == bits(coded)[1]
    mean = client.embeddings.create(model="demo", input=texts, extra_body={"pooling": "mean"})
    assert mean.data[0].embedding != coded.data[0].embedding
    raises(openai.BadRequestError, lambda: client.embeddings.create(model="demo", input=texts, dimensions=5))
    raises(openai.BadRequestError, lambda: client.embeddings.create(model="demo", input=[]))


def anthropic_messages(server: Server, client: anthropic.Anthropic) -> None:
    answer = client.messages.create(model="demo", max_tokens=50, messages=QUESTION, extra_body={"temperature": 0}, system="Be brief.")
    assert answer.content[0].type == "text" and answer.stop_reason == "end_turn" and answer.usage.output_tokens > 0, answer
    request = {"model": "demo", "max_tokens": 40, "messages": STORY, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**request)
    with client.messages.stream(**request) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.stop_reason == whole.stop_reason == "max_tokens"
    assert client.messages.count_tokens(model="demo", messages=STORY).input_tokens > 5
    begun = [*QUESTION, {"role": "assistant", "content": "17 + 25 ="}]
    assert client.messages.create(model="demo", max_tokens=9, messages=begun, extra_body={"temperature": 0}).content[0].text == " 42"
    stopped = client.messages.create(**{**request, "stop_sequences": [text[10:20]]})
    assert stopped.stop_reason == "stop_sequence" and stopped.stop_sequence == text[10:20], stopped


def anthropic_tools(server: Server, client: anthropic.Anthropic) -> None:
    tools = [{"name": "get_weather", "description": "Weather", "input_schema": WEATHER}]
    request = {"model": "demo", "max_tokens": 200, "tools": tools, "tool_choice": {"type": "any"},
               "messages": [{"role": "user", "content": "Weather in Oslo?"}]}
    answer = client.messages.create(**request)
    use = answer.content[0]
    assert answer.stop_reason == "tool_use" and use.type == "tool_use", answer
    jsonschema.validate(use.input, WEATHER)
    with client.messages.stream(**request) as stream:
        jsonschema.validate(stream.get_final_message().content[0].input, WEATHER)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
    history = [*request["messages"], {"role": "assistant", "content": [use.model_dump()]}, {"role": "user", "content": [result]}]
    assert client.messages.create(**{**request, "messages": history, "tool_choice": {"type": "auto"}}).content


def anthropic_errors(server: Server, client: anthropic.Anthropic) -> None:
    ask = client.messages.create
    raises(anthropic.NotFoundError, lambda: ask(model="nothing", max_tokens=5, messages=QUESTION))
    error = raises(anthropic.BadRequestError, lambda: ask(model="demo", max_tokens=5, messages=[]))
    assert error.body["error"]["type"] == "invalid_request_error", error.body
    wrong = anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0)
    raises(anthropic.AuthenticationError, lambda: wrong.messages.create(model="demo", max_tokens=5, messages=QUESTION))


def ollama_client(server: Server, client: ollama.Client) -> None:
    assert [model.model for model in client.list().models] == ["demo"]
    assert "completion" in client.show("demo").capabilities and client.ps().models[0].model == "demo"
    request = {"model": "demo", "messages": QUESTION, "options": {"temperature": 0}}
    whole = client.chat(**request)
    assert whole.message.content == "17 + 25 = 42" and whole.done_reason == "stop", whole
    parts = list(client.chat(**request, stream=True))
    assert "".join(part.message.content for part in parts) == "17 + 25 = 42" and parts[-1].done and len(parts) > 3
    person = json.loads(client.chat(model="demo", messages=STORY, format=PERSON).message.content)
    jsonschema.validate(person, PERSON)
    tool = {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": WEATHER}}
    asked = [{"role": "user", "content": "Weather in Oslo?"}]
    answer = client.chat(model="demo", messages=asked, tools=[tool])
    for call in answer.message.tool_calls or []:
        # This client passes types and enums on, but no bounds.
        assert call.function.arguments["city"] in ["Paris", "Oslo"] and type(call.function.arguments["days"]) is int, call
    history = [*asked, {"role": "assistant", "tool_calls": [{"function": {"name": "get_weather", "arguments": {"city": "Oslo", "days": 1}}}]},
               {"role": "tool", "tool_name": "get_weather", "content": "sunny"}]
    assert client.chat(model="demo", messages=history, tools=[tool], options={"num_predict": 9}).done
    assert client.generate(model="demo", prompt="What is 17 + 25?", options={"temperature": 0}).response == "17 + 25 = 42"
    embedded = client.embed(model="demo", input=["What is 17 + 25?", "x"])
    assert len(embedded.embeddings) == 2 and abs(sum(value * value for value in embedded.embeddings[0]) - 1) < 1e-5
    assert client.embeddings(model="demo", prompt="x").embedding == embedded.embeddings[1]
    assert raises(ollama.ResponseError, lambda: client.chat(model="nothing", messages=QUESTION)).status_code == 404


def mcp_tools(server: Server, client: openai.OpenAI) -> None:
    mcp.check(client, anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0))


def outside(server: Server, *command: str) -> None:
    """A program of tools/clients that gets the server's URL and key."""
    folder = pathlib.Path(__file__).parent / "clients"
    outcome = subprocess.run([command[0], folder / command[1], server.url, KEY], text=True, capture_output=True)
    if outcome.returncode != 0:
        sys.exit(outcome.stdout + outcome.stderr[-6000:])
    print(outcome.stdout, end="")


def killed_and_started_again(binary: str) -> None:
    """Conversations on disk survive a server that is killed in the midst of others."""
    with tempfile.TemporaryDirectory() as folder:
        start = lambda: Server(binary, "--api-key", KEY, "--sessions", folder)
        server = start()
        client = openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0)
        messages = list(STORY)
        answer = client.chat.completions.create(model="demo", messages=messages, prompt_cache_key="fox", max_tokens=60, seed=1)
        used = answer.usage.total_tokens
        messages += [{"role": "assistant", "content": answer.choices[0].message.content}, QUESTION[0]]
        streams = [client.chat.completions.create(model="demo", messages=STORY, stream=True, max_tokens=300, prompt_cache_key=str(i)) for i in range(4)]
        [next(iter(stream)) for stream in streams]
        assert server.stop(signal.SIGKILL) == -signal.SIGKILL
        server = start()
        client = openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0)
        again = client.chat.completions.create(model="demo", messages=messages, prompt_cache_key="fox", seed=1, max_tokens=40)
        cached = again.usage.prompt_tokens_details.cached_tokens
        assert cached >= used - 2, (cached, used)
        fresh = client.chat.completions.create(model="demo", messages=messages, seed=1, max_tokens=40)
        assert fresh.choices[0].message.content == again.choices[0].message.content
        assert server.stop() == 0


def drained(binary: str) -> None:
    """After SIGTERM answers under way come to their end, new ones are refused, and the server ends well."""
    server = Server(binary, "--api-key", KEY)
    client = openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0)
    form = {"type": "json_schema", "json_schema": {"name": "long", "schema": {"type": "string", "minLength": 10000}}}
    stream = client.chat.completions.create(model="demo", messages=STORY, stream=True, max_tokens=400, seed=1, response_format=form)
    events = iter(stream)
    next(events)
    server.process.send_signal(signal.SIGTERM)
    raises(openai.OpenAIError, lambda: [time.sleep(0.05) or client.chat.completions.create(model="demo", messages=QUESTION) for _ in range(100)])
    assert list(events)[-1].choices[0].finish_reason == "length"
    assert server.process.wait(60) == 0


def fuzz(server: Server, examples: int) -> None:
    """Whatever is sent, the server answers and says so in the way it has published."""
    schemathesis = os.path.join(os.path.dirname(sys.executable), "schemathesis")
    command = [schemathesis, "run", f"{server.url}/openapi.json", "--header", f"Authorization: Bearer {KEY}",
               "--max-examples", str(examples), "--checks", "not_a_server_error", "--exclude-path", "/api/live",
               "--phases", "examples,coverage,fuzzing", "--seed", "1", "--request-timeout", "180", "--suppress-health-check", "all"]
    outcome = subprocess.run(command, capture_output=True, text=True)
    if outcome.returncode != 0:
        sys.exit(outcome.stdout[-6000:] + outcome.stderr[-2000:])
    print("  " + outcome.stdout.strip().splitlines()[-1])


def published_events(binary: str) -> None:
    kv_events.check(Server(binary, "--api-key", KEY, *kv_events.OPTIONS), KEY)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--fuzz", type=int, default=0, metavar="EXAMPLES")
    parser.add_argument("--node", action="store_true")
    parser.add_argument("--frameworks", metavar="PYTHON")
    arguments = parser.parse_args()
    server = Server(arguments.binary, "--api-key", KEY, "--max-tokens", "200")
    theirs = {
        openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0):
            [openai_chat, openai_responses, openai_agent, openai_schemas, openai_forms, openai_tools, openai_errors, openai_cancel, openai_at_once, openai_embeddings, mcp_tools],
        anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0):
            [anthropic_messages, anthropic_tools, anthropic_errors],
        ollama.Client(host=server.url, headers={"Authorization": f"Bearer {KEY}"}): [ollama_client],
    }
    for client, checks in theirs.items():
        for check in checks:
            start = time.monotonic()
            check(server, client)
            print(f"{check.__name__}: ok, {time.monotonic() - start:.1f} s")
    if arguments.node:
        outside(server, "node", "node.mjs")
    if arguments.frameworks:
        outside(server, arguments.frameworks, "frameworks.py")
    if arguments.fuzz:
        start = time.monotonic()
        fuzz(server, arguments.fuzz)
        print(f"fuzz: ok, {time.monotonic() - start:.1f} s")
    assert server.stop() == 0, "an orderly end"
    for check in (published_events, drained, killed_and_started_again):
        check(arguments.binary)
        print(f"{check.__name__}: ok")


if __name__ == "__main__":
    main()
