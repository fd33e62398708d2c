"""Writes the trained weights as a GGUF file (architecture qwen3moe) and checks it by reading it back.

The blocks come from train.py already packed, so this only names tensors and adds the tokenizer, the chat template and
the shape. `--checkpoint` also writes a transformers checkpoint holding the weights exactly as the file rounds them; without
`--packed` that is all it does, from an existing file.
"""

import argparse
import json
import os
import shutil

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

import generate
import model

NAMES = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "q_norm": "attn_q_norm", "k_norm": "attn_k_norm",
         "attn_norm": "attn_norm", "ffn_norm": "ffn_norm", "router": "ffn_gate_inp", "down": "ffn_down_exps"}
TYPES = {"Q4_K": gguf.GGMLQuantizationType.Q4_K, "Q6_K": gguf.GGMLQuantizationType.Q6_K}


def write(packed: dict[str, torch.Tensor], tokenizer: str, out: str, name: str) -> None:
    """The whole file."""
    s, kinds = model.Shape(), model.quantization(model.Shape())
    w = gguf.GGUFWriter(out, "qwen3moe")
    w.add_name(name)
    w.add_description("A small Mixture-of-Experts chat model trained on generated text to show moeflux")
    w.add_license("MIT OR Apache-2.0")
    w.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    w.add_quantization_version(gguf.GGML_QUANT_VERSION)
    w.add_block_count(s.num_hidden_layers)
    w.add_context_length(s.max_position_embeddings)
    w.add_embedding_length(s.hidden_size)
    w.add_feed_forward_length(s.moe_intermediate_size)
    w.add_expert_feed_forward_length(s.moe_intermediate_size)
    w.add_head_count(s.num_attention_heads)
    w.add_head_count_kv(s.num_key_value_heads)
    w.add_key_length(s.head_dim)
    w.add_value_length(s.head_dim)
    w.add_rope_freq_base(s.rope_theta)
    w.add_layer_norm_rms_eps(s.rms_norm_eps)
    w.add_expert_count(s.num_experts)
    w.add_expert_used_count(s.num_experts_per_tok)
    w.add_vocab_size(s.vocab_size)

    with open(os.path.join(tokenizer, "tokenizer.json"), encoding="utf-8") as f:
        bpe = json.load(f)["model"]
    tokens = sorted(bpe["vocab"], key=bpe["vocab"].get)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("qwen2")
    w.add_token_list(tokens)
    w.add_token_types([gguf.TokenType.CONTROL if t in generate.SPECIAL else gguf.TokenType.NORMAL for t in tokens])
    w.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in bpe["merges"]])
    w.add_eos_token_id(generate.IM_END)
    w.add_pad_token_id(generate.END_OF_TEXT)
    w.add_add_bos_token(False)
    with open(os.path.join(tokenizer, "chat_template.jinja"), encoding="utf-8") as f:
        w.add_chat_template(f.read())

    def blocks(key: str, data: torch.Tensor, kind: str) -> None:
        w.add_tensor(key, data.contiguous().numpy(), raw_dtype=TYPES[kind])

    blocks("token_embd.weight", packed["embed"], kinds["embed"][0])
    w.add_tensor("output_norm.weight", packed["final_norm"].numpy())
    for i in range(s.num_hidden_layers):
        for key, gguf_name in NAMES.items():
            full = f"blk.{i}.{gguf_name}.weight"
            if key not in kinds:
                w.add_tensor(full, packed[key][i].contiguous().numpy())
            elif key == "down":
                blocks(full, packed[f"down.{i}"].view(s.num_experts, s.hidden_size, -1), kinds[key][i])
            else:
                blocks(full, packed[f"{key}.{i}"], kinds[key][i])
        gate, up = packed[f"gate_up.{i}"].view(s.num_experts, 2, s.moe_intermediate_size, -1).unbind(1)
        blocks(f"blk.{i}.ffn_gate_exps.weight", gate, kinds["gate_up"][i])
        blocks(f"blk.{i}.ffn_up_exps.weight", up, kinds["gate_up"][i])
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def read(path: str) -> dict[str, torch.Tensor]:
    """The file's weights dequantised by the `gguf` package, under train.py's names."""
    s = model.Shape()
    t = {x.name: torch.from_numpy(np.array(gguf.dequantize(x.data, x.tensor_type))).float() for x in gguf.GGUFReader(path).tensors}
    layers = range(s.num_hidden_layers)
    out = {"embed": t["token_embd.weight"], "final_norm": t["output_norm.weight"]}
    for key, n in NAMES.items():
        out[key] = torch.stack([t[f"blk.{i}.{n}.weight"] for i in layers])
    out["gate_up"] = torch.stack([torch.cat([t[f"blk.{i}.ffn_{n}_exps.weight"] for n in ("gate", "up")], 1) for i in layers])
    return out


def main() -> None:
    """Command line."""
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--packed", help="packed.safetensors from train.py")
    ap.add_argument("--tokenizer", required=True)
    ap.add_argument("--out", required=True, help="the GGUF file")
    ap.add_argument("--name", default="moeflux demo")
    ap.add_argument("--checkpoint", help="folder for a transformers checkpoint of the rounded weights, bf16")
    a = ap.parse_args()
    if a.packed:
        write(load_file(a.packed), a.tokenizer, a.out, a.name)
    size = os.path.getsize(a.out)
    weights = read(a.out)
    print(f"{a.out}: {size} bytes, {sum(v.numel() for v in weights.values())} weights")
    if size > 16_000_000:
        raise SystemExit("the file is larger than 16 MB")
    if a.checkpoint:
        model.to_transformers(model.Shape(), weights, torch.bfloat16).save_pretrained(a.checkpoint)
        for f in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(os.path.join(a.tokenizer, f), a.checkpoint)


if __name__ == "__main__":
    main()
