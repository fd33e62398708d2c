#!/usr/bin/env python3
"""Measures what the formats that people download cost: perplexity and KL divergence from the same weights in F32.

    python bench/formats.py MOEFLUX --llama-python PYTHON [--every N] [--threads N] [--models demo,random] [--formats "NAME;..."]
                            [--work FOLDER] [--json FILE]

Two models are written in every format: the demo model, and one with random weights (`wide_qwen3_moe` of
tools/make_tiny_models.py). GGUF types are made by llama.cpp's own quantiser without an importance matrix, MLX folders by
mlx-lm, FP8, MXFP8, NVFP4 and INT4 by tools/tiny_models, rounded to the nearest; tensors that those leave as they are become
bf16. The demo model was trained against the rounding of its own file, whose Q4_K blocks hold its weights exactly. So its
channels are shuffled first, which leaves its function as it was (the first row) and puts other weights into each block.

The text is every Nth problem of models/demo/eval.jsonl with its answer, which the demo model has not seen; half of each window
of 512 tokens is scored. All divergences, in nats, are from the F32 file with `--activations f32`. Beside moeflux with f32 and
with its default activations stands llama.cpp on the same GGUF file, in its defaults. Wants tools/requirements.txt, and an
interpreter with llama-cpp-python.
"""

import argparse
import contextlib
import copy
import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import mlx_lm
import numpy as np
import torch
import transformers
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file
from transformers import Qwen3MoeForCausalLM

sys.dont_write_bytecode = True
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tools" / "demo_model")]
import export  # noqa: E402
import model as demo_model  # noqa: E402
from compare_int8 import PEER, divergence, peer_logits, spread  # noqa: E402
from tiny_models import fp8, gguf_cases, gguf_files, hf_files, quantised  # noqa: E402
from tiny_models.hf_case import HfCase  # noqa: E402

DEMO = ROOT / "models" / "demo" / "demo.gguf"
EVAL = ROOT / "models" / "demo" / "eval.jsonl"
RANDOM = "wide_qwen3_moe_f32"
SHIPPED = "as it is shipped"
WINDOW = 512

# Name in the table → llama.cpp's file type.
GGUF_TYPES = {
    "F16": "F16",
    "BF16": "BF16",
    "Q8_0": "Q8_0",
    "Q6_K": "Q6_K",
    "Q5_K_M": "Q5_K_M",
    "Q4_K_M": "Q4_K_M",
    "IQ4_XS": "IQ4_XS",
    "Q4_0": "Q4_0",
    "MXFP4": "MXFP4_MOE",
}
MLX_BITS = {"MLX 8-bit": 8, "MLX 6-bit": 6, "MLX 4-bit": 4}
# Name in the table → kind of tools/tiny_models.
FOLDER_KINDS = {
    "FP8, 128 × 128": "fp8",
    "FP8, rows": "rows",
    "MXFP8": "mxfp8",
    "NVFP4": "nvfp4",
    "INT4, groups of 32": "int4",
}

COLUMNS = [
    ["format", "{format}"],
    ["MB", "{megabytes:.2f}"],
    ["bits a weight", "{bits:.2f}"],
    ["perplexity", "{perplexity:.2f}"],
    ["mean KL", "{mean:.1e} ± {error:.0e}"],
    ["median", "{median:.1e}"],
    ["99 %", "{quantile_99:.1e}"],
    ["same top token", "{same_top:.1f}%"],
    ["default activations: mean KL", "{default_mean:.1e} ± {default_error:.0e}"],
    ["same top token", "{default_same_top:.1f}%"],
    ["llama.cpp: mean KL", "{peer}"],
    ["moeflux to llama.cpp: means, medians", "{ratios}"],
]


@dataclass
class Original:
    """A model in F32: as transformers has it, as a GGUF file, and as a folder."""

    model: torch.nn.Module
    file: Path
    folder: Path
    # Tensors' values, those of tied ones once.
    n_weights: int


def demo(work: Path) -> Original:
    """The demo model with shuffled channels."""
    model = Qwen3MoeForCausalLM(demo_model.Shape().config()).float()
    gguf_files.load_dequantised(model, [DEMO], "qwen3_moe")
    shuffle_channels(model, seed=17)
    original = Original(model, work / "f32.gguf", work / "folder", count_weights(model))
    write_as(DEMO, model, original.file)
    case = HfCase("demo", "qwen3_moe", 0, {}, dtype="float32", published_keys=True)
    hf_files.write_checkpoint(model, case, original.folder)
    with contextlib.redirect_stdout(io.StringIO()):
        export.save_tokenizer(str(DEMO), str(original.folder))
    return original


