"""Training is the same to the last bit with and without capture: losses, parameters and the random state, at every level."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tensorprobe
from tests.taps.tiny import LEVELS, Stack, TiedGPT, features, tokens

STEPS = 2


class Outcome(NamedTuple):
    losses: list[Tensor]
    model: nn.Module
    random_state: Tensor


class Workload(NamedTuple):
    """`loss_of(model, step)` is differentiated by `backward`, several times a step when gradients are accumulated."""

    make: Callable[[], nn.Module]
    loss_of: Callable[[nn.Module, int], Tensor]
    backward: Callable[[nn.Module, Tensor], None] = lambda model, loss: loss.backward()
    accumulate: int = 1


def squared(model: nn.Module, step: int) -> Tensor:
    return F.mse_loss(model(features(step)), features(step + 100).sum(-1, keepdim=True))


def under_autocast(model: nn.Module, step: int) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(tokens())


def penalised(model: nn.Module, loss: Tensor) -> None:
    """A gradient penalty: the gradients are differentiated again."""
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (loss + sum(gradient.pow(2).sum() for gradient in gradients)).backward()


WORKLOADS = {
    "fp32": Workload(TiedGPT, lambda model, _: model(tokens())),
    "bf16 autocast": Workload(TiedGPT, under_autocast),
    "dropout": Workload(lambda: TiedGPT(dropout=0.3), lambda model, _: model(tokens())),
    "reentrant checkpointing": Workload(
        lambda: Stack(lambda block, x: checkpoint(block, x, use_reentrant=True), dropout=0.3), squared
    ),
    "checkpointing": Workload(
        lambda: Stack(lambda block, x: checkpoint(block, x, use_reentrant=False), dropout=0.3), squared
    ),
    "gradient accumulation": Workload(Stack, squared, accumulate=3),
    "double backward": Workload(Stack, squared, backward=penalised),
}


def train(work: Workload, step_done: Callable[[], None]) -> Outcome:
    torch.manual_seed(7)
    model = work.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(work.accumulate):
            loss = work.loss_of(model, step * work.accumulate + part)
            work.backward(model, loss)
            losses.append(loss.detach())
        optimizer.step()
        step_done()
    return Outcome(losses, model, torch.get_rng_state())


def assert_same_bits(plain: Outcome, captured: Outcome) -> None:
    for ours, theirs in zip(plain.losses, captured.losses, strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(plain.model.parameters(), captured.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(plain.random_state, captured.random_state)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("work", WORKLOADS)
def test_training_is_the_same_to_the_last_bit(work: str, level: str, tmp_path: Path) -> None:
    plain = train(WORKLOADS[work], lambda: None)
    with tensorprobe.capture(tmp_path / "run", level=level) as probe:
        captured = train(WORKLOADS[work], probe.step)
    assert_same_bits(plain, captured)
    assert probe.coverage is not None
    assert (probe.coverage.failed, probe.coverage.first_error) == (0, None)
    assert probe.coverage.recorded > 10
    assert tensorprobe.open_run(tmp_path / "run").steps == [0, 1]


@pytest.mark.parametrize(
    "settings", [{"mode": "summary"}, {"mode": "structure"}, {"in_process": True}, {"steps": [1]}], ids=str
)
def test_training_is_the_same_whatever_is_recorded(settings: dict[str, Any], tmp_path: Path) -> None:
    work = WORKLOADS["dropout"]
    plain = train(work, lambda: None)
    with tensorprobe.capture(tmp_path / "run", **settings) as probe:
        captured = train(work, probe.step)
    assert_same_bits(plain, captured)


def test_versions_and_gradients_of_the_users_tensors_are_untouched(tmp_path: Path) -> None:
    data = torch.randn(3, 4, requires_grad=True)
    address, version = data.data_ptr(), data._version
    with tensorprobe.capture(tmp_path / "run"):
        result = torch.sin(data).t()
        result.sum().backward()
    assert (data.data_ptr(), data._version, result._version) == (address, version, 0)
    assert torch.equal(data.grad, torch.cos(data))


def test_memory_of_activations_is_given_back_while_capture_is_on(tmp_path: Path) -> None:
    with tensorprobe.capture(tmp_path / "run"):
        hidden = torch.sin(torch.randn(3, 4, requires_grad=True))
        gone = weakref.ref(hidden)
        total = hidden.sum()
        total.backward()
        del hidden, total
        assert gone() is None
