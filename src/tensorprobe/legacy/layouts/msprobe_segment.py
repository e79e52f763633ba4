"""The calls of one rank in one step of an msprobe dump.

In: the folder with dump.json. Out: the same calls, slots, stacks and damage as of a run of ours. The files are read
whole when they are first needed; of all segments of a run only the last two that were asked keep them in memory.
A call is decoded when it is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tensorprobe.errors import RunDamaged, TensorDamaged
from tensorprobe.legacy.layouts.folder_files import FolderFiles
from tensorprobe.legacy.layouts.msprobe_calls import (
    EntryReader,
    Known,
    demand_call_name,
    find_module,
    find_parent,
)
from tensorprobe.legacy.layouts.msprobe_json import Dump, DumpEntry, decode_entry, read_dump
from tensorprobe.legacy.layouts.npy import NpySource
from tensorprobe.legacy.layouts.pt import PtSource
from tensorprobe.model import Call, Frame, Level, Slot, Stack
from tensorprobe.model.call import forward_name
from tensorprobe.model.call_name import DIRECTIONS
from tensorprobe.record.lines import JSON_ERRORS, Damage, reason_of
from tensorprobe.record.run import Entry, Index

DATA_FOLDER = "dump_tensor_data"
_FILES_BITS = 24
"""The number of a file: the line of its call, then so many bits for its place in the call."""

_MOST_HOLDERS = 2
_FRAME = re.compile(r"File (.*), line ([0-9]{1,9}), in (.*?), ?\n ?(.*)", re.DOTALL)
_OF_TORCH = re.compile(r"[\\/](site|dist)-packages[\\/](torch|torch_npu|msprobe)[\\/]")


class EntryDamage(Damage):
    """An entry of dump.json that breaks the format. `line` counts the entries of its data."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"{self.file}, entry {self.line:,} of its data: {self.reason}"


class Turn:
    """Who may keep large things in memory: the last two segments of a run that were asked for anything."""

    def __init__(self) -> None:
        self._holders: list[MsprobeSegment] = []

    def take(self, segment: MsprobeSegment) -> None:
        """Let the segment have it; who had it longest gives up what it kept."""
        if self._holders and self._holders[-1] is segment:
            return
        self._holders = [*(held for held in self._holders if held is not segment), segment]
        if len(self._holders) > _MOST_HOLDERS:
            self._holders.pop(0).release()


