"""Random weights that make a tiny model a useful test.

Transformers' own initialisation (std 0.02, norm weights of one, biases of zero) gives nearly constant
logits, lets a swapped norm pass unseen and leaves experts close to ties. Here every matrix keeps the scale
of its input, so logits differ by units, routers are peaked, and norm weights and biases are visibly not one
and not zero.
"""

import math
from dataclasses import dataclass

import gguf
import torch
from gguf.quants import dequantize, quantize

# Standard deviation of a matrix, as a multiple of 1/sqrt(fan_in).
MATRIX_GAIN = 1.2
ROUTER_GAIN = 2.0
NORM_SPREAD = 0.3
BIAS_STD = 0.3
EMBEDDING_STD = 0.4
SINK_STD = 1.5
# Wide enough that gpt-oss's limit of 7 is reached.
CLAMPED_BIAS_STD = 4.0
# With tied embeddings this is also the LM head: a wide model's logits stay within the same range as a
# narrow one's.
TIED_LOGIT_STD = 3.0
# Decay rates of linear attention: from states that last for the whole golden to ones that last a few tokens.
DECAY_RANGE = (0.005, 2.0)
# Norms whose weight is added to one.
ZERO_CENTRED_NORMS = (
    "Qwen3NextRMSNorm",
    "Qwen3_5MoeRMSNorm",
    "Qwen4ExpTextRMSNorm",
    "MiniMaxM3VLRMSNorm",
    "Step3p7RMSNorm",
    "MuseSparkTextCenteredRMSNorm",
    "MuseSparkTextInputScaledRMSNorm",
)


@dataclass(frozen=True)
class CorrectionBias:
    """What routers of a family add to scores for choosing."""

    # Enough to change many choices.
    std: float
    # In float32 whatever the type of the other weights, as published checkpoints have it.
    float32: bool


