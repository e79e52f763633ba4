"""The JSON files of msprobe: a call as an entry of dump.json, and objects that grow in a file.

The file is whole JSON after every write: new entries and the closing braces go out in one write.

Infinities are written as 1e999. That is valid JSON, and Python and the published msprobe read it as infinity. JSON has no
number for NaN: it is the string "NaN", which the published `msprobe compare` accepts. It would take a string "Infinity" for
a text, and it refuses "-Infinity".
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from tensorprobe.errors import RunDamaged
from tensorprobe.legacy.layouts.dump_files import older_statistics
from tensorprobe.legacy.layouts.gradients import in_order, is_floating
from tensorprobe.legacy.layouts.targets import MSPROBE_VALUES, TOOL, MsprobeTarget
from tensorprobe.model import DTYPES
from tensorprobe.model.dtypes import EPS, TINY
from tensorprobe.model.event import Event, SlotEvent
from tensorprobe.numerics.summary import Moments
from tensorprobe.ops.names import parse_call_name

_encode = msgspec.json.Encoder().encode
_TAIL = b"\n}\n"
_INFINITY, _MINUS_INFINITY = msgspec.Raw(b"1e999"), msgspec.Raw(b"-1e999")


def as_number(value: float) -> Any:
    """Return the JSON value for a float, finite or not."""
    if value - value == 0:
        return value
    return "NaN" if value != value else _INFINITY if value > 0 else _MINUS_INFINITY


def object_text(entries: dict[str, Any]) -> bytes:
    """Return the text of a complete object, which a GrowingObject can add to."""
    return b"{" + b",".join(_line(key, value) for key, value in entries.items()) + _TAIL


def _line(key: str, value: Any) -> bytes:
    return b"\n %b: %b" % (_encode(key), _encode(value))


class GrowingObject:
    """An object in the file at `path`, or at the end of one: `head` comes before its entries, `tail` closes everything.

    What is in the file is kept, and must be such an object. Nothing is written before `flush`. OSError as the disk gives
    it: the file is whole then, and without the entries that were to be written.
    """

    def __init__(self, path: Path, head: bytes = b"{", tail: bytes = _TAIL) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self._tail = tail
        self._waiting: list[bytes] = []
        try:
            size = os.fstat(self._fd).st_size
            if not size:
                os.pwrite(self._fd, head + tail, 0)
                size = len(head) + len(tail)
            self._end = size - len(tail)
            if self._end < 1 or os.pread(self._fd, len(tail), self._end) != tail:
                raise RunDamaged(f"'{path}' was changed since it was written; nothing can be added to it.")
            self._is_empty = os.pread(self._fd, 1, self._end - 1) == b"{"
        except BaseException:
            os.close(self._fd)
            raise

    def add(self, key: str, value: Any) -> None:
        """An entry, whose key the object must not have yet."""
        self._waiting.append(_line(key, value))

    def flush(self) -> None:
        """Write what was added."""
        if not self._waiting:
            return
        entries, self._waiting = b",".join(self._waiting), []
        data = entries + self._tail if self._is_empty else b"," + entries + self._tail
        try:
            if os.pwrite(self._fd, data, self._end) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with contextlib.suppress(OSError):  # told by the one that is raised
                os.pwrite(self._fd, self._tail, self._end)
                os.ftruncate(self._fd, self._end + len(self._tail))
            raise
        self._end += len(data) - len(self._tail)
        self._is_empty = False

    def close(self) -> None:
        """Give the file back."""
        os.close(self._fd)


def open_dump(target: MsprobeTarget) -> GrowingObject:
    """Open the object with the calls. The file starts with what was dumped and where the values are."""
    folder = Path(target.folder)
    head = {
        "task": target.task,
        "level": target.level,
        "framework": "pytorch",
        "tool": TOOL,
        "dump_data_dir": None if target.values is None else str(folder.absolute() / MSPROBE_VALUES),
    }
    return GrowingObject(folder / target.index, _encode(head)[:-1] + b',"data":{', b"\n}}\n")


Tensors = dict[str, dict[str, Any]]
"""Name of a slot → what is dumped of its tensor."""

_PLAIN = {bool: "bool", int: "int", float: "float", str: "str"}
_OF_TORCH = ("torch.dtype", "torch.layout", "torch.memory_format")
_MOST_PLACES = 4096


def forward_entry(event: Event, tensors: Tensors, parts: tuple[str, ...]) -> dict[str, Any]:
    """Return the entry of a forward call, with keys only for the wanted parts."""
    entry: dict[str, Any] = {}
    if "forward.input" in parts:
        entry["input_args"] = [argument_entry(tree, tensors) for tree in event.args or ()]
        entry["input_kwargs"] = {key: argument_entry(tree, tensors) for key, tree in (event.kwargs or {}).items()}
        if event.level.is_module:
            entry["parameters"] = _below(tensors, "parameters")
    if "forward.output" in parts and event.raised is None:
        entry["output"] = _side(tensors, "output") if event.result is None else argument_entry(event.result, tensors)
    return entry


Places = dict[str, Sequence[str]]
"""Side of a backward call → the slots of its gradients, in their order."""


def gradient_places(event: Event, tensors: Tensors) -> Places:
    """Return where the gradients of a forward call stand in its backward entry; those of a module by place."""
    op = parse_call_name(event.name).op
    results = [f"input{name[len('output') :]}" for name in tensors if name.startswith("output")]
    if event.level.is_module:
        return {"input": results}
    floating = [name for name, held in tensors.items() if name.startswith("input") and is_floating(held["dtype"])]
    return {"input": results, "output": [f"output{name[len('input') :]}" for name in in_order(op, floating)]}


def backward_entry(tensors: Tensors, parts: tuple[str, ...], places: Places) -> dict[str, Any]:
    """Return the entry of a backward call: gradients of results as input, gradients of arguments as output."""
    entry: dict[str, Any] = {}
    for side in ("input", "output"):
        if f"backward.{side}" in parts:
            entry[side] = [tensors.get(place) for place in places[side]] if side in places else _side(tensors, side)
    return entry


def gradients_entry(tensors: Tensors) -> dict[str, Any]:
    """The gradients of a module's own parameters, which msprobe keeps in an entry of their own; empty when there are none."""
    return {name: [tensor] for name, tensor in _below(tensors, "parameters").items()}


