"""How much of each tensor is kept (summary, tensor, structure), and where in the user's program each call was made."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tensorprobe
from tensorprobe.record import Run
from tests.taps.tiny import LEVELS, Stack, features, names, record, the_call


def run_stack(out: Path, **settings: object) -> Run:
    torch.manual_seed(0)
    model = Stack()
    return record(out, lambda: model(features()).sum().backward(), model=model, **settings)


@pytest.mark.parametrize("level", LEVELS)
def test_modes_agree_on_names_and_shapes(level: str, tmp_path: Path) -> None:
    runs = {mode: run_stack(tmp_path / mode, mode=mode, level=level) for mode in ("tensor", "summary", "structure")}
    described = {
        mode: [(call.name, [(slot.name, slot.dtype, slot.shape) for slot in call.slots]) for call in run.calls()]
        for mode, run in runs.items()
    }
    assert described["tensor"] == described["summary"] == described["structure"]
    slots = {mode: [slot for call in run.calls() for slot in call.slots] for mode, run in runs.items()}
    assert all(slot.has_data and slot.summary and slot.digest for slot in slots["tensor"])
    assert all(slot.summary and slot.digest and not slot.has_data for slot in slots["summary"])
    assert not any(slot.summary or slot.digest or slot.has_data for slot in slots["structure"])
    assert [s.digest for s in slots["tensor"]] == [s.digest for s in slots["summary"]]
    assert not list((tmp_path / "summary").rglob("tensors.bin"))
    assert not list((tmp_path / "structure").rglob("tensors.bin"))


def test_summary_says_what_the_values_are(tmp_path: Path) -> None:
    tensor = torch.tensor([1.0, -3.0, float("nan"), float("inf"), 2.0])
    run = record(tmp_path / "run", lambda: torch.sin(tensor), mode="summary")
    found = the_call(run, "Torch.sin.0.forward").inputs[0].summary
    assert found is not None
    assert (found.max, found.min, found.nan, found.inf) == (float("inf"), -3.0, 1, 1)
    assert found.mean == pytest.approx(0.0)
    assert found.norm == pytest.approx(14**0.5)


def test_equal_values_are_stored_once_and_read_twice(tmp_path: Path) -> None:
    run = record(tmp_path / "run", lambda: torch.sin(torch.cos(torch.ones(1000))))
    cos, sin = the_call(run, "Torch.cos.0.forward"), the_call(run, "Torch.sin.0.forward")
    assert cos.outputs[0].offset == sin.inputs[0].offset
    assert torch.equal(cos.outputs[0].tensor(), sin.inputs[0].tensor())


def test_stack_has_the_users_frames_innermost_first(tmp_path: Path) -> None:
    def innermost() -> torch.Tensor:
        return torch.sin(torch.ones(2))

    def outer() -> torch.Tensor:
        return innermost()

    run = record(tmp_path / "run", outer)
    stack = run.stack(the_call(run, "Torch.sin.0.forward"))
    assert stack is not None
    assert [frame.function for frame in stack.frames[:2]] == ["innermost", "outer"]
    assert stack.frames[0].code == "return torch.sin(torch.ones(2))"
    assert stack.frames[0].file == __file__


@pytest.mark.parametrize("level", LEVELS)
def test_no_frame_is_of_torch_or_of_us(level: str, tmp_path: Path) -> None:
    model = Stack(lambda block, x: checkpoint(block, x, use_reentrant=False))
    run = record(tmp_path / "run", lambda: model(features()).sum().backward(), model=model, level=level)
    ours = str(Path(tensorprobe.__file__).parent)
    torchs = str(Path(torch.__file__).parent)
    stacks = {call.stack: run.stack(call) for call in run.calls()}
    frames = [frame for stack in stacks.values() if stack is not None for frame in stack.frames]
    assert len(frames) > 5
    assert not [frame for frame in frames if frame.file.startswith((ours, torchs)) or "importlib" in frame.file]


def test_each_stack_is_stored_once_in_a_step(tmp_path: Path) -> None:
    with tensorprobe.capture(tmp_path / "run") as probe:
        for _ in range(2):
            for _ in range(5):
                torch.sin(torch.ones(2))
            probe.step()
    for step in (0, 1):
        lines = (tmp_path / "run" / f"step{step}" / "rank0" / "stacks.jsonl").read_text().splitlines()
        assert len(lines) == len(set(lines)) == 1


def test_backward_has_the_stack_of_its_forward(tmp_path: Path) -> None:
    run = record(tmp_path / "run", lambda: torch.sin(torch.ones(2, requires_grad=True)).sum().backward())
    assert the_call(run, "Torch.sin.0.backward").stack == the_call(run, "Torch.sin.0.forward").stack is not None


def test_stacks_are_off_in_summary_mode_unless_asked_for(tmp_path: Path) -> None:
    assert {call.stack for call in run_stack(tmp_path / "a", mode="summary").calls()} == {None}
    assert {call.stack for call in run_stack(tmp_path / "b", stacks=False).calls()} == {None}
    assert None not in {call.stack for call in run_stack(tmp_path / "c", mode="summary", stacks=True).calls()}
    assert not (tmp_path / "a" / "step0" / "rank0" / "stacks.jsonl").exists()


def test_calls_know_their_module_and_their_parent(tmp_path: Path) -> None:
    run = run_stack(tmp_path / "run", level="mix")
    linear = the_call(run, "Functional.linear.1.forward")
    assert linear.module == "blocks.0.linear"
    assert linear.parent == "Module.blocks.0.linear.Linear.forward.0"
    assert the_call(run, linear.parent).parent == "Module.blocks.0.Block.forward.0"
    assert the_call(run, "Module.Stack.forward.0").parent is None
    backward = the_call(run, "Functional.linear.1.backward")
    assert backward.parent == "Module.blocks.0.linear.Linear.backward.0"


def test_module_calls_hold_parameters_and_their_gradients(tmp_path: Path) -> None:
    run = run_stack(tmp_path / "run", level="module")
    forward, backward = (the_call(run, f"Module.stem.Linear.{way}.0") for way in ("forward", "backward"))
    assert [slot.name for slot in forward.slots] == [
        "input.0",
        "parameters.weight",
        "parameters.bias",
        "output.0",
    ]
    assert {"parameters.weight", "parameters.bias"} <= {slot.name for slot in backward.slots}


def test_aten_calls_know_the_call_they_are_the_backward_of(tmp_path: Path) -> None:
    run = run_stack(tmp_path / "run", level="aten")
    origins = {call.origin for call in run.calls() if call.name.startswith("Aten.mm") and call.direction == "backward"}
    assert {f"Functional.linear.{number}.backward" for number in range(4)} == origins
    parents = {call.parent for call in run.calls() if call.name.startswith("Aten.addmm")}
    assert parents == {f"Functional.linear.{number}.forward" for number in range(4)}


def test_model_nobody_named_is_learnt_from_its_first_call(tmp_path: Path) -> None:
    model = Stack()
    run = record(tmp_path / "run", lambda: model(features()), level="mix")
    assert "Module.blocks.1.linear.Linear.forward.0" in names(run)


@pytest.mark.parametrize("how", ["list", "dict", "tuple of one"])
def test_models_in_a_container_are_named_by_their_place(how: str, tmp_path: Path) -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    given = {"list": [first, second], "dict": {"a": first, "b": second}, "tuple of one": (first,)}[how]
    run = record(tmp_path / "run", lambda: second(first(torch.ones(1, 2))), model=given, level="module")
    expected = {
        "list": ["Module.0.Linear.forward.0", "Module.1.Linear.forward.0"],
        "dict": ["Module.a.Linear.forward.0", "Module.b.Linear.forward.0"],
        "tuple of one": ["Module.Linear.forward.0", "Module.Linear.forward.1"],
    }
    assert names(run) == expected[how]


def test_steps_count_from_zero_and_numbers_start_again(tmp_path: Path) -> None:
    with tensorprobe.capture(tmp_path / "run") as probe:
        for _ in range(2):
            torch.sin(torch.sin(torch.ones(2)))
            probe.step()
    run = tensorprobe.open_run(tmp_path / "run")
    for step in (0, 1):
        assert [name for name in names(run, step=step) if "sin" in name] == [
            "Torch.sin.0.forward",
            "Torch.sin.1.forward",
        ]
