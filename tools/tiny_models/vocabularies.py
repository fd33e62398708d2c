"""Tiny trained vocabularies, so that `run` has text to read and print on a tiny model.

Two kinds, as published checkpoints have them: byte-level BPE with the Qwen split pattern and ChatML
specials, and SentencePiece BPE with byte fallback (the kind Mixtral ships).
"""

import io
import json
from dataclasses import dataclass
from pathlib import Path

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXT = """\
The experts that a token does not need stay on the disk. A router reads the hidden state, chooses a few of \
them, and
adds what they say in the order of their numbers. The cache keeps those that were asked for lately; \
the rest is read
again when it is wanted. Nothing is skipped and nothing is rounded on the way.
for layer in range(num_layers):
    weights, ids = top_k(softmax(router[layer] @ hidden), k=2)
    hidden = hidden + sum(w * expert(i, hidden) for w, i in zip(weights, ids))
    return hidden  # 1024 + 4096 = 5120
Die Experten, die ein Wort nicht braucht, bleiben auf der Platte. Les experts restent sur le disque.
"""
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# The split pattern of Qwen2 and Qwen3 tokenizers (llama.cpp's pre-tokeniser "qwen2").
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class SentencePieceVocabulary:
    """One row for each id."""

    tokens: list[bytes]
    scores: list[float]
    # Values of gguf.TokenType.
    types: list[int]


def byte_level_bpe(size: int) -> Tokenizer:
    """A byte-level BPE of exactly `size` tokens: 256 bytes, merges, then the special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    if tokenizer.get_vocab_size() != size:
        raise ValueError(f"the text gives {tokenizer.get_vocab_size()} tokens, not {size}")
    return tokenizer


def save_byte_level_bpe(folder: Path, size: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json."""
    tokenizer = byte_level_bpe(size)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=False), encoding="utf-8")
    config = {
        "add_bos_token": False,
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(token)): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for token in SPECIAL_TOKENS
        },
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "eos_token": "<|im_end|>",
        "model_max_length": 512,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def sentencepiece_bpe(size: int) -> SentencePieceVocabulary:
    """A SentencePiece BPE with byte fallback: unknown, bos, eos, 256 bytes, then pieces."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()),
        model_writer=written,
        model_type="bpe",
        vocab_size=size,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        add_dummy_prefix=True,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    normal, unknown, control, byte = 1, 2, 3, 6
    kinds = []
    for token in range(size):
        if processor.IsUnknown(token):
            kinds.append(unknown)
        elif processor.IsControl(token):
            kinds.append(control)
        elif processor.IsByte(token):
            kinds.append(byte)
        else:
            kinds.append(normal)
    return SentencePieceVocabulary(
        tokens=[processor.IdToPiece(token).encode("utf-8") for token in range(size)],
        scores=[processor.GetScore(token) for token in range(size)],
        types=kinds,
    )
