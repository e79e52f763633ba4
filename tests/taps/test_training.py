"""Every call says in which phase and micro-batch it was made; parameters, gradients and optimizer states are known by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tensorprobe
from tensorprobe.record import Run
from tests.taps.tiny import Stack, features, record


def roles(run: Run, op: str) -> list[dict[str, str]]:
    """The roles of the tensors of each call of an op, by slot."""
    return [
        {slot.name: slot.model.role for slot in call.slots if slot.model.role} for call in run.calls() if call.op == op
    ]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, passes: int = 1) -> None:
    for number in range(passes):
        model(features(number)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def adam(model: nn.Module, *, foreach: bool) -> Callable[[], None]:
    optimizer = torch.optim.Adam(model.parameters(), foreach=foreach)
    return lambda: train(model, optimizer)


def test_parameters_and_their_gradients_have_the_names_that_torch_gives_them(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    run = record(tmp_path / "run", lambda: model(features()).sum().backward(), model=model)
    forward = {"input.1": "parameter 0.weight"}
    backward = {"output.1": "gradient 0.weight"}
    assert roles(run, "Functional.linear") == [
        forward | {"input.2": "parameter 0.bias"},
        forward | {"input.2": "parameter 1.bias"},
        backward | {"output.2": "gradient 1.bias"},
        backward | {"output.2": "gradient 0.bias"},
    ]


def test_states_of_an_optimizer_are_known_by_their_key_and_parameter(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    run = record(tmp_path / "run", adam(model, foreach=False), model=model)
    of_weight, of_bias = roles(run, "Tensor.lerp_")
    assert of_weight["input.0"] == of_weight["output.0"] == "optimizer state exp_avg of weight"
    assert of_weight["input.1"] == "gradient weight"
    assert of_bias["input.0"] == "optimizer state exp_avg of bias"


def test_lists_of_a_foreach_optimizer_have_roles_as_well(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    run = record(tmp_path / "run", adam(model, foreach=True), model=model)
    (updated,) = roles(run, "Torch._foreach_addcdiv_")
    assert updated["input.0.0"] == "parameter weight"
    assert updated["input.0.1"] == "parameter bias"
    assert updated["input.1.1"] == "optimizer state exp_avg of bias"


@pytest.mark.needs_torch("2.4", "clip_grad_norm_ that does not detach the gradients")
def test_gradients_that_are_clipped_before_the_optimizer_are_known(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)

    def step() -> None:
        model(features()).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)

    run = record(tmp_path / "run", step, model=model)
    assert [slots["input.0"] for slots in roles(run, "Tensor.mul_")] == ["gradient weight", "gradient bias"]


@pytest.mark.parametrize("around", [None, lambda block, x: checkpoint(block, x, use_reentrant=False)])
def test_calls_of_a_pass_and_of_its_backward_have_the_number_of_the_micro_batch(
    tmp_path: Path, around: Callable[..., torch.Tensor] | None
) -> None:
    model = Stack(around)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        losses = [model(features(number)).sum() for number in range(2)]
        for loss in reversed(losses):
            loss.backward()
        optimizer.step()
        train(model, optimizer)

    run = record(tmp_path / "run", step, model=model, level="api")
    calls = [call for call in run.calls() if call.op == "Functional.linear" and call.module.startswith("blocks")]
    batches = [(call.direction, call.model.microbatch) for call in calls if not call.repeat]
    half = [("forward", 0)] * 2 + [("forward", 1)] * 2 + [("backward", 1)] * 2 + [("backward", 0)] * 2
    assert batches == [*half, *[("forward", 0)] * 2, *[("backward", 0)] * 2]
    repeated = [call.model.microbatch for call in calls if call.repeat]
    assert repeated == ([] if around is None else [1, 1, 0, 0, 0, 0])


def test_phases_are_training_optimizer_and_evaluation(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)

    def program() -> None:
        train(model, optimizer)
        model.eval()
        with torch.no_grad():
            model(features())

    run = record(tmp_path / "run", program, model=model, level="api")
    phases = {(call.op, call.direction): [] for call in run.calls()}
    for call in run.calls():
        phases[call.op, call.direction].append(call.model.phase)
    assert phases["Functional.linear", "forward"] == ["train", "eval, no grad"]
    assert phases["Functional.linear", "backward"] == ["train"]
    assert set(phases["Tensor.add_", "forward"]) == {"optimizer"}


def test_tensors_that_are_put_in_place_of_parameters_raise_no_warning(tmp_path: Path) -> None:
    """torch warns when the gradient is asked of a tensor that is no leaf."""
    model = nn.Linear(4, 1, bias=False)
    flat = nn.Parameter(torch.ones(4))
    with warnings.catch_warnings(record=True) as warned, tensorprobe.capture(tmp_path / "run", model=model):
        warnings.simplefilter("always")
        model._parameters["weight"] = flat.view(1, 4)  # type: ignore[assignment]
        model(features()).sum().backward()
        torch.ones(1).add(1)
    run = tensorprobe.open_run(tmp_path / "run")
    assert roles(run, "Functional.linear")[0] == {"input.1": "parameter weight"}
    assert [str(warning.message) for warning in warned] == []
