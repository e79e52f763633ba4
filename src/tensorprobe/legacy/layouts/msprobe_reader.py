"""Opening a dump of msprobe: `{dump_path}/step{S}/rank{R}/dump.json`, and the files with values beside it.

In: the folder with the steps, one of its step folders, one of its rank folders, or a dump.json. Out: a `Run`, or None
when the path is no such dump. Only names of folders and the first bytes of one dump.json are read here.
A process that knows no rank writes into `proc{pid}`; such folders have the ranks 0, 1, … in the order of their numbers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import msgspec

from tensorprobe.errors import RunDamaged
from tensorprobe.legacy.layouts.entries import FILE_BITS, EntrySegment, FileValues
from tensorprobe.legacy.layouts.gradients import Gradients, returns_input
from tensorprobe.legacy.layouts.msprobe_entries import (
    Dump,
    DumpEntry,
    EntryReader,
    Known,
    decode_entry,
    demand_call_name,
    find_module,
    find_parent,
    read_dump,
    users_frames,
)
from tensorprobe.legacy.layouts.optimizer_calls import find_optimizer_calls, is_only_of_optimizer
from tensorprobe.legacy.layouts.value_files import FolderFiles
from tensorprobe.legacy.wrapped import is_low_risk, shipped_ops
from tensorprobe.model import Call, Frame, Level, Slot, Stack
from tensorprobe.model.call import forward_name
from tensorprobe.model.reason import Skipped
from tensorprobe.ops.names import DIRECTIONS, canonical_op, parse_call_name
from tensorprobe.record.files import demand_folder, list_names, open_file
from tensorprobe.record.foreign import foreign_run
from tensorprobe.record.lines import JSON_ERRORS, Damage, reason_of
from tensorprobe.record.run import Run, Segment

TOOL = "msprobe"
INDEX = "dump.json"
_HEAD = 4096
_STEP = re.compile("step(0|[1-9][0-9]{0,17})")
_RANK = re.compile("rank(0|[1-9][0-9]{0,17}|)")
_PROCESS = re.compile("proc(0|[1-9][0-9]{0,17})")
_SETTING = re.compile(rb'"(task|level|framework)"\s*:\s*"(\w{1,40})"')
_SETTINGS_OF_ACL = re.compile(rb'\s*\{\s*"dump"\s*:')
"""ptdbg_ascend has a dump.json too: a small file that the user writes."""
_NOTE = "a dump of msprobe does not say which calls were left out of it, nor whether it is whole"

Parts = tuple[str, ...]


class _Head(NamedTuple):
    """What the beginning of a dump.json says, and when the file was written."""

    settings: dict[str, str]
    written: float


def open_msprobe(path: Path, data: Path | None = None) -> Run | None:
    """Return the dump at `path`; None when it is not one of msprobe. Its values cannot be elsewhere."""
    if data is not None:
        return None
    root = path
    if path.name == INDEX and path.is_file():
        # The user chose the file, so it may be a link; its values are beside the true one.
        root = Path(os.path.realpath(path)).parent if path.is_symlink() else path.parent
    elif not path.is_dir():
        return None
    elif INDEX not in list_names(path):
        return _open_many(path)
    head = _read_head(root, ())
    if head is None:
        return None
    step, rank = _own_place(root)
    return _run(path, root, {(step, rank): ()}, head, one_rank=True)


def _open_many(path: Path) -> Run | None:
    """The dump with the steps, or one of its steps, in the folder `path`."""
    found: dict[tuple[int, int], Parts] = {}
    for name in list_names(path):
        if (step := _STEP.fullmatch(name)) and (path / name).is_dir():
            found |= _find_ranks(path, int(step[1]), (name,))
    if not found:
        own = _STEP.fullmatch(path.absolute().name)
        found = _find_ranks(path, int(own[1]) if own else 0, ())
    head = _read_head(path, next(iter(found.values()))) if found else None
    return None if head is None else _run(path, path, found, head, one_rank=False)


def _run(path: Path, root: Path, found: dict[tuple[int, int], Parts], head: _Head, *, one_rank: bool) -> Run:
    turn = Turn()
    segments = {place: MsprobeSegment(root, folder, turn) for place, folder in found.items()}
    settings = {"mode": "tensor" if head.settings.get("task") == "tensor" else "summary", **head.settings}
    return foreign_run(path, TOOL, segments, written_s=head.written, settings=settings, note=_NOTE, one_rank=one_rank)


def _find_ranks(root: Path, step: int, parts: Parts) -> dict[tuple[int, int], Parts]:
    """The folders in `root/parts...` with a dump.json, by step and rank."""
    names = [name for name in list_names(root, *parts) if _RANK.fullmatch(name) or _PROCESS.fullmatch(name)]
    names = [name for name in names if (root.joinpath(*parts, name, INDEX)).is_file()]
    found: dict[tuple[int, int], Parts] = {}
    processes: list[tuple[int, str]] = []
    for name in names:
        demand_folder(root, *parts, name)
        if match := _RANK.fullmatch(name):
            rank = int(match[1] or 0)
            if (step, rank) in found:
                folder = root.joinpath(*parts)
                raise RunDamaged(f"'{folder}' holds both {found[step, rank][-1]!r} and {name!r}; both are rank {rank}.")
            found[step, rank] = (*parts, name)
        elif match := _PROCESS.fullmatch(name):
            processes.append((int(match[1]), name))
    first = max((rank for _, rank in found), default=-1) + 1
    for rank, (_, name) in enumerate(sorted(processes), start=first):
        found[step, rank] = (*parts, name)
    return found


def _own_place(folder: Path) -> tuple[int, int]:
    """The step and rank that the names of a rank folder and of the one above it say; 0 where they say nothing."""
    folder = folder.absolute()
    rank, step = _RANK.fullmatch(folder.name), _STEP.fullmatch(folder.parent.name)
    is_rank = rank is not None or _PROCESS.fullmatch(folder.name) is not None
    return int(step[1]) if step and is_rank else 0, int(rank[1] or 0) if rank else 0


def _read_head(root: Path, parts: Parts) -> _Head | None:
    """What a dump.json begins with; None when it is the other tool's file of that name."""
    with os.fdopen(open_file(root, *parts, INDEX), "rb") as file:
        start, written = file.read(_HEAD), os.fstat(file.fileno()).st_mtime
    if _SETTINGS_OF_ACL.match(start):
        return None
    settings = {key.decode(): value.decode() for key, value in _SETTING.findall(start.partition(b'"data"')[0])}
    return _Head(settings, written)


