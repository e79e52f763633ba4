"""Phases: training, evaluation, generation and the optimizer can be told apart, recorded and compared alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import tensorprobe
from tests.taps.scripts import run_tool


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.spoiled = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x)
        return result * 1.5 if self.spoiled and not self.training else result

    @torch.no_grad()
    def generate(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = torch.tanh(self(x))
        return x


def record(out: Path, *, spoiled: bool = False, **settings: object) -> tensorprobe.Run:
    torch.manual_seed(0)
    model = Tiny()
    model.spoiled = spoiled
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tensorprobe.capture(out, model=model, steps_by="optimizer", **settings):
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            model.eval()
            with torch.no_grad():
                torch.exp(model(torch.ones(1, 4)))
            model.generate(torch.ones(1, 4))
            model.train()
    return tensorprobe.open_run(out)


def test_generation_and_evaluation_are_phases_of_their_own(tmp_path: Path) -> None:
    run = record(tmp_path / "run")
    assert [call.phase for call in run.calls(0, op="linear") if call.direction == "forward"] == [
        "train",
        "eval, no grad",
        "generate",
        "generate",
    ]
    assert {call.phase for call in run.calls(0, op="tanh")} == {"generate"}


@pytest.mark.parametrize("level", ["api", "module", "mix", "aten"])
@pytest.mark.parametrize("phase", ["train", "eval", "generate", "optimizer"])
def test_a_phase_can_be_recorded_alone(tmp_path: Path, level: str, phase: str) -> None:
    whole, part = record(tmp_path / "whole", level=level), record(tmp_path / "part", level=level, phases=phase)
    kept = [call.name for call in whole.calls() if call.phase.partition(",")[0] == phase]
    assert [call.name for call in part.calls()] == kept
    assert kept or (level, phase) == ("module", "optimizer")
    assert part.coverage[0].filtered


def test_compare_looks_at_the_chosen_phases_and_counts_the_others(tmp_path: Path) -> None:
    record(tmp_path / "a")
    record(tmp_path / "b", spoiled=True)
    assert not tensorprobe.compare(tmp_path / "a", tmp_path / "b")
    trained = tensorprobe.compare(tmp_path / "a", tmp_path / "b", phases=["train", "optimizer"])
    assert trained.agrees
    assert trained.summary.buckets.skipped["in a phase that was not selected"] > 10
    evaluated = tensorprobe.compare(tmp_path / "a", tmp_path / "b", phases="eval", jobs=2)
    assert evaluated.divergence is not None and evaluated.exit_code == 1


def test_a_phase_that_a_run_has_not_is_an_error_that_names_those_it_has(tmp_path: Path) -> None:
    record(tmp_path / "a", phases="train")
    with pytest.raises(tensorprobe.TensorprobeError, match=r"no call of phase eval in .* It has train"):
        tensorprobe.compare(tmp_path / "a", tmp_path / "a", phases="eval")
    with pytest.raises(tensorprobe.TensorprobeError, match="phases has 'evaluation'"):
        tensorprobe.compare(tmp_path / "a", tmp_path / "a", phases="evaluation")


def test_inspect_shows_phases_and_selects_them(tmp_path: Path) -> None:
    record(tmp_path / "run")
    listed = run_tool(["inspect", "run", "--phase", "generate", "--step", "1"], tmp_path).stdout
    assert "step 1, rank 0: generate" in listed and "Torch.tanh.1.forward" in listed and "exp" not in listed
    shown = run_tool(["inspect", "run", "Functional.linear.0"], tmp_path).stdout
    assert "phase       train, micro-batch 0" in shown
    refused = run_tool(["inspect", "run", "--phase", "evaluation"], tmp_path, code=2)
    assert "expected train, eval, generate or optimizer" in refused.stderr


def test_a_step_does_not_begin_in_the_evaluation_before_it(tmp_path: Path) -> None:
    model = Tiny().eval()
    with tensorprobe.capture(tmp_path / "run", model=model) as probe, torch.no_grad():
        model(torch.ones(2, 4))
        probe.step()
        torch.tanh(torch.ones(3))  # as the next batch is loaded
    assert [call.phase for call in tensorprobe.open_run(tmp_path / "run").calls(1, op="tanh")] == [""]
