"""Random weights that make a tiny model a useful test.

Transformers' own initialisation (std 0.02, norm weights of one, biases of zero) gives nearly constant
logits, lets a swapped norm pass unseen and leaves experts close to ties. Here every matrix keeps the scale
of its input, so logits differ by units, routers are peaked, and norm weights and biases are visibly not one
and not zero.
"""

import torch

# Standard deviation of a matrix, as a multiple of 1/sqrt(fan_in).
MATRIX_GAIN = 1.2
ROUTER_GAIN = 2.0
NORM_SPREAD = 0.3
BIAS_STD = 0.3
EMBEDDING_STD = 0.4
SINK_STD = 1.5
# Wide enough that gpt-oss's limit of 7 is reached.
CLAMPED_BIAS_STD = 4.0
# A buffer of routers that score with sigmoids.
CORRECTION_BIAS = "e_score_correction_bias"
# With tied embeddings this is also the LM head: a wide model's logits stay within the same range as a
# narrow one's.
TIED_LOGIT_STD = 3.0


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Overwrites every parameter in place, in the order of their names."""
    generator = torch.Generator().manual_seed(seed)

    def normal(parameter: torch.Tensor, std: float) -> None:
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)

    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if name.endswith("norm.weight"):
                uniform = torch.rand(parameter.shape, generator=generator) * 2 - 1
                parameter.copy_(1 + NORM_SPREAD * uniform)
            elif name.endswith("gate_up_proj_bias"):
                normal(parameter, CLAMPED_BIAS_STD)
            elif name.endswith("sinks"):
                normal(parameter, SINK_STD)
            elif name.endswith((".bias", "_bias")):
                normal(parameter, BIAS_STD)
            elif "embed_tokens" in name:
                normal(parameter, min(EMBEDDING_STD, TIED_LOGIT_STD / parameter.shape[-1] ** 0.5))
            elif name.endswith(("mlp.gate.weight", "mlp.router.weight")):
                normal(parameter, ROUTER_GAIN / parameter.shape[-1] ** 0.5)
            else:
                normal(parameter, MATRIX_GAIN / parameter.shape[-1] ** 0.5)
        for name, buffer in sorted(model.named_buffers()):
            if name.endswith(CORRECTION_BIAS):
                normal(buffer, BIAS_STD)


def round_to(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Rounds every parameter to `dtype` and back, so that a file of that type holds it exactly."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype).to(torch.float32))
