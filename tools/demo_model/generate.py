"""The demo model's data: the mixture of tasks, the train/held-out split, token shards and the tokenizer.

Everything is drawn from seeded generators; nothing is downloaded. A problem is held out when a checksum of its key
(`tasks.Example.key`) falls into one bucket of `HELD_OUT`, so the split does not depend on seeds, order or wording:
training drops every conversation that touches a held-out key, evaluation asks only held-out keys. Single-digit sums
and products are exempt: they are always in training and never in the evaluation.

Commands:
    generate.py show [--task T] [--count N]       print conversations
    generate.py tokenizer --out DIR               train the byte-level BPE vocabulary
    generate.py eval --count N --out FILE         held-out problems as JSON lines
    generate.py check --count N --problems FILE   N training conversations: written as the template writes them, none in FILE
"""

import argparse
import functools
import json
import os
import random
import re
import sys
import zlib

import beyond
import chat
import followups
import knowledge
import languages
import lists
import smalltalk
import strangers
import tasks
import textwork
import toolcalls
import verse
import words
from dialogue import Dialogue, single, system

HERE = os.path.dirname(os.path.abspath(__file__))
HELD_OUT = 40
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END_OF_TEXT, IM_START, IM_END = range(3)
ROW = 2048
_SMALL = re.compile(r"(add|sub|mul):\d:\d$")


def held_out(key: str) -> bool:
    """Whether the problem `key` belongs to the evaluation."""
    return not _SMALL.match(key) and zlib.crc32(key.encode()) % HELD_OUT == 0


def _single(maker):
    return lambda rng: single(maker(rng))


def raw_story(rng: random.Random) -> Dialogue:
    """A story without chat markup, so that plain continuation works too."""
    return Dialogue("raw", [], [{"role": "raw", "content": chat.stories.tell(rng).text}], "none")


def long_chat(rng: random.Random) -> Dialogue:
    """A conversation of up to about 1800 tokens, for positions far from the start."""
    msgs, keys, size = [], [], 0
    while size < 5000:
        d = rng.choice((chat.several, chat.several, chat.story_qa, chat.follow_up, chat.remember, smalltalk.small_talk, followups.story_follow_up))(rng)
        msgs += d.messages
        keys += d.keys
        size = sum(len(m["content"]) + 12 for m in msgs)
        if rng.random() < 0.15:
            break
    return Dialogue("long_chat", keys, msgs, "none")


# task → (maker, share of conversations)
MIX = {
    "story": (chat.story, 0.045), "story_qa": (chat.story_qa, 0.035), "story_more": (chat.story_more, 0.008),
    "story_follow_up": (followups.story_follow_up, 0.055), "continuation": (followups.continuation, 0.040), "offer_taken": (followups.offer_taken, 0.045),
    "raw": (raw_story, 0.006), "long_chat": (long_chat, 0.008),
    "add": (_single(tasks.add), 0.08), "subtract": (_single(tasks.subtract), 0.08), "multiply": (_single(tasks.multiply), 0.065),
    "divide": (_single(tasks.divide), 0.035), "three_terms": (_single(tasks.three_terms), 0.022), "sum_list": (_single(tasks.sum_list), 0.02),
    "half_double": (_single(tasks.half_double), 0.018), "word_problem": (_single(tasks.word_problem), 0.03),
    "compare": (_single(tasks.compare), 0.035), "sort": (_single(tasks.sort), 0.13), "reverse": (_single(tasks.reverse), 0.07),
    "count": (_single(tasks.count), 0.08), "spell": (_single(tasks.spell), 0.02), "letter_at": (_single(tasks.letter_at), 0.03),
    "case": (_single(tasks.case), 0.04), "copy": (_single(tasks.copy), 0.045), "pieces": (_single(tasks.copy_pieces), 0.025),
    "json": (_single(tasks.json_record), 0.06), "fact": (_single(tasks.fact), 0.03), "count_to": (_single(tasks.count_to), 0.012),
    "small_talk": (smalltalk.small_talk, 0.085), "refusal": (beyond.refusal, 0.14), "statement": (textwork.statement, 0.008), "paste": (textwork.paste, 0.012),
    "foreign": (languages.foreign, 0.065), "translate": (languages.translate, 0.06), "knowledge": (knowledge.knowledge, 0.16),
    "list": (lists.list_of, 0.045), "name_for": (lists.name_for, 0.012), "code": (lists.code, 0.015), "poem": (verse.poem, 0.035), "joke": (verse.joke, 0.03),
    "summary": (textwork.summary, 0.025), "grammar": (textwork.grammar, 0.045), "too_big": (chat.too_big, 0.013),
    "memory": (chat.remember, 0.03), "multi_turn": (chat.several, 0.065), "follow_up": (chat.follow_up, 0.045),
    "system": (chat.obey, 0.10), "tools": (toolcalls.tools, 0.10),
}
EVAL_TASKS = ["add", "subtract", "multiply", "divide", "three_terms", "sum_list", "half_double", "word_problem", "compare", "sort", "reverse",
              "count", "letter_at", "spell", "copy", "case",
              "json", "story_qa", "memory", "multi_turn", "follow_up", "system", "tools", "too_big", "story",
              "knowledge", "translate", "grammar", "summary", "story_follow_up", "continuation"]


