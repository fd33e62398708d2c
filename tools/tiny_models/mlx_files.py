"""Writes MLX folders through mlx-lm's converter, and reads their dequantised weights back.

The golden is transformers' logits on the weights as `mx.dequantize` gives them with f32 scales and biases:
with the file's bf16 scales it would round every weight to bf16 again, which the engine does not do.
"""

import contextlib
import io
import json
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import torch
from mlx_lm.utils import load_model

from . import golden
from .hf_case import HfCase
from .published import drop_identities
from .hf_files import build_model, leave_text_model, write_checkpoint
from .mlx_cases import Affine, MlxCase
from .weights import correction_biases, zero_centred_norms

TOKENIZER_SIZE = 293
# Files of a folder; mlx-lm also writes a model card.
KEPT = {
    "chat_template.jinja",
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
}


def write_case(case: MlxCase, out: Path) -> dict[str, str]:
    """Writes `out/case.name` afresh: the folder as mlx-lm leaves it and golden.safetensors."""
    folder = out / case.name
    if folder.exists():
        shutil.rmtree(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    model = build_model(case.family, case.config, getattr(torch, case.dtype), case.seed)
    source = HfCase(
        case.name,
        case.family,
        case.seed,
        case.config,
        dtype=case.dtype,
        published_keys=case.family not in ("qwen3_5_moe_text", "minimax_m3_vl", "mistral4", "nemotron_h", "step3p7", "laguna", "jamba"),
        # transformers keeps the list of layer kinds instead, which mlx-lm does not read.
        config_edits={
            key: case.config[key] for key in ("full_attention_interval", "text_config") if key in case.config
        }
        | case.published,
        # mlx-lm knows this family only so.
        multimodal=case.family in ("qwen3_5_moe_text", "mistral4"),
        stacked_experts=case.family in ("qwen3_5_moe_text", "mistral4"),
        tokenizer_size=TOKENIZER_SIZE,
    )
    with tempfile.TemporaryDirectory() as scratch:
        unquantised = Path(scratch) / "hf"
        write_checkpoint(model, source, unquantised)
        if case.family == "step3p7":
            leave_text_model(unquantised)
        if case.family == "longcat_flash":
            drop_identities(unquantised, model.config.n_routed_experts)
        with contextlib.redirect_stdout(io.StringIO()):
            mlx_lm.convert(
                str(unquantised),
                mlx_path=folder,
                quantize=True,
                q_group_size=case.default.group_size,
                q_bits=case.default.bits,
                dtype=case.dtype,
                quant_predicate=predicate(case, unquantised),
            )
    for file in folder.iterdir():
        if file.name not in KEPT:
            file.unlink()

    load_dequantised(model, folder)
    found = golden.reference(model, case.n_tokens, case.seed)
    peer = peer_logits(folder, found.tokens)
    return golden.save_with_peer(folder, found, "mlx-lm", peer, case.keep_peer_logits)


def predicate(case: MlxCase, folder: Path) -> Callable[[str, Any], bool | dict[str, int]]:
    """How mlx-lm is to quantise a module: by `case.overrides`, then by the family's rule."""
    own_rule = getattr(load_model(folder, lazy=True)[0], "quant_predicate", lambda path, module: True)

    def answer(path: str, module: Any) -> bool | dict[str, int]:
        for pattern, affine in case.overrides.items():
            if re.search(pattern, path):
                return False if affine is None else {"group_size": affine.group_size, "bits": affine.bits}
        return own_rule(path, module)

    return answer


def peer_logits(folder: Path, tokens: torch.Tensor) -> np.ndarray:
    """mlx-lm's logits (T, V) f32 on the same folder, in the folder's own element type."""
    model, _ = load_model(folder)
    logits = model(mx.array(tokens.tolist())[None])[0].astype(mx.float32)
    return np.array(logits)


# Modules that mlx-lm leaves out.
NOT_OF_THE_TEXT = ("model.vision_tower", "model.multi_modal_projector")
# Families whose norms mlx-lm keeps as they are.
NORMS_AROUND_ZERO = ("minimax_m3_vl",)


def load_dequantised(model: torch.nn.Module, folder: Path) -> None:
    """Replaces the model's weights with those of the folder, dequantised to f32."""
    quantization = json.loads((folder / "config.json").read_text())["quantization"]
    default = Affine(quantization["bits"], quantization["group_size"])
    raw = mx.load(str(folder / "model.safetensors"))

    def read(path: str) -> torch.Tensor:
        weight = raw.pop(path) if path in raw else raw.pop(f"{path}.weight")
        if f"{path}.scales" in raw:
            own = quantization.get(path)
            affine = Affine(own["bits"], own["group_size"]) if own else default
            scales, biases = (raw.pop(f"{path}.{part}").astype(mx.float32) for part in ("scales", "biases"))
            weight = mx.dequantize(weight, scales, biases, group_size=affine.group_size, bits=affine.bits)
        return torch.from_numpy(np.array(weight.astype(mx.float32)))

    zero_centred = zero_centred_norms(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith(NOT_OF_THE_TEXT) or "vision_model" in name or "multi_modal_projector" in name:
                continue
            path = stored_path(name, model.config.model_type)
            if ".experts.mlp." in name:
                module, part = path.replace(".switch_mlp.mlp.", ".experts.").rsplit(".", 1)
                each = [read(f"{module}.{expert}.{part}") for expert in range(model.num_experts)]
                parameter.copy_(torch.cat([weight.T if part == "w2" else weight for weight in each]))
            elif path.endswith("kv_b_proj") and path.replace("kv_b_proj", "embed_q") + ".weight" in raw:
                k, v = (read(path.replace("kv_b_proj", part)) for part in ("embed_q", "unembed_out"))
                parameter.copy_(torch.cat([k.transpose(1, 2), v], dim=1).flatten(0, 1))
            elif path.endswith("gate_up_proj"):
                parts = [read(path.replace("gate_up_proj", part)) for part in ("gate_proj", "up_proj")]
                joined = torch.cat(parts, dim=-2)
                # transformers has some, too, for LongCat's experts that return what they take.
                parameter[: len(joined)].copy_(joined)
            elif path.endswith("self_attn.conv1d"):
                parts = [read(path.replace("conv1d", f"{part}_conv.conv")) for part in ("q", "k", "v")]
                parameter.copy_(torch.cat(parts).swapaxes(1, 2))
            elif path.endswith("conv1d"):
                parameter.copy_(read(path).swapaxes(1, 2))
            else:
                # Norms around zero in transformers are around one here.
                around_one = name in zero_centred and model.config.model_type not in NORMS_AROUND_ZERO
                parameter.copy_(read(path) - (1 if around_one else 0))
        for name, buffer in correction_biases(model).items():
            buffer.copy_(read(stored_path(name, model.config.model_type)))
    if raw:
        raise ValueError(f"tensors that the model does not have: {sorted(raw)}")


def stored_path(name: str, family: str) -> str:
    """The path in the file of a weight that transformers calls `name`, without `.weight`."""
    path = name.removesuffix(".weight").replace(".experts.", ".switch_mlp.")
    if family == "minimax_m3_vl":
        path = path.replace("model.language_model.", "model.").replace(".indexer.", ".index_")
        path = path.replace(".gate.e_score", ".e_score")
        path = re.sub(r"\.mlp\.(gate$|e_score|switch_mlp|shared_experts)", r".block_sparse_moe.\1", path)
        return f"language_model.{path}"
    if family == "nemotron_h":
        path = path.replace("model.", "backbone.", 1)
        return path.replace("switch_mlp.up_proj", "switch_mlp.fc1").replace("switch_mlp.down_proj", "switch_mlp.fc2")
    if family == "step3p7":
        path = path.replace("model.language_model.", "model.", 1).replace(".shared_experts.", ".share_expert.")
        path = path.replace("mlp.gate.e_score_correction_bias", "mlp.gate.router_bias")
        return "mlp.gate.gate".join(path.rsplit("mlp.gate", 1)) if path.endswith("mlp.gate") else path
    if family == "laguna":
        path = path.replace(".shared_experts.", ".shared_expert.")
        return f"{path}.proj" if path.endswith("mlp.gate") else path
    if family == "phimoe":
        path = path.replace(".mlp.router", ".mlp.gate")
    if family in ("mixtral", "minimax_m2", "phimoe"):
        path = path.replace(".mlp.", ".block_sparse_moe.")
    if family == "granitemoe":
        path = path.replace("block_sparse_moe.router", "block_sparse_moe.router.layer")
    if family == "kimi_linear":
        path = path.replace(".forget_gate.", ".").replace(".gate.e_score", ".e_score")
    if family == "mimo_v2_flash":
        path = path.replace("self_attn.sinks", "self_attn.attention_sink_bias")
    return f"language_model.{path}" if family in ("qwen3_5_moe_text", "mistral4") else path
