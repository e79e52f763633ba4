"""From the name of an op to the function, or the reason why a call of it cannot be run alone.

No list of ops that can be replayed is kept: whatever operation torch has under that name is run. What is refused is
refused for a reason that stands here. A run is somebody else's file: only operations on tensors are ever called, never a
function of torch that loads, compiles or reads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, reduce
from typing import Any, NamedTuple

import torch
import torch.nn.functional
from torch.overrides import get_ignored_functions, resolve_name

_HOMES: dict[str, tuple[str, ...]] = {
    "Functional": ("torch.nn.functional", "torch._C._nn"),
    "Tensor": ("torch.Tensor",),
    "Torch": ("torch", "torch._C._nn"),
    "VF": ("torch._VF",),
    "Aten": ("torch.ops.aten", "torch.ops"),
    "Ops": ("torch.ops",),
    "NPU": ("torch_npu", "torch.ops.npu"),
}
_REFUSED: dict[str, str] = {
    **dict.fromkeys(
        "empty empty_like empty_strided empty_permuted new_empty new_empty_strided empty_with_format".split(),
        "gives memory that is not initialised",
    ),
    **dict.fromkeys(
        "cuda npu xpu mps ipu hpu is_shared pin_memory record_stream set_ resize_ resize_as_ apply_ map_ map2_ from_file".split(),
        "is about memory or devices, not about values",
    ),
    **dict.fromkeys(
        "seed initial_seed manual_seed get_rng_state set_rng_state _use_cudnn_ctc_loss".split(),
        "is about the state of the process, not about values",
    ),
}
_DESCRIPTORS = (type(torch.Tensor.add), type(torch.Tensor.__hash__))


class CannotReplay(Exception):
    """Why a call cannot be run alone. Never reaches a user as an exception: it becomes the reason of a skipped call."""


class Found(NamedTuple):
    """A function and how a Python program names it."""

    function: Callable[..., Any]
    path: str


def find_function(op: str) -> Callable[..., Any]:
    """The function behind `Functional.conv2d`, `Torch.linalg.norm`, `Aten.mm.default`; CannotReplay with the reason."""
    return find_op(op).function


@cache
def find_op(op: str) -> Found:
    """The function with its path: `torch.nn.functional.conv2d`. CannotReplay with the reason."""
    family, _, name = op.partition(".")
    if family == "Distributed":
        raise CannotReplay("a collective needs the other ranks")
    if family == "Module":
        raise CannotReplay("a module is not run as a whole: the calls in it are")
    last = name.split(".")[0] if family == "Aten" else name.rpartition(".")[2]
    if last in _REFUSED:
        raise CannotReplay(f"{last} {_REFUSED[last]}")
    for home in _HOMES.get(family, ()):
        if home == "torch_npu" and home not in sys.modules:
            continue
        try:
            start = sys.modules[home] if home == "torch_npu" else reduce(getattr, home.split(".")[1:], torch)
            found: Any = reduce(getattr, name.split("."), start)
        except (AttributeError, RuntimeError):  # torch.ops raises either for a name it does not have
            continue
        if not _is_operation(found, name, family):
            raise CannotReplay(f"{op} is no operation on tensors")
        return Found(found, f"{home}.{name}")
    raise CannotReplay(f"this process has no function {op}")


def _is_operation(found: Any, name: str, family: str) -> bool:
    """Whether torch itself counts it as an operation: a kernel, a function that tensors may override, or one that makes them."""
    if isinstance(found, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return True
    if family in ("Aten", "Ops") or not callable(found) or isinstance(found, type):
        return False
    if family == "NPU" or (resolve_name(found) and found not in get_ignored_functions()):
        return True
    if family == "Tensor":
        return isinstance(found, _DESCRIPTORS)
    if getattr(found, "__module__", "") == "torch.nn.functional":
        return True
    # Fused steps of optimizers and factories are not in torch's list of what can be overridden.
    kernels = (torch._C._VariableFunctions, torch._C._nn)
    return any(hasattr(kernel, name) for kernel in kernels)
