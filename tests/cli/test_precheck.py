"""`tensorprobe precheck` as a user starts it: the answer on stdout, exit codes, files, and the simulated device."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import typer
from typer.testing import CliRunner, Result

import tensorprobe
from tensorprobe.cli import precheck
from tensorprobe.errors import NotFound, SettingsError
from tests.builders.runs import write
from tests.checks.deadly_ops import harmless

TENSORPROBE = [sys.executable, "-c", "from tensorprobe.cli.main import main; main()"]
PRECHECK = [
    sys.executable,
    "-c",
    "import typer; from tensorprobe.cli import precheck; app = typer.Typer(); precheck.register(app); app()",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "run"
    torch.manual_seed(0)
    weight, x, gradient = torch.randn(16, 16, requires_grad=True), torch.randn(4, 16), torch.randn(4, 16)
    with tensorprobe.capture(folder, level="api") as probe:
        x = F.linear(x, weight)
        F.softmax(F.softmax(x, -1), -1).backward(gradient)
        probe.step()
    return folder


def invoke(*arguments: object) -> Result:
    app = typer.Typer()
    precheck.register(app)
    return CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=True)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_sound_run_passes_with_exit_0(run: Path, tmp_path: Path) -> None:
    done = invoke(run, "--jobs", 0, "-o", tmp_path / "out")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith("PASSED    all 3 calls pass")
    assert f"Full table: {tmp_path / 'out'}/accuracy_checking_result.csv" in done.stdout
    assert [row["API name"] for row in rows(tmp_path / "out" / "accuracy_checking_result.csv")] == [
        "Functional.linear.0",
        "Functional.softmax.0",
        "Functional.softmax.1",
    ]
    details = {row["Npu Name"]: row for row in rows(tmp_path / "out" / "accuracy_checking_details.csv")}
    assert details["Functional.softmax.1.backward.output.0"]["Checked As"] == "Functional.softmax.0.forward"


def test_json_is_the_summary_and_changes_no_exit_code(run: Path, tmp_path: Path) -> None:
    done = invoke(run, "--jobs", 0, "--json", "-o", tmp_path / "out", "--standard", "binary", "--no-dedupe")
    assert done.exit_code == 1
    assert json.loads(done.stdout) == json.loads((tmp_path / "out" / "summary.json").read_text())
    assert json.loads(done.stdout)["distinct"] == json.loads(done.stdout)["calls"]


def test_nothing_that_can_be_checked_exits_2(tmp_path: Path) -> None:
    empty = write(tmp_path / "run", [{"name": "Torch.empty.0.forward", "slots": {}, "args": [3]}])
    done = invoke(empty, "--jobs", 0)
    assert done.exit_code == 2
    assert done.stdout.startswith("CANNOT CHECK  0 of 1 call could be run")


def test_calls_can_be_chosen(run: Path) -> None:
    done = invoke(run, "--jobs", 0, "--call", "Functional.linear", "--call", "*softmax.1*", "--no-backward", "--json")
    summary = json.loads(done.stdout)
    assert [check["call"] for check in summary["checks"]] == [
        "Functional.linear.0.forward",
        "Functional.softmax.1.forward",
    ]
    assert summary["backward_passed"] == 0


def test_resume_goes_on_in_its_folder(tmp_path: Path) -> None:
    run, out = write(tmp_path / "run", [harmless(0), harmless(1, 5)]), tmp_path / "out"
    assert invoke(run, "--jobs", 0, "-o", out).exit_code == 0
    journal = (out / "checks.jsonl").read_bytes().splitlines(keepends=True)
    (out / "checks.jsonl").write_bytes(b"".join(journal[:2]))
    assert invoke(run, "--jobs", 0, "--resume", out).exit_code == 0
    assert (out / "checks.jsonl").read_bytes().splitlines(keepends=True)[:2] == journal[:2]
    done = invoke(run, "--jobs", 0, "--resume", out, "-o", tmp_path / "other")
    assert isinstance(done.exception, SettingsError)
    assert "continues in that folder: leave out -o" in str(done.exception)


def test_an_interrupt_says_how_to_go_on(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorprobe.checks import runner

    def interrupted(*arguments: Any, **settings: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "precheck", interrupted)
    done = invoke(run, "-o", tmp_path / "my out")
    assert done.exit_code != 0
    assert f"--resume '{tmp_path / 'my out'}'" in done.stderr


WRONG: list[tuple[list[str], type[Exception], str]] = [
    (["--call", "Functional.linaer.0"], NotFound, "Nearest: Functional.linear.0"),
    (["--standard", "sede"], SettingsError, "Did you mean 'seed'"),
    (["--device", "nowhere"], SettingsError, "device 'nowhere' cannot be used"),
    (["--save-failures"], SettingsError, "save_failures writes files: pass out"),
    (["--steps", "9"], NotFound, "no step 9"),
    (["--time-limit", "0"], SettingsError, "expected a number greater than 0"),
]


@pytest.mark.parametrize(("options", "kind", "message"), WRONG)
def test_mistakes_are_told(options: list[str], kind: type[Exception], message: str, run: Path) -> None:
    done = invoke(run, "--jobs", 0, *options)
    assert isinstance(done.exception, kind)
    assert message in str(done.exception)


@pytest.mark.simulated
@pytest.mark.usefixtures("warm_processes")
def test_a_fault_of_the_simulated_device_is_named(run: Path, tmp_path: Path) -> None:
    """The processes that check the calls have the device of the process that started them."""
    command = [*TENSORPROBE, "sim", "--fault", "softmax-tail", "--", *PRECHECK, str(run), "--device", "npu"]
    done = subprocess.run(
        [*command, "-o", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode, done.stderr) == (1, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "FAILED    2 of 3 calls fail, in 1 op"
    assert lines[1].startswith("  Functional.softmax.0.forward") and "test_precheck.py:" in lines[1]
    assert "(allowed " in lines[2]
    assert lines[-1].startswith("Save a script for it: tensorprobe precheck ") and " --device npu --call " in lines[-1]
    assert {
        row["API name"]: row["Forward Test Success"] for row in rows(tmp_path / "out" / "accuracy_checking_result.csv")
    } == {
        "Functional.linear.0": "True",
        "Functional.softmax.0": "False",
        "Functional.softmax.1": "False",
    }