def tensor_entry(slot: SlotEvent, moments: Moments | None, *, rounded: bool = True) -> dict[str, Any]:
    """Return the fields that every tensor has. `rounded`: mean and norm have the precision and range of its dtype."""
    entry: dict[str, Any] = {"type": "torch.Tensor", "dtype": f"torch.{slot.dtype}", "shape": list(slot.shape)}
    if moments is not None:
        entry |= _statistics(moments, slot, rounded=rounded)
    entry["requires_grad"] = slot.grad
    return entry


def _statistics(moments: Moments, slot: SlotEvent, *, rounded: bool) -> dict[str, Any]:
    """Over all elements, as msprobe takes them. It gives mean and norm of whole numbers only when there is one number.

    Its extremes and mean of complex numbers are of their sizes, which are not known here.
    """
    kind = DTYPES[slot.dtype].kind if slot.dtype in DTYPES else "float"
    if 0 in slot.shape:
        return dict.fromkeys(("Max", "Min", "Mean", "Norm"))
    greatest, least, mean = older_statistics(moments)
    if kind == "float" and not slot.shape:
        return dict.fromkeys(
            ("Max", "Min", "Mean", "Norm"), as_number(greatest)
        )  # a number is its own norm, with its sign
    norm = float("nan") if moments.nan else float("inf") if moments.inf else moments.norm
    if kind == "complex":
        return {"Max": None, "Min": None, "Mean": None, "Norm": as_number(norm)}
    if kind == "bool":
        return {"Max": bool(greatest), "Min": bool(least), "Mean": None, "Norm": None}
    if kind == "int":
        one = int(greatest) if not slot.shape else None
        return {"Max": int(greatest), "Min": int(least), "Mean": one, "Norm": one if one is None else abs(one)}
    if rounded and slot.dtype in _ROUNDED:
        # Sums, and those of squares, are float32 there: the least finite number of an attention mask is beyond them.
        if abs(mean) * math.prod(slot.shape) >= _BEYOND:
            mean = math.copysign(math.inf, mean)
        mean = _round_to(slot.dtype, mean)
        norm = _round_to(slot.dtype, math.inf if norm >= _BEYOND**0.5 else norm)
    return {"Max": as_number(greatest), "Min": as_number(least), "Mean": as_number(mean), "Norm": as_number(norm)}


_BEYOND = 2.0**128
_ROUNDED = {"float32": _BEYOND, "bfloat16": _BEYOND, "float16": 2.0**16}
"""Dtypes in which msprobe computes mean and norm → the first power of two that is too large for them."""


def _round_to(dtype: str, value: float) -> float:
    """Return the nearest number that the dtype has."""
    if not math.isfinite(value):
        return value
    unit = max(math.ldexp(EPS[dtype], math.frexp(value)[1] - 1), TINY[dtype] * EPS[dtype])
    near = round(value / unit) * unit
    return near if abs(near) < _ROUNDED[dtype] else math.copysign(math.inf, near)


def argument_entry(tree: Any, tensors: Tensors) -> Any:
    """Return a tree of arguments in msprobe's form."""
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
        entries = [argument_entry(part, tensors) for part in value or ()]
        return dict(zip(tree["fields"], entries, strict=True)) if "fields" in tree else entries
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
        return None
    return {"type": kind, "value": value}


def _side(tensors: Tensors, side: str) -> Any:
    """Return the tensors of one side, nested as their slots are; null where a place holds none."""
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
