"""Trainers and launchers, with the real libraries: three steps are three steps, micro-batches and phases are recorded."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import tensorprobe
from tests.taps.scripts import run_python, run_tool

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TRAINERS = [("accelerate", "hf_trainer.py", "transformer.h.0.*"), ("lightning", "lightning_trainer.py", "layers.*")]


def assert_three_steps(run: tensorprobe.Run, module: str, evaluated: list[int]) -> None:
    """Three steps of two micro-batches, and an evaluation after some of them."""
    assert run.closed and run.steps == [0, 1, 2]
    for step in run.steps:
        trained = [call for call in run.calls(step, module=module) if call.phase == "train"]
        assert {call.microbatch for call in trained} == {0, 1}
        assert {call.phase for call in run.calls(step, op="linear")} - {"train"} == (
            {"eval, no grad"} if step in evaluated else set()
        )


@pytest.mark.parametrize(("library", "script", "module"), TRAINERS)
def test_a_callback_records_three_steps(tmp_path: Path, library: str, script: str, module: str) -> None:
    pytest.importorskip(library)
    run_python([EXAMPLES / script, "run"], tmp_path)
    run = tensorprobe.open_run(tmp_path / "run")
    assert_three_steps(run, module, [0, 1, 2] if library == "accelerate" else [2])


@pytest.mark.parametrize(("library", "script", "module"), TRAINERS)
def test_a_trainer_without_a_callback_is_captured_as_it_is(
    tmp_path: Path, library: str, script: str, module: str
) -> None:
    pytest.importorskip(library)
    text = (EXAMPLES / script).read_text()
    (tmp_path / "train.py").write_text(text.replace("TensorprobeCallback(out, overwrite=True)", ""))
    run_tool(["capture", "-o", "run", "--", sys.executable, "train.py"], tmp_path)
    run = tensorprobe.open_run(tmp_path / "run")
    assert run.steps == [0, 1, 2]
    assert {call.phase for call in run.calls(2, op="linear")} == {"train", "eval, no grad"}


def test_accelerate_launch_is_captured_as_it_is(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]
    run_tool(["capture", "-o", "run", "--", *launch, str(EXAMPLES / "train_accelerate.py")], tmp_path)
    assert_three_steps(tensorprobe.open_run(tmp_path / "run"), "0", [2])


def test_a_training_that_raised_can_be_started_again(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tensorprobe.integrations.hf import TensorprobeCallback

    callback = TensorprobeCallback(tmp_path / "run", overwrite=True)
    callback.on_train_begin(None, None, None)  # and no on_train_end: the Trainer has none for errors
    try:
        callback.on_train_begin(None, None, None)
    finally:
        callback.on_train_end(None, None, None)
    assert tensorprobe.active_probe() is None
