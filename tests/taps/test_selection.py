"""What is recorded can be chosen: steps, ranks, directions, sides, names, a span, ops, modules, dtypes, bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensorprobe
from tensorprobe.errors import CaptureIncomplete, NoData, SettingsError, UnknownSetting
from tensorprobe.record import Run
from tests.taps.tiny import Stack, features, names, record, the_call


def chain(out: Path, **settings: Any) -> Run:
    """sin, cos, tanh, exp, sum, and back."""
    data = torch.ones(3, requires_grad=True)

    def action() -> None:
        torch.exp(torch.tanh(torch.cos(torch.sin(data)))).sum().backward(torch.tensor(1.0))

    return record(out, action, **settings)


def ops_of(run: Run) -> list[str]:
    """Short names in the order of execution: `sin>` forward, `<sin` backward."""
    short = []
    for call in run.calls():
        name = call.op.rpartition(".")[2]
        short.append(f"{name}>" if call.direction == "forward" else f"<{name}")
    return [name for name in short if "tensor" not in name]


EVERYTHING = ["sin>", "cos>", "tanh>", "exp>", "sum>", "<sum", "<exp", "<tanh", "<cos", "<sin"]


def test_everything_is_recorded_by_default(tmp_path: Path) -> None:
    assert ops_of(chain(tmp_path / "run")) == EVERYTHING


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_one_direction(direction: str, tmp_path: Path) -> None:
    run = chain(tmp_path / "run", directions=direction)
    assert {call.direction for call in run.calls()} == {direction}
    assert ops_of(run) == [name for name in EVERYTHING if name.endswith(">") == (direction == "forward")]
    coverage = run.coverage[0]
    assert coverage.seen == coverage.recorded + coverage.filtered + coverage.failed


@pytest.mark.parametrize("side", ["input", "output"])
def test_one_side_of_forward_and_backward(side: str, tmp_path: Path) -> None:
    run = chain(tmp_path / "run", sides=[side])
    assert ops_of(run) == EVERYTHING
    assert {slot.side for call in run.calls() for slot in call.slots} == {side}


@pytest.mark.parametrize("level", ["module", "mix"])
def test_one_side_of_modules(level: str, tmp_path: Path) -> None:
    model = Stack()
    run = record(tmp_path / "run", lambda: model(features()).sum().backward(), model=model, level=level, sides="output")
    modules = [call for call in run.calls() if call.level == "module" and call.direction == "forward"]
    assert modules
    assert {slot.side for call in modules for slot in call.slots} == {"output"}


def test_names_with_and_without_direction(tmp_path: Path) -> None:
    run = chain(tmp_path / "run", names=["Torch.cos.0", "Torch.exp.0.backward"])
    assert ops_of(run) == ["cos>", "<exp", "<cos"]


def test_span_of_stems_is_those_calls_and_all_between_in_both_directions(tmp_path: Path) -> None:
    run = chain(tmp_path / "run", span=("Torch.cos.0", "Torch.exp.0"))
    assert ops_of(run) == ["cos>", "tanh>", "exp>", "<exp", "<tanh", "<cos"]


def test_span_of_full_names_is_what_is_executed_from_first_to_last(tmp_path: Path) -> None:
    run = chain(tmp_path / "run", span=("Torch.exp.0.forward", "Torch.tanh.0.backward"))
    assert ops_of(run) == ["exp>", "sum>", "<sum", "<exp", "<tanh"]
    last = the_call(run, "Torch.tanh.0.backward")
    assert [slot.name for slot in last.slots] == ["input.0", "output.0"]


def test_span_in_forward_only_has_no_backward(tmp_path: Path) -> None:
    run = chain(tmp_path / "run", span=("Torch.sin.0.forward", "Torch.cos.0.forward"))
    assert ops_of(run) == ["sin>", "cos>"]
    assert [slot.name for slot in the_call(run, "Torch.cos.0.forward").outputs] == ["output.0"]


def test_span_in_backward_only(tmp_path: Path) -> None:
    run = chain(tmp_path / "run", span=("Torch.exp.0.backward", "Torch.cos.0.backward"))
    assert ops_of(run) == ["<exp", "<tanh", "<cos"]


def test_span_whose_last_backward_has_several_inputs_holds_all_of_them(tmp_path: Path) -> None:
    linear = nn.Linear(3, 3)

    def action() -> None:
        torch.sin(linear(torch.ones(2, 3, requires_grad=True))).sum().backward()

    run = record(tmp_path / "run", action, span=("Torch.sin.0.forward", "Functional.linear.0.backward"))
    last = the_call(run, "Functional.linear.0.backward")
    assert {slot.name for slot in last.slots} == {"input.0", "output.0", "output.1", "output.2"}


def test_span_is_looked_for_in_each_step(tmp_path: Path) -> None:
    with tensorprobe.capture(tmp_path / "run", span=("Torch.cos.0", "Torch.tanh.0")) as probe:
        for _ in range(2):
            torch.tanh(torch.cos(torch.sin(torch.ones(2))))
            probe.step()
    run = tensorprobe.open_run(tmp_path / "run")
    assert [names(run, step=step) for step in (0, 1)] == [["Torch.cos.0.forward", "Torch.tanh.0.forward"]] * 2


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [(["sin"], {"sin"}), (["Torch.[ct]*"], {"cos", "tanh"}), (["s"], {"sin", "cos", "sum"}), ("*tanh", {"tanh"})],
)
def test_ops_by_part_and_by_glob(patterns: Any, expected: set[str], tmp_path: Path) -> None:
    run = chain(tmp_path / "run", ops=patterns)
    assert {call.op.rpartition(".")[2] for call in run.calls()} - {"tensor", "ones_like"} == expected


@pytest.mark.parametrize("level", ["module", "api", "mix"])
@pytest.mark.parametrize("pattern", ["blocks.1", "blocks.1*"])
def test_modules_by_part_and_by_glob(pattern: str, level: str, tmp_path: Path) -> None:
    model = Stack()
    run = record(
        tmp_path / "run", lambda: model(features()).sum().backward(), model=model, level=level, modules=pattern
    )
    assert {call.module for call in run.calls()} <= {"blocks.1", "blocks.1.linear", "blocks.1.dropout"}
    assert "blocks.1.linear" in {call.module for call in run.calls()}
    assert {call.direction for call in run.calls()} == {"forward", "backward"}


def test_steps(tmp_path: Path) -> None:
    with tensorprobe.capture(tmp_path / "run", steps="0,2-3") as probe:
        for step in range(5):
            assert probe.step_number == step
            torch.sin(torch.full((2,), float(step)))
            probe.step()
    run = tensorprobe.open_run(tmp_path / "run")
    assert run.steps == [0, 2, 3]
    for step in run.steps:
        assert the_call(run, "Torch.sin.0.forward", step=step).inputs[0].tensor().tolist() == [step, step]


def test_no_mode_is_on_in_a_step_that_is_not_wanted(tmp_path: Path) -> None:
    with tensorprobe.capture(tmp_path / "run", steps=[1]) as probe:
        assert torch._C._len_torch_function_stack() == 0
        probe.step()
        assert torch._C._len_torch_function_stack() == 1
        probe.step()
        assert torch._C._len_torch_function_stack() == 0


def test_backward_of_an_earlier_step_is_noted_and_not_put_into_a_later_one(tmp_path: Path) -> None:
    data = torch.ones(2, requires_grad=True)
    with tensorprobe.capture(tmp_path / "run") as probe:
        loss = torch.sin(data).sum()
        probe.step()
        loss.backward()
    assert probe.coverage is not None
    assert any("earlier step" in note for note in probe.coverage.notes)
    assert "Torch.sin.0.backward" not in names(tensorprobe.open_run(tmp_path / "run"))


@pytest.mark.parametrize("wanted", [[0], [1]])
def test_ranks(wanted: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with tensorprobe.capture(tmp_path / "run", ranks=wanted) as probe:
        torch.sin(torch.ones(2))
        probe.step()
    if wanted == [1]:
        run = tensorprobe.open_run(tmp_path / "run")
        assert run.ranks == [1]
        assert run.manifest.world_size == 2
    else:
        assert probe.coverage is None
        assert not (tmp_path / "run").exists()


def test_floating_only_keeps_the_values_of_floating_and_complex_tensors(tmp_path: Path) -> None:
    def action() -> None:
        torch.gather(torch.ones(3), 0, torch.tensor([1]))
        torch.sin(torch.tensor([1j]))

    run = record(tmp_path / "run", action, floating_only=True)
    found = {slot.dtype: slot for call in run.calls() for slot in call.slots}
    assert found["float32"].has_data
    assert found["complex64"].has_data
    assert not found["int64"].has_data
    assert found["int64"].summary is None
    assert found["int64"].shape == (1,)


@pytest.mark.parametrize("settings", [{}, {"ring_bytes": 1 << 20}], ids=["whole", "in pieces"])
def test_after_max_bytes_there_are_summaries_only_and_a_note(settings: dict[str, Any], tmp_path: Path) -> None:
    size = 1_000_000 if settings else 1000

    def action() -> None:
        for number in range(4):
            torch.sin(torch.full((size,), float(number)))

    run = record(tmp_path / "run", action, max_bytes=size * 4 * 3, **settings)
    slots = [slot for call in run.calls() for slot in call.slots]
    assert all(slot.summary is not None and slot.digest for slot in slots)
    kept = [slot for slot in slots if slot.has_data]
    assert 0 < len(kept) < len(slots)
    for slot in kept:
        assert slot.summary is not None
        assert slot.tensor().max().item() == slot.summary.max
    coverage = run.coverage[0]
    assert coverage.bytes_written <= size * 4 * 3
    assert any("max_bytes" in note and "summaries only" in note for note in coverage.notes)
    with pytest.raises(NoData, match="large enough max_bytes"):
        next(slot for slot in slots if not slot.has_data).tensor()


def test_name_that_matches_nothing_is_told_with_the_nearest(tmp_path: Path) -> None:
    with pytest.warns(CaptureIncomplete, match=r"nothing matched 'Torch\.son\.0'. Nearest: Torch\.sin\.0"):
        run = chain(tmp_path / "run", names=["Torch.son.0", "Torch.cos.0"])
    assert list(run.coverage[0].unmatched) == ["Torch.son.0"]
    assert "Torch.sin.0" in run.coverage[0].unmatched["Torch.son.0"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"levl": "api"}, r"unknown setting 'levl'\. Did you mean 'level'\?"),
        ({"level": "modul"}, r"level is 'modul'; expected module, api, aten or mix\. Did you mean 'module'\?"),
        ({"mode": "full"}, r"mode is 'full'; expected summary, tensor or structure"),
        ({"steps": "1-x"}, r"steps: '1-x' is not a number or a range"),
        ({"steps": [-1]}, r"steps: -1 is not a number"),
        ({"steps": "4-2"}, r"the range '4-2' is empty"),
        ({"steps": 1.5}, r"steps is 1.5; expected numbers"),
        ({"ranks": "a"}, r"ranks: 'a'"),
        ({"directions": ["forwards"]}, r"directions has 'forwards'.*Did you mean 'forward'\?"),
        ({"directions": []}, r"directions is empty"),
        ({"sides": "inputs"}, r"sides has 'inputs'"),
        ({"names": [1]}, r"names is \[1\]; expected a name"),
        ({"names": [""]}, r"names is \[''\]; expected a name"),
        ({"names": 5}, r"names is 5; expected a name"),
        ({"span": ["Torch.sin.0"]}, r"span has 1 name; expected two"),
        ({"max_bytes": "lots"}, r"max_bytes: 'lots' is not a size"),
        ({"max_bytes": -5}, r"max_bytes: -5 is not a size"),
        ({"ring_bytes": 1000}, r"ring_bytes is 1,000; expected at least 1 MiB"),
        ({"floating_only": "yes"}, r"floating_only"),
        ({"stacks": 3}, r"stacks"),
        ({"steps_by": "epoch"}, r"steps_by is 'epoch'"),
    ],
    ids=str,
)
def test_wrong_setting_is_refused_before_anything_is_written(settings: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        tensorprobe.Probe(tmp_path / "run", **settings)
    assert isinstance(caught.value, UnknownSetting) == ("levl" in settings)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("given", "expected"), [("2 GB", 2 << 30), ("512K", 512 << 10), ("1.5MiB", 3 << 19), (77, 77)])
def test_sizes_have_units(given: Any, expected: int) -> None:
    from tensorprobe.settings import parse_bytes

    assert parse_bytes(given, "max_bytes") == expected
