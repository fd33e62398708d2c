#!/usr/bin/env python3
"""Makes tiny checkpoints of families that transformers does not have: DeepSeekMoE and Klear with golden logits of mlx-lm in float32,
and Arctic, Maple and MiniCPM-MoE with those of llama.cpp.

    python tools/make_outside_models.py OUT [--llama-cpp SOURCE] [--random COUNT]

OUT/hf has them as published, OUT/mlx what mlx-lm quantises, with the logits of what that dequantises. With llama.cpp's source tree
and llama-cpp-python, there are Arctic's, Maple's and MiniCPM-MoE's and files that its converter makes, below OUT/gguf. With --random there are as many of
random configurations below OUT/random instead.
"""

import argparse
import contextlib
import io
import json
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
from make_bailing_models import CONVERT, N_TOKENS
from mlx.utils import tree_map_with_path
from mlx_lm.utils import load_model
from safetensors.numpy import load_file, save_file
from tiny_models.mlx_files import KEPT, TOKENIZER_SIZE
from tiny_models.vocabularies import save_byte_level_bpe

COMMON = dict(
    vocab_size=53,
    hidden_size=24,
    intermediate_size=18,
    max_position_embeddings=512,
    moe_intermediate_size=7,
    num_attention_heads=4,
    num_experts_per_tok=3,
    num_key_value_heads=2,
    rms_norm_eps=1e-5,
    rope_theta=90.0,
)
DEEPSEEK = COMMON | dict(
    model_type="deepseek",
    architectures=["DeepseekForCausalLM"],
    num_hidden_layers=3,
    n_routed_experts=8,
    n_shared_experts=2,
    first_k_dense_replace=1,
    moe_layer_freq=1,
    norm_topk_prob=False,
    scoring_func="softmax",
    attention_bias=False,
)
KLEAR = COMMON | dict(
    model_type="Klear",
    architectures=["KlearMoeForCausalLM"],
    num_hidden_layers=3,
    num_experts=8,
    n_shared_experts=1,
    decoder_sparse_step=1,
    mlp_only_layers=[1],
    norm_topk_prob=True,
    attention_bias=False,
)
ARCTIC = COMMON | dict(
    model_type="arctic",
    architectures=["ArcticForCausalLM"],
    num_hidden_layers=2,
    intermediate_size=9,
    num_local_experts=5,
    num_experts_per_tok=2,
    moe_layer_frequency=1,
    use_residual=True,
    parallel_attn_mlp_res=True,
)
del ARCTIC["moe_intermediate_size"]
MAPLE = COMMON | dict(
    model_type="maple",
    architectures=["MapleForCausalLM"],
    num_hidden_layers=4,
    head_dim=10,
    num_experts=6,
    partial_rotary_factor=0.6,
    hidden_act="silu",
    norm_topk_prob=True,
    nope_on_global_attention=True,
    sliding_window=9,
    layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
)
MINICPM = COMMON | dict(
    model_type="minicpm",
    architectures=["MiniCPMForCausalLM"],
    num_hidden_layers=3,
    intermediate_size=9,
    num_experts=6,
    num_experts_per_tok=2,
    scale_emb=3,
    scale_depth=1.4,
    dim_model_base=8,
    hidden_act="silu",
    tie_word_embeddings=False,
)
del MINICPM["moe_intermediate_size"]
CASES: list[tuple[str, int, dict[str, Any]]] = [
    # As published.
    ("deepseek_basic", 1, DEEPSEEK),
    # Biases, dense layers between, rotation stretched.
    (
        "deepseek_biases",
        2,
        DEEPSEEK
        | dict(attention_bias=True, moe_layer_freq=2, first_k_dense_replace=0, n_shared_experts=1)
        | dict(rope_scaling={"type": "linear", "factor": 3.0}),
    ),
    ("klear_basic", 3, KLEAR),
    # Weights as they are, two shared experts, dense layers between.
    (
        "klear_odd",
        4,
        KLEAR
        | dict(norm_topk_prob=False, n_shared_experts=2, decoder_sparse_step=2, mlp_only_layers=[])
        | dict(attention_bias=True, num_hidden_layers=4),
    ),
]
# MLX folders, wide enough for groups of 32; mlx-lm takes 64 for Klear's routers.
WIDE = dict(hidden_size=32, intermediate_size=32, moe_intermediate_size=32, num_experts_per_tok=2)
MLX_CASES = [
    ("deepseek_4bit", 5, DEEPSEEK | WIDE | dict(n_shared_experts=1)),
    ("klear_4bit", 6, KLEAR | WIDE | dict(num_hidden_layers=2, hidden_size=64, num_experts=4)),
]


