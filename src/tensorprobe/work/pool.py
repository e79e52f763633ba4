"""A pool of isolated processes on this machine. It knows nothing of what they compute.

In: the name of a function, bytes to start it with, and a parcel of bytes for each piece of work. Out: a reply of bytes for
each parcel, in the order in which they finish. Nothing is pickled. Processes are started afresh and import only this package:
the user's program does not run again in them, so a script needs no guard around its main part. Whatever happens,
Ctrl-C included, no process is left when `run_in_processes` returns or raises.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tensorprobe import errors
from tensorprobe.errors import TensorprobeError
from tensorprobe.files import demand_uncut, survive_cuts
from tensorprobe.work.limits import Limits, apply, write_only_below

_PROGRAM = "import sys; sys.path[:] = {path!r}; from tensorprobe.work.pool import serve; serve({descriptor})"
_START_S = 300.0
"""Time limit for a process to import torch and to open a device and a run."""
_HELD: list[subprocess.Popen[bytes]] = []
"""Killed processes that a device holds: they die when it lets go."""
_DEATH_S = 10.0
_REPLIES_PER_DEATH, _MOST_OF_A_KIND = 20, 2
_MOST_PATIENCE_S = 86400.0
"""The system counts milliseconds in 32 bits."""
_REPORT_S = 0.1
"""Interval at which a process reports progress."""
_TAIL_BYTES = 4096
_DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of Linux."""
_READY, _PROGRESS, _DONE, _LAST, _REFUSED, _BUG = b"r", b"p", b"d", b"l", b"x", b"b"

Progress = Callable[[int], None]


class Reply(NamedTuple):
    """What a process returns for one parcel."""

    content: bytes
    last: bool = False
    """Whether the process must end now, for example because its device no longer responds."""


Answer = Callable[[bytes], Reply]
Target = Callable[[bytes, Progress], AbstractContextManager[Answer]]
"""What a job names: given the start bytes and a progress callback, it opens a context that answers parcels."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the processes of a pool run."""

    target: str
    """`package.module:function` of a `Target`."""
    start: bytes = b""
    isolated: bool = True
    """Whether Python starts without the user's environment, site packages hooks included."""
    time_limit_s: float | None = None
    """For one parcel. A process that exceeds it is killed."""
    limits: Limits | None = None
    """What a process may do at most; None for no limits."""
    most_deaths: int | None = None
    """After that many deaths, and one more for each 20 replies, no parcel is sent any more: each of the rest counts as lost."""


@dataclass(frozen=True)
class Death:
    """How a process died while it worked on a parcel."""

    number: int
    """Position of the parcel."""
    how: str
    """A predicate: `ended with exit code 7`."""
    last_line: str
    """The last line it wrote to stderr while it worked on the parcel."""
    bug: str = ""
    """The traceback, if the target raised an unexpected exception."""
    begun: bool = True
    """False for a parcel that was not sent because too many before it were lost."""


class StartFailed(Exception):
    """A process died before it was ready for its first parcel."""


def run_in_processes(
    job: Job,
    parcels: Sequence[bytes],
    *,
    jobs: int,
    take: Callable[[int, bytes], None],
    died: Callable[[Death], None],
    begin: Callable[[], None] = lambda: None,
    progress: Progress | None = None,
    kinds: Sequence[str] = (),
) -> None:
    """Run all parcels, at most `jobs` at a time. `take` receives the number and the reply of each parcel as it finishes.

    `died` is called when a process dies. It either raises, which ends the pool, or records the parcel as lost; then another
    process takes over. `begin` is called before each parcel is sent, so the first call means that a process has
    started properly. Errors of the user (TensorprobeError) are raised here as they were raised there. StartFailed when a
    process never becomes ready. With `kinds`, one for each parcel, and a limit of deaths, a kind that was lost twice is not
    sent any more.
    """
    waiting = deque(enumerate(parcels))
    left = len(parcels)
    losses = _Losses(job.most_deaths, kinds)
    workers: dict[Connection, _Worker] = {}
    try:
        while left:
            while len(workers) < min(jobs, left):
                worker = _Worker(job)
                workers[worker.connection] = worker
            busy = [worker for worker in workers.values() if not worker.idle]
            patience = max(0.0, min(worker.deadline for worker in busy) - time.monotonic())
            ready = wait([worker.connection for worker in busy], min(patience, _MOST_PATIENCE_S))
            for worker in busy:
                if worker.connection in ready:
                    outcome = worker.hear(progress)
                elif worker.deadline <= time.monotonic():
                    outcome = worker.give_up()
                else:
                    continue
                if outcome is not None:
                    left -= 1
                    died(outcome) if isinstance(outcome, Death) else take(*outcome)
                    for death in losses.given_up(outcome, waiting):
                        left -= 1
                        died(death)
                if worker.gone:
                    del workers[worker.connection]
                    worker.end()
                elif worker.idle and waiting:
                    begin()
                    worker.give(*waiting.popleft())
    finally:
        for worker in workers.values():
            worker.end()


