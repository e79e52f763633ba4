"""The arguments of a recorded call, made anew from its trees and from tensors by slot."""

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
"""What becomes of a dtype: as recorded; half precision in float32; everything in float64."""

_DEVICE = re.compile(r"(cpu|cuda|npu|xpu|mps|hpu|mlu|privateuseone)(:\d+)?")
_MOVES = ("to",)
"""Ops whose positional text may be a device."""


@dataclass(frozen=True)
class Rebuilding:
    """What slots, devices and dtypes in an argument tree become."""

    tensors: Mapping[str, torch.Tensor]
    device: str
    precision: Mapping[torch.dtype, torch.dtype]


def rebuild_call(call: Call, given: Rebuilding) -> tuple[list[Any], dict[str, Any]]:
    """The positional and the keyword arguments of a call."""
    device = torch.device(given.device)
    args = [device if is_device_text(call, tree) else rebuild(tree, given) for tree in call.args or []]
    kwargs = {
        key: device if is_device_text(call, tree, key) else rebuild(tree, given)
        for key, tree in (call.kwargs or {}).items()
    }
    return args, kwargs


def is_device_text(call: Call, tree: Any, keyword: str = "") -> bool:
    """Whether an argument is a device that was given as text."""
    named = keyword == "device" or (not keyword and call.op.rpartition(".")[2] in _MOVES)
    return named and isinstance(tree, str) and _DEVICE.fullmatch(tree) is not None


def rebuild(tree: Any, given: Rebuilding) -> Any:
    """What an argument tree stands for."""
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
    raise CannotReplay(f"an argument is an object that no record can hold ({value})")


def _of_torch(name: Any, kind: type) -> Any:
    found = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(found, kind):
        raise CannotReplay(f"this torch has no {name}")
    return found
