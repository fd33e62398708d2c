"""Types of arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Union

Message = Mapping[str, Any]
"""A message with ``role`` and ``content``."""

Prompt = Union[str, Sequence[int], Sequence[Message]]
"""A text to continue, token ids, or messages to answer."""


class GenerateOptions(TypedDict, total=False):
    """How an answer is made. ``None`` is the default of each."""

    max_tokens: int | None
    """Most tokens of the answer; 1024."""
    temperature: float | None
    """0 always takes the most likely token; 0.7."""
    top_k: int | None
    """Sample from so many of the most likely tokens; 0 for all."""
    top_p: float | None
    """Sample from the most likely tokens whose probabilities add up to this; 0.95."""
    min_p: float | None
    """Sample from tokens at least this fraction as likely as the most likely one; 0."""
    repetition_penalty: float | None
    """Divides the logits of recent tokens; 1 for none."""
    presence_penalty: float | None
    """Subtracted from the logits of recent tokens; 0."""
    frequency_penalty: float | None
    """Subtracted from the logits of recent tokens for each occurrence; 0."""
    penalty_window: int | None
    """How many tokens are recent; 64."""
    logit_bias: Mapping[int, float] | None
    """Added to the logits of these tokens."""
    adapter: str | None
    """Name of the adapter to answer with, of those that the model was opened with; by default that of ``open``."""
    seed: int | None
    """The same seed gives the same answer; by default each answer draws its own."""
    stop: str | Sequence[str] | None
    """Texts that end the answer and are not part of it."""
    logprobs: int | None
    """For every token its log-probability and those of so many most likely ones."""
    json_schema: Mapping[str, Any] | bool | None
    """The answer is JSON that has this schema."""
    regex: str | None
    """The answer is what this regular expression matches as a whole."""
    choice: Sequence[str] | None
    """The answer is one of these texts."""
    grammar: str | None
    """The answer is of this grammar, in llguidance's dialect of Lark."""
    tools: Sequence[Mapping[str, Any]] | None
    """Functions in OpenAI's form that an answer to messages may call."""
    tool_choice: str | Mapping[str, Any] | None
    """``auto``, ``none``, ``required``, or a function that is to be called."""
    template: Mapping[str, Any] | None
    """Further variables of the chat template, such as ``enable_thinking``."""
