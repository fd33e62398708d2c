"""Random weights that make a tiny model a useful test.

Transformers' own initialisation (std 0.02, norm weights of one, biases of zero) gives nearly constant
logits, lets a swapped norm pass unseen and leaves experts close to ties. Here every matrix keeps the scale
of its input, so logits differ by units, routers are peaked, and norm weights and biases are visibly not one
and not zero.
"""

import math

import torch

# Standard deviation of a matrix, as a multiple of 1/sqrt(fan_in).
MATRIX_GAIN = 1.2
ROUTER_GAIN = 2.0
NORM_SPREAD = 0.3
BIAS_STD = 0.3
# Of what a router adds to scores for choosing; enough to change many choices.
CORRECTION_BIAS_STD = 0.2
EMBEDDING_STD = 0.4
# With tied embeddings this is also the LM head: a wide model's logits stay within the same range as a
# narrow one's.
TIED_LOGIT_STD = 3.0
# Decay rates of linear attention: from states that last for the whole golden to ones that last a few tokens.
DECAY_RANGE = (0.005, 2.0)
# Norms whose weight is added to one.
ZERO_CENTRED_NORMS = ("Qwen3NextRMSNorm", "Qwen3_5MoeRMSNorm")


def zero_centred_norms(model: torch.nn.Module) -> set[str]:
    """Names of the norm weights that are added to one."""
    return {
        f"{name}.weight"
        for name, module in model.named_modules()
        if type(module).__name__ in ZERO_CENTRED_NORMS
    }


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Overwrites every parameter in place, in the order of their names."""
    generator = torch.Generator().manual_seed(seed)

    def normal(parameter: torch.Tensor, std: float) -> None:
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)

    zero_centred = zero_centred_norms(model)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if name.endswith("norm.weight"):
                uniform = torch.rand(parameter.shape, generator=generator) * 2 - 1
                parameter.copy_((0 if name in zero_centred else 1) + NORM_SPREAD * uniform)
            elif name.endswith(".A_log"):
                low, high = (math.log(rate) for rate in DECAY_RANGE)
                parameter.copy_(low + (high - low) * torch.rand(parameter.shape, generator=generator))
            elif name.endswith(".dt_bias"):
                normal(parameter, 1.0)
            elif name.endswith(".bias"):
                normal(parameter, BIAS_STD)
            elif "embed_tokens" in name:
                normal(parameter, min(EMBEDDING_STD, TIED_LOGIT_STD / parameter.shape[-1] ** 0.5))
            elif name.endswith("mlp.gate.weight"):
                normal(parameter, ROUTER_GAIN / parameter.shape[-1] ** 0.5)
            else:
                normal(parameter, MATRIX_GAIN / parameter.shape[-1] ** 0.5)
        for buffer in correction_biases(model):
            normal(buffer, CORRECTION_BIAS_STD)


def correction_biases(model: torch.nn.Module) -> list[torch.Tensor]:
    """What routers add to scores for choosing: weights, although transformers keeps them as buffers."""
    return [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]


def round_to(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Rounds every parameter to `dtype` and back, so that a file of that type holds it exactly."""
    with torch.no_grad():
        for parameter in [*model.parameters(), *correction_biases(model)]:
            parameter.copy_(parameter.to(dtype).to(torch.float32))
