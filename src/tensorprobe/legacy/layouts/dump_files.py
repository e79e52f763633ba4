"""Dumps in the older layouts, written by the recorder: a .npy for each tensor, and for ptdbg_ascend a pkl of JSON lines.

A line is written after the files it names. No failure of the disk is raised from here: it is counted and told in the
coverage. Calls that the layout has no name for (recomputed ones) are counted as well.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy

from tensorprobe.errors import TensorDamaged
from tensorprobe.legacy.layouts.forms import AclForm, Form, PtdbgForm
from tensorprobe.legacy.layouts.held_tensors import HeldTensors
from tensorprobe.legacy.layouts.ptdbg_lines import stack_line_name, write_line_name
from tensorprobe.legacy.layouts.rooms import Room, header_room
from tensorprobe.model import DTYPES, Slot
from tensorprobe.model.dtypes import NUMPY_NAMES
from tensorprobe.model.event import Event, SlotEvent
from tensorprobe.model.manifest import RankPart
from tensorprobe.numerics.summary import Moments
from tensorprobe.ops.names import parse_call_name
from tensorprobe.record.elements import to_numpy
from tensorprobe.record.export import safe_file_name
from tensorprobe.record.messages import CloseNote, StackNote
from tensorprobe.record.step_files import Stored, Written, closed_part, with_source, write_all

_FLUSH_LINES = 500
_LONGEST_NAME = 200
_SAFE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=@-]*")
_STREAM = 0
_SCALARS = (bool, int, float)
_NAMELESS = "recomputed call or second backward, for which this layout has no name"

Slots = list[tuple[SlotEvent, Stored | None]]


class DumpFiles:
    """Where the recorder puts calls of a dump; `tensors` holds the bytes until then. One rank, one step."""

    def __init__(self, form: Form, rank: int) -> None:
        self.tensors = HeldTensors()
        self._form = form
        self._rank = rank
        self._lines: list[str] = []
        self._stacks: dict[int, list[list[str]]] = {}
        self._taken: set[str] = set()
        self._pkl = -1
        self._pkl_size = 0
        self._waiting_calls = 0
        self._task = 0
        self._bytes = 0
        self._lost_calls = 0
        self._failures: Counter[str] = Counter()
        self._left_out: Counter[str] = Counter()
        self._nameless_calls = 0

    def step(self, step: int) -> None:
        """A dump knows no steps."""

    def stack(self, note: StackNote) -> None:
        """Remember a stack for the calls that will name it."""
        self._stacks[note.id] = [[file, str(line), function, code] for file, line, function, code in with_source(note)]

    def call(self, event: Event, stored: list[Stored | None]) -> None:
        """Write the tensors of a call, then note its lines."""
        slots = list(zip(event.slots, stored, strict=True))
        try:
            if event.repeat and not isinstance(self._form, AclForm):
                self._nameless_calls += 1
            else:
                self._write(event, slots)
        finally:
            for kept in stored:
                if kept is not None:
                    self.tensors.discard(kept.offset)

    def flush(self) -> None:
        """Write the lines that wait."""
        lines, self._lines = self._lines, []
        if not lines or not isinstance(self._form, PtdbgForm):
            return
        try:
            if self._pkl == -1:
                self._pkl = os.open(self._form.pkl, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            data = ("\n".join(lines) + "\n").encode()
            write_all(self._pkl, data)
            self._pkl_size += len(data)
        except OSError as error:
            self._failures[f"{Path(self._form.pkl).name}: {error.strerror or error}"] += 1
            self._lost_calls += self._waiting_calls
            self._cut_torn_line()
        self._waiting_calls = 0

    def _cut_torn_line(self) -> None:
        if self._pkl != -1:
            with contextlib.suppress(OSError):  # counted just before: the disk refuses this file
                os.ftruncate(self._pkl, self._pkl_size)
                os.lseek(self._pkl, self._pkl_size, os.SEEK_SET)

    def finish(self, closing: CloseNote | None, trainer_pid: int) -> RankPart | None:
        """Write everything out; what became of it comes back when the trainer ended in good order."""
        self.flush()
        self._close()
        if closing is None:
            return None
        if self._nameless_calls:
            self._left_out[_NAMELESS] = self._nameless_calls
        notes = [f"{what} ({count} times)" for what, count in self._left_out.items()]
        written = Written(self._bytes, self._lost_calls, self._failures, notes, self._nameless_calls)
        return closed_part(self._rank, trainer_pid, closing, written)

    def _close(self) -> None:
        if self._pkl != -1:
            os.close(self._pkl)
            self._pkl = -1

    def _write(self, event: Event, slots: Slots) -> None:
        if isinstance(self._form, AclForm):
            self._write_kernel(self._form, event, slots)
        elif isinstance(self._form, PtdbgForm):
            self._write_call(self._form, event, slots)

    def _write_call(self, form: PtdbgForm, event: Event, slots: Slots) -> None:
        outputs = [slot.name for slot, _ in slots if slot.name.startswith("output")]
        single = len([name for name in outputs if not name.startswith("output.changed")]) == 1
        held = {slot.name: (slot, stored) for slot, stored in slots}
        for place, number in _numbers(event) if form.everything else ():
            held[place] = number  # type: ignore[assignment]
        for place in _in_order(event, held) if form.everything else held:
            name = self._name(write_line_name(event.name, place, single=single))
            found: Any = held[place]
            line = self._scalar(form, name, found) if isinstance(found, _SCALARS) else self._tensor(form, name, *found)
            if line is not None:
                self._lines.append(json.dumps(line))
        if form.stacks and event.stack is not None:
            self._lines.append(json.dumps([stack_line_name(event.name), self._stacks.get(event.stack, [])]))
        self._waiting_calls += 1
        if len(self._lines) >= _FLUSH_LINES:
            self.flush()

    def _tensor(self, form: PtdbgForm, name: str, slot: SlotEvent, stored: Stored | None) -> list[Any] | None:
        """The line of a tensor, whose file is written; None when the dump has none."""
        kind = DTYPES[slot.dtype].kind if slot.dtype in DTYPES else ""
        if (not form.everything and kind not in ("float", "complex")) or form.folder is None:
            return None
        if stored is None or not self._write_tensor(Path(form.folder, f"{name}.npy"), slot, stored):
            return None
        statistics = older_statistics(stored.moments)
        return [name, form.dump_step, [], f"torch.{slot.dtype}", list(slot.shape), statistics]

    def _scalar(self, form: PtdbgForm, name: str, value: bool | int | float) -> list[Any] | None:
        if form.folder is None or not self._write_array(Path(form.folder, f"{name}.npy"), numpy.array(value)):
            return None
        return [name, form.dump_step, [], str(type(value)), "[]", [value] * 3]

    def _write_kernel(self, form: AclForm, event: Event, slots: Slots) -> None:
        """`convolution.convolution_default_0.7.0.1675157077172961.input.0.npy`: type, name, task, stream, time, slot."""
        op, number, _ = parse_call_name(event.name)
        kind, _, overload = op.removeprefix("Aten.").partition(".")
        parts = (kind, "_".join((kind, overload, number)) if overload else f"{kind}_{number}")
        head = f"{'.'.join(parts)}.{self._task}.{_STREAM}.{time.time_ns() // 1000}"
        self._task += 1
        for slot, stored in slots:
            if stored is not None:
                self._write_tensor(Path(form.folder, f"{self._name(f'{head}.{slot.name}')}.npy"), slot, stored)

    def _write_tensor(self, path: Path, slot: SlotEvent, stored: Stored) -> bool:
        described = Slot(name=slot.name, dtype=slot.dtype, shape=tuple(slot.shape), stride=slot.stride)
        try:
            room = self.tensors.get(stored.offset or 0)
            array = to_numpy(room.view, described)
        except TensorDamaged as error:
            self._left_out[f"a tensor that numpy cannot hold: {error}"] += 1
            return False
        as_it_is = array.flags.c_contiguous and array.nbytes == room.nbytes
        return self._write_array(path, array, room if as_it_is and slot.dtype in NUMPY_NAMES else None)

    def _write_array(self, path: Path, array: numpy.ndarray[Any, Any], held: Room | None = None) -> bool:
        """Write one file, from the room that holds these very bytes if one does; False, and counted, when the disk refuses."""
        header = npy_header(array.dtype.str, array.shape, header_room(array.nbytes))
        if held is not None:
            return self._write_room(path, held, header)
        room = self.tensors.rooms.take(array.nbytes)
        numpy.frombuffer(room.view, array.dtype).reshape(array.shape)[...] = array
        try:
            return self._write_room(path, room, header)
        finally:
            self.tensors.rooms.give_back(room)

    def _write_room(self, path: Path, room: Room, header: bytes, tail: bytes = b"") -> bool:
        try:
            room.write(path, header, tail)
        except OSError as error:
            self._failures[f"{path.parent.name}/*{path.suffix}: {error.strerror or error}"] += 1
            with contextlib.suppress(OSError):  # counted just before; what is left of the file has no line
                path.unlink()
            return False
        self._bytes += room.nbytes
        return True

    def _name(self, name: str) -> str:
        """The name as a file can have it: keys of a user's dict may hold anything."""
        if len(name) <= _LONGEST_NAME and _SAFE.fullmatch(name):
            return name
        return safe_file_name(name, "", self._taken)