def random_model(work: Path) -> Original:
    """One with random weights."""
    case = next(case for case in gguf_cases.WIDE if case.name == RANDOM)
    model = hf_files.build_model(case.family, case.config, torch.float32, case.seed)
    original = Original(model, work / "f32.gguf", work / "folder", count_weights(model))
    gguf_files.write_gguf(original.file, model, case, "F32")
    folder = HfCase(
        case.name,
        case.family,
        case.seed,
        case.config,
        dtype="float32",
        published_keys=True,
        tokenizer_size=gguf_files.BPE_SIZE,
    )
    hf_files.write_checkpoint(model, folder, original.folder)
    return original


MODELS = {"demo": demo, "random": random_model}


def count_weights(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def shuffle_channels(model: torch.nn.Module, seed: int) -> None:
    """Permutes hidden channels, those within each expert, and values' within each head; the function stays what it was."""
    random, config = torch.Generator().manual_seed(seed), model.config
    hidden = torch.randperm(config.hidden_size, generator=random)
    queries = config.num_attention_heads // config.num_key_value_heads
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight[:, hidden])
        model.model.norm.weight.copy_(model.model.norm.weight[hidden])
        for layer in model.model.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight.copy_(norm.weight[hidden])
            heads = [torch.randperm(config.head_dim, generator=random) for _ in range(config.num_key_value_heads)]
            values = torch.cat([i * config.head_dim + head for i, head in enumerate(heads)])
            outputs = [(i * queries + q) * config.head_dim + head for i, head in enumerate(heads) for q in range(queries)]
            attention = layer.self_attn
            for projection in (attention.q_proj, attention.k_proj):
                projection.weight.copy_(projection.weight[:, hidden])
            attention.v_proj.weight.copy_(attention.v_proj.weight[values][:, hidden])
            attention.o_proj.weight.copy_(attention.o_proj.weight[hidden][:, torch.cat(outputs)])
            layer.mlp.gate.weight.copy_(layer.mlp.gate.weight[:, hidden])
            experts = layer.mlp.experts
            for gate_up, down in zip(experts.gate_up_proj, experts.down_proj, strict=True):
                inner = torch.randperm(config.moe_intermediate_size, generator=random)
                both = torch.cat([inner, inner + config.moe_intermediate_size])
                gate_up.copy_(gate_up[both][:, hidden])
                down.copy_(down[hidden][:, inner])


def write_as(source: Path, model: torch.nn.Module, out: Path) -> None:
    """Writes `model` in F32 with the metadata of the GGUF file `source`."""
    fields = gguf.GGUFReader(source).fields
    writer = gguf.GGUFWriter(out, fields["general.architecture"].contents())
    for name, field in fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            kind = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], kind)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for name, tensor in gguf_files.tensors(model, "qwen3_moe", False):
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write(name: str, original: Original, out: Path, llama_python: str) -> Path:
    """The model in format `name`, below the folder `out`."""
    if name == SHIPPED:
        return DEMO
    if name == "F32":
        return original.file
    if name in GGUF_TYPES:
        path = out / "model.gguf"
        command = [llama_python, PEER, "quantize", original.file, path, GGUF_TYPES[name]]
        subprocess.run(command, check=True)
        return path
    path = out / "model"
    if name in MLX_BITS:
        with contextlib.redirect_stdout(io.StringIO()):
            mlx_lm.convert(
                str(original.folder), mlx_path=path, quantize=True, q_group_size=64, q_bits=MLX_BITS[name], dtype="bfloat16"
            )
        return path
    path.mkdir()
    for file in original.folder.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    if FOLDER_KINDS[name] == "fp8":
        fp8.quantise_folder(path, copy.deepcopy(original.model))
    else:
        quantised.quantise_folder(path, FOLDER_KINDS[name])
    narrow_rest(path, original.folder)
    return path


def narrow_rest(folder: Path, source: Path) -> None:
    """Tensors of `folder` that are those of `source` become bf16."""
    path, before = folder / "model.safetensors", load_torch(source / "model.safetensors")
    tensors = load_torch(path)
    kept = [name for name in before if name in tensors and tensors[name].dtype == torch.float32]
    save_file(tensors | {name: tensors[name].bfloat16() for name in kept}, path, metadata={"format": "pt"})


def sizes(path: Path) -> tuple[int, int]:
    """Bytes of a checkpoint's weight files, and of their tensors alone."""
    if path.is_file():
        return path.stat().st_size, sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors)
    files = list(path.glob("*.safetensors"))
    headers = sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in files)
    whole = sum(file.stat().st_size for file in files)
    return whole, whole - headers


def types(path: Path) -> dict[str, int]:
    """Tensor types of a GGUF file, and how many matrices have each."""
    found: dict[str, int] = {}
    for tensor in gguf.GGUFReader(path).tensors:
        if len(tensor.shape) > 1:
            found[tensor.tensor_type.name] = found.get(tensor.tensor_type.name, 0) + 1
    return found


