"""A conversation as the other files build it: chat messages, the keys that decide its split, and how its last answer is judged."""

import random
from dataclasses import dataclass, field

from tasks import Example


@dataclass
class Dialogue:
    """Messages in chat format; `check` and `gold` judge the last assistant message."""

    task: str
    keys: list[str]
    messages: list[dict]
    check: str = "exact"
    gold: str = ""
    tools: list[dict] = field(default_factory=list)


def user(text: str) -> dict:
    """A user message."""
    return {"role": "user", "content": text}


def assistant(text: str) -> dict:
    """An assistant message."""
    return {"role": "assistant", "content": text}


def system(text: str) -> dict:
    """A system message."""
    return {"role": "system", "content": text}


def single(e: Example) -> Dialogue:
    """A one-turn dialogue."""
    return Dialogue(e.task, [e.key], [user(e.prompt), assistant(e.answer)], e.check, e.gold)


def norm(text: str) -> str:
    """Lower-case letters, digits and operators only: the identity of a prompt apart from typing."""
    return "".join(c for c in text.lower() if c.isalnum() or c in "+-*/×")


_EMOJI = "😀 😂 🙂 😊 👍 🙏 ❤️ 🎉 🤔 😅 👋 🔥 :) :-) ;) :D xD ^^ <3".split()


def _slip(rng: random.Random, word: str) -> str:
    """`word` with one letter dropped, doubled, swapped with the next or replaced by a neighbour."""
    i = rng.randrange(1, len(word) - 1)
    return rng.choice((word[:i] + word[i + 1:], word[:i] + word[i] + word[i:], word[:i] + word[i + 1] + word[i] + word[i + 2:],
                       word[:i] + rng.choice("aeiourtnsl") + word[i + 1:]))


def messy(rng: random.Random, text: str, typos: float = 0.12, caps: float = 0.04, keep: str = "") -> str:
    """Types `text` as strangers do: lower case, no marks, slips, emoji, capitals. Words of `keep` are never misspelled."""
    r = rng.random()
    if r < 0.45:
        text = text[0].lower() + text[1:] if r < 0.2 else text.lower() if not keep else text[0].lower() + text[1:]
    r = rng.random()
    if r < 0.4:
        text = text.rstrip(".?!") or text
    elif r < 0.46 and text[-1] in "?!":
        text += text[-1] * rng.choice((1, 2))
    elif r < 0.5 and text[-1].isalnum():
        text += rng.choice("?!.")
    if rng.random() < 0.12:
        text = text.replace("'", "")
    if rng.random() < typos:
        words = text.split(" ")
        fixed = set(keep.lower().split())
        at = [i for i, w in enumerate(words) if len(w) > 3 and w.isalpha() and w.lower() not in fixed]
        if at:
            i = rng.choice(at)
            words[i] = _slip(rng, words[i])
            text = " ".join(words)
    r = rng.random()
    if r < 0.05:
        text = rng.choice(("please ", "pls ", "plz ", "Please ", "can you ", "hey, ", "hi, ", "ok ", "so ", "um, ", "yo ")) + text
    elif r < 0.08 and text[-1].isalnum():
        text += rng.choice((" please", " pls", " plz", " thanks", " thx"))
    if rng.random() < 0.05:
        text += " " + rng.choice(_EMOJI)
    if rng.random() < caps:
        text = text.upper()
    if rng.random() < 0.015:
        text = text.replace(" ", "  ", 1)
    return text
