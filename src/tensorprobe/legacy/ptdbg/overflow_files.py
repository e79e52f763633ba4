"""What an overflow check leaves on disk: `Overflow_info_{time}_{k}.pkl` with its folder, and the JSON files for the parser.

In: a call that overflowed, with copies of its tensors. Out: a pkl that is text and appears when it and all its .npy are
whole: the stack first, then `[name, 101, [], dtype, shape]` for each tensor. `forward_info_{pid}.json` and
`backward_info_{pid}.json` of api_accuracy_checker hold every overflow so far, with values. OSError when the disk refuses.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy
import torch

from tensorprobe.legacy.layouts.ptdbg_lines import WITHOUT_STATISTICS
from tensorprobe.legacy.layouts.ptdbg_names import stack_line_name, write_line_name
from tensorprobe.model import DTYPES, Call, Frame, Slot
from tensorprobe.record.export import safe_file_name
from tensorprobe.record.stored import StoredCall

STEP = WITHOUT_STATISTICS + 1
_SCALARS = (bool, int, float)


class HeldValues:
    """The values of a call that are in memory and not on disk: a `ByteSource`. A slot's offset is its place in the list."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._left = dict(tensors)
        self._held: list[torch.Tensor] = []

    def give(self, slot: Slot) -> Slot:
        """The slot as one whose values can be read from here, if they are here and its own."""
        tensor = self._left.get(slot.name)
        if tensor is None or tensor.numel() != slot.count or str(tensor.dtype) != f"torch.{slot.dtype}":
            return slot
        self._held.append(self._left.pop(slot.name).detach().contiguous())
        return msgspec.structs.replace(
            slot,
            shape=tuple(tensor.shape),
            stride=None,
            offset=len(self._held) - 1,
            nbytes=tensor.numel() * tensor.itemsize,
        )

    def read(self, slot: Slot) -> memoryview:
        tensor = self._held[slot.offset or 0]
        return memoryview(tensor.flatten().view(torch.uint8).numpy())

    def hold(self, slot: Slot) -> tuple[int, object]:
        tensor = self._held[slot.offset or 0]
        return tensor.data_ptr(), tensor


def as_stored(call: Call, tensors: Mapping[str, torch.Tensor], rank: int, folder: Path) -> StoredCall:
    """The call as if it were read from a run, with the values of these tensors."""
    values = HeldValues(tensors)
    model = msgspec.structs.replace(call, slots=tuple(map(values.give, call.slots)))
    return StoredCall(model, step=0, rank=rank, index=0, run=folder, source=values)


def with_outputs(forward: Call, backward: Call) -> Call:
    """A forward call with its outputs, of which no more is known than that their gradients are like them."""
    outputs = [
        Slot(f"output{slot.name[5:]}", slot.dtype, slot.shape) for slot in backward.slots if slot.side == "input"
    ]
    return msgspec.structs.replace(forward, slots=(*forward.slots, *outputs))


def write_overflow(rank_folder: Path, count: int, call: StoredCall, frames: Sequence[Frame], everything: bool) -> Path:
    """Write the pkl of the `count`-th overflow and its folder; the path of the pkl. `everything`: as with the filter off."""
    folder = _new_folder(rank_folder, count)
    stack = [[frame.file, str(frame.line), frame.function, frame.code] for frame in frames]
    lines: list[Any] = [[stack_line_name(call.name), stack]]
    taken: set[str] = set()
    for name, dtype, shape, array in _arrays(call, everything):
        file = safe_file_name(name, "", taken)
        numpy.save(folder / f"{file}.npy", array, allow_pickle=False)
        lines.append([file, STEP, [], dtype, shape])
    pkl = folder.with_name(f"{folder.name}.pkl")
    partial = folder.with_name(f".{folder.name}.partial")
    partial.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    partial.replace(pkl)
    return pkl


def _new_folder(rank_folder: Path, count: int) -> Path:
    """A folder that is not there yet: two programs may be at their first overflow in the same second."""
    moment = datetime.now()
    while True:
        folder = rank_folder / f"Overflow_info_{moment:%Y%m%d_%H%M%S}_{count}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            moment += timedelta(seconds=1)
        else:
            return folder


def _arrays(call: StoredCall, everything: bool) -> Iterator[tuple[str, str, Any, Any]]:
    """Name, dtype, shape and values of each tensor, and with `everything` of each number among the arguments."""
    single = len([slot for slot in call.outputs if not slot.name.startswith("output.changed")]) == 1
    for slot in call.slots:
        kind = DTYPES[slot.dtype].kind if slot.dtype in DTYPES else ""
        if slot.has_data and (everything or kind in ("float", "complex")):
            name = write_line_name(call.name, slot.name, single=single)
            yield name, f"torch.{slot.dtype}", list(slot.shape), slot.numpy()
    for place, value in _numbers(call) if everything else ():
        yield write_line_name(call.name, place, single=False), str(type(value)), "[]", numpy.array(value)


def missing(call: StoredCall) -> list[str]:
    """The tensors whose values were not there any more when the overflow was found."""
    return [slot.name for slot in call.slots if not slot.has_data]


def _numbers(call: StoredCall) -> Iterator[tuple[str, bool | int | float]]:
    for at, tree in enumerate(call.args or ()):
        yield from _walk(f"input.{at}", tree)
    for key, tree in (call.kwargs or {}).items():
        yield from _walk(f"input.kwargs.{key}", tree)


def _walk(place: str, tree: Any) -> Iterator[tuple[str, bool | int | float]]:
    if isinstance(tree, _SCALARS):
        yield place, tree
        return
    kind = tree.get("type") if isinstance(tree, dict) else None
    if kind == "float":
        yield place, float(tree["value"])
    inner = tree["value"] if kind in ("tuple", "torch.Size", "dict") else tree
    parts = enumerate(inner) if isinstance(inner, list) else inner.items() if kind == "dict" else ()
    for key, part in parts:
        yield from _walk(f"{place}.{key}", part)