class MsprobeSegment:
    """One folder `root/parts...` with a dump.json."""

    def __init__(self, root: Path, parts: tuple[str, ...], turn: Turn) -> None:
        self._root, self._parts, self._turn = root, parts, turn
        self._index: Index | None = None
        self._dump: Dump | None = None
        self._files: dict[int, list[str]] = {}
        self._known = Known()
        self._folder = FolderFiles(root, (*parts, DATA_FOLDER))
        self.source = _Values(self, self._folder)

    def index(self) -> Index:
        """The index of the calls, in the order of dump.json; read once."""
        if self._index is None:
            entries: list[Entry] = []
            damage: list[Damage] = []
            for line, entry in enumerate(self._load().entries):
                try:
                    entries.append(Entry(line, _call_name(entry), 0))
                except ValueError as error:
                    damage.append(self._damage(line, entry, error))
            self._index = Index(entries, damage)
        return self._index

    def calls(self) -> Iterator[tuple[int, Call] | Damage]:
        """Each call with the number of its entry from 0; a Damage in place of one that cannot be read."""
        for line in range(len(self._load().entries)):
            entry = self._entry_at(line)  # read anew when other segments have had their turn since
            try:
                yield line, self._make(line, entry)
            except (*JSON_ERRORS, ValueError) as error:
                yield self._damage(line, entry, error)

    def call_at(self, entry: Entry) -> Call:
        """The one call of an index entry; RunDamaged when its entry breaks the format."""
        held = self._entry_at(entry.line)
        try:
            return self._make(entry.line, held)
        except (*JSON_ERRORS, ValueError) as error:
            damage = self._damage(entry.line, held, error)
            raise RunDamaged(f"'{self._root}' is damaged at {damage}. Other calls are readable.") from None

    def stack(self, number: int) -> Stack | None:
        """The stack with that number; RunDamaged when stack.json breaks the format."""
        frames = self._load().frames
        if isinstance(frames, RunDamaged):
            raise frames
        if not 0 <= number < len(frames):
            return None
        return Stack(number, frames_of(frames[number], self._root.joinpath(*self._parts, "stack.json"), number))

    def damage(self) -> list[Damage]:
        """Every entry that cannot be read."""
        return [item for item in self.calls() if isinstance(item, Damage)]

    def size_bytes(self) -> int:
        """The size of the files with values, 0 when there are none."""
        return self._folder.size_bytes()

    def release(self) -> None:
        """Give up what can be read again."""
        self._dump = None
        self._files, self._known = {}, Known()
        self._folder.close()

    def file_of(self, number: int) -> str:
        """The name of the file with that number."""
        line, at = number >> _FILES_BITS, number & ((1 << _FILES_BITS) - 1)
        self._turn.take(self)
        if line not in self._files:
            try:
                self._make(line, self._entry_at(line))
            except (*JSON_ERRORS, ValueError, RunDamaged) as error:
                raise TensorDamaged(f"dump.json changed since it was read: {error}") from None
        names = self._files.get(line, [])
        if at >= len(names):
            raise TensorDamaged("dump.json changed since it was read")
        return names[at]

    def _load(self) -> Dump:
        self._turn.take(self)
        if self._dump is None:
            self._dump = read_dump(self._root, self._parts)
        return self._dump

    def _entry_at(self, line: int) -> DumpEntry:
        entries = self._load().entries
        if line >= len(entries):
            raise RunDamaged(f"'{self._root.joinpath(*self._parts, 'dump.json')}' changed since it was read.")
        return entries[line]

    def _make(self, line: int, entry: DumpEntry) -> Call:
        dump, name = self._load(), _call_name(entry)
        names: list[str] = []

        def number_file(file: str) -> int:
            names.append(file)
            return (line << _FILES_BITS) + len(names) - 1

        reader = EntryReader(self._known, number_file)
        if entry.call is not None:
            reader.add_call(decode_entry(dump.data[entry.call]), forward=DIRECTIONS[0] in name.rsplit(".", 2)[-2:])
        if entry.gradients is not None:
            reader.add_gradients(decode_entry(dump.data[entry.gradients]))
        if names:
            self._files[line] = names
        made_in = find_module(entry.call or f"{name.partition('.parameters_grad.')[0]}.backward.0", dump.parents)
        return Call(
            name=name,
            level=Level.of(name),
            # The backward of a module may have ended before those of the calls in it; their forwards know better.
            module=made_in or find_module(forward_name(name), dump.parents),
            parent=find_parent(name, dump.parents),
            stack=0 if isinstance(dump.frames, RunDamaged) else dump.stacks.get(name),
            args=reader.args,
            kwargs=reader.kwargs,
            slots=tuple(reader.slots),
        )

    def _damage(self, line: int, entry: DumpEntry, error: Exception) -> Damage:
        name = str(entry.call or entry.gradients)[:80]
        return EntryDamage("/".join((*self._parts, "dump.json")), line + 1, f"{name!r}: {reason_of(error)}")


class _Values:
    """Where the values of a segment come from: `.pt` files, or `.npy` files."""

    def __init__(self, segment: MsprobeSegment, folder: FolderFiles) -> None:
        self._segment = segment
        self._pt = PtSource(folder, segment.file_of)
        self._npy = NpySource(segment._root, (*segment._parts, DATA_FOLDER), segment.file_of)

    def read(self, slot: Slot) -> memoryview:
        """Exactly the bytes of `slot`."""
        return self._source(slot).read(slot)

    def hold(self, slot: Slot) -> tuple[int, object]:
        """The address of those bytes, and what must be kept alive while they are used."""
        return self._source(slot).hold(slot)

    def _source(self, slot: Slot) -> PtSource | NpySource:
        is_npy = slot.offset is not None and self._segment.file_of(slot.offset).endswith(".npy")
        return self._npy if is_npy else self._pt


def _call_name(entry: DumpEntry) -> str:
    """The name of the call. Gradients that belong to no one call are a backward call of their own."""
    if entry.call is not None:
        return demand_call_name(entry.call)
    module, _, number = str(entry.gradients).rpartition(".parameters_grad")
    return demand_call_name(f"{module}.parameters_grad.backward.{number.removeprefix('.') or 0}")


def frames_of(text: msgspec.Raw, file: Path, number: int) -> tuple[Frame, ...]:
    """The frames of the user's program, innermost first; all of them when they are torch's own. RunDamaged when there are none."""
    try:
        lines = msgspec.json.decode(text, type=list[str])
    except JSON_ERRORS as error:
        raise RunDamaged(f"'{file}' is damaged at stack {number}: {reason_of(error)}.") from None
    frames = [Frame(match[1], int(match[2]), match[3], match[4]) for line in lines if (match := _FRAME.fullmatch(line))]
    return tuple([frame for frame in frames if _OF_TORCH.search(frame.file) is None] or frames)
