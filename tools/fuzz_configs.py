#!/usr/bin/env python3
"""Compares how moeflux and transformers read configurations, by the logits that come of them.

    python tools/fuzz_configs.py MOEFLUX [--bases N] [--seed S] [--pairs N] [--refusals] [--log FILE] [FAMILY ...]

For every family random small models are made, and of each one's configuration all variants of
`tiny_models/config_variants.py` over the same weights; besides, models whose configuration never had a key, so that
its default fits the weights. For each variant there are three findings:

- transformers has logits, moeflux has others: a difference;
- transformers has logits, moeflux refuses: counted, and printed with --refusals;
- transformers fails or finds that the weights do not fit, moeflux has logits: counted, and printed with --refusals.

Models whose routing decisions are too close to ties on all draws of tokens are left out.

Ends with status 1 if there is any difference, by more than 1e-4 of the largest logit on two draws of tokens.
"""

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from check_parity import RunFailed, run_logits
from compare_logits import compare
from tiny_models import config_variants, golden, hf_files
from tiny_models.config_variants import IDLE, Config, Variant, text_of
from tiny_models.random_draw import Draw
from tiny_models.random_families import FAMILIES
from transformers import AutoModelForCausalLM

MAX_RELATIVE_ERROR = 1e-4
N_TOKENS = 72
VOCABULARY = 96
# Draws of tokens, where routing decisions are close to ties.
DRAWS = 6
# Defaults that make models too big for this.
BIG = {"vocab_size", "hidden_size", "num_hidden_layers", "q_lora_rank", "ngram_vocab_size_base", "o_lora_rank"}


@dataclass(frozen=True)
class Base:
    """A checkpoint whose configuration is to be varied."""

    name: str
    folder: Path
    config: Config


class Unfit(Exception):
    """transformers has no logits of a configuration, or none that its weights alone decide."""


def build(family: str, config: Config, seed: int, folder: Path) -> Config:
    """Writes a checkpoint and returns its configuration with all keys."""
    model = hf_files.build_model(family, config, torch.float32, seed)
    model.save_pretrained(folder)
    return json.loads(json.dumps(model.config.to_dict(), default=str))


def bases(family: str, count: int, seed: int, out: Path) -> Iterator[Base]:
    """Random models of a family, one with tied embeddings if there are several."""
    for number in range(seed, seed + count):
        rng = random.Random(f"{family} {number}")
        config = FAMILIES[family](Draw(rng, aligned=1))
        text = text_of(config)
        text["tie_word_embeddings"] = bool(text["tie_word_embeddings"] and number % 2)
        if "tie_word_embeddings" in config:
            config["tie_word_embeddings"] = bool(config["tie_word_embeddings"] and number % 2)
        text["vocab_size"] = VOCABULARY
        text["eos_token_id"] = VOCABULARY - 1
        folder = out / f"{family}_{number}"
        try:
            yield Base(f"{family} {number}", folder, build(family, config, number, folder))
        except Exception as error:
            print(f"{family} {number}: no such model: {type(error).__name__}: {error}")


def defaulted(family: str, seed: int, out: Path) -> Iterator[tuple[Base, Variant]]:
    """Models whose configuration does not have a key, and the same without it in the file."""
    rng = random.Random(f"{family} {seed}")
    config = FAMILIES[family](Draw(rng, aligned=1))
    text_of(config).update(vocab_size=VOCABULARY, eos_token_id=VOCABULARY - 1, tie_word_embeddings=False)
    for key in text_of(config):
        if key in IDLE | BIG | {"tie_word_embeddings", "eos_token_id"}:
            continue
        rest = config_variants.changed(config, config_variants.drop(key))
        folder = out / f"{family}_without_{key}"
        try:
            full = build(family, rest, seed, folder)
        except Exception:
            continue
        less = config_variants.changed(full, config_variants.drop(key))
        yield Base(f"{family} {seed}", folder, full), Variant(f"{key} never given", less)


def write_variant(base: Base, variant: Variant, folder: Path) -> None:
    """The variant's configuration beside links to the base's weights."""
    folder.mkdir()
    for file in base.folder.glob("*.safetensors"):
        os.symlink(file, folder / file.name)
    (folder / "config.json").write_text(json.dumps(variant.config, indent=1))


