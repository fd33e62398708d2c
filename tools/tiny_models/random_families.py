"""Random small configurations, a function a family: sizes that are no multiple of anything, and every option that
changes what is computed."""

from collections.abc import Callable
from typing import Any

from . import (
    random_hybrid,
    random_latent,
    random_lightning,
    random_linear,
    random_multimodal,
    random_normed,
    random_sigmoid,
    random_softmax,
    random_streams,
    random_windowed,
)
from .random_draw import Draw

FAMILIES: dict[str, Callable[[Draw], dict[str, Any]]] = {
    draw.__name__: draw
    for draw in (
        random_softmax.qwen3_moe,
        random_softmax.mixtral,
        random_softmax.olmoe,
        random_latent.deepseek_v3,
        random_latent.deepseek_v2,
        random_linear.qwen3_next,
        random_linear.qwen3_5_moe_text,
        random_sigmoid.glm4_moe,
        random_sigmoid.minimax_m2,
        random_softmax.gpt_oss,
        random_latent.glm4_moe_lite,
        random_sigmoid.solar_open,
        random_sigmoid.dots1,
        random_sigmoid.hy_v3,
        random_softmax.qwen2_moe,
        random_latent.deepseek_v32,
        random_latent.glm_moe_dsa,
        random_streams.deepseek_v4,
        random_softmax.ernie4_5_moe,
        random_streams.qwen4_exp_text,
        random_sigmoid.llama4_text,
        random_sigmoid.mimo_v2_flash,
        random_latent.mistral4,
        random_linear.kimi_linear,
        random_streams.hy_v4,
        random_streams.minimax_m3_vl_text,
        random_streams.glm5_next,
        random_linear.nemotron_h,
        random_sigmoid.step3p7,
        random_softmax.granitemoe,
        random_softmax.granitemoeshared,
        random_multimodal.qwen3_vl_moe,
        random_normed.hunyuan_v1_moe,
        random_multimodal.glm4v_moe,
        random_hybrid.gemma4_text,
        random_hybrid.afmoe,
        random_hybrid.exaone_moe,
        random_hybrid.granitemoehybrid,
        random_hybrid.lfm2_moe,
        random_lightning.bailing_hybrid,
        random_windowed.cohere2_moe,
        random_lightning.minimax,
        random_windowed.mellum,
        random_normed.axk1,
        random_normed.flex_olmo,
        random_windowed.granitemoe_swa,
        random_windowed.laguna,
        random_normed.beam,
        random_softmax.phimoe,
        random_softmax.dbrx,
        random_hybrid.jamba,
        random_latent.longcat_flash,
        random_latent.mistral_large4,
        random_windowed.flint,
    )
}
