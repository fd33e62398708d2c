#!/usr/bin/env python3
"""Makes a checkpoint of random weights whose own layer foresees what it says: for measuring what drafting costs and can gain.

    python tools/make_foreseen_model.py TOKENIZER OUT [--layers N] [--hidden N] [--experts N]

TOKENIZER is a tokenizer.json, whose vocabulary is filled up. OUT becomes a folder in MLX's 4-bit format of the shape of
Qwen3-30B-A3B with fewer layers, as architecture `glm4_moe`, whose checkpoints have such layers.

What attention and feed-forward layers yield is multiplied by zero, so that the next token depends on the last one alone, and the
layer that drafts passes the embedding of that on: it is right whenever the likeliest token is chosen, but for ties. All is computed
as with other weights. With a temperature, drafts are right as often as the likeliest token is drawn. Routers see random
rows, and choose experts uniformly.
"""

import argparse
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

GROUP = 64
WORDS = 1 << 26
# Standard deviation of logits.
SPREAD = 20.0
# That of 0 to 15, uniformly distributed.
UNIFORM = math.sqrt((16**2 - 1) / 12)

Tensor = tuple[str, str, tuple[int, ...], np.ndarray]


def bf16(value: float, shape: tuple[int, ...]) -> np.ndarray:
    bits = np.float32(value).view(np.uint32)
    return np.full(shape, (int(bits) + 0x8000) >> 16, np.uint16)


class Writer:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.random = np.random.default_rng(1).integers(0, 1 << 32, WORDS, np.uint32)
        self.at = 0

    def words(self, count: int) -> np.ndarray:
        """Random words, which are reused from other places each time."""
        assert count <= WORDS // 2
        self.at = (self.at + 999_983) % (WORDS // 2)
        return self.random[self.at : self.at + count]

    def affine(self, module: str, shape: tuple[int, ...], spread: float = 1.0) -> Iterator[Tensor]:
        *outer, cols = shape
        scale = spread / (UNIFORM * math.sqrt(cols))
        words, groups = (*outer, cols // 8), (*outer, cols // GROUP)
        yield f"{module}.weight", "U32", words, self.words(math.prod(words))
        yield f"{module}.scales", "BF16", groups, bf16(scale, groups)
        yield f"{module}.biases", "BF16", groups, bf16(-7.5 * scale, groups)

    def passing(self, module: str, width: int) -> Iterator[Tensor]:
        """The left half of rows as it is."""
        words = np.zeros((width, 2 * width // 8), np.uint32)
        columns = np.arange(width)
        words[columns, columns // 8] = np.left_shift(1, 4 * (columns % 8)).astype(np.uint32)
        groups = (width, 2 * width // GROUP)
        yield f"{module}.weight", "U32", words.shape, words
        yield f"{module}.scales", "BF16", groups, bf16(1.0, groups)
        yield f"{module}.biases", "BF16", groups, bf16(0.0, groups)

    def vector(self, name: str, width: int, value: float = 1.0) -> Tensor:
        return name, "BF16", (width,), bf16(value, (width,))

    def layer(self, number: int) -> Iterator[Tensor]:
        a, name = self.args, f"model.layers.{number}"
        for norm in ["input_layernorm", "post_attention_layernorm"]:
            yield self.vector(f"{name}.{norm}.weight", a.hidden)
        heads, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
        for projection, rows in [("q_proj", heads), ("k_proj", kv), ("v_proj", kv)]:
            yield from self.affine(f"{name}.self_attn.{projection}", (rows, a.hidden))
        for norm in ["q_norm", "k_norm"]:
            yield self.vector(f"{name}.self_attn.{norm}.weight", a.head_dim)
        yield from self.affine(f"{name}.self_attn.o_proj", (a.hidden, heads), 0.0)
        gate = np.random.default_rng(number).standard_normal((a.experts, a.hidden)).astype(np.float32)
        yield f"{name}.mlp.gate.weight", "F32", gate.shape, gate / math.sqrt(a.hidden)
        yield f"{name}.mlp.gate.e_score_correction_bias", "F32", (a.experts,), np.zeros(a.experts, np.float32)
        for module, outer in [("switch_mlp", (a.experts,)), ("shared_experts", ())]:
            for projection in ["gate_proj", "up_proj"]:
                yield from self.affine(f"{name}.mlp.{module}.{projection}", (*outer, a.inner, a.hidden))
            yield from self.affine(f"{name}.mlp.{module}.down_proj", (*outer, a.hidden, a.inner), 0.0)

    def tensors(self) -> Iterator[Tensor]:
        a = self.args
        yield from self.affine("model.embed_tokens", (a.vocab, a.hidden), math.sqrt(a.hidden))
        yield from self.affine("lm_head", (a.vocab, a.hidden), SPREAD)
        yield self.vector("model.norm.weight", a.hidden)
        for number in range(a.layers + 1):
            yield from self.layer(number)
        name = f"model.layers.{a.layers}"
        yield from self.passing(f"{name}.eh_proj", a.hidden)
        for norm in ["enorm", "hnorm", "shared_head.norm"]:
            yield self.vector(f"{name}.{norm}.weight", a.hidden)

    def write(self) -> None:
        header, end = {}, 0
        for name, dtype, shape, values in self.tensors():
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + values.nbytes]}
            end += values.nbytes
        self.at = 0
        text = json.dumps({"__metadata__": {"format": "mlx"}, **header}).encode()
        text += b" " * (-len(text) % 8)
        with (self.args.out / "model.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for *_, values in self.tensors():
                file.write(np.ascontiguousarray(values).data)

    def config(self) -> dict[str, object]:
        a = self.args
        return {
            "model_type": "glm4_moe",
            "attention_bias": False,
            "use_qk_norm": True,
            "vocab_size": a.vocab,
            "hidden_size": a.hidden,
            "intermediate_size": a.inner,
            "moe_intermediate_size": a.inner,
            "num_hidden_layers": a.layers,
            "num_nextn_predict_layers": 1,
            "first_k_dense_replace": 0,
            "num_attention_heads": a.heads,
            "num_key_value_heads": a.kv_heads,
            "head_dim": a.head_dim,
            "n_routed_experts": a.experts,
            "num_experts_per_tok": a.chosen,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "partial_rotary_factor": 0.5,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": False,
            "quantization": {"group_size": GROUP, "bits": 4},
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("out", type=Path)
    sizes = {"layers": 32, "hidden": 2048, "experts": 128, "chosen": 8, "inner": 768}
    sizes |= {"heads": 32, "kv-heads": 4, "head-dim": 128, "vocab": 65_536}
    for size, value in sizes.items():
        parser.add_argument(f"--{size}", type=int, default=value)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = json.loads(args.tokenizer.read_text())
    tokenizer["added_tokens"] = []
    tokenizer["model"]["merges"] = []
    vocabulary = tokenizer["model"]["vocab"]
    ids = set(vocabulary.values())
    vocabulary |= {f"token{id}": id for id in range(args.vocab) if id not in ids}
    (args.out / "tokenizer.json").write_text(json.dumps(tokenizer))
    writer = Writer(args)
    (args.out / "config.json").write_text(json.dumps(writer.config(), indent=2))
    writer.write()


if __name__ == "__main__":
    main()
