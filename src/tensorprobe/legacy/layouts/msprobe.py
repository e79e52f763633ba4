"""Opening a dump of msprobe: `{dump_path}/step{S}/rank{R}/dump.json`, and the files with values beside it.

In: the folder with the steps, one of its step folders, one of its rank folders, or a dump.json. Out: a `Run`, or None
when the path is no such dump. Only names of folders and the first bytes of one dump.json are read here.
A process that knows no rank writes into `proc{pid}`; such folders have the ranks 0, 1, … in the order of their numbers.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from tensorprobe.errors import RunDamaged
from tensorprobe.legacy.layouts.msprobe_segment import MsprobeSegment, Turn
from tensorprobe.record.files import demand_folder, list_names, open_file
from tensorprobe.record.foreign import foreign_run
from tensorprobe.record.run import Run

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
