"""What the dumps in JSON have in common: calls that are the entries of an object, and values in `.pt` or `.npy` files.

A file with values is known by a number: the line of its call, then its place among the files of that call. Lines count
entries, from 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from tensorprobe.errors import RunDamaged, TensorDamaged
from tensorprobe.legacy.layouts.npy import NpySource
from tensorprobe.legacy.layouts.pt import PtSource
from tensorprobe.legacy.layouts.value_files import FolderFiles
from tensorprobe.model import Call, Slot
from tensorprobe.record.lines import JSON_ERRORS, Damage
from tensorprobe.record.run import Entry, Index

FILE_BITS = 24
E = TypeVar("E")


class FileValues:
    """The values in the files of a folder; `name_of` gives the name of the file of a slot's number."""

    def __init__(self, files: FolderFiles, name_of: Callable[[int], str]) -> None:
        self._name_of = name_of
        self._pt, self._npy = PtSource(files, name_of), NpySource(files, name_of)

    def read(self, slot: Slot) -> memoryview:
        """Exactly the bytes of `slot`."""
        return self._source(slot).read(slot)

    def hold(self, slot: Slot) -> tuple[int, object]:
        """The address of those bytes, and what must be kept alive while they are used."""
        return self._source(slot).hold(slot)

    def _source(self, slot: Slot) -> PtSource | NpySource:
        is_npy = slot.offset is not None and self._name_of(slot.offset).endswith(".npy")
        return self._npy if is_npy else self._pt


class EntrySegment(Generic[E]):
    """A segment whose calls are made of entries. A layout has the entries, and makes the call of one."""

    _file = "the dump"
    """How a sentence calls the file with the entries."""

    def __init__(self) -> None:
        self._index: Index | None = None
        self._files: dict[int, list[str]] = {}
        """Line of a call → the names of its files, noted when it is made."""

    def _entries(self) -> Sequence[E]:
        raise NotImplementedError

    def _name(self, entry: E) -> str:
        """The name of a call; ValueError when the entry has none."""
        raise NotImplementedError

    def _make(self, line: int, entry: E) -> Call:
        raise NotImplementedError

    def _damage(self, line: int, entry: E, error: Exception) -> Damage:
        raise NotImplementedError

    def index(self) -> Index:
        """The index of the calls, in the order of their entries; read once."""
        if self._index is None:
            entries: list[Entry] = []
            damage: list[Damage] = []
            for line, entry in enumerate(self._entries()):
                try:
                    entries.append(Entry(line, self._name(entry), 0))
                except ValueError as error:
                    damage.append(self._damage(line, entry, error))
            self._index = Index(entries, damage)
        return self._index

    def calls(self) -> Iterator[tuple[int, Call] | Damage]:
        """Each call with its line; a Damage in place of an entry that cannot be read."""
        for line in range(len(self._entries())):
            entry = self._entry_at(line)  # which may have been given up since, and be read anew
            try:
                yield line, self._make(line, entry)
            except (*JSON_ERRORS, ValueError) as error:
                yield self._damage(line, entry, error)

    def call_at(self, entry: Entry) -> Call:
        """The one call of an index entry; RunDamaged when it breaks the format."""
        held = self._entry_at(entry.line)
        try:
            return self._make(entry.line, held)
        except (*JSON_ERRORS, ValueError) as error:
            damage = self._damage(entry.line, held, error)
            raise RunDamaged(f"{self._file} is damaged at {damage}. Other calls are readable.") from None

    def damage(self) -> list[Damage]:
        """Every entry that cannot be read."""
        return [item for item in self.calls() if isinstance(item, Damage)]

    def file_of(self, number: int) -> str:
        """The name of the file with that number."""
        line, at = number >> FILE_BITS, number & ((1 << FILE_BITS) - 1)
        if line not in self._files:
            try:
                self._make(line, self._entry_at(line))
            except RunDamaged as error:
                raise TensorDamaged(str(error).rstrip(".")) from None
            except (*JSON_ERRORS, ValueError) as error:
                raise TensorDamaged(f"{self._file} changed since it was read: {error}") from None
        names = self._files.get(line, [])
        if at >= len(names):
            raise TensorDamaged(f"{self._file} changed since it was read")
        return names[at]

    def _entry_at(self, line: int) -> E:
        entries = self._entries()
        if line >= len(entries):
            raise RunDamaged(f"{self._file} changed since it was read.")
        return entries[line]