DATA_FOLDER = "dump_tensor_data"
_MOST_HOLDERS = 2


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


class MsprobeSegment(EntrySegment[DumpEntry]):
    """One folder `root/parts...` with a dump.json."""

    def __init__(self, root: Path, parts: tuple[str, ...], turn: Turn) -> None:
        super().__init__()
        self._root, self._parts, self._turn = root, parts, turn
        self._file = f"'{root.joinpath(*parts, INDEX)}'"
        self._dump: Dump | None = None
        self._known = Known()
        self._dumped: set[str] | None = None
        self._folder = FolderFiles(root, (*parts, DATA_FOLDER))
        self.source = FileValues(self._folder, self.file_of)
        self._as_it_is = False

    @property
    def is_published(self) -> bool:
        """Whether the published msprobe wrote the dump, and not tensorprobe."""
        return self._load().published

    def against(self, other: object) -> MsprobeSegment:
        """This segment as it is compared with another. Two dumps of the published tool are compared as they are."""
        if not (isinstance(other, MsprobeSegment) and other._load().published and self._load().published):
            return self
        segment = copy(self)
        segment._as_it_is = True
        return segment

    def excuse(self, call: Call, other: Segment, *, own: bool) -> Skipped | None:
        """Why a call that only this side has (`own`), or only the other, is no difference; None if it is one."""
        if own and is_only_of_optimizer(call, self, other):
            return Skipped.OTHER_OPTIMIZER
        if self._as_it_is or not self._load().published:
            return None
        if not own:
            is_excused = call.direction == "backward" or not self._may_hold(call)
        elif call.op.endswith(".parameters_grad"):
            is_excused = True
        else:
            is_excused = call.direction == "backward" and (_passes_on(call) or self._returned_its_input(call.name))
        return Skipped.OTHER_TOOL if is_excused else None

    @cached_property
    def optimizer_calls(self) -> frozenset[str]:
        """The names of the calls that the optimizer made: construct.json says so, or their order does."""
        parents = self._load().parents
        told = frozenset(name for name, parent in parents.items() if parent == "optimizer")
        return told if parents else find_optimizer_calls(self.index().entries)

    def _may_hold(self, call: Call) -> bool:
        """Whether the published tool would have recorded a forward call: it wraps a list of functions, from outside only."""
        is_inner = call.parent is not None and not call.parent.startswith("Module.")
        if call.op.startswith("Module.") or is_inner:
            return not is_inner and bool(call.module)  # the model itself has no path, and is not dumped
        if self._dumped is None:
            self._dumped = {canonical_op(parse_call_name(name).op) for name in self._load().data}
        op = canonical_op(call.op)
        if op in self._dumped:
            return True
        listed = {canonical_op(listed) for listed in shipped_ops()}
        return op in listed and not is_low_risk(call.op) and not op.startswith("VF.")

    def _returned_its_input(self, name: str) -> bool:
        """Whether the forward call of a backward call returned what it was given: then it made no autograd node."""
        held = self._load().data.get(forward_name(name))
        forward = decode_entry(held) if held is not None else None
        return isinstance(forward, dict) and returns_input(parse_call_name(name).op, forward)

    def stack(self, number: int) -> Stack | None:
        """The stack with that number; RunDamaged when stack.json breaks the format."""
        frames = self._load().frames
        if isinstance(frames, RunDamaged):
            raise frames
        if not 0 <= number < len(frames):
            return None
        return Stack(number, frames_of(frames[number], self._root.joinpath(*self._parts, "stack.json"), number))

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
        self._turn.take(self)
        return super().file_of(number)

    def _load(self) -> Dump:
        self._turn.take(self)
        if self._dump is None:
            self._dump = read_dump(self._root, self._parts)
        return self._dump

    def _entries(self) -> Sequence[DumpEntry]:
        return self._load().entries

    def _name(self, entry: DumpEntry) -> str:
        """The name of the call. Gradients that belong to no one call are a backward call of their own."""
        if entry.call or entry.alone:
            return demand_call_name(entry.call or entry.alone)
        module, _, number = str(entry.gradients).rpartition(".parameters_grad")
        return demand_call_name(f"{module}.parameters_grad.backward.{number.removeprefix('.') or 0}")

    def _make(self, line: int, entry: DumpEntry) -> Call:
        dump, name = self._load(), self._name(entry)
        names: list[str] = []

        def number_file(file: str) -> int:
            names.append(file)
            return (line << FILE_BITS) + len(names) - 1

        reader = EntryReader(self._known, number_file)
        if entry.call is not None:
            reader.add_call(decode_entry(dump.data[entry.call]), forward=DIRECTIONS[0] in name.rsplit(".", 2)[-2:])
        if entry.gradients is not None:
            reader.add_gradients(decode_entry(dump.data[entry.gradients]))
        if names:
            self._files[line] = names
        slots = self._gradients(name, reader.slots, dump) if forward_name(name) else reader.slots
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
            slots=tuple(slots),
        )

    def _gradients(self, name: str, slots: list[Slot], dump: Dump) -> list[Slot]:
        """The slots of a backward call, named by the arguments and results of its forward call, if that is there."""
        forward = dump.data.get(forward_name(name))
        if forward is None or self._as_it_is or not Level.of(name).links_backward:
            return slots
        op, _, _ = parse_call_name(name)
        several = dump.published and op.startswith("Module.") and f"{op}.forward.1" in dump.data
        entry = decode_entry(forward)
        if not isinstance(entry, dict):
            return slots  # told as damage of its own
        return Gradients(op, entry, published=dump.published, several=several).rename(slots)

    def _damage(self, line: int, entry: DumpEntry, error: Exception) -> Damage:
        name = str(entry.call or entry.gradients)[:80]
        return EntryDamage("/".join((*self._parts, "dump.json")), line + 1, f"{name!r}: {reason_of(error)}")


def _passes_on(call: Call) -> bool:
    """Whether a backward hands on the gradient it gets: that of a module that returns its input."""
    made, given = ([slot.summary for slot in call.slots if slot.side == side] for side in ("input", "output"))
    return bool(made) and made == given


def frames_of(text: msgspec.Raw, file: Path, number: int) -> tuple[Frame, ...]:
    """The frames of the user's program, innermost first; all of them when they are torch's own. RunDamaged when there are none."""
    try:
        lines = msgspec.json.decode(text, type=list[str])
    except JSON_ERRORS as error:
        raise RunDamaged(f"'{file}' is damaged at stack {number}: {reason_of(error)}.") from None
    return users_frames(lines)
