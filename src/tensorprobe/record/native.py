"""The calls of one rank in one step, in our own format (docs/format.md).

In: the folder `step{S}/rank{R}` of a run, trusted in nothing. Out: its index, its calls, its stacks, its damaged lines.
The index is made by one pass that decodes two fields of each line; a call is decoded when it is asked for.
"""

from __future__ import annotations

import os
import re
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from tensorprobe.errors import RunDamaged
from tensorprobe.model import Call, Stack
from tensorprobe.record.blob import Blob, MappingPool
from tensorprobe.record.files import open_file
from tensorprobe.record.lines import JSON_ERRORS, Damage, Line, read_lines, reason_of
from tensorprobe.record.run import Entry, Index

T = TypeVar("T")

_CALL_NAME = re.compile(
    r"[^\x00-\x1f\x7f]+\.([0-9]{1,18}\.(forward|backward)|(forward|backward)\.[0-9]{1,18})", re.ASCII
)


class _IndexLine(msgspec.Struct, frozen=True, gc=False):
    """As little of a call as an index needs; the rest of the line is passed over without making objects of it."""

    name: str
    repeat: int = 0


_decode_index_line = msgspec.json.Decoder(_IndexLine).decode
_decode_call = msgspec.json.Decoder(Call).decode
_decode_stack = msgspec.json.Decoder(Stack).decode


class NativeSegment:
    """One `step{S}/rank{R}` folder. When its calls are `promised`, a missing calls.jsonl is damage."""

    def __init__(self, root: Path, step: int, rank: int, *, pool: MappingPool, promised: bool) -> None:
        self._root = root
        self._folder = (f"step{step}", f"rank{rank}")
        self._promised = promised
        self._index: Index | None = None
        self._places = array("q")
        self._stacks: dict[int, Stack] | None = None
        self.source = Blob(root, self._folder, pool)

    def index(self) -> Index:
        """The index of the calls, in execution order; read once."""
        if self._index is None:
            entries, damage, places = [], [], array("q")
            for item in self._lines("calls.jsonl", _read_index_line, required=self._promised):
                if isinstance(item, Damage):
                    damage.append(item)
                else:
                    entries.append(Entry(item.number, item.value.name, item.value.repeat))
                    places.extend((item.start, item.length))
            self._index, self._places = Index(entries, damage), places
        return self._index

    def calls(self) -> Iterator[tuple[int, Call] | Damage]:
        """Each call with its line from 0; a Damage in place of a line that cannot be read."""
        for item in self._lines("calls.jsonl", _read_call, required=self._promised):
            yield item if isinstance(item, Damage) else (item.number, item.value)

    def call_at(self, entry: Entry) -> Call:
        """The one call of an index entry, read alone; RunDamaged when its line breaks the format."""
        # Damaged lines are not in the index, so an entry may stand before its line's number.
        position = bisect_left(self.index().entries, entry.line, key=lambda held: held.line)
        start, length = self._places[2 * position], self._places[2 * position + 1]
        with os.fdopen(open_file(self._root, *self._folder, "calls.jsonl"), "rb", buffering=0) as file:
            file.seek(start)
            raw = file.read(length)
        try:
            return _read_call(raw)
        except (*JSON_ERRORS, ValueError) as error:
            damage = Damage(self._name("calls.jsonl"), entry.line + 1, reason_of(error))
            raise RunDamaged(f"'{self._root}' is damaged at {damage}. Other calls are readable.") from None

    def stack(self, number: int) -> Stack | None:
        """The stack with that id; None when the file does not hold it (stacks were off, or the process was killed)."""
        if self._stacks is None:
            stacks = {}
            for item in self._lines("stacks.jsonl", _decode_stack, required=False):
                if isinstance(item, Damage):
                    raise RunDamaged(f"'{self._root}' is damaged at {item}. Its calls and tensors are not concerned.")
                stacks[item.value.id] = item.value
            self._stacks = stacks
        return self._stacks.get(number)

    def damage(self) -> list[Damage]:
        """Every line of calls.jsonl that cannot be read."""
        return [item for item in self.calls() if isinstance(item, Damage)]

    def size_bytes(self) -> int:
        """The size of tensors.bin, 0 when there is none."""
        try:
            descriptor = open_file(self._root, *self._folder, "tensors.bin")
        except FileNotFoundError:
            return 0
        try:
            return os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)

    def _lines(self, name: str, decode: Callable[[bytes], T], *, required: bool) -> Iterator[Line[T] | Damage]:
        try:
            descriptor = open_file(self._root, *self._folder, name)
        except FileNotFoundError:
            if required:
                raise RunDamaged(
                    f"'{self._root}' lacks {self._name(name)}, although its rank says that it was written. Was it copied in part?"
                ) from None
            return iter(())
        return read_lines(descriptor, self._name(name), decode)

    def _name(self, file: str) -> str:
        return "/".join((*self._folder, file))


def _read_index_line(raw: bytes) -> _IndexLine:
    line = _decode_index_line(raw)
    _demand_call_name(line.name)
    return line


def _read_call(raw: bytes) -> Call:
    call = _decode_call(raw)
    _demand_call_name(call.name)
    return call


def _demand_call_name(name: str) -> None:
    # The usual names are known by their ends; the pattern, which is slow, decides about the rest.
    if name.endswith((".forward", ".backward")) and name.isprintable():
        head, _, number = name.rpartition(".")[0].rpartition(".")
        if head and number.isdigit() and number.isascii() and len(number) <= 18:
            return
    if _CALL_NAME.fullmatch(name) is None:
        raise ValueError(f"{name[:80]!r} is not the name of a call")
