"""Lines of the guides that are not in the long scripts: imports, options, configuration files, one test for each."""

from __future__ import annotations

import csv
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tensorprobe
from msprobe.pytorch import PrecisionDebugger
from tensorprobe.checks import precheck
from tensorprobe.legacy.checker.run_ut import main as run_ut
from tensorprobe.legacy.checker.run_ut import spell, write_tables
from tensorprobe.legacy.layouts.targets import remove_ended
from tensorprobe.legacy.msprobe.config import read_config
from tensorprobe.legacy.msprobe.online import _read_number

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


@pytest.mark.parametrize("task", ["statistics", "tensor", "overflow_check", "run_ut"])
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
