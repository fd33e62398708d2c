"""Runs llama.cpp through llama-cpp-python: quantises a GGUF file, or writes its logits.

Started as its own process with an interpreter that has llama-cpp-python and numpy, because that package is
built from source and need not share an environment with torch.

    llama_cpp_peer.py quantize IN.gguf OUT.gguf FILE_TYPE [PATTERN=TYPE ...]
    llama_cpp_peer.py logits MODEL.gguf '[1, 2, 3]' OUT.npy [flash|f32]
    llama_cpp_peer.py logits MODEL.gguf - OUT.npy [flash] <<< '[[1, 2, 3], [4, 5]]'
"""

import ctypes
import json
import sys

import llama_cpp
import numpy as np

# ggml_type values (ggml.h).
GGML_TYPES = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q5_0": 6,
    "Q8_0": 8,
    "Q2_K": 10,
    "Q3_K": 11,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "Q4_1": 3,
    "Q5_1": 7,
    "IQ3_XXS": 18,
    "IQ4_NL": 20,
    "IQ3_S": 21,
    "IQ2_S": 22,
    "IQ4_XS": 23,
}


@llama_cpp.llama_log_callback
def _quiet(level: int, text: bytes, user_data: ctypes.c_void_p) -> None:
    """Keeps errors only (ggml's level 4)."""
    if level == 4:
        sys.stderr.write(text.decode(errors="replace"))


def quantize(source: str, out: str, file_type: str, *overrides: str) -> None:
    """llama.cpp's own quantiser, single-threaded so that the file is the same on every run."""
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{file_type}")
    parameters.nthread = 1
    rows = (llama_cpp.llama_model_tensor_override * (len(overrides) + 1))()
    for row, override in zip(rows, overrides, strict=False):
        pattern, _, kind = override.partition("=")
        row.pattern = pattern.encode()
        row.type = GGML_TYPES[kind]
        if pattern == "token_embd":
            parameters.token_embedding_type = GGML_TYPES[kind]
    if overrides:
        parameters.tt_overrides = rows
    status = llama_cpp.llama_model_quantize(source.encode(), out.encode(), ctypes.byref(parameters))
    if status != 0:
        raise SystemExit(f"llama_model_quantize gave {status} for {out}")


def logits(model: str, tokens: str, out: str, attention: str = "") -> None:
    """Logits (T, V) f32 of a prompt in one batch, or of those on standard input one after the other; with the binding's
    default settings (f16 cache, int8 activations), with flash attention, or with a cache in f32."""
    prompts = json.load(sys.stdin) if tokens == "-" else [json.loads(tokens)]
    longest = max(len(prompt) for prompt in prompts)
    flash = attention == "flash"
    # As the file says: the binding's own defaults would stand for its YaRN parameters.
    yarn = {f"yarn_{name}": -1.0 for name in ("ext_factor", "attn_factor", "beta_fast", "beta_slow")}
    cache = {"type_k": GGML_TYPES["F32"], "type_v": GGML_TYPES["F32"]} if attention == "f32" else {}
    options = yarn | cache
    llama = llama_cpp.Llama(model, n_ctx=longest, logits_all=True, verbose=False, flash_attn=flash, **options)
    found = []
    for prompt in prompts:
        llama.reset()
        llama.eval(prompt)
        found.append(np.array(llama.scores[: len(prompt)], dtype=np.float32))
    np.save(out, np.concatenate(found))


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    llama_cpp.llama_log_set(_quiet, ctypes.c_void_p(0))
    {"quantize": quantize, "logits": logits}[command](*arguments)
