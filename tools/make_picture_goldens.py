#!/usr/bin/env python3
"""Makes a tiny random vision model with pictures, and golden logits of it.

    python tools/make_picture_goldens.py FAMILY OUT [--llama-cpp SOURCE | --mlx]

FAMILY is qwen3_vl_moe, qwen3_5_moe, gemma4 or llama4. The folder OUT/FAMILY gets the model as published ones are (config, weights, tokenizer,
chat template, image processor) and golden.safetensors: `tokens` i32 (T,) of a conversation that shows the pictures, with the
placeholder's id at every token of a picture; and `logits` f32 (T / STEP, V), of every STEP-th token, that transformers computes
in float32 from what its own processor makes of the pictures. Metadata has the conversation.

OUT gets the pictures as PNG files, the same for all families. Their sizes are chosen so that one is kept, one enlarged and one
reduced.

With llama.cpp's source tree, its converter makes OUT/FAMILY_gguf: model.gguf, and of what reads pictures mmproj-bf16.gguf and, of
qwen3_vl_moe, mmproj-q8_0.gguf. Of qwen3_5_moe it makes none.

With --mlx there is OUT/FAMILY_mlx instead: a model whose rows are long enough, quantised to 4 bits by mlx-vlm (a package to be
installed, or in PYTHONPATH), of qwen3_vl_moe the tower too, with the golden of what mlx dequantises.
"""

import argparse
import contextlib
import io
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
# What is wider where groups of 32 are to be quantised.
WIDE = dict(hidden_size=32, moe_intermediate_size=32)

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


def tower_width(text: dict) -> dict:
    """Of towers for models that are to be quantised."""
    wide = text["hidden_size"] == WIDE["hidden_size"]
    return dict(hidden_size=32, intermediate_size=32, out_hidden_size=32) if wide else {}


def qwen3_vl_moe(common: dict, text: dict) -> Qwen3VLMoeConfig:
    rope = {"rope_type": "default", "rope_theta": 3000.0, "mrope_section": [3, 3, 2]}
    own = dict(intermediate_size=28, num_hidden_layers=2, head_dim=16, rope_parameters=rope)
    tower = TOWER | tower_width(text) | dict(deepstack_visual_indexes=[0, 2])
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
    return Qwen3_5MoeConfig(text_config=text | own, vision_config=TOWER | tower_width(text), **common)


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
    tower |= {key: width for key, width in tower_width(text).items() if key != "out_hidden_size"}
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
    if tower_width(text):
        own |= dict(intermediate_size=32, intermediate_size_mlp=32)
        tower |= dict(hidden_size=32, intermediate_size=128, vision_output_dim=32)
        tower |= dict(projector_input_dim=32, projector_output_dim=32)
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
    # Whether there are files with a quantised tower too.
    quantised_tower: bool = False


