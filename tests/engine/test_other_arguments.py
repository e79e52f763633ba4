"""An optimizer with other settings, whose effect statistics do not show: the answer is not that the runs agree."""

from __future__ import annotations

from pathlib import Path

import torch

import tensorprobe


def record(folder: Path, lr: float, mode: str) -> Path:
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, foreach=False)
    x = torch.randn(4, 16)
    with tensorprobe.capture(folder, model=model, level="api", mode=mode, in_process=True, stacks=False) as probe:
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
            probe.step()
    return folder


def compare(folder: Path, lr: float, mode: str) -> tensorprobe.Result:
    runs = record(folder / "a", 1e-3, mode), record(folder / "b", lr, mode)
    return tensorprobe.compare(*runs, prove="off")


def test_with_statistics_alone_nobody_can_tell_what_another_learning_rate_does(tmp_path: Path) -> None:
    result = compare(tmp_path, 1.01e-3, "summary")
    assert result.exit_code == 2 and result.divergence is None
    first, second = str(result).splitlines()[0], {(each.name, each.step) for each in result.summary.untold}
    assert first.startswith("CANNOT TELL  whether weight")
    assert first.endswith(
        "before step 1: Tensor.addcdiv_.0.forward has other arguments, and the values that it made were not recorded"
    )
    assert {("weight", 1), ("bias", 1), ("weight", 2), ("bias", 2)} <= second


def test_with_values_it_is_named(tmp_path: Path) -> None:
    result = compare(tmp_path, 1.01e-3, "tensor")
    assert result.divergence is not None and result.divergence.call == "Tensor.addcdiv_.0.forward"


def test_a_number_that_was_computed_in_another_order_is_the_same(tmp_path: Path) -> None:
    result = compare(tmp_path, 1e-3 * (1 + 1e-15), "summary")
    assert result.exit_code == 0 and not result.summary.findings
