"""Writes GGUF files in the form of llama.cpp's converter, and reads their dequantised weights back.

F32 and F16 files come from here; every other type is made from the F32 file by llama.cpp's own quantiser
(see `llama_cpp_peer.py`). The golden is transformers' logits on the weights as `gguf.quants` dequantises
them.
"""

import json
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.quants import dequantize
from safetensors import safe_open
from safetensors.torch import load_file

from . import golden, hf_files, published
from .gguf_cases import GgufCase
from .hf_case import HfCase
from .hf_files import build_model
from .vocabularies import CHAT_TEMPLATE, SPECIAL_TOKENS, byte_level_bpe, sentencepiece_bpe
from .weights import CORRECTION_BIAS, correction_biases

ARCHITECTURES = {
    "qwen3_moe": "qwen3moe",
    "mixtral": "llama",
    "olmoe": "olmoe",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe": "glm4moe",
    "minimax_m2": "minimax-m2",
}
DEEPSEEK = ("deepseek_v2", "deepseek_v3")
# Vocabulary sizes; the models' are larger where a published one pads its embedding.
BPE_SIZE = 293
PEER = Path(__file__).with_name("llama_cpp_peer.py")
CONVERT = Path(__file__).with_name("llama_cpp_convert.py")

# transformers' module name within a layer → GGUF's name within a block.
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
}
# Names in which a family differs.
FAMILY_NAMES = {"glm4_moe": {"post_attention_layernorm": "post_attention_norm"}}
MODEL_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def write_case(
    case: GgufCase, out: Path, llama_python: str, llama_cpp: Path | None = None
) -> dict[str, str]:
    """Writes `out/case.name` afresh: the model file or files and golden.safetensors."""
    folder = out / case.name
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    path = folder / "model.gguf"
    if case.converted:
        if llama_cpp is None:
            raise SystemExit(f"{case.name} is made by llama.cpp's converter: --llama-cpp SOURCE")
        return write_converted(case, path, llama_python, llama_cpp)
    model = build_model(case.family, case.config, torch.float32, case.seed)
    if case.file_type in ("F32", "F16"):
        write_gguf(path, model, case, case.file_type)
        if case.tensors_per_split:
            path = min(folder.glob("model-*.gguf"))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            source = Path(scratch) / "f32.gguf"
            write_gguf(source, model, case, "F32")
            overrides = [f"{pattern}={kind}" for pattern, kind in case.overrides.items()]
            subprocess.run(
                [llama_python, PEER, "quantize", source, path, case.file_type, *overrides], check=True
            )

    load_dequantised(model, sorted(folder.glob("*.gguf")), case.family)
    found = golden.reference(model, case.n_tokens, case.seed)
    peer = peer_logits(llama_python, path, found.tokens)
    return golden.save_with_peer(folder, found, "llama.cpp", peer, case.keep_peer_logits)


def write_converted(case: GgufCase, path: Path, llama_python: str, llama_cpp: Path) -> dict[str, str]:
    """Has llama.cpp's converter make the file; the golden is that of the folder it was made from, whose weights the file's
    types hold exactly."""
    multimodal = case.family in ("qwen3_5_moe_text", "mistral4")
    exact = case.file_type == "Q8_0"
    # Keys of published configurations, which converters read.
    step = case.family == "step3p7"
    source = HfCase(
        case.name,
        case.family,
        case.seed,
        case.config,
        dtype="float32" if exact or case.file_type == "F32" else "bfloat16",
        q8_0=exact,
        mxfp4=case.family == "gpt_oss",
        config_edits={"text_config": case.config["text_config"]} if step else {},
        text_only=step,
        multimodal=multimodal,
        stacked_experts=multimodal,
        published_keys=case.family in published.REPUBLISHED,
        fp4="experts" if case.family == "deepseek_v4" else "",
        interleaved=case.family == "hy_v4",
        renames=published.HY_V4_RENAMES if case.family == "hy_v4" else (),
        tokenizer_size=BPE_SIZE,
        n_tokens=case.n_tokens,
        late_edits=case.published,
    )
    with tempfile.TemporaryDirectory() as scratch:
        hf_files.write_case(source, Path(scratch))
        unconverted = Path(scratch) / case.name
        command = [sys.executable, CONVERT, llama_cpp, case.file_type.lower(), unconverted, path]
        subprocess.run(command, check=True)
        saved = load_file(unconverted / "golden.safetensors")
        with safe_open(unconverted / "golden.safetensors", "pt") as file:
            report = json.loads(file.metadata()["report"])
    found = golden.Reference(saved["tokens"].long(), saved["logits"], report)
    if not case.peer:
        golden.save(path.parent, found)
        return found.report
    peer = peer_logits(llama_python, path, found.tokens, case.flash_attention)
    return golden.save_with_peer(path.parent, found, "llama.cpp", peer, case.keep_peer_logits)


