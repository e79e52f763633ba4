"""The guide of msprobe's online compare, followed as printed: on the simulated NPU with planted faults, and on the CPU.

One process has all that is to be seen of the NPU; what the CPU is needed for runs here. The tables are read with csv and
numpy only, and judged again from the dumped files by the three rules of the guide.
"""

from __future__ import annotations

import csv
import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch

from msprobe.pytorch.common import seed_all
from msprobe.pytorch.online_dispatch import PtdbgDispatch
from tensorprobe.errors import SettingsError
from tensorprobe.legacy.msprobe.online import COLUMNS
from tensorprobe.taps import capture
from tests.taps.scripts import run_python, write_script

pytestmark = pytest.mark.xdist_group("online-guide")  # one worker, so that the NPU's process runs once

IMPORTS = """\
from msprobe.pytorch.common import seed_all
from msprobe.pytorch.online_dispatch import PtdbgDispatch

seed_all()
"""
FORWARD = """\
with PtdbgDispatch(dump_mode="auto", dump_path="/home/dump"):
    output = model_cpu(inputs)
"""
BACKWARD = """\
with PtdbgDispatch(dump_mode="auto", dump_path="/home/dump"):
    loss.backward()
"""
"""The example of the guide, its indentation put right; only the place to dump to is another when it runs."""

READER = """\
import json, os, sys, torch
from torch import nn
from tensorprobe import sim

sim.enable()


def build():
    torch.manual_seed(1)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5)
    return nn.Sequential(*layers).to("npu")


def train(model, steps=3):
    optimizer, random = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), torch.Generator().manual_seed(2)
    losses = []
    for _ in range(steps):
        batch = torch.randn(4, 3, 6, 6, generator=random).to("npu")
        loss = nn.functional.cross_entropy(model(batch), torch.arange(4, device="npu"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    return [*losses, *(value.cpu().numpy().tobytes().hex() for value in model.state_dict().values())]


def say(what):
    sys.stderr.flush()
    print("==", what, file=sys.stderr, flush=True)


plain = train(build())
model_cpu = build()
inputs = torch.randn(4, 3, 6, 6).to("npu")
conv = sim.install(sim.make_fault(op="aten::convolution_overrideable", kind="swap-rows", dim=1, nth=0))
norm = sim.install(sim.make_fault(op="aten::native_batch_norm_backward", kind="swap-rows", dim=1, nth=0))
"""
LOSS = "loss = nn.functional.cross_entropy(output, torch.arange(4, device='npu'))\n"
THE_REST = """\
conv.remove(), norm.remove()
say("clean")
with PtdbgDispatch(dump_mode="auto", dump_path="steps", tag="clean"):
    watched = train(build())
say("late")
late = sim.make_fault(op="aten::convolution_overrideable", kind="swap-rows", dim=1, nth=2)
with sim.fault(late.op, late.kind, nth=2, **late.params), PtdbgDispatch("auto", dump_path="steps", tag="late"):
    train(build())
say("workers")
os.cpu_count = lambda: 8
with sim.fault(late.op, late.kind, nth=2, **late.params):
    with PtdbgDispatch("auto", dump_path="steps", tag="workers", process_num=2):
        train(build())
say("rules")
with PtdbgDispatch(dump_mode="all", dump_path="rules", debug=True):
    for size, amount in json.loads(sys.argv[1]):
        with sim.fault("aten::abs", "element", index=0, amount=amount):
            torch.abs(torch.full((8,), size, device="npu"))
    with sim.fault("aten::neg", "nan", index=3):
        torch.neg(torch.ones(8, device="npu"))
say("half")
library = torch.library.Library("aten", "IMPL")
ndtri = lambda x: torch.special.ndtri(x.cpu().double()).to(x.dtype).to("npu")
library.impl("special_ndtri", ndtri, "PrivateUse1")
with PtdbgDispatch(dump_mode="all", dump_path="half"):
    torch.special.ndtri(torch.full((4,), 0.25, dtype=torch.bfloat16, device="npu"))
print(json.dumps({"plain": plain, "watched": watched}))
"""
RULES = [(0.01, 0.01), (1e-4, 1e-4), (1e-5, 1e-4), (1000.0, 2.0), (1.0, 0.5), (1.0, 0.1), (1.0, 0.0)]
"""Eight equal numbers, and by how much the device has the first one wrong."""


