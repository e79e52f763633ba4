"""The capture room sees faults where the truth says, without having been told: the two meet on disk only."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import tensorprobe
from bench.sim.models import workload
from tensorprobe import sim

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"
PROGRAM = [sys.executable, "-c", "from tensorprobe.cli.main import main; main()"]
NAMES = """softmax-stale matmul-transposed-gradient linear-scale linear-bias-gradient layer-norm-saved-scale conv-weight-gradient
    copy-one-element scatter-gradient lstm-cell-truncated attention-fused-gradient layer-norm-nan-third-step
    adam-momentum adam-root-bf16 adam-update-second-step sgd-momentum""".split()
Record = list[tuple[int, str, tuple[tuple[str, str | None], ...]]]


def record(model: str, steps: int) -> Record:
    """Step, name and the digests of the outputs of each recorded call."""
    work = workload(model, "npu")
    with TemporaryDirectory() as folder:
        with tensorprobe.capture(f"{folder}/run", model=work.model, level="api", mode="tensor") as probe:
            for _ in range(steps):
                work.step()
                probe.step()
        run = tensorprobe.open_run(f"{folder}/run")
        return [
            (
                step,
                call.name,
                tuple((slot.name, slot.digest) for slot in call.slots if not slot.name.startswith("input")),
            )
            for step in run.steps
            for call in run.calls(step=step, rank=0)
        ]


@cache
def right_record(model: str, steps: int) -> Record:
    return record(model, steps)


@pytest.mark.parametrize("name", NAMES)
def test_the_first_recorded_difference_is_the_truth(npu: str, name: str) -> None:
    entry = next(entry for entry in sim.catalog() if entry.name == name)
    right = right_record(entry.model, entry.steps)
    with sim.installed([entry.fault]):
        wrong = record(entry.model, entry.steps)
    first = next(one for one, other in zip(right, wrong, strict=True) if one != other)
    assert entry.truth is not None
    assert (first[1], first[0]) == (entry.truth.api, entry.truth.step)


def test_capture_and_sim_work_as_one_command(tmp_path: Path) -> None:
    inner = [
        *PROGRAM,
        "sim",
        "--fault",
        "softmax-tail",
        "--",
        sys.executable,
        str(EXAMPLE),
        "--device",
        "npu",
        "--steps",
        "1",
    ]
    command = [*PROGRAM, "capture", "-o", str(tmp_path / "run"), "--", *inner]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    calls = {call.name: call for call in tensorprobe.open_run(tmp_path / "run").calls(step=0, rank=0)}
    softmax = next(slot for slot in calls["Functional.softmax.0.forward"].slots if slot.name == "output.0")
    assert softmax.device == "npu:0"
    assert not softmax.tensor()[..., -4:].any()


@pytest.mark.parametrize("level", ["api", "aten"])
def test_fetching_statistics_from_the_device_is_no_call_of_the_program(npu: str, tmp_path: Path, level: str) -> None:
    names = {}
    for mode in ("tensor", "summary"):
        work = workload("cnn", npu)
        with tensorprobe.capture(tmp_path / mode, model=work.model, level=level, mode=mode) as probe:
            for _ in range(2):
                work.step()
                probe.step()
        run = tensorprobe.open_run(tmp_path / mode)
        names[mode] = [call.name for call in run.calls()]
        assert probe.coverage.recorded == len(names[mode])
    assert names["summary"] == names["tensor"]
