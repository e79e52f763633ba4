"""Writes dumps in the older layouts: a .npy for each tensor, and for ptdbg_ascend a pkl of JSON lines.

A line is written after the file it names. Disk errors are counted and reported in the coverage, never raised. Calls that
the layout has no name for (recomputed ones) are counted as well.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy

from tensorprobe.errors import TensorDamaged
from tensorprobe.legacy.layouts.buffers import Buffer, HeldTensors, header_multiple
from tensorprobe.legacy.layouts.ptdbg_lines import stack_line_name, write_line_name
from tensorprobe.legacy.layouts.targets import KernelTarget, PtdbgTarget, Target
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
    """Writes the calls of one rank and step; `tensors` holds their bytes until the call arrives."""

    def __init__(self, target: Target, rank: int) -> None:
        self.tensors = HeldTensors()
        self._target = target
        self._rank = rank
        self._lines: list[str] = []
        self._stacks: dict[int, list[list[str]]] = {}
        self._taken: dict[str, int] = {}
        self._pkl = -1
        self._pkl_size = 0
        self._waiting_calls = 0
        self._task = 0
        self._bytes = 0
        self._lost_calls = 0
        self._failures: Counter[str] = Counter()
        self._left_out: Counter[str] = Counter()
        self._nameless_calls = 0
        self._empty_calls = 0

    def step(self, step: int) -> None:
        """Do nothing: a dump has no steps."""

    def stack(self, note: StackNote) -> None:
        """Remember a stack for the calls that will name it."""
        self._stacks[note.id] = [[file, str(line), function, code] for file, line, function, code in with_source(note)]

    def call(self, event: Event, stored: list[Stored | None]) -> None:
        """Write the tensors of a call, then note its lines."""
        slots = list(zip(event.slots, stored, strict=True))
        try:
            if event.repeat and not isinstance(self._target, KernelTarget):
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
        if not lines or not isinstance(self._target, PtdbgTarget):
            return
        try:
            if self._pkl == -1:
                self._pkl = os.open(self._target.pkl, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            data = ("\n".join(lines) + "\n").encode()
            write_all(self._pkl, data)
            self._pkl_size += len(data)
        except OSError as error:
            self._failures[f"{Path(self._target.pkl).name}: {error.strerror or error}"] += 1
            self._lost_calls += self._waiting_calls
            self._cut_torn_line()
        self._waiting_calls = 0

    def _cut_torn_line(self) -> None:
        if self._pkl != -1:
            with contextlib.suppress(OSError):  # counted just before: the disk refuses this file
                os.ftruncate(self._pkl, self._pkl_size)
                os.lseek(self._pkl, self._pkl_size, os.SEEK_SET)

    def finish(self, closing: CloseNote | None, trainer_pid: int) -> RankPart | None:
        """Write everything out. Return what was written, or None if the trainer did not end properly."""
        self.flush()
        self._close()
        if closing is None:
            return None
        if self._nameless_calls:
            self._left_out[_NAMELESS] = self._nameless_calls
        notes = [f"{what} ({count} times)" for what, count in self._left_out.items()]
        written = Written(
            self._bytes, self._lost_calls, self._failures, notes, self._nameless_calls + self._empty_calls
        )
        return closed_part(self._rank, trainer_pid, closing, written)

    def _close(self) -> None:
        if self._pkl != -1:
            os.close(self._pkl)
            self._pkl = -1

    def _write(self, event: Event, slots: Slots) -> None:
        if isinstance(self._target, KernelTarget):
            self._write_kernel(self._target, event, slots)
        elif isinstance(self._target, PtdbgTarget):
            self._write_call(self._target, event, slots)

    def _write_call(self, target: PtdbgTarget, event: Event, slots: Slots) -> None:
        outputs = [slot.name for slot, _ in slots if slot.name.startswith("output")]
        single = (
            len([name for name in outputs if not name.startswith("output.changed")]) == 1
            and len(event.result or ()) < 2
        )
        held: dict[str, Any] = {slot.name: (slot, stored) for slot, stored in slots}
        order = list(held)
        if target.everything:  # with the numbers, arguments in the order in which they were given
            held.update(numbers_in(event.args, event.kwargs))
            arguments = [place for place, _ in leaves_in(event.args, event.kwargs) if place in held]
            order = list(dict.fromkeys([*arguments, *held]))
        before = len(self._lines) + self._failures.total() + self._left_out.total()
        for place in order:
            name = self._name(write_line_name(event.name, place, single=single))
            found = held[place]
            line = (
                self._scalar(target, name, found) if isinstance(found, _SCALARS) else self._tensor(target, name, *found)
            )
            if line is not None:
                self._lines.append(json.dumps(line))
        if target.stacks and event.stack is not None:
            self._lines.append(json.dumps([stack_line_name(event.name), self._stacks.get(event.stack, [])]))
        if before == len(self._lines) + self._failures.total() + self._left_out.total():
            self._empty_calls += 1  # the filter leaves nothing of it: compare and parse find no such call
            return
        self._waiting_calls += 1
        if len(self._lines) >= _FLUSH_LINES:
            self.flush()

    def _tensor(self, target: PtdbgTarget, name: str, slot: SlotEvent, stored: Stored | None) -> list[Any] | None:
        """Write the file of a tensor and return its line, or None if the dump holds no such tensor."""
        if target.folder is None or not (target.everything or passes_filter(slot.dtype, slot.shape)):
            return None
        if stored is None or not self._write_tensor(Path(target.folder, f"{name}.npy"), slot, stored):
            return None
        statistics = older_statistics(stored.moments)
        return [name, target.dump_step, [], f"torch.{slot.dtype}", list(slot.shape), statistics]

    def _scalar(self, target: PtdbgTarget, name: str, value: bool | int | float) -> list[Any] | None:
        if target.folder is None or not self._write_array(Path(target.folder, f"{name}.npy"), numpy.array(value)):
            return None
        return [name, target.dump_step, [], str(type(value)), "[]", [value] * 3]

    def _write_kernel(self, target: KernelTarget, event: Event, slots: Slots) -> None:
        """`convolution.convolution_default_0.7.0.1675157077172961.input.0.npy`: type, name, task, stream, time, slot."""
        op, number, _ = parse_call_name(event.name)
        kind, _, overload = op.removeprefix("Aten.").partition(".")
        parts = (kind, "_".join((kind, overload, number)) if overload else f"{kind}_{number}")
        head = f"{'.'.join(parts)}.{self._task}.{_STREAM}.{time.time_ns() // 1000}"
        self._task += 1
        for slot, stored in slots:
            if stored is not None:
                self._write_tensor(Path(target.folder, f"{self._name(f'{head}.{slot.name}')}.npy"), slot, stored)

    def _write_tensor(self, path: Path, slot: SlotEvent, stored: Stored) -> bool:
        described = Slot(name=slot.name, dtype=slot.dtype, shape=tuple(slot.shape), stride=slot.stride)
        try:
            buffer = self.tensors.get(stored.offset or 0)
            array = to_numpy(buffer.view, described)
        except TensorDamaged as error:
            self._left_out[f"a tensor that numpy cannot hold: {error}"] += 1
            return False
        as_it_is = array.flags.c_contiguous and array.nbytes == buffer.nbytes
        return self._write_array(path, array, buffer if as_it_is and slot.dtype in NUMPY_NAMES else None)

    def _write_array(self, path: Path, array: numpy.ndarray[Any, Any], held: Buffer | None = None) -> bool:
        """Write one file, straight from `held` if that has these bytes. False, and counted, on a disk error."""
        header = npy_header(array.dtype.str, array.shape, header_multiple(array.nbytes))
        if held is not None:
            return self._write_buffer(path, held, header)
        buffer = self.tensors.pool.take(array.nbytes)
        numpy.frombuffer(buffer.view, array.dtype).reshape(array.shape)[...] = array
        try:
            return self._write_buffer(path, buffer, header)
        finally:
            self.tensors.pool.give_back(buffer)

    def _write_buffer(self, path: Path, buffer: Buffer, header: bytes, tail: bytes = b"") -> bool:
        try:
            buffer.write(path, header, tail)
        except OSError as error:
            self._failures[f"{path.parent.name}/*{path.suffix}: {error.strerror or error}"] += 1
            with contextlib.suppress(OSError):  # counted just before; what is left of the file has no line
                path.unlink()
            return False
        self._bytes += buffer.nbytes
        return True

    def _name(self, name: str) -> str:
        """Return a name that is safe as a file name: keys of a user's dict may hold anything."""
        if len(name) <= _LONGEST_NAME and _SAFE.fullmatch(name):
            return name
        return safe_file_name(name, "", self._taken)


