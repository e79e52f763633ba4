"""Opening a dump of ptdbg_ascend: `{tag}_v{version}/rank{N}/name.pkl`, which is text, and the folder of `.npy` files beside it.

In: the folder with the ranks, the folder of one rank, or a pkl. Out: a `Run` of one step, or None when the path is no such
dump, or an error that says which file is wrong. Only names and the first bytes of each pkl are read here.
"""

from __future__ import annotations

import glob
import math
import os
import re
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, NamedTuple

from tensorprobe.errors import RunDamaged, RunError, RunNotFound, SettingsError, TensorDamaged
from tensorprobe.legacy.layouts.npy import NpySource
from tensorprobe.legacy.layouts.optimizer_calls import find_optimizer_calls, is_only_of_optimizer
from tensorprobe.legacy.layouts.ptdbg_lines import (
    LineName,
    StackLine,
    Statistics,
    TensorLine,
    decode_line,
    read_line_name,
)
from tensorprobe.legacy.layouts.value_files import FolderFiles
from tensorprobe.model import DTYPES, Call, Frame, Level, Slot, Stack, Summary
from tensorprobe.model.reason import Skipped
from tensorprobe.record.blob import ByteSource
from tensorprobe.record.files import demand_folder, list_names, open_file
from tensorprobe.record.foreign import foreign_run
from tensorprobe.record.lines import BLOCK, JSON_ERRORS, MAX_DAMAGED, MAX_LINE, Damage, reason_of
from tensorprobe.record.run import Entry, Index, Run, Segment
from tensorprobe.text import few, plain

__all__ = ["PtdbgSegment", "open_ptdbg", "open_run"]

TOOL = "ptdbg_ascend"
_RANK = re.compile("rank(0|[1-9][0-9]{0,17})")
_TIME = "_[0-9][0-9_]*"
_NOTE = "a dump of ptdbg_ascend does not say which calls were left out of it, nor whether it is whole"


def open_run(path: str | Path, data: str | Path | None = None) -> Run:
    """The dump at `path`; RunNotFound when there is none. `data` is the folder of `.npy` files, if not the one beside the pkl."""
    run = open_ptdbg(Path(path), None if data is None else Path(data))
    if run is None:
        raise RunNotFound(
            f"no dump of ptdbg_ascend at '{path}'. Pass a pkl, or a folder with rank0, rank1, … that hold one each."
        )
    return run


def open_ptdbg(path: Path, data: Path | None = None) -> Run | None:
    """The dump at `path`, None when it is not one of ptdbg_ascend."""
    if path.suffix == ".pkl" and not path.is_dir():
        return _open_file(path, data)
    if not path.is_dir():
        return None
    ranks = {int(match[1]): name for name in list_names(path) if (match := _RANK.fullmatch(name))}
    held = {rank: _find_pkls(path, ranks[rank]) for rank in sorted(ranks) if (path / ranks[rank]).is_dir()}
    if any(held.values()):
        pkls = {rank: DumpPath(path, (ranks[rank], _only(path / ranks[rank], names))) for rank, names in held.items()}
        return _run(path, pkls, data, one_rank=False)
    named = _RANK.fullmatch(path.absolute().name)
    names = _find_pkls(path)
    texts = names if named else [name for name in names if _is_text(DumpPath(path, (name,)))]
    if not texts:
        return None
    pkl = DumpPath(path, (_only(path, texts),))
    return _run(path, {int(named[1]) if named else 0: pkl}, data, one_rank=True)


def say_where(path: Path) -> str:
    """Return where the dump went that `set_dump_path(path)` was called for, as a question; "" if there is none."""
    found = sorted(path.parent.glob(f"*_v*/rank*/{glob.escape(path.name)}"))
    more = f" There are {len(found):,} such." if len(found) > 1 else ""
    return f" Did you mean '{plain(found[0])}'?{more}" if found else ""


def _open_file(path: Path, data: Path | None) -> Run:
    if not path.exists():
        raise RunNotFound(f"no file '{path}'.{say_where(path)}")
    # The user chose the file, so it may be a link; its values are beside the true one.
    file = Path(os.path.realpath(path)) if path.is_symlink() else path
    named = _RANK.fullmatch(file.absolute().parent.name)
    pkl = DumpPath(file.parent, (file.name,))
    return _run(path, {int(named[1]) if named else 0: pkl}, data, one_rank=True)


