"""The Hugging Face fixtures: a table of small configurations, each turning over several corners.

`transformers` writes the configuration and the weights; `published_keys`, `config_edits` and
`stacked_experts` then give the folder the form that published checkpoints have (older `rope_theta` and
`rope_scaling` keys, keys left out because they equal the default) or the stacked expert tensors that
transformers 5 also reads. The golden is computed from the folder as it lies on disk, so an edit that changed
the meaning would show as a difference from the model in memory.
"""

from . import (
    chunked,
    compressed,
    convolved,
    experts_by_sigmoid,
    experts_by_softmax,
    gpt_oss,
    hybrid,
    indexed,
    latent,
    lightning,
    multimodal,
    sandwich,
    state_space,
    step,
    streams,
    windowed,
)

HF_CASES = [
    *chunked.CASES,
    *compressed.CASES,
    *convolved.CASES,
    *experts_by_sigmoid.CASES,
    *experts_by_softmax.CASES,
    *gpt_oss.CASES,
    *hybrid.CASES,
    *indexed.CASES,
    *latent.CASES,
    *lightning.CASES,
    *multimodal.CASES,
    *sandwich.CASES,
    *state_space.CASES,
    *step.CASES,
    *streams.CASES,
    *windowed.CASES,
]
