#!/usr/bin/env python3
"""Says which products int8 activations cost accuracy in, and how much of it comes from other choices of experts.

    python tools/int8_by_operation.py [--layers N] [--prompts N] [--tokens N] [--seed N] [FAMILY ...]

Random models of the families in `SHAPES`, weights rounded to Q8_0, run by transformers in float32. The inputs of products with
quantised weights are rounded as moeflux rounds them: integers up to 127 with a scale for every 32 columns. Routers, what
is multiplied in f32 anyway, keys and values stay exact. Rows: all products rounded; all but those of one kind; then
other roundings of the same inputs: one scale for 256 columns, bf16, f16, two int8 terms. Columns: the KL divergence from the exact run
in nats (mean with standard error, median), the share of choices of experts that differ, and mean and median once more where
every token keeps the experts and weights of the exact run.
"""

import argparse
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from tiny_models.hf_files import build_model
from tiny_models.weights import round_to_q8_0
from torch.nn import functional
from torch.overrides import TorchFunctionMode

Rounding = Callable[[torch.Tensor], torch.Tensor]

COMMON = {
    "vocab_size": 304,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 292,
}
ROPE = {"rope_type": "default", "rope_theta": 150000.0}
# Repeated as often as there are layers with experts.
NEMOTRON_LAYERS = ("linear_attention", "moe", "linear_attention", "moe", "full_attention", "moe")


def shapes(layers: int) -> dict[str, dict]:
    """Configurations of as many layers with experts."""
    blocks = [kind for i in range(layers) for kind in NEMOTRON_LAYERS[2 * (i % 3) :][:2]]
    return {
        "qwen3_moe": COMMON
        | {"num_hidden_layers": layers, "num_experts": 16, "moe_intermediate_size": 256, "rope_parameters": ROPE}
        | {"norm_topk_prob": True, "intermediate_size": 256},
        "gpt_oss": COMMON
        | {"num_hidden_layers": layers, "num_local_experts": 16, "intermediate_size": 256, "sliding_window": 32}
        | {"rope_parameters": ROPE},
        "nemotron_h": COMMON
        | {"layers_block_type": blocks, "n_routed_experts": 16, "moe_intermediate_size": 256, "ssm_state_size": 64}
        | {"moe_shared_expert_intermediate_size": 512, "mamba_num_heads": 16, "mamba_head_dim": 32, "n_groups": 4}
        | {"chunk_size": 16, "routed_scaling_factor": 2.5, "rescale_prenorm_residual": False, "time_step_min": 1e-9},
    }


# Names of modules, and 0 or 1 for the first or the second product within experts.
KINDS = {
    "queries, keys, values": r"\.[qkv]_proj$",
    "output of attention": r"\.o_proj$",
    "into state space": r"\.in_proj$",
    "out of state space": r"\.out_proj$",
    "into and out of state space": r"\.(in|out)_proj$",
    "shared expert": r"shared_experts\.",
    "experts' first": r"\.experts 0$",
    "experts' down": r"\.experts 1$",
    "head": r"^lm_head$",
}


