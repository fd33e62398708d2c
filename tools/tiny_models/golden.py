"""Reference logits: float32, eager attention, eager experts; and how far they can be trusted.

A golden is worth little if float32 rounding alone moves it, so each one is also computed in float64, and
the margin of every routing decision is measured. Both figures are checked here and kept in the file's
metadata.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from compare_logits import compare
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM
from transformers.models.ernie4_5_vl_moe import Ernie4_5_VLMoeConfig, Ernie4_5_VLMoeForConditionalGeneration
from transformers.models.glm4v_moe import Glm4vMoeConfig, Glm4vMoeForConditionalGeneration
from transformers.models.glm5_next import Glm5NextConfig, Glm5NextForConditionalGeneration
from transformers.models.hy_v4_vl import HYV4VLConfig, HYV4VLForConditionalGeneration
from transformers.models.minimax_m3_vl import MiniMaxM3SparseForConditionalGeneration, MiniMaxM3VLConfig
from transformers.models.mistral4 import Mistral4Config, Mistral4ForCausalLM
from transformers.models.mistral_large4 import MistralLarge4Config, MistralLarge4ForConditionalGeneration
from transformers.models.muse_spark import MuseSparkConfig, MuseSparkForConditionalGeneration
from transformers.models.qwen3_omni_moe import (
    Qwen3OmniMoeThinkerConfig,
    Qwen3OmniMoeThinkerForConditionalGeneration,
)
from transformers.models.qwen3_vl_moe import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration
from transformers.models.step3p7 import Step3p7Config, Step3p7ForConditionalGeneration

from .weights import EXPERT_BIAS, correction_biases

# Published as a part of multimodal models only, so transformers does not list it.
AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)
AutoModelForCausalLM.register(MistralLarge4Config, MistralLarge4ForConditionalGeneration, exist_ok=True)
AutoModelForCausalLM.register(Glm5NextConfig, Glm5NextForConditionalGeneration, exist_ok=True)
AutoModelForCausalLM.register(HYV4VLConfig, HYV4VLForConditionalGeneration, exist_ok=True)
AutoModelForCausalLM.register(MuseSparkConfig, MuseSparkForConditionalGeneration, exist_ok=True)
AutoModelForCausalLM.register(MiniMaxM3VLConfig, MiniMaxM3SparseForConditionalGeneration, exist_ok=True)
AutoModelForCausalLM.register(Glm4vMoeConfig, Glm4vMoeForConditionalGeneration, exist_ok=True)
AutoModelForCausalLM.register(Qwen3OmniMoeThinkerConfig, Qwen3OmniMoeThinkerForConditionalGeneration, exist_ok=True)
AutoModelForCausalLM.register(Ernie4_5_VLMoeConfig, Ernie4_5_VLMoeForConditionalGeneration, exist_ok=True)
AutoModelForCausalLM.register(Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration, exist_ok=True)
# Its text model has no class of its own with a head.
AutoModelForCausalLM.register(Step3p7Config, Step3p7ForConditionalGeneration, exist_ok=True)

# Largest accepted |f32 - f64| / max |f64| and smallest accepted gap, in router logits, between the last
# expert chosen and the first one left out.
MAX_FLOAT32_ERROR = 2e-5
MIN_ROUTER_MARGIN = 1e-4
# Draws of random tokens before giving up on that margin.
MAX_DRAWS = 20


def random_tokens(vocab_size: int, length: int, seed: int) -> torch.Tensor:
    """Token ids (length,), drawn uniformly, with the first and the last id of the vocabulary among them."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab_size, (length,), generator=generator)
    tokens[0], tokens[length // 2] = vocab_size - 1, 0
    return tokens


def open_model(folder: Path) -> torch.nn.Module:
    """The model that transformers reads from `folder`, its weights widened to float32."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    return model.eval()


def logits_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Logits (n_tokens, vocab_size) of one pass over all tokens, without a cache."""
    with torch.no_grad():
        return model(tokens[None], use_cache=False).logits[0]


def router_margin(model: torch.nn.Module, tokens: torch.Tensor) -> float:
    """Smallest gap between the last router logit chosen and the first left out, over layers and positions.

    Of routers with groups or a correction bias: between the scores that they choose by, of groups too; of indexers,
    between the scores of entries. Infinite where nothing is chosen.
    """
    config = model.config.get_text_config()
    margin = float("inf")

    def choice_of_entries(module: torch.nn.Module, inputs: Any, scores: torch.Tensor) -> None:
        nonlocal margin
        stride = config.compress_rates["compressed_sparse_attention"]
        for position, row in enumerate(scores[0]):
            margin = min(margin, gap(row[None, : (position + 1) // stride], config.index_topk))

    def choice_of_blocks(module: torch.nn.Module, inputs: Any, _: torch.Tensor) -> None:
        nonlocal margin
        hidden, (cos, sin) = inputs[:2]
        count = hidden.shape[1] // module.compress_ratio * module.compress_ratio
        q, k = module.index_qk_proj(hidden)[0].split([module.index_n_heads * module.index_head_dim, module.index_head_dim], -1)
        q = module.q_layernorm(q.unflatten(-1, (-1, module.index_head_dim)))
        k = module.k_layernorm(k[:count].unflatten(0, (-1, module.compress_ratio)).mean(1))
        rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
        q = rotate(q, cos=cos[0], sin=sin[0])
        starts = slice(None, count, module.compress_ratio)
        k = rotate(k[:, None], cos=cos[0, starts], sin=sin[0, starts])[:, 0]
        scores = (q @ k.T).relu().sum(1) / module.index_head_dim**0.5
        for position, row in enumerate(scores):
            blocks = (position + 1) // module.compress_ratio
            margin = min(margin, gap(row[None, :blocks], module.block_topk))

    scorers = [m for m in model.modules() if type(m).__name__ == "DeepseekV4IndexerScorer"]
    hooks = [module.register_forward_hook(choice_of_entries) for module in scorers]
    indexers = [m for m in model.modules() if type(m).__name__ == "Qwen4ExpTextQSAIndexer"]
    hooks += [module.register_forward_hook(choice_of_blocks) for module in indexers]
    choosing = [m for m in model.modules() if type(m).__name__ in INDEXERS_BY_TOPK]
    with torch.no_grad(), watched_topk(choosing) as of_indexers:
        # Asked for logits of routers that are not there, some models fail.
        has_experts = any("experts" in name for name, _ in model.named_parameters())
        outputs = model(tokens[None], use_cache=False, output_router_logits=has_experts)
    for hook in hooks:
        hook.remove()
    margin = min([margin, *of_indexers])
    biases = list(correction_biases(model).values())
    biases += [bias for name, bias in model.named_parameters() if name.endswith(EXPERT_BIAS)]
    for index, ranks in enumerate(outputs.router_logits if has_experts else ()):
        if biases:
            ranks = score_of(config)(ranks) + biases[index]
            best = 2
        elif config.model_type == "gemma4_text":
            # Probabilities.
            ranks = ranks.log()
        elif config.model_type == "deepseek_v2":
            ranks = ranks.softmax(dim=-1)
            best = 1
        elif config.model_type in ("mistral4", "mistral_large4_text"):
            ranks = ranks.softmax(dim=-1)
            best = 2
        if limited_to_groups(config):
            groups = ranks.unflatten(-1, (config.n_group, -1))
            scores = groups.topk(best, dim=-1).values.sum(dim=-1)
            margin = min(margin, gap(scores, config.topk_group))
            left_out = scores < scores.topk(config.topk_group, dim=-1).values[:, -1:]
            rest = 0.0 if config.model_type == "axk2" else float("-inf")
            ranks = groups.masked_fill(left_out[..., None], rest).flatten(-2)
        chosen = getattr(config, "top_k_experts", None) or chosen_experts(config)
        margin = min(margin, gap(ranks, chosen[index] if isinstance(chosen, list) else chosen))
    return margin


def chosen_experts(config) -> int | list[int]:
    """Experts a token."""
    if config.model_type == "dbrx":
        return config.ffn_config.moe_top_k
    return config.moe_topk if config.model_type == "aria_text" else config.num_experts_per_tok


# Indexers whose only `topk` is of the scores that they choose by.
INDEXERS_BY_TOPK = (
    "DeepseekV32Indexer",
    "GlmMoeDsaIndexer",
    "Glm5NextTextIndexer",
    "HYV4Indexer",
    "HYV4VLIndexer",
    "MiniMaxM3VLIndexer",
    "MistralLarge4TextIndexer",
    "AXK2Indexer",
    "Dots3NoteTextIndexer",
)


@contextmanager
def watched_topk(modules: Sequence[torch.nn.Module]) -> Iterator[list[float]]:
    """Gaps, as they come, between the last score that `modules` choose and the best one that they leave out."""
    gaps: list[float] = []
    topk = torch.Tensor.topk
    inside = 0

    def enter(*_: Any) -> None:
        nonlocal inside
        inside += 1

    def leave(*_: Any) -> None:
        nonlocal inside
        inside -= 1

    def watched(scores: torch.Tensor, k: int, *args: Any, **kwargs: Any) -> Any:
        if inside and scores.shape[-1] > k:
            ordered = scores.sort(dim=-1, descending=True).values
            chosen, left_out = ordered[..., k - 1], ordered[..., k]
            # What cannot be chosen has the lowest score there is.
            real = left_out > torch.finfo(scores.dtype).min / 2
            gaps.extend((chosen - left_out)[real].tolist())
        return topk(scores, k, *args, **kwargs)

    hooks = [m.register_forward_pre_hook(enter) for m in modules] + [m.register_forward_hook(leave) for m in modules]
    torch.Tensor.topk = watched
    try:
        yield gaps
    finally:
        torch.Tensor.topk = topk
        for hook in hooks:
            hook.remove()


def score_of(config) -> Callable[[torch.Tensor], torch.Tensor]:
    """What routers with a correction bias turn logits into."""
    kinds = {"sqrtsoftplus": lambda x: torch.nn.functional.softplus(x).sqrt(), "softmax": lambda x: x.softmax(-1)}
    if config.model_type == "kolibri1":
        return lambda x: x
    kind = "softmax" if config.model_type in ("longcat_flash", "zaya") else getattr(config, "scoring_func", None)
    return kinds.get(kind, torch.sigmoid)


def limited_to_groups(config) -> bool:
    """Whether experts are chosen from the best groups only."""
    if config.model_type == "deepseek_v2" and config.topk_method != "group_limited_greedy":
        return False
    return (getattr(config, "n_group", None) or 1) > 1


def gap(ranks: torch.Tensor, chosen: int) -> float:
    """Smallest gap over rows of (rows, n) between the last of the `chosen` best and the next."""
    if ranks.shape[-1] <= chosen:
        return float("inf")
    ordered = ranks.sort(dim=-1, descending=True).values
    return (ordered[:, chosen - 1] - ordered[:, chosen]).min().item()


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    """max |a - b| / max |b|."""
    return ((a.double() - b.double()).abs().max() / b.double().abs().max()).item()


def float64_copy(model: torch.nn.Module) -> torch.nn.Module:
    """The same weights with float64 arithmetic (transformers keeps norms, rope and softmax in float32)."""
    wide = type(model)(model.config).double().eval()
    wide.set_attn_implementation("eager")
    wide.load_state_dict(model.state_dict())
    return wide


@dataclass(frozen=True)
class Reference:
    """Logits with the evidence that they may be compared against."""

    # (n_tokens,) i64.
    tokens: torch.Tensor
    # (n_tokens, vocab_size) f32.
    logits: torch.Tensor
    report: dict[str, str]


def reference(model: torch.nn.Module, n_tokens: int, seed: int) -> Reference:
    """Logits over random tokens: the first draw whose routing decisions are all clear of a tie."""
    wide = float64_copy(model)
    for attempt in range(MAX_DRAWS):
        config = model.config.get_text_config()
        # Without rows of padding.
        vocab_size = min(getattr(config, "unpadded_vocab_size", None) or config.vocab_size, config.vocab_size)
        tokens = random_tokens(vocab_size, n_tokens, seed + 1000 * attempt)
        margin = router_margin(model, tokens)
        if margin < MIN_ROUTER_MARGIN:
            continue
        logits = logits_of(model, tokens)
        error = relative_error(logits, logits_of(wide, tokens))
        if error > MAX_FLOAT32_ERROR:
            raise ValueError(
                f"float32 and float64 logits differ by {error:.2e}, more than {MAX_FLOAT32_ERROR:.0e}"
            )
        report = {
            "reference": f"transformers {transformers.__version__}, float32, eager",
            "float64_relative_error": f"{error:.2e}",
            "router_margin": f"{margin:.2e}",
            "logit_std": f"{logits.std().item():.2f}",
        }
        return Reference(tokens, logits, report)
    raise ValueError(
        f"{MAX_DRAWS} draws of tokens all have a routing decision within {MIN_ROUTER_MARGIN:.0e} of a tie"
    )


def save_with_peer(
    folder: Path, found: Reference, peer: str, peer_logits: np.ndarray, keep: bool
) -> dict[str, str]:
    """Writes the golden with what another engine made of the file: its mean KL, and its logits if `keep`."""
    comparison = compare(peer_logits, found.logits.numpy())
    extra = {"peer_kl": np.array([comparison.kl_nats], dtype=np.float64)}
    if keep:
        extra["peer_logits"] = peer_logits
    report = found.report | {"peer": f"{peer}: {comparison}"}
    save(folder, Reference(found.tokens, found.logits, report), **extra)
    return report


def save(folder: Path, found: Reference, **extra: np.ndarray) -> None:
    """Writes golden.safetensors with `tokens` i32 (T,), `logits` f32 (T, V) and the arrays of `extra`."""
    arrays = {"tokens": found.tokens.numpy().astype(np.int32), "logits": np.ascontiguousarray(found.logits), **extra}
    # One key: the writer does not keep the order of several, and the file would change from run to run.
    save_file(arrays, folder / "golden.safetensors", metadata={"report": json.dumps(found.report)})
