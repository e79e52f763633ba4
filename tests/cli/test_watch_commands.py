"""`tensorprobe overflow -- COMMAND` and `tensorprobe online -- COMMAND`: the watches around a script that is not edited."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.taps.scripts import run_tool

SCRIPT = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    result = model(torch.ones(3, 8))
    if step == 1 and "nan" in sys.argv:
        result = torch.log(result - 100)
    result.sum().backward()
    optimizer.step()
sys.exit(5 if "fails" in sys.argv else 0)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [([], 0, "FINITE"), (["nan"], 1, "FIRST NAN in Torch.log.0.forward, step 1"), (["nan", "fails"], 5, "FIRST NAN")],
)
def test_overflow_watches_a_command(tmp_path: Path, script: Path, words: list[str], code: int, told: str) -> None:
    done = run_tool(["overflow", "-o", "found", "--", sys.executable, script, *words], tmp_path, code=code)
    assert told in done.stdout
    assert (tmp_path / "found" / "report.html").is_file()


def test_online_watches_a_command(tmp_path: Path, script: Path) -> None:
    done = run_tool(["online", "-o", "found", "--", sys.executable, script], tmp_path)
    assert "agree with the reference" in done.stdout and "in 2 steps" in done.stdout
    done = run_tool(["online", "-o", "found", "--overwrite", "--", sys.executable, script, "fails"], tmp_path, code=5)
    assert "agree with the reference" in done.stdout
    assert not list(tmp_path.rglob("*.old.*"))


@pytest.mark.parametrize("kind", ["overflow", "online"])
def test_a_folder_with_results_is_refused_before_the_command_runs(tmp_path: Path, kind: str) -> None:
    old = tmp_path / "found" / {"overflow": "overflow.rank0.json", "online": "rank0/online.json"}[kind]
    old.parent.mkdir(parents=True)
    old.touch()
    done = run_tool([kind, "-o", "found", "--", "touch", "ran"], tmp_path, code=2)
    assert "holds the results of another watch" in done.stderr and "--overwrite" in done.stderr
    assert not (tmp_path / "ran").exists()
    for command in (["touch", "ran"], ["no such command"], [sys.executable, "none.py"]):
        assert run_tool([kind, "-o", "found", "--overwrite", "--", *command], tmp_path, code=None).returncode
    assert [path for path in (tmp_path / "found").rglob("*") if path.is_file()] == [old]  # nothing took its place


def test_without_a_folder_the_next_free_one_is_used(tmp_path: Path, script: Path) -> None:
    (tmp_path / "tensorprobe-overflow").mkdir()
    done = run_tool(["overflow", "--", sys.executable, script], tmp_path)
    assert "FINITE" in done.stdout
    assert run_tool(["overflow", "--", "tensorprobe-overflow-2"], tmp_path).stdout == done.stdout


def test_a_run_needs_no_folder_for_findings(tmp_path: Path) -> None:
    done = run_tool(["overflow", ".", "-o", "found"], tmp_path, code=2)
    assert "-o is for a command" in done.stderr and "--format html=FILE" in done.stderr


def test_a_script_that_is_given_as_a_command_is_explained(tmp_path: Path, script: Path) -> None:
    done = run_tool(["capture", "-o", "run", "--", script.name], tmp_path, code=2)
    assert "To run a script: python train.py" in done.stderr


def test_a_command_without_modules_is_reported(tmp_path: Path) -> None:
    for command in ("overflow", "online"):
        done = run_tool([command, "-o", "found", "--", sys.executable, "-c", "import torch"], tmp_path, code=2)
        assert "called a torch module" in done.stderr


def test_options_of_the_script_need_two_dashes(tmp_path: Path, script: Path) -> None:
    done = run_tool(["overflow", "-o", "found", sys.executable, script, "--steps", "3"], tmp_path, code=2)
    assert "put -- before the command" in done.stderr
