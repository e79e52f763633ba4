"""Steps of a program that does not report them: three training steps are three steps, whatever stands between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensorprobe
from tensorprobe.taps.probe import Probe

Program = Callable[[nn.Module, torch.optim.Optimizer, Probe], None]


def loss_of(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(2, 4)).square().mean()
    return loss


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()


def evaluate(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        loss_of(model).item()
    model.train()


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, probe: Probe) -> None:
    for _ in range(3):
        train(model, optimizer)


def with_evaluation(model: nn.Module, optimizer: torch.optim.Optimizer, probe: Probe) -> None:
    for _ in range(3):
        train(model, optimizer)
        evaluate(model)


def evaluation_that_keeps_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, probe: Probe) -> None:
    for _ in range(3):
        train(model, optimizer)
        model.eval()
        loss_of(model)
        model.train()


def trained_in_eval_mode(model: nn.Module, optimizer: torch.optim.Optimizer, probe: Probe) -> None:
    model.eval()
    for _ in range(3):
        train(model, optimizer)
        with torch.no_grad():
            loss_of(model)


def scheduler_and_clipping(model: nn.Module, optimizer: torch.optim.Optimizer, probe: Probe) -> None:
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    sum(parameter.detach().norm() for parameter in model.parameters())


def by_closure(model: nn.Module, optimizer: torch.optim.Optimizer, probe: Probe) -> None:
    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss.item()

    for _ in range(3):
        optimizer.step(closure)


def skipped_by_a_scaler(model: nn.Module, optimizer: torch.optim.Optimizer, probe: Probe) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(model) * (float("inf") if step != 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        evaluate(model)


def told_by_the_script(model: nn.Module, optimizer: torch.optim.Optimizer, probe: Probe) -> None:
    for number in range(3):
        train(model, optimizer)
        evaluate(model)
        if number < 2:
            probe.step()


PROGRAMS = [
    plain,
    with_evaluation,
    evaluation_that_keeps_gradients,
    trained_in_eval_mode,
    scheduler_and_clipping,
    by_closure,
    pytest.param(skipped_by_a_scaler, marks=pytest.mark.needs_torch("2.3", "a gradient scaler for the CPU")),
    told_by_the_script,
]


def recorded(out: Path, program: Program, **settings: Any) -> tensorprobe.Run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tensorprobe.capture(out, model=model, steps_by="optimizer", mode="summary", **settings) as probe:
        program(model, optimizer, probe)
    return tensorprobe.open_run(out)


def names(run: tensorprobe.Run, step: int) -> Sequence[str]:
    return [call.name for call in run.calls(step)]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_three_training_steps_are_three_steps(tmp_path: Path, program: Program) -> None:
    run = recorded(tmp_path / "run", program)
    assert run.steps == [0, 1, 2]
    for step in run.steps:
        trained = [call for call in run.calls(step, op="Functional.linear") if call.direction == "backward"]
        assert len(trained) == 2
        assert {call.microbatch for call in trained} == {0}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_selected_step_holds_the_same_calls_as_in_a_whole_run(tmp_path: Path, program: Program) -> None:
    whole = recorded(tmp_path / "whole", program)
    for step in (1, 2):
        part = recorded(tmp_path / f"part{step}", program, steps=[step])
        assert part.steps == [step]
        assert names(part, step) == names(whole, step)


def test_an_evaluation_belongs_to_the_step_before_it_as_a_phase(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", with_evaluation)
    for step in run.steps:
        phases = [call.phase for call in run.calls(step, op="Functional.linear") if call.direction == "forward"]
        assert phases == ["train", "train", "eval, no grad", "eval, no grad"]


def test_a_program_without_modules_ends_its_steps_with_the_optimizer(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with tensorprobe.capture(tmp_path / "run", steps_by="optimizer"):
        for _ in range(3):
            torch.sin(weight).sum().backward()
            optimizer.step()
    run = tensorprobe.open_run(tmp_path / "run")
    assert [step for step in run.steps if "Torch.sin.0.forward" in names(run, step)] == [0, 1, 2]
    assert [step for step in run.steps if list(run.calls(step))] == [0, 1, 2]
