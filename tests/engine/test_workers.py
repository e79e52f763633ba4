"""Processes of this machine: errors come out as they are, a process that dies is named, none is left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tensorprobe.engine import compare
from tensorprobe.errors import CannotCompare, RunDamaged
from tensorprobe.work import pool as workers
from tests.builders.ranks import listed, write_pair

OWN_PERFORM = """
import sys; sys.path[:] = {path!r}
import os, signal, msgspec
from contextlib import contextmanager
from tensorprobe.engine import tasks
from tensorprobe.work import pool
real = tasks.answer_tasks
@contextmanager
def answer_tasks(start, progress):
    with real(start, progress) as answer:
        def act(parcel):
            if msgspec.msgpack.decode(parcel)["task"]["rank"] == 1:
                ACT
            return answer(parcel)
        yield act
tasks.answer_tasks = answer_tasks
pool.serve({descriptor})
"""
"""A worker that does something else when it is given rank 1."""


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Every process that is started."""
    started: list[subprocess.Popen[bytes]] = []

    class Remembered(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            started.append(self)

    monkeypatch.setattr(workers.subprocess, "Popen", Remembered)
    return started


def assert_all_ended(processes: list[subprocess.Popen[bytes]]) -> None:
    assert processes
    assert [process.returncode is not None for process in processes] == [True] * len(processes)


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_error_in_a_task_is_the_same_wherever_it_runs(jobs: int, tmp_path: Path) -> None:
    baseline, candidate = write_pair(tmp_path)
    (candidate / "step1" / "rank1" / "calls.jsonl").unlink()
    with pytest.raises(RunDamaged) as caught:
        compare(baseline, candidate, out=tmp_path / "out", jobs=jobs)
    assert type(caught.value) is RunDamaged
    assert str(caught.value).startswith(f"'{candidate}'")
    assert "step1/rank1/calls.jsonl" in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("act", "how"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", r"was killed by signal 9 \(SIGKILL\), perhaps because memory ran out"),
        ("os._exit(7)", "ended with exit code 7"),
    ],
    ids=["killed", "gone"],
)
def test_a_process_that_dies_is_an_error_that_names_its_rank(
    act: str, how: str, processes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_PROGRAM", OWN_PERFORM.replace("ACT", act))
    runs = write_pair(tmp_path)
    (tmp_path / "out").mkdir()
    with pytest.raises(CannotCompare, match=f"the process that compared rank 1 {how}. Nothing was written.\n.*--jobs"):
        compare(*runs, out=tmp_path / "out", jobs=2)
    assert listed(tmp_path / "out") == []
    assert_all_ended(processes)


def test_a_bug_in_a_process_is_shown_with_its_traceback(
    processes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_PROGRAM", OWN_PERFORM.replace("ACT", "1 / 0"))
    with pytest.raises(RuntimeError, match=r"comparing rank 1 failed in a process:\nTraceback(.|\n)*ZeroDivisionError"):
        compare(*write_pair(tmp_path), jobs=2)
    assert_all_ended(processes)


def test_an_interrupt_ends_the_processes(processes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process at rank 1 tells of one pair and then never ends by itself."""
    monkeypatch.setattr(
        workers, "_PROGRAM", OWN_PERFORM.replace("ACT", "progress.__self__._next = 0; progress(1000); signal.pause()")
    )

    def interrupt(pairs: int) -> None:
        if pairs >= 1000:
            raise KeyboardInterrupt

    runs = write_pair(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        compare(*runs, out=tmp_path / "out", jobs=2, progress=interrupt)
    assert not (tmp_path / "out").exists()
    assert_all_ended(processes)


def test_a_worker_whose_parent_has_gone_stops() -> None:
    ours, theirs = workers.Pipe()
    with theirs:
        report = workers._Report(theirs)
        report.add(1)
        ours.close()
        with pytest.raises(BrokenPipeError):
            report.send()


def test_no_more_processes_than_ranks_and_all_of_them_end(processes: Any, tmp_path: Path) -> None:
    compare(*write_pair(tmp_path), jobs=8)
    assert len(processes) == 3
    assert_all_ended(processes)  # one that was still starting when the others had done all is killed


def test_a_script_needs_no_guard_around_its_main_part(tmp_path: Path) -> None:
    baseline, candidate = write_pair(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(
        "import tensorprobe\n"
        f"print(tensorprobe.compare({str(baseline)!r}, {str(candidate)!r}, jobs=2).divergence.rank)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")
