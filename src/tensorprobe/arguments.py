"""Arguments and results as slots: which tensors there are, their names, which of them a call may change; the rest as a JSON tree.

A small recursion of our own: the general one of torch costs ten times as much, for every call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from tensorprobe.fast import fast

Tensors = list[tuple[str, torch.Tensor]]

_MANY = 64
_INPUTS = [f"input.{i}" for i in range(_MANY)]
_OUTPUTS = [f"output.{i}" for i in range(_MANY)]
_REFERENCES = [{"slot": name} for name in _INPUTS]
_REDUCTIONS = ("ReduceOp", "ReduceOp.RedOpType")
_PLAIN = frozenset((int, bool, str, type(None)))
_BY_KEYWORD = ("input.kwargs.running_mean", "input.kwargs.running_var")
_RUNNING_STATISTICS = {
    f"{home}.{norm}_norm": (*places, *_BY_KEYWORD)
    for norm in ("batch", "instance")
    for home, places in (("Functional", ("input.1", "input.2")), ("Torch", ("input.3", "input.4")))
}
_NAMED = {torch.dtype: "torch.dtype", torch.layout: "torch.layout", torch.memory_format: "torch.memory_format"}


def flatten_arguments(args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Tensors) -> tuple[list[Any], Any]:
    """Add the tensors of a call to `tensors` as `input.0`, `input.1.0`, `input.kwargs.mask`; the two trees come back."""
    if fast is not None and len(args) <= _MANY:
        tree = fast.flatten(args, _INPUTS, _REFERENCES, torch.Tensor, tensors, describe)
    else:
        tree = [describe(value, _INPUTS[i] if i < _MANY else f"input.{i}", tensors) for i, value in enumerate(args)]
    if not kwargs:
        return tree, None
    return tree, {key: describe(value, f"input.kwargs.{key}", tensors) for key, value in kwargs.items()}


def flatten_result(result: Any, tensors: Tensors, side: str = "output") -> None:
    """Add the tensors of a result to `tensors` as `output.0`, `output.1`, `output.1.0`."""
    if isinstance(result, torch.Tensor):
        tensors.append((f"{side}.0", result))
    elif isinstance(result, (tuple, list)):
        for i, value in enumerate(_entries(result)):
            describe(value, _OUTPUTS[i] if side == "output" and i < _MANY else f"{side}.{i}", tensors)
    elif isinstance(result, dict):
        for key, value in dict.items(result):
            describe(value, f"{side}.{key}", tensors)
    elif result is not None and hasattr(result, "__dataclass_fields__"):
        for key in result.__dataclass_fields__:
            describe(getattr(result, key, None), f"{side}.{key}", tensors)


def describe_result(result: Any) -> Any:
    """Return the tree of a result, with slots named as `flatten_result` names them: a list of results, or a tree with names."""
    if isinstance(result, tuple):
        tree = describe(result, "output", [])
        return tree if "fields" in tree else tree["value"]
    if isinstance(result, torch.Tensor):
        return [{"slot": "output.0"}]
    if (names := getattr(result, "__dataclass_fields__", None)) is not None:
        result = {name: getattr(result, name, None) for name in names}
    return [describe(result, "output", [])]


def describe(value: Any, path: str, tensors: Tensors) -> Any:
    """Return the tree of a value; the tensors in it are added under names that begin with `path`."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        tensors.append((path, value))
        return {"slot": path}
    if kind in _PLAIN:
        return value if kind is not int or -(2**63) <= value < 2**63 else {"type": "int", "value": str(value)}
    if kind is float:
        return value if math.isfinite(value) else {"type": "float", "value": _name_float(value)}
    if kind is list:
        return [describe(entry, f"{path}.{i}", tensors) for i, entry in enumerate(value)]
    if isinstance(value, tuple):
        entries = [describe(entry, f"{path}.{i}", tensors) for i, entry in enumerate(_entries(value))]
        tree = {"type": "torch.Size" if kind is torch.Size else "tuple", "value": entries}
        if (fields := getattr(kind, "_fields", None)) is not None:
            tree["fields"] = [str(field) for field in fields]
        return tree
    if isinstance(value, dict):
        return {"type": "dict", "value": {str(k): describe(v, f"{path}.{k}", tensors) for k, v in dict.items(value)}}
    return _describe(value, kind, path, tensors)


def _entries(value: Any) -> Iterator[Any]:
    """Iterate over a list or tuple without the methods of a class of the program."""
    return list.__iter__(value) if isinstance(value, list) else tuple.__iter__(value)


def _describe(value: Any, kind: type, path: str, tensors: Tensors) -> Any:
    if kind in _NAMED:
        return {"type": _NAMED[kind], "value": str(value).removeprefix("torch.")}
    if kind is torch.device:
        return {"type": "torch.device", "value": str(value)}
    if kind is slice:
        parts = (value.start, value.stop, value.step)
        return {"type": "slice", "value": [describe(p, f"{path}.{i}", tensors) for i, p in enumerate(parts)]}
    if kind is complex:
        return {"type": "complex", "value": [_name_float(value.real), _name_float(value.imag)]}
    if value is ...:
        return {"type": "ellipsis", "value": None}
    if kind.__qualname__ in _REDUCTIONS and kind.__module__.startswith("torch."):
        return {"type": "torch.distributed.ReduceOp", "value": _name_reduction(value)}
    if isinstance(value, list):
        return [describe(entry, f"{path}.{i}", tensors) for i, entry in enumerate(_entries(value))]
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        fields = {
            key: describe(getattr(value, key, None), f"{path}.{key}", tensors) for key in value.__dataclass_fields__
        }
        return {"type": "dict", "value": fields}
    return {"type": "object", "value": _short_name(value)}


def _short_name(value: Any) -> str:
    """Return what kind of thing it is; never its repr, which may be huge, slow, or run the user's code."""
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _name_reduction(value: Any) -> str:
    """Return `SUM`, `AVG`, …; a ReduceOp has no name of its own, but equals one of its members."""
    members: dict[str, Any] = getattr(type(value), "RedOpType", type(value)).__members__
    return next((name for name, member in members.items() if value == member), "")


def _name_float(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def changed_arguments(op: str) -> tuple[bool, tuple[str, ...]]:
    """Return whether a call of `Torch.add` may change its arguments, and which slots it changes without a new version.

    A slot that ends with a dot stands for a list of slots.
    """
    name = op.rpartition(".")[2]
    written = _RUNNING_STATISTICS.get(op, ()) or _written_by_fused(name)
    return bool(written) or _may_change(name), written


def _written_by_fused(name: str) -> tuple[str, ...]:
    """Return the lists that a fused optimizer step changes: the versions of these tensors do not change."""
    op = getattr(torch.ops.aten, name, None) if name.startswith("_fused_") else None
    return () if op is None else written_slots(op.default)


def written_slots(op: Any) -> tuple[str, ...]:
    """Return the slots that an ATen op changes, from its schema, each also as a list."""
    written = []
    for place, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name != "grads":
            written += [
                f"{slot}{end}" for slot in (f"input.{place}", f"input.kwargs.{argument.name}") for end in ("", ".")
            ]
    return tuple(written)


def _may_change(name: str) -> bool:
    if name.startswith(("__i", "__set")):
        return True
    return (name.endswith("_") and not name.endswith("__")) or name.startswith("_fused_") or "batch_norm" in name
