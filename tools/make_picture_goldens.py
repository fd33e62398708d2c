#!/usr/bin/env python3
"""Makes a tiny random vision model with pictures, and golden logits of it.

    python tools/make_picture_goldens.py FAMILY OUT [--llama-cpp SOURCE]

FAMILY is qwen3_vl_moe, qwen3_5_moe, gemma4 or llama4. The folder OUT/FAMILY gets the model as published ones are (config, weights, tokenizer,
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
from transformers.image_processing_utils import BatchFeature
from transformers.models.gemma4 import Gemma4Config, Gemma4ForConditionalGeneration, Gemma4ImageProcessor
from transformers.models.llama4 import Llama4Config, Llama4ForConditionalGeneration, Llama4ImageProcessor, Llama4Processor
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
GEMMA = ["<pad>", "<|image>", "<image|>", "<|image|>", "<|im_start|>", "<|im_end|>"]
LLAMA = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_start|>", "<|image_end|>", "<|image|>", "<|patch|>"]
LLAMA += ["<|tile_x_separator|>", "<|tile_y_separator|>"]
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


def gemma4(common: dict, text: dict) -> Gemma4Config:
    ids = common["ids"]
    own = text | dict(
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=24,
        head_dim=16,
        global_head_dim=16,
        intermediate_size=20,
        enable_moe_block=True,
        top_k_experts=2,
        hidden_size_per_layer_input=4,
        vocab_size_per_layer_input=text["vocab_size"],
        final_logit_softcapping=None,
        use_bidirectional_attention="vision",
        pad_token_id=ids["<pad>"],
        rope_parameters={
            "full_attention": {"rope_type": "proportional", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 80.0},
        },
    )
    own.pop("num_experts_per_tok")
    tower = dict(
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=12,
        patch_size=2,
        pooling_kernel_size=3,
        position_embedding_size=48,
        standardize=True,
        use_clipped_linears=True,
        rope_parameters={"rope_type": "axial", "rope_theta": 50.0},
    )
    special = dict(image_token_id=ids["<|image|>"], boi_token_id=ids["<|image>"], eoi_token_id=ids["<image|>"])
    return Gemma4Config(text_config=own, vision_config=tower, audio_config=None, tie_word_embeddings=True, **special)


def llama4(common: dict, text: dict) -> Llama4Config:
    ids = common["ids"]
    own = text | dict(
        num_hidden_layers=4,
        head_dim=12,
        intermediate_size=10,
        intermediate_size_mlp=20,
        interleave_moe_layer_step=2,
        num_local_experts=4,
        num_experts_per_tok=1,
        attention_chunk_size=48,
        tie_word_embeddings=False,
    )
    own.pop("num_experts")
    own.pop("moe_intermediate_size")
    tower = dict(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        vision_output_dim=20,
        image_size=16,
        patch_size=4,
        projector_input_dim=20,
        projector_output_dim=20,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0},
    )
    special = dict(
        image_token_index=ids["<|patch|>"],
        boi_token_index=ids["<|image_start|>"],
        eoi_token_index=ids["<|image_end|>"],
    )
    return Llama4Config(text_config=own, vision_config=tower, **special)


def qwen_processor() -> Qwen2VLImageProcessor:
    return Qwen2VLImageProcessor(
        patch_size=4,
        temporal_patch_size=2,
        merge_size=2,
        image_mean=[0.5, 0.45, 0.4],
        image_std=[0.5, 0.4, 0.6],
        size={"shortest_edge": 4 * 64, "longest_edge": 20 * 64},
    )


def gemma_processor() -> Gemma4ImageProcessor:
    return Gemma4ImageProcessor(patch_size=2, pooling_kernel_size=3, max_soft_tokens=70)


def llama_processor() -> Llama4ImageProcessor:
    return Llama4ImageProcessor(size={"height": 16, "width": 16}, max_patches=6, image_mean=[0.5, 0.45, 0.4])


def expand_qwen(own: PreTrainedTokenizerFast, made: BatchFeature, index: int) -> str:
    return "<|image_pad|>" * (int(made["image_grid_thw"][index].prod()) // 4)


def expand_gemma(own: PreTrainedTokenizerFast, made: BatchFeature, index: int) -> str:
    """As `Gemma4Processor.replace_image_token`."""
    return "<|image>" + "<|image|>" * int(made["num_soft_tokens_per_image"][index]) + "<image|>"


def expand_llama(own: PreTrainedTokenizerFast, made: BatchFeature, index: int) -> str:
    processor = Llama4Processor(llama_processor(), own, patch_size=4, pixel_shuffle_ratio=0.5)
    return processor.replace_image_token(made, index)


@dataclass
class Family:
    """How to make a model."""

    config: object
    model: type
    processor: object
    # What stands for a picture, of what the processor makes of all.
    expand: object
    # Special tokens; what a template writes around a picture and in its place; what a row of the picture has.
    special: tuple[str, ...] = tuple(SPECIAL)
    shown: str = "<|vision_start|><|image_pad|><|vision_end|>"
    placeholder: str = "<|image_pad|>"
    row: str = "<|image_pad|>"
    # Whether norms of the text model are stored less one.
    centred_norms: bool = False
    # Whether attention does not divide products by the root of a head's width.
    undivided: bool = False
    # Whether published files have the matrices of experts with columns as rows, which the converter expects.
    published_columns: bool = False


FAMILIES = {
    "qwen3_vl_moe": Family(
        qwen3_vl_moe, Qwen3VLMoeForConditionalGeneration, qwen_processor, expand_qwen, published_columns=True
    ),
    "qwen3_5_moe": Family(
        qwen3_5_moe, Qwen3_5MoeForConditionalGeneration, qwen_processor, expand_qwen, centred_norms=True
    ),
    "gemma4": Family(
        gemma4,
        Gemma4ForConditionalGeneration,
        gemma_processor,
        expand_gemma,
        undivided=True,
        special=tuple(GEMMA),
        shown="<|image|>",
        placeholder="<|image|>",
        row="<|image|>",
    ),
    "llama4": Family(
        llama4,
        Llama4ForConditionalGeneration,
        llama_processor,
        expand_llama,
        special=tuple(LLAMA),
        shown="<|image|>",
        placeholder="<|image|>",
        row="<|patch|>",
    ),
}


def tokenizer(family: Family) -> PreTrainedTokenizerFast:
    """A token for every byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, merges=[]))
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    own.decoder = decoders.ByteLevel()
    own.add_special_tokens(list(family.special))
    return PreTrainedTokenizerFast(
        tokenizer_object=own,
        eos_token="<|im_end|>",
        pad_token=family.special[0],
        chat_template=TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", family.shown),
    )


