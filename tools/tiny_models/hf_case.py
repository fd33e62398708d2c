"""What a Hugging Face fixture is made from."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class HfCase:
    """One fixture folder."""

    name: str
    family: str
    seed: int
    config: dict[str, Any]
    # Element type of the file: "float32", "bfloat16" or "float16".
    dtype: str = "bfloat16"
    # Expert tensors as one matrix an expert (published checkpoints) or as stacked gate_up_proj and down_proj.
    stacked_experts: bool = False
    # Stacked expert tensors with columns as rows, as some are published; in a checkpoint of one file.
    transposed_experts: bool = False
    # Largest shard in bytes; several shards bring a model.safetensors.index.json.
    max_shard_bytes: int | None = None
    # Configuration keys as published checkpoints have them, in place of transformers 5's `rope_parameters`.
    published_keys: bool = False
    # Keys set or, with the value None, removed in config.json after transformers wrote it.
    config_edits: dict[str, Any] = field(default_factory=dict)
    # The same, once the golden is made: for names that transformers does not know.
    late_edits: dict[str, Any] = field(default_factory=dict)
    # The text model as part of a multimodal checkpoint, beside tensors that are not the text model's.
    multimodal: bool = False
    # The text model of a multimodal checkpoint by itself, once the golden is made.
    text_only: bool = False
    # Matrices of the layers but routers in FP8 with scales for blocks of 128 × 128, as DeepSeek publishes.
    fp8: bool = False
    # Matrices of the layers but routers in one of `quantised.KINDS`: "mxfp8" as MiniMax-M3 is published, "modelopt" as Nemotron 3,
    # "rows" as GLM-4.5, "int4" as Kimi-K2-Thinking, "gptq" and "awq" as these programs write.
    quantised: str = ""
    # The model as the part of another that has this name; the other's configuration holds its own under NAME_config.
    within: str = ""
    # Size of a byte-level BPE vocabulary written beside the model; none when 0.
    tokenizer_size: int = 0
    # gpt-oss experts as published: MXFP4 blocks and scales.
    mxfp4: bool = False
    # Patterns in the names of tensors and what is put in their place, where published names are others than those that
    # transformers writes.
    renames: tuple[tuple[str, str], ...] = ()
    # Names of tensors beside the model's, which are not the text model's.
    beside: tuple[str, ...] = ()
    # Hy4 with channels in the order of published checkpoints, which rotate neighbours; and said so by `late_edits`.
    interleaved: bool = False
    # DeepSeek-V4 as published: "all" for experts in FP4 and the rest in FP8, with powers of two for scales; or "experts".
    fp4: str = ""
    # Matrices whose names contain this in FP8 with one scale each.
    whole_scales: str = ""
    # Matrices rounded so that Q8_0 holds them, in float32.
    q8_0: bool = False
    # Number of tokens in the golden; longer than every sliding window here.
    n_tokens: int = 101
