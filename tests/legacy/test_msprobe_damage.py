"""Broken and hostile dumps of msprobe give what is sound in them, or an error of ours that says where it is wrong."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tensorprobe
from tensorprobe.errors import RunDamaged, TensorDamaged, TensorprobeError
from tensorprobe.legacy.layouts.msprobe_entries import users_frames
from tensorprobe.model import Frame
from tensorprobe.record import Run, open_run
from tests.builders.msprobe import conv_net, described, write_conv_net, write_dump, write_one


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "Expected `object`"),
        (b"{}", "missing required field `data`"),
        (b'{"data": []}', "Expected `object`, got `array`"),
        (b'{"data": {"Torch.mm.0.forward": NaN', "not JSON"),
        (b'{"data": {"Torch.mm.0.forward": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}", "nested too deeply"),
        (b'{"data": {"\xff": {}}}', "not UTF-8|not JSON|Invalid UTF-8"),
        (b"\x00" * 100, "not JSON"),
    ],
)
def test_broken_index_is_told_with_its_file(tmp_path: Path, text: bytes, reason: str) -> None:
    (tmp_path / "step0/rank0").mkdir(parents=True)
    (tmp_path / "step0/rank0/dump.json").write_bytes(text)
    run = open_run(tmp_path)
    with pytest.raises(RunDamaged, match=r"step0/rank0/dump\.json' cannot be read") as error:
        list(run.calls())
    assert any(each in str(error.value) for each in reason.split("|"))


@pytest.mark.parametrize(
    ("name", "entry", "reason"),
    [
        ("optimizer", {}, "'optimizer': that is not the name of a call"),
        ("Torch.mm.0.sideways", {}, "not the name of a call"),
        ("Torch.mm\n.0.forward", {}, "not the name of a call"),
        ("Torch.mm.²3.forward", {}, "not the name of a call"),
        (f"Torch.mm.{'9' * 30}.forward", {}, "not the name of a call"),
        ("Torch.mm.7.forward", [], "an object is needed, a list is there"),
        ("Torch.mm.7.forward", {"output": [described(shape="[2]")]}, "output.0: its shape is not a list of sizes"),
        ("Torch.mm.7.forward", {"output": [described(shape=[-1])]}, "its shape is not a list of sizes"),
        ("Torch.mm.7.forward", {"output": [described(shape=[1] * 65)]}, "65 dimensions"),
        ("Torch.mm.7.forward", {"output": [described(dtype=5)]}, "its dtype is a int, not a text"),
        ("Torch.mm.7.forward", {"output": [described(Max=[])]}, "its Max is a list, not a number"),
        ("Torch.mm.7.forward", {"output": [described(Norm="many")]}, "its Norm is a str, not a number"),
        ("Module.x.L.parameters_grad.0", 5, "an object is needed, a int is there"),
    ],
)
def test_broken_entry_does_not_concern_the_others(tmp_path: Path, name: str, entry: Any, reason: str) -> None:
    folder = tmp_path / "step0/rank0"
    folder.mkdir(parents=True)
    data = {"Torch.mm.0.forward": {}, name: entry, "Torch.mm.1.forward": {}}
    (folder / "dump.json").write_text(json.dumps({"data": data}))
    run = open_run(tmp_path)
    assert [(call.index, call.name) for call in run.calls(on_damage="skip")] == [
        (0, "Torch.mm.0.forward"),
        (2, "Torch.mm.1.forward"),
    ]
    (damage,) = run.damage(0, 0)
    assert (damage.file, damage.line) == ("step0/rank0/dump.json", 2)
    assert reason in damage.reason
    with pytest.raises(RunDamaged, match=r"step0/rank0/dump\.json, entry 2 of its data"):
        list(run.calls())
    assert run.call("Torch.mm.1").index == 2


def test_deep_arguments_are_damage(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(150):
        deep = [deep]
    write_dump(tmp_path / "step0/rank0", {"Torch.mm.0.forward": {"input_args": [deep]}})
    (damage,) = open_run(tmp_path).damage(0, 0)
    assert "nested too deeply" in damage.reason
    with pytest.raises(RunDamaged, match="nested too deeply"):
        open_run(tmp_path).call("Torch.mm.0.forward")


def test_broken_stacks_concern_only_stacks(tmp_path: Path) -> None:
    write_conv_net(tmp_path)
    path = tmp_path / "step0/proc77/stack.json"
    path.write_text(path.read_text()[:-20])
    run = open_run(tmp_path)
    call = next(run.calls())
    with pytest.raises(RunDamaged, match=r"stack\.json' cannot be read: not JSON"):
        run.stack(call)
    assert tensorprobe.compare(tmp_path, tmp_path).exit_code == 0


def test_broken_construct_says_how_to_go_on(tmp_path: Path) -> None:
    write_conv_net(tmp_path)
    path = tmp_path / "step0/proc77/construct.json"
    path.write_text("[]")
    with pytest.raises(
        RunDamaged, match=r"construct\.json' cannot be read(.|\n)*Move it away to read the calls without"
    ):
        list(open_run(tmp_path).calls())
    path.unlink()
    (tmp_path / "step0/proc77/stack.json").unlink()
    assert {(call.module, call.stack) for call in open_run(tmp_path).calls()} == {("", None), ("conv", None)}


@pytest.mark.parametrize(
    "name", ["../outside.pt", "/etc/passwd.pt", "a/b.pt", "..\\x.pt", "x\0.pt", "link.pt", "pipe.pt", "folder.pt"]
)
def test_file_outside_the_folder_is_not_opened(tmp_path: Path, name: str) -> None:
    folder = write_one(tmp_path, output=[described(data_name=name)])
    values = folder / "dump_tensor_data"
    values.mkdir(exist_ok=True)
    torch.save(torch.ones(2), folder / "outside.pt")
    (values / "link.pt").symlink_to(folder / "outside.pt")
    os.mkfifo(values / "pipe.pt")
    (values / "folder.pt").mkdir()
    (slot,) = open_run(tmp_path).call("Torch.mm.0").slots
    with pytest.raises(TensorDamaged, match=r"none that a file in the folder can have|It was not opened"):
        slot.tensor()


def test_linked_folders_are_refused(tmp_path: Path) -> None:
    data, _, _ = conv_net()
    write_dump(tmp_path / "elsewhere/rank0", data)
    (tmp_path / "dump/step0").mkdir(parents=True)
    (tmp_path / "dump/step0/rank0").symlink_to(tmp_path / "elsewhere/rank0")
    with pytest.raises(RunDamaged, match="a symbolic link"):
        open_run(tmp_path / "dump")
    write_dump(tmp_path / "other/step0/rank0", data)
    shutil.rmtree(tmp_path / "other/step0/rank0/dump_tensor_data")
    (tmp_path / "other/step0/rank0/dump_tensor_data").symlink_to(tmp_path / "elsewhere/rank0/dump_tensor_data")
    with pytest.raises(TensorDamaged, match="a symbolic link"):
        open_run(tmp_path / "other").call("Functional.conv2d.0").slots[0].tensor()


def test_index_that_changes_under_a_reader_is_told(tmp_path: Path) -> None:
    run = open_run(write_conv_net(tmp_path, steps=3))
    calls = run.calls(0)
    slot = next(calls).slots[0]
    list(run.calls(1))
    list(run.calls(2))  # now the first segment must read its files again
    (tmp_path / "step0/proc77/dump.json").write_text('{"data": {}}')
    with pytest.raises(TensorDamaged, match=r"dump\.json' changed since it was read"):
        slot.tensor()
    with pytest.raises(RunDamaged, match=r"dump\.json' changed since it was read"):
        next(calls)


def test_broken_entry_is_skipped_and_counted_by_a_comparison(tmp_path: Path) -> None:
    one, other = write_conv_net(tmp_path / "a"), write_conv_net(tmp_path / "b", error=0.25)
    path = other / "step0/proc77/dump.json"
    index = json.loads(path.read_text())
    index["data"]["Torch.max.0.backward"]["input"][0]["shape"] = None
    path.write_text(json.dumps(index))
    result = tensorprobe.compare(one, other)
    assert result.divergence is not None
    assert result.divergence.call == "Functional.conv2d.0.forward"
    assert sum(result.summary.buckets.skipped.values()) == 2
    assert result.summary.buckets.paired == 8


@pytest.fixture(scope="module")
def whole_dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_conv_net(tmp_path_factory.mktemp("whole"), md5=True)


def read_everything(run: Run) -> int:
    """How many tensors could be read; errors of ours are expected, anything else is not."""
    sound = 0
    for call in run.calls(on_damage="skip"):
        assert isinstance(call.args, list | None)
        for slot in call.slots:
            try:
                sound += bool(slot.has_data and slot.tensor().numel())
            except TensorprobeError:
                continue
        try:
            run.stack(call)
        except TensorprobeError:
            continue
    return sound


def test_unchanged_dump_is_wholly_read(whole_dump: Path) -> None:
    assert read_everything(open_run(whole_dump)) == 26


@settings(deadline=None, max_examples=200)
@given(choices=st.data())
def test_changed_bytes_give_results_or_an_error_of_ours(whole_dump: Path, choices: st.DataObject) -> None:
    files = [
        "dump.json",
        "dump.json",
        "stack.json",
        "construct.json",
        "dump_tensor_data/Torch.max.0.forward.input.0.pt",
    ]
    path = whole_dump / "step0/proc77" / choices.draw(st.sampled_from(files))
    original = path.read_bytes()
    content = bytearray(original)
    for _ in range(choices.draw(st.integers(1, 4))):
        at = choices.draw(st.integers(0, max(len(content) - 1, 0)))
        piece = choices.draw(
            st.one_of(st.binary(max_size=3), st.sampled_from([b"[", b"null", b'"', b"1e999", b"{}", b"NaN"]))
        )
        content[at : at + choices.draw(st.integers(0, 8))] = piece
    try:
        path.write_bytes(content)
        try:
            read_everything(open_run(whole_dump))
        except TensorprobeError:
            return
    finally:
        path.write_bytes(original)


def test_a_frame_of_a_hostile_length_costs_little() -> None:
    lines = ["File " + ", line 1, in " * 200_000] * 5
    started = time.process_time()
    assert users_frames([*lines, "File a.py, line 3, in f, \n x = 1"]) == (Frame("a.py", 3, "f", "x = 1"),)
    assert time.process_time() - started < 5
