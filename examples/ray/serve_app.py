"""A Ray Serve application: replicas that each hold an open model, behind the part of OpenAI's interface that chats need.

    cd examples/ray && serve run serve_app:app model=demo memory=64MiB replicas=2

`moeflux serve` has the whole interface, and prefix caches that outlive a restart. This is for clusters that Ray manages already:
replicas are started again when they die, scaled with the queue, and put where there is a processor or a GPU for them.
"""

import json
import os
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel
from ray import serve

import moeflux

api = FastAPI()
OPTIONS = {"max_tokens", "temperature", "top_p", "seed", "stop", "logit_bias"}
FINISH = {"end_of_text": "stop", "stopped": "stop", "max_tokens": "length", "context_full": "length"}


class Options(BaseModel):
    """Options of the application: `serve run … NAME=VALUE`, or `args` in a Serve configuration."""

    model: str = "demo"
    memory: str | None = None
    backend: str = "auto"
    threads: int = 1
    gpus: float = 0
    replicas: int = 2
    sequences: int = 8


class ChatRequest(BaseModel):
    """The fields of OpenAI's request that are used; others are ignored."""

    messages: list[dict[str, Any]]
    model: str | None = None
    stream: bool = False
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[int, float] | None = None


def event(value: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


def usage(answer: moeflux.Answer) -> dict[str, int]:
    """Tokens, as OpenAI counts them."""
    prompt, answered = answer.usage.prompt_tokens, len(answer.tokens)
    return {"prompt_tokens": prompt, "completion_tokens": answered, "total_tokens": prompt + answered}


# Serve copies the class here, with what it refers to: that must exist already.
@serve.deployment
@serve.ingress(api)
class Replica:
    """One open model, which answers up to `sequences` requests at a time."""

    def __init__(self, options: Options):
        self.name = options.model
        self.model = moeflux.open(
            options.model,
            backend=options.backend,
            memory=options.memory,
            threads=options.threads,
            sequences=options.sequences,
        )

    @api.post("/v1/chat/completions")
    async def chat(self, request: ChatRequest) -> Response:
        """Answers a conversation, whole or as events."""
        options = request.model_dump(include=OPTIONS)
        try:
            stream = self.model.stream(request.messages, **options)
        except (moeflux.ContextFullError, ValueError, TypeError) as error:
            raise HTTPException(400, str(error)) from error
        # Which replica it was, for whoever looks into how requests are spread.
        headers = {"x-replica": str(os.getpid())}
        if request.stream:
            return StreamingResponse(self.events(stream), media_type="text/event-stream", headers=headers)
        try:
            answer = await stream
        except moeflux.Error as error:
            raise HTTPException(500, str(error)) from error
        message = {"role": "assistant", "content": answer.text}
        completion = self.completion("chat.completion", {"message": message}, FINISH[answer.finish])
        return JSONResponse(completion | {"usage": usage(answer)}, headers=headers)

    async def events(self, stream: moeflux.Stream) -> AsyncIterator[str]:
        """Server-sent events. When the client goes away Serve cancels this, and the answer ends."""
        first = self.completion("chat.completion.chunk", {"delta": {"role": "assistant", "content": ""}}, None)
        yield event(first)
        try:
            async for piece in stream:
                part = "reasoning_content" if piece.reasoning else "content"
                yield event(first | {"choices": [{"index": 0, "delta": {part: piece.text}, "finish_reason": None}]})
            answer = await stream
        except moeflux.Error as error:
            yield event({"error": {"message": str(error), "type": "server_error"}})
            return
        finally:
            stream.stop()
        last = {"choices": [{"index": 0, "delta": {}, "finish_reason": FINISH[answer.finish]}], "usage": usage(answer)}
        yield event(first | last)
        yield "data: [DONE]\n\n"

    def completion(self, kind: str, choice: dict[str, Any], finish: str | None) -> dict[str, Any]:
        """What every answer begins with."""
        return {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": self.name,
            "choices": [{"index": 0, **choice, "finish_reason": finish}],
        }

    @api.get("/v1/stats")
    async def stats(self) -> dict[str, int | float]:
        """What one of the replicas has done so far, and is doing."""
        return self.model.stats() | {"replica": os.getpid()}

    def check_health(self) -> None:
        """Serve starts a replica again whose model does not answer."""
        self.model.stats()


def app(options: Options) -> serve.Application:
    """The application, which `serve run` builds."""
    return Replica.options(
        num_replicas=options.replicas,
        max_ongoing_requests=2 * options.sequences,
        ray_actor_options={"num_cpus": options.threads, "num_gpus": options.gpus},
    ).bind(options)
