"""Proves, after every test, that nothing of ours is left installed in torch, in threading, or in the process."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
import torch.optim.optimizer as optimizer
import torch.utils.checkpoint as checkpoint
import torch.utils.data.dataloader as dataloader
from torch import nn

from tensorprobe.capture import active_probe

_FD_SLACK = 3


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
    }


_ORIGINALS = _patchable()


def _open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a Path for each of them is slow, after every test


def recorder_children() -> list[int]:
    """The recorder processes that this process has started and not buried."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has just ended
            for pid in (task / "children").read_text().split():
                if b"tensorprobe.record.recorder" in Path("/proc", pid, "cmdline").read_bytes():
                    found.append(int(pid))
    return found


def assert_nothing_installed() -> None:
    assert torch._C._len_torch_function_stack() == 0
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not torch.utils._python_dispatch.is_in_torch_dispatch_mode()
    assert not torch.utils._python_dispatch.is_in_any_mode_without_ignore_compile_internals()
    replaced = [name for name, value in _patchable().items() if value is not _ORIGINALS[name]]
    assert replaced == []
    assert active_probe() is None
    assert not optimizer._global_optimizer_post_hooks
    assert not optimizer._global_optimizer_pre_hooks
    assert [thread.name for thread in threading.enumerate() if "tensorprobe" in thread.name] == []
    assert recorder_children() == []


@pytest.fixture(autouse=True)
def nothing_is_left_installed() -> Iterator[None]:
    before = _open_fds()
    yield
    assert_nothing_installed()
    if _open_fds() > before + _FD_SLACK:
        gc.collect()
        assert _open_fds() <= before + _FD_SLACK


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The simulated device must be there before the first backward of a process: where all run in one, its tests come first."""
    items.sort(key=lambda item: "sim" not in item.path.parts)
