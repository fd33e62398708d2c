"""Random weights by name: matrices keep the scale of their input, norms are visibly not one."""

import numpy as np


class Weights:
    """Tensors in the making, all in float16."""

    def __init__(self, rng: np.random.Generator):
        self.rng = rng
        self.found: dict[str, np.ndarray] = {}

    def tensor(self, name: str, values: np.ndarray) -> None:
        self.found[name] = np.ascontiguousarray(values, dtype=np.float16)

    def normal(self, name: str, shape: tuple[int, ...], std: float) -> None:
        self.tensor(name, self.rng.standard_normal(shape) * std)

    def matrix(self, name: str, rows: int, cols: int, gain: float = 1.2) -> None:
        self.normal(f"{name}.weight", (rows, cols), gain / np.sqrt(cols))

    def norm(self, name: str, width: int) -> None:
        self.tensor(f"{name}.weight", 1 + 0.3 * self.rng.uniform(-1, 1, width))

    def mlp(self, module: str, hidden: int, width: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> None:
        gate, up, down = names
        self.matrix(f"{module}.{gate}", width, hidden)
        self.matrix(f"{module}.{up}", width, hidden)
        self.matrix(f"{module}.{down}", hidden, width)
