"""Exceptions that the program raises into our code: by a signal's handler, or by a tracing hook at any line.

They reach the program, once, and the record holds the calls that were made.
"""

from __future__ import annotations

import gc
import linecache
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import tensorprobe
from tensorprobe.record import Run
from tests.conftest import assert_nothing_installed
from tests.taps.scripts import run_python, write_script
from tests.taps.tiny import LEVELS

SOURCE = str(Path(tensorprobe.__file__).parent)
CALLS = 4
EVERY = 23


class Late(Exception):
    """What the program's handler raises."""


class Hook:
    """Raises once, at the n-th line of our code in this thread, or the next. Without n it counts the lines.

    It does not raise at a `with`: that line comes again before the block is left, and what a trace function raises there
    keeps a lock held. Signals arrive only after the call that releases it. Nor at a `try:`, where no signal arrives.
    """

    def __init__(self, n: int = 0, error: type[BaseException] = Late, files: tuple[str, ...] = ("",)) -> None:
        self.n, self.error, self.lines, self.due = n, error, 0, False
        self.files = tuple(f"{SOURCE}/{file}" for file in files)

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self.files):
            return None
        if event == "line":
            self.lines += 1
            self.due |= self.lines == self.n
            if self.due and not linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith(
                ("with ", "try:")
            ):
                self.due = False
                raise self.error
        return self


class Adding(nn.Module):
    """One call of an operation."""

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return torch.add(x, number)


def _program(hook: Hook) -> tuple[list[int], int]:
    """The numbers whose sums came back, and how many exceptions did."""
    data, model = torch.arange(3.0), Adding()
    done, raised = [], 0
    for number in range(CALLS):
        sys.settrace(hook)
        try:
            model(data, number)
        except hook.error:
            raised += 1
            continue
        finally:
            sys.settrace(None)
        done.append(number)
    return done, raised


def _number(name: str) -> int:
    return next(int(part) for part in reversed(name.split(".")) if part.isdigit())


def _assert_sound(run: Run, level: str, done: list[int]) -> None:
    op = {"module": "Module.Adding", "aten": "Aten.add"}.get(level, "Torch.add")
    calls = [call for call in run.calls() if call.op.startswith(op)]
    numbers = [_number(call.name) for call in calls]
    assert numbers == sorted(set(numbers))
    assert numbers[-1] - len(numbers) + 1 <= 1, "at most the number of the interrupted call is unused"
    values = [int(call.outputs[0].tensor()[0]) for call in calls if call.outputs]
    assert set(done) <= set(values)
    assert values == sorted(set(values))
    assert len(calls) <= CALLS


@pytest.mark.parametrize("error", [Late, TimeoutError, KeyboardInterrupt])
@pytest.mark.parametrize("level", LEVELS)
def test_exception_at_any_line_of_ours(level: str, error: type[BaseException], tmp_path: Path) -> None:
    counting = Hook()
    with tensorprobe.capture(tmp_path / "count", level=level, in_process=True):
        _program(counting)
    assert counting.lines > 100
    first = LEVELS.index(level) + 1
    for n in range(first, counting.lines + 1, EVERY * (3 if error is not Late else 1)):
        hook = Hook(n, error)
        with tensorprobe.capture(tmp_path / f"{n}", level=level, in_process=True) as probe:
            done, raised = _program(hook)
        if hook.lines < n or hook.due:
            break  # what is computed once was computed in the runs before
        assert raised == 1, f"line {n}"
        assert len(done) == CALLS - 1
        assert probe.coverage is not None
        assert probe.coverage.failed == 0
        _assert_sound(tensorprobe.open_run(tmp_path / f"{n}"), level, done)


WATCHES = {
    "capture": lambda out: tensorprobe.capture(out, in_process=True),
    "online": lambda out: tensorprobe.online(out=out),
    "online with a worker": lambda out: tensorprobe.online(out=out, workers=1),
    "overflow": lambda out: tensorprobe.overflow(out=out),
}
ERRORS = (Late, TimeoutError, RuntimeError, KeyboardInterrupt)


BEGINNING_AND_END = (
    "taps/probe.py",
    "taps/unshown.py",
    "watches/online/",
    "watches/overflow/",
    "record/run_folder.py",
    "record/run_sink.py",
    "record/provenance.py",
    "record/step_files.py",
    "record/tensor_store.py",
    "record/blob_writer.py",
)


