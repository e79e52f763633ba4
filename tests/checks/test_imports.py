"""Ops of the user's own are checked when the module that registers them is named; what is not checked stands in the first line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tensorprobe
from tensorprobe.errors import SettingsError
from tests.builders.runs import call, write
from tests.checks.deadly_ops import harmless

MODULE = """
import torch

library = torch.library.Library("owned_by_a_user", "DEF")
library.define("twice(Tensor x) -> Tensor")
library.impl("twice", lambda x: x * {factor} if x.dtype == torch.float32 else x * 2, "CPU")
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a run of a custom op and an ordinary one; the module that registers the op is beside it."""
    x = np.ones(3, dtype=np.float32)
    own = call("Ops.owned_by_a_user.twice.0.forward", inputs=[x], outputs=[2 * x], args=[{"slot": "input.0"}])
    write(tmp_path / "run", [own, harmless(0)])
    (tmp_path / "right_ops.py").write_text(MODULE.format(factor=2))
    (tmp_path / "wrong_ops.py").write_text(MODULE.format(factor=2.1))
    return tmp_path


def command(place: Path, *more: str) -> subprocess.CompletedProcess[str]:
    tool = (
        [sys.executable, "-P", "-m", "tensorprobe"]
        if sys.version_info >= (3, 11)
        else [sys.executable, "-m", "tensorprobe"]
    )
    return subprocess.run([*tool, "precheck", "run", *more], cwd=place, text=True, capture_output=True)


def test_a_call_that_is_not_checked_stands_in_the_first_line_with_what_to_do(place: Path) -> None:
    first = str(tensorprobe.precheck(place / "run")).splitlines()[0]
    assert first.startswith(
        "PASSED    1 of 2 calls passes, 1 not checked: Ops.owned_by_a_user.twice is not a known operation"
    )
    assert first.endswith("--import MODULE registers your own ops")


def test_the_op_of_a_module_in_this_folder_is_checked(place: Path) -> None:
    done = command(place, "--import", "right_ops")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "PASSED    all 2 calls pass")


def test_a_wrong_op_fails_and_its_script_imports_the_module(place: Path) -> None:
    done = command(place, "--import", "wrong_ops", "-o", "result", "--save-failures")
    assert done.returncode == 1 and "Ops.owned_by_a_user.twice.0.forward" in done.stdout
    (script,) = (place / "result").rglob("*twice*.py")
    for module, code in (("wrong_ops", 1), ("right_ops", 0), ("no_ops", 2)):
        text = script.read_text().replace("wrong_ops", module)
        (script.parent / "again.py").write_text(text)
        (script.parent / "again.safetensors").write_bytes(script.with_suffix(".safetensors").read_bytes())
        again = [sys.executable, str(script.parent / "again.py")]
        ran = subprocess.run(again, env={"PYTHONPATH": str(place)}, text=True, capture_output=True)
        assert ran.returncode == code, ran.stdout + ran.stderr
    assert "module no_ops cannot be imported here" in ran.stdout


def test_a_module_that_cannot_be_imported_is_named(place: Path) -> None:
    with pytest.raises(
        SettingsError, match="module 'no_such_ops' cannot be imported in the process that runs the calls"
    ):
        tensorprobe.precheck(place / "run", imports="no_such_ops")
