"""Opening a run: `open_run(path)`.

In: the folder of a run, or a dump of another tool. Out: a `Run`, or RunNotFound with what the folder holds instead,
UnsupportedVersion, RunDamaged.
Only the manifest, the parts of the ranks and the names of folders are read; neither torch nor numpy is imported.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from tensorprobe.errors import RunDamaged, RunNotFound, UnsupportedVersion
from tensorprobe.legacy.layouts import describe_folder
from tensorprobe.model import Manifest, RankPart
from tensorprobe.model.manifest import FORMAT_NAME, FORMAT_VERSION
from tensorprobe.record.blob import MappingPool
from tensorprobe.record.draining import wait_for_recorder
from tensorprobe.record.files import demand_folder, demand_run_folder, list_names, read_small_file
from tensorprobe.record.lines import JSON_ERRORS, MAX_NESTING, nesting_exceeds, reason_of
from tensorprobe.record.native import NativeSegment
from tensorprobe.record.run import Run, Segment

_MAX_JSON = 16 << 20
_NUMBER = r"(0|[1-9][0-9]{0,17})"
_STEP_FOLDER = re.compile(f"step{_NUMBER}")
_RANK_FOLDER = re.compile(f"rank{_NUMBER}")
_RANK_FILE = re.compile(rf"rank{_NUMBER}\.json")

S = TypeVar("S", bound=msgspec.Struct)


class _Version(msgspec.Struct):
    """What must be known of a manifest before the rest of it can be understood."""

    format: str = ""
    version: int = 0


def open_run(path: str | Path, data: str | Path | None = None) -> Run:
    """The run in the folder `path`, or the dump of another tool that is there: a folder, or the file that is its index.

    `data` is the folder with the values of a dump of ptdbg_ascend, when it is not the one beside its pkl.
    A run whose recording process was killed is opened all the same (`run.closed` is False). When its recorder is still
    writing what the dead process left behind, this waits for it, ten seconds at most.
    """
    root = Path(path)
    if data is None and (root / "manifest.json").exists():
        return _open_native(root)
    # Imported here: a recorder, which starts with each capture, does without them.
    from tensorprobe.legacy.layouts import checker, msprobe, ptdbg

    if data is not None:
        return ptdbg.open_run(root, data)
    openers: tuple[Callable[[Path], Run | None], ...] = (
        ptdbg.open_ptdbg,
        checker.open_checker,
        msprobe.open_msprobe,
    )
    for open_other in openers:  # each gives a Run, or None when the path is no dump of its tool
        run = open_other(root)
        if run is not None:
            return run
    return _open_native(root)


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
    """Whether the rank ended well and says that it recorded the step. A folder alone may be a killed rank's, and empty."""
    return part.closed and step in part.steps


def _read_manifest(root: Path) -> Manifest:
    try:
        raw = read_small_file(root, "manifest.json", limit=_MAX_JSON)
    except FileNotFoundError:
        raise RunNotFound(f"no run in '{root}' (no manifest.json).{describe_folder(root)}") from None
    found = _decode(raw, _Version, root / "manifest.json")
    if found.format != FORMAT_NAME:
        raise RunNotFound(
            f"no run in '{root}': its manifest.json has format {found.format[:40]!r}, not {FORMAT_NAME!r}."
            f"{describe_folder(root)}"
        )
    if found.version > FORMAT_VERSION:
        raise UnsupportedVersion(
            f"'{root}' has format version {found.version:,}; this tensorprobe reads versions up to {FORMAT_VERSION}.\n"
            "  Read it with a newer one: pip install -U tensorprobe"
        )
    if found.version < 1:
        raise RunDamaged(f"'{root / 'manifest.json'}' has version {found.version:,}; versions count from 1.")
    manifest = _decode(raw, Manifest, root / "manifest.json")
    if nesting_exceeds(manifest.settings, MAX_NESTING):
        raise RunDamaged(f"'{root / 'manifest.json'}' has settings nested more than {MAX_NESTING} deep; no run does.")
    return manifest


def _read_parts(root: Path) -> dict[int, RankPart]:
    parts = {}
    for name in list_names(root):
        if match := _RANK_FILE.fullmatch(name):
            rank = int(match[1])
            part = _decode(read_small_file(root, name, limit=_MAX_JSON), RankPart, root / name)
            if part.rank != rank:
                raise RunDamaged(f"'{root / name}' says it is of rank {part.rank}. Was it renamed or copied by hand?")
            parts[rank] = part
    return parts


def _find_segments(root: Path) -> list[tuple[int, int]]:
    """Every (step, rank) that has a folder. Other names in the run's folder are none of our business."""
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
                "  Without it the rest of the run has no meaning to us."
                if path.name == "manifest.json"
                else "  Move it away to read the calls without what it says of the rank."
            )
        ) from None