def int8(columns: int = 32) -> Rounding:
    """To integers up to 127, with a scale for as many columns."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        blocks = x.unflatten(-1, (-1, min(columns, x.shape[-1])))
        scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
        return ((blocks / scale).round() * scale).flatten(-2)

    return rounded


def two_terms(x: torch.Tensor) -> torch.Tensor:
    """The value rounded, and what is left of it rounded again."""
    first = int8()(x)
    return first + int8()(x - first)


class Rounded(TorchFunctionMode):
    """Rounds the inputs of products whose name `chosen` knows; keeps or replaces what experts are called with."""

    def __init__(self, rounding: Rounding | None, chosen: Callable[[str], bool], routing: list | None) -> None:
        super().__init__()
        self.rounding, self.chosen, self.routing = rounding, chosen, routing
        self.inside: str | None = None
        self.calls = 0
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        product = func in (functional.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
        if product and self.inside is not None and self.rounding:
            name = self.inside
            if name.endswith("experts"):
                name = f"{name} {self.calls % 2}"
                self.calls += 1
            if self.chosen(name):
                args = (self.rounding(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))

    @contextmanager
    def attached(self, model: torch.nn.Module) -> Iterator["Rounded"]:
        """Hooks into all products of `model` that have quantised weights."""

        def enter(name: str):
            def hook(module: torch.nn.Module, args: tuple) -> tuple | None:
                self.inside, self.calls = name, 0
                if not name.endswith("experts"):
                    return None
                self.seen.append(args[1:])
                return args[:1] + self.routing[len(self.seen) - 1] if self.routing else None

            return hook

        def leave(module: torch.nn.Module, args: tuple, out: torch.Tensor) -> torch.Tensor:
            name, self.inside = self.inside, None
            if not name.endswith("in_proj") or not self.chosen(name):
                return out
            # Time steps: f32.
            steps = model.config.mamba_num_heads
            exact = functional.linear(args[0], module.weight[-steps:])
            return torch.cat([out[..., :-steps], exact], dim=-1)

        hooks = []
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) or name.endswith(".experts"):
                hooks += [module.register_forward_pre_hook(enter(name)), module.register_forward_hook(leave)]
        with self:
            yield self
        for hook in hooks:
            hook.remove()


def run(model: torch.nn.Module, tokens: torch.Tensor, mode: Rounded) -> torch.Tensor:
    """Log-probabilities (N · T, V)."""
    with torch.no_grad(), mode.attached(model):
        return model(input_ids=tokens, use_cache=False).logits.double().log_softmax(-1).flatten(0, 1)


def row(name: str, model: torch.nn.Module, tokens: torch.Tensor, exact: tuple, rounding: Rounding, kind=None) -> None:
    """Prints a row: free choices of experts, then those of the exact run."""
    expected, routing = exact
    cells = []
    for forced in (None, routing):
        mode = Rounded(rounding, lambda name: kind is None or not re.search(kind, name), forced)
        got = run(model, tokens, mode)
        kl = (expected.exp() * (expected - got)).sum(-1)
        cells.append(f"{kl.mean():.2e} ± {kl.std() / len(kl) ** 0.5:.1e} | {kl.median():.1e}")
        if forced is None:
            same = [(a[0].sort(-1)[0] == b[0].sort(-1)[0]).all(-1) for a, b in zip(mode.seen, routing, strict=True)]
            cells.append(f"{100 * (1 - torch.cat(same).double().mean()):.2f} %")
    print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--layers", type=int, default=4, help="layers with experts")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=5)
    args = parser.parse_args()

    for family, config in shapes(args.layers).items():
        if args.families and family not in args.families:
            continue
        model = build_model(family, config, torch.float32, args.seed)
        round_to_q8_0(model)
        generator = torch.Generator().manual_seed(7)
        tokens = torch.randint(3, config["vocab_size"] - 10, (args.prompts, args.tokens), generator=generator)
        mode = Rounded(None, lambda name: False, None)
        exact = (run(model, tokens, mode), mode.seen)
        names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
        names += [f"{name} {i}" for name, _ in model.named_modules() if name.endswith(".experts") for i in (0, 1)]

        print(f"\n| {family}, {args.layers} layers | mean | median | other choices | same choices: mean | median |")
        print("| :-- | --: | --: | --: | --: | --: |")
        row("int8", model, tokens, exact, int8())
        for kind, pattern in KINDS.items():
            if any(re.search(pattern, name) for name in names):
                row(f"all but {kind}", model, tokens, exact, int8(), pattern)
        row("a scale for 256 columns", model, tokens, exact, int8(256))
        row("bf16", model, tokens, exact, lambda x: x.bfloat16().float())
        row("f16", model, tokens, exact, lambda x: x.half().float())
        row("two terms of int8", model, tokens, exact, two_terms)


if __name__ == "__main__":
    main()
