"""Checks in processes of this machine, each of which takes one call after the other.

A process that dies, or is at a call for longer than the time limit, makes that call a failed one, and another process takes
its place. The processes are started afresh, with the environment of this one: what Python runs at its start (the
simulated device, for instance) is there in them too. Whatever happens here, Ctrl-C included, none is left at the end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait

import msgspec

from tensorprobe import errors
from tensorprobe.checks.messages import DONE, READY, Finished, Refusal, Start
from tensorprobe.checks.plan import Planned
from tensorprobe.errors import SettingsError, TensorprobeError

_PROGRAM = "import sys; sys.path[:] = {path!r}; from tensorprobe.checks.worker import serve; serve({descriptor})"
_START_S = 300.0
"""So long may a process take to import torch and to open the device and the run."""
_DEATH_S = 10.0
_TAIL = 4096

Take = Callable[[int, Finished], None]
"""Is given the number of a check and its outcome."""


def run_in_processes(
    checks: Sequence[tuple[int, Planned]],
    start: Start,
    *,
    jobs: int,
    time_limit_s: float,
    begin: Callable[[], None],
    take: Take,
) -> None:
    """Run the checks, at most `jobs` at once; `take` has each outcome as it comes, in any order.

    `begin` is called before every call is run: when the first is, settings, run and device are known to be good.
    """
    waiting = deque(checks)
    left = len(checks)
    workers: dict[Connection, _Worker] = {}
    try:
        while left:
            while len(workers) < min(jobs, left):
                worker = _Worker(start)
                workers[worker.connection] = worker
            busy = [worker for worker in workers.values() if not worker.idle]
            patience = max(0.0, min(worker.deadline for worker in busy) - time.monotonic())
            ready = wait([worker.connection for worker in busy], patience)
            for worker in busy:
                if worker.connection in ready:
                    outcome = worker.hear()
                elif worker.deadline <= time.monotonic():
                    outcome = worker.give_up(time_limit_s)
                else:
                    continue
                if outcome is not None:
                    take(*outcome)
                    left -= 1
                if worker.gone:
                    del workers[worker.connection]
                    worker.end()
                elif waiting:
                    begin()
                    worker.give(*waiting.popleft(), time_limit_s=time_limit_s)
    finally:
        for worker in workers.values():
            worker.end()


class _Worker:
    """One process, and the call it is at."""

    def __init__(self, start: Start) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  # closed in `end`
        self.connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM.format(path=sys.path, descriptor=theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                pass_fds=[theirs.fileno()],
            )
        self.deadline = time.monotonic() + _START_S
        self.gone = False
        self._device = start.device
        self._ready = False
        self._at: tuple[int, Planned] | None = None
        self._heard = 0
        with contextlib.suppress(OSError):  # it is gone already: `hear` will say so
            self.connection.send_bytes(msgspec.msgpack.encode(start))

    @property
    def idle(self) -> bool:
        return self._ready and self._at is None

    def give(self, number: int, planned: Planned, *, time_limit_s: float) -> None:
        """Let the process begin with a call."""
        self._at = (number, planned)
        self._heard = os.fstat(self._stderr.fileno()).st_size
        self.deadline = time.monotonic() + time_limit_s
        with contextlib.suppress(OSError):  # as above
            self.connection.send_bytes(msgspec.msgpack.encode(planned.task))

    def hear(self) -> tuple[int, Finished] | None:
        """Receive one message, or its end. The outcome of the call it was at, if that is over."""
        try:
            message = self.connection.recv_bytes()
        except (EOFError, OSError):
            return self._died(self._how_it_ended())
        kind, content = message[:1], message[1:]
        if kind == DONE:
            assert self._at is not None
            finished = msgspec.msgpack.decode(content, type=Finished)
            number, self._at = self._at[0], None
            self.gone = finished.ends
            return number, finished
        if kind == READY:
            self._ready = True
            return None
        raise _refusal(msgspec.msgpack.decode(content, type=Refusal), self._device, self._last_words())

    def give_up(self, time_limit_s: float) -> tuple[int, Finished] | None:
        """End a process that is at its call for too long; the outcome of the call."""
        self._process.kill()
        return self._died(f"did not end within {time_limit_s if self._at is not None else _START_S:g} s")

    def end(self) -> None:
        """End the process: at once when it is at work, else it goes by itself when nobody speaks to it any more."""
        if not self.idle:
            self._process.kill()
        self.connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # held fast by its device: it dies when that lets it go
            self._process.wait(_DEATH_S)
        self._stderr.close()

    def _died(self, how: str) -> tuple[int, Finished]:
        self.gone = True
        if self._at is None:
            last = self._last_words()
            raise SettingsError(
                f"no process could begin on device {self._device!r}: {how}." + (f"\n  {last}" if last else "")
            )
        number, planned = self._at
        last = self._last_words()
        return number, Finished(check=planned.task.without_figures("fail", f"{how}: {last}" if last else how))

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(_DEATH_S)
        except subprocess.TimeoutExpired:
            return "closed its pipe and did not end"
        if code >= 0:
            return f"the process ended with exit code {code}"
        perhaps = ", perhaps for lack of memory" if code == -signal.SIGKILL else ""
        return f"the process died with signal {-code} ({_signal_name(-code)}){perhaps}"

    def _last_words(self) -> str:
        """The last line that the process wrote to stderr since it began with the call."""
        self._stderr.seek(max(self._heard, os.fstat(self._stderr.fileno()).st_size - _TAIL))
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""


def _refusal(refusal: Refusal, device: str, last_words: str) -> TensorprobeError:
    """The error that a process told, with what may explain it."""
    kind = getattr(errors, refusal.kind, SettingsError)
    hint = f"\n  {last_words}" if last_words else ""
    if kind is SettingsError and f"device {device!r}" in refusal.message:
        hint += "\n  Calls run in processes of their own. If only this process knows the device, run them here: jobs=0 (--jobs 0)."
    found: TensorprobeError = kind(refusal.message + hint)
    return found


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
