"""The folder of a run, made or refused before anything is recorded.

Ranks do not communicate here: each makes its own part, and the first rank makes the manifest.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
import shutil
import socket
import threading
from pathlib import Path
from typing import Any

import msgspec

from tensorprobe.errors import CannotWrite, RunDamaged, RunExists
from tensorprobe.files import replace_file
from tensorprobe.model.interrupts import ignoring, let_through
from tensorprobe.model.manifest import FORMAT_NAME, FORMAT_VERSION, Manifest, RankPart
from tensorprobe.record.step_files import hold
from tensorprobe.version import VERSION

_OURS = re.compile(r"(manifest\.json|rank\d+\.json|step\d+|process\d+|attempt\d+)\Z")


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
        raise RunExists(_TAKEN.format(str(run), rank))


def check_writable(run: Path) -> None:
    """Raise CannotWrite when a folder cannot be made there, or files in it. What this makes is removed again."""
    made: list[Path] = []
    try:
        for folder in (*reversed(run.parents), run):
            if not folder.exists():
                folder.mkdir()
                made.append(folder)
        trial = run / f".rank.{os.getpid()}"
        trial.write_bytes(b"")
        trial.unlink()
    except OSError as error:
        let_through(error)
        raise CannotWrite(f"cannot write into {str(run)!r}: {error.strerror or error}.") from None
    finally:
        for folder in reversed(made):
            with ignoring(OSError):  # somebody else uses it already
                folder.rmdir()


def _claim(run: Path, rank: int, *, overwrite: bool) -> int:
    """Put this rank's part in place, not closed, and return it open and locked. Raise RunExists when another process has it.

    The lock is on the part itself and ends with the process that writes it.
    """
    path = run / f"rank{rank}.json"
    part = RankPart(rank=rank, pid=os.getpid(), host=socket.gethostname())
    new = run / f".rank{rank}.json.{os.getpid()}.{threading.get_ident()}"
    new.write_bytes(msgspec.json.format(msgspec.json.encode(part), indent=1) + b"\n")
    mine = os.open(new, os.O_RDONLY)
    try:
        try:
            hold(mine)
            _put(new, path, overwrite=overwrite)
        finally:
            new.unlink(missing_ok=True)
    except BaseException:
        os.close(mine)
        raise
    return mine


def _put(new: Path, path: Path, *, overwrite: bool) -> None:
    """Give a part its name, where nobody has it or whoever has may be replaced."""
    run, rank = str(path.parent), int(path.stem.removeprefix("rank"))
    while True:
        try:
            return os.link(new, path)
        except FileExistsError:
            pass
        except OSError as error:  # a file system without links
            let_through(error)
            if not path.exists():
                new.replace(path)
                return None
        if not overwrite:
            raise RunExists(_TAKEN.format(run, rank))
        with ignoring(FileNotFoundError):
            old = os.open(path, os.O_RDONLY)
            try:
                if not hold(old):
                    raise RunExists(_BUSY.format(run, rank))
                if os.path.samestat(os.fstat(old), path.stat()):  # else another process has just replaced it
                    new.replace(path)
                    return None
            finally:
                os.close(old)


_TAKEN = (
    "{!r} already holds a run with rank {}. Nothing was written.\n"
    "  Pass another folder, or overwrite=True (--overwrite) to replace it."
)
_BUSY = "{!r}: another process is writing rank {} of this run now. Nothing was written.\n  Pass another folder."


def make_run(
    run: Path,
    rank: int,
    world_size: int,
    *,
    torch_version: str,
    settings: dict[str, Any],
    provenance: dict[str, Any] | None = None,
    overwrite: bool = True,
) -> int:
    """Make the folder, this rank's part, not closed, and the manifest if nobody has yet. What this rank left before is removed.

    Return the part, open and locked: it belongs to the process that has it open.
    """
    try:
        run.mkdir(parents=True, exist_ok=True)
        claim = _claim(run, rank, overwrite=overwrite)
    except RunExists:
        raise
    except OSError as error:
        let_through(error)
        raise CannotWrite(f"cannot write into {str(run)!r}: {error.strerror or error}.") from None
    try:
        _remove_steps(run, rank)
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
            provenance=provenance or {},
        )
        path = run / "manifest.json"
        if rank == 0 or not path.exists():
            replace_file(path, msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")
    except BaseException:
        os.close(claim)
        raise
    return claim


def _remove_steps(run: Path, rank: int) -> None:
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
            part.unlink(missing_ok=True)
            _remove_steps(run, int(number))


def note_exit_code(run: Path, code: int) -> None:
    """Add to the manifest how the captured command ended. RunDamaged if something else stands there by now."""
    path = run / "manifest.json"
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except msgspec.DecodeError as error:
        raise RunDamaged(f"{str(path)!r} was changed while the command ran: {error}.") from None
    manifest = msgspec.structs.replace(manifest, exit_code=code)
    replace_file(path, msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")


def attempt_place(run: Path) -> Path:
    """Return the folder for this process: the run's own, or `attempt1`, `attempt2`, … in it after torchrun restarted its workers."""
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return run / f"attempt{int(restarts)}" if restarts.isdecimal() and int(restarts) else run


def own_place(run: Path) -> Path:
    """Return a folder inside the run's for a process of the same command whose rank is unknown or already taken."""
    return run / f"process{os.getpid()}"


def other_places(run: Path) -> list[Path]:
    """Return the folders of such processes."""
    return _numbered(run, "process")


def attempts(run: Path) -> list[Path]:
    """Return the attempts after the first. Each is a run of its own."""
    return _numbered(run, "attempt")


def _numbered(run: Path, kind: str) -> list[Path]:
    found = [
        path for path in run.glob(f"{kind}*") if _OURS.match(path.name) and path.is_dir() and not path.is_symlink()
    ]
    return sorted(found, key=lambda path: int(path.name.removeprefix(kind)))


def put_training_first(run: Path) -> None:
    """Exchange two records if the first process that called a module only evaluated it, and another one trained."""
    for place in other_places(run):
        for part in place.glob("rank*.json"):
            rank = part.stem.removeprefix("rank")
            if rank.isdigit() and _trained(place, rank) and not _trained(run, rank):
                aside = place / ".rank-exchanged"
                _move_rank(run, aside, rank)
                _move_rank(place, run, rank)
                _move_rank(aside, place, rank)
                aside.rmdir()


def _trained(run: Path, rank: str) -> bool:
    """Return whether a backward was recorded."""
    for calls in run.glob(f"step*/rank{rank}/calls.jsonl"):
        with calls.open("rb") as lines:
            if any(b".backward" in line for line in lines):
                return True
    return False


def _move_rank(source: Path, target: Path, rank: str) -> None:
    target.mkdir(exist_ok=True)
    for folder in list(source.glob(f"step*/rank{rank}")):
        step = target / folder.parent.name
        step.mkdir(exist_ok=True)
        folder.rename(step / folder.name)
        with ignoring(OSError):  # other ranks have this step too
            folder.parent.rmdir()
    (source / f"rank{rank}.json").rename(target / f"rank{rank}.json")