def _run(path: Path, pkls: dict[int, DumpPath], data: Path | None, *, one_rank: bool) -> Run:
    if data is not None:
        if len(pkls) > 1:
            raise SettingsError(
                f"data is '{data}', a folder for one rank; '{path}' holds {len(pkls)} ranks. Pass the pkl of one of them."
            )
        if not data.is_dir():
            raise RunNotFound(f"no folder '{data}': data is the folder with the .npy files of '{path}'.")
    written_s = max(map(_demand_text, pkls.values()))
    folders = {rank: _find_data(pkl) if data is None else DumpPath(data, ()) for rank, pkl in pkls.items()}
    return foreign_run(
        path,
        TOOL,
        {(0, rank): PtdbgSegment(pkl, folders[rank]) for rank, pkl in pkls.items()},
        written_s=written_s,
        settings={"mode": "tensor" if any(folders.values()) else "summary"},
        note=_NOTE,
        data=data,
        one_rank=one_rank,
    )


def _find_pkls(path: Path, *parts: str) -> list[str]:
    return [name for name in list_names(path, *parts) if name.endswith(".pkl")]


def _only(folder: Path, names: list[str]) -> str:
    """The one pkl of a rank."""
    if not names:
        raise RunNotFound(f"no .pkl in '{folder}', although other ranks of the dump have one. Was it copied in part?")
    if len(names) > 1:
        raise RunError(f"'{folder}' holds {len(names)} dumps: {few(names)}.\n  Pass one of them: {folder / names[0]}")
    return names[0]


def _find_data(pkl: DumpPath) -> DumpPath | None:
    """The folder of values beside a pkl: of the same name, or, as older versions have it, with the time behind it."""
    *above, file = pkl.parts
    stem = file.removesuffix(".pkl")
    names = list_names(pkl.root, *above)
    found = [stem] if stem in names else [name for name in names if re.fullmatch(re.escape(stem) + _TIME, name)]
    found = [name for name in found if pkl.root.joinpath(*above, name).is_dir()]
    if len(found) > 1:
        raise RunError(
            f"the values of '{pkl}' may be in any of {len(found)} folders: {few(found)}.\n"
            "  Move the others away, or say which: tensorprobe.open_run(pkl, data=folder)"
        )
    if not found:
        return None
    demand_folder(pkl.root, *above, found[0])
    return DumpPath(pkl.root, (*above, found[0]))


def _demand_text(pkl: DumpPath) -> float:
    """When the pkl was written last; RunDamaged when it is a true pickle."""
    start, written = _look(pkl)
    if start == b"\x80":
        raise RunDamaged(
            f"'{pkl}' is a binary pickle, not the text that ptdbg_ascend writes; it is never loaded: "
            "a pickle can run any program."
        )
    return written


def _is_text(pkl: DumpPath) -> bool:
    try:
        return _look(pkl)[0] == b"["
    except (OSError, RunError):
        return False  # a link or the like, in a folder that need not be a dump at all


def _look(pkl: DumpPath) -> tuple[bytes, float]:
    descriptor = open_file(pkl.root, *pkl.parts)
    try:
        return os.read(descriptor, 1), os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)


class PtdbgCall(Call, frozen=True, kw_only=True):
    """A call together with the lines of the pkl that it was read from, one for each slot."""

    lines: tuple[TensorLine, ...]


_NUMBERS = {
    "<class 'int'>": "int64",
    "<class 'float'>": "float64",
    "<class 'bool'>": "bool",
    "<class 'complex'>": "complex128",
}
"""Numbers among the arguments: their dtype as ptdbg_ascend writes it, and that of the array in their file."""
_MOST_DIGITS = 18
_NORM = math.nan
"""One object for all: a NaN is equal to itself only, and equal statistics are to be equal."""


class DumpPath(NamedTuple):
    """A file or folder below one that the user chose: nothing on the way from `root` may be a link."""

    root: Path
    parts: tuple[str, ...]

    def __str__(self) -> str:
        return str(self.root.joinpath(*self.parts))


class _Group:
    """The lines of one call."""

    __slots__ = ("call", "end", "line", "lines", "prefix", "slots", "stack", "start")

    def __init__(self, name: LineName, text: str, line: int, start: int) -> None:
        self.call, self.line, self.start, self.end = name.call, line, start, start
        self.prefix = text.removesuffix(_tail(name, text))
        self.slots: dict[str, Slot] = {}
        self.lines: list[TensorLine] = []
        self.stack: int | None = None

    def has(self, name: LineName) -> bool:
        """Whether such a line is here already; then it belongs to the next call of that name."""
        return name.slot in self.slots if name.slot else self.stack is not None

    def as_call(self, repeat: int) -> PtdbgCall:
        return PtdbgCall(
            name=self.call,
            level=Level.of(self.call),
            stack=self.stack,
            repeat=repeat,
            slots=tuple(self.slots.values()),
            lines=tuple(self.lines),
        )


