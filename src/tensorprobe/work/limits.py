"""Limits for a process that runs what a foreign file names: memory, sizes of files, and where it may write."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits for a process that runs what a foreign file names. Where the system has no such limit, nothing happens."""

    memory_bytes: int | None = None
    """Private memory beyond what the process has once it is ready. Allocations beyond it fail."""
    file_bytes: int | None = None
    """The size of any file that it writes, its stderr included."""
    read_only: bool = False
    """Whether it may write to its own scratch folder only."""


def apply(limits: Limits) -> None:
    """Set the limits of memory and of files for this process."""
    try:
        import resource
    except ImportError:  # Windows
        return
    if limits.memory_bytes is not None and sys.platform == "linux":
        _limit_memory(limits.memory_bytes)
    if limits.file_bytes is not None:
        _lower(resource.RLIMIT_FSIZE, limits.file_bytes)


@contextlib.contextmanager
def at_most(memory_bytes: int) -> Iterator[None]:
    """Limit the private memory of this process to so much more than it has now, where the system can do that."""
    if sys.platform != "linux":
        yield
        return
    import resource

    before, highest = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _limit_memory(memory_bytes)
    try:
        yield
    finally:
        allowed = resource.getrlimit(resource.RLIMIT_DATA)[0] - limit
        resource.setrlimit(resource.RLIMIT_DATA, (_more(before, allowed, highest), highest))


_is_limited = False


def allow_mapping(nbytes: int) -> None:
    """Allow for a file that is about to be mapped: Linux counts a private mapping as memory. For processes limited by us."""
    if not _is_limited:
        return
    import resource

    now, highest = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_more(now, nbytes, highest), highest))


def _more(limit: int, nbytes: int, highest: int) -> int:
    import resource

    if limit == resource.RLIM_INFINITY:
        return limit
    return limit + nbytes if highest == resource.RLIM_INFINITY else min(limit + nbytes, highest)


def _limit_memory(nbytes: int) -> int:
    """Limit private memory to so much more than there is. Return the limit."""
    import resource

    global _is_limited
    _is_limited = True
    _lower(resource.RLIMIT_DATA, int(Path("/proc/self/statm").read_text().split()[5]) * mmap.PAGESIZE + nbytes)
    return resource.getrlimit(resource.RLIMIT_DATA)[0]


def _lower(kind: int, most: int) -> None:
    import resource

    now, highest = resource.getrlimit(kind)
    most = min([most, *(each for each in (now, highest) if each != resource.RLIM_INFINITY)])
    resource.setrlimit(kind, (most, highest))


_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_WRITES = 0b1111111110010
"""Of the file rights of Landlock's first version: write, and make or remove files and folders of any kind."""
_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
"""Truncating is a right since its third version."""
_NO_NEW_PRIVILEGES = 38


def write_only_below(*places: Path) -> bool:
    """Deny this thread, and those it starts, to write outside of these folders and files; return whether the system could do that.

    Uses Landlock, which Linux has since 5.13. Files that are open already are not affected.
    """
    if sys.platform != "linux" or os.uname().machine not in ("x86_64", "aarch64"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    writes = _WRITES | (_TRUNCATE if libc.syscall(_LANDLOCK_CREATE, None, 0, 1) >= 3 else 0)
    rights = ctypes.c_uint64(writes)
    ruleset = libc.syscall(_LANDLOCK_CREATE, ctypes.byref(rights), ctypes.c_size_t(8), 0)
    if ruleset < 0:
        return False
    try:
        for place in places:
            opened = os.open(place, os.O_PATH | os.O_CLOEXEC)
            try:
                rule = _Rule(writes if place.is_dir() else writes & (_WRITE_FILE | _TRUNCATE), opened)
                if libc.syscall(_LANDLOCK_ADD, ruleset, 1, ctypes.byref(rule), 0):
                    return False
            finally:
                os.close(opened)
        return not libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) and not libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0)
    finally:
        os.close(ruleset)


class _Rule(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("rights", ctypes.c_uint64), ("folder", ctypes.c_int32)]
