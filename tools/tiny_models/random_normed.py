"""Random small configurations of families whose norms are elsewhere than usual: Hunyuan-A13B."""

from typing import Any

from .random_draw import Draw


def hunyuan_v1_moe(d: Draw) -> dict[str, Any]:
    config = d.base() | d.heads() | d.experts("num_experts")
    layers = config["num_hidden_layers"]
    top_k = config.pop("num_experts_per_tok")
    rope = d.rope(config["head_dim"], kinds=("default", "default", "linear", "dynamic", "yarn", "llama3"))
    if d.chance(0.4):
        rope = {"rope_type": "dynamic", "rope_theta": rope["rope_theta"], "alpha": d.pick(1000.0, 7.5), "factor": 1.0}
        # llama.cpp's converter wants the published model's numbers.
        d.only(gguf=False)
    config |= {
        "moe_topk": [d.rng.randint(1, top_k) for _ in range(layers)] if d.chance(0.3) else top_k,
        "intermediate_size": d.width(1, 50),
        "rope_parameters": rope,
    }
    d.maybe(config, "attention_bias", True, gguf=False)
    d.only(mlx=False, gguf=not isinstance(config["moe_topk"], list))
    # As published; transformers does not read the first two.
    edits: dict[str, Any] = {"num_shared_expert": [1] * layers}
    edits["moe_intermediate_size"] = [config["intermediate_size"]] * layers
    if not isinstance(config["moe_topk"], list):
        edits["moe_topk"] = [top_k] * layers
    d.case = {"config_edits": edits, "stacked_experts": False}
    return config
