"""Keeps our descriptors and processes out of the way of a program that does not know about them.

A program may close every descriptor it did not open, rely on the next free number, wait for any child, or handle SIGCHLD.
So our descriptors have high numbers, and we close them only while they are still ours. Our helper processes are no children
of the program and send no signal.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator

from tensorprobe.model.interrupts import let_through

try:
    import fcntl
    import resource
except ImportError:  # not a POSIX system
    fcntl = resource = None  # type: ignore[assignment]

_HIGHEST = 4096
"""Descriptors are put below this number: the system's table of them grows with the largest."""
_ROOM = 64

Identity = tuple[int, int]


class OwnFile:
    """A descriptor that belongs to us. It takes over `fd`, under another number unless told not to `move`."""

    def __init__(self, fd: int, *, move: bool = True) -> None:
        self.fd = _move_up(fd) if move else fd
        self._identity = _identity(self.fd)

    def close(self) -> None:
        """Close it, unless the program has, and the number now belongs to another file."""
        fd, self.fd = self.fd, -1
        if fd != -1 and _identity(fd) == self._identity:
            os.close(fd)

    def become(self, fd: int) -> None:
        """Close it and take over `fd` in its place."""
        self.close()
        OwnFile.__init__(self, fd)


def own_pipe() -> tuple[OwnFile, OwnFile]:
    """Return the reading and the writing end of a new pipe."""
    reading, writing = os.pipe()
    return OwnFile(reading), OwnFile(writing)


def _move_up(fd: int) -> int:
    if fcntl is None:
        return fd
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    highest = _HIGHEST if limit == resource.RLIM_INFINITY else min(limit, _HIGHEST)
    try:
        moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, max(highest - _ROOM, 3))
    except OSError as error:  # all of them are taken
        let_through(error)
        return fd
    os.close(fd)
    return moved


def _identity(fd: int) -> Identity | None:
    try:
        found = os.fstat(fd)
    except OSError as error:
        let_through(error)
        return None
    return found.st_dev, found.st_ino


@contextlib.contextmanager
def unseen_children() -> Iterator[None]:
    """Start and end child processes inside without a SIGCHLD to a handler of the program, if this is the main thread."""
    handler = signal.getsignal(signal.SIGCHLD) if hasattr(signal, "SIGCHLD") else None
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # blocking it would not do: other threads do not
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler)
        if _has_dead_child():  # one of the program's own, whose signal is lost
            os.kill(os.getpid(), signal.SIGCHLD)


def _has_dead_child() -> bool:
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


@contextlib.contextmanager
def files_of(nbytes: int) -> Iterator[None]:
    """Allow shared memory of this size inside, whatever the program's limit for file sizes is. OSError if that is impossible.

    The system counts such memory as a file. Growing one beyond the limit would end the process by a signal.
    """
    limits = None if resource is None else resource.getrlimit(resource.RLIMIT_FSIZE)
    if limits is None or limits[0] == resource.RLIM_INFINITY or limits[0] >= nbytes:
        yield
        return
    if limits[1] != resource.RLIM_INFINITY and limits[1] < nbytes:
        raise OSError("the limit for the size of files is smaller than the ring")
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits[1], limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def life_of(pid: int) -> Callable[[], bool]:
    """Return a function that says whether another process is still running."""
    try:
        handle = os.pidfd_open(pid)  # not confused by a zombie, nor by a new process with the old number
    except ProcessLookupError:
        return lambda: False
    except (OSError, AttributeError) as error:  # an old system
        let_through(error)
        return lambda: _exists(pid)
    ended = select.poll()
    ended.register(handle, select.POLLIN)
    return lambda: not ended.poll(0)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
