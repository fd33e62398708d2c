#!/usr/bin/env python3
"""Makes a tiny random vision model with pictures, and golden logits of it.

    python tools/make_picture_goldens.py FAMILY OUT [--llama-cpp SOURCE]

FAMILY is qwen3_vl_moe or qwen3_5_moe. The folder OUT/FAMILY gets the model as published ones are (config, weights, tokenizer,
chat template, image processor) and golden.safetensors: `tokens` i32 (T,) of a conversation that shows the pictures, with the
placeholder's id at every token of a picture; and `logits` f32 (T / STEP, V), of every STEP-th token, that transformers computes
in float32 from what its own processor makes of the pictures. Metadata has the conversation.

OUT gets the pictures as PNG files, the same for all families. Their sizes are chosen so that one is kept, one enlarged and one
reduced.

With llama.cpp's source tree, its converter makes OUT/FAMILY_gguf: model.gguf, and of what reads pictures mmproj-bf16.gguf and
mmproj-q8_0.gguf.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessor
from transformers.models.qwen3_5_moe import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration
from transformers.models.qwen3_vl_moe import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

SEED = 11
STEP = 8
SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
TEMPLATE = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type == 'text' %}{{- part.text }}{%- endif %}
{%- endfor %}{%- endif %}
{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
# Width and height.
SIZES = {"kept": (40, 32), "small": (13, 9), "large": (101, 38)}
MOST_FLOAT32_ERROR = 2e-5
CONVERT = Path(__file__).with_name("tiny_models") / "llama_cpp_convert.py"

TEXT = dict(
    hidden_size=24,
    moe_intermediate_size=10,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_experts=4,
    num_experts_per_tok=2,
    max_position_embeddings=1024,
    bos_token_id=None,
)
TOWER = dict(
    depth=3,
    hidden_size=16,
    intermediate_size=32,
    num_heads=2,
    patch_size=4,
    temporal_patch_size=2,
    spatial_merge_size=2,
    num_position_embeddings=25,
    out_hidden_size=24,
)


def qwen3_vl_moe(common: dict, text: dict) -> Qwen3VLMoeConfig:
    rope = {"rope_type": "default", "rope_theta": 3000.0, "mrope_section": [3, 3, 2]}
    own = dict(intermediate_size=28, num_hidden_layers=2, head_dim=16, rope_parameters=rope)
    tower = TOWER | dict(deepstack_visual_indexes=[0, 2])
    return Qwen3VLMoeConfig(text_config=text | own, vision_config=tower, **common)


def qwen3_5_moe(common: dict, text: dict) -> Qwen3_5MoeConfig:
    rope = {"rope_type": "default", "rope_theta": 3000.0, "mrope_section": [3, 2, 1], "partial_rotary_factor": 0.5}
    own = dict(
        num_hidden_layers=2,
        head_dim=24,
        rope_parameters=rope,
        shared_expert_intermediate_size=12,
        layer_types=["linear_attention", "full_attention"],
        linear_conv_kernel_dim=4,
        linear_key_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_value_head_dim=8,
    )
    return Qwen3_5MoeConfig(text_config=text | own, vision_config=TOWER, **common)


@dataclass
class Family:
    """How to make a model."""

    config: object
    model: type
    # Whether norms of the text model are stored less one.
    centred_norms: bool = False
    # Whether published files have the matrices of experts with columns as rows, which the converter expects.
    published_columns: bool = False


FAMILIES = {
    "qwen3_vl_moe": Family(qwen3_vl_moe, Qwen3VLMoeForConditionalGeneration, published_columns=True),
    "qwen3_5_moe": Family(qwen3_5_moe, Qwen3_5MoeForConditionalGeneration, centred_norms=True),
}


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for every byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, merges=[]))
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    own.decoder = decoders.ByteLevel()
    own.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=own, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )


def config(family: Family, ids: dict[str, int]) -> transformers.PreTrainedConfig:
    text = TEXT | dict(vocab_size=len(ids) + 256, eos_token_id=ids["<|im_end|>"])
    common = dict(
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    return family.config(common, text)


def randomise(model: torch.nn.Module, centred_norms: bool) -> None:
    """Weights of some size, so that pictures matter, in values that bfloat16 holds."""
    generator = torch.Generator().manual_seed(SEED)
    for name, weight in sorted(model.named_parameters()):
        norm = "norm" in name and name.endswith("weight")
        centred = centred_norms and "visual" not in name and "linear_attn" not in name
        wide = weight.shape[-1] if weight.dim() > 1 else 25
        values = torch.randn(weight.shape, generator=generator)
        spread = 0.25 if norm else 1.3 / wide**0.5
        weight.data = (values * spread + float(norm and not centred)).to(torch.bfloat16).float()


def pictures(folder: Path) -> list[Image.Image]:
    random = np.random.default_rng(SEED)
    made = []
    for name, (width, height) in SIZES.items():
        x, y = np.meshgrid(np.linspace(0, 6, width), np.linspace(0, 5, height))
        phase = random.uniform(0, 6, (3, 1, 1))
        waves = np.sin(x * phase + y + phase) * 90 + 128 + random.normal(0, 25, (3, height, width))
        picture = Image.fromarray(waves.clip(0, 255).astype(np.uint8).transpose(1, 2, 0))
        picture.save(folder / f"{name}.png")
        made.append(picture)
    return made


def convert(llama_cpp: Path, folder: Path, family: Family) -> None:
    """The GGUF files of the model in `folder`."""
    out = folder.with_name(f"{folder.name}_gguf")
    out.mkdir(exist_ok=True)
    files = {"bf16": "model.gguf", "bf16,mmproj": "mmproj-bf16.gguf", "q8_0,mmproj": "mmproj-q8_0.gguf"}
    with tempfile.TemporaryDirectory() as around:
        published = Path(around) / folder.name
        shutil.copytree(folder, published)
        (published / "golden.safetensors").unlink()
        if family.published_columns:
            weights = load_file(folder / "model.safetensors")
            for name, weight in weights.items():
                if ".mlp.experts." in name:
                    weights[name] = weight.transpose(1, 2).contiguous()
            save_file(weights, published / "model.safetensors", metadata={"format": "pt"})
        for kind, name in files.items():
            command = [sys.executable, CONVERT, llama_cpp, kind, published, out / name]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            if said:
                raise ValueError(said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--llama-cpp", type=Path, help="llama.cpp's source tree, for GGUF files")
    arguments = parser.parse_args()
    family, folder = FAMILIES[arguments.family], arguments.out / arguments.family
    folder.mkdir(parents=True, exist_ok=True)
    own = tokenizer()
    ids = {name: own.convert_tokens_to_ids(name) for name in SPECIAL}
    model = family.model(config(family, ids)).eval()
    randomise(model, family.centred_norms)
    processor = Qwen2VLImageProcessor(
        patch_size=4,
        temporal_patch_size=2,
        merge_size=2,
        image_mean=[0.5, 0.45, 0.4],
        image_std=[0.5, 0.4, 0.6],
        size={"shortest_edge": 4 * 64, "longest_edge": 20 * 64},
    )
    model.bfloat16().save_pretrained(folder)
    model = family.model.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    own.save_pretrained(folder)
    processor.save_pretrained(folder)

    shown = pictures(arguments.out)
    made = processor(images=shown, return_tensors="pt")
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
        {"role": "assistant", "content": "Waves."},
        {
            "role": "user",
            "content": [{"type": "image"}, {"type": "text", "text": " or "}, {"type": "image"}]
            + [{"type": "text", "text": "?"}],
        },
    ]
    text = own.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    placeholder, counts = ids["<|image_pad|>"], made["image_grid_thw"].prod(-1) // 4
    tokens, left = [], iter(counts.tolist())
    for token in own.encode(text, add_special_tokens=False):
        tokens += [token] * (next(left) if token == placeholder else 1)
    tokens = torch.tensor([tokens])

    def logits(model: torch.nn.Module, dtype: torch.dtype) -> torch.Tensor:
        with torch.no_grad():
            return model(
                input_ids=tokens,
                pixel_values=made["pixel_values"].to(dtype),
                image_grid_thw=made["image_grid_thw"],
                mm_token_type_ids=(tokens == placeholder).int(),
                use_cache=False,
            ).logits[0]

    found = logits(model, torch.float32)
    wide = logits(model.double(), torch.float64)
    error = ((found.double() - wide).abs().max() / wide.abs().max()).item()
    if error > MOST_FLOAT32_ERROR:
        raise ValueError(f"float32 and float64 logits differ by {error:.2e}")
    report = {
        "reference": f"transformers {transformers.__version__}, float32, eager",
        "float64_relative_error": f"{error:.2e}",
        "grids": made["image_grid_thw"].tolist(),
    }
    arrays = {"tokens": tokens[0].int(), "logits": found[STEP - 1 :: STEP].contiguous()}
    metadata = {"report": json.dumps(report | {"messages": messages})}
    save_file(arrays, folder / "golden.safetensors", metadata=metadata)
    print(json.dumps(report), tokens.shape[1], "tokens")
    if arguments.llama_cpp:
        convert(arguments.llama_cpp, folder, family)


main()
