"""Shapes that several files of cases begin with."""

from typing import Any


def yarn(**changes: Any) -> dict[str, Any]:
    base = dict(rope_type="yarn", rope_theta=5000.0, factor=4.0, original_max_position_embeddings=32)
    return base | changes
