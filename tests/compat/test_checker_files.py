"""The files of api_accuracy_checker: what is written is read back, what others wrote is read, what is hostile is refused."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tensorprobe.errors import RunDamaged, RunError, RunNotFound, TensorDamaged
from tensorprobe.legacy.checker.run_overflow_check import main as run_overflow_check
from tensorprobe.legacy.layouts.checker_reader import open_checker, open_checker_files
from tensorprobe.legacy.layouts.checker_writer import finish_recording, recording_folder, write_checker
from tensorprobe.model import Slot
from tensorprobe.record import Run, open_run
from tensorprobe.replay.inputs import draw
from tensorprobe.taps import capture
from tests.builders import runs as made_runs
from tests.builders.checker import read_strictly, save, tensor, write_dump

SILU = {
    "args": [tensor("torch.float16", (2, 4), requires_grad=True)],
    "kwargs": {"inplace": {"type": "bool", "value": False}},
}


def opened(path: Path) -> Run:
    run = open_checker(path)
    assert run is not None
    return run


def some_calls() -> None:
    """Arguments of every kind, forward and backward."""
    x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
    mask = torch.tensor([0.0, float("-inf"), 0.0, 0.0])
    y = F.softmax(x + mask, dim=-1, dtype=torch.float64)
    y = F.pad(y[:, None, 1:3], (0, 1), value=0.5).to(torch.bfloat16, memory_format=torch.contiguous_format)
    chosen = x[[0, 2]] + x[torch.tensor([1, 1])]
    values, places = torch.max(torch.cat([chosen, x]), dim=0)
    z = torch.where(places > 1, values, torch.tensor(2.0))
    torch.empty(0).abs()
    (y.float().sum() + z.sum()).backward()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    with capture(tmp_path / "run", mode="tensor", stacks=True):
        some_calls()
    return open_run(tmp_path / "run")


def inputs_of(run: Run) -> dict[str, list[Slot]]:
    return {call.name: [slot.model for slot in call.inputs] for call in run.calls() if not call.repeat}


@pytest.mark.parametrize("real", [False, True])
def test_what_is_written_is_read_back(run: Run, tmp_path: Path, real: bool) -> None:
    written = write_checker(run, tmp_path, "12", real=real)
    again = opened(written.forward)
    mine, theirs = inputs_of(run), inputs_of(again)
    assert sorted(mine) == sorted(theirs)
    assert (written.forward_calls, written.backward_calls) == (
        sum(name.endswith("forward") for name in mine),
        sum(name.endswith("backward") for name in mine),
    )
    assert written.left_out == {}
    for name, slots in mine.items():
        facts = [(slot.name, slot.dtype, slot.shape, slot.grad) for slot in slots]
        assert [(slot.name, slot.dtype, slot.shape, slot.grad) for slot in theirs[name]] == facts, name
        for slot, other in zip(slots, theirs[name], strict=True) if not real else ():
            assert slot.summary is not None and other.summary is not None
            assert _same(slot.summary.max, other.summary.max) and _same(slot.summary.min, other.summary.min), name
            assert math.isnan(float(other.summary.mean)) and math.isnan(float(other.summary.norm))


def _same(one: float | str, other: float | str) -> bool:
    return one == other or (math.isnan(float(one)) and math.isnan(float(other)))


def test_arguments_mean_the_same(run: Run, tmp_path: Path) -> None:
    again = opened(write_checker(run, tmp_path, "12").forward)
    for call in run.calls():
        if call.direction == "forward":
            assert _plain(again.call(call.name).args) == _plain(call.args), call.name
            assert _plain(again.call(call.name).kwargs) == _plain(call.kwargs), call.name


def _plain(tree: Any) -> Any:
    """The tree without what the layout cannot tell, which is tuples outside of an index."""
    if isinstance(tree, dict) and tree.get("type") in ("tuple", "torch.Size"):
        return [_plain(part) for part in tree["value"]]
    if isinstance(tree, list):
        return [_plain(part) for part in tree]
    return {key: _plain(part) for key, part in tree.items()} if isinstance(tree, dict) else tree


def test_an_index_keeps_tuples_and_lists_apart(run: Run, tmp_path: Path) -> None:
    again = opened(write_checker(run, tmp_path, "12").forward)
    assert again.call("Tensor.__getitem__.0.forward").args[1]["type"] == "tuple"
    assert again.call("Tensor.__getitem__.1.forward").args[1] == [0, 2]


def test_values_are_those_that_were_recorded(run: Run, tmp_path: Path) -> None:
    written = write_checker(run, tmp_path, "12", real=True)
    again = opened(written.forward)
    for call in run.calls():
        for slot in call.inputs:
            (mine,) = [other for other in again.call(call.name).inputs if other.name == slot.name]
            assert torch.equal(mine.tensor(), slot.tensor()), (call.name, slot.name)
    entry = read_strictly(written.forward)["Functional*softmax*0"]["args"][0]
    assert sorted(entry) == ["datapath", "requires_grad", "type"]
    assert Path(entry["datapath"]) == tmp_path / "forward_real_data" / "Functional*softmax*0.0.pt"
    assert torch.load(entry["datapath"], weights_only=True).shape == (3, 4)


def test_the_files_are_standard_json_with_the_older_keys(run: Run, tmp_path: Path) -> None:
    written = write_checker(run, tmp_path, "12")
    forward, backward, stack = map(read_strictly, (written.forward, written.backward, written.stack))
    assert list(forward) == list(stack)
    assert set(backward) <= set(forward)
    mask = forward["Tensor*add*0"]["args"][1]
    assert mask == {**tensor(shape=(4,)), "Max": 0.0, "Min": "-Infinity"}
    softmax = forward["Functional*softmax*0"]
    assert softmax["kwargs"]["dim"] == {"type": "int", "value": -1}
    assert softmax["kwargs"]["dtype"] == {"type": "torch.dtype", "value": "torch.float64"}
    assert forward["Tensor*__getitem__*0"]["args"][1][2] == {"type": "slice", "value": [1, 3, None]}
    assert [entry["dtype"] for entry in backward["Functional*softmax*0"]] == ["torch.float64"]
    first = stack["Functional*softmax*0"][0]
    assert first.startswith(f"File {__file__}, line ") and ", in some_calls, \n y = F.softmax(" in first


def test_the_place_in_the_program_is_read(run: Run, tmp_path: Path) -> None:
    again = opened(write_checker(run, tmp_path, "12").forward)
    stack = again.stack(again.call("Functional.softmax.0.backward"))
    assert stack is not None
    assert (stack.frames[0].file, stack.frames[0].function) == (__file__, "some_calls")
    assert stack.frames[0].code.startswith("y = F.softmax(")


OTHERS = {
    "Tensor*to*0": {
        "args": [
            tensor(),
            {"type": "torch.device", "value": "npu:0"},
            {"type": "torch.dtype", "value": "torch.float16"},
        ],
        "kwargs": {},
    },
    "Tensor*__getitem__*3": {"args": [tensor(), [{"type": "slice", "value": [1, None, 2]}, None]], "kwargs": {}},
    "Torch*cat*0": {"args": [[tensor(), tensor()]], "kwargs": {"dim": {"type": "int", "value": 0}}},
    "Torch*full*0": {
        "args": [[{"type": "int", "value": 2}], {"type": "float", "value": "NaN"}],
        "kwargs": {"a": 3, "b": None},
    },
    "_VF*lstm*0": {"args": [tensor(), [tensor(), tensor()]], "kwargs": {}},
    "Functional_conv2d_1_forward": {"args": [tensor(shape=(1, 2, 4, 4))]},
}


def test_what_the_older_tools_write_is_read(tmp_path: Path) -> None:
    path = write_dump(tmp_path, {"Functional*silu*0": SILU, **OTHERS}, {"Functional*silu*0": [None, tensor()]})
    run = opened(path)
    assert run.names(0, 0) == [
        "Functional.silu.0.forward", "Tensor.to.0.forward", "Tensor.__getitem__.3.forward", "Torch.cat.0.forward",
        "Torch.full.0.forward", "VF.lstm.0.forward", "Functional.conv2d.1.forward", "Functional.silu.0.backward",
    ]  # fmt: skip
    silu = run.call("Functional.silu.0")
    assert (silu.args, silu.kwargs) == ([{"slot": "input.0"}], {"inplace": False})
    (slot,) = silu.inputs
    assert (slot.dtype, slot.shape, slot.grad, slot.has_data) == ("float16", (2, 4), True, False)
    assert slot.summary is not None and (slot.summary.max, slot.summary.min) == (1.5, -0.5)
    assert run.call("Tensor.to.0").args[1:] == [
        {"type": "torch.device", "value": "npu:0"},
        {"type": "torch.dtype", "value": "float16"},
    ]
    index = {"type": "tuple", "value": [{"type": "slice", "value": [1, None, 2]}, None]}
    assert run.call("Tensor.__getitem__.3").args[1] == index
    assert run.call("Torch.cat.0").args == [[{"slot": "input.0.0"}, {"slot": "input.0.1"}]]
    assert run.call("Torch.full.0").args == [[2], {"type": "float", "value": "NaN"}]
    assert run.call("Torch.full.0").kwargs == {"a": 3, "b": None}
    assert [slot.name for slot in run.call("VF.lstm.0").inputs] == ["input.0", "input.1.0", "input.1.1"]
    assert [slot.name for slot in run.call("Functional.silu.0.backward").inputs] == ["input.1"]
    assert run.damage(0, 0) == []


def test_bare_infinities_and_bools_are_read(tmp_path: Path) -> None:
    text = json.dumps({"Tensor*add*0": {"args": [tensor(Max=float("nan"), Min=float("-inf"))], "kwargs": {}}})
    assert "NaN" in text
    text = text[:-1] + f', "Tensor*any*0": {json.dumps({"args": [tensor("torch.bool", Max=True, Min=False)]})}}}'
    run = opened(write_dump(tmp_path, text))
    summary = run.call("Tensor.add.0").inputs[0].summary
    assert summary is not None and math.isnan(float(summary.max)) and summary.min == float("-inf")
    assert (summary.nan, summary.inf) == (-1, -1)
    flags = run.call("Tensor.any.0").inputs[0].summary
    assert flags is not None and (flags.max, flags.min) == (1.0, 0.0)


def test_random_data_lie_between_the_recorded_ends(tmp_path: Path) -> None:
    entries = [tensor(shape=(50,), Max=3.0, Min=2.5), tensor("torch.int64", (50,), Max=7, Min=5), tensor(shape=(5,))]
    del entries[2]["Max"], entries[2]["Min"]
    run = opened(write_dump(tmp_path, {"Torch*cat*0": {"args": [entries], "kwargs": {}}}))
    values, whole, unknown = (draw(slot.model, "key") for slot in run.call("Torch.cat.0").inputs)
    assert (values[0].item(), values[-1].item()) == (2.5, 3.0)
    assert bool(((values >= 2.5) & (values <= 3)).all()) and len(values.unique()) > 10
    assert set(whole.tolist()) == {5, 6, 7}
    assert bool((unknown.abs() <= 1).all())


def test_a_dump_that_was_moved_finds_its_values(tmp_path: Path) -> None:
    there = tmp_path / "there"
    value = torch.arange(6.0).view(2, 3).t()
    entry = {"type": "torch.Tensor", "datapath": save(there, "Tensor*add*0.0.pt", value), "requires_grad": True}
    write_dump(there, {"Tensor*add*0": {"args": [entry], "kwargs": {}}}, {})
    shutil.move(there, tmp_path / "here")
    (slot,) = opened(tmp_path / "here").call("Tensor.add.0").inputs
    assert torch.equal(slot.tensor(), value)
    assert (slot.dtype, slot.shape, slot.grad) == ("float32", (3, 2), True)


class _Bomb:
    def __reduce__(self) -> Any:
        return (os.mkdir, ("exploded",))


def _elsewhere(folder: Path) -> str:
    torch.save(torch.ones(2), folder.parent / "secret.pt")
    return str(folder.parent / "secret.pt")


def _linked(folder: Path) -> str:
    (folder / "forward_real_data").mkdir()
    (folder / "forward_real_data" / "x.pt").symlink_to(_elsewhere(folder))
    return str(folder / "forward_real_data" / "x.pt")


PATHS = {
    "elsewhere": (_elsewhere, "was not opened"),
    "upwards": (lambda folder: os.path.relpath(_elsewhere(folder), folder), "outside of the dump"),
    "by the name of a folder": (
        lambda folder: "forward_real_data/..",
        "none that a file in the folder can have|names no file|outside of the dump",
    ),
    "link": (_linked, "is a symbolic link"),
    "absent": (lambda folder: "forward_real_data/x.pt", "cannot be opened|missing"),
    "no name": (lambda folder: "", "names no file"),
    "pickle": (lambda folder: save(folder, "x.pt", _Bomb()), "it was not run"),
    "no tensor": (lambda folder: save(folder, "x.pt", [1, 2]), "else than a plain tensor"),
    "empty": (lambda folder: _touch(folder), "is empty"),
}


def _touch(folder: Path) -> str:
    path = Path(save(folder, "x.pt", torch.ones(1)))
    path.write_bytes(b"")
    return str(path)


@pytest.mark.parametrize(("make", "says"), PATHS.values(), ids=PATHS)
def test_no_other_file_is_read_and_nothing_is_run(make: Any, says: str, tmp_path: Path) -> None:
    folder = tmp_path / "dump"
    folder.mkdir()
    entry = {"type": "torch.Tensor", "datapath": make(folder), "requires_grad": False}
    path = write_dump(folder, {"Tensor*add*0": {"args": [entry, tensor()], "kwargs": {}}})
    lost, sound = opened(path).call("Tensor.add.0").inputs
    assert lost.skipped is not None and not lost.has_data
    assert any(word in lost.skipped for word in says.split("|")), lost.skipped
    assert sound.shape == (2, 3)
    assert not Path("exploded").exists()


def test_a_file_that_changed_since_is_noticed(tmp_path: Path) -> None:
    datapath = save(tmp_path, "x.pt", torch.ones(4))
    entry = {"type": "torch.Tensor", "datapath": datapath, "requires_grad": False}
    (slot,) = opened(write_dump(tmp_path, {"Tensor*add*0": {"args": [entry]}})).call("Tensor.add.0").inputs
    save(tmp_path, "x.pt", torch.ones(5))
    with pytest.raises(TensorDamaged, match="holds float32"):
        slot.tensor()


WHOLE = {
    "cut off": ('{"Tensor*add*0": {"args": [', "not JSON"),
    "a list": ("[1, 2]", "not a JSON object"),
    "a number": ("7", "not a JSON object"),
    "binary": ("\x80\x02", "not a JSON object"),
    "key of a list": ('{"a": 1, 2: 3}', "not JSON"),
}


@pytest.mark.parametrize(("text", "says"), WHOLE.values(), ids=WHOLE)
def test_a_file_that_is_no_object_is_damaged(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(RunDamaged, match=says):
        list(opened(write_dump(tmp_path, text)).calls())


ENTRIES: dict[str, tuple[str, Any, str]] = {
    "no call": ("hello", SILU, "not the name of a call"),
    "no op": ("Tensor**0", SILU, "not the name of a call"),
    "other direction": ("Tensor_add_0_backward", SILU, "backward call in the forward file"),
    "a number": ("Tensor*add*0", 3, "is needed, a number is there"),
    "args of text": ("Tensor*add*0", {"args": "x"}, "args must be a list"),
    "shape": ("Tensor*add*0", {"args": [tensor(shape=(2, -1))]}, "input.0: its shape is impossible"),
    "endless shape": ("Tensor*add*0", {"args": [tensor(shape=(2**40, 2**40))]}, "impossible"),
    "shape of text": ("Tensor*add*0", {"args": [tensor() | {"shape": "[2]"}]}, "its shape is text"),
    "dtype": ("Tensor*add*0", {"args": [tensor() | {"dtype": 4}]}, "its dtype is a number"),
    "Max": ("Tensor*add*0", {"args": [tensor(Max={})]}, "its Max is an object"),
    "slice": ("Tensor*add*0", {"args": [{"type": "slice", "value": [1, 2, 3, 4]}]}, "three numbers at most"),
    "complex": ("Tensor*add*0", {"args": [{"type": "complex", "value": 3}]}, "not two numbers"),
    "int": ("Tensor*add*0", {"args": [{"type": "int", "value": "many"}]}, "'many' is given as int"),
    "deep": ("Tensor*add*0", {"args": [json.loads("[" * 300 + "]" * 300)]}, "nested too deeply"),
}


@pytest.mark.parametrize(("key", "entry", "says"), ENTRIES.values(), ids=ENTRIES)
def test_an_entry_that_is_damaged_leaves_the_others(key: str, entry: Any, says: str, tmp_path: Path) -> None:
    run = opened(write_dump(tmp_path, {key: entry, "Functional*silu*0": SILU}))
    assert [call.name for call in run.calls(on_damage="skip")] == ["Functional.silu.0.forward"]
    (damage,) = run.damage(0, 0)
    assert says in str(damage) and str(damage).startswith("forward_info_7.json, entry 1: ")
    with pytest.raises(RunDamaged, match=r"forward_info_7\.json, entry 1"):
        list(run.calls())


def test_a_broken_stack_file_hides_no_call(tmp_path: Path) -> None:
    run = opened(write_dump(tmp_path, {"Functional*silu*0": SILU}, stack="{"))
    assert [call.name for call in run.calls()] == ["Functional.silu.0.forward"]
    run = opened(write_dump(tmp_path, {"Functional*silu*0": SILU}, stack={"Functional*silu*0": 3}))
    with pytest.raises(RunDamaged, match="entry 1"):
        run.stack(run.call("Functional.silu.0"))


def test_a_folder_of_several_processes_is_refused_with_their_names(tmp_path: Path) -> None:
    for tag in ("31", "4"):
        write_dump(tmp_path, {}, {}, tag=tag)
    with pytest.raises(RunError, match=r"2 processes: 31, 4\.\n  Pass the file of one of them: .*forward_info_31.json"):
        open_checker(tmp_path)
    assert opened(tmp_path / "forward_info_4.json").steps == [0]


def test_what_is_no_dump_is_left_to_others(tmp_path: Path) -> None:
    assert open_checker(tmp_path) is None
    assert open_checker(tmp_path / "dump.json") is None
    with pytest.raises(RunNotFound, match="no file"):
        open_checker(tmp_path / "forward_info_3.json")


def test_files_of_any_name_are_read(tmp_path: Path) -> None:
    forward = write_dump(tmp_path / "one", {"Functional*silu*0": SILU}).rename(tmp_path / "f.json")
    backward = write_dump(tmp_path / "two", {"Functional*silu*0": [tensor()]}).rename(tmp_path / "b.json")
    assert open_checker_files(forward, backward).names(0, 0) == [
        "Functional.silu.0.forward",
        "Functional.silu.0.backward",
    ]
    with pytest.raises(RunNotFound, match="no file"):
        open_checker_files(forward, tmp_path / "c.json")


def test_the_front_door_opens_it(tmp_path: Path) -> None:
    path = write_dump(tmp_path, {"Functional*silu*0": SILU})
    assert open_run(path).names(0, 0) == open_run(tmp_path).names(0, 0) == ["Functional.silu.0.forward"]


@pytest.mark.process
def test_a_recording_becomes_files_once(tmp_path: Path) -> None:
    recording = recording_folder(tmp_path, 99)
    x = torch.ones(2)
    with capture(recording, mode="summary", stacks=True):
        F.silu(x)
        with pytest.raises(RunError, match="still being recorded"):
            finish_recording(recording)
    written = finish_recording(recording)
    assert written is not None and written.forward == tmp_path / "forward_info_99.json"
    assert list(read_strictly(written.forward)) == ["Functional*silu*0"]
    assert read_strictly(written.backward) == {}
    assert finish_recording(recording) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "backward_info_99.json", "forward_info_99.json", "stack_info_99.json",
    ]  # fmt: skip


def test_run_ut_writes_the_files_of_a_program_that_was_killed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from tensorprobe.legacy.checker.run_ut import _write_unfinished

    x = torch.ones(2)
    with capture(recording_folder(tmp_path, 99), mode="summary"):
        F.silu(x)
    forward = tmp_path / "forward_info_99.json"
    _write_unfinished(forward)
    assert list(read_strictly(forward)) == ["Functional*silu*0"]
    assert "its program was killed" in caplog.text
    _write_unfinished(forward)
    _write_unfinished(tmp_path / "forward.json")
    assert caplog.text.count("was killed") == 1


def test_processes_of_one_training_keep_their_values_apart(tmp_path: Path) -> None:
    calls = {
        (0, rank): [made_runs.call("Tensor.abs.0.forward", inputs=[[float(rank)]], args=[{"slot": "input.0"}])]
        for rank in (0, 1)
    }
    run = open_run(made_runs.write(tmp_path / "run", calls))
    for rank in (0, 1):
        write_checker(run, tmp_path, str(rank), rank=rank, real=True)
    values = [opened(tmp_path / f"forward_info_{rank}.json").call("Tensor.abs.0").inputs[0].tensor() for rank in (0, 1)]
    assert [value.item() for value in values] == [0.0, 1.0]


def test_an_unfinished_recording_is_pointed_out(tmp_path: Path) -> None:
    recording_folder(tmp_path, 99).mkdir()
    with pytest.raises(RunNotFound, match="cut off before it was written"):
        open_checker(tmp_path / "forward_info_99.json")


def test_a_disk_that_refuses_leaves_the_old_files(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_dump(tmp_path / "out", {"Functional*silu*0": SILU}, tag="12")

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_checker(run, tmp_path / "out", "12")
    assert list(read_strictly(path)) == ["Functional*silu*0"]
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_overflow_files_of_the_shipped_tool_are_checked_wherever_they_stand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its keys are `Torch_exp_0_forward`, its values `.npy` files by rank, at the path where it wrote them."""
    (tmp_path / "forward_real_data" / "rank0").mkdir(parents=True)
    np.save(tmp_path / "forward_real_data/rank0/Torch_exp_0_forward.0.npy", np.full((2, 3), 100, dtype=np.float32))
    where = "then/forward_real_data/rank0/Torch_exp_0_forward.0.npy"
    entry = {"type": "torch.Tensor", "datapath": where, "requires_grad": True}
    path = write_dump(tmp_path, {"Torch_exp_0_forward": {"args": [entry], "kwargs": {}}})
    (given,) = opened(path).call("Torch.exp.0").inputs
    assert given.dtype == "float32" and torch.equal(given.tensor(), torch.full((2, 3), 100.0))
    assert run_overflow_check(["-forward", str(path)]) == 0
    assert "The Torch_exp_0_forward overflow is a normal overflow." in capsys.readouterr().out