def weights(config: dict[str, Any], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random weights under published names; matrices keep the scale of their input."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    klear, maple, minicpm = (config["model_type"] == name for name in ("Klear", "maple", "minicpm"))
    head_dim = config.get("head_dim") or hidden // heads
    experts = next(config[key] for key in ("num_experts", "n_routed_experts", "num_local_experts") if key in config)
    arctic = config["model_type"] == "arctic"
    found: dict[str, np.ndarray] = {}

    def matrix(name: str, rows: int, cols: int, gain: float = 1.2) -> None:
        found[f"{name}.weight"] = (rng.standard_normal((rows, cols)) * gain / np.sqrt(cols)).astype(np.float32)

    def norm(name: str, width: int) -> None:
        found[f"{name}.weight"] = (1 + 0.3 * rng.uniform(-1, 1, width)).astype(np.float32)

    def bias(name: str, width: int) -> None:
        found[f"{name}.bias"] = (rng.standard_normal(width) * 0.3).astype(np.float32)

    def mlp(module: str, width: int) -> None:
        names = ("w1", "w3", "w2") if arctic or minicpm else ("gate_proj", "up_proj", "down_proj")
        matrix(f"{module}.{names[0]}", width, hidden)
        matrix(f"{module}.{names[1]}", width, hidden)
        matrix(f"{module}.{names[2]}", hidden, width)

    def is_dense(layer: int) -> bool:
        if maple or minicpm:
            return False
        if klear:
            return layer in config["mlp_only_layers"] or (layer + 1) % config["decoder_sparse_step"] != 0
        return layer < config["first_k_dense_replace"] or layer % config["moe_layer_freq"] != 0

    matrix("model.embed_tokens", config["vocab_size"], hidden, 2.4)
    matrix("lm_head", config["vocab_size"], hidden)
    norm("model.norm", hidden)
    for layer in range(config["num_hidden_layers"]):
        base = f"model.layers.{layer}"
        norm(f"{base}.input_layernorm", hidden)
        norm(f"{base}.post_attention_layernorm", hidden)
        wide, narrow = heads * head_dim, config["num_key_value_heads"] * head_dim
        shapes = {"q": (wide, hidden), "k": (narrow, hidden), "v": (narrow, hidden), "o": (hidden, wide)}
        for name, (rows, cols) in shapes.items():
            matrix(f"{base}.self_attn.{name}_proj", rows, cols)
            if config.get("attention_bias"):
                bias(f"{base}.self_attn.{name}_proj", rows)
        if klear or maple:
            norm(f"{base}.self_attn.q_norm", head_dim)
            norm(f"{base}.self_attn.k_norm", head_dim)
        if arctic:
            norm(f"{base}.residual_layernorm", hidden)
            mlp(f"{base}.residual_mlp", hidden)
            matrix(f"{base}.block_sparse_moe.gate", experts, hidden, 2.0)
            for expert in range(experts):
                mlp(f"{base}.block_sparse_moe.experts.{expert}", config["intermediate_size"])
            continue
        if is_dense(layer):
            mlp(f"{base}.mlp", config["intermediate_size"])
            continue
        matrix(f"{base}.mlp.gate", experts, hidden, 2.0)
        if klear:
            found[f"{base}.mlp.expert_bias"] = rng.uniform(-0.2, 0.2, experts).astype(np.float32)
            matrix(f"{base}.mlp.coefficient", 2, hidden, 2.0)
            bias(f"{base}.mlp.coefficient", 2)
        for expert in range(experts):
            mlp(f"{base}.mlp.experts.{expert}", config["intermediate_size" if minicpm else "moe_intermediate_size"])
            # Some of what is multiplied is beyond its limit.
            for part in ("gate_proj", "up_proj") if maple else ():
                found[f"{base}.mlp.experts.{expert}.{part}.weight"] *= 4
        if config.get("n_shared_experts"):
            mlp(f"{base}.mlp.shared_experts", config["moe_intermediate_size"] * config["n_shared_experts"])
    return found


def golden(folder: Path, config: dict[str, Any], rng: np.random.Generator, count: int = N_TOKENS) -> None:
    """Adds tokens i32 (T,) and logits f32 (T, V)."""
    model, _ = load_model(folder)
    # Scales and biases as they are, computing in float32.
    model.update(tree_map_with_path(lambda _, a: a if a.dtype == mx.uint32 else a.astype(mx.float32), model.parameters()))
    tokens = rng.integers(0, config["vocab_size"], count).astype(np.int32)
    logits = np.array(model(mx.array(tokens)[None])[0].astype(mx.float32))
    save_file({"tokens": tokens, "logits": logits}, folder / "golden.safetensors")


def write(folder: Path, seed: int, config: dict[str, Any]) -> None:
    """Writes `folder`: configuration, weights, golden."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights(config, rng), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    golden(folder, config, rng)


def quantise(folder: Path, seed: int, config: dict[str, Any]) -> None:
    """Writes `folder` as mlx-lm quantises a checkpoint."""
    rng = np.random.default_rng(seed)
    config = config | dict(vocab_size=TOKENIZER_SIZE)
    with tempfile.TemporaryDirectory() as scratch:
        plain = Path(scratch) / "hf"
        plain.mkdir()
        save_file(weights(config, rng), plain / "model.safetensors", metadata={"format": "pt"})
        (plain / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_byte_level_bpe(plain, TOKENIZER_SIZE)
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.redirect_stdout(io.StringIO()):
            mlx_lm.convert(str(plain), mlx_path=folder, quantize=True, q_group_size=32, q_bits=4, dtype="bfloat16")
    for file in folder.iterdir():
        if file.name not in KEPT:
            file.unlink()
    golden(folder, config, rng, 40)


def drawn(seed: int) -> dict[str, Any]:
    """A random configuration of DeepSeekMoE or Klear."""
    draw = random.Random(seed)
    kv_heads, groups = draw.choice([1, 2, 3]), draw.choice([1, 2, 4])
    heads = kv_heads * groups
    experts = draw.choice([2, 3, 5, 8, 12])
    common = dict(
        vocab_size=draw.randint(20, 90),
        hidden_size=heads * draw.choice([2, 4, 6, 10]),
        intermediate_size=draw.randint(3, 40),
        moe_intermediate_size=draw.randint(2, 20),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        num_hidden_layers=draw.randint(1, 4),
        num_experts_per_tok=draw.randint(1, experts),
        rms_norm_eps=draw.choice([1e-6, 1e-5, 1e-3]),
        rope_theta=draw.choice([50.0, 1e4, 5e5]),
        attention_bias=draw.random() < 0.4,
    )
    if draw.random() < 0.5:
        own = dict(n_routed_experts=experts, n_shared_experts=draw.choice([None, 1, 2, 3]))
        own |= dict(first_k_dense_replace=draw.choice([0, 0, 1]), moe_layer_freq=draw.choice([1, 1, 2]))
        own |= dict(rope_scaling=draw.choice([None, {"type": "linear", "factor": 2.5}]))
        if own["first_k_dense_replace"] >= common["num_hidden_layers"]:
            own["first_k_dense_replace"] = 0
        return DEEPSEEK | common | own
    step = draw.choice([1, 1, 2])
    common["num_hidden_layers"] = max(common["num_hidden_layers"], step)
    own = dict(num_experts=experts, n_shared_experts=draw.choice([1, 2]), decoder_sparse_step=step)
    dense = [layer for layer in range(common["num_hidden_layers"] - 1) if draw.random() < 0.3 and step == 1]
    return KLEAR | common | own | dict(mlp_only_layers=dense, norm_topk_prob=draw.random() < 0.5)


def drawn_arctic(seed: int) -> dict[str, Any]:
    """A random configuration of Arctic."""
    draw = random.Random(seed)
    kv_heads, groups, experts = draw.choice([1, 2, 3]), draw.choice([1, 2, 4]), draw.choice([2, 3, 5, 8, 12])
    return ARCTIC | dict(
        vocab_size=draw.randint(20, 90),
        hidden_size=kv_heads * groups * draw.choice([2, 4, 6, 10]),
        intermediate_size=draw.randint(3, 40),
        num_attention_heads=kv_heads * groups,
        num_key_value_heads=kv_heads,
        num_hidden_layers=draw.randint(1, 4),
        num_local_experts=experts,
        rms_norm_eps=draw.choice([1e-6, 1e-5, 1e-3]),
        rope_theta=draw.choice([50.0, 1e4, 5e5]),
    )


def drawn_maple(seed: int) -> dict[str, Any]:
    """A random configuration of Maple."""
    draw = random.Random(seed)
    kv_heads, groups, experts = draw.choice([1, 2, 3]), draw.choice([1, 2, 4]), draw.choice([2, 3, 5, 8, 12])
    layers = draw.randint(1, 5)
    return MAPLE | dict(
        vocab_size=draw.randint(20, 90),
        hidden_size=draw.randint(5, 60),
        moe_intermediate_size=draw.randint(2, 20),
        num_attention_heads=kv_heads * groups,
        num_key_value_heads=kv_heads,
        num_hidden_layers=layers,
        head_dim=2 * draw.randint(2, 12),
        partial_rotary_factor=draw.choice([0.5, 1.0]) if draw.random() < 0.5 else 1.0,
        num_experts=experts,
        num_experts_per_tok=draw.randint(1, experts),
        sliding_window=draw.randint(1, 40),
        layer_types=[draw.choice(["sliding_attention", "full_attention"]) for _ in range(layers)],
        rms_norm_eps=draw.choice([1e-6, 1e-5, 1e-3]),
        rope_theta=draw.choice([50.0, 1e4, 5e5]),
    )


def stack_experts(folder: Path) -> None:
    """Gives the checkpoint's experts a tensor a projection: the converter knows those of MiniCPM so."""
    stacks: dict[str, list[np.ndarray]] = {}
    rest = {}
    names = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    for name, tensor in sorted(load_file(folder / "model.safetensors").items(), key=lambda item: len(item[0])):
        base, found, expert = name.partition(".mlp.experts.")
        if found:
            stacks.setdefault(f"{base}.mlp.experts.{names[expert.split('.')[1]]}.weight", []).append(tensor)
        else:
            rest[name] = tensor
    save_file(rest | {name: np.stack(all_) for name, all_ in stacks.items()}, folder / "model.safetensors")


def convert(source: Path, folder: Path, to: Path) -> None:
    """Writes the GGUF file of the checkpoint in `folder`."""
    to.mkdir(parents=True, exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] == "minicpm":
        with tempfile.TemporaryDirectory() as scratch:
            copy = shutil.copytree(folder, Path(scratch) / "hf")
            stack_experts(copy)
            (copy / "config.json").write_text((copy / "config.json").read_text().replace('"minicpm"', '"stacked"'))
            return convert(source, copy, to)
    vocabulary = "self._set_vocab_none()"
    if "MiniCPMForCausalLM" in config["architectures"]:
        vocabulary = f"({vocabulary}, self.gguf_writer.add_vocab_size(self.hparams['vocab_size']))"
    text = CONVERT.replace("lambda self: None", f"lambda self: {vocabulary}")
    subprocess.run([sys.executable, "-c", text, source, folder, to / "model.gguf"], check=True, capture_output=True)


def write_of_llama_cpp(source: Path, seed: int, config: dict[str, Any], folder: Path, to: Path) -> None:
    """Writes `folder` and of it the GGUF file in `to`, both with the logits that llama.cpp computes from that file."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights(config, rng), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    convert(source, folder, to)
    tokens = rng.integers(0, config["vocab_size"], N_TOKENS).astype(np.int32)
    peer = Path(__file__).with_name("tiny_models") / "llama_cpp_peer.py"
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / "logits.npy"
        command = [sys.executable, peer, "logits", to / "model.gguf", json.dumps(tokens.tolist()), made, "f32"]
        subprocess.run(command, check=True)
        logits = np.load(made).astype(np.float32)
    for place in (folder, to):
        save_file({"tokens": tokens, "logits": logits}, place / "golden.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--llama-cpp", type=Path, help="llama.cpp's source tree, for GGUF files")
    parser.add_argument("--random", type=int, help="how many of random configurations")
    args = parser.parse_args()
    if args.random:
        for seed in range(args.random):
            write(args.out / "random" / str(seed), seed, drawn(seed))
            for name, own in (("arctic", drawn_arctic), ("maple", drawn_maple)) if args.llama_cpp and seed % 4 == 0 else ():
                folders = [args.out / kind / f"{name}_{seed}" for kind in ("random", "random_gguf")]
                write_of_llama_cpp(args.llama_cpp, seed, own(seed), *folders)
        return
    for name, seed, config in CASES:
        write(args.out / "hf" / name, seed, config)
    for name, seed, config in MLX_CASES:
        quantise(args.out / "mlx" / name, seed, config)
    if args.llama_cpp:
        of_deepseek = args.out / "hf" / "deepseek_basic", args.out / "gguf" / "deepseek_f32"
        convert(args.llama_cpp, *of_deepseek)
        shutil.copy(of_deepseek[0] / "golden.safetensors", of_deepseek[1])
        of_arctic = args.out / "hf" / "arctic_basic", args.out / "gguf" / "arctic_f32"
        write_of_llama_cpp(args.llama_cpp, 7, ARCTIC, *of_arctic)
        of_maple = args.out / "hf" / "maple_basic", args.out / "gguf" / "maple_f32"
        write_of_llama_cpp(args.llama_cpp, 8, MAPLE, *of_maple)
        of_minicpm = args.out / "hf" / "minicpm_basic", args.out / "gguf" / "minicpm_f32"
        write_of_llama_cpp(args.llama_cpp, 9, MINICPM, *of_minicpm)


if __name__ == "__main__":
    main()
