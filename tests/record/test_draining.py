"""Reading waits for a recorder that is emptying its buffers after its trainer died, and for nobody else."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorprobe.record import draining, open_run
from tests.builders.runs import write_rank, write_run

GOOD = b'{"name":"Torch.mm.0.forward"}\n'


@pytest.fixture
def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[int]:
    """A run whose open part is locked, as by its recorder; gives the descriptor that holds the lock."""
    write_run(tmp_path, GOOD)
    descriptor = os.open(tmp_path / "rank0.json", os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time that passes only when somebody waits."""
    waited: list[float] = []

    class Clock:
        @staticmethod
        def sleep(seconds: float) -> None:
            waited.append(seconds)

        @staticmethod
        def monotonic() -> float:
            return sum(waited)

    monkeypatch.setattr(draining, "time", Clock)
    assert time is not draining.time
    return waited


def test_waiting_ends_when_the_recorder_is_done(
    tmp_path: Path, locked: int, dead_pid: int, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rank(tmp_path, pid=dead_pid, host=socket.gethostname(), closed=False)

    def finish(seconds: float) -> None:
        pauses.append(seconds)
        with (tmp_path / "step0" / "rank0" / "calls.jsonl").open("ab") as calls:
            calls.write(b'{"name":"Torch.mm.1.forward"}\n')
        write_rank(tmp_path, closed=True)
        fcntl.flock(locked, fcntl.LOCK_UN)

    monkeypatch.setattr(draining.time, "sleep", finish)
    run = open_run(tmp_path)
    assert (len(pauses), run.closed, len(run.names(0, 0))) == (1, True, 2)


def test_waiting_has_an_end(tmp_path: Path, locked: int, dead_pid: int, pauses: list[float]) -> None:
    write_rank(tmp_path, pid=dead_pid, host=socket.gethostname(), closed=False)
    run = open_run(tmp_path)
    assert draining.PATIENCE_S <= sum(pauses) < draining.PATIENCE_S + 1
    assert (run.closed, len(run.names(0, 0))) == (False, 1)


@pytest.mark.parametrize("why", ["closed", "trainer alive", "other machine"])
def test_nobody_waits_otherwise(why: str, tmp_path: Path, locked: int, dead_pid: int, pauses: list[float]) -> None:
    write_rank(
        tmp_path,
        pid=os.getpid() if why == "trainer alive" else dead_pid,
        host="elsewhere" if why == "other machine" else socket.gethostname(),
        closed=why == "closed",
    )
    assert len(open_run(tmp_path).names(0, 0)) == 1
    assert pauses == []


def test_nobody_waits_for_a_file_without_lock(tmp_path: Path, dead_pid: int, pauses: list[float]) -> None:
    write_run(tmp_path, GOOD, pid=dead_pid, host=socket.gethostname(), closed=False)
    assert len(open_run(tmp_path).names(0, 0)) == 1
    assert pauses == []


def test_process_at_work_is_told_from_one_that_is_gone(tmp_path: Path, dead_pid: int) -> None:
    write_run(tmp_path, GOOD, pid=os.getpid(), host=socket.gethostname(), closed=False)
    assert draining.trainer_is_alive(open_run(tmp_path).parts[0])
    write_rank(tmp_path, pid=dead_pid, host=socket.gethostname(), closed=False)
    assert not draining.trainer_is_alive(open_run(tmp_path).parts[0])
