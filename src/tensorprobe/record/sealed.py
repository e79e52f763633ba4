"""A sealed run: one small file with the calls, statistics, digests and sketches of a run, and no values. Its suffix is `.tpz`.

The same run gives the same bytes: no time, host, process, folder or commit is in it. Goldens of tests are such files.
It is gzip around one JSON document (docs/format.md). Reading one is as careful as reading a run: nothing in it is trusted.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec.structs import replace

from tensorprobe.errors import RunDamaged, SettingsError, TensorDamaged, UnsupportedVersion
from tensorprobe.files import max_read_bytes, read_file, replace_file
from tensorprobe.model import DTYPES, Call, Manifest, RankPart, Slot, Stack
from tensorprobe.model.interrupts import let_through
from tensorprobe.record.foreign import CallList
from tensorprobe.record.lines import JSON_ERRORS, MAX_NESTING, Damage, nesting_exceeds, reason_of
from tensorprobe.record.reader import demand_call_name
from tensorprobe.record.run import Run, Segment
from tensorprobe.standard_json import encode
from tensorprobe.text import plain

SUFFIX = ".tpz"
FORMAT = "tensorprobe-sealed"
VERSION = 1
_GZIP = b"\x1f\x8b"
_LEAST_UNPACKED, _MOST_GROWTH = 16 << 20, 64
"""A small file may unpack to this many bytes, a larger one to this many times its size: digests do not compress."""
_KEPT = ("packages", "switches")
"""The keys of the provenance that change numbers and are the same on every machine with the same packages."""


class _Segment(msgspec.Struct, frozen=True):
    step: int
    rank: int
    calls: list[Call]
    stacks: list[Stack] = []


class _Sealed(msgspec.Struct, frozen=True, kw_only=True):
    format: str = FORMAT
    version: int = VERSION
    manifest: Manifest
    parts: list[RankPart]
    segments: list[_Segment]


class _Head(msgspec.Struct):
    format: str = ""
    version: int = 0


def seal_run(run: Run, path: str | os.PathLike[str], *, root: str | os.PathLike[str] | None = None) -> int:
    """Write `run` as one file and return its size in bytes. Files below `root` (the current folder) are named relative to it."""
    base = Path.cwd() if root is None else Path(root)
    manifest = run.manifest
    sealed = _Sealed(
        manifest=replace(
            manifest,
            created="",
            settings={**manifest.settings, **({"mode": "sketch"} if manifest.settings.get("mode") == "tensor" else {})},
            provenance={key: manifest.provenance[key] for key in _KEPT if key in manifest.provenance},
        ),
        parts=[_part(part) for part in run.parts.values()],
        segments=list(_segments(run, base)),
    )
    document = encode(sealed).encode()
    raw = gzip.compress(document, compresslevel=9, mtime=0)
    if len(document) > _most_unpacked(raw):  # a reader would take it for a hostile file
        raw = gzip.compress(document, compresslevel=0, mtime=0)
    try:
        replace_file(Path(path), raw)
    except OSError as error:
        let_through(error)
        raise SettingsError(f"cannot write {plain(path)!r}: {error.strerror}.") from None
    return len(raw)


def _most_unpacked(raw: bytes) -> int:
    return max(_LEAST_UNPACKED, _MOST_GROWTH * len(raw))


def _part(part: RankPart) -> RankPart:
    coverage = replace(part.coverage, bytes_seen=0, bytes_written=0, notes=[])
    return replace(part, pid=0, host="", coverage=coverage)


def _segments(run: Run, root: Path) -> Iterator[_Segment]:
    for step, rank in run.segments():
        held = run.segment(step, rank)
        calls = [item[1] for item in held.calls() if not isinstance(item, Damage)]
        found = [held.stack(number) for number in sorted({call.stack for call in calls if call.stack is not None})]
        yield _Segment(
            step,
            rank,
            [replace(call, slots=[_sketched(slot, held) for slot in call.slots]) for call in calls],
            [_placed(stack, root) for stack in found if stack is not None],
        )


def _sketched(slot: Slot, held: Segment) -> Slot:
    """Return a slot with a sketch in place of its values."""
    from tensorprobe.numerics.sketch import sketch_of
    from tensorprobe.record.elements import to_numpy

    sketch = slot.sketch
    if slot.has_data and slot.skipped is None and slot.dtype in DTYPES:
        sketch = sketch_of(to_numpy(held.source.read(slot), slot))
    return replace(_bare(slot), sketch=sketch)


def _bare(slot: Slot) -> Slot:
    """Return a slot without the place of its values."""
    return replace(slot, offset=None, nbytes=0)


def _placed(stack: Stack, root: Path) -> Stack:
    """Return the frames below `root`, named relative to it: other paths differ between machines."""
    inside = [frame for frame in stack.frames if Path(frame.file).is_relative_to(root)]
    return replace(
        stack, frames=tuple(replace(frame, file=Path(frame.file).relative_to(root).as_posix()) for frame in inside)
    )


def open_sealed(path: Path, data: Path | None) -> Run | None:
    """Return the run in a sealed file; None when `path` is something else."""
    if data is not None or path.suffix != SUFFIX or not path.is_file():
        return None
    raw = _unpack(path, read_file(path))
    try:
        head = msgspec.json.decode(raw, type=_Head)
        if head.format != FORMAT or head.version < 1:
            raise RunDamaged(f"'{path}' is not a sealed run: its format is {head.format[:40]!r}, not {FORMAT!r}.")
        if head.version > VERSION:
            raise UnsupportedVersion(
                f"'{path}' has version {head.version:,}; this tensorprobe reads versions up to {VERSION}.\n"
                "  Read it with a newer one: pip install -U tensorprobe"
            )
        sealed = msgspec.json.decode(raw, type=_Sealed)
        for segment in sealed.segments:
            for call in segment.calls:
                demand_call_name(call.name)
    except (*JSON_ERRORS, ValueError) as error:
        raise RunDamaged(f"'{path}' cannot be read: {reason_of(error)}.\n  Write it again from its run.") from None
    if nesting_exceeds([sealed.manifest.settings, sealed.manifest.provenance], MAX_NESTING + 1):
        raise RunDamaged(f"'{path}' has settings nested more than {MAX_NESTING} deep; no run does.")
    segments = {
        (held.step, held.rank): CallList([_sane(call) for call in held.calls], _no_values, stacks=held.stacks)
        for held in sealed.segments
    }
    return Run(path, sealed.manifest, {part.rank: part for part in sealed.parts}, segments)


def _sane(call: Call) -> Call:
    return replace(call, slots=[_bare(slot) for slot in call.slots]) if any(s.nbytes for s in call.slots) else call


def _no_values(slot: Slot) -> bytes:
    raise TensorDamaged(f"{slot.name} has no values here: a sealed run holds statistics and digests only")


def _unpack(path: Path, raw: bytes) -> bytes:
    """Return the document. It may be no larger than a file that is read whole, and than records compress to."""
    most = min(max_read_bytes(), _most_unpacked(raw))
    if not raw.startswith(_GZIP):
        raise RunDamaged(f"'{path}' is not a sealed run: it is not compressed with gzip.")
    unpacking = zlib.decompressobj(wbits=31)
    try:
        content = unpacking.decompress(raw, most)
    except zlib.error as error:
        raise RunDamaged(f"'{path}' is damaged: {error}.\n  Write it again from its run.") from None
    if unpacking.unconsumed_tail or not unpacking.eof:
        what = f"it unpacks to more than {most:,} bytes" if unpacking.unconsumed_tail else "its end is missing"
        raise RunDamaged(f"'{path}' cannot be read: {what}.")
    return content
