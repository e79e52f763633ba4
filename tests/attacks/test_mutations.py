"""Law: whatever happens to the bytes of a run, reading it gives results or an error of ours, and nothing else."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from tensorprobe.errors import TensorprobeError
from tensorprobe.record import open_run, verify_run
from tensorprobe.record.overview import describe_call, describe_run
from tensorprobe.report.inspect import render_calls, render_run
from tests.builders.runs import Blob, slot, write_run

FILES = (
    "manifest.json",
    "rank0.json",
    "step0/rank0/calls.jsonl",
    "step0/rank0/stacks.jsonl",
    "step0/rank0/tensors.bin",
)


def write_whole_run(root: Path) -> None:
    content = Blob()
    slots = [
        slot(
            "input.0", "float32", [2, 3], bytes(range(24)), content, stride=[1, 2], summary=[1.0, 0, "NaN", 2.5, 1, 0]
        ),
        slot("output.0", "bool", [4], b"\0\1\1\0", content),
        slot("output.1", "bfloat16", [4], bytes(8), content, grad=True),
    ]
    line = {"name": "Torch.mm.0.forward", "stack": 0, "args": [{"slot": "input.0"}, 1.5], "kwargs": {}, "slots": slots}
    folder = write_run(root, [line, {"name": "Torch.mm.0.backward", "slots": slots[:1]}], content.content)
    (folder / "stacks.jsonl").write_text(json.dumps({"id": 0, "frames": [["a.py", 1, "f", "x"]]}) + "\n")


def read_everything(root: Path) -> int:
    """Read all that can be read; how many errors of ours were met."""
    errors = 0
    try:
        run = open_run(root)
        render_run(describe_run(run))
        verify_run(run, data=True)
        calls = list(run.calls(on_damage="skip"))
    except TensorprobeError:
        return 1
    for call in calls:
        try:
            render_calls([describe_call(run, call)], 1, run="run")
            for held in call.slots:
                held.tensor().sum()
        except TensorprobeError:
            errors += 1
    return errors


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_changed_bytes_give_results_or_an_error_of_ours(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_whole_run(root)
        path = root / data.draw(st.sampled_from(FILES))
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, len(content) - 1))
            content[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
            content = content or bytearray(b"x")
        path.write_bytes(content)
        read_everything(root)  # anything but an error of ours comes out of here and fails the test


def test_unchanged_run_gives_no_error(tmp_path: Path) -> None:
    write_whole_run(tmp_path)
    assert read_everything(tmp_path) == 0
