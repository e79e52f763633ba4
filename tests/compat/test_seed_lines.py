"""Lines of the guides that are not in the long scripts: imports, options, configuration files, one test for each."""

from __future__ import annotations

import contextlib
import csv
import importlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ptdbg_ascend
import tensorprobe
from msprobe.pytorch import PrecisionDebugger
from msprobe.pytorch import seed_all as msprobe_seed_all
from tensorprobe.checks import precheck
from tensorprobe.errors import RunNotFound, SettingsError
from tensorprobe.legacy.checker.run_ut import main as run_ut
from tensorprobe.legacy.checker.run_ut import spell, write_tables
from tensorprobe.legacy.layouts.targets import remove_ended
from tensorprobe.legacy.msprobe.config import read_config
from tensorprobe.legacy.msprobe.online import _read_number
from tensorprobe.legacy.wrapped import _LINEAR_ALGEBRA
from tensorprobe.replay.functions import find_function
from tests.taps.scripts import run_tool

SHIPPED: dict[str, Any] = {
    "task": "statistics",
    "dump_path": "./dump_path",
    "rank": [],
    "step": [],
    "level": "L1",
    "seed": 1234,
    "is_deterministic": False,
    "enable_dataloader": False,
    "acl_config": "",
    "tensor": {"scope": [], "list": [], "data_mode": ["all"], "backward_input": [], "file_format": "npy"},
    "statistics": {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"},
    "overflow_check": {"overflow_nums": 1, "check_mode": "all"},
    "run_ut": {"white_list": [], "black_list": [], "error_data_path": "./"},
    "grad_probe": {"grad_level": "L1", "param_list": [], "bounds": [-1, 0, 1]},
    "free_benchmark": {"scope": [], "list": [], "fuzz_device": "npu", "pert_mode": "improve_precision"},
}
"""A config.json with every section that the shipped one has."""


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("ptdbg_ascend", "PrecisionDebugger"),
        ("ptdbg_ascend.online_dispatch", "PtdbgDispatch"),
        ("api_accuracy_checker.common.config", "msCheckerConfig"),
        ("msprobe.pytorch.common.utils", "seed_all"),
    ],
)
def test_imports_of_the_guides_work(module: str, name: str) -> None:
    assert getattr(importlib.import_module(module), name)


def test_one_process_is_always_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert _read_number(1) == 1


@pytest.mark.parametrize("task", ["statistics", "tensor", "overflow_check", "run_ut", "grad_probe", "free_benchmark"])
def test_the_shipped_config_is_taken_as_it_is(task: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SHIPPED, "task": task}))
    assert read_config(tmp_path / "config.json").task == task


