"""The simulated device, enabled once for all tests in this folder; after each test no fault, observer or module hook
may be left.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tensorprobe import sim


@pytest.fixture(scope="session")
def npu() -> str:
    """The name of the device, which exists from here on for the rest of the process."""
    sim.enable("npu", torch_npu=True)
    return "npu"


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    assert sim.active() == []
    if sim.enabled():
        from tensorprobe.sim import fallback

        assert fallback.OBSERVERS == []
    hooks = torch.nn.modules.module
    assert not hooks._global_forward_pre_hooks and not hooks._global_forward_hooks
