"""A call as an entry of msprobe's dump.json: its arguments, results and parameters, each tensor by what is known of it.

In: a call as the tap saw it, and what is known of the tensors in its slots. Out: plain data for JSON.
"""

from __future__ import annotations

from typing import Any

from tensorprobe.legacy.layouts.dump_files import older_statistics
from tensorprobe.legacy.layouts.msprobe_writer_json import as_number
from tensorprobe.model import DTYPES
from tensorprobe.model.event import Event, SlotEvent
from tensorprobe.numerics.summary import Moments

Tensors = dict[str, dict[str, Any]]
"""Name of a slot → what is dumped of its tensor."""

_PLAIN = {bool: "bool", int: "int", float: "float", str: "str"}
_OF_TORCH = ("torch.dtype", "torch.layout", "torch.memory_format")
_MOST_PLACES = 4096


def forward_entry(event: Event, tensors: Tensors, parts: tuple[str, ...]) -> dict[str, Any]:
    """The entry of a forward call. What is not asked for has no key in it."""
    entry: dict[str, Any] = {}
    if "forward.input" in parts:
        entry["input_args"] = [argument_entry(tree, tensors) for tree in event.args or ()]
        entry["input_kwargs"] = {key: argument_entry(tree, tensors) for key, tree in (event.kwargs or {}).items()}
        if event.level.is_module:
            entry["parameters"] = _below(tensors, "parameters")
    if "forward.output" in parts and event.raised is None:
        entry["output"] = _side(tensors, "output")
    return entry


def backward_entry(tensors: Tensors, parts: tuple[str, ...]) -> dict[str, Any]:
    """The entry of a backward call: gradients of its results come in, gradients of its arguments go out."""
    return {side: _side(tensors, side) for side in ("input", "output") if f"backward.{side}" in parts}


def gradients_entry(tensors: Tensors) -> dict[str, Any]:
    """The gradients of a module's own parameters, which msprobe keeps in an entry of their own; empty when there are none."""
    return {name: [tensor] for name, tensor in _below(tensors, "parameters").items()}


def tensor_entry(slot: SlotEvent, moments: Moments | None) -> dict[str, Any]:
    """What is said of every tensor."""
    entry: dict[str, Any] = {"type": "torch.Tensor", "dtype": f"torch.{slot.dtype}", "shape": list(slot.shape)}
    if moments is not None:
        entry |= _statistics(moments, slot)
    entry["requires_grad"] = slot.grad
    return entry


def _statistics(moments: Moments, slot: SlotEvent) -> dict[str, Any]:
    """Over all elements, as msprobe takes them. It gives mean and norm of whole numbers only when there is one number.

    Its extremes and mean of complex numbers are of their sizes, which are not known here.
    """
    kind = DTYPES[slot.dtype].kind if slot.dtype in DTYPES else "float"
    if 0 in slot.shape:
        return dict.fromkeys(("Max", "Min", "Mean", "Norm"))
    greatest, least, mean = older_statistics(moments)
    norm = float("nan") if moments.nan else float("inf") if moments.inf else moments.norm
    if kind == "complex":
        return {"Max": None, "Min": None, "Mean": None, "Norm": as_number(norm)}
    if kind == "bool":
        return {"Max": bool(greatest), "Min": bool(least), "Mean": None, "Norm": None}
    if kind == "int":
        one = int(greatest) if not slot.shape else None
        return {"Max": int(greatest), "Min": int(least), "Mean": one, "Norm": one if one is None else abs(one)}
    return {"Max": as_number(greatest), "Min": as_number(least), "Mean": as_number(mean), "Norm": as_number(norm)}


def argument_entry(tree: Any, tensors: Tensors) -> Any:
    """A tree of arguments as msprobe has it."""
    if tree is None:
        return None
    if isinstance(tree, list):
        return [argument_entry(part, tensors) for part in tree]
    if not isinstance(tree, dict):
        return {"type": _PLAIN[type(tree)], "value": tree}
    if "slot" in tree:
        return tensors.get(tree["slot"])
    kind, value = str(tree.get("type")), tree.get("value")
    if kind == "tuple":
        return [argument_entry(part, tensors) for part in value or ()]
    if kind == "dict":
        return {key: argument_entry(part, tensors) for key, part in (value or {}).items()}
    if kind in _OF_TORCH:
        value = f"torch.{value}"
    elif kind == "float":
        value = as_number(float(str(value)))
    elif kind == "slice":
        value = [None if isinstance(part, dict) else part for part in value or ()]
    elif kind == "ellipsis":
        value = "..."
    elif kind == "object":
        kind, value = str(value), None
    return {"type": kind, "value": value}


def _side(tensors: Tensors, side: str) -> Any:
    """The tensors whose slots begin with `side`, in lists as they stood in lists; null where there was none."""
    held = _below(tensors, side)
    return held if held else []


def _below(tensors: Tensors, side: str) -> Any:
    tree: dict[str, Any] = {}
    for name, tensor in tensors.items():
        first, *steps = name.split(".")
        if first == side and steps:
            _put(tree, steps, tensor)
    return tree if side == "parameters" else _with_lists(tree)


def _put(tree: dict[str, Any], steps: list[str], tensor: dict[str, Any]) -> None:
    for step in steps[:-1]:
        tree = tree.setdefault(step, {})
    tree[steps[-1]] = tensor


def _with_lists(tree: dict[str, Any]) -> Any:
    """A level of the tree whose keys are places becomes a list."""
    if "type" in tree and "dtype" in tree:
        return tree
    below = {key: _with_lists(value) for key, value in tree.items()}
    if not below or not all(key.isdecimal() and int(key) < _MOST_PLACES for key in below):
        return below
    places = {int(key): value for key, value in below.items()}
    return [places.get(place) for place in range(max(places) + 1)]
