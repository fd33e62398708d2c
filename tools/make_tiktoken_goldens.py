#!/usr/bin/env python3
"""Trains a small vocabulary in tiktoken's file format and records the ids that tiktoken gives for it.

    python tools/make_tiktoken_goldens.py OUT

Needs tiktoken and regex. OUT gets tiktoken.model and tokenizer_config.json, as Kimi's folders have them, and
expected.json: texts beside those of texts.json, ids of all of them with and without special tokens, and their names.
"""

import argparse
import base64
import json
from collections import Counter
from pathlib import Path

import regex
import tiktoken
from tokenizer_goldens.corpus import LINES
from tokenizer_goldens.texts import TEXTS

# `pat_str` of Kimi's tokenization_kimi.py.
WORDS = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
SIZE = 700
RESERVED = 256
# By distance from the first special token; the others are reserved.
NAMES = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 6: "<|tool_call_begin|>", 255: "[PAD]"}
SHOWN = ["<|tool_call_begin|>"]
MORE = [
    "<|im_user|>user<|im_middle|>Hello<|im_end|>[EOS]",
    "a[BOS]b <|im_end|><|im_end|>\n[PAD]",
    "<|tool_call_begin|>f({})<|reserved_token_704|><|reserved_token_9999|>",
    "東京タワーと漢字かな混じり文〇一二三ABCdefGHI'LL we'RE",
    "ÀÉîõ ǅungla ʰʷ ªº ́combining हिन्दी ไทย 한국어",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
]


def train() -> dict[bytes, int]:
    """Byte-pair merges of the corpus, most frequent first."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    found = Counter(word.encode() for line in LINES for word in regex.findall(WORDS, line, regex.V1))
    words = [([bytes([byte]) for byte in word], count) for word, count in found.items()]
    while len(ranks) < SIZE:
        pairs = Counter()
        for parts, count in words:
            for pair in zip(parts, parts[1:]):
                pairs[pair] += count
        left, right = max(pairs, key=lambda pair: (pairs[pair], pair))
        ranks[left + right] = len(ranks)
        for parts, _ in words:
            at = 0
            while at + 1 < len(parts):
                if (parts[at], parts[at + 1]) == (left, right):
                    parts[at : at + 2] = [left + right]
                at += 1
    return ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    ranks = train()
    special = {NAMES.get(i, f"<|reserved_token_{SIZE + i}|>"): SIZE + i for i in range(RESERVED)}
    encoding = tiktoken.Encoding(name="kimi", pat_str=WORDS, mergeable_ranks=ranks, special_tokens=special)
    lines = [base64.b64encode(token) + f" {rank}\n".encode() for token, rank in ranks.items()]
    (out / "tiktoken.model").write_bytes(b"".join(lines))
    config = {
        "added_tokens_decoder": {
            str(SIZE + i): {"content": name, "lstrip": False, "normalized": False, "special": name not in SHOWN}
            for i, name in NAMES.items()
        },
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    texts = TEXTS + MORE
    expected = {
        "more_texts": MORE,
        "parsed": [encoding.encode(text, allowed_special="all") for text in texts],
        "plain": {
            index: ids
            for index, text in enumerate(texts)
            if (ids := encoding.encode_ordinary(text)) != encoding.encode(text, allowed_special="all")
        },
    }
    (out / "expected.json").write_text(json.dumps(expected, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
