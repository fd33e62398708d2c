"""Random small models of every family.

What a form cannot say (llama.cpp's converter has no key for it, mlx-lm does not read it) is noted in the case, so that
only forms that mean the same model are compared.
"""

import random
from dataclasses import dataclass, replace

from .hf_case import HfCase
from .random_draw import TOKENIZER_SIZE, Draw
from . import random_families
from .random_published import PUBLISHED

FAMILIES = random_families.FAMILIES | PUBLISHED

N_TOKENS = (97, 140)


@dataclass(frozen=True)
class RandomCase:
    """A model and the forms that can hold it."""

    hf: HfCase
    gguf: bool
    mlx: bool
    # Columns of all rows are multiples of this: what block and affine encodings need.
    aligned: int


def draw_case(family: str, seed: int) -> RandomCase:
    """The case of a seed: the same whenever and wherever it is drawn."""
    rng = random.Random(f"{family} {seed}")
    d = Draw(rng, aligned=rng.choice((1, 1, 32, 64)))
    config = FAMILIES[family](d)
    stacked = d.chance(0.4)
    # Published within a multimodal model, its experts stacked: the form that converters know.
    multimodal = family in ("qwen3_5_moe_text", "mistral4") and d.chance(0.7)
    stacked = stacked or multimodal
    hf = HfCase(
        f"{family}_{seed}",
        family,
        rng.randrange(1 << 30),
        config,
        dtype=d.pick("bfloat16", "bfloat16", "float16", "float32"),
        stacked_experts=stacked and family != "gpt_oss",
        max_shard_bytes=None if multimodal else d.pick(None, 60_000),
        # Without scaling, keys of older configurations would stand for gpt-oss's own.
        published_keys=d.chance()
        and family not in ("qwen3_5_moe_text", "deepseek_v4", "glm_moe_dsa", "qwen4_exp_text", "mistral4", "hy_v4", "minimax_m3_vl_text", "glm5_next", "nemotron_h", "step3p7")
        and (d.gguf or d.mlx or family not in ("mimo_v2_flash", "kimi_linear"))
        and (family != "gpt_oss" or config["rope_parameters"]["rope_type"] != "default"),
        multimodal=multimodal,
        tokenizer_size=TOKENIZER_SIZE,
        mxfp4=family == "gpt_oss" and d.aligned > 1 and d.chance(0.6),
        fp8=family.startswith(("deepseek_v2", "deepseek_v3", "glm4", "qwen3_next")) and not stacked and d.chance(0.25),
        n_tokens=rng.randint(*N_TOKENS),
    )
    if d.case:
        hf = replace(hf, fp8=False, mxfp4=False, published_keys=False, multimodal=False)
        hf = replace(hf, **d.case)
        readable = hf.transposed_experts or not hf.stacked_experts
        return RandomCase(hf, d.gguf and readable, d.mlx and readable, d.aligned)
    if hf.fp8 or hf.mxfp4 or hf.published_keys and family == "kimi_linear":
        # Rewritten as one file.
        hf = replace(hf, max_shard_bytes=None)
    if hf.fp8:
        d.only(gguf=False, mlx=False)
    # Converters read experts a tensor each, but for this family.
    readable = multimodal if family in ("qwen3_5_moe_text", "mistral4") else not hf.stacked_experts
    # mlx-lm quantises some routers in groups of 64, and reads keys of older configurations only.
    mlx_keys = hf.published_keys or family in ("qwen3_5_moe_text", "glm_moe_dsa", "mistral4", "nemotron_h")
    d.only(gguf=readable, mlx=readable and mlx_keys and d.aligned != 32)
    if family in ("minimax_m2", "mimo_v2_flash", "kimi_linear"):
        d.only(gguf=hf.published_keys)
    if family in ("qwen3_next", "qwen3_5_moe_text") and hf.dtype != "float32":
        # Norm weights around one are rounded to the type of those around zero: another model.
        d.only(gguf=False, mlx=d.aligned > 1)
    return RandomCase(hf, d.gguf, d.mlx, d.aligned)
