"""Reading a file whole that somebody else may have made, writing one whole, and the words for a disk that cannot be written.

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
from typing import Any

import msgspec

from tensorprobe.errors import FileRefused, RunDamaged, SettingsError
from tensorprobe.settings import parse_bytes

try:
    from tensorprobe import _fast
except ImportError:  # not built
    _fast = None

READ_LIMIT = "TENSORPROBE_MAX_READ_BYTES"
"""The environment variable with the largest size of a file that is read whole, as 2G."""
_MOST_READ, _MOST_SETTINGS, _MOST_TOML = 512 << 20, 16 << 20, 256 << 10
_MOST_DOTS = 200
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


def read_settings(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a file that a person writes: rules, a map, a configuration. Raises as `read_file` does."""
    return read_file(path, limit=_MOST_SETTINGS)


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content of a TOML file. ValueError when it is none, and as `read_file`."""
    raw = read_file(path, limit=_MOST_TOML)
    if any(line.count(b".") > _MOST_DOTS for line in raw.splitlines()):
        raise ValueError(f"a line has more than {_MOST_DOTS} dots")  # a key of n parts needs memory of n x n
    try:
        content: dict[str, Any] = msgspec.toml.decode(raw)
    except (msgspec.DecodeError, RecursionError, ImportError) as error:  # before Python 3.11, it needs tomli
        raise ValueError(str(error)) from None
    return content


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
        return file.read(found.st_size)


class Replacement:
    """A file that takes the place of `path` when it is complete: `with Replacement(path) as unfinished: ...`.

    If the block raises, `path` is as it was and nothing else is left. A device or a pipe is written to directly: as
    root, a new file would take its place.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = self.unfinished = Path(path)
        if self._path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if self._path.is_file() or not self._path.exists():
            self.unfinished = self._path.with_name(f".{self._path.name[:100]}.{os.getpid()}.partial")

    def __enter__(self) -> Path:
        return self.unfinished

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if kind is None and self.unfinished != self._path:
                self.unfinished.replace(self._path)
        finally:
            if self.unfinished != self._path:
                self.unfinished.unlink(missing_ok=True)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old one or the new one, never half of one."""
    with Replacement(path) as unfinished:
        unfinished.write_bytes(content)


def survive_cuts() -> None:
    """From now on, reading a mapped file that another process cuts short does not end this one; see `demand_uncut`.

    This is for processes of our own: it replaces the handler of SIGBUS. Without the C extension nothing changes.
    """
    if _fast is not None and hasattr(_fast, "survive_cuts"):
        _fast.survive_cuts()


def demand_uncut() -> None:
    """Raise RunDamaged if a mapped file was cut short while this process read it: zeros were read in place of its bytes."""
    if _fast is not None and hasattr(_fast, "cuts") and _fast.cuts():
        raise RunDamaged(
            "a file was cut short while it was read, so there is no result.\n"
            "  Is the run still being copied or deleted? Try again when that is done."
        )


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
