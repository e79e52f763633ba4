"""Open a run: `open_run(path)`, and read the calls of our own format (docs/format.md).

In: the folder of a run, or a dump of another tool; nothing in it is trusted. Out: a `Run`. Raises RunNotFound with what the
folder holds instead, UnsupportedVersion or RunDamaged. Opening reads only the manifest, the parts of the ranks and the names
of folders, and imports neither torch nor numpy. The index of a segment takes one pass that decodes two fields of each line;
a call is decoded when it is asked for.
"""

from __future__ import annotations

import os
import re
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tensorprobe.errors import RunDamaged, RunNotFound, UnsupportedVersion
from tensorprobe.model import Call, Manifest, RankPart, Stack
from tensorprobe.model.call import Name
from tensorprobe.model.manifest import FORMAT_NAME, FORMAT_VERSION
from tensorprobe.record.blob import Blob, MappingPool
from tensorprobe.record.draining import wait_for_recorder
from tensorprobe.record.files import demand_folder, demand_run_folder, list_names, open_file, read_whole
from tensorprobe.record.lines import JSON_ERRORS, MAX_NESTING, Damage, Line, nesting_exceeds, read_lines, reason_of
from tensorprobe.record.run import Entry, Index, Run, Segment

_MAX_JSON = 16 << 20
_NUMBER = r"(0|[1-9][0-9]{0,17})"
_STEP_FOLDER = re.compile(f"step{_NUMBER}")
_RANK_FOLDER = re.compile(f"rank{_NUMBER}")
_RANK_FILE = re.compile(rf"rank{_NUMBER}\.json")

S = TypeVar("S", bound=msgspec.Struct)


class _Version(msgspec.Struct):
    """The fields of a manifest that say how to read the others."""

    format: str = ""
    version: int = 0


def open_run(path: str | Path, data: str | Path | None = None) -> Run:
    """Return the run in the folder `path`, or another tool's dump there: a folder, or the file that is its index.

    `data` is the folder with the values of a dump of ptdbg_ascend, if that is not the one beside its pkl.
    A run whose recording process was killed is opened too (`run.closed` is False). If its recorder is still writing
    what the dead process left behind, this waits for it, at most ten seconds.
    """
    root = Path(path)
    if data is None and (root / "manifest.json").exists():
        return _open_native(root)
    # Imported here because a recorder, which starts with each capture, does not need it.
    from tensorprobe.record.foreign import open_foreign

    run = open_foreign(root, None if data is None else Path(data))
    if run is None and data is not None:
        raise RunNotFound(
            f"no dump at '{root}' whose values may be in '{data}'. "
            "Pass a pkl of ptdbg_ascend, or a folder with rank0, rank1, … that hold one each."
        )
    return _open_native(root) if run is None else run


def _open_native(root: Path) -> Run:
    demand_run_folder(root)
    manifest = _read_manifest(root)
    parts, folders = _read_parts(root), _find_segments(root)
    if wait_for_recorder(root, parts):
        parts, folders = _read_parts(root), _find_segments(root)
    for rank in {rank for _, rank in folders} - set(parts):
        # Its rank{R}.json is lost, its calls are not.
        parts[rank] = RankPart(rank=rank, pid=0, host="")
    pool = MappingPool()
    segments: dict[tuple[int, int], Segment] = {
        (step, rank): NativeSegment(root, step, rank, pool=pool, promised=_promises(parts[rank], step))
        for step, rank in folders
    }
    return Run(root, manifest, parts, segments)


def _promises(part: RankPart, step: int) -> bool:
    """Return whether the rank ended well and lists the step. The folder of a killed rank may be empty."""
    return part.closed and step in part.steps


def _read_manifest(root: Path) -> Manifest:
    try:
        raw = read_whole(root, "manifest.json", limit=_MAX_JSON)
    except FileNotFoundError:
        raise RunNotFound(f"no run in '{root}' (no manifest.json).{_describe(root)}") from None
    found = _decode(raw, _Version, root / "manifest.json")
    if found.format != FORMAT_NAME:
        raise RunNotFound(
            f"no run in '{root}': its manifest.json has format {found.format[:40]!r}, not {FORMAT_NAME!r}."
            f"{_describe(root)}"
        )
    if found.version > FORMAT_VERSION:
        raise UnsupportedVersion(
            f"'{root}' has format version {found.version:,}; this tensorprobe reads versions up to {FORMAT_VERSION}.\n"
            "  Read it with a newer one: pip install -U tensorprobe"
        )
    if found.version < 1:
        raise RunDamaged(f"'{root / 'manifest.json'}' has version {found.version:,}; versions count from 1.")
    manifest = _decode(raw, Manifest, root / "manifest.json")
    if nesting_exceeds([manifest.settings, manifest.provenance], MAX_NESTING + 1):
        raise RunDamaged(
            f"'{root / 'manifest.json'}' has settings or provenance nested more than {MAX_NESTING} deep; no run does."
        )
    return manifest


