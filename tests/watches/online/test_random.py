"""Random numbers are judged by their distribution, and dropout by its share of zeros, its scale and its mask."""

from __future__ import annotations

import runpy
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorprobe
from tensorprobe.watches.online.watch import OnlineWatch

Dropped = tuple[torch.Tensor, torch.Tensor]
Kernel = Callable[[torch.Tensor, float, torch.Tensor], Dropped]


@contextmanager
def dropout_gives(kernel: Kernel) -> Iterator[None]:
    """Replace the CPU's dropout. `kernel` gets the input, p, and which elements are kept."""
    library = torch.library.Library("aten", "IMPL")
    source = torch.Generator().manual_seed(7)

    def run(x: torch.Tensor, p: float, train: bool | None) -> Dropped:
        return kernel(x, p, torch.rand(x.shape, generator=source) >= p)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that the kernel is replaced
        library.impl("native_dropout", run, "CPU")
    try:
        yield
    finally:
        library._destroy()


def watch(**settings: Any) -> OnlineWatch:
    torch.manual_seed(0)
    x = torch.randn(64, 64)
    with tensorprobe.online(**{"on_fail": "report", **settings}) as found:
        torch.native_dropout(x, 0.2, True)
        torch.empty(500).uniform_(-1, 1)
        torch.empty(500).normal_(2.0, 3.0)
        torch.bernoulli(torch.full((500,), 0.3))
        torch.empty(500).exponential_(2.0)
        torch.empty(500).uniform_(1, 1)
    return found


def test_right_random_numbers_agree_and_are_compared() -> None:
    result = watch().result
    assert not result.failed
    assert {"Aten.native_dropout.default", "Aten.uniform_.default", "Aten.normal_.default"} <= set(result.ops)


@pytest.mark.needs_torch("2.4", "a kernel that can be taken back")
@pytest.mark.parametrize(
    ("kernel", "judged_by"),
    [
        (lambda x, p, kept: (x * kept / (1 - p) * 1.01, kept), "scale of the kept values"),
        (lambda x, p, kept: (x * kept, kept), "scale of the kept values"),
        (lambda x, p, kept: (x * (kept := torch.rand(x.shape) > 0.4) / (1 - p), kept), "share of zeros"),
        (lambda x, p, kept: (x * kept / (1 - p), kept.roll(1, 0)), "mask beside the zeros"),
    ],
)
def test_wrong_dropout_fails(kernel: Kernel, judged_by: str) -> None:
    with dropout_gives(kernel):
        result = watch().result
    assert result.failed == 1
    assert result.failures[0].call == "Aten.native_dropout.default.0.forward"
    assert judged_by in result.failures[0].judged_by


@pytest.mark.needs_torch("2.4", "a kernel that can be taken back")
def test_the_saved_script_fails_while_dropout_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["replay.py"])
    with dropout_gives(lambda x, p, kept: (x * kept / (1 - p) * 1.01, kept)):
        saved = watch(out=tmp_path / "out", on_fail="save").result.failures[0].saved
        with pytest.raises(SystemExit) as wrong:
            runpy.run_path(f"{saved}/replay.py", run_name="__main__")
    with pytest.raises(SystemExit) as right:
        runpy.run_path(f"{saved}/replay.py", run_name="__main__")
    assert (wrong.value.code, right.value.code) == (1, 0)


def test_what_was_not_compared_is_in_the_first_line() -> None:
    with tensorprobe.online(on_fail="report") as found:
        torch.randperm(7).add(1).view(-1)
    assert "; 1 not compared: random." in str(found.report).splitlines()[0]
