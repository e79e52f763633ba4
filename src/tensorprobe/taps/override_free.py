"""Python functions of torch, run without the check that would hide from a function mode what they do inside.

`Tensor.backward` hands itself to the mode as one call; run so, custom backwards and recomputation inside it would be invisible.
A clone of its Python body, whose override checks always say no, keeps the mode on for everything within.
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
    """The same function, not asking for overrides."""
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
"""They run the autograd engine; they are no operations themselves."""

COMPOSITES: dict[Any, Callable[..., Any]] = {
    F.multi_head_attention_forward: override_free(F.multi_head_attention_forward)
}
"""Operations made of many others: recorded themselves, and their parts as well."""