class PtdbgSegment:
    """One pkl, and the folder with its values; `data` is None when there is none."""

    def __init__(self, pkl: DumpPath, data: DumpPath | None) -> None:
        self._pkl, self._has_data = pkl, data is not None
        self._index: Index | None = None
        self._places = array("q")
        self._files: dict[int, str] = {}
        self._stacks: dict[int, tuple[Frame, ...]] = {}
        self._frames: dict[tuple[Frame, ...], tuple[Frame, ...]] = {}
        self._summaries: dict[Statistics, Summary] = {}
        self._tails: dict[str, str] = {}
        self._dtypes: dict[str, tuple[str, int]] = {}
        self._npy = None if data is None else NpySource(FolderFiles(data.root, data.parts), self._file_of)
        self.source: ByteSource = self._npy or _NoValues()

    def index(self) -> Index:
        """The calls by name, in execution order; read once."""
        if self._index is None:
            entries, damage, places = [], [], array("q")
            for item in self._numbered():
                if isinstance(item, Damage):
                    damage.append(item)
                else:
                    group, repeat = item
                    entries.append(Entry(group.line, group.call, repeat))
                    places.extend((group.start, group.end - group.start))
            self._index, self._places = Index(entries, damage), places
        return self._index

    def calls(self) -> Iterator[tuple[int, PtdbgCall] | Damage]:
        """Each call with its first line from 0; a Damage for each line that cannot be read, behind its call."""
        for item in self._numbered():
            if isinstance(item, Damage):
                yield item
            else:
                group, repeat = item
                yield group.line, group.as_call(repeat)

    def call_at(self, entry: Entry) -> PtdbgCall:
        """The one call of an index entry, read alone; RunDamaged when the file has changed since."""
        return self._group_at(entry).as_call(entry.repeat)

    def excuse(self, call: Call, other: Segment, *, own: bool) -> Skipped | None:
        """Why a call that only this side has (`own`), or only the other, is no difference; None if it is one."""
        return Skipped.OTHER_OPTIMIZER if own and is_only_of_optimizer(call, self, other) else None

    @cached_property
    def optimizer_calls(self) -> frozenset[str]:
        """The names of the calls that the optimizer made, by their order."""
        return find_optimizer_calls(self.index().entries)

    def stack(self, number: int) -> Stack | None:
        """The stack that stands on that line."""
        if number not in self._stacks:
            self.index()
        frames = self._stacks.get(number)
        return None if frames is None else Stack(number, frames)

    def damage(self) -> list[Damage]:
        """Every line that cannot be read."""
        return list(self.index().damage)

    def size_bytes(self) -> int:
        """The size of the `.npy` files, 0 when there are none."""
        return 0 if self._npy is None else self._npy.size_bytes()

    def _group_at(self, entry: Entry) -> _Group:
        position = bisect_left(self.index().entries, entry.line, key=lambda held: held.line)
        start, length = self._places[2 * position], self._places[2 * position + 1]
        with os.fdopen(open_file(self._pkl.root, *self._pkl.parts), "rb", buffering=0) as file:
            file.seek(start)
            raw = BytesIO(file.read(length))
        for item in self._groups(_split(raw, entry.line, start)):
            if isinstance(item, _Group) and item.call == entry.name:
                return item
        raise RunDamaged(
            f"'{self._pkl}' has changed while it was read: {entry.name} is not on line {entry.line + 1:,}."
        )

    def _numbered(self) -> Iterator[tuple[_Group, int] | Damage]:
        """Each call with how often it was met before."""
        met: dict[str, int] = {}
        for item in self._groups(self._read_lines()):
            if isinstance(item, Damage):
                yield item
            else:
                repeat = met.get(item.call, 0)
                met[item.call] = repeat + 1
                yield item, repeat

    def _groups(self, lines: Iterable[tuple[int, int, bytes]]) -> Iterator[_Group | Damage]:
        group: _Group | None = None
        damage: list[Damage] = []
        damaged = 0
        for number, start, raw in lines:
            if damaged == MAX_DAMAGED:
                damage.append(self._damage(number, f"not read, after {MAX_DAMAGED:,} damaged lines"))
                break
            if raw.isspace():
                continue
            try:
                group, ended = self._take(group, number, start, raw)
            except (*JSON_ERRORS, ValueError) as error:
                damaged += 1
                found = self._damage(number, _reason(error, raw))
                if group is None:
                    yield found
                else:
                    damage.append(found)
                continue
            if ended is not None:
                yield ended
                yield from damage
                damage = []
        if group is not None:
            yield group
        yield from damage

    def _take(self, group: _Group | None, number: int, start: int, raw: bytes) -> tuple[_Group, _Group | None]:
        """Put a line into the group it belongs to: that group, and the one that has ended with it."""
        if len(raw) > MAX_LINE:
            raise ValueError(f"longer than {MAX_LINE:,} bytes; the rest of the file was not read")
        line = decode_line(raw)
        name = self._name(line.name, group)
        if isinstance(line, StackLine) == bool(name.slot):
            raise ValueError(f"{line.name[:80]!r} is not the name of such a line")
        slot = None if isinstance(line, StackLine) else self._slot(line, name.slot, number)
        ended = None
        if group is None or group.call != name.call or group.has(name):
            ended, group = group, _Group(name, line.name, number, start)
        group.end = start + len(raw)
        if isinstance(line, TensorLine) and slot is not None:
            group.slots[name.slot] = slot
            group.lines.append(line)
            if self._has_data:
                self._files[number] = line.name
        elif isinstance(line, StackLine):
            group.stack = number
            self._stacks[number] = self._frames.setdefault(line.frames, line.frames)
        return group, ended

    def _name(self, text: str, group: _Group | None) -> LineName:
        """The parts of a line's name; those that are named like the line before are known by their ends."""
        if group is not None and text.startswith(group.prefix):
            slot = self._tails.get(text[len(group.prefix) :])
            if slot is not None:
                return LineName(group.call, slot)
        name = read_line_name(text) if text.isprintable() else None
        if name is None or not _is_call_name(name.call):
            raise ValueError(f"{text[:80]!r} is not the name of a line")
        self._tails[_tail(name, text)] = name.slot
        return name

    def _slot(self, line: TensorLine, name: str, number: int) -> Slot:
        known = self._dtypes.get(line.dtype)
        if known is None:
            dtype = _NUMBERS.get(line.dtype, line.dtype.removeprefix("torch."))
            known = self._dtypes[line.dtype] = dtype, DTYPES[dtype].itemsize if dtype in DTYPES else 0
        dtype, itemsize = known
        return Slot(
            name=name,
            dtype=dtype,
            shape=line.shape,
            device="",
            summary=self._summary(line.statistics),
            offset=number if self._has_data else None,
            nbytes=math.prod(line.shape) * itemsize if self._has_data else 0,
        )

    def _summary(self, statistics: Statistics | None) -> Summary | None:
        """What the statistics say. Infinities are there but not counted: their number is -1."""
        if statistics is None:
            return None
        known = self._summaries.get(statistics)
        if known is not None:
            return known
        greatest, least, mean = statistics
        finite = math.isfinite(greatest) and math.isfinite(least)
        if math.isnan(greatest) or math.isnan(least) or math.isnan(mean) or (self._has_data and not finite):
            return None
        made = Summary(max=greatest, min=least, mean=mean, norm=_NORM, nan=0, inf=0 if finite else -1)
        return self._summaries.setdefault(statistics, made)

    def _file_of(self, number: int) -> str:
        return f"{self._files[number]}.npy"

    def _read_lines(self) -> Iterator[tuple[int, int, bytes]]:
        with os.fdopen(open_file(self._pkl.root, *self._pkl.parts), "rb", buffering=BLOCK) as content:
            yield from _split(content)

    def _damage(self, number: int, reason: str) -> Damage:
        return Damage("/".join(self._pkl.parts), number + 1, reason)


