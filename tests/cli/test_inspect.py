"""`tensorprobe inspect` on hand-made runs."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from tensorprobe.cli import export, inspect
from tensorprobe.errors import NotFound, RunNotFound
from tests.builders.runs import Blob, slot, write_calls, write_manifest, write_rank, write_run


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
