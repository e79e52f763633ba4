"""Reading a file whole that somebody else may have made, and the words for a disk that cannot be written.

A file is looked at before it is opened: a pipe, a device or a folder is refused, so nothing here waits and nothing is endless.
A file of more than `max_read_bytes` is refused before it is read. Files that are read in pieces need no such limit: the
lines of a run (record/lines.py) and the bytes of tensors.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tensorprobe.errors import FileRefused, SettingsError
from tensorprobe.settings import parse_bytes

READ_LIMIT = "TENSORPROBE_MAX_READ_BYTES"
"""The environment variable with the largest size of a file that is read whole, as 2G."""
_MOST_READ = 512 << 20
OPEN_FLAGS = (
    os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
)  # a pipe that has taken the place of a file is opened without waiting for its other end
KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFREG: "a file",
}
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ADVICE = {
    **dict.fromkeys(_OF_THE_DISK, "Free some space, or choose another output folder."),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "Choose another output folder (-o)."),
}


def max_read_bytes() -> int:
    """Return the largest size of a file that is read whole."""
    return parse_bytes(os.environ.get(READ_LIMIT) or _MOST_READ, READ_LIMIT)


def read_file(path: str | os.PathLike[str], *, limit: int | None = None) -> bytes:
    """Return the content of a regular file, or of one that a link points to.

    FileNotFoundError when it is not there, another OSError when the system refuses, FileRefused when it is
    no regular file or has more than `limit` bytes (by default `max_read_bytes`).
    """
    demand_file(path)
    descriptor = os.open(path, OPEN_FLAGS)
    with os.fdopen(descriptor, "rb"):
        return read_descriptor(descriptor, path, limit=limit)


def demand_file(path: str | os.PathLike[str]) -> None:
    """Raise FileRefused unless `path` is a regular file, or a link to one."""
    kind = stat.S_IFMT(Path(path).stat().st_mode)
    if kind != stat.S_IFREG:
        raise FileRefused(f"'{os.fspath(path)}' is {KINDS.get(kind, 'a special file')}, not a file. It was not opened.")


def read_descriptor(descriptor: int, path: str | os.PathLike[str], *, limit: int | None = None) -> bytes:
    """Return the content of an open file; FileRefused as in `read_file`. `path` is for the error."""
    most = max_read_bytes() if limit is None else limit
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise FileRefused(f"'{os.fspath(path)}' is not a regular file. Nothing was read from it.")
    if found.st_size > most:
        how = "" if limit is not None else f"\n  If it is sound, allow more: {READ_LIMIT}={-(-found.st_size >> 20)}M"
        raise FileRefused(
            f"'{os.fspath(path)}' has {found.st_size:,} bytes; at most {most:,} are read. It was not read.{how}"
        )
    with open(descriptor, "rb", closefd=False) as file:
        return file.read(most)


def refusal(error: OSError) -> str:
    """Return what the system refused, and what to do about it, in words for a user."""
    place = f"'{error.filename}': " if error.filename is not None else ""
    advice = _ADVICE.get(error.errno or 0, "")
    return f"{place}{error.strerror or error}.{advice and f'{chr(10)}  {advice}'}"


@contextmanager
def writing(place: str | os.PathLike[str]) -> Iterator[None]:
    """Turn what the system refuses while files below `place` are written into a SettingsError that names the place."""
    try:
        yield
    except SettingsError:
        raise
    except OSError as error:
        said = os.fspath(place)
        advice = _ADVICE.get(error.errno or 0, "Choose another output folder (-o).")
        raise SettingsError(f"cannot write '{said}': {error.strerror or error}.\n  {advice}") from error