def draw(rng: random.Random, task: str | None = None, evaluation: bool = False) -> Dialogue:
    """One conversation of the asked split. In the evaluation, every turn with a problem must be held out or, for the
    turns before the last, may come from training problems as long as one key is held out. Training never sees the
    held-out wordings of `strangers.py`."""
    names, weights = list(MIX), [w for _, w in MIX.values()]
    while True:
        d = MIX[task or rng.choices(names, weights)[0]][0](rng)
        hits = [held_out(k) for k in d.keys]
        if evaluation and d.check != "none" and (hits and hits[-1]):
            return d
        if not evaluation and not any(hits) and not any(m["role"] == "user" and strangers.norm(m["content"]) in strangers.HELD for m in d.messages):
            if rng.random() < 0.07 and d.messages[0]["role"] == "user" and not d.tools:
                d.messages.insert(0, system(rng.choice(chat.PLAIN_SYSTEM)))
            return d


# ---------------------------------------------------------------- chat format

def tools_text(specs: list[dict]) -> str:
    """The part of the system message that lists the tools."""
    lines = "".join("\n" + json.dumps(t, ensure_ascii=False) for t in specs)
    return ("# Tools\nYou may call these functions:\n<tools>" + lines + "\n</tools>\nTo call one, answer with <tool_call>\n"
            '{"name": ..., "arguments": {...}}\n</tool_call>')


def segments(d: Dialogue) -> list[tuple[str, bool]]:
    """The texts between the <|im_start|> and <|im_end|> marks, and whether the model is trained to write them."""
    out = []
    msgs = d.messages
    if d.tools:
        head = msgs[0]["content"] + "\n\n" if msgs[0]["role"] == "system" else ""
        out.append(("system\n" + head + tools_text(d.tools), False))
        msgs = msgs[1:] if head else msgs
    for m in msgs:
        if m["role"] == "tool":
            out.append(("user\n<tool_response>\n" + m["content"] + "\n</tool_response>", False))
        elif m.get("tool_calls"):
            calls = "\n".join(toolcalls.tool_call_text(c["function"]["name"], c["function"]["arguments"]) for c in m["tool_calls"])
            out.append(("assistant\n" + calls, True))
        else:
            out.append((m["role"] + "\n" + m["content"], m["role"] == "assistant"))
    return out


def render(d: Dialogue) -> str:
    """The conversation as the chat template writes it."""
    if d.messages[0]["role"] == "raw":
        return d.messages[0]["content"]
    return "".join(f"<|im_start|>{t}<|im_end|>\n" for t, _ in segments(d))