def test_a_second_program_replaces_the_dump_of_the_first(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    step = tmp_path / "step0"
    for name in (f"proc{int(ended.stdout)}", f"proc{os.getppid()}", "procedure", "rank0"):
        (step / name).mkdir(parents=True)
        (step / name / "dump.json").write_text("{}")
    remove_ended(step / f"proc{os.getpid()}")
    assert sorted(entry.name for entry in step.iterdir()) == sorted([f"proc{os.getppid()}", "procedure", "rank0"])


def test_files_of_another_kind_are_never_removed(tmp_path: Path) -> None:
    other = tmp_path / "step0" / "proc999999999"
    other.mkdir(parents=True)
    (other / "notes.txt").write_text("mine")
    remove_ended(tmp_path / "step0" / f"proc{os.getpid()}")
    assert (other / "notes.txt").exists()


def test_long_options_of_run_ut_and_a_folder_that_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for side in ("forward", "backward"):
        (tmp_path / f"{side}_info_7.json").write_text("{}")
    files = [f"--{side}_input_file={tmp_path}/{side}_info_7.json" for side in ("forward", "backward")]
    run_ut([*files, "--out_path", str(tmp_path / "new" / "out"), "-j", "-d", "0"])
    assert (tmp_path / "new" / "out").is_dir()
    assert "usage" not in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_standard_of_the_seed_raises_no_false_alarm(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.LayerNorm(32), torch.nn.GELU(), torch.nn.Linear(32, 4), torch.nn.Softmax(-1)
    ).to(dtype)
    debugger = PrecisionDebugger(dump_path=tmp_path / "dump", task="tensor", level="L1")
    debugger.start(net)
    F.mse_loss(net(torch.randn(8, 16, dtype=dtype)), torch.zeros(8, 4, dtype=dtype)).backward()
    debugger.stop()
    PrecisionDebugger._instance = None
    (dump,) = (tmp_path / "dump").rglob("dump.json")
    for data in ("real", "random"):
        result = precheck(dump, data=data, standard="seed", device="cpu", jobs=0)  # type: ignore[arg-type]
        assert result.exit_code == 0, str(result)


def test_the_tables_of_run_ut_have_the_shipped_columns(tmp_path: Path) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    with tensorprobe.capture(tmp_path / "run"):
        F.gelu(x).sum().backward()
        torch.isfinite(x.detach())
    result = precheck(tmp_path / "run", data="real", standard="seed", device="cpu", jobs=0)
    table, details = write_tables(result.summary, tmp_path, spell=spell)
    rows = {row["API name"]: row for row in csv.DictReader(table.read_text().splitlines())}
    assert rows["Torch*isfinite*0"]["Backward Test Success"] == "N/A"
    assert rows["Functional*gelu*0"]["Backward Test Success"] == "True"
    shipped = (
        "Npu Name,Bench Dtype,NPU Dtype,Shape,Cosine Similarity,Cosine Similarity Message,Max Rel Error,"
        "Max Rel Err Message,Max Abs Error,Max Abs Err Message,Relative Error (dual thousandth),"
        "Relative Error (dual thousandth) Message,Relative Error (dual ten thousandth),"
        "Relative Error (dual ten thousandth) Message,Compare Builtin Type,Builtin Type Message,Pass"
    )
    head, first, *_ = details.read_text().splitlines()
    assert head.startswith(shipped + ",")
    assert len(first.split(",")) >= len(head.split(","))
    cells = next(csv.DictReader(details.read_text().splitlines()))
    assert [cells[column] for column in ("Bench Dtype", "NPU Dtype", "Shape", "Compare Builtin Type")] == [
        *("torch.float64", "torch.float32", "(3, 4)", "N/A")
    ]


def test_the_verdicts_on_a_dump_of_the_shipped_tool_are_those_of_its_tables(tmp_path: Path) -> None:
    """The zip holds some APIs that it dumped on the simulated NPU, and both tables of its own run_ut.py."""
    with zipfile.ZipFile(Path(__file__).with_name("shipped_checker.zip")) as shipped:
        shipped.extractall(tmp_path)
    files = [f"-{side}={tmp_path}/{side}_info_26443.json" for side in ("forward", "backward")]
    assert run_ut([*files, "--out_path", str(tmp_path)]) == 0

    def read(folder: Path, table: str) -> dict[str, dict[str, str]]:
        with (folder / f"accuracy_checking_{table}.csv").open() as file:
            return {next(iter(row.values())): row for row in csv.DictReader(file)}

    theirs, ours = read(tmp_path / "oo", "result"), read(tmp_path, "result")
    assert list(theirs) == list(ours)
    columns = ("Forward Test Success", "Backward Test Success")
    differ = {name for name, row in theirs.items() if any(row[column] != ours[name][column] for column in columns)}
    assert differ == {"Torch*cat*0", "Tensor*add_*1"}  # their backward is not checked there
    lines, own_lines = read(tmp_path / "oo", "details"), read(tmp_path, "details")
    assert {name for name in lines if name not in own_lines} == {
        name for name, row in lines.items() if row["Max Abs Err Message"] == "output is None"
    }
    for name in lines.keys() & own_lines.keys():
        if "__bool__" not in name:  # `<class 'bool'>` there, torch.bool and () here
            for column in ("Bench Dtype", "NPU Dtype", "Shape", "Pass"):
                assert lines[name][column] == own_lines[name][column]


@pytest.mark.parametrize("name", [name for name in _LINEAR_ALGEBRA.split() if hasattr(torch.linalg, name)])
def test_functions_of_linear_algebra_are_checked_under_the_names_of_a_dump(name: str) -> None:
    assert callable(find_function(f"Torch.{name}"))


def test_importing_ptdbg_ascend_seeds_the_program() -> None:
    program = "import torch, random\nimport ptdbg_ascend\nprint(torch.randn(3).tolist(), random.random())"
    drawn = {subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout for _ in range(2)}
    assert len(drawn) == 1


@pytest.mark.parametrize("seed_all", [ptdbg_ascend.seed_all, msprobe_seed_all])
def test_rm_dropout_takes_dropout_out_of_the_program(
    seed_all: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("dropout", "dropout2d", "dropout3d"):
        monkeypatch.setattr(F, name, getattr(F, name))  # put back after the test
    x = torch.ones(2, 8, 4, 5)
    seed_all(rm_dropout=False)
    assert not torch.equal(torch.nn.Dropout(0.5)(x), x)
    seed_all(seed=1234, mode=False, rm_dropout=True)
    seed_all(rm_dropout=True)
    for dropout in (torch.nn.Dropout(0.5), torch.nn.Dropout2d(0.5), torch.nn.Dropout3d(0.9)):
        assert torch.equal(dropout(x), x)
    with tensorprobe.capture(tmp_path / "run", mode="structure"):
        torch.nn.Dropout2d(0.5)(F.dropout(x))
    names = [entry.name for entry in tensorprobe.open_run(tmp_path / "run").segment(0, 0).index().entries]
    assert names == ["Functional.dropout.0.forward", "Functional.dropout2d.0.forward"]  # as without rm_dropout
    with pytest.raises(ValueError, match="dropout probability"):
        F.dropout(x, 2.0)


NPU_FIRST = """
import torch_npu
from torch_npu.utils.device_guard import torch_device_guard
import sys
import torch
assert torch_npu is sys.modules["torch_npu"]
assert torch_npu._C._npu_getDevice() == 0
assert torch_device_guard(torch.ones)(2, device="npu").sum().item() == 2
"""


def test_torch_npu_can_be_imported_before_torch(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(NPU_FIRST)
    for option in ([], ["--torch-npu"]):
        run_tool(["sim", *option, "--", sys.executable, "train.py"], tmp_path, cold=True)
    other = run_tool(["sim", "--name", "acc", "--", sys.executable, "train.py"], tmp_path, code=1, cold=True)
    assert "No module named 'torch_npu'" in other.stderr


def test_a_single_infinite_number_from_finite_ones_is_an_overflow(tmp_path: Path) -> None:
    x = torch.rand(4)
    ptdbg_ascend.set_dump_path(tmp_path / "dump.pkl")
    ptdbg_ascend.register_hook(torch.nn.Identity(), ptdbg_ascend.overflow_check, overflow_nums=1)
    with pytest.raises(ValueError, match="overflow 1 times"):
        torch.log(x.sum() - x.sum())
    ptdbg_ascend.set_overflow_check_switch("OFF")
    (pkl,) = tmp_path.rglob("Overflow_info_*.pkl")
    assert "Torch_log_0_forward" in pkl.read_text()


def test_a_path_from_before_dump_tag_is_answered_with_where_the_dump_went(tmp_path: Path) -> None:
    (tmp_path / "dump_conv2d_v1.0" / "rank0" / "npu_dump").mkdir(parents=True)
    (tmp_path / "dump_conv2d_v1.0" / "rank0" / "npu_dump.pkl").touch()
    where = r"Did you mean '(.*/)?dump_conv2d_v1\.0/rank0/npu_dump\.pkl'\?$"
    with pytest.raises(RunNotFound, match=where):
        ptdbg_ascend.parse("./npu_dump.pkl", "Torch_conv2d_0_forward")
    with pytest.raises(RunNotFound, match=where):
        ptdbg_ascend.parse(tmp_path / "npu_dump.pkl", "Torch_conv2d_0_forward")
    pasted = {f"{side}_pkl_path": "./npu_dump.pkl" for side in ("npu", "bench")}
    with pytest.raises(RunNotFound, match=where):
        ptdbg_ascend.compare(pasted, tmp_path)
    with pytest.raises(SettingsError, match=r"Did you mean 'dump_conv2d_v1\.0/rank0/npu_dump'\?"):
        ptdbg_ascend.compare({**pasted, "npu_dump_data_dir": "./npu_dump"}, tmp_path)
    with pytest.raises(RunNotFound, match=where):
        ptdbg_ascend.compare({**pasted, "npu_dump_data_dir": "./npu_dump_20230104_13434"}, tmp_path)


def test_an_error_that_nobody_catches_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, traceback: seen.append(error))
    with pytest.raises(RunNotFound) as raised:
        ptdbg_ascend.parse("./npu_dump.pkl", "Torch_conv2d_0_forward")
    other = ValueError("of the program")
    for error in (raised.value, other):
        sys.excepthook(type(error), error, None)
    assert capsys.readouterr().err == "RunNotFound: no file 'npu_dump.pkl'.\n" and seen == [other]


def test_the_debugger_of_ptdbg_dumps_the_steps_that_are_asked_for(tmp_path: Path) -> None:
    debugger = ptdbg_ascend.PrecisionDebugger(tmp_path / "dump", hook_name="dump", step=[0, 2])
    debugger.configure_hook(mode="api_list", api_list=["relu"])
    x = torch.randn(3)
    for _ in range(4):
        debugger.start()
        torch.relu(x).abs()
        ptdbg_ascend.PrecisionDebugger.stop()
        debugger.step()
    home = tmp_path / "dump" / "ptdbg_dump_v1.0"
    assert sorted(path.relative_to(home).as_posix() for path in home.rglob("*.pkl")) == [
        "step0/rank0/dump.pkl", "step2/rank0/dump.pkl",
    ]  # fmt: skip
    lines = (home / "step2" / "rank0" / "dump.pkl").read_text()
    assert "Torch_relu_0_forward_input.0" in lines and "abs" not in lines
    debugger.start()  # step 4 is not asked for
    assert ptdbg_ascend.PrecisionDebugger._instance is debugger and not (home / "step4").exists()


def test_the_debugger_of_ptdbg_counts_overflows_over_steps(tmp_path: Path) -> None:
    debugger = ptdbg_ascend.PrecisionDebugger(tmp_path, hook_name="overflow_check")
    debugger.configure_hook(overflow_nums=2)
    x = torch.full((3,), 1e30)
    for step in range(2):
        debugger.start()
        with pytest.raises(ValueError, match="overflow 2 times") if step else contextlib.nullcontext():
            torch.mul(x, x)
        debugger.stop()
        debugger.step()


def test_the_debugger_of_ptdbg_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="hook_name is 'dmp'; it must be one of dump, overflow_check"):
        ptdbg_ascend.PrecisionDebugger(tmp_path, hook_name="dmp")
    with pytest.raises(SettingsError, match=r"enable_dataloader is not part of this version. Call start\(\)"):
        ptdbg_ascend.PrecisionDebugger(tmp_path, hook_name="dump", enable_dataloader=True)
