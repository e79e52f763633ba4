"""Writes a dump of msprobe: dump.json, stack.json, construct.json, and a file for each tensor.

A call stands in dump.json only after its tensors are in their files, and all three are valid JSON after every write. Disk
errors are counted and reported in the coverage, never raised. Calls that the layout has no name for (recomputed ones) are
counted as well.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy

from tensorprobe.files import replace_file
from tensorprobe.legacy.layouts.buffers import Buffer, HeldTensors, header_multiple
from tensorprobe.legacy.layouts.dump_files import DumpFiles, Slots
from tensorprobe.legacy.layouts.msprobe_json import (
    GrowingObject,
    Places,
    Tensors,
    backward_entry,
    forward_entry,
    gradient_places,
    gradients_entry,
    object_text,
    open_dump,
    tensor_entry,
)
from tensorprobe.legacy.layouts.pt_writer import MOST_BYTES, frame_tensor
from tensorprobe.legacy.layouts.targets import MSPROBE_PARTS, MSPROBE_VALUES, MsprobeTarget
from tensorprobe.model import DTYPES
from tensorprobe.model.call import forward_name
from tensorprobe.model.event import Event, SlotEvent
from tensorprobe.numerics.summary import Moments
from tensorprobe.ops.names import parse_call_name
from tensorprobe.record.elements import is_dense
from tensorprobe.record.messages import StackNote
from tensorprobe.record.step_files import Stored, with_source

_FLUSH_CALLS = 500
_REGIONS = ("optimizer", "clip_grad")
_BY_SIZE = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}
"""What numpy moves whole elements as, whatever they are."""


class _Content(NamedTuple):
    """The file that a tensor was first written to (empty: none) and its CRC-32."""

    file: str
    checksum: int


class MsprobeFiles(DumpFiles):
    """Writes the calls of one rank and step."""

    def __init__(self, target: MsprobeTarget, rank: int) -> None:
        super().__init__(target, rank)
        keep = target.values is not None or target.digests
        self.tensors = HeldTensors(keep=keep, wants_digest=keep)
        self._layout = target
        self._folder = Path(target.folder)
        self._values = str(self._folder / MSPROBE_VALUES)
        self._known: dict[tuple[Any, ...], _Content] = {}
        self._calls = open_dump(target)
        self._parents = GrowingObject(self._folder / "construct.json")
        self._book = StackBook(self._folder / "stack.json")
        self._regions: set[str] = set()
        self._places: dict[str, Places] = {}

    def stack(self, note: StackNote) -> None:
        """Remember a stack for the calls that will name it."""
        frames = with_source(note)
        self._book.lines[note.id] = [f"File {f}, line {n}, in {where}, \n {code}" for f, n, where, code in frames]

    def flush(self) -> None:
        """Write the entries that wait, those of the calls last."""
        if not self._waiting_calls:
            return
        for file, name in ((self._parents, "construct.json"), (self._book, "stack.json"), (self._calls, "dump.json")):
            try:
                file.flush()
            except OSError as error:
                self._failures[f"{name}: {error.strerror or error}"] += 1
                if file is self._calls:
                    self._lost_calls += self._waiting_calls
        self._waiting_calls = 0

    def _close(self) -> None:
        self._calls.close()
        self._parents.close()
        try:
            self._book.close()
        except OSError as error:  # it is whole as it is, only longer than it need be
            self._failures[f"stack.json: {error.strerror or error}"] += 1

    def _write(self, event: Event, slots: Slots) -> None:
        target = self._layout
        op, number, direction = parse_call_name(event.name)
        gradients = f"{op}.parameters_grad.{number}"
        places = self._places.pop(forward_name(event.name), {}) if event.level.links_backward else {}
        listed = {slot: f"{side}.{at}" for side, slots in places.items() for at, slot in enumerate(slots)}
        tensors: Tensors = {}
        for slot, stored in slots:
            if slot.name.startswith("output.changed"):
                continue  # an argument that the call has changed: msprobe has no place for it
            of_gradient = direction == "backward" and slot.name.startswith("parameters.")
            side = "output" if of_gradient else slot.name.partition(".")[0].replace("parameters", "input")
            if f"{direction}.{side}" in target.parts:
                place = slot.name.removeprefix("parameters.") if of_gradient else listed.get(slot.name, slot.name)
                tensors[slot.name] = self._tensor_entry(gradients if of_gradient else event.name, place, slot, stored)
        if direction == "forward":
            self._calls.add(event.name, forward_entry(event, tensors, target.parts))
            # With the forward entry, a reader knows whose each gradient is.
            if event.level.links_backward and {*MSPROBE_PARTS} == {*target.parts}:
                self._places[event.name] = gradient_places(event, tensors)
        else:
            if held := gradients_entry(tensors):
                self._calls.add(gradients, held)
            self._calls.add(event.name, backward_entry(tensors, target.parts, places))
        if target.parents:
            if event.parent in _REGIONS and event.parent not in self._regions:
                self._regions.add(event.parent)
                self._parents.add(event.parent, None)
            self._parents.add(event.name, event.parent)
        if event.stack is not None:
            self._book.add(event.name, event.stack)
        self._waiting_calls += 1
        if self._waiting_calls >= _FLUSH_CALLS:
            self.flush()

    def _tensor_entry(self, call: str, place: str, slot: SlotEvent, stored: Stored | None) -> dict[str, Any]:
        target = self._layout
        moments = stored.moments if stored is not None else slot.summary
        held = None if moments is None else Moments._make(moments)
        entry = tensor_entry(slot, held, rounded=target.rounded)
        if stored is None or stored.offset is None:
            return entry
        file = ""
        if target.values is not None and (not target.values_of or any(text in call for text in target.values_of)):
            kind = target.values if stored.nbytes < MOST_BYTES else "npy"
            file = f"{self._name(f'{call}.{place}'.replace('.input.kwargs.', '.input.', 1))}.{kind}"
        content = (stored.digest, slot.dtype, slot.shape, slot.stride)
        known = self._known.get(content)
        if known is None or (file and not self._link(known.file, file)):
            known = self._known[content] = self._write_content(slot, stored, file)
        if target.digests:
            entry["md5"] = f"{known.checksum:08x}"
        if file and known.file:
            entry["data_name"] = file
        return entry

    def _write_content(self, slot: SlotEvent, stored: Stored, file: str) -> _Content:
        """Write the tensor into the file, if one is named, and return its content."""
        buffer = self.tensors.get(stored.offset or 0)
        rows = self._in_rows(buffer, slot)
        try:
            checksum = zlib.crc32(rows.view)
            path = Path(self._values, file)
            if file.endswith(".npy"):
                written = self._write_tensor(path, slot, stored)
            elif file:
                frame = frame_tensor(slot.dtype, slot.shape, checksum=checksum, multiple=header_multiple(rows.nbytes))
                written = self._write_buffer(path, rows, frame.head, frame.tail)
            else:
                written = False
            return _Content(file if written else "", checksum)
        finally:
            if rows is not buffer:
                self.tensors.pool.give_back(rows)

    def _link(self, old: str, new: str) -> bool:
        """Hard-link an existing file: a tensor passes from call to call, and a link is far cheaper than a new file."""
        if not old or not old.endswith(new[-4:]):
            return False
        try:
            os.link(f"{self._values}/{old}", f"{self._values}/{new}")
        except OSError:  # a file system without such names, or with no more of them: it is written again
            return False
        return True

    def _in_rows(self, buffer: Buffer, slot: SlotEvent) -> Buffer:
        """Return the bytes in row-major order: the buffer itself, or a copy."""
        if slot.stride is None or not buffer.nbytes or not is_dense(slot.shape, slot.stride):
            return buffer
        itemsize = DTYPES[slot.dtype].itemsize
        kind = _BY_SIZE[itemsize]
        steps = [step * itemsize for step in slot.stride]
        rows = self.tensors.pool.take(buffer.nbytes)
        numpy.frombuffer(rows.view, kind).reshape(slot.shape)[...] = numpy.ndarray(
            slot.shape, kind, buffer.view, strides=steps
        )
        return rows


_Stack = tuple[list[str], list[str]]


class StackBook:
    """stack.json: each stack with the names of the calls made there.

    While a dump grows, a stack stands there again for the calls that came since; at the end each stack is there once.
    """

    def __init__(self, path: Path) -> None:
        self.lines: dict[int, list[str]] = {}
        self._path = path
        self._file = GrowingObject(path)
        self._waiting: dict[int, list[str]] = {}
        self._calls: dict[tuple[str, ...], list[str]] = {}
        self._written = 0
        for names, lines in msgspec.json.decode(path.read_bytes(), type=dict[str, _Stack]).values():
            self._calls.setdefault(tuple(lines), []).extend(names)
            self._written += 1

    def add(self, call: str, stack: int) -> None:
        """A call and the number of its stack."""
        self._waiting.setdefault(stack, []).append(call)

    def flush(self) -> None:
        """Write the calls that came since."""
        waiting, self._waiting = self._waiting, {}
        for stack, names in waiting.items():
            lines = self.lines.get(stack, [])
            self._calls.setdefault(tuple(lines), []).extend(names)
            self._file.add(str(self._written), (names, lines))
            self._written += 1
        self._file.flush()

    def close(self) -> None:
        """Write each stack once, if any is there more often."""
        self._file.close()
        if self._written > len(self._calls):
            once = {str(number): (names, lines) for number, (lines, names) in enumerate(self._calls.items())}
            replace_file(self._path, object_text(once))


def open_files(options: dict[str, Any], rank: int) -> MsprobeFiles:
    """Return what the recorder writes a dump to. `options` are the fields of the target."""
    return MsprobeFiles(msgspec.convert(options, MsprobeTarget), rank)
