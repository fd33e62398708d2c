"""Variants of a configuration: every key left out, null, changed, under another name or in another place.

A variant is a configuration for the same weights. Whether it still fits them is for transformers to say.
"""

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig

Config = dict[str, Any]

# Keys that say nothing about what is computed.
IDLE = {
    "architectures",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "id2label",
    "initializer_range",
    "is_encoder_decoder",
    "label2id",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "problem_type",
    "return_dict",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "text_config",
    "transformers_version",
    "use_cache",
    "vision_config",
}
# Other values of keys that are words.
WORDS = {
    "hidden_act": ("gelu", "swish", "relu2", "swigluoai"),
    "mlp_hidden_act": ("silu", "relu"),
    "mamba_hidden_act": ("gelu", "swish"),
    "scoring_func": ("softmax", "sigmoid", "sqrtsoftplus"),
    "topk_method": ("greedy", "group_limited_greedy", "noaux_tc"),
    "output_gate_type": ("silu", "sigmoid", "swish"),
}
# Kinds that lists of layers' kinds may name.
KINDS = {
    "layer_types": (
        "full_attention",
        "sliding_attention",
        "linear_attention",
        "chunked_attention",
        "indexed_attention",
        "deepseek_sparse_attention",
        "attention",
        "mamba",
        "minimax_m3_sparse",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
    ),
    "layers_block_type": ("full_attention", "linear_attention", "attention", "mamba", "moe", "mlp"),
    "mlp_layer_types": ("dense", "sparse", "moe", "hash_moe"),
    "indexer_types": ("full", "shared"),
}
# Keys of published or older configurations that classes read beside their own, with values to try.
EXTRA: Config = {
    "attention_chunk_size": [5],
    "attention_value_scale": [0.5],
    "clip_qkv": [0.0, 0.4],
    "compress_rate_csa": [3],
    "compress_rate_hca": [9],
    "compress_ratios": [[0, 4, 128, 0, 4, 0, 4]],
    "compress_rope_theta": [777.0],
    "decoder_sparse_step": [1, 2, 0],
    "first_k_dense_replace": [0, 1, 2, 9],
    "full_attention_interval": [1, 2, 3],
    "gating": [False],
    "head_dim": [2, 16],
    "hybrid_override_pattern": ["ME*-", "MMMMMMMM"],
    "index_skip_topk_offset": [1, 3],
    "index_topk_freq": [1, 2, 3],
    "index_topk_pattern": ["FSFSFSFS", "FFSSFFSS"],
    "interleave_moe_layer_step": [1, 2],
    "layernorm_epsilon": [0.1],
    "layer_norm_epsilon": [0.1],
    "max_window_layers": [0, 1, 2],
    "mlp_only_layers": [[0], [1]],
    "moe_intermediate_size": [5],
    "moe_layer_freq": [1, 2, [1, 0, 1, 0, 1, 0, 1], [0, 1, 1, 1, 1, 1, 1]],
    "moe_layers": [[0], [1]],
    "moe_layers_enum": ["0", "1,2", [1]],
    "moe_latent_size": [3],
    "n_group": [1, 2],
    "n_shared_experts": [0, 2],
    "no_rope_layer_interval": [2],
    "norm_topk_prob": [True, False],
    "num_nextn_predict_layers": [0, 1],
    "num_mtp_layers": [1],
    "num_mtp_modules": [1],
    "original_max_position_embeddings": [24],
    "partial_rotary_factor": [0.25, 0.5, 1.0],
    "partial_rotary_factors": [[0.5] * 7, [1.0] * 7],
    "qk_rope_head_dim": [4],
    "rms_norm_eps": [0.1],
    "rope_interleave": [True, False],
    "rope_theta": [77.0, 5000.0, [77.0] * 7],
    "rotary_dim": [2, 4, 8],
    "routed_scaling_factor": [0.5, 3.0],
    "router_scaling_factor": [0.5],
    "moe_router_scaling_factor": [0.5],
    "rms_norm_epsilon": [0.1],
    "scoring_func": ["softmax", "sigmoid"],
    "shared_expert_intermediate_size": [7],
    "sliding_window": [3],
    "sliding_window_size": [3],
    "swa_rope_theta": [77.0],
    "swiglu_limit": [0.3],
    "swiglu_alpha": [0.9],
    "swiglu_limits": [[0.3] * 7],
    "swiglu_limits_shared": [[0.3] * 7],
    "time_step_limit": [[0.01, 0.1]],
    "time_step_min": [0.2],
    "topk_method": ["greedy", "noaux_tc", "group_limited_greedy"],
    "use_qk_norm": [True, False],
    "use_sliding_window": [True, False],
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# Whole sets of scaling parameters.
SCALINGS: tuple[Config, ...] = (
    {},
    {"rope_type": "default"},
    {"type": "default"},
    {"type": "linear", "factor": 3.0},
    {"rope_type": "linear", "factor": 3.0, "rope_theta": 333.0},
    {"rope_type": "linear"},
    {"factor": 3.0},
    {"rope_type": "dynamic", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 3.0, "original_max_position_embeddings": 16},
    YARN,
    YARN | {"rope_theta": 333.0},
    YARN | {"partial_rotary_factor": 0.5},
    {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"type": "linear"} | YARN,
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "original_max_position_embeddings": 16},
    YARN | {"factor": None},
    YARN | {"original_max_position_embeddings": None},
    YARN | {"attention_factor": 0.8},
    YARN | {"attention_factor": None},
    YARN | {"attention_factor": 0.0},
    YARN | {"beta_fast": 4.0, "beta_slow": 0.5},
    YARN | {"beta_fast": 0, "beta_slow": None},
    YARN | {"truncate": False},
    YARN | {"truncate": None},
    YARN | {"mscale": 0.7},
    YARN | {"mscale_all_dim": 0.7},
    YARN | {"mscale": 0.7, "mscale_all_dim": 1.0},
    YARN | {"mscale": 0.0, "mscale_all_dim": 1.0},
    YARN | {"mscale": 1.0, "mscale_all_dim": 0.0},
    YARN | {"factor": 0.5},
    YARN | {"mrope_section": [1, 1, 1]},
    YARN | {"llama_4_scaling_beta": 0.3},
    LLAMA3,
    {key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"},
    {key: value for key, value in LLAMA3.items() if key != "low_freq_factor"},
    {"rope_type": "longrope", "short_factor": None, "long_factor": None, "original_max_position_embeddings": 32},
    {"rope_type": "longrope", "short_factor": None, "long_factor": None},
    {"rope_type": "longrope", "short_factor": None, "long_factor": None, "factor": 2.0},
    {"rope_type": "longrope", "short_factor": None, "long_factor": None, "factor": 2.0, "attention_factor": 0.8},
    {"rope_type": "su", "short_factor": None, "long_factor": None, "factor": 2.0},
    {"rope_type": "unheard_of", "factor": 2.0},
)


@dataclass(frozen=True)
class Variant:
    """A configuration and what was done to the one that it is made from."""

    name: str
    config: Config


def text_of(config: Config) -> Config:
    """The part that is the text model's."""
    return config.get("text_config", config)


def variants(base: Config, family: str, rng: random.Random, pairs: int) -> Iterator[Variant]:
    """The base itself, every single change and as many random pairs of changes."""
    yield Variant("as it is", base)
    changes = [*single_changes(base, family)]
    for name, change in changes:
        yield Variant(name, changed(base, change))
    for _ in range(pairs):
        (first, change), (second, other) = rng.sample(changes, 2)
        try:
            yield Variant(f"{first}; {second}", changed(base, change, other))
        except (KeyError, TypeError, AttributeError):
            # The first took away what the second changes.
            continue


Change = Callable[[Config], None]


def changed(base: Config, *changes: Change) -> Config:
    """A copy of `base` with changes to its text model."""
    config = copy.deepcopy(base)
    for change in changes:
        change(text_of(config))
    return config


def put(key: str, value: Any) -> Change:
    return lambda text: text.__setitem__(key, copy.deepcopy(value))


def drop(key: str) -> Change:
    return lambda text: text.pop(key, None) and None


def single_changes(base: Config, family: str) -> Iterator[tuple[str, Change]]:
    """Everything that is done to one key or one set of rotary parameters."""
    text = text_of(base)
    names = other_names(family)
    for key, value in text.items():
        if key in IDLE or key.startswith("_"):
            continue
        yield f"{key} left out", drop(key)
        yield f"{key}: null", put(key, None)
        if key not in ("rope_parameters", "rope_scaling"):
            for other in other_values(key, value):
                yield f"{key}: {other!r}", put(key, other)
        for alias in names.get(key, ()):
            yield f"{key} as {alias}", renamed(key, alias)
            for other in [*other_values(key, value)][:2]:
                yield f"{alias}: {other!r} beside {key}", put(alias, other)
                yield f"{alias}: {other!r} before {key}", in_front(alias, other)
    for key, values in EXTRA.items():
        if key not in text:
            for value in values:
                yield f"{key}: {value!r} added", put(key, value)
    yield from rope_changes(text)


def other_names(family: str) -> dict[str, list[str]]:
    """Names under which transformers takes a key, both ways."""
    kind = type(AutoConfig.for_model(family))
    kind = getattr(kind, "sub_configs_defaults", {}).get("text_config", kind)
    names: dict[str, list[str]] = {}
    for name, key in getattr(kind, "attribute_map", {}).items():
        names.setdefault(key, []).append(name)
        names.setdefault(name, []).append(key)
    for keys in ({"num_experts", "num_local_experts", "n_routed_experts"}, {"layers_block_type", "layer_types"}):
        for key in keys:
            names.setdefault(key, []).extend(sorted(keys - {key, *names.get(key, ())}))
    return names


def renamed(key: str, alias: str) -> Change:
    def change(text: Config) -> None:
        text[alias] = text.pop(key)

    return change


def in_front(key: str, value: Any) -> Change:
    def change(text: Config) -> None:
        rest = dict(text)
        text.clear()
        text[key] = value
        text.update(rest)

    return change


def other_values(key: str, value: Any) -> Iterator[Any]:
    """Values of the same kind that say something else."""
    if key in WORDS:
        yield from (word for word in WORDS[key] if word != value)
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from sorted({value + 1, value * 2, max(value - 1, 0), 0, 1} - {value})
        yield float(value)
    elif isinstance(value, float):
        yield from (value * 0.5, value * 3.0, 0.0, 1.0)
        yield int(value) + 1
    elif key in KINDS and isinstance(value, list):
        for kind in KINDS[key]:
            yield [kind] * len(value)
        yield value[::-1]
        yield value + value[:1]
        yield value[:-1]
        yield [{"full_attention": "attention", "linear_attention": "mamba"}.get(kind, kind) for kind in value]
        yield [
            "deepseek_sparse_attention" if kind in ("indexed_attention", "full_attention") else kind for kind in value
        ]
    elif isinstance(value, list):
        yield value[::-1]
        yield value[:-1]
        yield []
        yield [0] * len(value)
        yield [1]
        yield [None] * len(value)
    elif isinstance(value, dict):
        yield {}
        for name in value:
            yield {other: inner for other, inner in value.items() if other != name}
            for other in other_values(name, value[name]):
                yield value | {name: other}
    elif value is None:
        yield from (1, 3, 0.5, False, True)


def rope_changes(text: Config) -> Iterator[tuple[str, Change]]:
    """What is done to rotary parameters: sets of them in either place, keys within and beside them."""
    sets = text.get("rope_parameters")
    if not isinstance(sets, dict):
        return
    nested = [name for name, value in sets.items() if isinstance(value, dict)]
    pairs = rotated_pairs(text)
    for number, scaling in enumerate(SCALINGS):
        for length in pairs if "long_factor" in scaling else (0,):
            whole = filled(scaling, length)
            label = f"scaling {number} {scaling}"
            yield f"rope_scaling: {label}", put("rope_scaling", whole)
            yield f"rope_scaling: {label}, no rope_parameters", both(drop("rope_parameters"), put("rope_scaling", whole))
            yield f"rope_parameters: {label}", put("rope_parameters", whole)
            beside = both(put("rope_theta", 77.0), put("partial_rotary_factor", 0.5))
            yield f"rope_parameters: {label}, theta and part beside", both(put("rope_parameters", whole), beside)
            published = both(drop("rope_parameters"), put("rope_scaling", whole), put("rope_theta", 77.0))
            yield f"rope_scaling: {label}, theta beside, no rope_parameters", published
            yield f"rope_parameters: {label} over their own", into(None, whole)
            for name in nested:
                yield f"rope_parameters.{name}: {label}", inside(name, whole)
                yield f"rope_parameters.{name}: {label} over their own", into(name, whole)
    yield "rope_scaling: null", put("rope_scaling", None)
    yield "rope_theta beside, no rope_parameters", both(drop("rope_parameters"), put("rope_theta", 77.0))
    yield "rope_theta: null beside", put("rope_theta", None)
    yield "original_max_position_embeddings beside yarn", both(
        into(None, YARN), put("original_max_position_embeddings", 24)
    )
    yield "mrope", into(None, {"mrope_section": [1, 1, 1], "mrope_interleaved": True})
    for name in [None, *nested]:
        own = sets if name is None else sets[name]
        for key, value in own.items():
            if isinstance(value, dict):
                yield f"rope_parameters.{key} left out", lambda text, key=key: text["rope_parameters"].pop(key) and None
                yield f"rope_parameters.{key}: null", into(None, {key: None})
                continue
            place = "rope_parameters" if name is None else f"rope_parameters.{name}"
            yield f"{place}.{key} left out", without(name, key)
            yield f"{place}.{key} beside", both(without(name, key), put(key, value))
            yield f"{place}.{key}: null", into(name, {key: None})
            for other in other_values(key, value):
                yield f"{place}.{key}: {other!r}", into(name, {key: other})
                yield f"{place}.{key} left out, {other!r} beside", both(without(name, key), put(key, other))
                yield f"{key}: {other!r} beside {place}", put(key, other)
        for part in (0.25, 0.5, 0.334, 1.0):
            yield f"{name} rotates {part}", into(name, {"partial_rotary_factor": part})
    kinds = sorted({kind for kind in text.get("layer_types") or () if isinstance(kind, str)})
    if kinds and not nested:
        alike = {kind: dict(sets) for kind in kinds}
        yield "rope_parameters by layer", put("rope_parameters", alike)
        yield "rope_parameters by layer, one missing", put("rope_parameters", dict([*alike.items()][1:]))


def rotated_pairs(text: Config) -> set[int]:
    """Pairs of channels that may rotate."""
    heads, hidden = text.get("num_attention_heads") or 1, text.get("hidden_size") or 1
    dim = text.get("qk_rope_head_dim") or text.get("head_dim") or hidden // heads
    sets = text["rope_parameters"]
    parts = [1.0, sets.get("partial_rotary_factor"), text.get("partial_rotary_factor")]
    parts += [inner.get("partial_rotary_factor") for inner in sets.values() if isinstance(inner, dict)]
    return {int(dim * part) // 2 for part in parts if part}


def filled(scaling: Config, pairs: int) -> Config:
    """LongRoPE's divisors for so many pairs of channels."""
    divisors = {"short_factor": [1.0 + 0.1 * i for i in range(pairs)], "long_factor": [2.0 + 0.3 * i for i in range(pairs)]}
    return {key: divisors.get(key, value) for key, value in scaling.items()}


def both(*changes: Change) -> Change:
    def change(text: Config) -> None:
        for each in changes:
            each(text)

    return change


def into(name: str | None, values: Config) -> Change:
    """Sets keys of the rotary parameters, or of the set `name` of them."""

    def change(text: Config) -> None:
        place = text["rope_parameters"] if name is None else text["rope_parameters"][name]
        place.update(copy.deepcopy(values))

    return change


def inside(name: str, values: Config) -> Change:
    def change(text: Config) -> None:
        text["rope_parameters"][name] = copy.deepcopy(values)

    return change


def without(name: str | None, key: str) -> Change:
    def change(text: Config) -> None:
        place = text["rope_parameters"] if name is None else text["rope_parameters"][name]
        place.pop(key, None)

    return change