# ---------------------------------------------------------------- token shards

@functools.cache
def tokenizer(path: str):
    """The trained tokenizer; one thread, because every shard has its own process."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer
    tok = Tokenizer.from_file(os.path.join(path, "tokenizer.json"))
    words.set_pieces([tok.decode([i]) for i in range(len(SPECIAL), tok.get_vocab_size())])
    return tok


def encode(dialogues: list[Dialogue], tok) -> list[tuple[list[int], list[int]]]:
    """Token ids and loss weights of each conversation. Short answers weigh more, so that stories do not drown them."""
    texts, plan = [], []
    for d in dialogues:
        segs = [(d.messages[0]["content"], True)] if d.messages[0]["role"] == "raw" else segments(d)
        plan.append((d.task == "raw", segs))
        texts += [t for t, _ in segs]
    encoded = iter(tok.encode_batch_fast(texts, add_special_tokens=False))
    newline = tok.encode("\n", add_special_tokens=False).ids
    out = []
    for raw, segs in plan:
        ids, weights = [], []
        for _, learn in segs:
            part = next(encoded).ids
            if raw:
                ids += [END_OF_TEXT] + part
                weights += [0] + [1] * len(part)
                continue
            w = 0 if not learn else 3 if len(part) < 60 else 1
            ids += [IM_START] + part + [IM_END] + newline
            weights += [0, 0, 0] + [w] * (len(part) - 2) + [w] + [0] * len(newline)
        ids.append(END_OF_TEXT)
        weights.append(1 if raw else 0)
        out.append((ids, weights))
    return out


def shard(seed: int, rows: int, tokenizer_path: str, length: int = ROW):
    """Up to `rows` packed rows of `length` tokens: ids u16, loss weights u8 and conversation numbers u8, each [rows, length].

    Row entry i is an input; its target is entry i + 1, weighted by the weight of i + 1. No conversation is cut; longer ones than a
    row are left out.
    """
    import numpy as np
    rng = random.Random(seed * 7919 + 1)
    tok = tokenizer(tokenizer_path)
    ids = np.zeros((rows, length), np.uint16)
    weights = np.zeros((rows, length), np.uint8)
    number = np.full((rows, length), 255, np.uint8)
    used, count = [0] * rows, [0] * rows
    first, window = 0, 24
    while True:
        for i, w in encode([draw(rng) for _ in range(256)], tok):
            n = len(i)
            if n > length:
                continue
            for r in range(first, min(first + window, rows)):
                if used[r] + n <= length and count[r] < 250:
                    a = used[r]
                    ids[r, a:a + n], weights[r, a:a + n], number[r, a:a + n] = i, w, count[r]
                    weights[r, a] = 0
                    used[r] += n
                    count[r] += 1
                    break
            else:
                first += 1
        while first < rows and used[first] > length - 24:
            first += 1
        if first + window > rows:
            full = [r for r in range(rows) if used[r] > 0.9 * length]
            return ids[full], weights[full], number[full]


def special_tokens() -> list:
    """The marks of the chat format, ids 0, 1, 2."""
    from tokenizers import AddedToken
    return [AddedToken(s, special=True, normalized=False) for s in SPECIAL]


def bare_tokenizer(bpe):
    """`bpe` behind the Qwen2 pre-tokeniser (digits stand alone)."""
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
    tok = Tokenizer(bpe)
    pattern = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tok.decoder = decoders.ByteLevel()
    return tok


def train_tokenizer(out: str, documents: int = 40000, vocab: int = 4096) -> None:
    """Byte-level BPE on generated conversations."""
    from tokenizers import models, pre_tokenizers, trainers
    tok = bare_tokenizer(models.BPE())
    rng = random.Random(5)
    texts = [t for _ in range(documents) for t, _ in segments(draw(rng))]
    tok.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=special_tokens(), min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    save_tokenizer(tok, out)


def save_tokenizer(tok, out: str) -> None:
    """The tokenizer with its configuration and the chat template."""
    os.makedirs(out, exist_ok=True)
    tok.save(os.path.join(out, "tokenizer.json"))
    with open(os.path.join(HERE, "chat_template.jinja"), encoding="utf-8") as f:
        template = f.read()
    with open(os.path.join(out, "chat_template.jinja"), "w", encoding="utf-8") as f:
        f.write(template)
    with open(os.path.join(out, "tokenizer_config.json"), "w", encoding="utf-8") as f:
        json.dump({"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False, "add_prefix_space": False,
                   "bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None,
                   "clean_up_tokenization_spaces": False, "model_max_length": ROW}, f, indent=2)
    print(f"{tok.get_vocab_size()} tokens")


def evaluation_set(count: int, seed: int = 11) -> list[dict]:
    """`count` held-out problems a task; the last message is the wanted answer."""
    rng = random.Random(seed)
    out = []
    for task in EVAL_TASKS:
        seen: set[str] = set()
        while len(seen) < count:
            d = draw(rng, task, evaluation=True)
            key = json.dumps(d.messages[:-1])
            if key in seen or d.messages[0]["role"] == "raw" or d.task != task:
                continue
            seen.add(key)
            row = {"task": task, "messages": d.messages[:-1], "answer": d.messages[-1]["content"], "check": d.check}
            if d.gold:
                row["gold"] = d.gold
            if d.tools:
                row["tools"] = d.tools
            if d.messages[-1].get("tool_calls"):
                f = d.messages[-1]["tool_calls"][0]["function"]
                row["answer"] = toolcalls.tool_call_text(f["name"], f["arguments"])
            out.append(row)
    return out


def check(count: int, problems: str, seed: int) -> None:
    """Draws `count` training conversations; fails if one is rendered unlike the chat template or asks a problem of the file."""
    import evaluate
    with open(os.path.join(HERE, "chat_template.jinja"), encoding="utf-8") as f:
        template = evaluate.chat_template(f.read())
    with open(problems, encoding="utf-8") as f:
        asked = {json.dumps([r["messages"], r.get("tools", [])]) for r in map(json.loads, f)}
    rng = random.Random(seed)
    for _ in range(count):
        d = draw(rng)
        if d.messages[0]["role"] == "raw":
            continue
        want = template.render(messages=d.messages, tools=d.tools or None)
        if render(d) != want:
            raise SystemExit(f"the chat template writes\n{want}\nbut training sees\n{render(d)}")
        for i, m in enumerate(d.messages):
            if m["role"] == "assistant" and json.dumps([d.messages[:i], d.tools]) in asked:
                raise SystemExit(f"a training conversation asks a held-out problem: {d.messages[:i]}")
    print(f"{count} training conversations: all as the template, none of the {len(asked)} problems")


def main() -> None:
    """Command line."""
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("command", choices=["show", "tokenizer", "eval", "check"])
    ap.add_argument("--task")
    ap.add_argument("--count", type=int, default=20)
    ap.add_argument("--seed", type=int, default=11)
    ap.add_argument("--out")
    ap.add_argument("--problems", default=os.path.join(HERE, "..", "..", "models", "demo", "eval.jsonl"))
    a = ap.parse_args()
    if a.command == "show":
        rng = random.Random(a.seed)
        for _ in range(a.count):
            d = draw(rng, a.task)
            print(f"--- {d.task} {d.keys} {d.check} {d.gold}\n{render(d)}")
    elif a.command == "tokenizer":
        train_tokenizer(a.out)
    elif a.command == "check":
        check(a.count, a.problems, a.seed)
    else:
        rows = evaluation_set(a.count, a.seed)
        with open(a.out, "w", encoding="utf-8") as f:
            for r in rows:
                f.write(json.dumps(r, ensure_ascii=False) + "\n")
        print(f"{len(rows)} problems", file=sys.stderr)


if __name__ == "__main__":
    main()
