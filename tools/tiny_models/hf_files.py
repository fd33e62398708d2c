"""Writes a Hugging Face fixture folder: configuration, weights in the wanted form, golden logits."""

import copy
import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from . import quantised, golden, mxfp4, published
from .fp8 import BLOCK, quantise_folder
from .hf_case import HfCase
from .vocabularies import save_byte_level_bpe
from .weights import CORRECTION_BIASES, correction_biases, randomise, round_to, round_to_q8_0

# Of the logits of a folder from those of the model that it was written from, relative to the largest.
MAX_DIFFERENCE = 1e-6


def build_model(family: str, config: dict[str, Any], dtype: torch.dtype, seed: int) -> torch.nn.Module:
    """A model in float32 whose weights `dtype` holds exactly."""
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **config),
        attn_implementation="eager",
        experts_implementation="eager",
        dtype=torch.float32,
    )
    randomise(model, seed)
    round_to(model, dtype)
    return model.eval()


def write_case(case: HfCase, out: Path) -> dict[str, str]:
    """Writes `out/case.name` afresh and returns the golden's report."""
    folder = out / case.name
    if folder.exists():
        shutil.rmtree(folder)
    model = build_model(case.family, case.config, getattr(torch, case.dtype), case.seed)
    if case.q8_0:
        round_to_q8_0(model)
    packed = mxfp4.pack_experts(model) if case.mxfp4 else {}
    fp4 = published.publish_deepseek_v4(model, case.fp4 == "experts") if case.fp4 else {}
    whole = published.publish_whole_scales(model, case.whole_scales) if case.whole_scales else {}
    write_checkpoint(model, case, folder)
    if packed:
        mxfp4.replace_experts(folder, packed)
    if fp4:
        block = [BLOCK, BLOCK]
        scheme = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": block}
        scheme["activation_scheme"] = "dynamic"
        published.replace(folder, fp4, scheme, published.deepseek_v4_name)
        edit_config(folder / "config.json", {"expert_dtype": "fp4"})
    if whole:
        scheme = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
        published.replace(folder, whole, scheme)

    if case.fp8:
        quantise_folder(folder, model)
    if case.quantised:
        model = quantised.quantise_folder(folder, case.quantised)
    # transformers would need a GPU to read packed experts, does not know all published keys, and reads multimodal models as
    # such.
    unreadable = case.published_keys and case.family in published.UNREADABLE
    unreadable = unreadable or case.multimodal and case.family in NESTED_WHOLE
    rewritten = packed or fp4 or whole or case.fp8 or case.quantised
    reread = model if rewritten or unreadable else golden.open_model(folder)
    found = golden.reference(reread, case.n_tokens, case.seed)
    expected = golden.logits_of(model, found.tokens)
    # Not bit for bit: sums depend on how the file's tensors happen to be aligned.
    if (difference := golden.relative_error(found.logits, expected)) > MAX_DIFFERENCE:
        raise ValueError(
            f"{case.name}: the folder gives other logits than the model in memory ({difference:.2e})"
        )
    golden.save(folder, found)
    if case.family == "longcat_flash":
        published.drop_identities(folder, model.config.n_routed_experts)
    if case.interleaved:
        published.interleave_channels(folder)
    if case.text_only:
        leave_text_model(folder, case.family)
    if case.within:
        put_within(folder, case.within)
    if case.beside:
        put_beside(folder, case.beside)
    edit_config(folder / "config.json", case.late_edits)
    return found.report


def write_checkpoint(model: torch.nn.Module, case: HfCase, folder: Path) -> None:
    """Writes config.json, the weights and, where the case has one, the tokenizer."""
    # A copy: casting the model itself would leave its rotary frequencies rounded too.
    narrow = copy.deepcopy(model).to(getattr(torch, case.dtype))
    if (biases := correction_biases(model)) and CORRECTION_BIASES[case.family].float32:
        for name, buffer in correction_biases(narrow).items():
            buffer.data = biases[name].clone()
    narrow.save_pretrained(
        folder,
        max_shard_size=case.max_shard_bytes or "1GB",
        save_original_format=not case.stacked_experts,
    )
    (folder / "generation_config.json").unlink(missing_ok=True)
    rewrite_config(folder / "config.json", case)
    if case.transposed_experts:
        transpose_experts(folder)
    if case.renames:
        rename_tensors(folder, case.renames)
    if case.published_keys and case.family == "kimi_linear":
        published.replace(folder, {}, {}, published.kimi_linear_name)
    if case.multimodal:
        nest_in_multimodal(folder, case.family)
    if case.tokenizer_size:
        save_byte_level_bpe(folder, case.tokenizer_size)


