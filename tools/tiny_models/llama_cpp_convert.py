"""Runs llama.cpp's converter over several folders in one process.

    llama_cpp_convert.py LLAMA_CPP_SOURCE TYPE[,fused] IN OUT.gguf [IN OUT.gguf ...]

`fused` puts q, k and v into one tensor where the architecture knows that, and gate and up of experts, or neither.

Prints `OUT.gguf: reason` for those that it cannot convert. The converter knows published tokenizers by a hash of what
they do, so it is told what this one is.
"""

import json
import logging
import sys
from pathlib import Path


def main() -> None:
    source, file_type, *paths = sys.argv[1:]
    file_type, _, fused = file_type.partition(",")
    sys.path[:0] = [source, str(Path(source) / "gguf-py")]
    logging.disable(logging.CRITICAL)
    import gguf
    import torch
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class
    from conversion.base import TextModel

    TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"
    TextModel._set_vocab_glm = TextModel._set_vocab_gpt2
    for name in ("SolarOpenForCausalLM", "DeepseekV32ForCausalLM", "Ernie4_5_MoeForCausalLM", "HYV3ForCausalLM"):
        get_model_class(name).set_vocab = TextModel._set_vocab_gpt2
    load_hparams = ModelBase.load_hparams

    def as_published(folder: Path, *rest: bool) -> dict:
        """A configuration with the keys that transformers would drop or give other names."""
        stored = json.loads((Path(folder) / "config.json").read_text())
        if stored["model_type"] == "step3p5":
            return stored
        hparams = load_hparams(folder, *rest)
        if stored["model_type"] in ("minimax_m3_vl", "glm5_next"):
            hparams["text_config"] |= stored["text_config"]
        return hparams

    ModelBase.load_hparams = staticmethod(as_published)
    types = {"f32": gguf.LlamaFileType.ALL_F32, "bf16": gguf.LlamaFileType.MOSTLY_BF16}
    for folder, out in zip(paths[::2], paths[1::2], strict=True):
        for fuse in ({"fuse_gate_up_exps": True, "fuse_qkv": True}, {})[0 if fused else 1 :]:
            try:
                with torch.inference_mode():
                    parameters = ModelBase.load_hparams(Path(folder), False)
                    name = get_model_architecture(parameters, ModelType.TEXT)
                    converter = get_model_class(name)
                    # Layers that predict further tokens are not there.
                    converter.no_mtp = True
                    converter(Path(folder), types[file_type], Path(out), **fuse).write()
                break
            except Exception as error:
                # Not every architecture has tensors for fused projections.
                if not fuse:
                    print(f"{out}: {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
