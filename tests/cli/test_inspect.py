"""`tensorprobe inspect` on hand-made runs."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner, Result

from tensorprobe.cli import export, inspect
from tensorprobe.engine import compare
from tensorprobe.errors import NotFound, RunNotFound
from tests.builders.runs import Blob, call, slot, write, write_calls, write_manifest, write_rank, write_run


def invoke(*arguments: object) -> Result:
    app = typer.Typer()
    inspect.register(app)
    export.register(app)
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)], catch_exceptions=True)


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    root = tmp_path / "a run"
    content = Blob()
    values = struct.pack("<4f", 1.0, float("nan"), -3.0, 2.0)
    summary = [2.0, -3.0, 0.0, 3.74, 1, 0]
    slots = [
        slot("input.0", "float32", [2, 2], values, content, summary=summary),
        slot("output.0", "int64", [1], struct.pack("<q", 7), content),
    ]
    calls = [
        {
            "name": "Functional.conv2d.0.forward",
            "stack": 0,
            "args": [{"slot": "input.0"}],
            "kwargs": {},
            "slots": slots,
        },
        {"name": "Functional.conv2d.1.forward", "slots": slots},
        {"name": "Functional.conv2d.1.backward", "slots": slots[:1]},
    ]
    folder = write_run(root, calls, content.content)
    (folder / "stacks.jsonl").write_text('{"id": 0, "frames": [["train.py", 88, "forward", "y = conv(x)"]]}\n')
    return root


def test_run_is_shown_as_a_whole(run_path: Path) -> None:
    result = invoke(run_path)
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{run_path}: 1 step, 1 rank, 3 calls, ")
    assert result.stdout.endswith(f"tensorprobe inspect '{run_path}' Functional.conv2d.0.forward\n")


def test_run_as_json_is_one_object(run_path: Path) -> None:
    shown = json.loads(invoke(run_path, "--json").stdout)
    assert (shown["calls"], shown["closed"], shown["coverage"]["recorded"]) == (3, True, 3)
    assert shown["segments"] == [{"step": 0, "rank": 0, "calls": 3, "damaged": 0, "size_bytes": 72}]


def test_call_is_shown_in_both_directions(run_path: Path) -> None:
    text = invoke(run_path, "Functional.conv2d.1").stdout
    assert "Functional.conv2d.1.forward   step 0, rank 0, call 1" in text
    assert "Functional.conv2d.1.backward   step 0, rank 0, call 2" in text
    assert "max 2 at [1, 1]   min -3 at [1, 0]   mean 0   norm 3.74   nan 1 first at [0, 1]" in text
    assert "values 1 nan -3 2\n" in text


def test_call_has_its_stack_and_arguments(run_path: Path) -> None:
    text = invoke(run_path, "Functional.conv2d.0").stdout
    assert "train.py:88 in forward: y = conv(x)" in text
    assert "(<input.0>)" in text


def test_call_as_json_has_standard_numbers(run_path: Path) -> None:
    shown = json.loads(invoke(run_path, "Functional.conv2d.1.backward", "--json").stdout)
    (call,) = shown["calls"]
    assert call["slots"][0]["first"] == [1.0, "NaN", -3.0, 2.0]
    assert call["slots"][0]["places"]["max"] == {"value": 2.0, "index": [1, 1]}


def test_one_slot_can_be_chosen(run_path: Path) -> None:
    text = invoke(run_path, "Functional.conv2d.0", "--slot", "output").stdout
    assert "output.0" in text
    assert "  input.0 " not in text


def test_unknown_slot_is_told_with_the_nearest(run_path: Path) -> None:
    result = invoke(run_path, "Functional.conv2d.0", "--slot", "output.7")
    assert isinstance(result.exception, NotFound)
    assert "Nearest: output.0" in str(result.exception)


def test_name_that_fits_several_calls_lists_them(run_path: Path) -> None:
    text = invoke(run_path, "Functional.conv2d", "--limit", 2).stdout
    assert text.startswith("3 calls, the first 2:")
    assert "1 more: --limit 3" in text


def test_more_values_are_shown_when_asked_for(run_path: Path) -> None:
    few, all_of_them = (
        invoke(run_path, "Functional.conv2d.0", "--slot", "input.0", "--values", count).output for count in (2, 4)
    )
    assert "values 1 nan …" in few and "values 1 nan -3 2\n" in all_of_them


def test_two_runs_are_shown_side_by_side(run_path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write(other, [call("Functional.conv2d.0.forward"), call("Torch.add.0.forward")])
    printed = invoke(run_path, other).output
    assert re.search(r"^≠ calls +3 +2$", printed, re.MULTILINE) and re.search(
        r"^  world size +1 +1$", printed, re.MULTILINE
    )
    assert re.search(r"^≠ Functional\.conv2d +3 +1$", printed, re.MULTILINE)
    assert re.search(r"^≠ Torch\.add +0 +1$", printed, re.MULTILINE)
    assert printed.rstrip().endswith(f"tensorprobe compare '{run_path}' {other}")
    first, second = json.loads(invoke(run_path, other, "--json").output)
    assert (first["run"]["calls"], second["ops"]) == (3, {"Functional.conv2d": 1, "Torch.add": 1})


def test_a_call_is_found_although_a_folder_has_its_name(
    run_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Functional.conv2d.0").mkdir()
    assert invoke(run_path, "Functional.conv2d.0").output.startswith("Functional.conv2d.0.forward")


def test_the_result_of_a_comparison_is_printed_again(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / name, [call("Torch.add.0.forward", outputs=[np.float32([1, 2] if name == "a" else [1, 3])])])
    result = compare(tmp_path / "a", tmp_path / "b", out=tmp_path / "result")
    assert invoke(tmp_path / "result").output.rstrip() == str(result).rstrip()
    assert json.loads(invoke(tmp_path / "result", "--json").output) == json.loads(result.to_json())


def test_step_lists_its_calls(run_path: Path) -> None:
    text = invoke(run_path, "--step", 0).stdout
    assert "     2  Functional.conv2d.1.backward" in text
    assert len(json.loads(invoke(run_path, "--step", 0, "--json").stdout)["calls"]) == 3


def test_sound_run_is_verified(run_path: Path) -> None:
    result = invoke(run_path, "--verify")
    assert (result.exit_code, result.stdout[:6]) == (0, "INTACT")


def test_flipped_bit_is_reported_and_sets_the_exit_code(run_path: Path) -> None:
    file = run_path / "step0/rank0/tensors.bin"
    file.write_bytes(b"\1" + file.read_bytes()[1:])
    result = invoke(run_path, "--verify")
    assert result.exit_code == 1
    assert "input.0: its bytes changed since they were written" in result.stdout
    as_json = invoke(run_path, "--verify", "--json")
    assert (as_json.exit_code, json.loads(as_json.stdout)["sound"]) == (1, False)


def test_killed_run_says_what_is_whole(tmp_path: Path) -> None:
    write_manifest(tmp_path, world_size=2)
    for rank in (0, 3):
        write_rank(tmp_path, rank, closed=False)
        for step in (0, 1):
            write_calls(tmp_path, [{"name": "Torch.mm.0.forward"}], step=step, rank=rank)
    write_calls(tmp_path, [{"name": f"Torch.mm.{number}.forward"} for number in range(418)], step=1, rank=0)
    write_calls(tmp_path, b'{"name', step=1, rank=3)
    first = invoke(tmp_path).stdout.splitlines()[0]
    assert first == (
        f"RunIncomplete: '{tmp_path}' was never closed. "
        "Step 0 is complete; step 1 has 418 calls on rank 0, none on rank 3."
    )


def test_a_run_says_what_it_was(tmp_path: Path) -> None:
    about = {
        "argv": ["python", "train.py", "--lr", "1 0"],
        "cwd": "/home/x",
        "commit": "ab12",
        "dirty": True,
        "seed": 0,
    }
    tables = {"switches": {"threads": 2}, "packages": {"numpy": "2.0"}, "environment": {"OMP_NUM_THREADS": "2"}}
    write_manifest(tmp_path, version=2, provenance={**about, **tables}, exit_code=0)
    write_rank(tmp_path, closed=True)
    lines = [line.strip() for line in invoke(tmp_path).stdout.splitlines()]
    for fact in (
        "command     python train.py --lr '1 0'   (exit code 0)",
        "folder      /home/x",
        "commit      ab12, with changes",
        "seed        0",
        "switches    threads 2",
        "packages    numpy 2.0",
        "environment OMP_NUM_THREADS 2",
    ):
        assert fact in lines
    assert not any(line.startswith("lacks") for line in lines)


def test_a_run_of_an_older_format_says_what_it_lacks(run_path: Path) -> None:
    assert "lacks       format 1 does not record the command" in invoke(run_path).stdout


def test_provenance_of_any_shape_is_shown(tmp_path: Path) -> None:
    write_manifest(tmp_path, version=2, provenance={"argv": "x", "switches": [1], "packages": None, "cwd": {"a": 1}})
    write_rank(tmp_path, closed=True)
    assert invoke(tmp_path).exit_code == 0


def test_damaged_run_is_shown_with_its_damage(run_path: Path) -> None:
    calls = run_path / "step0/rank0/calls.jsonl"
    calls.write_bytes(calls.read_bytes() + b"{}\n")
    result = invoke(run_path)
    assert result.exit_code == 0
    assert "3 calls" in result.stdout
    assert "DAMAGED: 1 line cannot be read" in result.stdout


def test_damaged_tensor_leaves_the_rest_of_the_call_readable(run_path: Path) -> None:
    (run_path / "step0/rank0/tensors.bin").unlink()
    text = invoke(run_path, "Functional.conv2d.0").stdout
    assert "is missing" in text
    assert "norm 3.74" in text


@pytest.mark.parametrize(("arguments", "error"), [(["absent"], RunNotFound), ([], NotFound)])
def test_errors_are_left_to_the_program(arguments: list[str], error: type, run_path: Path) -> None:
    result = invoke(*(arguments or [run_path, "Nothing"]))
    assert isinstance(result.exception, error)
