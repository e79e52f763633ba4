"""A forward that is run again, and a backward that is: marked as repeats, and never moving the numbers of other calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tensorprobe.record import Run
from tests.taps.tiny import LEVELS, Stack, features, names, record

KINDS = {"reentrant": True, "not reentrant": False}


def run_stack(out: Path, level: str, reentrant: bool | None) -> Run:
    torch.manual_seed(0)
    around = None if reentrant is None else lambda block, x: checkpoint(block, x, use_reentrant=reentrant)
    model = Stack(around)
    return record(out, lambda: model(features()).sum().backward(), model=model, level=level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_names_are_those_of_a_run_without_checkpointing(kind: str, level: str, tmp_path: Path) -> None:
    plain = run_stack(tmp_path / "plain", level, None)
    checked = run_stack(tmp_path / "checked", level, KINDS[kind])
    expected = {call.name for call in plain.calls() if not is_of_checkpointing_itself(call.name)}
    first_time = [call.name for call in checked.calls() if call.repeat == 0]
    assert len(first_time) == len(set(first_time))
    assert {name for name in first_time if not is_of_checkpointing_itself(name)} == expected
    repeated = [call for call in checked.calls() if call.repeat]
    assert repeated
    assert {call.direction for call in repeated} == {"forward"}
    assert {call.name for call in repeated if not is_of_checkpointing_itself(call.name)} <= expected


def is_of_checkpointing_itself(name: str) -> bool:
    """Checkpointing detaches what it keeps, at other places than autograd does without it; before torch 2.8 it makes an
    empty tensor.
    """
    return "detach" in name or "empty" in name


@pytest.mark.parametrize("kind", KINDS)
def test_recomputed_calls_have_the_values_of_the_first_time(kind: str, tmp_path: Path) -> None:
    run = run_stack(tmp_path / "run", "api", KINDS[kind])
    first = {call.name: call for call in run.calls() if call.repeat == 0}
    compared = 0
    for again in (call for call in run.calls() if call.repeat):
        if is_of_checkpointing_itself(again.name):
            continue
        outputs = {slot.name: slot.digest for slot in first[again.name].outputs}
        assert {slot.name: slot.digest for slot in again.outputs} == outputs
        compared += 1
    assert compared >= 2


@pytest.mark.parametrize("kind", KINDS)
def test_backward_values_are_those_of_a_run_without_checkpointing(kind: str, tmp_path: Path) -> None:
    def gradients(run: Run) -> dict[tuple[str, str], str | None]:
        return {
            (call.name, slot.name): slot.digest
            for call in run.calls()
            if call.direction == "backward"
            for slot in call.slots
        }

    plain = gradients(run_stack(tmp_path / "plain", "mix", None))
    checked = gradients(run_stack(tmp_path / "checked", "mix", KINDS[kind]))
    assert plain == checked


def test_second_backward_through_a_kept_graph_is_a_repeat(tmp_path: Path) -> None:
    data = torch.randn(3, requires_grad=True)

    def action() -> None:
        loss = torch.sin(data).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    run = record(tmp_path / "run", action)
    found = [call.repeat for call in run.calls() if call.name == "Torch.sin.0.backward"]
    assert found == [0, 1]


def test_checkpoint_made_before_the_probe_is_recomputed_while_it_records(tmp_path: Path) -> None:
    data = torch.randn(3, requires_grad=True)
    results = [checkpoint(lambda x: torch.sin(x).exp(), data, use_reentrant=kind) for kind in KINDS.values()]
    run = record(tmp_path / "run", lambda: [result.sum().backward() for result in results])
    assert len(names(run)) == len(set(names(run)))
    assert "Torch.sin.0.forward" in names(run)


def test_checkpoint_made_while_recording_works_after_stop(tmp_path: Path) -> None:
    data = torch.randn(3, requires_grad=True)
    kept: list[Any] = []
    record(
        tmp_path / "run",
        lambda: kept.extend(checkpoint(lambda x: torch.sin(x).exp(), data, use_reentrant=k) for k in KINDS.values()),
    )
    for result in kept:
        data.grad = None
        result.sum().backward()
        torch.testing.assert_close(data.grad, torch.cos(data) * torch.sin(data).exp())
