"""What the recorder writes when it writes an older tool's dump, and how the place for it is prepared.

A target is plain data: it is sent to the recorder's process. A dump has one writer at a time. Two processes that both took
themselves for rank 0 would leave the pkl of one beside the values of the other.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Literal

import msgspec

from tensorprobe.errors import RunExists

try:
    import fcntl
except ImportError:  # Windows has no flock
    fcntl = None  # type: ignore[assignment]

_PATIENCE_S = 10.0
"""How long to wait for the recorder of a program that has died."""
_PAUSE_S = 0.02


class PtdbgTarget(msgspec.Struct, frozen=True, tag="ptdbg"):
    """The dump of ptdbg_ascend: a pkl of JSON lines, and a folder with a .npy for each of them."""

    pkl: str
    folder: str | None
    """None: no values, only what the pkl says."""
    everything: bool = False
    """Also integer and bool tensors, and numbers among the arguments."""
    stacks: bool = False
    dump_step: int = 1


class KernelTarget(msgspec.Struct, frozen=True, tag="acl"):
    """A .npy for each tensor of each ATen call, named as the dumps of the Ascend runtime are."""

    folder: str


MSPROBE_PARTS = ("forward.input", "forward.output", "backward.input", "backward.output")


class MsprobeTarget(msgspec.Struct, frozen=True, tag="msprobe"):
    """The dump of msprobe, of one rank in one step: dump.json, stack.json, construct.json, and a file for each tensor."""

    folder: str
    """`…/step0/rank0`."""
    task: str
    level: str
    values: Literal["pt", "npy"] | None = None
    values_of: tuple[str, ...] = ()
    """Values only of calls with one of these in their names; of all when there are none."""
    digests: bool = False
    """Also what msprobe calls md5: the CRC-32 of the values."""
    rounded: bool = True
    """Mean and norm are rounded to the tensor's dtype, as msprobe's are."""
    parents: bool = False
    parts: tuple[str, ...] = MSPROBE_PARTS
    """What of a call is dumped."""
    continued: bool = False
    """Go on in the dump that is there."""
    index: str = "dump.json"


Target = PtdbgTarget | KernelTarget | MsprobeTarget

TOOL = "tensorprobe"
"""Stands in the head of our dump.json: gradients are those of whole calls then."""
MSPROBE_VALUES = "dump_tensor_data"
_VALUES = (".npy", ".pt")


def prepare_target(target: Target) -> int:
    """Remove an earlier dump, make the folder, and return an open descriptor that locks it, or -1 without file locks.

    The caller closes the descriptor; until then no other process can start a dump there. RunExists if the folder holds
    files that do not belong to a dump.
    """
    lock = -1
    if isinstance(target, MsprobeTarget):
        return _prepare_msprobe(target)
    if isinstance(target, PtdbgTarget):
        pkl = Path(target.pkl)
        if pkl.is_dir():
            raise RunExists(f"{target.pkl!r} is a folder; it is to become the pkl of a dump. Choose another name.")
        pkl.parent.mkdir(parents=True, exist_ok=True)
        lock = _hold(pkl)
        try:
            # The folder goes even when the new dump has none: its files would be taken for those of the new pkl.
            _remove_arrays(pkl.with_suffix("") if target.folder is None else Path(target.folder))
            os.truncate(pkl, 0)  # a dump in which nothing was met is an empty one, not an absent one
        except BaseException:
            _let_go(lock)
            raise
    if target.folder is not None:
        Path(target.folder).mkdir(parents=True, exist_ok=True)
    return lock


def _prepare_msprobe(target: MsprobeTarget) -> int:
    from tensorprobe.legacy.layouts.msprobe_json import open_dump

    folder = Path(target.folder)
    folder.mkdir(parents=True, exist_ok=True)
    lock = _hold(folder / target.index)
    try:
        if not target.continued:
            _remove_arrays(folder / MSPROBE_VALUES)
            os.truncate(folder / target.index, 0)
            for name in ("stack.json", "construct.json"):
                (folder / name).unlink(missing_ok=True)
        open_dump(target).close()  # a reader finds valid JSON from the start
        if target.values is not None:
            (folder / MSPROBE_VALUES).mkdir(exist_ok=True)
    except BaseException:
        _let_go(lock)
        raise
    return lock


_FILES = ("dump.json", "debug.json", "stack.json", "construct.json", MSPROBE_VALUES)


def remove_ended(folder: Path) -> None:
    """Remove the dumps that earlier processes left beside `folder`, which has the name `proc{pid}`.

    A dump whose process is alive stays, and so does a folder with files of another kind.
    """
    for other in folder.parent.glob("proc[0-9]*"):
        number = other.name.removeprefix("proc")
        if other == folder or not number.isdecimal() or other.is_symlink() or _is_alive(int(number)):
            continue
        if {entry.name for entry in other.iterdir()} <= {*_FILES}:
            _remove_arrays(other / MSPROBE_VALUES)
            shutil.rmtree(other)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _hold(pkl: Path) -> int:
    """Create the file if it is missing and lock it. An existing file is kept: the lock is on the file, not on its name."""
    if pkl.is_symlink():
        pkl.unlink()
    descriptor = os.open(pkl, os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + _PATIENCE_S
    while fcntl is not None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise RunExists(
                    f"'{pkl}' is being written by another process. Nothing was changed.\n"
                    "  Give each process a rank of its own, or a path of its own."
                ) from None
            time.sleep(_PAUSE_S)
        except OSError:
            break  # a file system without locks
        else:
            return descriptor
    os.close(descriptor)
    return -1


def _let_go(lock: int) -> None:
    if lock != -1:
        os.close(lock)


def _remove_arrays(folder: Path) -> None:
    if not folder.exists() and not folder.is_symlink():
        return
    if folder.is_symlink() or not folder.is_dir():
        raise RunExists(f"'{folder}' is not a folder; the values of a dump go there. Choose another name for the dump.")
    foreign = sorted(entry.name for entry in folder.iterdir() if entry.suffix not in _VALUES or entry.is_dir())
    if foreign:
        raise RunExists(
            f"'{folder}' holds what is no dump's: {', '.join(foreign[:5])}. Nothing was removed.\n"
            "  Move it away, or choose another name for the dump."
        )
    shutil.rmtree(folder)