class Table(NamedTuple):
    """A folder of results."""

    folder: Path
    rows: dict[str, dict[str, str]]

    def failing(self) -> list[str]:
        return [name for name, row in self.rows.items() if row["Accuracy Reached or Not"] == "No"]

    def files(self, side: str) -> list[str]:
        return sorted(path.name for path in (self.folder / side).glob("*"))


def read_table(folder: Path) -> Table:
    (path,) = folder.glob("*.csv")
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
        assert tuple(reader.fieldnames or ()) == COLUMNS
    return Table(folder, {row["NPU Name"]: row for row in rows})


def tables(parent: Path) -> list[Table]:
    """In the order in which they were made."""
    return [read_table(path) for path in sorted(parent.iterdir(), key=lambda path: path.stat().st_ctime_ns)]


class Ran(NamedTuple):
    """What the process on the NPU has left behind: its folder, what it printed, and what it said in each part."""

    folder: Path
    stdout: dict[str, Any]
    said: dict[str, str]


@pytest.fixture(scope="module")
def npu(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("npu")
    example = (READER + IMPORTS + FORWARD + LOSS + BACKWARD).replace("/home/dump", "dump")
    done = run_python([write_script(folder, example + THE_REST), json.dumps(RULES)], folder)
    parts = re.split(r"^== (\w+)\n", "== example\n" + done.stderr, flags=re.MULTILINE)
    return Ran(folder, json.loads(done.stdout), dict(zip(parts[1::2], parts[2::2], strict=True)))


def failed_lines(text: str) -> list[str]:
    return re.findall(r"Failed (\w+) output", text)


def test_the_example_names_the_faulty_calls(npu: Ran) -> None:
    forward, backward = tables(npu.folder / "dump")
    assert forward.failing() == ["convolution_0_output.0"]
    assert "native_batch_norm_backward_0_output.0" in backward.failing()
    assert {name.rpartition("_")[0] for name in backward.failing()} == {"native_batch_norm_backward_0"}
    assert set(failed_lines(npu.said["example"])) == {"convolution_0", "native_batch_norm_backward_0"}
    assert len(forward.rows) > 4 and len(backward.rows) > 4


def test_the_folders_are_those_of_the_guide(npu: Ran) -> None:
    forward, backward = tables(npu.folder / "dump")
    for table in (forward, backward):
        stamp = re.fullmatch(r"msprobe_rank0_([0-9]{14}(?:_1)?)", table.folder.name)
        assert stamp, table.folder.name
        made = sorted(path.name for path in table.folder.iterdir())
        assert made == [f"compare_result_rank0_{stamp[1]}.csv", "cpu", "npu"]
    inputs = [f"convolution_0_input.{at}.npy" for at in range(3)]
    assert forward.files("npu") == [*inputs, "convolution_0_output.0.npy"]
    assert forward.files("cpu") == ["convolution_0_output.0.npy"]
    assert "native_batch_norm_backward_0_input.0.npy" in backward.files("npu")
    assert {name.rpartition("_")[2] for name in backward.files("cpu")} == {f"output.{at}.npy" for at in range(3)}
    right, wrong = (numpy.load(forward.folder / side / "convolution_0_output.0.npy") for side in ("cpu", "npu"))
    assert numpy.array_equal(right[:, [1, 0, *range(2, 8)]], wrong)


def test_a_line_says_where_the_call_was_made(npu: Ran) -> None:
    forward, _ = tables(npu.folder / "dump")
    text = (npu.folder / "script.py").read_text().splitlines()
    lines = {
        what: next(at for at, line in enumerate(text, 1) if what in line) for what in ("model_cpu(", "model(batch)")
    }
    for row in forward.rows.values():
        assert f'script.py", line {lines["model_cpu("]}, in <module>' in row["NPU_Stack_Info"]
        assert "msprobe/pytorch" not in row["NPU_Stack_Info"]
    (clean,) = [table for table in tables(npu.folder / "steps") if "clean" in table.folder.name]
    for output in ("convolution_2_output.0", "convolution_backward_2_output.1"):
        assert f"line {lines['model(batch)']}, in train" in clean.rows[output]["NPU_Stack_Info"]
    assert re.search(
        r"Failed native_batch_norm_backward_0 .*Functional.batch_norm.0.backward, module 1", npu.said["example"]
    )


def test_three_whole_steps_in_one_block_are_compared_and_not_changed(npu: Ran) -> None:
    assert npu.stdout["watched"] == npu.stdout["plain"]
    (clean,) = [table for table in tables(npu.folder / "steps") if "clean" in table.folder.name]
    assert clean.folder.name.startswith("msprobe_clean_rank0_")
    assert clean.failing() == [] and clean.files("cpu") == clean.files("npu") == []
    assert "Failed" not in npu.said["clean"] and "AGREES" in npu.said["clean"]
    ops = {re.sub(r"_[0-9]+_output.*", "", name) for name in clean.rows}
    assert {"convolution", "convolution_backward", "native_batch_norm_backward", "_foreach_add_"} <= ops
    assert {f"convolution_{n}_output.0" for n in range(3)} <= set(clean.rows)


@pytest.mark.parametrize("part", ["late", "workers"])
def test_a_fault_in_the_third_step_is_the_third_call(npu: Ran, part: str) -> None:
    (table,) = [table for table in tables(npu.folder / "steps") if part in table.folder.name]
    assert table.failing() == ["convolution_2_output.0"]
    assert failed_lines(npu.said[part]) == ["convolution_2"]
    assert "FAILED: 1 of" in npu.said[part] and "step 2" in npu.said[part]
    (other,) = [table for table in tables(npu.folder / "steps") if "late" in table.folder.name]
    assert sorted(table.rows) == sorted(other.rows)


def test_each_rule_decides_as_the_guide_has_it(npu: Ran) -> None:
    (table,) = tables(npu.folder / "rules")
    met = set()
    for at in range(len(RULES)):
        name = f"abs_{at}_output.0"
        device, cpu = (numpy.load(table.folder / side / f"{name}.npy").astype(float) for side in ("npu", "cpu"))
        cosine = device @ cpu / numpy.sqrt((device @ device) * (cpu @ cpu))
        largest = abs(device - cpu).max()
        rules = (cosine < 0.99 and largest > 0.001, cosine < 0.9, largest > 1)
        met.add(rules)
        row = table.rows[name]
        assert float(row["Cosine"]) == pytest.approx(cosine, abs=1e-12)
        assert float(row["MaxAbsErr"]) == pytest.approx(largest, rel=1e-12)
        assert row["Accuracy Reached or Not"] == ("No" if any(rules) else "Yes")
        assert (float(row["NPU max"]), float(row["Bench mean"])) == (device.max(), pytest.approx(cpu.mean()))
    alone = {(True, False, False), (False, True, False), (False, False, True), (False, False, False)}
    assert met == alone, "the cases do not show each rule alone"


def test_nan_on_the_device_only_is_a_failure(npu: Ran) -> None:
    (table,) = tables(npu.folder / "rules")
    row = table.rows["neg_0_output.0"]
    assert row["Accuracy Reached or Not"] == "No" and row["NPU max"] == "nan"
    assert row["Err_message"].startswith("NaN or infinite: 1 value, 1 of them not the same on both sides")
    assert failed_lines(npu.said["rules"])[-1] == "neg_0"


def test_debug_tells_of_every_output(npu: Ran) -> None:
    (table,) = tables(npu.folder / "rules")
    told = re.findall(r"NPU Name (\S+), Cosine \S+, MaxAbsErr \S+, Accuracy Reached or Not (Yes|No)", npu.said["rules"])
    assert told == [(name, row["Accuracy Reached or Not"]) for name, row in table.rows.items()]
    assert "NPU Name" not in npu.said["late"]


def test_a_half_type_without_a_kernel_on_the_cpu_is_compared_in_a_wider_one(npu: Ran) -> None:
    (table,) = tables(npu.folder / "half")
    row = table.rows["special_ndtri_0_output.0"]
    assert (row["NPU Dtype"], row["Bench Dtype"]) == ("torch.bfloat16", "torch.bfloat16")
    assert (row["Accuracy Reached or Not"], row["MaxAbsErr"]) == ("Yes", "0.0")
    assert numpy.load(table.folder / "npu" / "special_ndtri_0_input.0.npy").dtype == numpy.float32


class Listener(logging.Handler):
    """Keeps what the package says."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def heard() -> Iterator[list[str]]:
    logger, listener = logging.getLogger("msprobe"), Listener()
    level = logger.level
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)
    yield listener.lines
    logger.removeHandler(listener)
    logger.setLevel(level)


def compute() -> None:
    """On the CPU: one product that float32 cannot do, and calls that it can, of every awkward kind."""
    big = torch.tensor([[2.0**30, 40.0, -(2.0**30)]])
    torch.mm(big, torch.ones(3, 1))
    total = torch.zeros(3)
    total.add_(torch.ones(3))
    torch.add(total, 1.0, out=torch.empty(3))
    torch.exp(torch.tensor([100.0, 1.0]))
    torch.mul(torch.ones(0), 2.0)
    torch.neg(torch.full((2,), 3.0, dtype=torch.bfloat16))
    torch._foreach_mul([torch.ones(2), torch.ones(1)], 2.0)
    torch.rand(2)


MM = ["mm_0_input.0.npy", "mm_0_input.1.npy", "mm_0_output.0.npy"]


@pytest.mark.parametrize(
    ("settings", "device_files"),
    [
        ({}, []),
        ({"dump_mode": "auto"}, MM),
        ({"dump_mode": "list", "api_list": ["add_", "neg"]}, ["add__0", "neg_0"]),
        ({"dump_mode": "list", "api_list": ["mul.Tensor", "add.out"]}, ["add_0", "mul_0"]),
    ],
)
def test_what_is_dumped_is_up_to_the_mode(settings: Any, device_files: list[str], tmp_path: Path) -> None:
    with PtdbgDispatch(dump_path=tmp_path / "new" / "dump", **settings):
        compute()
    (table,) = tables(tmp_path / "new" / "dump")
    assert table.failing() == ["mm_0_output.0"], "all calls are compared, whatever is dumped"
    found = table.files("npu")
    assert found == device_files or sorted({name.rpartition("_")[0] for name in found}) == device_files
    assert table.files("cpu") == [name for name in found if "output" in name]
    assert (table.folder / "npu").exists() == bool(settings)


def test_mode_all_dumps_every_compared_call(tmp_path: Path) -> None:
    with PtdbgDispatch("all", dump_path=tmp_path, tag="mine"):
        compute()
    (table,) = tables(tmp_path)
    assert table.folder.name.startswith("msprobe_mine_rank0_")
    assert table.files("cpu") == sorted(f"{name}.npy" for name in table.rows)
    assert {f"{name}.npy" for name in table.rows} <= set(table.files("npu"))
    before, after = (numpy.load(table.folder / "npu" / f"add__0_{slot}.0.npy") for slot in ("input", "output"))
    assert before.tolist() == [0, 0, 0] and after.tolist() == [1, 1, 1], "an input is what it was before the call"
    assert not [name for name in table.files("npu") if name.startswith("add_0_input") and "out" in name]
    assert "_foreach_mul_0_input.0.1.npy" in table.files("npu")
    assert numpy.load(table.folder / "npu" / "neg_0_output.0.npy").tolist() == [-3, -3]
    assert table.rows["exp_0_output.0"]["Err_message"].startswith("NaN or infinite: 1 value, the same on both sides")
    assert table.rows["mul_0_output.0"]["Err_message"] == "the tensor has no elements"
    assert not any(name.startswith("rand") for name in table.rows), "there is nothing to compare random numbers with"


def test_a_line_is_on_disk_as_soon_as_its_call_was_made(tmp_path: Path, heard: list[str]) -> None:
    with PtdbgDispatch("auto", dump_path=tmp_path):
        torch.mm(torch.tensor([[2.0**30, 40.0, -(2.0**30)]]), torch.ones(3, 1))
        (table,) = tables(tmp_path)
        assert table.failing() == ["mm_0_output.0"] and table.files("npu") == MM
        assert [line[:25] for line in heard] == ["Failed mm_0 output.0 (flo"]
    assert "FAILED: 1 of 2 compared" in heard[-1] and str(table.folder) in heard[-1]


def test_an_exception_of_the_program_passes(tmp_path: Path) -> None:
    dispatch = PtdbgDispatch(dump_path=tmp_path)
    with pytest.raises(ZeroDivisionError), dispatch:
        torch.neg(torch.ones(2))
        _ = 1 / 0
    with dispatch:
        torch.abs(torch.ones(2))
    assert [list(table.rows) for table in tables(tmp_path)] == [
        ["ones_0_output.0", f"{op}_0_output.0"] for op in ("neg", "abs")
    ]


def test_a_full_disk_does_not_stop_training(tmp_path: Path, heard: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def save(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(numpy, "save", save)
    with PtdbgDispatch("auto", dump_path=tmp_path):
        compute()
    (table,) = tables(tmp_path)
    assert table.rows["mm_0_output.0"]["Err_message"] == "not dumped: OSError: [Errno 28] No space left on device"
    assert heard[-1].startswith("Not dumped, or not whole: 1 call. First: mm_0 not dumped") and heard[0].startswith(
        "Failed mm_0"
    )


CORES = os.cpu_count() or 1
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"dump_path": None}, r"dump_path is not given: the results go there\. For example dump_path='\./dump'"),
    ({"dump_path": 3}, "dump_path is 3; it must be a path"),
    ({"dump_mode": "atuo"}, r"dump_mode is 'atuo'; it must be one of all, list, auto, OFF\. Did you mean 'auto'"),
    ({"dump_mode": None}, "dump_mode is None"),
    ({"dump_mode": "list"}, "dump_mode 'list' needs api_list, a list of names of ATen ops"),
    ({"dump_mode": "list", "api_list": "mm"}, "such as .'mm', 'add'.; got 'mm'"),
    ({"dump_mode": "list", "api_list": ["mm", "sofmax"]}, r"'sofmax' is no ATen op\. Nearest: softmax"),
    ({"dump_mode": "list", "api_list": ["add.Tensr"]}, r"'add\.Tensr' is no ATen op"),
    ({"dump_mode": "list", "api_list": ["__class__"]}, "'__class__' is no ATen op"),
    ({"tag": "a/b"}, "tag is 'a/b'; it becomes part of a folder's name"),
    (
        {"process_num": CORES},
        f"process_num is {CORES}; it must be a whole number from 0 to {max(1, CORES // 4)}, a quarter of the",
    ),
    ({"process_num": -1}, "process_num is -1"),
    ({"process_num": True}, "process_num is True"),
    ({"debug": "no"}, "debug is 'no'; it must be True or False"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_argument_is_told(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=message):
        PtdbgDispatch(**{"dump_path": tmp_path, **settings})
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_begin_is_told_before_anything_is_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match=r"dump_path '.*file' cannot hold the results: File exists"):
        PtdbgDispatch(dump_path=tmp_path / "file").__enter__()
    with (
        capture(tmp_path / "run"),
        pytest.raises(SettingsError, match=r"into '.*run' is running in this process. Stop it first"),
    ):
        PtdbgDispatch(dump_path=tmp_path / "dump").__enter__()
    assert not (tmp_path / "dump").exists()


def test_api_list_outside_of_mode_list_is_told(tmp_path: Path, heard: list[str]) -> None:
    PtdbgDispatch("all", ["mm"], dump_path=tmp_path)
    assert heard == ["api_list has no meaning in dump_mode 'all'. Use dump_mode 'list'."]


def test_seed_all_is_the_new_one() -> None:
    drawn = []
    for _ in range(2):
        seed_all()
        drawn.append(torch.rand(3))
    torch.manual_seed(1234)
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[0], torch.rand(3))
    with pytest.raises(SettingsError, match="rm_dropout is 1; it must be True or False"):
        seed_all(rm_dropout=1)  # type: ignore[arg-type]