def _watch(watch: str, hook: Hook, out: Path) -> None:
    """Its beginning and its end are traced, too."""
    torch.manual_seed(0)
    model, data = nn.Linear(3, 3), torch.ones(3)
    sys.settrace(hook)
    try:
        with WATCHES[watch](out):
            model(data).sum().backward()
            torch.log(torch.zeros(2))
    finally:
        sys.settrace(None)


@pytest.mark.parametrize("watch", WATCHES)
def test_exception_at_any_line_of_a_watch(watch: str, tmp_path: Path) -> None:
    for time in ("first", "second"):  # what is computed once, and after what is imported then
        _watch(watch, Hook(), tmp_path / time)
    counting = Hook()
    _watch(watch, counting, tmp_path / "count")
    for place in range(12):
        hook = Hook(1 + place * counting.lines // 12, ERRORS[place % len(ERRORS)])
        with pytest.raises(hook.error):
            _watch(watch, hook, tmp_path / str(place))
        assert_nothing_installed()


@pytest.mark.parametrize("watch", WATCHES)
def test_nothing_stays_installed_after_an_exception_where_a_watch_begins_or_ends(watch: str, tmp_path: Path) -> None:
    _watch(watch, Hook(), tmp_path / "first")
    counting = Hook(files=BEGINNING_AND_END)
    _watch(watch, counting, tmp_path / "count")
    assert counting.lines > 100
    for n in range(1, counting.lines + 1, 7):
        error = (Late, TimeoutError)[n % 2]  # a TimeoutError is an OSError too, as those that mean a full disk
        hook = Hook(n, error, files=BEGINNING_AND_END)
        with pytest.raises(error):
            _watch(watch, hook, tmp_path / str(n))
        assert_nothing_installed()


STORM = """
    import random, signal, sys, time, torch, tensorprobe
    kind, out = sys.argv[1:]
    struck = 0
    def plain(number, frame):
        global struck
        struck += 1
        raise TimeoutError
    def forgets(number, frame):
        del frame
        plain(number, None)
    class Handler:
        def __call__(self, *args):
            plain(*args)
    signal.signal(signal.SIGALRM, {"plain": plain, "forgets": forgets, "object": Handler()}[kind])
    data, done, caught, number = torch.arange(3.0), [], 0, 0
    with tensorprobe.capture(out) as probe:
        end = time.monotonic() + 2
        while time.monotonic() < end:
            number += 1
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 3e-4))
                    torch.add(data, number)
                    done.append(number)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except TimeoutError as error:
                while error is not None:  # an alarm that came while we handled another has that one as its context
                    caught += isinstance(error, TimeoutError)
                    error = error.__context__
    print(struck, caught, probe.coverage.failed, *done)
"""


@pytest.mark.parametrize("kind", ["plain", "forgets", "object"])
def test_storm_of_alarms(kind: str, tmp_path: Path) -> None:
    script = write_script(tmp_path, STORM)
    ended = run_python([script, kind, tmp_path / "run"], tmp_path)
    struck, caught, failed, *done = map(int, ended.stdout.split())
    assert struck > 100
    assert caught == struck, f"exceptions of the program were lost; Python says: {ended.stderr!r}"
    assert failed == 0
    calls = [call for call in tensorprobe.open_run(tmp_path / "run").calls() if call.op == "Torch.add"]
    numbers = [_number(call.name) for call in calls]
    assert numbers == sorted(set(numbers))
    values = [int(call.outputs[0].tensor()[0]) for call in calls if call.outputs]
    assert set(done) <= set(values)
    assert values == sorted(set(values))


def test_no_thread_of_ours_is_left_to_the_garbage_collector(tmp_path: Path) -> None:
    """Python ignores what is raised while it forgets a thread: an alarm that comes during a collection would be lost."""
    gc.disable()
    try:
        with tensorprobe.capture(tmp_path / "run", in_process=True):
            torch.add(torch.ones(2), 1)
        assert [thread.name for thread in threading._dangling if "tensorprobe" in thread.name] == []  # type: ignore[attr-defined]
    finally:
        gc.enable()