def open_files(options: dict[str, Any], rank: int) -> DumpFiles:
    """Return what the recorder writes a dump to. `options` are the fields of the form, with its tag."""
    return DumpFiles(msgspec.convert(options, PtdbgForm | AclForm), rank)


@lru_cache(maxsize=4096)
def npy_header(descr: str, shape: tuple[int, ...], room: int) -> bytes:
    """The header of a .npy file, version 1.0, of an array in row-major order; its data begin at a multiple of `room`."""
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape!r}, }}"
    length = -(-(10 + len(text) + 1) // room) * room - 10
    return b"\x93NUMPY\x01\x00" + length.to_bytes(2, "little") + text.ljust(length - 1).encode() + b"\n"


def older_statistics(moments: Moments) -> list[float]:
    """max, min, mean as the older tools take them: a NaN anywhere makes all of them NaN, infinities count in the mean."""
    if moments.nan:
        return [math.nan] * 3
    mean = moments.mean
    if moments.inf:
        mean = (moments.max if moments.max == math.inf else 0.0) + (moments.min if moments.min == -math.inf else 0.0)
    return [moments.max, moments.min, mean]


def _numbers(event: Event) -> Iterator[tuple[str, bool | int | float]]:
    """Every bool, int and float among the arguments, with its place."""
    for place, leaf in _leaves(event):
        if isinstance(leaf, _SCALARS):
            yield place, leaf


def _in_order(event: Event, held: dict[str, Any]) -> list[str]:
    """The places of a call, arguments in the order in which they were given."""
    arguments = [place for place, _ in _leaves(event) if place in held]
    return list(dict.fromkeys([*arguments, *held]))


def _leaves(event: Event) -> Iterator[tuple[str, Any]]:
    for at, tree in enumerate(event.args or ()):
        yield from _walk(f"input.{at}", tree)
    for key, tree in (event.kwargs or {}).items():
        yield from _walk(f"input.kwargs.{key}", tree)


def _walk(place: str, tree: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, list):
        for at, entry in enumerate(tree):
            yield from _walk(f"{place}.{at}", entry)
    elif not isinstance(tree, dict):
        yield place, tree
    elif "slot" in tree:
        yield tree["slot"], None
    elif tree.get("type") in ("tuple", "torch.Size"):
        yield from _walk(place, tree["value"])
    elif tree.get("type") == "dict":
        for key, entry in tree["value"].items():
            yield from _walk(f"{place}.{key}", entry)
    elif tree.get("type") == "float":
        yield place, float(tree["value"])
