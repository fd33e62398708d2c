#!/usr/bin/env python3
"""Makes layers that draft tokens for the tiny models of the parity tests, and golden logits of them.

    python tools/make_draft_layers.py FIXTURES OUT [NAME ...]

FIXTURES is the folder of the Hugging Face fixtures that `make_tiny_models.py` made. OUT gets one folder a model: the layer's
tensors by the names under which such layers are published (layer.safetensors), and golden.safetensors: `tokens` i32 (T,), `drafted`
i32 (STEPS,), `logits` f32 (STEPS, V).

transformers ignores these layers, so the reference is put together here from the formula of DeepSeek-V3 (2024), section 2.2: entry q
is a linear layer over the norm of the embedding of token q + 1 beside the norm of the model's last hidden state at q, then a decoder
layer, a norm and the model's head. The hidden state is the one after the final norm, as SGLang and vLLM have it. The decoder layer
is transformers' own, as a model of one layer. `logits` are those after the last entry; then of entries made of the token with the
highest one and of the layer's own normed hidden state.
"""

import argparse
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import golden
from tiny_models.weights import NORM_SPREAD, randomise, round_to
from transformers import AutoModelForCausalLM

STEPS = 3
TOKENS = 70
SEED = 5


@dataclass(frozen=True)
class Family:
    """How a family's layer is published."""

    # Keys of a configuration of one such layer.
    config: dict[str, Any]
    # The name of a tensor of the layer by its name below a layer.
    rename: Callable[[str], str]
    # Norms are added to one.
    zero_centred: bool = False
    # Names that others have in these layers.
    names: dict[str, str] = field(default_factory=dict)


def after_the_last(layers: int) -> Callable[[str], str]:
    return lambda name: f"model.layers.{layers}.{name}"


def qwen(name: str) -> str:
    own = {
        "eh_proj.weight": "fc.weight",
        "enorm.weight": "pre_fc_norm_embedding.weight",
        "hnorm.weight": "pre_fc_norm_hidden.weight",
        "shared_head.norm.weight": "norm.weight",
    }
    return f"mtp.{own[name]}" if name in own else f"mtp.layers.0.{name}"


def mimo(name: str) -> str:
    own = {
        "shared_head.norm.weight": "final_layernorm.weight",
        "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
        "self_attn.sinks": "self_attn.attention_sink_bias",
    }
    return f"model.mtp.layers.0.{own.get(name, name)}"


FULL = {"layer_types": ["full_attention"]}
FAMILIES = {
    "deepseek_v3_basic": Family({"first_k_dense_replace": 0}, after_the_last(3)),
    "glm4_moe_groups": Family({"first_k_dense_replace": 0}, after_the_last(4)),
    "qwen3_next_basic": Family(FULL, qwen, zero_centred=True),
    "qwen3_5_moe_text": Family(FULL, qwen, zero_centred=True),
    "mimo_v2_flash_basic": Family({"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]}, mimo),
}


class Layer(torch.nn.Module):
    """What surrounds the decoder layer, and that as a model of one layer."""

    def __init__(self, model: torch.nn.Module, family: Family) -> None:
        super().__init__()
        config = type(model.config)(**{**model.config.to_dict(), "num_hidden_layers": 1, **family.config})
        kinds = {"attn_implementation": "eager", "experts_implementation": "eager"}
        self.one = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **kinds)
        randomise(self.one, SEED)
        round_to(self.one, torch.bfloat16)
        width = config.hidden_size
        random = torch.Generator().manual_seed(SEED)
        self.eps, self.shift = config.rms_norm_eps, float(family.zero_centred)
        self.eh_proj = (torch.randn(width, 2 * width, generator=random) / (2 * width) ** 0.5).bfloat16()
        norms = NORM_SPREAD * (torch.rand(2, width, generator=random) * 2 - 1) + (1 - self.shift)
        self.enorm, self.hnorm = norms.bfloat16()
        self.embedding, self.head = model.get_input_embeddings(), model.get_output_embeddings()

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return normed * (weight.float() + self.shift)

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Normed hidden states (rows, hidden_size) of entries from `hidden` and the tokens that follow."""
        both = torch.cat([self.norm(self.embedding(tokens), self.enorm), self.norm(hidden, self.hnorm)], -1)
        inputs = both @ self.eh_proj.float().T
        inner = self.one.model
        return inner(inputs_embeds=inputs[None], use_cache=False).last_hidden_state[0]

    def tensors(self, family: Family) -> dict[str, torch.Tensor]:
        """By published names."""
        with tempfile.TemporaryDirectory() as folder:
            self.one.to(torch.bfloat16).save_pretrained(folder, save_original_format=True)
            stored = load_file(Path(folder) / "model.safetensors")
        found = {"eh_proj.weight": self.eh_proj, "enorm.weight": self.enorm, "hnorm.weight": self.hnorm}
        for name, tensor in stored.items():
            _, _, rest = name.partition("model.layers.0.")
            if rest:
                found[rest] = tensor
            elif name.endswith("model.norm.weight"):
                found["shared_head.norm.weight"] = tensor
        return {family.rename(name): tensor.contiguous() for name, tensor in found.items()}


def make(name: str, fixtures: Path, out: Path) -> None:
    family = FAMILIES[name]
    model = golden.open_model(fixtures / name)
    layer = Layer(model, family).eval()
    tokens = golden.random_tokens(model.config.vocab_size, TOKENS, SEED)
    with torch.no_grad():
        hidden = model.model(tokens[None], use_cache=False).last_hidden_state[0]
        # The last token is not evaluated yet: the first entry that drafts is made with it.
        hidden, following, drafted, logits = hidden[:-1], tokens[1:], [], []
        for _ in range(STEPS):
            normed = layer(hidden, following)
            logits.append(layer.head(normed[-1]))
            drafted.append(logits[-1].argmax())
            hidden = torch.cat([hidden, normed[-1:]])
            following = torch.cat([following, drafted[-1][None]])
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    found = {"tokens": tokens.int(), "drafted": torch.stack(drafted).int(), "logits": torch.stack(logits)}
    save_file(found, folder / "golden.safetensors")
    save_file(layer.tensors(family), folder / "layer.safetensors", metadata={"format": "pt"})
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{name:24} {size / 1024:4.0f} KiB  logit std {torch.stack(logits).std():.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fixtures", type=Path, help="folder of the Hugging Face fixtures")
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", help="models; all when absent")
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    for name in args.names or FAMILIES:
        make(name, args.fixtures, args.out)


if __name__ == "__main__":
    main()
