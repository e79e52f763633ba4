"""Rebuilds the arguments of a recorded call from its argument trees and its tensors by slot."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tensorprobe.model import Call
from tensorprobe.replay.functions import CannotReplay

_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
_SINGLE = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}
PRECISIONS: dict[str, dict[torch.dtype, torch.dtype]] = {"own": {}, "single": _SINGLE, "double": _WIDE}
"""Precision → dtype → dtype of the replay: as recorded, half precision in float32, or everything in float64."""

_DEVICE = re.compile(r"(cpu|cuda|npu|xpu|mps|hpu|mlu|privateuseone)(:\d+)?")
_MOVES = ("to",)
"""Ops with a device as a positional string."""


@dataclass(frozen=True)
class Rebuilding:
    """How to replace slots, devices and dtypes in an argument tree."""

    tensors: Mapping[str, torch.Tensor]
    device: str
    precision: Mapping[torch.dtype, torch.dtype]


def rebuild_call(call: Call, given: Rebuilding) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional and keyword arguments of a call."""
    device = torch.device(given.device)
    args = [device if is_device_text(call, tree) else rebuild(tree, given) for tree in call.args or []]
    kwargs = {
        key: device if is_device_text(call, tree, key) else rebuild(tree, given)
        for key, tree in (call.kwargs or {}).items()
    }
    return args, kwargs


def is_device_text(call: Call, tree: Any, keyword: str = "") -> bool:
    """Return whether an argument is a device given as a string."""
    named = keyword == "device" or (not keyword and call.op.rpartition(".")[2] in _MOVES)
    return named and isinstance(tree, str) and _DEVICE.fullmatch(tree) is not None


def rebuild(tree: Any, given: Rebuilding) -> Any:
    """Return the value of an argument tree."""
    if isinstance(tree, list):
        return [rebuild(part, given) for part in tree]
    if not isinstance(tree, dict):
        return tree
    if "slot" in tree:
        if tree["slot"] not in given.tensors:
            raise CannotReplay(f"{tree['slot']} was not recorded")
        return given.tensors[tree["slot"]]
    kind: Any = tree.get("type")
    value: Any = tree.get("value")
    if kind == "torch.dtype":
        dtype = _of_torch(value, torch.dtype)
        return given.precision.get(dtype, dtype)
    if kind in ("torch.layout", "torch.memory_format"):
        return _of_torch(value, getattr(torch, kind.removeprefix("torch.")))
    if kind == "torch.device":
        return torch.device(given.device)
    if kind in ("float", "int"):
        return {"float": float, "int": int}[kind](value)
    if kind == "ellipsis":
        return ...
    if kind == "dict":
        return {key: rebuild(part, given) for key, part in value.items()}
    if kind in ("tuple", "torch.Size", "slice", "complex"):
        parts = [rebuild(part, given) for part in value]
        if kind == "complex":
            return complex(*map(float, parts))
        return slice(*parts) if kind == "slice" else torch.Size(parts) if kind == "torch.Size" else tuple(parts)
    raise CannotReplay(f"an argument is an object that cannot be recorded ({value})")


def _of_torch(name: Any, kind: type) -> Any:
    found = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(found, kind):
        raise CannotReplay(f"this torch has no {name}")
    return found
