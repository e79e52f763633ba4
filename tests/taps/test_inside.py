"""At the ATen level a user can ask for what is done inside named API calls only, forward, backward or both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

import tensorprobe
from tensorprobe.cli.main import app
from tensorprobe.errors import CaptureIncomplete, SettingsError
from tensorprobe.record import Run
from tests.taps.tiny import Residual, Stack, features, images, names, record


def residual(out: Path, **settings: Any) -> Run:
    """One step of a network with two convolutions."""
    torch.manual_seed(0)
    model = Residual()
    return record(out, lambda: model(images()).backward(), model=model, level="aten", **settings)


def all_inside(run: Run, name: str) -> list[str]:
    """Of a run that has everything, the ATen calls whose parent or origin is the call."""
    return [call.name for call in run.calls() if name in (call.parent, call.origin)]


@pytest.mark.parametrize(
    ("inside", "enclosing"),
    [
        ("Functional.conv2d.1.forward", ["Functional.conv2d.1.forward"]),
        ("Functional.conv2d.1.backward", ["Functional.conv2d.1.backward"]),
        ("Functional.conv2d.1", ["Functional.conv2d.1.forward", "Functional.conv2d.1.backward"]),
    ],
)
def test_only_what_is_done_inside_is_recorded_with_the_numbers_it_has_anyway(
    inside: str, enclosing: list[str], tmp_path: Path
) -> None:
    everything = residual(tmp_path / "everything")
    run = residual(tmp_path / "run", inside=inside)
    expected = [name for call in enclosing for name in all_inside(everything, call)]
    assert names(run) == expected
    assert any("convolution" in name for name in expected)
    coverage = run.coverage[0]
    assert coverage.seen == everything.coverage[0].seen == coverage.recorded + coverage.filtered
    assert (coverage.failed, coverage.unmatched) == (0, {})


def test_calls_enclose_what_is_done_in_the_calls_within_them(tmp_path: Path) -> None:
    attention = nn.MultiheadAttention(4, 2)

    def action() -> None:
        attention.zero_grad()
        data = torch.randn(3, 1, 4, requires_grad=True)
        attention(data, data, data)[0].sum().backward()

    whole = ["Functional.multi_head_attention_forward.0"]
    part = ["Functional.linear.0"]
    run = record(tmp_path / "whole", action, level="aten", inside=whole)
    inner = record(tmp_path / "part", action, level="aten", inside=part)
    both = record(tmp_path / "both", action, level="aten", inside=whole + part)
    assert 0 < len(names(inner)) < len(names(run))
    assert set(names(inner)) < set(names(run))
    assert {call.direction for call in inner.calls()} == {"forward", "backward"}
    assert names(both) == names(run)
    assert both.coverage[0].unmatched == {}


def test_what_a_backward_computes_by_api_calls_is_inside_both(tmp_path: Path) -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, data: Tensor) -> Tensor:
            return data * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return torch.add(gradient, gradient)

    def action() -> None:
        Doubled.apply(torch.ones(2, requires_grad=True)).sum().backward()

    run = record(tmp_path / "run", action, level="aten", inside="Torch.add.0.forward")
    assert names(run) == ["Aten.add.Tensor.0.backward"]


def test_forward_computed_again_is_inside_and_marked(tmp_path: Path) -> None:
    model = Stack(lambda block, hidden: checkpoint(block, hidden, use_reentrant=False))
    run = record(
        tmp_path / "run",
        lambda: model(features()).sum().backward(),
        model=model,
        level="aten",
        inside="Torch.tanh.1.forward",
    )
    assert [(call.name, call.repeat) for call in run.calls() if "tanh" in call.name] == [
        ("Aten.tanh.default.1.forward", 0),
        ("Aten.tanh.default.1.forward", 1),
    ]


def test_it_goes_with_the_other_choices(tmp_path: Path) -> None:
    run = residual(tmp_path / "run", inside="Functional.conv2d.1", directions="backward", sides="output")
    assert "Aten.convolution_backward.default" in [call.op for call in run.calls()]
    assert {call.direction for call in run.calls()} == {"backward"}
    assert {slot.side for call in run.calls() for slot in call.slots} == {"output"}


def test_name_that_encloses_nothing_is_told_with_the_nearest(tmp_path: Path) -> None:
    with pytest.warns(CaptureIncomplete, match=r"nothing matched 'Functional\.conv2d\.7\.forward'\. Nearest: Func"):
        run = residual(tmp_path / "run", inside=["Functional.conv2d.7.forward", "Functional.conv2d.0.forward"])
    assert list(run.coverage[0].unmatched) == ["Functional.conv2d.7.forward"]
    assert "Functional.conv2d.1.forward" in run.coverage[0].unmatched["Functional.conv2d.7.forward"]
    assert [call.op for call in run.calls()] == ["Aten.convolution.default"]


def test_call_whose_backward_never_ran_is_told_without_other_names(tmp_path: Path) -> None:
    def action() -> None:
        F.relu(torch.ones(2, requires_grad=True))

    with pytest.warns(CaptureIncomplete, match=r"nothing matched 'Functional\.relu\.0\.backward'\.$"):
        record(tmp_path / "run", action, level="aten", inside="Functional.relu.0.backward")


@pytest.mark.parametrize("level", ["module", "api", "mix"])
def test_other_levels_have_nothing_inside(level: str, tmp_path: Path) -> None:
    with pytest.raises(
        SettingsError, match=rf"level is '{level}'\.\n  Set level='aten', or select the API calls .* names"
    ):
        tensorprobe.Probe(tmp_path / "run", level=level, inside=["Torch.sin.0"])
    with pytest.raises(SettingsError, match="inside is 5; expected a name"):
        tensorprobe.Probe(tmp_path / "run", level="aten", inside=5)


def test_the_command_has_it_too(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["capture", "-o", str(tmp_path / "run"), "--inside", "Torch.sin.0", "--", "true"])
    assert isinstance(result.exception, SettingsError)
    assert "inside selects ATen calls" in str(result.exception)