def open_files(options: dict[str, Any], rank: int) -> DumpFiles:
    """Return what the recorder writes a dump to. `options` are the fields of the target, with its tag."""
    return DumpFiles(msgspec.convert(options, PtdbgTarget | KernelTarget), rank)


@lru_cache(maxsize=4096)
def npy_header(descr: str, shape: tuple[int, ...], multiple: int) -> bytes:
    """Return the header (version 1.0) of a row-major .npy file whose data begin at a multiple of `multiple`."""
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape!r}, }}"
    length = -(-(10 + len(text) + 1) // multiple) * multiple - 10
    return b"\x93NUMPY\x01\x00" + length.to_bytes(2, "little") + text.ljust(length - 1).encode() + b"\n"


def older_statistics(moments: Moments) -> list[float]:
    """Return max, min, mean as the older tools define them: any NaN makes all NaN, infinities count in the mean."""
    if moments.nan:
        return [math.nan] * 3
    mean = moments.mean
    if moments.inf:
        mean = (moments.max if moments.max == math.inf else 0.0) + (moments.min if moments.min == -math.inf else 0.0)
    return [moments.max, moments.min, mean]


def passes_filter(dtype: str, shape: Sequence[int]) -> bool:
    """Return whether `filter_switch="ON"` leaves a tensor in: it has floating-point elements, and is no single number."""
    kind = DTYPES[dtype].kind if dtype in DTYPES else ""
    return kind in ("float", "complex") and len(shape) > 0 and 0 not in shape


Args = Sequence[Any] | None
Kwargs = Mapping[str, Any] | None


def numbers_in(args: Args, kwargs: Kwargs) -> Iterator[tuple[str, bool | int | float]]:
    """Return every bool, int and float among the arguments, with its place."""
    return ((place, leaf) for place, leaf in leaves_in(args, kwargs) if isinstance(leaf, _SCALARS))


def leaves_in(args: Args, kwargs: Kwargs) -> Iterator[tuple[str, Any]]:
    """Return every argument with its place, in their order; None for a tensor."""
    for at, tree in enumerate(args or ()):
        yield from _walk(f"input.{at}", tree)
    for key, tree in (kwargs or {}).items():
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