def peer_logits(
    llama_python: str, path: Path, tokens: torch.Tensor, flash_attention: bool = False
) -> np.ndarray:
    """llama.cpp's logits (T, V) f32 on the same file, with its own default settings."""
    with tempfile.TemporaryDirectory() as scratch:
        written = Path(scratch) / "logits.npy"
        subprocess.run(
            [llama_python, PEER, "logits", path, json.dumps(tokens.tolist()), written]
            + ["flash"] * flash_attention,
            check=True,
        )
        return np.load(written)


def write_gguf(path: Path, model: torch.nn.Module, case: GgufCase, file_type: str) -> None:
    """Writes metadata, vocabulary and tensors; matrices in `file_type`, vectors and routers in F32."""
    architecture = ARCHITECTURES[case.family]
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=case.tensors_per_split)
    writer.add_type("model")
    writer.add_name(case.name)
    add_parameters(writer, model.config, case.family)
    if case.family in DEEPSEEK:
        add_latent_attention(writer, model.config, case)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32 if file_type == "F32" else gguf.LlamaFileType.MOSTLY_F16)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    if case.vocabulary == "spm":
        add_sentencepiece(writer, model.config.vocab_size)
    else:
        add_byte_level_bpe(writer, model.config.vocab_size)
    for name, tensor in tensors(model, case.family, case.joint_kv_b):
        narrow = file_type == "F16" and tensor.ndim > 1 and "ffn_gate_inp" not in name
        writer.add_tensor(name, tensor.numpy().astype(np.float16 if narrow else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_parameters(writer: gguf.GGUFWriter, config, family: str) -> None:
    """The keys that llama.cpp's converter writes for these families."""
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    if family not in DEEPSEEK:
        writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    experts = config.n_routed_experts if family in DEEPSEEK else config.num_local_experts
    writer.add_expert_count(experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    head_dim = getattr(config, "head_dim", None)
    if head_dim is not None and family not in DEEPSEEK:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if family == "qwen3_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if family == "glm4_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    if family == "minimax_m2":
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if family in ("glm4_moe", "minimax_m2"):
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if family == "mixtral":
        writer.add_vocab_size(config.vocab_size)
        writer.add_rope_dimension_count(head_dim or config.hidden_size // config.num_attention_heads)


def add_latent_attention(writer: gguf.GGUFWriter, config, case: GgufCase) -> None:
    """The keys of architecture deepseek2."""
    head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    if case.joint_kv_b:
        writer.add_head_count_kv(config.num_attention_heads)
        writer.add_key_length(head_dim)
        writer.add_value_length(config.v_head_dim)
    else:
        writer.add_head_count_kv(1)
        writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(head_dim)
        writer.add_value_length_mla(config.v_head_dim)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_vocab_size(config.vocab_size)
    writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    if config.norm_topk_prob:
        writer.add_expert_weights_norm(True)
    if case.family == "deepseek_v3":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)


def add_byte_level_bpe(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """A gpt2-style vocabulary, padded to the width of the embedding as the converter does."""
    tokenizer = byte_level_bpe(BPE_SIZE)
    tokens = [tokenizer.id_to_token(token) or f"[PAD{token}]" for token in range(vocab_size)]
    kinds = [gguf.TokenType.NORMAL] * BPE_SIZE + [gguf.TokenType.UNUSED] * (vocab_size - BPE_SIZE)
    for token in SPECIAL_TOKENS:
        kinds[tokenizer.token_to_id(token)] = gguf.TokenType.CONTROL
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(tokenizer.token_to_id("<|im_end|>"))
    writer.add_pad_token_id(tokenizer.token_to_id("<|endoftext|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def add_sentencepiece(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """A llama-style vocabulary of exactly `vocab_size` pieces."""
    vocabulary = sentencepiece_bpe(vocab_size)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_scores(vocabulary.scores)
    writer.add_token_types(vocabulary.types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)


def tensors(model: torch.nn.Module, family: str, joint_kv_b: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the file under its GGUF name, f32."""
    config = model.config
    if config.rope_parameters["rope_type"] == "llama3":
        yield "rope_freqs.weight", llama3_factors(config)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        module, _, kind = name.rpartition(".")
        if module in MODEL_NAMES:
            yield f"{MODEL_NAMES[module]}.{kind}", tensor
            continue
        layer, block = split_layer(name)
        if block == "mlp.gate.e_score_correction_bias":
            yield f"blk.{layer}.exp_probs_b.bias", tensor
        elif block == "self_attn.kv_b_proj.weight" and not joint_kv_b:
            heads = tensor.unflatten(0, (config.num_attention_heads, -1))
            k, v = heads.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
            yield f"blk.{layer}.attn_k_b.weight", k.transpose(1, 2).contiguous()
            yield f"blk.{layer}.attn_v_b.weight", v.contiguous()
        elif block == "mlp.experts.gate_up_proj":
            gate, up = tensor.chunk(2, dim=1)
            yield f"blk.{layer}.ffn_gate_exps.weight", gate.contiguous()
            yield f"blk.{layer}.ffn_up_exps.weight", up.contiguous()
        elif block == "mlp.experts.down_proj":
            yield f"blk.{layer}.ffn_down_exps.weight", tensor
        else:
            module, _, kind = block.rpartition(".")
            if family == "mixtral" and module in ("self_attn.q_proj", "self_attn.k_proj"):
                tensor = interleave_rotary(tensor, heads_of(config, module))
            yield gguf_name(layer, block, family), tensor


def gguf_name(layer: int, block: str, family: str) -> str:
    """The name of a layer's tensor in the file."""
    module, _, kind = block.rpartition(".")
    if kind == CORRECTION_BIAS:
        return f"blk.{layer}.exp_probs_b.bias"
    module = (LAYER_NAMES | FAMILY_NAMES.get(family, {}))[module]
    return f"blk.{layer}.{module}.{kind}"


def split_layer(name: str) -> tuple[int, str]:
    """ "model.layers.3.mlp.gate.weight" → (3, "mlp.gate.weight")."""
    _, _, layer, rest = name.split(".", 3)
    return int(layer), rest


def heads_of(config, module: str) -> int:
    """Number of heads that the rows of a q or k projection belong to."""
    return config.num_attention_heads if module.endswith("q_proj") else config.num_key_value_heads


def interleave_rotary(weight: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Rows of each head from half-split rotary order (i, i + d/2) to interleaved pairs (2i, 2i + 1)."""
    rows = weight.shape[0] // n_heads
    halves = weight.reshape(n_heads, 2, rows // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape).contiguous()


def deinterleave_rotary(weight: torch.Tensor, n_heads: int) -> torch.Tensor:
    """The inverse of `interleave_rotary`."""
    rows = weight.shape[0] // n_heads
    pairs = weight.reshape(n_heads, rows // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape).contiguous()


def llama3_factors(config) -> torch.Tensor:
    """Divisor of each rotary frequency (head_dim / 2,) f32, as `rope_freqs.weight` holds it."""
    rope = config.rope_parameters
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    context = rope["original_max_position_embeddings"]
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / head_dim)
        if wavelength < context / high:
            factors.append(1.0)
        elif wavelength > context / low:
            factors.append(factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return torch.tensor(factors, dtype=torch.float32)


def load_dequantised(model: torch.nn.Module, files: list[Path], family: str) -> None:
    """Replaces the model's weights with those of the files, dequantised to f32."""
    read = {}
    for file in files:
        for tensor in gguf.GGUFReader(file).tensors:
            # ggml lists dimensions from the innermost outwards.
            shape = tuple(int(size) for size in reversed(tensor.shape))
            read[tensor.name] = torch.from_numpy(
                dequantize(tensor.data, tensor.tensor_type).reshape(shape).astype(np.float32)
            )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            module, _, kind = name.rpartition(".")
            if module in MODEL_NAMES:
                parameter.copy_(read.pop(f"{MODEL_NAMES[module]}.{kind}"))
                continue
            layer, block = split_layer(name)
            if f"blk.{layer}.attn_k_b.weight" in read and block == "self_attn.kv_b_proj.weight":
                k, v = (read.pop(f"blk.{layer}.attn_{part}_b.weight") for part in ("k", "v"))
                parameter.copy_(torch.cat([k.transpose(1, 2), v], dim=1).flatten(0, 1))
            elif block == "mlp.experts.gate_up_proj":
                parts = [read.pop(f"blk.{layer}.ffn_{part}_exps.weight") for part in ("gate", "up")]
                parameter.copy_(torch.cat(parts, dim=1))
            elif block == "mlp.experts.down_proj":
                parameter.copy_(read.pop(f"blk.{layer}.ffn_down_exps.weight"))
            else:
                module, _, kind = block.rpartition(".")
                weight = read.pop(gguf_name(layer, block, family))
                if family == "mixtral" and module in ("self_attn.q_proj", "self_attn.k_proj"):
                    weight = deinterleave_rotary(weight, heads_of(model.config, module))
                parameter.copy_(weight)
        for name, buffer in correction_biases(model).items():
            buffer.copy_(read.pop(gguf_name(*split_layer(name), family)))
    read.pop("rope_freqs.weight", None)
    if read:
        raise ValueError(f"tensors that the model does not have: {sorted(read)}")