def _describe(root: Path) -> str:
    from tensorprobe.record.foreign import describe_folder

    return describe_folder(root)


def _read_parts(root: Path) -> dict[int, RankPart]:
    parts = {}
    for name in list_names(root):
        if match := _RANK_FILE.fullmatch(name):
            rank = int(match[1])
            part = _decode(read_whole(root, name, limit=_MAX_JSON), RankPart, root / name)
            if part.rank != rank:
                raise RunDamaged(
                    f"'{root / name}' says it belongs to rank {part.rank}. Was it renamed or copied by hand?"
                )
            parts[rank] = part
    return parts


def _find_segments(root: Path) -> list[tuple[int, int]]:
    """Return every (step, rank) that has a folder. Other names in the run's folder are ignored."""
    found = []
    for step_name in list_names(root):
        if step := _STEP_FOLDER.fullmatch(step_name):
            for rank_name in list_names(root, step_name):
                if rank := _RANK_FOLDER.fullmatch(rank_name):
                    demand_folder(root, step_name, rank_name)
                    found.append((int(step[1]), int(rank[1])))
    return sorted(found)


def _decode(raw: bytes, kind: type[S], path: Path) -> S:
    try:
        return msgspec.json.decode(raw, type=kind)
    except JSON_ERRORS as error:
        raise RunDamaged(
            f"'{path}' cannot be read: {reason_of(error)}.\n"
            + (
                "  The rest of the run cannot be read without it."
                if path.name == "manifest.json"
                else "  Move it away to read the calls without it."
            )
        ) from None


T = TypeVar("T")

_CALL_NAME = re.compile(
    r"[^\x00-\x1f\x7f]+\.([0-9]{1,18}\.(forward|backward)|(forward|backward)\.[0-9]{1,18})", re.ASCII
)


class _IndexLine(msgspec.Struct, frozen=True, gc=False):
    """The fields of a call that an index needs; the rest of the line is skipped without creating objects."""

    name: Name
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
        """Return the index of the calls, in execution order; it is read once."""
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
        """Yield each call with its zero-based line, or a Damage for a line that cannot be read."""
        places, whole = array("q"), True
        for item in self._lines("calls.jsonl", _read_call, required=self._promised):
            if isinstance(item, Damage):
                whole = False
                yield item
            else:
                places.extend((item.start, item.length))
                yield item.number, item.value
        if whole and self._index is None:
            self._places = places

    def knows(self, line: int) -> bool:
        """Return whether `call_at` finds this line without an index, because all lines were read and none is damaged."""
        return self._index is None and 2 * line < len(self._places)

    def call_at(self, entry: Entry) -> Call:
        """Read the call of one index entry; raise RunDamaged when its line breaks the format."""
        # Damaged lines are not in the index, so the position of an entry may be lower than its line.
        known = self.knows(entry.line)
        position = entry.line if known else bisect_left(self.index().entries, entry.line, key=lambda held: held.line)
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
        """Return the stack with this id; None when it is not in the file (stacks were off, or the process was killed)."""
        if self._stacks is None:
            stacks = {}
            for item in self._lines("stacks.jsonl", _decode_stack, required=False):
                if isinstance(item, Damage):
                    raise RunDamaged(f"'{self._root}' is damaged at {item}. Its calls and tensors are not affected.")
                stacks[item.value.id] = item.value
            self._stacks = stacks
        return self._stacks.get(number)

    def damage(self) -> list[Damage]:
        """Return every line of calls.jsonl that cannot be read."""
        return [item for item in self.calls() if isinstance(item, Damage)]

    def size_bytes(self) -> int:
        """Return the size of tensors.bin, 0 when there is none."""
        try:
            descriptor = open_file(self._root, *self._folder, "tensors.bin")
        except FileNotFoundError:
            return 0
        try:
            return os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)

    def _lines(self, name: str, decode: Callable[[bytes], Any], *, required: bool) -> Iterator[Line | Damage]:
        try:
            descriptor = open_file(self._root, *self._folder, name)
        except FileNotFoundError:
            if required:
                raise RunDamaged(
                    f"'{self._root}' lacks {self._name(name)}, although its rank lists it as written. Was the run copied only in part?"
                ) from None
            return iter(())
        return read_lines(descriptor, self._name(name), decode)

    def _name(self, file: str) -> str:
        return "/".join((*self._folder, file))


def _read_index_line(raw: bytes) -> _IndexLine:
    line = _decode_index_line(raw)
    demand_call_name(line.name)
    return line


def _read_call(raw: bytes) -> Call:
    call = _decode_call(raw)
    demand_call_name(call.name)
    return call


def demand_call_name(name: str) -> None:
    # The ends of a name settle the usual cases; the slow pattern decides the rest.
    if name.endswith((".forward", ".backward")) and name.isprintable():
        head, _, number = name.rpartition(".")[0].rpartition(".")
        if head and number.isdigit() and number.isascii() and len(number) <= 18:
            return
    if _CALL_NAME.fullmatch(name) is None:
        raise ValueError(f"{name[:80]!r} is not the name of a call")
