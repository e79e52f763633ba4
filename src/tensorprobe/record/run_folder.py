"""The folder of a run, made or refused before anything is recorded.

Ranks do not talk to each other here: each makes what is its own, and the first rank makes the manifest.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
import shutil
import socket
from pathlib import Path
from typing import Any

import msgspec

from tensorprobe.errors import RunExists
from tensorprobe.model.manifest import FORMAT_NAME, FORMAT_VERSION, Manifest, RankPart
from tensorprobe.record.step_files import replace_file, write_part
from tensorprobe.version import VERSION

_OURS = re.compile(r"(manifest\.json|rank\d+\.json|step\d+)\Z")


def refuse_existing(run: Path, rank: int, *, overwrite: bool) -> None:
    """Raise RunExists when the folder holds this rank's run already, or files that do not belong to a run."""
    if not run.exists():
        return
    if not run.is_dir():
        raise RunExists(f"{str(run)!r} is a file, not a folder. Pass a folder that does not exist yet.")
    foreign = sorted(entry.name for entry in run.iterdir() if not _OURS.match(entry.name))
    foreign = [name for name in foreign if not name.startswith(".rank") and not name.startswith(".manifest")]
    if foreign:
        raise RunExists(
            f"{str(run)!r} holds files that do not belong to a run: {', '.join(foreign[:5])}. Nothing was written.\n"
            "  Pass a folder that does not exist yet."
        )
    if (run / f"rank{rank}.json").exists() and not overwrite:
        raise RunExists(
            f"{str(run)!r} already holds a run with rank {rank}. Nothing was written.\n"
            "  Pass another folder, or overwrite=True (--overwrite) to replace it."
        )


def make_run(run: Path, rank: int, world_size: int, *, torch_version: str, settings: dict[str, Any]) -> None:
    """Make the folder, the manifest unless it exists, and this rank's part, not closed. Remove what this rank left before."""
    run.mkdir(parents=True, exist_ok=True)
    _remove_rank(run, rank)
    if rank == 0:
        _remove_ranks_beyond(run, world_size)
    manifest = Manifest(
        format=FORMAT_NAME,
        version=FORMAT_VERSION,
        tool=VERSION,
        torch=torch_version,
        python=platform.python_version(),
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        world_size=world_size,
        settings=settings,
    )
    path = run / "manifest.json"
    if rank == 0 or not path.exists():
        replace_file(path, msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")
    write_part(run, RankPart(rank=rank, pid=os.getpid(), host=socket.gethostname()))


def _remove_rank(run: Path, rank: int) -> None:
    (run / f"rank{rank}.json").unlink(missing_ok=True)
    for step in run.glob("step*"):
        folder = step / f"rank{rank}"
        if folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder)
        if step.is_dir() and not any(step.iterdir()):
            step.rmdir()


def _remove_ranks_beyond(run: Path, world_size: int) -> None:
    """Remove ranks of an earlier, larger run, which would look like ranks of this one."""
    for part in run.glob("rank*.json"):
        number = part.stem.removeprefix("rank")
        if number.isdigit() and int(number) >= world_size:
            _remove_rank(run, int(number))


def read_part(run: Path, rank: int) -> RankPart | None:
    """Return a rank's part from disk; None when it is missing or incomplete."""
    try:
        return msgspec.json.decode((run / f"rank{rank}.json").read_bytes(), type=RankPart)
    except (OSError, msgspec.DecodeError):
        return None
