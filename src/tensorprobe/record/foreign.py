"""Finds the reader for another tool's dump, and makes a `Run` of what it read.

Importing this imports neither torch nor numpy, and no reader.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from functools import cache
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from tensorprobe.errors import RunError, TensorDamaged, TensorprobeError
from tensorprobe.model import Call, Coverage, Manifest, RankPart, Slot, Stack
from tensorprobe.numerics.native import pinned
from tensorprobe.record.elements import demand_shape
from tensorprobe.record.lines import Damage
from tensorprobe.record.run import Entry, Index, Run, Segment
from tensorprobe.registry import ENTRY_POINTS, READERS, Reader

_MAX_NAMES = 2000
_SHOWN = 5
_CHECKPOINT = re.compile(r".*\.safetensors(\.index\.json)?|pytorch_model.*\.bin")
_DOWN = re.compile(r"(step|rank|proc)[0-9]*|.*_v[0-9.]+")


def open_foreign(path: Path, data: Path | None) -> Run | None:
    """Return the dump at `path`, read by the first reader that takes it; None when none does."""
    for reader in _all_readers():
        opens = _load(reader)
        try:
            run = opens(path, data)
        except TensorprobeError:
            raise
        except Exception as error:
            if reader.opens.startswith("tensorprobe."):
                raise
            raise RunError(
                f"the reader {reader.name!r} ({reader.opens}) failed at '{path}': {type(error).__name__}: {error}.\n"
                "  It comes from another package: report it there."
            ) from error
        if run is not None:
            return run
    return None


def _all_readers() -> Iterator[Reader]:
    """Yield the registered readers, then those of entry points, which are looked up only if needed."""
    yield from list(READERS.values())
    yield from (reader for reader in _installed_readers() if reader.name not in READERS)


@cache
def _installed_readers() -> tuple[Reader, ...]:
    from importlib.metadata import entry_points  # takes longer to import than the rest of this module

    return tuple(Reader(entry.name, entry.value) for entry in entry_points(group=ENTRY_POINTS))


def _load(reader: Reader) -> Callable[[Path, Path | None], Run | None]:
    module, _, function = reader.opens.partition(":")
    try:
        found: Callable[[Path, Path | None], Run | None] = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise RunError(
            f"the reader {reader.name!r} ({reader.opens}) cannot be loaded: {error}.\n"
            "  Repair or uninstall the package that provides it."
        ) from error
    return found


def foreign_run(
    path: Path,
    tool: str,
    segments: Mapping[tuple[int, int], Segment],
    *,
    written_s: float,
    settings: Mapping[str, Any],
    note: str,
    data: Path | None = None,
    one_rank: bool = False,
) -> Run:
    """Make a `Run` of the segments of another tool's dump, which says nothing about itself beyond these arguments.

    `written_s` is when it was written. `settings["mode"]` is "tensor" when it holds values, else "summary". `note` goes
    into the coverage of every rank. `one_rank`: the path names one rank, so its number need not match.
    """
    ranks = sorted({rank for _, rank in segments})
    manifest = Manifest(
        format=tool,
        version=1,
        tool=tool,
        torch="",
        python="",
        created=datetime.fromtimestamp(written_s, timezone.utc).isoformat(timespec="seconds"),
        world_size=len(ranks),
        settings=dict(settings),
    )
    coverage = Coverage(notes=[note] if note else [])
    parts = {}
    for rank in ranks:
        steps = sorted(step for step, other in segments if other == rank)
        parts[rank] = RankPart(rank=rank, pid=0, host="", device="", steps=steps, closed=True, coverage=coverage)
    return Run(path, manifest, parts, segments, data=data, one_rank=one_rank)


class CallList:
    """A segment whose calls are in memory. `read` returns the bytes of a slot that has an `offset`.

    An exception of `read` is damage of that tensor. `size_bytes` is what the values take; by default the sum of `nbytes`.
    Enough for a reader of small dumps; those of `legacy` decode a call when it is asked for.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        read: Callable[[Slot], bytes | bytearray | memoryview],
        *,
        stacks: Sequence[Stack] = (),
        damage: Sequence[Damage] = (),
        size_bytes: int | None = None,
    ) -> None:
        self._calls, self._read, self._damage = calls, read, damage
        stored = sum(slot.nbytes for call in calls for slot in call.slots if slot.has_data)
        self._size = stored if size_bytes is None else size_bytes
        self._stacks = {stack.id: stack for stack in stacks}
        self.source = self

    def index(self) -> Index:
        return Index([Entry(line, call.name, call.repeat) for line, call in enumerate(self._calls)], self._damage)

    def calls(self) -> Iterator[tuple[int, Call] | Damage]:
        yield from self._damage
        yield from enumerate(self._calls)

    def call_at(self, entry: Entry) -> Call:
        return self._calls[entry.line]

    def stack(self, number: int) -> Stack | None:
        return self._stacks.get(number)

    def damage(self) -> Sequence[Damage]:
        return self._damage

    def size_bytes(self) -> int:
        return self._size

    def read(self, slot: Slot) -> memoryview:
        """Return exactly the bytes of `slot`; TensorDamaged when `read` gives another number of them."""
        demanded = demand_shape(slot)
        try:
            found = memoryview(self._read(slot)).cast("B")
        except TensorprobeError:
            raise
        except Exception as error:
            raise TensorDamaged(f"its reader failed: {type(error).__name__}: {error}") from error
        if len(found) != demanded:
            raise TensorDamaged(f"it has {len(found):,} bytes; {slot.dtype} {list(slot.shape)} has {demanded:,}")
        return memoryview(bytearray(found)) if found.readonly else found  # torch wants memory that may be written

    def hold(self, slot: Slot) -> tuple[int, object]:
        """Return the address of those bytes, and the object that keeps them alive."""
        view = self.read(slot)
        with pinned(view) as (address, _):
            return address, view


