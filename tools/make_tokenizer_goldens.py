#!/usr/bin/env python3
"""Trains small tokenizers and records the ids that transformers and llama.cpp give for them.

    python tools/make_tokenizer_goldens.py OUT --llama-python PYTHON

OUT gets
- byte_level.json, sentencepiece.json: `tokenizer.json` files;
- byte_level.gguf, sentencepiece*.gguf: the same vocabularies, and variants of them, as GGUF files without tensors;
- texts.json: the texts, and lists of ids that the others refer to by index;
- hugging_face.json: for every style of `tokenizer.json`, its parts that differ and transformers' ids;
- gguf.json: for every file and every name of a splitting rule, llama.cpp's ids.

PYTHON is an interpreter that has llama-cpp-python.
"""

import argparse
import copy
import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import gguf
import sentencepiece
from tokenizer_goldens import styles
from tokenizer_goldens.corpus import LINES
from tokenizer_goldens.pool import Pool
from tokenizer_goldens.texts import SHOWN_TOKENS, SPECIAL_TOKENS, TEXTS
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import generate_merges

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

PRE_NAMES = """
    default gpt-2 phi-2 jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code roberta-bpe gigachat a.x-4.0
    mellum modern-bert mpt olmo jais trillion granite-docling exaone4 llama-bpe llama3 llama-v3 falcon3 falcon-h1
    pixtral midm-2.0 lfm2 jina-v5-nano dbrx smaug-bpe chatglm-bpe glm4 glm5 qwen2 deepseek-r1-qwen kormo f2llmv2
    megrez stablelm2 hunyuan solar-open grok-2 qwen35 ufakzeka laguna minicpm5 seed-coder bailingmoe bailingmoe2
    llada-moe exaone-moe jais-2 deepseek-llm deepseek-coder deepseek-v3 hunyuan-dense joyai-llm hy_v4 spark2_5 afmoe
    youtu falcon starcoder refact command-r smollm codeshell exaone minerva-7b mellum2 poro-chat bloom gpt3-finnish
    viking tekken gpt-4o llama4 kanana2 talkie minimax-m2 granite-embed-multi-97m tiny_aya cohere2moe kimi-k2 superbpe
    chameleon
""".split()


def byte_level_tokenizer() -> Tokenizer:
    """Byte-level BPE whose merges cross the borders that splitting rules draw, so that each rule shows in the ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        min_frequency=2,
        max_token_length=10,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES * 2, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in SHOWN_TOKENS])
    styles.apply("gpt2", tokenizer, "<|endoftext|>")
    return tokenizer


def write_gguf(path: Path, **fields: object) -> None:
    """A GGUF file of nothing but a vocabulary."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(fields["model"])
    if "pre" in fields:
        writer.add_tokenizer_pre(fields["pre"])
    writer.add_token_list(fields["tokens"])
    if "scores" in fields:
        writer.add_token_scores(fields["scores"])
    writer.add_token_types(fields["types"])
    if "merges" in fields:
        writer.add_token_merges(fields["merges"])
    writer.add_bos_token_id(fields["bos"])
    writer.add_eos_token_id(fields["eos"])
    if "unk" in fields:
        writer.add_unk_token_id(fields["unk"])
    for key in ("add_bos_token", "add_eos_token", "add_space_prefix"):
        if key in fields:
            writer.add_bool(f"tokenizer.ggml.{key}", fields[key])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def byte_level_gguf(path: Path, tokenizer: Tokenizer, pre: str) -> None:
    model = json.loads(tokenizer.to_str())["model"]
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    types = [CONTROL if t in SPECIAL_TOKENS else USER_DEFINED if t in SHOWN_TOKENS else NORMAL for t in tokens]
    write_gguf(
        path,
        model="gpt2",
        pre=pre,
        tokens=tokens,
        types=types,
        merges=[" ".join(merge) for merge in model["merges"]],
        bos=tokenizer.token_to_id("<|endoftext|>"),
        eos=tokenizer.token_to_id("<|im_end|>"),
    )


