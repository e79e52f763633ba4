"""Corners of the ptdbg_ascend names in which a dump or a table could say what is not so."""

from __future__ import annotations

import csv
import fcntl
import logging
import operator
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import ptdbg_ascend as ptdbg
import tensorprobe
from tensorprobe.errors import CaptureIncomplete, RunExists
from tensorprobe.legacy.layouts import targets
from tensorprobe.legacy.ptdbg import acl
from tests.builders.ptdbg import Line, tensor, write_dump
from tests.compat.reading import read_dump

PKL = Path("ptdbg_dump_v1.0/rank0/npu_dump.pkl")


def begin(**switch: object) -> None:
    ptdbg.set_dump_path("./npu_dump.pkl")
    ptdbg.register_hook(nn.Identity(), ptdbg.acc_cmp_dump)
    ptdbg.set_dump_switch("ON", **switch)  # type: ignore[arg-type]


def test_two_processes_do_not_write_into_one_dump(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_PATIENCE_S", 0.0)
    begin()
    torch.ones(2).add(1)
    ptdbg.set_dump_switch("OFF")
    before = PKL.read_bytes()
    with PKL.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(RunExists, match="another process"):
            ptdbg.set_dump_switch("ON")
    assert PKL.read_bytes() == before and read_dump(PKL).lines
    ptdbg.set_dump_switch("ON")
    ptdbg.set_dump_switch("OFF")
    assert PKL.read_bytes() == b""


@pytest.mark.process
def test_the_recorder_holds_the_dump_and_the_trainer_does_not() -> None:
    begin()
    with PKL.open("rb") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    waiting, ending = os.pipe()
    pid = os.fork()  # as a worker of a DataLoader that outlives the dump
    if pid == 0:
        os.close(ending)
        os.read(waiting, 1)
        os._exit(0)
    ptdbg.set_dump_switch("OFF")
    with PKL.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(ending)
    os.waitpid(pid, 0)
    os.close(waiting)


def test_a_dump_that_cannot_begin_lets_go_of_its_file() -> None:
    folder = PKL.with_suffix("")
    folder.mkdir(parents=True)
    (folder / "mine.txt").touch()
    with pytest.raises(RunExists, match=r"mine\.txt"):
        begin()
    (folder / "mine.txt").unlink()
    ptdbg.set_dump_switch("ON")
    ptdbg.set_dump_switch("OFF")


@pytest.mark.usefixtures("warm_processes")
def test_a_program_that_ends_without_off_is_told_what_is_missing() -> None:
    script = (
        "import torch, ptdbg_ascend as p\n"
        "from torch.utils.checkpoint import checkpoint\n"
        "m = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())\n"
        "p.set_dump_path('npu_dump.pkl'); p.register_hook(m, p.acc_cmp_dump)\n"
        "p.set_dump_switch('ON')\n"
        "checkpoint(m, torch.ones(1, 2, requires_grad=True), use_reentrant=False).sum().backward()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "recomputed call" in done.stderr and "Dumped" in done.stderr
    assert read_dump(PKL).lines


def test_the_least_integer_is_read_back(tmp_path: Path) -> None:
    begin(filter_switch="OFF")
    torch.full((2,), -(2**63))
    ptdbg.set_dump_switch("OFF")
    result = ptdbg.compare({"npu_pkl_path": PKL, "bench_pkl_path": PKL}, tmp_path)
    with result.open(encoding="utf-8") as file:
        rows = {row["NPU Name"]: row for row in csv.DictReader(file)}
    assert rows["Torch_full_0_forward_input.1"]["Accuracy Reached or Not"] == "Yes"


def test_figures_of_no_element_are_not_shown(tmp_path: Path) -> None:
    def dump(name: str, values: list[float]) -> Path:
        line: Line = tensor("Torch_relu_0_forward_output", np.array(values, np.float32))
        write_dump(tmp_path / name, {0: [line]})
        return tmp_path / name

    npu, bench = dump("npu_v1.0", [np.nan, np.nan]), dump("bench_v1.0", [1.0, 2.0])
    result = ptdbg.compare({"npu_pkl_path": npu, "bench_pkl_path": bench}, tmp_path)
    with result.open(encoding="utf-8") as file:
        (row,) = csv.DictReader(file)
    assert (row["Cosine"], row["MaxAbsErr"], row["Accuracy Reached or Not"]) == ("N/A", "N/A", "No")
    assert "all 2 elements, 2 of them not the same" in row["Err_message"]


def test_an_operator_and_its_method_are_counted_apart() -> None:
    begin(mode="list", scope=["Tensor___add___1_forward"])
    x = torch.ones(2)
    y = (x + 1).add(3) + 5
    ptdbg.set_dump_switch("OFF")
    assert {*read_dump(PKL).lines} == {"Tensor___add___1_forward_input.0", "Tensor___add___1_forward_output"}
    assert (read_dump(PKL).lines["Tensor___add___1_forward_output"].array == y.numpy()).all()


@pytest.mark.parametrize("api", ["__add__", "Tensor___add__", "__ADD__"])
def test_api_list_takes_whole_names_in_any_case(api: str) -> None:
    begin(mode="api_list", api_list=[api])
    (torch.ones(2) + 1).add(2).add_(1)
    ptdbg.set_dump_switch("OFF")
    assert {name.partition("_0_")[0] for name in read_dump(PKL).lines} == {"Tensor___add__"}


def test_values_that_the_disk_refuses_are_not_called_no_calls() -> None:
    begin()
    PKL.with_suffix("").rmdir()
    torch.ones(2).add(1)
    with pytest.warns(CaptureIncomplete, match="calls are recorded in part"):
        ptdbg.set_dump_switch("OFF")


def test_what_torch_npu_dumps_is_not_counted_by_us(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    config = tmp_path / "dump.json"
    config.write_text('{"dump": {"dump_path": "out", "dump_mode": "all", "dump_op_switch": "on"}}')
    monkeypatch.setattr(acl, "device_is_npu", lambda model: True)
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "0")
    ptdbg.register_hook(nn.Identity(), ptdbg.acc_cmp_dump, dump_mode="acl", dump_config=config)
    with caplog.at_level(logging.INFO, "ptdbg_ascend"):
        ptdbg.set_dump_switch("ON", mode="acl", scope=["Tensor_add_0_backward"])
        torch.ones(2, requires_grad=True).add(1).sum().backward()
        ptdbg.set_dump_switch("OFF")
    assert "nothing was dumped" in caplog.text and "Dumped" not in caplog.text


def use_operators() -> None:
    x, i = torch.ones(2, 2), torch.ones(2, 2, dtype=torch.int64)
    for name in "add sub mul truediv floordiv mod pow matmul eq ne lt le gt ge".split():
        getattr(operator, name)(x, x)
        if name != "matmul":
            getattr(operator, name)(2, x)
    for name in "and_ or_ xor lshift rshift".split():
        getattr(operator, name)(i, i), getattr(operator, name)(1, i)
    for name in "iadd isub imul itruediv ifloordiv imod ipow".split():
        getattr(operator, name)(x.clone(), x)
    for name in "iand ior ixor ilshift irshift".split():
        getattr(operator, name)(i.clone(), i)
    -x, +x, abs(x), ~i, x[0], x.clip(0, 1), torch.clip(x, 0), x.subtract(1), x.absolute(), x.divide(2)
    torch.conv2d(torch.ones(1, 1, 3, 3), torch.ones(1, 1, 2, 2))


@pytest.mark.needs_torch("2.4", "Tensor.__eq__ as a call of its own")
def test_every_name_of_a_dump_can_be_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    begin(mode="stack")
    use_operators()
    ptdbg.set_dump_switch("OFF")
    names = list(read_dump(PKL).stacks)
    assert {"Tensor___pow___0_forward", "Tensor___eq___0_forward", "Tensor_clip_0_forward"} <= {*names}
    with caplog.at_level(logging.WARNING, "ptdbg_ascend"):
        begin(mode="list", scope=names)
        use_operators()
        ptdbg.set_dump_switch("OFF")  # a name that gave nothing would be a CaptureIncomplete
    assert not caplog.records
    assert list(read_dump(PKL).stacks) == names


@pytest.mark.parametrize("api", ["__pow__", "Tensor___pow__"])
def test_api_list_takes_operators_that_have_a_name_of_their_own(api: str) -> None:
    begin(mode="api_list", api_list=[api])
    torch.ones(2) ** 2
    ptdbg.set_dump_switch("OFF")
    assert "Tensor___pow___0_forward_output" in read_dump(PKL).lines


@pytest.mark.parametrize("mode", ["all", "stack", "api_stack"])
def test_calls_of_which_the_filter_leaves_nothing_are_not_counted(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        begin(mode=mode)
        torch.ones(2).add(1).sum().add(1)
        torch.arange(4).add(1)
        ptdbg.set_dump_switch("OFF")
    pkl = PKL.with_name("api_stack_npu_dump.pkl") if mode == "api_stack" else PKL
    run = tensorprobe.open_run(pkl)
    read = {call.name for call in run.calls()}
    assert f"Dumped {len(read)} calls" in caplog.text
    assert ("Tensor.add.1.forward" in read) == (mode != "all")
