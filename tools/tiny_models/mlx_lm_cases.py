"""Checkpoints of families that mlx-lm defines and transformers does not, one row a folder, and random ones."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import mlx_lm_deepseek_v41, mlx_lm_kimi_k3


@dataclass(frozen=True)
class Case:
    """One checkpoint."""

    name: str
    seed: int
    config: dict[str, Any]
    # What makes its weights.
    weights: Callable[[dict[str, Any], np.random.Generator], dict[str, np.ndarray]]
    n_tokens: int = 101
    # Whether the checkpoint under published names is a fixture too, where a converter makes one of it.
    kept: bool = True
    # Whether llama.cpp's converter can make a file of it.
    convertible: bool = False


FAMILIES = {"kimi_k3": mlx_lm_kimi_k3, "deepseek_v41": mlx_lm_deepseek_v41}

CASES = [
    Case(name, seed, config, family.weights, kept=not name.endswith(("_wide", "_gguf")))
    for family in FAMILIES.values()
    for name, seed, config in family.CASES
]

# By `model_type`: what llama.cpp's converter knows it by.
CONVERTED = {"kimi_k3": "KimiK3ForConditionalGeneration"}
# By checkpoint: the folder that mlx-lm's converter makes of it, bits and columns of a group.
QUANTISED = {"kimi_k3_wide": ("kimi_k3_4bit", 4, 32), "deepseek_v41_wide": ("deepseek_v41_4bit", 4, 32)}


def draw(family: str, seed: int) -> Case:
    """The random case of a seed."""
    rng = random.Random(f"{family} {seed}")
    module = FAMILIES[family]
    config = module.draw(rng)
    convertible = family in CONVERTED and module.convertible(config)
    return Case(f"{family}_{seed}", seed, config, module.weights, rng.randint(60, 140), convertible=convertible)
