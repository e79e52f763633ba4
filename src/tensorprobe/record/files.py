"""Open the files of a run without trusting the run.

In: the run's folder and the names of what lies below it. Out: file descriptors of regular files, and names in folders.
A symbolic link below the run's folder, a pipe, a socket or a device is refused before it is opened, so nothing here
blocks and nothing outside the run is read. The run's folder itself may be a link: the user chose it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tensorprobe.errors import FileRefused, RunDamaged, RunError, RunNotFound
from tensorprobe.files import KINDS, OPEN_FLAGS, read_descriptor

_FILE_FLAGS = OPEN_FLAGS | getattr(os, "O_NOFOLLOW", 0)
_FOLDER_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
_RELATIVE = os.open in os.supports_dir_fd and os.stat in os.supports_dir_fd


def open_file(root: Path, *parts: str) -> int:
    """Return a descriptor, for reading, of the regular file `root/parts...`.

    FileNotFoundError when it is not there, RunDamaged when it or a folder on the way is anything but what it should be.
    """
    with _readable(root.joinpath(*parts)), _folder(root, parts[:-1]) as (folder, base):
        path = parts[-1] if folder is not None else str(base / parts[-1])
        found = os.stat(path, dir_fd=folder, follow_symlinks=False)
        _demand(found.st_mode, stat.S_IFREG, base / parts[-1])
        descriptor = os.open(path, _FILE_FLAGS, dir_fd=folder)
    # Something else may have taken the name between the check and the opening.
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise RunDamaged(f"'{base / parts[-1]}' was replaced while it was opened. Nothing was read from it.")
    return descriptor


def read_whole(root: Path, *parts: str, limit: int | None = None) -> bytes:
    """Return the content of a file of the run. RunDamaged if it has more than `limit` bytes (by default `max_read_bytes`)."""
    descriptor = open_file(root, *parts)
    with os.fdopen(descriptor, "rb"):
        try:
            return read_descriptor(descriptor, root.joinpath(*parts), limit=limit)
        except FileRefused as error:
            raise RunDamaged(str(error)) from None


def list_names(root: Path, *parts: str) -> list[str]:
    """Return the sorted names in the folder `root/parts...`; raise RunDamaged when it is not a folder."""
    with _readable(root.joinpath(*parts)), _folder(root, parts) as (folder, base):
        return sorted(os.listdir(base if folder is None else folder))  # noqa: PTH208 (a descriptor is no Path)


def demand_folder(root: Path, *parts: str) -> None:
    """Raise RunDamaged unless `root/parts...` is a real folder, not a link to one."""
    with _folder(root, parts):
        pass


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Convert a refusal of the system to a RunError that names the file."""
    try:
        yield
    except PermissionError:
        raise RunError(
            f"'{path}' cannot be read by this user. Ask its owner for access, or for a copy of the run."
        ) from None


@contextmanager
def _folder(root: Path, parts: tuple[str, ...]) -> Iterator[tuple[int | None, Path]]:
    """Yield a descriptor of the folder `root/parts...` (None if the system has no openat) and its path."""
    base = root
    if not _RELATIVE:
        for part in parts:
            base = base / part
            _demand(os.lstat(base).st_mode, stat.S_IFDIR, base)
        yield None, base
        return
    descriptor = os.open(root, _FOLDER_FLAGS & ~getattr(os, "O_NOFOLLOW", 0))
    try:
        for part in parts:
            base = base / part
            _demand(os.stat(part, dir_fd=descriptor, follow_symlinks=False).st_mode, stat.S_IFDIR, base)
            below = os.open(part, _FOLDER_FLAGS, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
        yield descriptor, base
    finally:
        os.close(descriptor)


def _demand(mode: int, kind: int, path: Path) -> None:
    found = stat.S_IFMT(mode)
    if found != kind:
        raise RunDamaged(
            f"'{path}' is {KINDS.get(found, 'a special file')}, where a run has {KINDS[kind]}. "
            "It was not opened: a run may not point outside itself."
        )


def demand_run_folder(path: Path) -> None:
    """Raise RunNotFound unless `path` is a folder, or a link to one."""
    if not path.exists():
        raise RunNotFound(f"no folder '{path}'.")
    if not path.is_dir():
        raise RunNotFound(f"'{path}' is not a folder; a run is a folder with a manifest.json.")
