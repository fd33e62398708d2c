"""Frameworks for Python against a server: python frameworks.py URL KEY

Run by `check_clients.py --frameworks PYTHON`, which starts the server; PYTHON is one of an environment with what
tools/requirements-frameworks.txt names. Fails at the first thing that is not as it should be.
"""

import asyncio
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

# Prices of models are not needed, nor fetched.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
URL, KEY = sys.argv[1:3]
QUESTION, ANSWER = "What is 17 + 25?", "17 + 25 = 42"
MESSAGES = [{"role": "user", "content": QUESTION}]
ASKED = "Weather in Oslo?"


class Weather(BaseModel):
    """The weather that is asked for."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Oslo"]
    days: int = Field(ge=1, le=7)


TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": Weather.model_json_schema()}}


def litellm() -> None:
    import litellm

    common = {"model": "openai/demo", "api_base": f"{URL}/v1", "api_key": KEY, "num_retries": 0}
    answer = litellm.completion(**common, messages=MESSAGES, temperature=0)
    assert answer.choices[0].message.content == ANSWER, answer
    parts = litellm.completion(**common, messages=MESSAGES, temperature=0, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == ANSWER
    made = litellm.completion(**common, messages=[{"role": "user", "content": ASKED}], tools=[TOOL], tool_choice="required")
    Weather.model_validate_json(made.choices[0].message.tool_calls[0].function.arguments)
    theirs = {**common, "model": "anthropic/demo", "api_base": URL}
    assert litellm.completion(**theirs, messages=MESSAGES, max_tokens=40).choices[0].message.content
    local = {**common, "model": "ollama_chat/demo", "api_base": URL}
    assert litellm.completion(**local, messages=MESSAGES, temperature=0).choices[0].message.content == ANSWER
    vectors = litellm.embedding(model="openai/demo", api_base=f"{URL}/v1", api_key=KEY, input=["a", "b"])
    assert len(vectors.data) == 2


def langchain() -> None:
    from langchain_core.tools import tool
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    @tool(args_schema=Weather)
    def get_weather(city: str, days: int) -> str:
        """Weather"""
        return "sunny"

    for responses in (False, True):
        model = ChatOpenAI(model="demo", base_url=f"{URL}/v1", api_key=KEY, max_retries=0, temperature=0, use_responses_api=responses)
        assert model.invoke(QUESTION).text == ANSWER
        assert "".join(part.text for part in model.stream(QUESTION)) == ANSWER
        said = model.bind_tools([get_weather], tool_choice="required").invoke(ASKED)
        result = get_weather.invoke(said.tool_calls[0])
        assert isinstance(result, ToolMessage) and result.content == "sunny"
        assert model.bind_tools([get_weather]).invoke([HumanMessage(ASKED), said, result], max_tokens=20)
        assert isinstance(model.with_structured_output(Weather).invoke(ASKED), Weather)
    vectors = OpenAIEmbeddings(model="demo", base_url=f"{URL}/v1", api_key=KEY, check_embedding_ctx_length=False)
    assert len(vectors.embed_documents(["a", "b"])) == 2


def instructor() -> None:
    import instructor
    import openai

    plain = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(plain, mode=mode)
        made = client.chat.completions.create(
            model="demo", response_model=Weather, messages=[{"role": "user", "content": ASKED}], max_retries=0)
        assert isinstance(made, Weather), (mode, made)


def pydantic_ai() -> None:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model = kind("demo", provider=provider)
        assert Agent(model).run_sync(QUESTION, model_settings={"temperature": 0}).output == ANSWER
        for output in (Weather, NativeOutput(Weather)):
            assert isinstance(Agent(model, output_type=output, retries=0).run_sync(ASKED).output, Weather)

        async def stream() -> str:
            async with Agent(model).run_stream(QUESTION, model_settings={"temperature": 0}) as run:
                return [text async for text in run.stream_text()][-1]

        assert asyncio.run(stream()) == ANSWER


def llama_index() -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(model="demo", api_base=f"{URL}/v1", api_key=KEY, is_chat_model=True, is_function_calling_model=True,
                       context_window=2048, temperature=0, max_retries=0)
    assert model.chat([ChatMessage(role="user", content=QUESTION)]).message.content == ANSWER
    *_, last = model.stream_chat([ChatMessage(role="user", content=QUESTION)])
    assert last.message.content == ANSWER

    def get_weather(city: str, days: int) -> str:
        """Weather"""
        return "sunny"

    tool = FunctionTool.from_defaults(get_weather, fn_schema=Weather)
    made = model.chat_with_tools([tool], user_msg=ASKED, tool_required=True)
    Weather.model_validate(model.get_tool_calls_from_response(made)[0].tool_kwargs)


def llm() -> None:
    """The command, with a model by its configuration."""
    with tempfile.TemporaryDirectory() as folder:
        models = f"- {{model_id: local, model_name: demo, api_base: '{URL}/v1', api_key_name: local, supports_tools: true, supports_schema: true}}\n"
        pathlib.Path(folder, "extra-openai-models.yaml").write_text(models)
        command = [pathlib.Path(sys.executable).parent / "llm", "-m", "local", "--key", KEY, "--no-log"]
        run = lambda *more: subprocess.run([*command, *more], env={**os.environ, "LLM_USER_PATH": folder}, text=True,
                                           check=True, capture_output=True).stdout.strip()
        assert run("-o", "temperature", "0", QUESTION) == ANSWER
        assert run("-o", "temperature", "0", "--no-stream", QUESTION) == ANSWER
        Weather.model_validate_json(run("--schema", json.dumps(Weather.model_json_schema()), ASKED))


for check in (litellm, langchain, instructor, pydantic_ai, llama_index, llm):
    check()
    print(f"{check.__name__}: ok")