class _Losses:
    """What was lost, and which parcels are given up because of it."""

    def __init__(self, most: int | None, kinds: Sequence[str]) -> None:
        self._most, self._kinds = most, kinds
        self._done = 0
        self._lost: Counter[str] = Counter()

    def given_up(self, outcome: tuple[int, bytes] | Death, waiting: deque[tuple[int, bytes]]) -> list[Death]:
        """Take from `waiting` what is not worth a process after this outcome, and return it."""
        if self._most is None or not isinstance(outcome, Death):
            self._done += 1
            return []
        self._lost[self._kind(outcome.number)] += 1
        lost = self._lost.total()
        every = lost >= self._most + self._done // _REPLIES_PER_DEATH
        found = []
        for parcel in tuple(waiting):
            alike = self._lost[self._kind(parcel[0])]
            if every or (self._kinds and alike >= _MOST_OF_A_KIND):
                waiting.remove(parcel)
                why = f"{lost} before it" if every else f"{alike} of its kind"
                found.append(Death(parcel[0], f"was not begun: {why} were lost", "", begun=False))
        return found

    def _kind(self, number: int) -> str:
        return self._kinds[number] if self._kinds else ""


class _Worker:
    """One process and the parcel it works on."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  # closed in `end`
        self._scratch = tempfile.TemporaryDirectory() if job.limits else None
        self.connection, theirs = Pipe()
        flags = ["-I", "-S"] if job.isolated else []
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *flags, "-c", _PROGRAM.format(path=_absolute(sys.path), descriptor=theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                pass_fds=[theirs.fileno()],
                cwd=None if self._scratch is None else self._scratch.name,
                env=None if self._scratch is None else _environment(self._scratch.name),
            )
        self.deadline = time.monotonic() + _START_S
        self.gone = False
        self._ready = False
        self._number: int | None = None
        self._stderr_start = 0
        self._send(job.target.encode(), msgspec.msgpack.encode(job.limits), job.start)

    @property
    def idle(self) -> bool:
        return self._ready and self._number is None

    def give(self, number: int, parcel: bytes) -> None:
        """Send a parcel to the process."""
        self._number = number
        self._stderr_start = os.fstat(self._stderr.fileno()).st_size
        limit = self._job.time_limit_s
        self.deadline = float("inf") if limit is None else time.monotonic() + limit
        self._send(parcel)

    def hear(self, progress: Progress | None) -> tuple[int, bytes] | Death | None:
        """Receive one message. Return the outcome of the parcel if it is finished."""
        try:
            message = self.connection.recv_bytes()
        except (EOFError, OSError):
            return self._death(self._how_it_ended())
        kind, content = message[:1], message[1:]
        if kind in (_DONE, _LAST):
            assert self._number is not None
            number, self._number = self._number, None
            self.gone = kind == _LAST
            return number, content
        if kind == _READY:
            self._ready = True
        elif kind == _PROGRESS:
            if progress is not None:
                progress(int.from_bytes(content, "little"))
        elif kind == _BUG:
            return self._death("raised an exception", bug=content.decode())
        else:
            raise as_error(content, self._last_line())
        return None

    def give_up(self) -> Death:
        """Kill a process that has exceeded its time limit."""
        self._process.kill()
        limit = _START_S if self._number is None else self._job.time_limit_s
        return self._death(f"did not end within {limit:g} s")

    def end(self) -> None:
        """End the process: kill it if it is at work; otherwise it exits when its pipe closes."""
        if not self.idle:
            self._process.kill()
        self.connection.close()
        try:
            self._process.wait(_DEATH_S)
        except subprocess.TimeoutExpired:  # a busy machine, or a device that holds it
            self._process.kill()
            try:
                self._process.wait(_DEATH_S)
            except subprocess.TimeoutExpired:
                _HELD.append(self._process)
        self._stderr.close()
        if self._scratch is not None:
            self._scratch.cleanup()

    def _send(self, *messages: bytes) -> None:
        with contextlib.suppress(OSError):  # the process is gone: `hear` reports that
            for message in messages:
                self.connection.send_bytes(message)

    def _death(self, how: str, bug: str = "") -> Death:
        self.gone = True
        last = bug.strip().splitlines()[-1] if bug else self._last_line()
        if self._number is None:
            raise StartFailed(f"{how}." + (f"\n  {last}" if last else ""))
        return Death(self._number, how, last, bug)

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(_DEATH_S)
        except subprocess.TimeoutExpired:
            return "closed its pipe and did not end"
        if code >= 0:
            return f"ended with exit code {code}"
        if code == -getattr(signal, "SIGPROF", code):
            return "used more processor time than its tensors explain"
        perhaps = ", perhaps because memory ran out" if code == -signal.SIGKILL else ""
        return f"was killed by signal {-code} ({_signal_name(-code)}){perhaps}"

    def _last_line(self) -> str:
        """The last line that the process wrote to stderr since it received its parcel."""
        self._stderr.seek(max(self._stderr_start, os.fstat(self._stderr.fileno()).st_size - _TAIL_BYTES))
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""


def _absolute(folders: Sequence[str]) -> list[str]:
    """Return folders that mean the same in another working folder."""
    return [str(Path(folder).absolute()) for folder in folders]


def _environment(scratch: str) -> dict[str, str]:
    found = {**os.environ, "TMPDIR": scratch}
    if "PYTHONPATH" in found:
        found["PYTHONPATH"] = os.pathsep.join(_absolute(found["PYTHONPATH"].split(os.pathsep)))
    return found


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def processors() -> int:
    """The number of processors that this process may use: a batch system often grants fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def pack(value: Any) -> bytes:
    """Return a struct as bytes for another process. In texts, what is not Unicode, as the path of a file may be, becomes escapes."""
    try:
        return msgspec.msgpack.encode(value)
    except UnicodeEncodeError:
        return msgspec.msgpack.encode(_escaped(msgspec.to_builtins(value, builtin_types=(bytes,))))


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_escaped(key): _escaped(held) for key, held in value.items()}
    return [_escaped(held) for held in value] if isinstance(value, (list, tuple)) else value