def sentencepiece_model() -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES * 2),
        model_writer=model,
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        character_coverage=0.985,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        max_sentencepiece_length=10,
        control_symbols=["[INST]", "[/INST]", "<|im_end|>"],
        user_defined_symbols=["<think>", "</think>"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_type(model: sentencepiece.SentencePieceProcessor, token: int) -> int:
    if model.is_unknown(token):
        return UNKNOWN
    if model.is_byte(token):
        return BYTE
    if model.is_control(token):
        return CONTROL
    if model.id_to_piece(token) in ("<think>", "</think>"):
        return USER_DEFINED
    return NORMAL


def sentencepiece_ggufs(model: sentencepiece.SentencePieceProcessor) -> dict[str, dict]:
    """The vocabulary as converters write it, and variants that stress what merging by score means."""
    size = model.get_piece_size()
    plain = {
        "model": "llama",
        "tokens": [model.id_to_piece(i) for i in range(size)],
        "scores": [model.get_score(i) for i in range(size)],
        "types": [sentencepiece_type(model, i) for i in range(size)],
        "bos": 1,
        "eos": 2,
        "unk": 0,
    }
    equal = plain | {"scores": [float(-(i // 16 % 5)) for i in range(size)], "add_eos_token": True}
    return {
        "sentencepiece.gguf": plain,
        "sentencepiece_no_prefix.gguf": plain | {"add_space_prefix": False, "add_bos_token": False},
        "sentencepiece_equal_scores.gguf": equal,
    }


def sentencepiece_tokenizer(model: sentencepiece.SentencePieceProcessor) -> Tokenizer:
    """As converters write SentencePiece models: spaces replaced by the normalizer, merges derived from scores."""
    pieces = [(model.id_to_piece(i), model.get_score(i)) for i in range(model.get_piece_size())]
    vocab = {piece: i for i, (piece, _) in enumerate(pieces)}
    merges = generate_merges(vocab, dict(pieces))
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in ("<unk>", "<s>", "</s>", "[INST]", "[/INST]")])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ("<think>", "</think>")])
    return tokenizer


def metaspace(tokenizer: Tokenizer) -> None:
    """The newer way: spaces replaced by the pre-tokenizer, a space put before the first piece only."""
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)


CONFIG = {
    "bos_token": "<|endoftext|>",
    "eos_token": "<|im_end|>",
    "pad_token": {"__type": "AddedToken", "content": "<|pad|>", "lstrip": False, "rstrip": False, "normalized": False, "special": True},
    "add_bos_token": True,
    "added_tokens_decoder": {
        "1600": {"content": "<|left|>", "lstrip": True, "rstrip": False, "normalized": False, "special": True},
        "1601": {"content": "<|right|>", "lstrip": False, "rstrip": True, "normalized": False, "special": False},
        "1602": {"content": "boats", "single_word": True, "lstrip": False, "rstrip": False, "normalized": True},
    },
    "additional_special_tokens": ["<|extra|>", "<think>"],
    "image_token": "<|image|>",
}
CONFIG_TEXTS = [
    "a <|left|> b <|right|> c<|pad|>d <|extra|> e<|image|>",
    "128 boats, boatsmen, boats.boats <think> x </think>",
    "<|im_start|>x<|im_end|> <|endoftext|>",
]


