"""Quantises a checkpoint of train.py to a GGUF file (architecture qwen3moe) and checks it by reading it back, or undoes it.

    export.py --checkpoint DIR --out demo.gguf
    export.py --gguf demo.gguf --out DIR      the file's weights in bf16 and its tokenizer, as transformers and train.py read them
"""

import argparse
import json
import os

import gguf
import numpy as np
import torch
from tokenizers import models

import generate
import model
import quant

NAMES = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "q_norm": "attn_q_norm", "k_norm": "attn_k_norm",
         "attn_norm": "attn_norm", "ffn_norm": "ffn_norm", "router": "ffn_gate_inp", "down": "ffn_down_exps"}
TYPES = {"Q4_K": gguf.GGMLQuantizationType.Q4_K, "Q6_K": gguf.GGMLQuantizationType.Q6_K}


def write(weights: dict[str, torch.Tensor], tokenizer: str, out: str, name: str) -> None:
    """The whole file, from f32 weights as `model.load` gives them and the tokenizer's folder."""
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
        packed = quant.pack(data.reshape(-1, data.shape[-1]), kind)
        w.add_tensor(key, packed.view(*data.shape[:-1], -1).numpy(), raw_dtype=TYPES[kind])

    blocks("token_embd.weight", weights["embed"], kinds["embed"][0])
    w.add_tensor("output_norm.weight", weights["final_norm"].numpy())
    for i in range(s.num_hidden_layers):
        for key, gguf_name in NAMES.items():
            full = f"blk.{i}.{gguf_name}.weight"
            if key in kinds:
                blocks(full, weights[key][i], kinds[key][i])
            else:
                w.add_tensor(full, weights[key][i].contiguous().numpy())
        for part, gguf_name in enumerate(("gate", "up")):
            half = weights["gate_up"][i].unflatten(1, (2, -1))[:, part]
            blocks(f"blk.{i}.ffn_{gguf_name}_exps.weight", half.contiguous(), kinds["gate_up"][i])
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


def save_tokenizer(path: str, out: str) -> None:
    """The tokenizer of a GGUF file that `write` made, as the files that `generate.py tokenizer` makes."""
    fields = gguf.GGUFReader(path).fields
    tokens, merges = (fields["tokenizer.ggml." + k].contents() for k in ("tokens", "merges"))
    tok = generate.bare_tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [tuple(m.split(" ")) for m in merges]))
    tok.add_special_tokens(generate.special_tokens())
    generate.save_tokenizer(tok, out)


def main() -> None:
    """Command line."""
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = ap.add_mutually_exclusive_group(required=True)
    what.add_argument("--checkpoint", help="folder that train.py wrote")
    what.add_argument("--gguf", help="file that this script wrote")
    ap.add_argument("--out", required=True, help="the GGUF file, or the checkpoint's folder")
    ap.add_argument("--name", default="moeflux demo")
    a = ap.parse_args()
    if a.gguf:
        save_tokenizer(a.gguf, a.out)
        model.save(model.Shape(), read(a.gguf), a.out)
        return
    weights, kinds = model.load(model.Shape(), a.checkpoint), model.quantization(model.Shape())
    write(weights, a.checkpoint, a.out, a.name)
    for key, stored in read(a.out).items():
        wanted = quant.rounded_stack(weights[key], kinds[key]) if key in kinds else weights[key]
        if not torch.equal(stored, wanted):
            raise SystemExit(f"{a.out}: {key} reads back differently")
    size = os.path.getsize(a.out)
    print(f"{a.out}: {size} bytes, {sum(v.numel() for v in weights.values())} weights")
    if size > 16_000_000:
        raise SystemExit("the file is larger than 16 MB")


if __name__ == "__main__":
    main()
