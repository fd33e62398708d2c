#!/usr/bin/env python3
"""Makes tiny adapters for the models of the parity tests, and golden logits of both by PEFT and transformers.

    python tools/make_adapters.py FIXTURES OUT [NAME ...]

FIXTURES is the folder of the fixtures that `make_tiny_models.py` made. OUT gets one folder an adapter: what PEFT saves, and
golden.safetensors: `tokens` i32 (T,), `logits` f32 (T, V), in float32; metadata key `base` names the model's folder.

Experts that are a module each are of earlier versions of transformers: their adapters are written here, and the golden is that of
the model whose stacked weights have what they add.
"""

import argparse
import json
import math
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import gguf_cases, gguf_files, golden, mlx_cases, mlx_files
from tiny_models.hf_files import build_model

TOKENS = 16
SEED = 11
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Case:
    """An adapter and the model that it is for."""

    name: str
    # Below FIXTURES.
    base: str
    config: dict[str, Any]
    # Gate, up and down of single experts, by their names, in the module below a layer.
    experts: tuple[str, ...] = ()
    # Linear layers below a layer that PEFT would take for experts of earlier versions of transformers.
    linears: tuple[str, ...] = ()
    dtype: torch.dtype = torch.bfloat16


FUSED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CASES = [
    Case(
        "olmoe_attention",
        "hf/olmoe_basic",
        {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION},
        dtype=torch.float32,
    ),
    Case(
        "qwen3_moe_everything",
        "hf/qwen3_moe_basic",
        {
            "r": 2,
            "lora_alpha": 3,
            "target_modules": [*ATTENTION, "lm_head"],
            "target_parameters": [*FUSED, "mlp.gate.weight"],
            "rank_pattern": {"k_proj": 5, r"layers\.0\.self_attn\.q_proj": 1},
            "alpha_pattern": {"self_attn.o_proj": 7},
        },
    ),
    Case(
        "qwen3_moe_rslora",
        "hf/qwen3_moe_basic",
        {"r": 3, "lora_alpha": 2, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]},
        dtype=torch.float16,
    ),
    Case(
        "qwen3_moe_layer",
        "hf/qwen3_moe_basic",
        {"r": 2, "lora_alpha": 4, "target_modules": ["o_proj"], "layers_to_transform": [1]},
        experts=("gate_proj", "up_proj", "down_proj"),
    ),
    Case("mixtral_experts", "hf/mixtral_basic", {"r": 2, "target_modules": ["q_proj"]}, experts=("w1", "w3", "w2")),
    Case(
        "qwen3_next_linear",
        "hf/qwen3_next_basic",
        {
            "r": 2,
            "target_modules": [*ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj", "shared_expert_gate"],
            "target_parameters": FUSED,
        },
        linears=tuple(f"shared_expert.{name}" for name in MLP),
    ),
    Case(
        "qwen3_5_moe_linear",
        "hf/qwen3_5_moe_text",
        {"r": 2, "target_modules": [*ATTENTION, "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"]},
    ),
    Case(
        "deepseek_v3_latent",
        "hf/deepseek_v3_basic",
        {
            "r": 2,
            "target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]
            + ["gate_proj", "up_proj", "down_proj"],
            "target_parameters": FUSED,
        },
    ),
    Case(
        "gpt_oss_transposed",
        "hf/gpt_oss_bf16",
        {"r": 2, "target_modules": ATTENTION, "target_parameters": FUSED},
    ),
    Case(
        "glm4_moe_shared",
        "hf/glm4_moe_basic",
        {"r": 2, "target_modules": ATTENTION},
        linears=(*MLP, *(f"shared_experts.{name}" for name in MLP)),
    ),
    Case("mixtral_gguf", "gguf/mixtral_llama3_f32", {"r": 2, "target_modules": ATTENTION, "target_parameters": FUSED}),
    Case("mixtral_mlx", "mlx/mixtral_4bit", {"r": 2, "target_modules": ATTENTION, "target_parameters": FUSED}),
]


def open_base(fixtures: Path, base: str) -> torch.nn.Module:
    """The model of a fixture, as transformers has it, on dequantised weights."""
    kind, name = base.split("/")
    if kind == "hf":
        return golden.open_model(fixtures / base)
    module, files = (gguf_cases, gguf_files) if kind == "gguf" else (mlx_cases, mlx_files)
    case = next(case for case in module.SMALL if case.name == name)
    model = build_model(case.family, case.config, torch.float32, case.seed)
    if kind == "gguf":
        files.load_dequantised(model, sorted((fixtures / base).glob("*.gguf")), case.family)
    else:
        files.load_dequantised(model, fixtures / base)
    return model


