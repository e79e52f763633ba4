"""Python functions of torch without their override check, so that a function mode sees what they do inside.

`Tensor.backward` calls the mode with itself as one call. Custom backwards and recomputation inside it would be invisible.
A clone of its Python body, whose override checks always return False, keeps the mode on for everything inside.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _never(*_: Any) -> bool:
    return False


def override_free(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function without override checks."""
    namespace = {**function.__globals__, **{check: _never for check in _CHECKS if check in function.__globals__}}
    clone = types.FunctionType(
        function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__
    )
    clone.__kwdefaults__ = function.__kwdefaults__
    return clone


ENGINES: dict[Any, Callable[..., Any]] = {
    function: override_free(function)
    for function in (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
}
"""Functions that run the autograd engine. They are not operations themselves."""

COMPOSITES: dict[Any, Callable[..., Any]] = {
    F.multi_head_attention_forward: override_free(F.multi_head_attention_forward)
}
"""Operations made of many others: recorded themselves, and their parts as well."""
