"""Proves, after every test, that nothing of ours is left installed in torch, in threading, or in the process."""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# For this process and those that tests start, before any of them loads torch. Modules are compiled once, not in each of the
# processes; workers that share the cores take no second thread, which spins while it waits for one of them.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
import torch.distributed
import torch.optim.optimizer as optimizer
import torch.utils.checkpoint as checkpoint
import torch.utils.data.dataloader as dataloader
from torch import nn

from tensorprobe import torch_names
from tensorprobe.record import recorder, writer
from tensorprobe.taps import active_probe

_FD_SLACK = 3 if torch_names.torch_version() >= (2, 11) else 12  # an older torch.compile keeps more files open
# So much memory of a ring is touched before it is needed, that training may not wait for it: 48 MB for each capture of a test.
writer._WARM_BYTES = writer._AHEAD_BYTES = recorder._AHEAD_BYTES = 1 << 20


def _patchable() -> dict[str, Any]:
    """What the taps replace while they are in place."""
    return {
        "nn.Module.__call__": nn.Module.__call__,
        "Thread.run": threading.Thread.run,
        "CheckpointFunction.forward": checkpoint.CheckpointFunction.__dict__["forward"],
        "CheckpointFunction.backward": checkpoint.CheckpointFunction.__dict__["backward"],
        "_CheckpointFrame.__init__": checkpoint._CheckpointFrame.__dict__["__init__"],
        "_BaseDataLoaderIter.__next__": dataloader._BaseDataLoaderIter.__next__,
        "Work.wait": torch.distributed.Work.__dict__["wait"],
        "all_reduce": inspect.unwrap(torch.distributed.all_reduce).__code__,
        "Tensor.__getitem__": vars(torch.Tensor).get("__getitem__"),
    }


_ORIGINALS = _patchable()


def _open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a Path for each of them is slow, after every test


def recorders(trainer: int | None = None) -> list[int]:
    """The recorder processes that work for a process, by default this one. They are not its children."""
    orders = f'"trainer_pid":{trainer or os.getpid()},'.encode()
    found = []
    for pid in os.listdir("/proc"):  # noqa: PTH208
        with contextlib.suppress(OSError):  # one that has just ended
            if pid.isdigit() and orders in Path("/proc", pid, "cmdline").read_bytes():
                found.append(int(pid))
    return found


def _rings() -> list[str]:
    """The memory that is shared with recorders."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:tensorprobe" in line]


def assert_nothing_installed() -> None:
    assert torch._C._len_torch_function_stack() == 0
    assert torch._C._len_torch_dispatch_stack() == 0
    for flag in ("is_in_torch_dispatch_mode", "is_in_any_mode_without_ignore_compile_internals"):
        # torch 2.1 keeps no such flag, and compiling leaves that of 2.4 set
        ask = getattr(torch.utils._python_dispatch, flag, None) if torch_names.torch_version() >= (2, 6) else None
        assert ask is None or not ask()
    replaced = [name for name, value in _patchable().items() if value is not _ORIGINALS[name]]
    assert replaced == []
    assert active_probe() is None
    assert not optimizer._global_optimizer_post_hooks
    assert not optimizer._global_optimizer_pre_hooks
    assert [thread.name for thread in threading.enumerate() if "tensorprobe" in thread.name] == []
    assert _rings() == []


@pytest.fixture(autouse=True)
def nothing_is_left_installed() -> Iterator[None]:
    before = _open_fds()
    yield
    assert_nothing_installed()
    if _open_fds() > before + _FD_SLACK:
        gc.collect()
        assert _open_fds() <= before + _FD_SLACK


@pytest.fixture(autouse=torch_names.torch_version() < (2, 3))
def optimizers_have_hooks() -> Iterator[None]:
    """The first torch.compile of such a torch removes the hooks of all optimizers, and keeps others from having any."""
    yield
    for step in {kind.step for kind in vars(torch.optim).values() if hasattr(kind, "step")}:
        if step.__code__.co_name != "wrapper":
            vars(step).pop("hooked", None)


@pytest.fixture
def warm_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python processes that the test starts begin with torch in memory; `monkeypatch.undo()` gives them a start of their own."""
    from tests import warm  # scripts that import this file have no such path

    monkeypatch.setattr(subprocess, "Popen", warm.Popen)


def pytest_configure(config: pytest.Config) -> None:
    """In the quick loop no recorder gets a process: the same code runs in a thread, as where none can be started."""

    def refuse(*_: Any) -> None:
        raise OSError("no processes in the quick loop")

    if config.option.markexpr == "not process":
        writer._RecorderProcess = refuse  # type: ignore[assignment,misc]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that start processes, and put those of the simulated device first.

    Parameters and fixtures called like its device use it too. The device must be there before the first backward of a
    process, and stays: its tests need processes of their own.
    """
    from tests.processes import starts_process

    items.sort(key=lambda item: "sim" not in item.path.parts)
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        place = params.get("device", params.get("place"))
        simulated = "sim" in item.path.parts or item.get_closest_marker("simulated") is not None
        simulated |= "npu" in getattr(item, "fixturenames", ())
        if simulated or getattr(place, "device", place) in ("npu", "faulty", "ranks"):
            item.add_marker(pytest.mark.needs_torch("2.10", "the simulated device"))
        for needs in item.iter_markers("needs_torch"):
            version, reason = needs.args
            if torch_names.torch_version() < tuple(map(int, version.split("."))):
                item.add_marker(pytest.mark.skip(reason=f"needs torch {version}: {reason}"))
        if "sim" in item.path.parts or starts_process(item):
            item.add_marker("process")
