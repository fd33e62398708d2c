#!/usr/bin/env python3
"""Makes the tiny checkpoints of Bailing MoE, which transformers does not have, with golden logits of mlx-lm in float32.

    python tools/make_bailing_models.py OUT [--llama-cpp SOURCE]

With llama.cpp's source tree, its converter makes GGUF files of two of them, below OUT/gguf.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model
from safetensors.numpy import save_file

N_TOKENS = 101
BASE = dict(
    model_type="bailing_moe",
    vocab_size=53,
    hidden_size=24,
    intermediate_size=18,
    max_position_embeddings=512,
    moe_intermediate_size=7,
    num_experts=8,
    num_shared_experts=1,
    norm_topk_prob=True,
    num_attention_heads=4,
    num_experts_per_tok=3,
    num_hidden_layers=3,
    num_key_value_heads=2,
    rms_norm_eps=1e-5,
    rope_theta=90.0,
    first_k_dense_replace=1,
)
CASES: list[tuple[str, int, dict[str, Any]]] = [
    # As Ling 1.5 is published.
    ("bailing_moe_basic", 1, dict(first_k_dense_replace=0, num_hidden_layers=2)),
    # As Ling 2.0: norms of queries and keys, a part of a head that rotates, groups, a bias for choosing; and biases and
    # embeddings that are the head too.
    (
        "bailing_moe_groups",
        2,
        dict(use_qk_norm=True, partial_rotary_factor=0.67, score_function="sigmoid")
        | dict(moe_router_enable_expert_bias=True, n_group=4, topk_group=2, routed_scaling_factor=2.5)
        | dict(use_qkv_bias=True, tie_word_embeddings=True),
    ),
    # Weights that are not normalised, two shared experts of a width of their own, a number of channels that rotate.
    (
        "bailing_moe_odd",
        3,
        dict(norm_topk_prob=False, num_shared_experts=2, moe_shared_expert_intermediate_size=5, rotary_dim=4)
        | dict(rope_scaling={"type": "linear", "factor": 3.0}),
    ),
]

# GGUF files: of which checkpoint, as which class, with which keys that the converter wants besides.
GGUF_CASES = [
    ("bailingmoe_f32", "bailing_moe_basic", "BailingMoeForCausalLM", dict(head_dim=6)),
    ("bailingmoe2_f32", "bailing_moe_groups", "BailingMoeV2ForCausalLM", dict(head_dim=6, moe_shared_expert_intermediate_size=7)),
]
# Files without a tokenizer: source tree, folder, file.
CONVERT = """
import logging, sys
from pathlib import Path
source, folder, out = sys.argv[1:]
sys.path[:0] = [source, source + "/gguf-py"]
logging.disable(logging.CRITICAL)
import gguf, torch
from conversion import ModelBase, ModelType, get_model_architecture, get_model_class
name = get_model_architecture(ModelBase.load_hparams(Path(folder), False), ModelType.TEXT)
converter = get_model_class(name)
converter.set_vocab = lambda self: None
converter.no_mtp = True
with torch.inference_mode():
    converter(Path(folder), gguf.LlamaFileType.ALL_F32, Path(out), eager=True).write()
"""


def weights(config: dict[str, Any], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random weights under published names; matrices keep the scale of their input."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = hidden // heads
    found: dict[str, np.ndarray] = {}

    def matrix(name: str, rows: int, cols: int, gain: float = 1.2) -> None:
        found[f"{name}.weight"] = (rng.standard_normal((rows, cols)) * gain / np.sqrt(cols)).astype(np.float32)

    def norm(name: str, width: int) -> None:
        found[f"{name}.weight"] = (1 + 0.3 * rng.uniform(-1, 1, width)).astype(np.float32)

    def mlp(module: str, width: int) -> None:
        matrix(f"{module}.gate_proj", width, hidden)
        matrix(f"{module}.up_proj", width, hidden)
        matrix(f"{module}.down_proj", hidden, width)

    matrix("model.word_embeddings", config["vocab_size"], hidden, 2.4)
    if not config.get("tie_word_embeddings"):
        matrix("lm_head", config["vocab_size"], hidden)
    norm("model.norm", hidden)
    for layer in range(config["num_hidden_layers"]):
        base = f"model.layers.{layer}"
        norm(f"{base}.input_layernorm", hidden)
        norm(f"{base}.post_attention_layernorm", hidden)
        joint = (heads + 2 * config["num_key_value_heads"]) * head_dim
        matrix(f"{base}.attention.query_key_value", joint, hidden)
        matrix(f"{base}.attention.dense", hidden, heads * head_dim)
        if config.get("use_qkv_bias"):
            bias = (rng.standard_normal(joint) * 0.3).astype(np.float32)
            found[f"{base}.attention.query_key_value.bias"] = bias
        if config.get("use_qk_norm"):
            norm(f"{base}.attention.query_layernorm", head_dim)
            norm(f"{base}.attention.key_layernorm", head_dim)
        if layer < config["first_k_dense_replace"]:
            mlp(f"{base}.mlp", config["intermediate_size"])
            continue
        matrix(f"{base}.mlp.gate", config["num_experts"], hidden, 2.0)
        if config.get("moe_router_enable_expert_bias"):
            # mlx-lm has zero for experts of other groups: below all that can be chosen.
            bias = rng.uniform(0, 0.4, config["num_experts"]).astype(np.float32)
            found[f"{base}.mlp.gate.expert_bias"] = bias
        for expert in range(config["num_experts"]):
            mlp(f"{base}.mlp.experts.{expert}", config["moe_intermediate_size"])
        each = config.get("moe_shared_expert_intermediate_size") or config["moe_intermediate_size"]
        mlp(f"{base}.mlp.shared_experts", each * config["num_shared_experts"])
    return found


def write(out: Path, name: str, seed: int, changes: dict[str, Any]) -> None:
    """Writes `out/name`: configuration, weights, tokens i32 (T,) and logits f32 (T, V)."""
    rng = np.random.default_rng(seed)
    config = BASE | changes
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights(config, rng), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    model, _ = load_model(folder)
    tokens = rng.integers(0, config["vocab_size"], N_TOKENS).astype(np.int32)
    logits = np.array(model(mx.array(tokens)[None])[0].astype(mx.float32))
    save_file({"tokens": tokens, "logits": logits}, folder / "golden.safetensors")


def convert(source: Path, out: Path) -> None:
    """Writes the GGUF files below `out`/gguf with the goldens of the checkpoints that they are made from."""
    for name, checkpoint, architecture, keys in GGUF_CASES:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / checkpoint
            shutil.copytree(out / checkpoint, folder)
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(config | {"architectures": [architecture]} | keys))
            to = out / "gguf" / name
            to.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-c", CONVERT, source, folder, to / "model.gguf"]
            subprocess.run(command, check=True, capture_output=True)
            shutil.copy(out / checkpoint / "golden.safetensors", to)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--llama-cpp", type=Path, help="llama.cpp's source tree, for GGUF files")
    args = parser.parse_args()
    for name, seed, changes in CASES:
        write(args.out, name, seed, changes)
    if args.llama_cpp:
        convert(args.llama_cpp, args.out)


if __name__ == "__main__":
    main()
