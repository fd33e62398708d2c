#!/usr/bin/env python3
"""Makes a tiny random vision model with pictures, and golden logits of it.

    python tools/make_picture_goldens.py OUT

OUT gets the model as published ones are (config, weights, tokenizer, chat template, image processor), pictures as PNG files,
and golden.safetensors: `tokens` i32 (T,) of a conversation that shows the pictures, with the placeholder's id at every token of
a picture; and `logits` f32 (T / STEP, V), of every STEP-th token, that transformers computes in float32 from what its own
processor makes of the pictures. Metadata has the conversation.

Sizes of pictures are chosen so that one is kept, one enlarged and one reduced.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessor
from transformers.models.qwen3_vl_moe import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

SEED = 11
STEP = 4
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


def config(ids: dict[str, int]) -> Qwen3VLMoeConfig:
    text = dict(
        vocab_size=len(ids) + 256,
        hidden_size=24,
        intermediate_size=28,
        moe_intermediate_size=10,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=6,
        num_experts_per_tok=2,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=ids["<|im_end|>"],
        rope_parameters={"rope_type": "default", "rope_theta": 3000.0, "mrope_section": [3, 3, 2]},
    )
    vision = dict(
        depth=4,
        hidden_size=24,
        intermediate_size=20,
        num_heads=2,
        patch_size=4,
        temporal_patch_size=2,
        spatial_merge_size=2,
        num_position_embeddings=25,
        out_hidden_size=24,
        deepstack_visual_indexes=[0, 2],
    )
    return Qwen3VLMoeConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )


def randomise(model: torch.nn.Module) -> None:
    """Weights of some size, so that pictures matter, in values that bfloat16 holds."""
    generator = torch.Generator().manual_seed(SEED)
    for name, weight in sorted(model.named_parameters()):
        norm = "norm" in name and name.endswith("weight")
        wide = weight.shape[-1] if weight.dim() > 1 else 25
        values = torch.randn(weight.shape, generator=generator)
        spread = 0.25 if norm else 1.3 / wide**0.5
        weight.data = (values * spread + float(norm)).to(torch.bfloat16).float()


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


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    own = tokenizer()
    ids = {name: own.convert_tokens_to_ids(name) for name in SPECIAL}
    model = Qwen3VLMoeForConditionalGeneration(config(ids)).eval()
    randomise(model)
    processor = Qwen2VLImageProcessor(
        patch_size=4,
        temporal_patch_size=2,
        merge_size=2,
        image_mean=[0.5, 0.45, 0.4],
        image_std=[0.5, 0.4, 0.6],
        size={"shortest_edge": 4 * 64, "longest_edge": 20 * 64},
    )
    model.bfloat16().save_pretrained(folder)
    model = Qwen3VLMoeForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    own.save_pretrained(folder)
    processor.save_pretrained(folder)

    shown = pictures(folder)
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


main()
