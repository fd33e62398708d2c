"""Runs llama.cpp's converter over several folders in one process.

    llama_cpp_convert.py LLAMA_CPP_SOURCE TYPE[,fused|,mmproj] IN OUT.gguf [IN OUT.gguf ...]

TYPE is f32, bf16, or q8_0: f32, but for matrices that Q8_0 holds exactly. `fused` puts q, k and v into one tensor where the
architecture knows that, and gate and up of experts, or neither. `mmproj` makes the file of what reads pictures; its q8_0 has all
matrices in Q8_0 whose rows allow it, the others in f16.

Prints `OUT.gguf: reason` for those that it cannot convert. The converter knows published tokenizers by a hash of what
they do, so it is told what this one is.
"""

import json
import logging
import sys
from pathlib import Path


# Architectures that published configurations call otherwise than transformers.
PUBLISHED_NAMES = {
    "PhimoeForCausalLM": "PhiMoEForCausalLM",
    "BailingHybridForCausalLM": "BailingMoeV3ForCausalLM",
    "MiniMaxForCausalLM": "MiniMaxText01ForCausalLM",
}
# Those whose configuration transformers would translate to keys that the converter does not read.
PUBLISHED_KEYS = ("MiMoV2FlashForCausalLM", "Qwen4ExpForCausalLM", "BailingHybridForCausalLM", "SarvamMoEForCausalLM")
# Powers of decays, which transformers stores with MiniMax-Text-01.
STORED_POWERS = (".slope_rate", ".query_decay", ".key_decay", ".diagonal_decay")


def exactly_in_q8_0(add_tensor):
    """`add_tensor` for f32 matrices that Q8_0 holds exactly: stored so."""
    import gguf
    import numpy as np
    from gguf.quants import dequantize, quantize

    q8_0 = gguf.GGMLQuantizationType.Q8_0

    def add(writer, name, tensor, raw_shape=None, raw_dtype=None, **rest):
        plain = raw_dtype in (None, gguf.GGMLQuantizationType.F32) and tensor.dtype == np.float32
        if plain and tensor.ndim > 1 and tensor.shape[-1] % 32 == 0 and "ffn_gate_inp" not in name:
            blocks = quantize(np.ascontiguousarray(tensor), q8_0)
            if (dequantize(blocks, q8_0) == tensor).all():
                return add_tensor(writer, name, blocks, raw_dtype=q8_0, **rest)
        return add_tensor(writer, name, tensor, raw_shape, raw_dtype, **rest)

    return add


def main() -> None:
    source, file_type, *paths = sys.argv[1:]
    file_type, _, way = file_type.partition(",")
    fused, mmproj = way == "fused", way == "mmproj"
    sys.path[:0] = [source, str(Path(source) / "gguf-py")]
    logging.disable(logging.CRITICAL)
    import gguf
    import torch
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class
    from conversion.base import TextModel

    TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"
    TextModel._set_vocab_glm = TextModel._set_vocab_gpt2
    names = ("SolarOpenForCausalLM", "DeepseekV32ForCausalLM", "Ernie4_5_MoeForCausalLM", "HYV3ForCausalLM", "HunYuanMoEV1ForCausalLM")
    others = ("MellumForCausalLM", "Cohere2MoeForCausalLM", "PhiMoEForCausalLM", "JambaForCausalLM")
    for name in (*names, *others, "Gemma4ForConditionalGeneration"):
        get_model_class(name).set_vocab = TextModel._set_vocab_gpt2
    lightning = get_model_class("MiniMaxText01ForCausalLM")
    lightning.set_vocab = TextModel._set_vocab_gpt2
    lightning._get_suppress_tokens = lambda self: None
    lightning.filter_tensors = classmethod(
        lambda cls, item: None if item[0].endswith(STORED_POWERS) else super(lightning, cls).filter_tensors(item)
    )
    load_hparams = ModelBase.load_hparams

    def as_published(folder: Path, *rest: bool, **more: bool) -> dict:
        """A configuration with the keys that transformers would drop or give other names."""
        stored = json.loads((Path(folder) / "config.json").read_text())
        if stored["model_type"] == "step3p5":
            return stored
        hparams = load_hparams(folder, *rest, **more)
        if stored["model_type"] in ("minimax_m3_vl", "glm5_next"):
            hparams["text_config"] |= stored["text_config"]
        if stored["model_type"] == "gemma4":
            hparams["text_config"].setdefault("global_head_dim", stored["text_config"]["head_dim"])
        return hparams

    ModelBase.load_hparams = staticmethod(as_published)
    # Names are known for as many layers as there are; the two layers of an adapter count as such.
    name_map = gguf.get_tensor_name_map
    gguf.get_tensor_name_map = lambda architecture, layers: name_map(architecture, max(layers, 3))
    types = {name: gguf.LlamaFileType.ALL_F32 for name in ("f32", "q8_0")} | {"bf16": gguf.LlamaFileType.MOSTLY_BF16}
    if file_type == "q8_0" and mmproj:
        types["q8_0"] = gguf.LlamaFileType.MOSTLY_Q8_0
    elif file_type == "q8_0":
        gguf.GGUFWriter.add_tensor = exactly_in_q8_0(gguf.GGUFWriter.add_tensor)
    for folder, out in zip(paths[::2], paths[1::2], strict=True):
        for fuse in ({"fuse_gate_up_exps": True, "fuse_qkv": True}, {})[0 if fused else 1 :]:
            try:
                with torch.inference_mode():
                    parameters = ModelBase.load_hparams(Path(folder), False)
                    name = get_model_architecture(parameters, ModelType.MMPROJ if mmproj else ModelType.TEXT)
                    converter = get_model_class(PUBLISHED_NAMES.get(name, name), mmproj)
                    # Layers that predict further tokens are not there.
                    converter.no_mtp = True
                    more = {"eager": file_type == "q8_0"} | fuse
                    if name in PUBLISHED_KEYS:
                        more["hparams"] = json.loads((Path(folder) / "config.json").read_text())
                    converter(Path(folder), types[file_type], Path(out), **more).write()
                break
            except Exception as error:
                # Not every architecture has tensors for fused projections.
                if not fuse:
                    print(f"{out}: {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
