"""`tensorprobe export` on a hand-made run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy
import pytest
import typer
from typer.testing import CliRunner, Result

from tensorprobe.cli import export, inspect
from tensorprobe.errors import RunExists
from tests.builders.runs import Blob, slot, write_run


def invoke(*arguments: object) -> Result:
    app = typer.Typer()
    inspect.register(app)
    export.register(app)
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    content = Blob()
    held = [
        slot("output.0", "uint8", [3], b"\1\2\3", content),
        {"name": "output.1", "dtype": "float32", "shape": [2], "skipped": "sparse layout"},
    ]
    write_run(tmp_path / "run", [{"name": "Torch.mm.0.forward", "slots": held}], content.content)
    return tmp_path / "run"


def test_export_says_what_it_wrote_and_what_it_left_out(run_path: Path, tmp_path: Path) -> None:
    result = invoke(run_path, tmp_path / "out", "--to", "npy")
    assert result.stdout.splitlines() == [
        f"1 tensor, 3 bytes, in 1 file: {tmp_path / 'out'}",
        "1 slot left out: sparse layout",
    ]
    assert numpy.load(tmp_path / "out/step0/rank0/Torch.mm.0.forward.output.0.npy").tolist() == [1, 2, 3]


def test_export_to_safetensors_writes_one_file(run_path: Path, tmp_path: Path) -> None:
    assert invoke(run_path, tmp_path / "out", "--to", "safetensors", "--call", "Torch.mm.0").exit_code == 0
    assert [path.name for path in (tmp_path / "out").rglob("*.*")] == ["rank0.safetensors"]


def test_damaged_lines_are_told(run_path: Path, tmp_path: Path) -> None:
    calls = run_path / "step0/rank0/calls.jsonl"
    calls.write_bytes(calls.read_bytes() + b"{}\n")
    assert "1 damaged line left out" in invoke(run_path, tmp_path / "out", "--to", "npy").stdout


def test_folder_in_use_is_left_to_the_program_to_tell(run_path: Path) -> None:
    assert isinstance(invoke(run_path, run_path, "--to", "npy").exception, RunExists)


def test_the_folder_may_be_given_as_an_option(run_path: Path, tmp_path: Path) -> None:
    done = invoke(run_path, "--to", "npy", "-o", tmp_path / "out", "--json")
    assert json.loads(done.stdout) == {
        "folder": str(tmp_path / "out"),
        "files": 1,
        "tensors": 1,
        "size_bytes": 3,
        "damaged_lines": 0,
        "left_out": {"sparse layout": 1},
    }
    assert "the folder for the files is missing" in str(invoke(run_path, "--to", "npy").exception)
    assert "--to is 'pkl'; expected npy, safetensors or tpz" in str(invoke(run_path, "x", "--to", "pkl").exception)