def write_text(out: Path, every: int) -> None:
    """Every `every`th problem of the demo model's held-out ones, with its answer, as its chat template writes them."""
    text = ""
    for line in EVAL.read_text(encoding="utf-8").splitlines()[::every]:
        problem = json.loads(line)
        for message in [*problem["messages"], {"role": "assistant", "content": problem["answer"]}]:
            text += f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
    out.write_text(text, encoding="utf-8")


@dataclass
class Bench:
    """What every run has in common."""

    moeflux: str
    llama_python: str
    threads: int
    text: Path
    # Predictions of the F32 file, of which a new model makes its own.
    base: Path

    def perplexity(self, path: Path, *flags: str) -> dict:
        """What `moeflux perplexity` prints."""
        command = [self.moeflux, "perplexity", path, self.text, "--json", "--window", str(WINDOW), "--backend", "cpu"]
        command += ["--threads", str(self.threads), "--kl-base", self.base, *flags]
        return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)

    def peer(self, path: Path) -> np.ndarray:
        """Divergence of llama.cpp on the same file, by token."""
        base = load_file(self.base)
        windows = base["tokens"].reshape(-1, WINDOW)
        scored = slice(WINDOW // 2, WINDOW - 1)
        logits = peer_logits(self.llama_python, path, windows.tolist())
        return divergence(np.concatenate([window[scored] for window in logits]), base["log_probabilities"])


def measure(bench: Bench, name: str, path: Path, n_weights: int) -> dict:
    """A row of the table."""
    exact, default = (bench.perplexity(path, *flags) for flags in (["--activations", "f32"], []))
    whole, tensors = sizes(path)
    row = {"format": name, "megabytes": whole / 1e6, "bits": tensors * 8 / n_weights, "perplexity": exact["perplexity"]}
    ours = default["kl_divergence"]
    row |= {"default_mean": ours["mean"], "default_error": ours["standard_error"], "default_median": ours["median"]}
    row |= {"default_same_top": 100 * ours["same_top"], "default_perplexity": default["perplexity"]}
    found = exact["kl_divergence"]
    row |= {"mean": found["mean"], "error": found["standard_error"], "median": found["median"]}
    row |= {"quantile_99": found["quantile_99"], "same_top": 100 * found["same_top"], "peer": "–", "ratios": "–"}
    if path.is_file():
        peer = bench.peer(path)
        (mean, error), median = spread(peer), float(np.median(peer))
        row["peer"] = f"{mean:.1e} ± {error:.0e}"
        row["ratios"] = f"{ours['mean'] / mean:.2f}, {ours['median'] / median:.2f}"
    return row


def rows(name: str, bench: Bench, work: Path, formats: list[str]) -> Iterator[dict]:
    """The rows of one model's table, printed as they are made."""
    work.mkdir(parents=True, exist_ok=True)
    original = MODELS[name](work)
    bench.base.unlink(missing_ok=True)
    bench.perplexity(original.file, "--activations", "f32")
    for format_name in (formats if name == "demo" else [f for f in formats if f != SHIPPED]):
        with tempfile.TemporaryDirectory(dir=work) as scratch:
            path = write(format_name, original, Path(scratch), bench.llama_python)
            row = measure(bench, format_name, path, original.n_weights)
            print(name, *(show.format(**row) for _, show in COLUMNS), types(path) if path.is_file() else "", sep=" | ", flush=True)
        yield row


def keep(path: Path, name: str, found: list[dict]) -> None:
    """Puts rows in place of those of the table `name` in a file for figures.py."""
    content = json.loads(path.read_text(encoding="utf-8"))
    content["tables"][name] |= {"columns": COLUMNS, "rows": found}
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    formats = [SHIPPED, "F32", *GGUF_TYPES, *MLX_BITS, *FOLDER_KINDS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("moeflux", help="the moeflux program")
    parser.add_argument("--llama-python", required=True, help="interpreter that has llama-cpp-python")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="use one of N problems of the text")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--formats", help=f"separated by semicolons: {'; '.join(formats)}")
    parser.add_argument("--work", type=Path, help="where F32 files are kept; a temporary folder if not given")
    parser.add_argument("--json", type=Path, help="a file for figures.py whose tables are replaced")
    args = parser.parse_args()
    wanted = args.formats.split(";") if args.formats else formats
    if unknown := {*wanted} - {*formats}:
        parser.error(f"no format is called {', '.join(sorted(unknown))}")

    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        work = args.work or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        text = work / "eval.txt"
        write_text(text, args.every)
        for name in args.models.split(","):
            bench = Bench(args.moeflux, args.llama_python, args.threads, text, work / f"{name}.base")
            found = []
            for row in rows(name, bench, work / name, wanted):
                found.append(row)
                if args.json:
                    keep(args.json, name, found)


if __name__ == "__main__":
    main()