def describe_folder(path: Path) -> str:
    """Return what the folder holds instead of a run, as the second line of a message; empty when nothing is known."""
    names = _names(path)
    runs = [name for name in names if (path / name / "manifest.json").is_file()]
    if runs:
        shown = ", ".join(runs[:_SHOWN]) + (f" and {len(runs) - _SHOWN} more" if len(runs) > _SHOWN else "")
        what = "1 run" if len(runs) == 1 else f"{len(runs):,} runs"
        return f"\n  It holds {what}: {shown}. Pass {'it' if len(runs) == 1 else 'one'}: {path / runs[-1]}"
    if (path.parent / "manifest.json").is_file():
        return f"\n  It is inside a run. Pass that: {path.parent}"
    signs = [(re.compile(reader.sign), reader) for reader in READERS.values() if reader.sign]
    if found := _find_sign(path, [*signs, (_CHECKPOINT, None)], depth=2):
        reader, file = found
        if reader is None:
            return f"\n  It looks like a checkpoint ({file}), which is not a run."
        return f"\n  It looks like a dump of {reader.name} ({file}). Pass {reader.takes}."
    if not names:
        return "\n  The folder is empty."
    return f"\n  It holds {', '.join(names[:_SHOWN])}{', …' if len(names) > _SHOWN else ''}."


def _find_sign(
    path: Path, signs: Sequence[tuple[re.Pattern[str], Reader | None]], depth: int
) -> tuple[Reader | None, Path] | None:
    """Return whose dump the folder looks like, and the file that says so. Step and rank folders are searched too."""
    names = _names(path)
    for pattern, reader in signs:
        for name in names:
            if pattern.fullmatch(name):
                return reader, path / name
    for name in [name for name in names if _DOWN.fullmatch(name)][:1] if depth else []:
        if (path / name).is_dir() and (found := _find_sign(path / name, signs, depth - 1)):
            return found
    return None


def _names(path: Path) -> list[str]:
    """Return the first names in a folder, sorted; a folder of millions of files must not delay an error message."""
    try:
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in islice(entries, _MAX_NAMES))
    except OSError:
        return []