class Expected:
    """What transformers makes of a folder."""

    def __init__(self, folder: Path) -> None:
        try:
            self.model, found = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=torch.float32,
                attn_implementation="eager",
                experts_implementation="eager",
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
        except Exception as error:
            raise Unfit(f"{type(error).__name__}: {str(error).strip()[:160]}") from error
        for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
            if names := found[kind]:
                raise Unfit(f"{kind}: {sorted(map(str, names))[0]}")

    def logits(self, tokens: torch.Tensor) -> np.ndarray:
        try:
            found = golden.logits_of(self.model.eval(), tokens).numpy()
        except Exception as error:
            raise Unfit(f"{type(error).__name__}: {str(error).strip()[:160]}") from error
        if not np.isfinite(found).all():
            raise Unfit("logits that are not finite")
        return found


def judge(moeflux: Path, base: Base, variant: Variant, scratch: Path) -> tuple[str, str]:
    """The finding on a variant, and a line on it."""
    folder = scratch / "variant"
    write_variant(base, variant, folder)
    try:
        expected = Expected(folder)
        reason = ""
    except Unfit as error:
        expected, reason = None, str(error)
    errors = []
    for draw in range(DRAWS):
        tokens = tokens_of(draw)
        try:
            logits = expected.logits(tokens) if expected else None
        except Unfit as error:
            logits, reason = None, str(error)
        try:
            got = run_logits(moeflux, folder, tokens.numpy(), "--activations", "f32")
        except RunFailed as error:
            return ("both refuse", reason) if logits is None else ("refused", str(error))
        if logits is None:
            return "accepted", reason
        if got.shape != logits.shape:
            return "difference", f"shapes {got.shape} and {logits.shape}"
        errors.append(compare(got, logits).relative_error)
        if errors[-1] <= MAX_RELATIVE_ERROR:
            return "same", f"{errors[-1]:.1e}"
        if len(errors) == 2 and clear(expected.model):
            break
    else:
        return "too close", "every draw of tokens has a routing decision close to a tie"
    return "difference", f"{min(errors):.1e}"


def clear(model: torch.nn.Module) -> bool:
    """Whether routing decisions are clear of ties on one of the first two draws of tokens, so that both being different
    means something."""
    for draw in range(2):
        try:
            if golden.router_margin(model, tokens_of(draw)) >= golden.MIN_ROUTER_MARGIN:
                return True
        except Exception:
            # Some configurations that have logits have no margin.
            return True
    return False


def tokens_of(draw: int) -> torch.Tensor:
    return golden.random_tokens(VOCABULARY, N_TOKENS, 7 + 1000 * draw)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("moeflux", type=Path)
    parser.add_argument("families", nargs="*", choices=[*FAMILIES, []], help="all when absent")
    parser.add_argument("--bases", type=int, default=2, help="models of each family (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="number of the first one")
    parser.add_argument("--pairs", type=int, default=40, help="random pairs of changes a model (default: 40)")
    parser.add_argument("--share", type=float, default=1.0, help="part of the variants, drawn at random (default: 1)")
    parser.add_argument("--only", default="", help="variants whose name contains this")
    parser.add_argument("--without", default="\0", help="no variants whose name contains this")
    parser.add_argument("--refusals", action="store_true", help="print what only one of both refuses, too")
    parser.add_argument("--log", type=Path, help="file for every finding as a line of JSON")
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)

    shown = {"difference", "refused", "accepted"} if args.refusals else {"difference"}
    tally: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(args.log.open("w")) if args.log else None
        for family in args.families or FAMILIES:
            out = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            found: Counter[str] = Counter()
            draws = random.Random(f"{family} {args.seed}")
            for base, variant in cases(family, args, out):
                if draws.random() >= args.share:
                    continue
                if args.only not in variant.name or args.without in variant.name:
                    continue
                with tempfile.TemporaryDirectory() as scratch:
                    finding, line = judge(args.moeflux.resolve(), base, variant, Path(scratch))
                found[finding] += 1
                if finding in shown:
                    print(f"{base.name:20} {finding:10} {variant.name}: {line}", flush=True)
                if log:
                    entry = {"base": base.name, "variant": variant.name, "finding": finding, "line": line}
                    log.write(json.dumps(entry | {"config": variant.config}) + "\n")
                    log.flush()
            tally += found
            print(f"{family}: {dict(found)}", flush=True)
    print(f"{sum(tally.values())} variants: {dict(tally)}")
    if tally["difference"]:
        sys.exit(1)


def cases(family: str, args: argparse.Namespace, out: Path) -> Iterator[tuple[Base, Variant]]:
    """All variants of a family."""
    for base in bases(family, args.bases, args.seed, out):
        rng = random.Random(zlib.crc32(base.name.encode()))
        for variant in config_variants.variants(base.config, family, rng, args.pairs):
            yield base, variant
    yield from defaulted(family, args.seed, out)


if __name__ == "__main__":
    main()