class _NoValues:
    """The values of a dump without its folder."""

    def read(self, slot: Slot) -> memoryview:
        """TensorDamaged."""
        raise TensorDamaged("the dump has no folder with its values")

    def hold(self, slot: Slot) -> tuple[int, object]:
        """TensorDamaged."""
        raise TensorDamaged("the dump has no folder with its values")


def _split(content: BinaryIO, number: int = 0, start: int = 0) -> Iterator[tuple[int, int, bytes]]:
    """Number, place and bytes of each line; an overlong one is the last, and not whole."""
    while raw := content.readline(MAX_LINE + 1):
        yield number, start, raw
        if len(raw) > MAX_LINE:
            return
        number += 1
        start += len(raw)


def _tail(name: LineName, text: str) -> str:
    """What stands behind the call in the name of a line: `input.0`, `output`, `stack_info`."""
    if not name.slot:
        return "stack_info"
    return name.slot if text.endswith(f"_{name.slot}") else "output" if text.endswith("_output") else "input"


def _is_call_name(name: str) -> bool:
    parts = name.rsplit(".", 2)
    digits = parts[-2] if parts[-1] in ("forward", "backward") else parts[-1]
    return bool(parts[0]) and len(digits) <= _MOST_DIGITS


def _reason(error: Exception, raw: bytes) -> str:
    if not raw.endswith(b"\n") and len(raw) <= MAX_LINE:
        return f"unfinished: the dump may have ended in the middle of it ({reason_of(error)})"
    return reason_of(error)