def add_experts(model: torch.nn.Module, case: Case, tensors: dict[str, torch.Tensor], scale: float) -> None:
    """Adds to `model` what random matrices of single experts add, and the matrices to `tensors`; of every third expert none."""
    rank = case.config["r"]
    module = "block_sparse_moe" if case.experts[0] == "w1" else "mlp"
    for layer, decoder in enumerate(model.model.layers):
        if layer not in case.config.get("layers_to_transform", [layer]):
            continue
        experts = decoder.mlp.experts
        width = experts.down_proj.shape[2]
        for expert in range(experts.gate_up_proj.shape[0]):
            if expert % 3 == 2:
                continue
            parts = [experts.gate_up_proj[expert, :width], experts.gate_up_proj[expert, width:]]
            for name, weight in zip(case.experts, [*parts, experts.down_proj[expert]], strict=True):
                a = (torch.randn(rank, weight.shape[1]) / math.sqrt(weight.shape[1])).to(case.dtype)
                b = (torch.randn(weight.shape[0], rank) / 2).to(case.dtype)
                with torch.no_grad():
                    weight += scale * b.float() @ a.float()
                key = f"base_model.model.model.layers.{layer}.{module}.experts.{expert}.{name}"
                tensors |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}


def add_linears(model: torch.nn.Module, case: Case, tensors: dict[str, torch.Tensor], scale: float) -> None:
    """As `add_experts`, for linear layers."""
    rank = case.config["r"]
    for layer, decoder in enumerate(model.model.layers):
        modules = dict(decoder.mlp.named_modules())
        for name in case.linears:
            if name not in modules:
                continue
            weight = modules[name].weight
            a = (torch.randn(rank, weight.shape[1]) / math.sqrt(weight.shape[1])).to(case.dtype)
            b = (torch.randn(weight.shape[0], rank) / 2).to(case.dtype)
            with torch.no_grad():
                weight += scale * b.float() @ a.float()
            key = f"base_model.model.model.layers.{layer}.mlp.{name}"
            tensors |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}


def write_case(case: Case, fixtures: Path, out: Path) -> None:
    """Writes `out/case.name` afresh."""
    torch.manual_seed(SEED)
    folder = out / case.name
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    model = open_base(fixtures, case.base)
    config = peft.LoraConfig(init_lora_weights=False, **({"lora_alpha": 4} | case.config))
    adapted = peft.get_peft_model(model, config).eval()
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(case.dtype).float()
    with tempfile.TemporaryDirectory() as scratch:
        adapted.save_pretrained(scratch)
        tensors = load_file(Path(scratch) / "adapter_model.safetensors")
        settings = json.loads((Path(scratch) / "adapter_config.json").read_text())
    tensors = {name: tensor.to(case.dtype).contiguous() for name, tensor in tensors.items()}
    settings["base_model_name_or_path"] = None
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    if case.experts:
        add_experts(adapted.base_model.model, case, tensors, config.lora_alpha / config.r)
    add_linears(adapted.base_model.model, case, tensors, config.lora_alpha / config.r)
    save_file(tensors, folder / "adapter_model.safetensors")

    tokens = golden.random_tokens(model.config.get_text_config().vocab_size, TOKENS, SEED)
    logits = golden.logits_of(adapted, tokens)
    with adapted.disable_adapter():
        changed = golden.relative_error(golden.logits_of(adapted, tokens), logits)
    merged = adapted.merge_and_unload()
    error = golden.relative_error(golden.logits_of(merged, tokens), logits)
    margin = golden.router_margin(merged, tokens)
    if margin < golden.MIN_ROUTER_MARGIN or changed < 0.05:
        raise ValueError(f"{case.name}: router margin {margin}, changes logits by {changed}")
    arrays = {"tokens": tokens.int(), "logits": logits.contiguous()}
    save_file(arrays, folder / "golden.safetensors", metadata={"base": case.base})
    size = sum(file.stat().st_size for file in folder.iterdir()) / 1024
    print(f"{case.name:24} {size:4.0f} KiB  {len(tensors)} tensors  changes {changed:.2f}  merged {error:.1e}  margin {margin:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fixtures", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", help="adapters to make; all when absent")
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    for case in CASES:
        if not args.names or case.name in args.names:
            write_case(case, args.fixtures, args.out)


if __name__ == "__main__":
    main()
