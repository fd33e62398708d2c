"""Writes the variants of fixtures' configurations with what transformers makes of them."""

import json
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from . import config_cases, golden
from .config_variants import Config, changed, text_of

# Last rows of logits that are kept: later ones show windows and scaled positions best.
ROWS = 2
DRAWS = 8


def write_variants(fixtures: Path, out: Path, names: list[str]) -> None:
    """Writes `NAME.json`, changes to the text model's configuration by their names, and `NAME.safetensors`, in the same
    order tokens and logits of the last ones."""
    out.mkdir(exist_ok=True)
    for name, rows in config_cases.rows():
        if names and name not in names:
            continue
        base = json.loads((fixtures / name / "config.json").read_text())
        saved = load_file(fixtures / name / "golden.safetensors")
        tokens = torch.from_numpy(saved["tokens"]).long()
        configs, arrays = {}, {}
        for label, change in rows:
            try:
                config = changed(base, change)
            except KeyError:
                continue
            if config == base:
                continue
            found = golden_of(fixtures / name, config, tokens)
            if isinstance(found, str):
                print(f"{name:24} {label}: {found}", flush=True)
                continue
            number = len(configs)
            configs[label] = difference(text_of(base), text_of(config))
            arrays[f"{number}.tokens"], arrays[f"{number}.logits"] = found
        (out / f"{name}.json").write_text(json.dumps(configs, indent=1) + "\n")
        save_file(arrays, out / f"{name}.safetensors")
        print(f"{name:24} {len(configs)} of {len(rows)}", flush=True)


def difference(base: Config, config: Config) -> Config:
    """Keys that are set, and keys that are removed."""
    return {
        "set": {key: value for key, value in config.items() if key not in base or base[key] != value},
        "unset": [key for key in base if key not in config],
    }


def golden_of(fixture: Path, config: dict, tokens: torch.Tensor) -> tuple[np.ndarray, np.ndarray] | str:
    """Tokens i32 (T,) and logits (ROWS, vocab_size) of the last ones, or why there are none that the fixture's weights
    alone decide. Where a routing decision is close to a tie, other tokens are drawn."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for file in fixture.glob("model*.safetensors*"):
            os.symlink(file.resolve(), folder / file.name)
        (folder / "config.json").write_text(json.dumps(config))
        try:
            model, found = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=torch.float32,
                attn_implementation="eager",
                experts_implementation="eager",
                output_loading_info=True,
            )
            for kind in ("missing_keys", "mismatched_keys"):
                if found[kind]:
                    return f"{kind}: {sorted(map(str, found[kind]))[0]}"
            for draw in range(DRAWS):
                if golden.router_margin(model.eval(), tokens) >= golden.MIN_ROUTER_MARGIN:
                    break
                tokens = golden.random_tokens(model.config.get_text_config().vocab_size, len(tokens), draw)
            else:
                return "a routing decision close to a tie on every draw of tokens"
            logits = golden.logits_of(model, tokens)[-ROWS:]
        except Exception as error:
            return f"{type(error).__name__}: {str(error).strip()[:120]}"
    if not logits.isfinite().all():
        return "logits that are not finite"
    return tokens.numpy().astype(np.int32), np.ascontiguousarray(logits.numpy())
