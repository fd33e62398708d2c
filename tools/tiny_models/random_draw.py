"""Draw: what is drawn for a random configuration, and the parts that families have in common."""

import random
from dataclasses import dataclass, field
from typing import Any

# Ids of the tokenizer that converters want beside a model; vocabularies are at least as large.
TOKENIZER_SIZE = 293
ROPE_KINDS = ("default", "default", "linear", "dynamic", "yarn", "llama3", "longrope")
# Kinds that every form and family has.
PLAIN_KINDS = ("default", "default", "linear", "yarn")


@dataclass
class Draw:
    """One configuration in the making."""

    rng: random.Random
    # Multiple that widths keep to.
    aligned: int
    gguf: bool = True
    mlx: bool = True
    # What else is said of the case, by the names of `HfCase`; the forms are then as drawn.
    case: dict[str, Any] = field(default_factory=dict)

    def width(self, low: int, high: int) -> int:
        """A width of rows."""
        if self.aligned > 1:
            return self.aligned * self.rng.randint(1, max(1, high // self.aligned))
        return self.rng.randint(low, high)

    def chance(self, p: float = 0.5) -> bool:
        return self.rng.random() < p

    def pick(self, *choices: Any) -> Any:
        return self.rng.choice(choices)

    def only(self, *, gguf: bool = True, mlx: bool = True) -> None:
        """Leaves out forms that cannot say what has just been drawn."""
        self.gguf = self.gguf and gguf
        self.mlx = self.mlx and mlx

    def maybe(self, config: dict[str, Any], key: str, value: Any, p: float = 0.3, **forms: bool) -> None:
        """Sets a key now and then; `forms` says which can say so."""
        if self.chance(p):
            config[key] = value
            self.only(**forms)

    def heads(self, even: bool = True) -> dict[str, int]:
        """Query heads, kv heads and their width."""
        kv = self.rng.randint(1, 4)
        head_dim = 2 * self.rng.randint(2, 20) if self.aligned == 1 else 16 * self.rng.randint(1, 3)
        heads = kv * self.rng.randint(1, 4)
        while self.aligned > 1 and heads * head_dim % self.aligned:
            heads *= 2
        return {"num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": head_dim}

    def few_heads(self, config: dict[str, Any]) -> int:
        """Query heads anew, where the width of a head is that of the hidden state divided by them."""
        config["num_attention_heads"] = config["num_key_value_heads"] * self.rng.randint(1, 3)
        return config["num_attention_heads"]

    def rope(self, rotary_dim: int, *, kinds: tuple[str, ...] = ROPE_KINDS) -> dict[str, Any]:
        """Rotary parameters; `rotary_dim` channels rotate."""
        kind = self.pick(*kinds)
        rope: dict[str, Any] = {"rope_type": kind, "rope_theta": round(10 ** self.rng.uniform(2.0, 6.5), 1)}
        factor = round(self.rng.uniform(1.5, 8.0), 2)
        if kind != "default":
            rope["factor"] = factor
        if kind == "yarn":
            rope["original_max_position_embeddings"] = self.rng.randint(16, 64)
            if self.chance():
                rope["beta_fast"] = round(self.rng.uniform(2, 40), 1)
                rope["beta_slow"] = round(self.rng.uniform(0.5, 1.9), 2)
            if self.chance(0.2):
                rope["attention_factor"] = round(self.rng.uniform(0.7, 1.4), 3)
                self.only(mlx=False, gguf=False)
            if self.chance(0.2):
                rope["truncate"] = False
                self.only(mlx=False, gguf=False)
        if kind == "llama3":
            rope |= {
                "low_freq_factor": 1.0,
                "high_freq_factor": self.pick(2.0, 4.0),
                "original_max_position_embeddings": self.rng.randint(16, 128),
            }
        if kind == "longrope":
            rope["original_max_position_embeddings"] = self.pick(64, 256)
            for name in ("short_factor", "long_factor"):
                rope[name] = [round(self.rng.uniform(1, 4), 2) for _ in range(rotary_dim // 2)]
        if kind in ("dynamic", "longrope"):
            self.only(gguf=False, mlx=False)
        return rope

    def base(self, layers: int = 3) -> dict[str, Any]:
        """What all families have."""
        return {
            "vocab_size": self.rng.randint(TOKENIZER_SIZE, 350),
            "hidden_size": self.width(7, 70),
            "num_hidden_layers": self.rng.randint(1, layers),
            "rms_norm_eps": self.pick(1e-6, 1e-5, 1e-3, 0.02),
            "max_position_embeddings": self.pick(160, 512, 4096),
            "tie_word_embeddings": self.chance(0.3),
            "bos_token_id": None,
            "eos_token_id": TOKENIZER_SIZE - 1,
        }

    def experts(self, count: str, low: int = 2) -> dict[str, int]:
        """Numbers of experts and of those chosen, now and then all of them."""
        n = self.rng.randint(low, 17)
        k = n if self.chance(0.15) else self.rng.randint(1, min(n, 8))
        return {count: n, "num_experts_per_tok": k}

    def groups(self) -> dict[str, int]:
        """Experts in groups of at least two, of which enough stay to choose from."""
        n_group = self.pick(1, 1, 2, 3, 4)
        each = self.rng.randint(2, 5)
        keep = self.rng.randint(1, n_group)
        return {
            "n_routed_experts": n_group * each,
            "n_group": n_group,
            "topk_group": keep,
            "num_experts_per_tok": self.rng.randint(1, min(8, keep * each)),
        }
