"""Python functions of torch without their override check, so that a function mode sees what they do inside.

`Tensor.backward` calls the mode with itself as one call. Custom backwards and recomputation inside it would be invisible.
A clone of its Python body, whose override checks always return False, keeps the mode on for everything inside. It may only
be used where no argument overrides calls.
"""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from tensorprobe import torch_names

_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _never(*_: Any) -> bool:
    return False


class _Names(dict[str, Any]):
    """The globals of a function: those of its module at this moment, except for the override checks."""

    def __init__(self, live: dict[str, Any]) -> None:
        super().__init__({check: _never for check in _CHECKS if check in live})
        self._live = live

    def __missing__(self, name: str) -> Any:
        return self._live[name]


def override_free(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function without override checks."""
    names = _Names(function.__globals__)
    names["__builtins__"] = function.__globals__["__builtins__"]
    clone = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    clone.__kwdefaults__ = function.__kwdefaults__
    return clone


@functools.lru_cache(maxsize=1024)
def opened_function(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the function without override checks; None if it has none that can be removed."""
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    return None if set(_CHECKS).isdisjoint(names) else override_free(function)


ENGINES = ("torch._tensor.Tensor.backward", "torch.autograd.backward", "torch.autograd.grad")
"""Functions that run the autograd engine. They are not operations themselves."""

COMPOSITES = ("torch.nn.functional.multi_head_attention_forward",)
"""Operations made of many others: recorded themselves, and their parts as well."""


def body_of(function: Any, names: tuple[str, ...]) -> Callable[..., Any] | None:
    """Return the function without override checks, if it is one of these."""
    if f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}" not in names:
        return None
    return opened_function(function)


def original_of(function: Any, caller: FrameType) -> Any:
    """Return the function of torch that was called, if `function` is one that the program has put in its place.

    torch gives a mode what it finds under the name of the function at that moment. To call that would be to call the
    program's function twice. `caller` is the frame that called the mode.
    """
    if isinstance(function, IN_C):
        return function
    if caller.f_code is not torch.overrides.handle_torch_function.__code__ or caller.f_back is None:
        name = next((name for name, value in vars(torch.Tensor).items() if value is function), "")
        return getattr(torch_names.methods_of_tensor, name, function)
    if caller.f_back.f_locals.get("self") is function:  # an operator of higher order: a call of the object itself
        return function
    code, given = caller.f_back.f_code, getattr(function, "__code__", None)
    if given is None and any(_code_of_call(cls) is code for cls in type(function).__mro__):
        return function  # an object of torch, as its higher-order operators are
    is_helper = code.co_name.startswith("_") and not code.co_name.startswith("__")  # of F.max_pool2d, for one
    if given is code or (is_helper and given is not None and given.co_filename.startswith(_TORCH)):
        return function
    found = [each for each in gc.get_referrers(code) if type(each) is types.FunctionType and each.__code__ is code]
    found = [each for each in found if type(each.__globals__) is not _Names]
    return found[0] if len(found) == 1 else function


def _code_of_call(cls: type) -> types.CodeType | None:
    return getattr(vars(cls).get("__call__"), "__code__", None)


_TORCH = str(Path(torch.__file__).parent) + "/"
IN_C = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType,
    torch_names.OpOverload, torch_names.OpOverloadPacket,
)  # fmt: skip
PLAIN_FUNCTIONS = (types.FunctionType, *IN_C)
"""The type of nearly everything that torch passes to a mode. The rest are objects such as higher-order operators."""


def is_overridden(args: Iterable[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether an argument, or an element of a list of them, is of a class that takes calls over."""
    for value in (*args, *kwargs.values()):
        if any(map(torch_names.overrides_calls, value if isinstance(value, (list, tuple)) else (value,))):
            return True
    return False
