"""A recorded call as Python source: the expression that makes it again, for a script that stands alone.

Names and text of a run are somebody else's: whatever comes from it goes in as a literal, never as code.
"""

from __future__ import annotations

from typing import Any

import torch

from tensorprobe.model import Call
from tensorprobe.replay.arguments import is_device_text
from tensorprobe.replay.functions import CannotReplay, find_op


def call_source(call: Call) -> str:
    """`torch.nn.functional.softmax(t["input.0"], dim=-1)`; `t` are tensors by slot, `dtype` and `device` adapt to the run."""
    kwargs = call.kwargs or {}
    parts = [_source(tree, device=is_device_text(call, tree)) for tree in call.args or []]
    plain = {key: tree for key, tree in kwargs.items() if key.isidentifier()}
    parts += [f"{key}={_source(tree, device=is_device_text(call, tree, key))}" for key, tree in plain.items()]
    odd = {key: tree for key, tree in kwargs.items() if key not in plain}
    if odd:
        parts.append("**{" + ", ".join(f"{key!r}: {_source(tree)}" for key, tree in odd.items()) + "}")
    return f"{find_op(call.op).path}({', '.join(parts)})"


def _source(tree: Any, *, device: bool = False) -> str:
    if device:
        return "device"
    if isinstance(tree, list):
        return "[" + ", ".join(_source(part) for part in tree) + "]"
    if not isinstance(tree, dict):
        return repr(tree)
    if "slot" in tree:
        return f"t[{tree['slot']!r}]"
    kind: Any = tree.get("type")
    value: Any = tree.get("value")
    if kind == "torch.dtype":
        return f"dtype({_name(value)})"
    if kind in ("torch.layout", "torch.memory_format"):
        return _name(value)
    if kind == "torch.device":
        return "device"
    if kind in ("float", "int"):
        return f"{kind}({str(value)!r})"
    if kind == "ellipsis":
        return "..."
    if kind == "dict":
        return "{" + ", ".join(f"{key!r}: {_source(part)}" for key, part in value.items()) + "}"
    return _sequence(kind, value)


def _sequence(kind: Any, value: Any) -> str:
    if kind not in ("tuple", "torch.Size", "slice", "complex"):
        raise CannotReplay(f"an argument is an object that no record can hold ({value})")
    parts = [_source(part) for part in value]
    if kind == "slice":
        return f"slice({', '.join(parts)})"
    if kind == "complex":
        return f"complex({', '.join(f'float({str(part)!r})' for part in value)})"
    if kind == "torch.Size":
        return f"torch.Size([{', '.join(parts)}])"
    return "(" + ", ".join(parts) + ("," if len(parts) == 1 else "") + ")"


def _name(value: Any) -> str:
    short = str(value).removeprefix("torch.")
    if not short.isidentifier() or not isinstance(
        getattr(torch, short, None), (torch.dtype, torch.layout, torch.memory_format)
    ):
        raise CannotReplay(f"this torch has no {short!r}")
    return f"torch.{short}"
