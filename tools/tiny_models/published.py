"""The forms in which models are published, where those are not what transformers saves: keys of configurations, and weights
in FP8 and FP4."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from . import fp8, mxfp4

Config = dict[str, Any]


def republish(family: str, config: Config) -> Config:
    """The configuration that transformers saved, with the keys of published ones."""
    if (own := REPUBLISHED.get(family)) is None:
        return config
    return own(dict(config))


def _kimi_linear(config: Config) -> Config:
    kinds = config.pop("layer_types")
    dense = config.pop("mlp_layer_types")
    config.pop("rope_parameters", None)
    first = dense.index("sparse")
    if "dense" in dense[first:]:
        raise ValueError("published configurations have dense layers first")
    return config | {
        "linear_attn_config": {
            "head_dim": config.pop("linear_head_dim"),
            "num_heads": config.pop("linear_num_heads"),
            "short_conv_kernel_size": config.pop("linear_conv_kernel_dim"),
            "full_attn_layers": [i + 1 for i, kind in enumerate(kinds) if kind == "full_attention"],
            "kda_layers": [i + 1 for i, kind in enumerate(kinds) if kind == "linear_attention"],
        },
        "first_k_dense_replace": first,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "mla_use_nope": True,
        "rope_theta": 10000.0,
        "rope_scaling": None,
    }


def _mimo_v2_flash(config: Config) -> Config:
    kinds = config.pop("layer_types")
    dense = config.pop("mlp_layer_types")
    ropes = config.pop("rope_parameters")
    full, sliding = ropes["full_attention"], ropes["sliding_attention"]
    if full["partial_rotary_factor"] != sliding["partial_rotary_factor"]:
        raise ValueError("published configurations have one part of the channels that rotates")
    heads = config["num_attention_heads"]
    return config | {
        "hybrid_layer_pattern": [int(kind == "sliding_attention") for kind in kinds],
        "moe_layer_freq": [int(kind == "sparse") for kind in dense],
        "layernorm_epsilon": config.pop("rms_norm_eps"),
        "rope_theta": full["rope_theta"],
        "swa_rope_theta": sliding["rope_theta"],
        "partial_rotary_factor": full["partial_rotary_factor"],
        "swa_num_attention_heads": heads,
        "swa_num_key_value_heads": 2 * config["num_key_value_heads"],
        "swa_head_dim": config["head_dim"],
        "swa_v_head_dim": config["v_head_dim"],
        # Without the newest token here.
        "sliding_window_size": config["sliding_window"] - 1,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "n_shared_experts": None,
    }


def _deepseek_v4(config: Config) -> Config:
    kinds, dense = config.pop("layer_types"), config.pop("mlp_layer_types")
    ratios = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    rates = config.pop("compress_rates")
    if any(rates[kind] != ratios[kind] for kind in rates):
        raise ValueError("published configurations compress 4 and 128 tokens")
    ropes = config.pop("rope_parameters")
    compress = dict(ropes["compress"])
    theta, kind = compress.pop("rope_theta"), compress.pop("rope_type")
    for key in ("partial_rotary_factor", "attention_factor"):
        compress.pop(key, None)
    return config | {
        "compress_ratios": [ratios[kind] for kind in kinds],
        "num_hash_layers": dense.index("moe"),
        "qk_rope_head_dim": int(config["head_dim"] * config.pop("partial_rotary_factor")),
        "rope_theta": ropes["main"]["rope_theta"],
        "compress_rope_theta": theta,
        "rope_scaling": None if kind == "default" else {"type": kind} | compress,
        "norm_topk_prob": True,
        "topk_method": "noaux_tc",
    }


def _qwen4_exp(config: Config) -> Config:
    names = {"indexed_attention": "full_attention"}
    return config | {"layer_types": [names.get(kind, kind) for kind in config["layer_types"]]}


REPUBLISHED = {
    "kimi_linear": _kimi_linear,
    "mimo_v2_flash": _mimo_v2_flash,
    "deepseek_v4": _deepseek_v4,
    "qwen4_exp_text": _qwen4_exp,
}


# Families whose published keys transformers does not read.
UNREADABLE = ("mimo_v2_flash",)


def power_of_two_scales(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FP8 codes, scales of blocks of 128 × 128 as powers of two, and the float32 values that they stand for."""
    rows, cols = weight.shape
    block = fp8.BLOCK
    padded = torch.zeros(-(-rows // block) * block, -(-cols // block) * block)
    padded[:rows, :cols] = weight.float()
    largest = padded.unflatten(1, (-1, block)).unflatten(0, (-1, block)).abs().amax(dim=(1, 3))
    scales = (largest / fp8.LARGEST).to(torch.float8_e8m0fnu)
    # Rounded to the nearest power of two: never too small.
    scales = torch.where(scales.float() * fp8.LARGEST < largest, scales.float() * 2, scales.float())
    scales = scales.to(torch.float8_e8m0fnu)
    wide = scales.float().repeat_interleave(block, 0).repeat_interleave(block, 1)[:rows, :cols]
    codes = (weight.float() / wide).to(torch.float8_e4m3fn)
    return codes, scales, codes.float() * wide


def publish_deepseek_v4(model: torch.nn.Module, only_experts: bool) -> dict[str, torch.Tensor]:
    """Rounds a model in place; the matrices of a published checkpoint that stand for the rounded ones: experts in FP4 with
    scales of 32 and, unless only they are asked for, projections of attention and shared experts in FP8 with scales of
    blocks, all of them powers of two."""
    stored = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            layer, _, rest = name.removeprefix("model.layers.").partition(".")
            if ".mlp.experts." in name:
                for expert, matrix in enumerate(parameter):
                    parts = matrix.chunk(2) if rest.endswith("gate_up_proj") else [matrix]
                    names = ["w1", "w3"] if len(parts) == 2 else ["w2"]
                    values = []
                    for part, own in zip(parts, names, strict=True):
                        codes, scales = mxfp4.planes(part)
                        values.append(mxfp4.values(codes, scales))
                        module = f"layers.{layer}.ffn.experts.{expert}.{own}"
                        stored[f"{module}.weight"] = codes.flatten(-2).view(torch.int8)
                        stored[f"{module}.scale"] = scales.view(torch.float8_e8m0fnu)
                    parameter[expert] = torch.cat(values)
            elif rest in FP8_MODULES and not only_experts:
                codes, scales, values = power_of_two_scales(parameter)
                module = f"layers.{layer}.{FP8_MODULES[rest]}"
                stored |= {f"{module}.weight": codes, f"{module}.scale": scales}
                parameter.copy_(values)
    return stored


FP8_MODULES = {
    "self_attn.q_a_proj.weight": "attn.wq_a",
    "self_attn.q_b_proj.weight": "attn.wq_b",
    "self_attn.kv_proj.weight": "attn.wkv",
    "self_attn.o_a_proj.weight": "attn.wo_a",
    "self_attn.o_b_proj.weight": "attn.wo_b",
    "self_attn.compressor.indexer.q_b_proj.weight": "attn.indexer.wq_b",
    "mlp.shared_experts.gate_proj.weight": "ffn.shared_experts.w1",
    "mlp.shared_experts.up_proj.weight": "ffn.shared_experts.w3",
    "mlp.shared_experts.down_proj.weight": "ffn.shared_experts.w2",
}


def publish_whole_scales(model: torch.nn.Module, pattern: str) -> dict[str, torch.Tensor]:
    """Rounds the matrices whose names contain `pattern` in place to FP8 with one scale each, or one for each of a stack; the
    tensors that stand for them, by transformers' names."""
    stored = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if pattern in name and parameter.ndim > 1:
                largest = parameter.abs().amax(dim=(-2, -1), keepdim=True)
                scales = largest / fp8.LARGEST
                codes = (parameter / scales).to(torch.float8_e4m3fn)
                parameter.copy_(codes.float() * scales)
                stored |= {name: codes, f"{name}_scale_inv": scales if parameter.ndim > 2 else scales[0, 0]}
    return stored


def replace(
    folder: Path,
    stored: dict[str, torch.Tensor],
    quantization: Config,
    renamed: Callable[[str], str] = str,
) -> None:
    """Puts tensors in place of a saved checkpoint's of the same names, once those are `renamed`, and says so in its
    configuration."""
    path = folder / "model.safetensors"
    tensors = {renamed(name): tensor for name, tensor in load_file(path).items()}
    stored = in_shards(stored, tensors)
    if missing := [name for name in stored if "scale" not in name and name not in tensors]:
        raise ValueError(f"the checkpoint lacks {missing[:3]}")
    save_file(tensors | stored, path, metadata={"format": "pt"})
    if quantization:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = quantization
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def in_shards(stored: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`stored` with tables cut as `tensors` has them, and one scale for all shards of one."""
    found = {}
    for name, tensor in stored.items():
        table = name.removesuffix("_scale_inv").removesuffix(".weight")
        shards = [f"{table}.shard_{i}.weight" for i in range(len(tensors))]
        shards = [shard for shard in shards if shard in tensors]
        if not shards:
            found[name] = tensor
        elif name.endswith("_scale_inv"):
            found[f"{table}.weight_scale"] = tensor.reshape(1)
        else:
            parts = tensor.split([len(tensors[shard]) for shard in shards])
            found |= {shard: part.contiguous() for shard, part in zip(shards, parts, strict=True)}
    return found


# Published names of Hy4's modules, where transformers writes others.
HY_V4_RENAMES = (
    (r"\.hc_pre\.(hc_attn_layer|hc_mlp_layer|hc_head)\.", r".\1.hc_pre."),
    (r"hc_head\.hc_pre", "hc_head"),
    (r"(mlp.*)\.linear_gate", r"\1.gate_proj"),
)


def interleave_channels(folder: Path) -> None:
    """Puts the rotated channels of a Hy4 checkpoint in the order in which neighbours rotate, where transformers rotates
    halves: the same model to what rotates neighbours."""
    config = json.loads((folder / "config.json").read_text())
    rotary = config["qk_rope_head_dim"]
    heads = {
        "self_attn.q_b_proj.": config["qk_nope_head_dim"] + rotary,
        "self_attn.kv_a_proj_with_mqa.": config["kv_lora_rank"] + rotary,
        "self_attn.indexer.wq_b.": config["index_head_dim"],
        "self_attn.indexer.wk.": config["index_head_dim"],
        "self_attn.indexer.k_norm.": config["index_head_dim"],
    }
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        for module, width in heads.items():
            if module in name:
                rows = tensor.unflatten(0, (-1, width))
                # They are a head's last.
                turned = rows[:, -rotary:].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
                tensors[name] = torch.cat([rows[:, :-rotary], turned], dim=1).flatten(0, 1).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})


def kimi_linear_name(name: str) -> str:
    """The published name of a tensor; transformers writes most, but for dense layers."""
    module, _, kind = name.rpartition(".block_sparse_moe.")
    dense = kind in ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
    return f"{module}.mlp.{kind}" if dense else name


def deepseek_v4_name(name: str) -> str:
    """The published name of a tensor; transformers writes most, but those outside of layers and the norm of keys."""
    own = name.removeprefix("model.").replace(".attn.norm.", ".attn.kv_norm.").replace("hc_head.hc_", "hc_head_")
    return own.replace("embed_tokens.", "embed.").replace("lm_head.", "head.")


def drop_identities(folder: Path, experts: int) -> None:
    """Leaves out gate and up projections beyond `experts`, which transformers writes for experts that return what they take."""
    for path in folder.glob("*.safetensors"):
        if path.name == "golden.safetensors":
            continue
        number = re.compile(r"\.experts\.(\d+)\.")
        kept = {
            name: tensor
            for name, tensor in load_file(path).items()
            if not (found := number.search(name)) or int(found[1]) < experts
        }
        save_file(kept, path, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    if index.exists():
        of = json.loads(index.read_text())
        names = {name for path in folder.glob("model*.safetensors") for name in load_file(path)}
        of["weight_map"] = {name: file for name, file in of["weight_map"].items() if name in names}
        index.write_text(json.dumps(of, indent=2) + "\n")
