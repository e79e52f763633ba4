"""Memory that nobody has written: not compared; what was written of it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorprobe
from tensorprobe.model.reason import Unrecorded
from tensorprobe.record import open_run


def record(folder: Path, program: Callable[[], Any], level: str = "api") -> Path:
    with tensorprobe.capture(folder, level=level, in_process=True):
        program()
    return folder


def slots(folder: Path, op: str) -> dict[str, Any]:
    run = open_run(folder)
    return {slot.name: (slot, call) for call in run.calls(0, 0) if call.name.startswith(op) for slot in call.slots}


@pytest.mark.parametrize("level", ["api", "aten"])
def test_a_difference_in_the_filled_part_of_a_cache_is_found(tmp_path: Path, level: str) -> None:
    def program(last: float) -> Callable[[], None]:
        def run() -> None:
            cache = torch.empty(4, 8)
            for at in range(3):
                cache[at] = torch.full((8,), last if at == 2 else 1.0)
            cache.clone()

        return run

    first = record(tmp_path / "a", program(2.0), level)
    again = record(tmp_path / "b", program(2.0), level)
    other = record(tmp_path / "c", program(2.5), level)
    assert tensorprobe.compare(first, again)
    assert not tensorprobe.compare(first, other)


def test_a_slot_lists_what_was_written_and_holds_zeros_elsewhere(tmp_path: Path) -> None:
    def program() -> None:
        cache = torch.empty(4, 3)
        cache.numpy()  # a pointer to it, but nothing is written through it
        cache[1:3, :2] = 5.0
        cache.clone()

    record(tmp_path / "run", program)
    found = slots(tmp_path / "run", "Tensor.clone")
    for name in ("input.0", "output.0"):
        slot, _ = found[name]
        assert slot.written == ((3, 5), (6, 8))
    assert found["input.0"][0].tensor().tolist() == [[0, 0, 0], [5, 5, 0], [5, 5, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    "fill",
    [
        lambda memory: memory.fill_(3.0),
        lambda memory: torch.add(torch.ones(4, 3), 2.0, out=memory),
        lambda memory: memory.numpy().fill(3.0),
        lambda memory: memory.copy_(torch.full((4, 3), 3.0)),
        lambda memory: memory.__setitem__(slice(None), 3.0),
        lambda memory: memory.index_fill_(0, torch.arange(4), 3.0),
    ],
)
def test_memory_that_was_filled_is_recorded(tmp_path: Path, fill: Callable[[torch.Tensor], Any]) -> None:
    def program() -> None:
        memory = torch.empty(4, 3)
        fill(memory)
        memory.clone()

    record(tmp_path / "run", program)
    slot, _ = slots(tmp_path / "run", "Tensor.clone")["output.0"]
    assert (slot.skipped, slot.written) == (None, None)
    assert slot.summary.min == slot.summary.max == 3.0


def test_memory_that_nobody_wrote_has_no_values(tmp_path: Path) -> None:
    record(tmp_path / "run", lambda: torch.empty(4, 3).view(3, 4))
    slot, _ = slots(tmp_path / "run", "Tensor.view")["output.0"]
    assert slot.model.unrecorded is Unrecorded.UNINITIALISED


def test_results_that_depend_on_unwritten_memory_are_followed_until_they_are_masked(tmp_path: Path) -> None:
    def program() -> None:
        keys = torch.empty(4, 3)
        keys[:2] = 1.0
        scores = keys @ torch.ones(3)
        torch.masked_fill(scores, torch.arange(4) > 1, 0.0)

    record(tmp_path / "run", program)
    scores, _ = slots(tmp_path / "run", "Tensor.matmul")["output.0"]
    masked, _ = slots(tmp_path / "run", "Torch.masked_fill")["output.0"]
    assert scores.written == ((0, 2),)
    assert masked.written is None and masked.summary.max == 3.0