FAMILIES = {
    "qwen3_vl_moe": Family(
        qwen3_vl_moe,
        Qwen3VLMoeForConditionalGeneration,
        qwen_processor,
        expand_qwen,
        published_columns=True,
        quantised_tower=True,
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


def config(family: Family, ids: dict[str, int], wide: bool) -> transformers.PreTrainedConfig:
    text = TEXT | (WIDE if wide else {}) | dict(vocab_size=len(ids) + 256, eos_token_id=ids["<|im_end|>"])
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


def exchange_rows(file: Path) -> None:
    """Rows of experts' matrices become columns."""
    weights = load_file(file)
    for name, weight in weights.items():
        if ".mlp.experts." in name:
            weights[name] = weight.transpose(1, 2).contiguous()
    save_file(weights, file, metadata={"format": "pt"})


def convert(llama_cpp: Path, folder: Path, family: Family) -> None:
    """The GGUF files of the model in `folder`."""
    out = folder.with_name(f"{folder.name}_gguf")
    out.mkdir(exist_ok=True)
    files = {"bf16": "model.gguf", "bf16,mmproj": "mmproj-bf16.gguf"}
    if family.quantised_tower:
        files["q8_0,mmproj"] = "mmproj-q8_0.gguf"
    with tempfile.TemporaryDirectory() as around:
        published = Path(around) / folder.name
        shutil.copytree(folder, published)
        (published / "golden.safetensors").unlink()
        if family.published_columns:
            exchange_rows(published / "model.safetensors")
        for kind, name in files.items():
            command = [sys.executable, CONVERT, llama_cpp, kind, published, out / name]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            if said:
                raise ValueError(said)


def tower_too(path: str, module: object) -> bool:
    """Quantises what mlx-vlm would and, as its earlier versions did, the tower."""
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0


def convert_to_mlx(folder: Path, out: Path, family: Family) -> None:
    """What mlx-vlm makes of the model in `folder`, in 4 bits."""
    from mlx_vlm.convert import convert as quantise

    with tempfile.TemporaryDirectory() as around:
        published = Path(around) / folder.name
        shutil.copytree(folder, published)
        if family.published_columns:
            exchange_rows(published / "model.safetensors")
        kept = json.loads((folder / "config.json").read_text())
        text, vision = kept["text_config"], kept["vision_config"]
        # Keys as published configurations have them.
        for section in (text, vision):
            rope = section.get("rope_parameters") or {}
            if "rope_theta" in rope:
                section["rope_theta"] = rope["rope_theta"]
        if "mrope_section" in text["rope_parameters"]:
            vision["model_type"] = kept["model_type"]
            if kept["model_type"] == "qwen3_vl_moe":
                text["rope_scaling"] = text["rope_parameters"] | {"mrope_interleaved": True}
                text["num_experts"] = text["num_local_experts"]
                text["tie_word_embeddings"] = False
            else:
                text["full_attention_interval"] = 2
        if kept["model_type"] == "gemma4":
            text["global_head_dim"] = text["head_dim"]
        if kept["model_type"] == "llama4":
            vision["vision_feature_layer"] = -1
        (published / "config.json").write_text(json.dumps(kept))
        with contextlib.redirect_stdout(io.StringIO()):
            rule = tower_too if family.quantised_tower else None
            options = dict(dtype="bfloat16", quantize=True, q_group_size=32, q_bits=4, quant_predicate=rule)
            quantise(str(published), mlx_path=out, **options)
    for file in out.iterdir():
        if file.name in ("README.md", "processor_config.json", "generation_config.json", "model.safetensors.index.json"):
            file.unlink()


def read_mlx(model: torch.nn.Module, folder: Path, centred_norms: bool) -> int:
    """Gives `model` the weights of an MLX folder, dequantised to float32; how many modules are quantised."""
    import mlx.core as mx

    quantization = json.loads((folder / "config.json").read_text())["quantization"]
    stored = mx.load(str(folder / "model.safetensors"))
    quantised = 0

    def array(name: str) -> torch.Tensor:
        nonlocal quantised
        weight, module = stored[name], name.removesuffix(".weight")
        if f"{module}.scales" in stored:
            own = quantization.get(module, quantization)
            scales, biases = (stored[f"{module}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
            weight = mx.dequantize(weight, scales, biases, group_size=own["group_size"], bits=own["bits"])
            quantised += 1
        return torch.from_numpy(np.array(weight.astype(mx.float32)))

    def name_of(name: str) -> str:
        name = name.replace("model.visual.", "vision_tower.").removeprefix("model.")
        if name.startswith("language_model."):
            rest = name.removeprefix("language_model.").removeprefix("model.")
            return f"language_model.{rest}" if rest.startswith("lm_head") else f"language_model.model.{rest}"
        return f"language_model.{name}" if name.startswith("lm_head") else name

    def experts(name: str) -> torch.Tensor:
        module, part = name.rsplit(".", 1)
        owner = module.removesuffix(".experts")
        names = [f"{owner}.switch_mlp", f"{module}.switch_glu", module]
        found = next(name for name in names if f"{name}.down_proj.weight" in stored)
        parts = ["gate_proj", "up_proj"] if part == "gate_up_proj" else ["down_proj"]
        return torch.cat([array(f"{found}.{part}.weight") for part in parts], dim=1)

    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            own = name_of(name)
            if own.endswith((".experts.gate_up_proj", ".experts.down_proj")):
                made = experts(own)
                # Llama 4's have rows as columns.
                parameter.copy_(made.transpose(1, 2) if ".feed_forward." in own else made)
                continue
            if own not in stored:
                if any(parameter is other for other in model.parameters()):
                    raise ValueError(f"{own} is not in the folder")
                continue
            made = array(own)
            if "patch_embed.proj.weight" in own:
                made = made.permute(0, 4, 1, 2, 3)
            elif "conv1d" in own:
                made = made.transpose(1, 2)
            elif centred_norms and "norm" in own and "vision" not in own and "linear_attn" not in own:
                made = made - 1.0
            parameter.copy_(made.reshape(parameter.shape))
    model.tie_weights()
    return quantised


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--llama-cpp", type=Path, help="llama.cpp's source tree, for GGUF files")
    parser.add_argument("--mlx", action="store_true", help="an MLX folder that mlx-vlm quantises")
    arguments = parser.parse_args()
    family, folder = FAMILIES[arguments.family], arguments.out / arguments.family
    if arguments.mlx:
        with tempfile.TemporaryDirectory() as around:
            plain = Path(around) / arguments.family
            model = make(family, plain, wide=True)
            folder = folder.with_name(f"{folder.name}_mlx")
            folder.mkdir(parents=True, exist_ok=True)
            convert_to_mlx(plain, folder, family)
            print(read_mlx(model, folder, family.centred_norms), "quantised modules")
    else:
        model = make(family, folder, wide=False)
    write_golden(family, model, folder, pictures(arguments.out))
    if arguments.llama_cpp:
        convert(arguments.llama_cpp, folder, family)


def make(family: Family, folder: Path, wide: bool) -> torch.nn.Module:
    """Writes a model with what belongs to it, and reads it in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    own = tokenizer(family)
    ids = {name: own.convert_tokens_to_ids(name) for name in family.special}
    model = family.model(config(family, ids, wide)).eval()
    randomise(model, family.centred_norms, family.undivided)
    model.bfloat16().save_pretrained(folder)
    own.save_pretrained(folder)
    family.processor().save_pretrained(folder)
    return family.model.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def write_golden(family: Family, model: torch.nn.Module, folder: Path, shown: list[Image.Image]) -> None:
    own, processor = tokenizer(family), family.processor()
    ids = {name: own.convert_tokens_to_ids(name) for name in family.special}
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


main()