# By `model_type`.
CORRECTION_BIASES = {
    "deepseek_v3": CorrectionBias(std=0.2, float32=False),
    "deepseek_v32": CorrectionBias(std=0.2, float32=False),
    "deepseek_v4": CorrectionBias(std=0.3, float32=True),
    "dots3_note_text": CorrectionBias(std=0.2, float32=True),
    "dots1": CorrectionBias(std=0.2, float32=False),
    "glm4_moe": CorrectionBias(std=0.3, float32=True),
    "glm4_moe_lite": CorrectionBias(std=0.3, float32=True),
    "glm4v_moe": CorrectionBias(std=0.3, float32=True),
    "glm_moe_dsa": CorrectionBias(std=0.2, float32=False),
    "hy_v3": CorrectionBias(std=0.3, float32=True),
    "sarvam_mla": CorrectionBias(std=0.2, float32=True),
    "sarvam_moe": CorrectionBias(std=0.3, float32=True),
    "solar_open": CorrectionBias(std=0.3, float32=True),
    "mimo_v2_flash": CorrectionBias(std=0.2, float32=False),
    "kimi_linear": CorrectionBias(std=0.2, float32=False),
    "minimax_m2": CorrectionBias(std=0.3, float32=True),
    "hy_v4": CorrectionBias(std=0.2, float32=True),
    "hy_v4_vl": CorrectionBias(std=0.2, float32=True),
    "minimax_m3_vl": CorrectionBias(std=0.2, float32=True),
    "minimax_m3_vl_text": CorrectionBias(std=0.2, float32=True),
    "glm5_next": CorrectionBias(std=0.2, float32=True),
    "nemotron_h": CorrectionBias(std=0.2, float32=True),
    "step3p7": CorrectionBias(std=0.2, float32=True),
    "muse_spark": CorrectionBias(std=0.2, float32=True),
    "lfm2_moe": CorrectionBias(std=0.2, float32=True),
    "ernie4_5_vl_moe": CorrectionBias(std=0.05, float32=True),
    "exaone_moe": CorrectionBias(std=0.2, float32=True),
    "axk1": CorrectionBias(std=0.2, float32=False),
    "bailing_hybrid": CorrectionBias(std=0.2, float32=True),
    "beam": CorrectionBias(std=0.2, float32=True),
    "longcat_flash": CorrectionBias(std=0.05, float32=True),
    "inkling_text": CorrectionBias(std=0.3, float32=True),
    "axk2": CorrectionBias(std=0.4, float32=False),
    "kolibri1": CorrectionBias(std=0.5, float32=True),
    "zaya": CorrectionBias(std=0.2, float32=True),
}
CORRECTION_BIAS = "e_score_correction_bias"
# Of LFM2 a buffer too, of AFMoE a parameter.
EXPERT_BIAS = "expert_bias"
# Of ZAYA1.
BALANCING_BIASES = "balancing_biases"
ROUTERS = ("mlp.gate.weight", "mlp.router.weight", "mixer.gate.weight", "mlp.gate.wg.weight", "feed_forward.router.weight")
ROUTERS += ("ffn.router.layer.weight", "router.proj.weight", "feed_forward.gate.weight", "mlp.router.gate.weight", "block_sparse_moe.router.weight")
ROUTERS += ("mlp.router.classifier.weight", "router_mlp.out_proj.weight")
ROUTERS += ("mlp.router.layer.weight", "self_attention.experts.router.layer.weight")
# Weights around one.
NORMS = ("norm.weight", "norm_f.weight", "norm_1.weight", "norm_2.weight", "layernorm_1.weight", "layernorm_2.weight", "per_expert_scale")
NORMS += ("hidden_states_scale", "residual_scale.residual_scale", "router_states_scale", "qk_norm.temp")
# What a layer's result is multiplied with.
LAYER_SCALE = "layer_scalar"
# Logarithms of learned factors on the frequencies of a rotation.
FREQUENCIES = "rotary_emb.alpha"
# Tables of the experts that tokens go to by their id.
TOKEN_TABLE = "tid2eid"


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
            if name.endswith(NORMS) or name in zero_centred:
                uniform = torch.rand(parameter.shape, generator=generator) * 2 - 1
                parameter.copy_((0 if name in zero_centred else 1) + NORM_SPREAD * uniform)
            elif name.endswith("router.scale"):
                # The model divides by the root of the width.
                uniform = torch.rand(parameter.shape, generator=generator) * 2 - 1
                parameter.copy_((1 + NORM_SPREAD * uniform) * parameter.shape[-1] ** 0.5)
            elif name.endswith(".A_log"):
                low, high = (math.log(rate) for rate in DECAY_RANGE)
                parameter.copy_(low + (high - low) * torch.rand(parameter.shape, generator=generator))
            elif name.endswith("global_scale"):
                parameter.copy_(1 + NORM_SPREAD * (torch.rand(parameter.shape, generator=generator) * 2 - 1))
            elif name.endswith("conv_qk_grouped.weight"):
                normal(parameter, MATRIX_GAIN / parameter[0].numel() ** 0.5)
            elif name.endswith("rel_logits_proj.proj"):
                normal(parameter, 1.0)
            elif name.endswith(".dt_bias"):
                normal(parameter, 1.0)
            elif name.endswith("gate_up_proj_bias"):
                normal(parameter, CLAMPED_BIAS_STD)
            elif name.endswith("sinks"):
                normal(parameter, SINK_STD)
            elif name.endswith("softmax_scaling.bias"):
                uniform = torch.rand(parameter.shape, generator=generator) * 2 - 1
                parameter.copy_(1 + NORM_SPREAD * uniform)
            elif name.endswith("softmax_scaling.scale"):
                normal(parameter, 0.1)
            elif name.endswith((".bias", "_bias")):
                normal(parameter, BIAS_STD)
            elif "embed_tokens" in name or "embeddings" in name or ".wte." in name:
                normal(parameter, min(EMBEDDING_STD, TIED_LOGIT_STD / parameter.shape[-1] ** 0.5))
            elif name.endswith(ROUTERS):
                normal(parameter, ROUTER_GAIN / parameter.shape[-1] ** 0.5)
            else:
                normal(parameter, MATRIX_GAIN / parameter.shape[-1] ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith(LAYER_SCALE):
                buffer.copy_(1 + NORM_SPREAD * (torch.rand(buffer.shape, generator=generator) * 2 - 1))
            elif name.endswith(FREQUENCIES):
                normal(buffer, BIAS_STD)
        for name, buffer in correction_biases(model).items():
            normal(buffer, CORRECTION_BIASES[model.config.model_type].std)
            if name.endswith(BALANCING_BIASES):
                # What transformers makes of the last one whenever it reads a model; near it, so that it does not decide alone.
                buffer -= 1.2
                buffer[-1] = -1.0
        for name, table in model.named_buffers():
            if name.endswith(TOKEN_TABLE):
                order = torch.rand(table.shape[0], model.config.n_routed_experts, generator=generator).argsort()
                table.copy_(order[:, : table.shape[1]])


def correction_biases(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """By name and in the order of layers, what routers add to scores for choosing.

    They are weights, although transformers keeps them as buffers.
    """
    kinds = (CORRECTION_BIAS, EXPERT_BIAS, BALANCING_BIASES)
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith(kinds)}


def round_to(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Rounds every weight to `dtype` and back, so that a file of that type holds it exactly."""
    with torch.no_grad():
        narrow = [*model.parameters()]
        narrow += [buffer for name, buffer in model.named_buffers() if name.endswith((LAYER_SCALE, FREQUENCIES))]
        if biases := correction_biases(model):
            narrow += [] if CORRECTION_BIASES[model.config.model_type].float32 else biases.values()
        for parameter in narrow:
            parameter.copy_(parameter.to(dtype).to(torch.float32))


def round_to_q8_0(model: torch.nn.Module) -> None:
    """Rounds matrices in place to what Q8_0 stands for, so that it holds them exactly; what chooses experts, what is taken
    apart and rows that are no whole number of blocks stay as they are."""
    kinds = ("_proj.weight", "_proj", "embed_tokens.weight", "lm_head.weight", "ngram_embedding.weight")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(kinds) and parameter.ndim > 1 and parameter.shape[-1] % 32 == 0:
                blocks = quantize(parameter.numpy(), gguf.GGMLQuantizationType.Q8_0)
                parameter.copy_(torch.from_numpy(dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)))