class _Refusal(msgspec.Struct, frozen=True):
    kind: str
    message: str


def as_bytes(error: TensorprobeError) -> bytes:
    """An error of the user, to be raised again in another process."""
    return pack(_Refusal(type(error).__name__, str(error)))


def as_error(packed: bytes, last_line: str = "") -> TensorprobeError:
    """The error that `as_bytes` packed, followed by what the process wrote last."""
    refusal = msgspec.msgpack.decode(packed, type=_Refusal)
    kind: Any = getattr(errors, refusal.kind, TensorprobeError)
    error: TensorprobeError = kind(refusal.message + (f"\n  {last_line}" if last_line else ""))
    return error


def resolve(target: str) -> Target:
    """The function behind `package.module:function`; only this package has targets."""
    module, _, name = target.partition(":")
    if module.partition(".")[0] != "tensorprobe":
        raise ValueError(f"{target!r} is not a function of tensorprobe")
    found: Target = getattr(import_module(module), name)
    return found


def serve(descriptor: int) -> None:
    """Run the loop of a process: answer parcels until the other end closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its processes itself
    if sys.platform == "linux":
        # A parcel that hangs never looks at the pipe. If the parent is killed, this process must end all the same.
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    with Connection(descriptor) as connection:
        try:
            _serve(connection)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return  # the parent is gone
        except TensorprobeError as error:
            connection.send_bytes(_REFUSED + as_bytes(error))
        except Exception:
            connection.send_bytes(_BUG + traceback.format_exc().encode(errors="backslashreplace"))


def _serve(connection: Connection) -> None:
    target = connection.recv_bytes().decode()
    limits = msgspec.msgpack.decode(connection.recv_bytes(), type=Limits | None)
    start = connection.recv_bytes()
    report = _Report(connection)
    survive_cuts()
    if limits is not None and limits.read_only:
        write_only_below(Path.cwd(), Path("/dev/null"))  # before other threads exist: they inherit it
    with resolve(target)(start, report.add) as answer:
        if limits is not None:
            apply(limits)
        connection.send_bytes(_READY)
        last = False
        while not last:
            content, last = answer(connection.recv_bytes())
            demand_uncut()
            report.send()
            connection.send_bytes((_LAST if last else _DONE) + content)


class _Report:
    """Adds up progress and sends it now and then. If the parent is gone, BrokenPipeError ends the work."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._count = 0
        self._next = time.monotonic() + _REPORT_S

    def add(self, count: int) -> None:
        self._count += count
        if time.monotonic() >= self._next:
            self.send()

    def send(self) -> None:
        if self._count:
            self._connection.send_bytes(_PROGRESS + self._count.to_bytes(8, "little"))
        self._count = 0
        self._next = time.monotonic() + _REPORT_S
