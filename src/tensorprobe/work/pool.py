"""Tasks in processes of this machine: each takes one rank after the other.

The processes are started afresh and import only this package: the user's program is not run again in them, so a script
needs no guard around its main part. A process that dies is an error that names its rank. Whatever happens here,
Ctrl-C included, no process is left when `run_in_processes` is over.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait

from tensorprobe.engine.parcel import pack, perform, unpack
from tensorprobe.engine.rank_task import Progress, RankResult, RankTask
from tensorprobe.errors import CannotCompare

_TELL_S = 0.1
"""A worker tells its progress so often, not for each pair."""
_PROGRAM = "import sys; sys.path[:] = {path!r}; from tensorprobe.work.pool import serve; serve({descriptor})"
_PROGRESS, _DONE, _BUG = b"p", b"d", b"b"

Take = Callable[[int, RankResult, bytes], None]
"""Is given the number of a task, its result and its packed rows."""


def run_in_processes(
    tasks: Sequence[RankTask], jobs: int, *, rows: bool, take: Take, progress: Progress | None
) -> None:
    """Run the tasks, at most `jobs` at once; `take` has each outcome as it comes, in any order."""
    waiting = deque(enumerate(tasks))
    workers: dict[Connection, _Worker] = {}
    try:
        for _ in range(min(jobs, len(tasks))):
            worker = _Worker()
            workers[worker.connection] = worker
            worker.give(*waiting.popleft(), rows=rows)
        while busy := [connection for connection, worker in workers.items() if worker.task is not None]:
            for ready in wait(busy):
                worker = workers[ready]  # type: ignore[index]  # what `wait` gives are those it was given
                if not worker.hear(take, progress):
                    continue
                if waiting:
                    worker.give(*waiting.popleft(), rows=rows)
    finally:
        for worker in workers.values():
            worker.end()


class _Worker:
    """One process, and the task it is at."""

    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _PROGRAM.format(path=sys.path, descriptor=theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self.task: RankTask | None = None
        self._number = -1

    def give(self, number: int, task: RankTask, *, rows: bool) -> None:
        self._number, self.task = number, task
        try:
            self.connection.send_bytes(pack(task, rows=rows))
        except OSError:
            raise self._death() from None

    def hear(self, take: Take, progress: Progress | None) -> bool:
        """Receive one message; whether the task is done with it."""
        try:
            message = self.connection.recv_bytes()
            packed = self.connection.recv_bytes() if message[:1] == _DONE else b""
        except (EOFError, OSError):
            raise self._death() from None
        kind, content = message[:1], message[1:]
        if kind == _PROGRESS:
            if progress is not None:
                progress(int.from_bytes(content, "little"))
            return False
        if kind == _BUG:
            assert self.task is not None
            raise RuntimeError(f"comparing rank {self.task.rank} failed in a process:\n{content.decode()}")
        result, _ = unpack(content)
        self.task = None
        take(self._number, result, packed)
        return True

    def end(self) -> None:
        """End the process: at once when it is at work, else it goes by itself when nobody speaks to it any more."""
        if self.task is not None:
            self._process.kill()
        self.connection.close()
        self._process.wait()

    def _death(self) -> CannotCompare:
        assert self.task is not None
        code = self._process.wait()
        how = f"was ended by signal {-code} ({_signal_name(-code)})" if code < 0 else f"ended with exit code {code}"
        return CannotCompare(
            f"the process that compared rank {self.task.rank} {how}. Nothing was written.\n"
            "  If memory was short, use fewer --jobs; --jobs 1 compares in this process."
        )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def serve(descriptor: int) -> None:
    """The life of a worker: tasks come and outcomes go through the connection until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its workers itself
    with Connection(descriptor) as connection:
        told = _Told(connection)
        while True:
            try:
                parcel = connection.recv_bytes()
            except (EOFError, OSError):
                return
            try:
                outcome, rows = perform(parcel, told.add)
                told.tell()
            except BrokenPipeError:
                return  # the parent has gone: nobody waits for this any more
            except Exception:
                connection.send_bytes(_BUG + traceback.format_exc().encode())
                continue
            connection.send_bytes(_DONE + outcome)
            connection.send_bytes(rows)


class _Told:
    """Counts pairs and tells them now and then. To a parent that has gone this raises BrokenPipeError, which ends the task."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._count = 0
        self._next = time.monotonic() + _TELL_S

    def add(self, pairs: int) -> None:
        self._count += pairs
        if time.monotonic() >= self._next:
            self.tell()

    def tell(self) -> None:
        if self._count:
            self._connection.send_bytes(_PROGRESS + self._count.to_bytes(8, "little"))
        self._count = 0
        self._next = time.monotonic() + _TELL_S
