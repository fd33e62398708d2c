"""Shapes that several files of cases begin with."""

from typing import Any


def yarn(**changes: Any) -> dict[str, Any]:
    base = dict(rope_type="yarn", rope_theta=5000.0, factor=4.0, original_max_position_embeddings=32)
    return base | changes


def yarn_scaling(**changes: Any) -> dict[str, Any]:
    """The same without what published configurations say elsewhere."""
    return {key: value for key, value in yarn(**changes).items() if key not in ("rope_type", "rope_theta")}
