"""Other threads and other processes of the user's program."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import tensorprobe
from tests.taps.tiny import LEVELS, features, names

THREADS, CALLS = 4, 200


class Numbers(Dataset[Tensor]):
    """Its items are computed with torch, in the worker."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.sin(torch.full((2,), float(index)))


def work(thread: int) -> None:
    for number in range(CALLS):
        torch.hypot(torch.full((3,), float(thread)), torch.full((3,), float(number)))


def test_calls_of_four_threads_are_all_recorded_whole(tmp_path: Path) -> None:
    with tensorprobe.capture(tmp_path / "run") as probe:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    run = tensorprobe.open_run(tmp_path / "run")
    calls = [call for call in run.calls() if call.op == "Torch.hypot"]
    assert len(calls) == THREADS * CALLS
    assert len({call.name for call in calls}) == THREADS * CALLS
    assert len({call.thread for call in calls}) == THREADS
    pairs = Counter((call.inputs[0].tensor()[0].item(), call.inputs[1].tensor()[0].item()) for call in calls)
    assert pairs == Counter({(float(a), float(b)): 1 for a in range(THREADS) for b in range(CALLS)})
    for call in calls:
        assert torch.equal(call.outputs[0].tensor(), torch.hypot(call.inputs[0].tensor(), call.inputs[1].tensor()))
    assert probe.coverage is not None
    assert probe.coverage.seen == probe.coverage.recorded == len(names(run))


@pytest.mark.parametrize("level", LEVELS)
def test_thread_that_was_there_before_the_probe_is_not_disturbed(level: str, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        before = pool.submit(torch.sin, torch.ones(2)).result()
        with tensorprobe.capture(tmp_path / "run", level=level):
            assert torch.equal(pool.submit(torch.sin, torch.ones(2)).result(), before)
            torch.cos(torch.ones(2))
        assert pool.submit(torch._C._len_torch_function_stack).result() == 0


@pytest.mark.parametrize("level", LEVELS)
def test_thread_that_outlives_the_probe_is_not_disturbed(level: str, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        with tensorprobe.capture(tmp_path / "run", level=level):
            inside = pool.submit(torch.sin, torch.ones(2)).result()
        assert torch.equal(pool.submit(torch.sin, torch.ones(2)).result(), inside)


def test_backward_in_another_thread_is_recorded(tmp_path: Path) -> None:
    data = torch.ones(3, requires_grad=True)
    with tensorprobe.capture(tmp_path / "run"):
        loss = torch.sin(data).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    assert "Torch.sin.0.backward" in names(tensorprobe.open_run(tmp_path / "run"))


@pytest.mark.parametrize("how", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_data_loader_with_workers_gives_the_same_batches(how: str, tmp_path: Path) -> None:
    expected = torch.sin(torch.arange(8.0)).repeat_interleave(2).view(4, 2, 2)
    loader: Any = DataLoader(Numbers(), batch_size=2, num_workers=2, multiprocessing_context=how)
    with tensorprobe.capture(tmp_path / "run") as probe:
        batches = list(loader)
        torch.cos(features())
    assert torch.equal(torch.stack(batches), expected)
    run = tensorprobe.open_run(tmp_path / "run")
    assert run.closed
    assert "Torch.cos.0.forward" in names(run)
    assert "Torch.sin.0.forward" not in names(run)
    assert probe.coverage is not None
    assert probe.coverage.failed == 0
