"""Steps by the calls of the model: for inference."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import tensorprobe
from tests.taps.scripts import run_tool

SCRIPT = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
state = torch.ones(1, 4)
with torch.no_grad():
    for _ in range(3):
        state = model(state) + 1
"""


def test_each_call_of_the_model_is_a_step(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    with tensorprobe.capture(tmp_path / "run", model=model, steps_by="forward"):
        state = torch.ones(1, 4)
        for _ in range(3):
            state = model(state) + 1
    run = tensorprobe.open_run(tmp_path / "run")
    assert run.steps == [0, 1, 2]
    assert [call.name for call in run.calls(2)] == [
        "Functional.linear.0.forward",
        "Functional.relu.0.forward",
        "Tensor.add.0.forward",
    ]


def test_calls_of_a_method_that_was_held_before_the_first_call_are_steps(tmp_path: Path) -> None:
    script = SCRIPT.replace("with torch", "call = model.__call__\nwith torch").replace("model(state)", "call(state)")
    (tmp_path / "generate.py").write_text(script)
    run_tool(["capture", "-o", "run", "--step-on", "forward", "--", sys.executable, "generate.py"], tmp_path)
    assert tensorprobe.open_run(tmp_path / "run").steps == [0, 1, 2]


def test_capture_takes_it_from_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "generate.py").write_text(SCRIPT)
    command = ["--", sys.executable, "generate.py"]
    run_tool(["capture", "-o", "forward", "--step-on", "forward", *command], tmp_path)
    run_tool(["capture", "-o", "manual", "--step-on", "manual", *command], tmp_path)
    assert tensorprobe.open_run(tmp_path / "forward").steps == [0, 1, 2]
    assert tensorprobe.open_run(tmp_path / "manual").steps == [0]
    done = run_tool(["capture", "-o", "other", "--step-on", "epoch", *command], tmp_path, code=2)
    assert "--step-on" in done.stderr and not (tmp_path / "other").exists()
