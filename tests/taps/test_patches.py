"""Patches of the program, threads and warnings: at stop only ours is removed, and nothing is raised."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensorprobe
from tensorprobe.errors import CaptureIncomplete
from tests.taps.tiny import LEVELS


def _wrapped(original: Callable[..., Any], seen: list[str]) -> Callable[..., Any]:
    def theirs(*args: Any, **kwargs: Any) -> Any:
        seen.append("theirs")
        return original(*args, **kwargs)

    return theirs


class Held:
    """A wrapper that is an object."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        self.inner = inner

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


@pytest.mark.parametrize(
    ("owner", "name", "use"),
    [
        (nn.Module, "__call__", lambda: nn.Linear(2, 2)(torch.ones(1, 2))),
        (threading.Thread, "run", lambda: _run_thread()),
    ],
    ids=["module", "thread"],
)
def test_patch_made_while_captured_stays_and_ours_goes(
    owner: Any, name: str, use: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = getattr(owner, name)
    seen: list[str] = []
    with tensorprobe.capture(tmp_path / "run"):
        theirs = _wrapped(getattr(owner, name), seen)
        monkeypatch.setattr(owner, name, theirs)
        use()
    assert getattr(owner, name) is theirs
    assert seen == ["theirs"]
    assert theirs.__closure__ is not None
    assert plain in [cell.cell_contents for cell in theirs.__closure__]
    use()
    assert seen == ["theirs", "theirs"]
    setattr(owner, name, plain)
    monkeypatch.undo()
    setattr(owner, name, plain)


def _run_thread() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()


def test_patch_taken_back_while_captured_stays_taken_back(tmp_path: Path) -> None:
    plain = nn.Module.__call__
    nn.Module.__call__ = _wrapped(plain, [])
    with tensorprobe.capture(tmp_path / "run") as probe:
        nn.Module.__call__ = plain
    assert nn.Module.__call__ is plain
    assert probe.coverage is not None
    assert any("nn.Module.__call__ was replaced" in spot for spot in probe.coverage.blind_spots)


@pytest.mark.parametrize("form", ["partial", "object", "wraps", "default"])
def test_ours_is_found_in_other_forms_of_wrappers(form: str, tmp_path: Path) -> None:
    plain = threading.Thread.run
    with tensorprobe.capture(tmp_path / "run"):
        inner = threading.Thread.run
        if form == "partial":
            held = functools.partial(inner)
            threading.Thread.run = lambda self: held(self)  # type: ignore[method-assign]
        elif form == "object":
            wrapper = Held(inner)
            threading.Thread.run = lambda self: wrapper.call(self)  # type: ignore[method-assign]
        elif form == "wraps":
            threading.Thread.run = functools.wraps(inner)(_wrapped(inner, []))  # type: ignore[method-assign]
        else:
            threading.Thread.run = lambda self, run=inner: run(self)  # type: ignore[method-assign,misc]
        del inner
    now: Any = threading.Thread.run
    threading.Thread.run = plain  # type: ignore[method-assign]
    if form == "partial":
        assert held.func is plain
    elif form == "object":
        assert wrapper.inner is plain
    elif form == "wraps":
        assert now.__wrapped__ is plain
    else:
        assert now.__defaults__ == (plain,)


def test_ours_that_the_program_kept_and_puts_back_removes_itself(tmp_path: Path) -> None:
    plain = nn.Module.__call__
    with tensorprobe.capture(tmp_path / "run"):
        kept = {"call": nn.Module.__call__}
        nn.Module.__call__ = lambda module, *args: kept["call"](module, *args)
    assert nn.Module.__call__ is not plain
    nn.Module.__call__ = kept["call"]
    nn.Linear(2, 2)(torch.ones(1, 2))
    assert nn.Module.__call__ is plain


@pytest.mark.parametrize("level", LEVELS)
def test_started_here_and_stopped_in_another_thread(level: str, tmp_path: Path) -> None:
    probe = tensorprobe.Probe(tmp_path / "run", level=level)
    probe.start()
    torch.ones(2) + 1
    stopping = threading.Thread(target=probe.stop)
    stopping.start()
    stopping.join()
    assert torch._C._len_torch_function_stack() == 0
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.parametrize("level", LEVELS)
def test_started_in_a_thread_and_stopped_here(level: str, tmp_path: Path) -> None:
    probe = tensorprobe.Probe(tmp_path / "run", level=level)
    started, stopped = threading.Event(), threading.Event()
    left: list[int] = []

    def work() -> None:
        probe.start()
        torch.ones(2) + 1
        started.set()
        stopped.wait()
        torch.ones(2) + 1
        left.append(torch._C._len_torch_function_stack())
        left.append(torch._C._len_torch_dispatch_stack())

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    probe.stop()
    stopped.set()
    thread.join()
    assert left == [0, 0]
    assert probe.coverage is not None
    assert probe.coverage.failed == 0


class Boom(Exception):
    """The program's own error."""


def test_warning_at_stop_does_not_replace_the_exception(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(Boom), tensorprobe.capture(tmp_path / "run", names=["Torch.nothing.0"]):
            torch.ones(2) + 1
            raise Boom
        with tensorprobe.capture(tmp_path / "other", names=["Torch.nothing.0"]):
            torch.ones(2) + 1
    assert caplog.text.count("nothing matched 'Torch.nothing.0'") == 2
    with pytest.warns(CaptureIncomplete), tensorprobe.capture(tmp_path / "third", names=["Torch.nothing.0"]):
        torch.ones(2) + 1