def hugging_face_case(base: str, tokenizer: Tokenizer, config: dict | None, texts: list[str], pool: Pool) -> dict:
    """The parts of `tokenizer` that differ from the file `base`, and what transformers makes of the texts."""
    parts = json.loads(tokenizer.to_str())
    case = {
        "base": base,
        "parts": {key: parts[key] for key in ("normalizer", "pre_tokenizer", "post_processor", "decoder")},
        "ignore_merges": parts["model"]["ignore_merges"],
        "config": config,
    }
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(f"{folder}/tokenizer.json")
        if config is not None:
            Path(folder, "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        reference = PreTrainedTokenizerFast.from_pretrained(folder)
    encoded = [reference.encode(text, add_special_tokens=False) for text in texts]
    case["parsed"] = pool.add_all(encoded)
    case["plain"] = pool.add_all([reference.encode(t, add_special_tokens=False, split_special_tokens=True) for t in texts])
    case["with_special"] = pool.add_all([reference.encode(text) for text in texts])
    case["decoded"] = [reference.decode(ids) for ids in encoded]
    case["decoded_without_special"] = [reference.decode(ids, skip_special_tokens=True) for ids in encoded]
    case["special_tokens"] = reference.special_tokens_map
    case["texts"] = None if texts is TEXTS else texts
    return case


def hugging_face_cases(byte_level: Tokenizer, sentence: Tokenizer, pool: Pool) -> dict[str, dict]:
    cases = {}
    for style in styles.STYLES:
        tokenizer = copy.deepcopy(byte_level)
        styles.apply(style, tokenizer, "<|endoftext|>")
        cases[style] = hugging_face_case("byte_level.json", tokenizer, None, TEXTS, pool)
    tokenizer = copy.deepcopy(byte_level)
    styles.apply("qwen2", tokenizer, "<|endoftext|>")
    cases["tokenizer_config"] = hugging_face_case("byte_level.json", tokenizer, CONFIG, CONFIG_TEXTS, pool)
    cases["mixtral"] = hugging_face_case("sentencepiece.json", copy.deepcopy(sentence), None, TEXTS, pool)
    tokenizer = copy.deepcopy(sentence)
    metaspace(tokenizer)
    cases["metaspace"] = hugging_face_case("sentencepiece.json", tokenizer, None, TEXTS, pool)
    return cases


def gguf_cases(out: Path, byte_level: Tokenizer, variants: dict[str, dict], llama_python: str, pool: Pool) -> dict[str, dict]:
    """llama.cpp's results for the files in `out` and, for the byte-level one, under every name of a rule."""
    with tempfile.TemporaryDirectory() as folder:
        jobs = [(name, None, out / name) for name in variants]
        for pre in PRE_NAMES:
            path = Path(folder, f"{pre}.gguf")
            byte_level_gguf(path, byte_level, pre)
            jobs.append(("byte_level.gguf", pre, path))
        requests, results = Path(folder, "jobs.json"), Path(folder, "results.json")
        requests.write_text(json.dumps([{"gguf": str(path), "texts": TEXTS} for _, _, path in jobs]), encoding="utf-8")
        peer = Path(__file__).parent / "tokenizer_goldens" / "llama_cpp_peer.py"
        subprocess.run([llama_python, peer, requests, results], check=True)
        results = json.loads(results.read_text(encoding="utf-8"))
    cases = {}
    pieces = {}
    for (file, pre, _), result in zip(jobs, results, strict=True):
        case = {key: pool.add_all(result[key]) for key in ("parsed", "plain", "with_special")}
        case["ends"] = result["ends"]
        assert pieces.setdefault(file, result["pieces"]) == result["pieces"], (file, pre)
        cases.setdefault(file, {"pieces": pieces[file], "rules": {}})["rules"][pre or ""] = case
    return cases


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--llama-python", required=True, help="interpreter that has llama-cpp-python")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    pool = Pool()
    byte_level = byte_level_tokenizer()
    model = sentencepiece_model()
    sentence = sentencepiece_tokenizer(model)
    for name, tokenizer in [("byte_level.json", byte_level), ("sentencepiece.json", sentence)]:
        write_json(args.out / name, json.loads(tokenizer.to_str()))
    byte_level_gguf(args.out / "byte_level.gguf", byte_level, "default")
    variants = sentencepiece_ggufs(model)
    for name, fields in variants.items():
        write_gguf(args.out / name, **fields)

    write_json(args.out / "hugging_face.json", hugging_face_cases(byte_level, sentence, pool))
    write_json(args.out / "gguf.json", gguf_cases(args.out, byte_level, variants, args.llama_python, pool))
    write_json(args.out / "texts.json", {"texts": TEXTS, "ids": pool.lists})
    for path in sorted(args.out.iterdir()):
        print(f"{path.stat().st_size:8} {path.name}", file=sys.stderr)


if __name__ == "__main__":
    main()
