"""When the tool itself fails, training goes on with the same results, and what is missing is counted and told."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensorprobe
from tensorprobe.errors import CaptureIncomplete
from tensorprobe.model import Coverage
from tensorprobe.record import snapshot
from tensorprobe.record.writer import RunWriter
from tensorprobe.taps import backward, dispatch_tap, function_tap, module_tap, session, stacks
from tests.taps.tiny import LEVELS, Stack, features, names


class Failing:
    """Stands in for a function of the tool and counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, *_: Any, **__: Any) -> Any:
        self.asked += 1
        raise RuntimeError("the tool has a bug")


def train() -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(0)
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(features()).pow(2).sum()
    loss.backward()
    optimizer.step()
    return loss.detach(), list(model.parameters())


PLACES: dict[str, tuple[Any, str]] = {
    "taking a tensor": (snapshot.Snapshots, "take"),
    "walking the graph": (session, "find_boundary"),
    "finding the roots": (session, "find_roots"),
    "installing hooks": (session, "install"),
    "a gradient in a hook": (backward.Watch, "gradients_of_inputs"),
    "handing over a backward": (session.Session, "emit_backward"),
    "naming a call": (session.Session, "begin_call"),
    "the stack": (stacks.StackBook, "current"),
    "handing over a call": (RunWriter, "call"),
    "putting bytes": (RunWriter, "put"),
    "arguments": (function_tap, "flatten_arguments"),
    "arguments of modules": (module_tap, "flatten_arguments"),
    "arguments of ATen calls": (dispatch_tap, "flatten_arguments"),
    "results": (function_tap, "flatten_result"),
    "results of ATen calls": (dispatch_tap, "flatten_result"),
    "edges": (function_tap, "edges_of"),
    "plans": (function_tap, "plan_function"),
    "plans of ATen calls": (dispatch_tap, "plan_aten"),
    "names of modules": (module_tap.ModuleTap, "_path"),
}


@pytest.mark.parametrize("level", ["mix", "aten"])
@pytest.mark.parametrize("place", PLACES)
def test_failure_of_the_tool_never_reaches_training(
    place: str, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_loss, plain_parameters = train()
    failing = Failing()
    probe = tensorprobe.Probe(tmp_path / "run", level=level)
    probe.start()
    try:
        with monkeypatch.context() as patched:
            patched.setattr(*PLACES[place], failing)
            loss, parameters = train()
        torch.hypot(torch.ones(2), torch.ones(2))
    finally:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            coverage = probe.stop()
    assert torch.equal(loss, plain_loss)
    assert all(torch.equal(a, b) for a, b in zip(parameters, plain_parameters, strict=True))
    run = tensorprobe.open_run(tmp_path / "run")
    assert run.closed
    assert_counts_add_up(coverage)
    assert coverage is not None
    assert coverage.recorded == len(names(run))
    assert any("hypot" in name for name in names(run))
    assert (coverage.failed > 0) == (failing.asked > 0)
    if failing.asked:
        assert coverage.first_error is not None
        assert "RuntimeError: the tool has a bug" in coverage.first_error
        assert [warning.category for warning in caught] == [CaptureIncomplete]
        assert "the tool has a bug" in str(caught[0].message)


def test_failures_above_were_met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above says nothing of a place that is never passed: each is passed at one of the levels."""
    met: set[str] = set()
    for place, (owner, name) in PLACES.items():
        original = getattr(owner, name)

        def noting(*args: Any, place: str = place, original: Callable[..., Any] = original, **kwargs: Any) -> Any:
            met.add(place)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, noting)
    for level in ("mix", "aten"):
        with tensorprobe.capture(tmp_path / level, level=level):
            train()
            torch.hypot(torch.ones(2).t(), torch.ones(2))
    assert met >= PLACES.keys() - {"putting bytes"}  # the C loop puts bytes itself


def assert_counts_add_up(coverage: Coverage | None) -> None:
    assert coverage is not None
    assert coverage.seen == coverage.recorded + coverage.filtered + coverage.failed
    assert min(coverage.seen, coverage.recorded, coverage.filtered, coverage.failed) >= 0


@pytest.mark.parametrize("level", LEVELS)
def test_counts_add_up_when_nothing_fails(level: str, tmp_path: Path) -> None:
    with tensorprobe.capture(tmp_path / "run", level=level, ops="mm" if level == "aten" else "inear") as probe:
        train()
    assert_counts_add_up(probe.coverage)
    assert probe.coverage is not None
    assert probe.coverage.recorded == len(names(tensorprobe.open_run(tmp_path / "run")))
    assert probe.coverage.filtered > 0


def test_argument_that_cannot_be_told_does_not_harm_other_calls(tmp_path: Path) -> None:
    """A text that is no Unicode cannot be written; the calls around it must keep their own values."""
    probe = tensorprobe.Probe(tmp_path / "run")
    probe.start()
    torch.sin(torch.full((2,), 1.0))
    with pytest.raises(RuntimeError):
        torch.einsum("\ud800", torch.full((2,), 2.0))
    torch.cos(torch.full((2,), 3.0))
    with pytest.warns(CaptureIncomplete):
        coverage = probe.stop()
    assert coverage is not None
    assert coverage.failed == 1
    run = tensorprobe.open_run(tmp_path / "run")
    for call in run.calls():
        if call.op in ("Torch.sin", "Torch.cos"):
            assert call.inputs[0].tensor().tolist() == ([1, 1] if call.op == "Torch.sin" else [3, 3])
    assert {"Torch.sin.0.forward", "Torch.cos.0.forward"} <= set(names(run))


def test_nested_lists_without_end_are_left_out(tmp_path: Path) -> None:
    endless: list[Any] = [torch.ones(2)]
    endless.append(endless)

    class Taking(nn.Module):
        def forward(self, given: list[Any]) -> Tensor:
            return given[0] + 1

    probe = tensorprobe.Probe(tmp_path / "run", level="mix")
    probe.start()
    Taking()(endless)
    with pytest.warns(CaptureIncomplete, match="RecursionError"):
        probe.stop()
    assert "Tensor.add.0.forward" in names(tensorprobe.open_run(tmp_path / "run"))
