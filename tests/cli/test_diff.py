"""`tensorprobe diff` on hand-made runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner, Result

from tensorprobe.cli import diff, doctor
from tensorprobe.errors import NotFound, SettingsError
from tests.builders.runs import call, write

NAME = "Functional.softmax.0.forward"


def invoke(*arguments: object) -> Result:
    app = typer.Typer()
    diff.register(app)
    doctor.register(app)
    return CliRunner().invoke(app, ["diff", *map(str, arguments)], catch_exceptions=True)


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    right = np.random.default_rng(0).standard_normal((4, 16, 32)).astype(np.float32)
    wrong = right.copy()
    wrong[..., -4:] = 0
    for name, output in (("a", right), ("b", wrong)):
        calls = [
            call("Torch.add.0.forward", inputs=[right], outputs=[right], module="net"),
            call(NAME, inputs=[right], outputs=[output], module="net.attention"),
        ]
        write(tmp_path / name, calls)
    return tmp_path / "a", tmp_path / "b"


def test_one_call_is_shown_with_pattern_profile_worst_elements_and_histogram(runs: tuple[Path, Path]) -> None:
    done = invoke(*runs, NAME, "--limit", 3)
    lines = done.stdout.splitlines()
    assert done.exit_code == 1, done.output
    assert lines[0] == f"{NAME}   step 0, rank 0   in module 'net.attention'"
    assert any(line.startswith("  pattern    only the last 4 columns (28-31 of axis 2)") for line in lines)
    assert "         0-27                                    equal" in lines
    assert sum("█" in line and "64 elements" in line for line in lines) == 4
    assert any(line.startswith("  worst 3 of 256 elements") for line in lines)
    assert any(line.startswith("  histogram of Δ") for line in lines)


def test_the_axis_of_the_profile_can_be_chosen(runs: tuple[Path, Path]) -> None:
    assert "max |Δ| along axis 1 (rows, 16)" in invoke(*runs, NAME, "--by", "rows").stdout
    assert "max |Δ| along axis 0 (batches, 4)" in invoke(*runs, NAME, "--by", -3).stdout
    refused = invoke(*runs, NAME, "--by", "heads")
    assert isinstance(refused.exception, SettingsError)
    assert "It has 0 (batches), 1 (rows), 2 (columns)" in str(refused.exception)


def test_several_calls_get_a_line_each(runs: tuple[Path, Path]) -> None:
    done = invoke(*runs, "module:net")
    assert "  Torch.add.0.forward           equal" in done.stdout
    assert f"Look at the worst:   tensorprobe diff {runs[0]} {runs[1]} {NAME}" in done.stdout


def test_equal_tensors_end_with_zero_and_an_unknown_call_is_refused(runs: tuple[Path, Path]) -> None:
    assert invoke(*runs, "Torch.add").exit_code == 0
    refused = invoke(*runs, "Functional.softmx.0")
    assert isinstance(refused.exception, NotFound) and "Functional.softmax" in str(refused.exception)


def test_json_is_the_same_object(runs: tuple[Path, Path]) -> None:
    (found,) = json.loads(invoke(*runs, NAME, "--json").stdout)
    held: dict[str, Any] = found["tensor"]
    assert held["pattern"]["effect"] == "zero" and len(held["worst"]) == 20
