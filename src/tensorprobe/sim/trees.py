"""Tensors inside lists, tuples and dictionaries: find them, or change them and keep the shape of the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def map_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """The same nesting with each tensor changed; anything else is kept as it is."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)([map_tensors(change, item) for item in value])
    if isinstance(value, dict):
        return {key: map_tensors(change, item) for key, item in value.items()}
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, (list, tuple)) else []