def config(family: Family, ids: dict[str, int]) -> transformers.PreTrainedConfig:
    text = TEXT | dict(vocab_size=len(ids) + 256, eos_token_id=ids["<|im_end|>"])
    if "<|image_pad|>" not in ids:
        return family.config(dict(ids=ids), text)
    common = dict(
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    return family.config(common, text)


def randomise(model: torch.nn.Module, centred_norms: bool, undivided: bool) -> None:
    """Weights of some size, so that pictures matter, in values that bfloat16 holds."""
    generator = torch.Generator().manual_seed(SEED)
    for name, weight in sorted(model.named_parameters()):
        norm = "norm" in name and name.endswith("weight")
        centred = centred_norms and "visual" not in name and "linear_attn" not in name
        wide = weight.shape[-1] if weight.dim() > 1 else 25
        values = torch.randn(weight.shape, generator=generator)
        spread = 0.25 if norm else 1.3 / wide**0.5
        # Products of normed queries and keys are not divided by the root of their width: they would be large.
        around = 0.5 if name.endswith(("q_norm.weight", "k_norm.weight")) and undivided else 1.0
        weight.data = (values * spread + around * float(norm and not centred)).to(torch.bfloat16).float()
    for name, buffer in sorted(model.named_buffers()):
        values = torch.rand(buffer.shape, generator=generator)
        bounds = {"std_bias": (-0.5, 0.5), "std_scale": (0.5, 1.5), "layer_scalar": (0.5, 1.5)}
        # Some are reached.
        bounds |= {"input_min": (-2, -1), "input_max": (1, 2), "output_min": (-2, -1), "output_max": (1, 2)}
        if limits := bounds.get(name.split(".")[-1]):
            made = limits[0] + (limits[1] - limits[0]) * values
            buffer.data = made.to(torch.bfloat16).float()


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
    own = tokenizer(family)
    ids = {name: own.convert_tokens_to_ids(name) for name in family.special}
    model = family.model(config(family, ids)).eval()
    randomise(model, family.centred_norms, family.undivided)
    processor = family.processor()
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
    pieces = text.split(family.placeholder)
    expanded = [family.expand(own, made, index) for index in range(len(pieces) - 1)]
    encoded = [[own.encode(part, add_special_tokens=False) for part in pair] for pair in zip(pieces, [*expanded, ""])]
    tokens = torch.tensor([[token for pair in encoded for part in pair for token in part]])
    placed = [token for plain, shown in encoded for token in plain + [ids[family.placeholder]] * len(shown)]
    rows = tokens == ids[family.row]
    inputs = {name: value for name, value in made.items() if name not in ("num_soft_tokens_per_image", "aspect_ratios")}
    if "<|vision_start|>" in ids or "<image|>" in ids:
        inputs["mm_token_type_ids"] = rows.int()

    def logits(model: torch.nn.Module, dtype: torch.dtype) -> torch.Tensor:
        with torch.no_grad():
            return model(
                input_ids=tokens, **inputs | {"pixel_values": made["pixel_values"].to(dtype)}, use_cache=False
            ).logits[0]

    found = logits(model, torch.float32)
    wide = logits(model.double(), torch.float64)
    error = ((found.double() - wide).abs().max() / wide.abs().max()).item()
    if error > MOST_FLOAT32_ERROR:
        raise ValueError(f"float32 and float64 logits differ by {error:.2e}")
    report = {
        "reference": f"transformers {transformers.__version__}, float32, eager",
        "float64_relative_error": f"{error:.2e}",
        "rows": int(rows.sum()),
    }
    arrays = {"tokens": torch.tensor(placed, dtype=torch.int32), "logits": found[STEP - 1 :: STEP].contiguous()}
    metadata = {"report": json.dumps(report | {"messages": messages})}
    save_file(arrays, folder / "golden.safetensors", metadata=metadata)
    print(json.dumps(report), tokens.shape[1], "tokens")
    if arguments.llama_cpp:
        convert(arguments.llama_cpp, folder, family)


main()