def rewrite_config(path: Path, case: HfCase) -> None:
    """Applies `published_keys` and `config_edits` to a config.json."""
    config = json.loads(path.read_text())
    if case.published_keys and case.family in published.REPUBLISHED:
        path.write_text(json.dumps(published.republish(case.family, config), indent=2) + "\n")
    elif case.published_keys:
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        kind = rope.pop("rope_type")
        if (factor := rope.pop("partial_rotary_factor", None)) is not None:
            if case.family == "minimax_m2":
                config["rotary_dim"] = int(config["head_dim"] * factor)
            else:
                config["partial_rotary_factor"] = factor
        config["rope_scaling"] = None if kind == "default" else {"type": kind} | rope
        config["torch_dtype"] = config.pop("dtype")
        config.pop("transformers_version", None)
        if case.mxfp4:
            config["quantization_config"] = {"quant_method": "mxfp4"}
        if case.family == "minimax_m2":
            config |= {"scoring_func": "sigmoid", "shared_intermediate_size": 0, "use_qk_norm": True}
        if "num_local_experts" in config and case.family in ("qwen3_moe", "qwen3_next"):
            config["num_experts"] = config.pop("num_local_experts")
        path.write_text(json.dumps(config, indent=2) + "\n")
    edit_config(path, case.config_edits)


def edit_config(path: Path, edits: dict[str, Any]) -> None:
    """Sets keys or, with the value None, removes them."""
    if not edits:
        return
    config = json.loads(path.read_text())
    for key, value in edits.items():
        if value is None:
            config.pop(key, None)
        elif key == "text_config":
            config[key] |= value
        else:
            config[key] = value
    path.write_text(json.dumps(config, indent=2) + "\n")


def transpose_experts(folder: Path) -> None:
    """Puts columns in place of rows in the stacked expert tensors of a checkpoint of one file."""
    path = folder / "model.safetensors"
    kinds = ("experts.gate_up_proj", "experts.down_proj")
    tensors = {
        name: tensor.mT.contiguous() if name.endswith(kinds) else tensor for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})


def rename_tensors(folder: Path, renames: tuple[tuple[str, str], ...]) -> None:
    """Gives the tensors of a checkpoint of one file other names."""
    path = folder / "model.safetensors"
    renamed = {}
    for name, tensor in load_file(path).items():
        for pattern, replacement in renames:
            name = re.sub(pattern, replacement, name)
        renamed[name] = tensor
    save_file(renamed, path, metadata={"format": "pt"})


def put_within(folder: Path, part: str) -> None:
    """Makes a model of one file the part `part` of another, beside tensors that are not its own."""
    path = folder / "model.safetensors"
    tensors = {f"{part}.{name}": tensor for name, tensor in load_file(path).items()}
    tensors["talker.model.layers.9.input_layernorm.weight"] = torch.full((3,), torch.nan)
    save_file(tensors, path, metadata={"format": "pt"})
    own = json.loads((folder / "config.json").read_text())
    config = {"model_type": own["model_type"].removesuffix(f"_{part}"), f"{part}_config": own}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def put_beside(folder: Path, names: tuple[str, ...]) -> None:
    """Puts tensors that are not the text model's beside those of a checkpoint of one file."""
    path = folder / "model.safetensors"
    others = {name: torch.full((3,), torch.nan) for name in names}
    save_file(load_file(path) | others, path, metadata={"format": "pt"})


# What the text models of multimodal ones call themselves.
TEXT_MODELS = {
    "step3p7": {"model_type": "step3p5", "architectures": ["Step3p5ForCausalLM"]},
    "glm5_next": {"model_type": "glm5_next_text"},
}


def leave_text_model(folder: Path, family: str) -> None:
    """Takes the vision tower out of a multimodal checkpoint, and what is around the text model's names and configuration."""
    path = folder / "model.safetensors"
    tensors = {
        name.replace("model.language_model.", "model.", 1): tensor
        for name, tensor in load_file(path).items()
        if name.startswith(("model.embed_tokens.", "model.layers.", "model.norm.", "model.language_model.", "lm_head."))
    }
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"] | TEXT_MODELS[family]
    (folder / "config.json").write_text(json.dumps(text, indent=2) + "\n")


# Multimodal models by their text models: `model_type` and class.
MULTIMODAL = {
    "qwen3_5_moe_text": ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
    "qwen4_exp_text": ("qwen4_exp", "Qwen4ExpForConditionalGeneration"),
    "mistral4": ("mistral3", "Mistral3ForConditionalGeneration"),
    "llama4_text": ("llama4", "Llama4ForConditionalGeneration"),
    "aria_text": ("aria", "AriaForConditionalGeneration"),
}
# Those that are published below a multimodal model's `language_model`.
NESTED_WHOLE = ("mistral4", "llama4_text", "aria_text")


def nest_in_multimodal(folder: Path, family: str) -> None:
    """Gives a text checkpoint the form of a multimodal one: its names one level down, its configuration under
    `text_config`, and tensors of a vision tower beside it, of some a multi-token predictor too."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    if family in NESTED_WHOLE:
        renamed = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
        renamed["vision_tower.patch_conv.bias"] = torch.full((3,), torch.nan)
    else:
        renamed = {
            name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: tensor
            for name, tensor in tensors.items()
        }
        renamed["model.visual.patch_embed.proj.bias"] = torch.full((3,), torch.nan)
        renamed["mtp.layers.0.input_layernorm.weight"] = torch.full((3,), torch.nan)
    save_file(renamed, path, metadata={"format": "pt"})
    text = json.loads((folder / "config.json").read_text())
    if family in NESTED_WHOLE:
        text.pop("architectures", None)
    model_type, architecture = MULTIMODAL[family]
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "text_config": text,
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
        "dtype": text["dtype"],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
