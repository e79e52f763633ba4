"""What right runs of the baseline differ by is allowed, call by call, and nothing more."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import tensorprobe
from tensorprobe.cli.main import app
from tensorprobe.errors import RunNotFound
from tensorprobe.taps.perturb import change_threads, move_by_one_unit
from tests.builders.runs import call, write

X = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
NOISE = np.random.default_rng(1).standard_normal((8, 8)).astype(np.float32)


def run(folder: Path, gelu: float = 0.0, tanh: float = 0.0, weight: float = 0.0) -> Path:
    read = X * (1 + weight * NOISE)
    calls = [
        call("Functional.gelu.0.forward", inputs=[X], outputs=[X * (1 + gelu * NOISE)]),
        call("Torch.tanh.0.forward", inputs=[X], outputs=[X * (1 + tanh * NOISE)]),
        call("Functional.linear.0.forward", inputs=[X, read], outputs=[X]),
    ]
    return write(folder, calls)


def test_what_right_runs_differ_by_is_allowed_there_only(tmp_path: Path) -> None:
    baseline, right = run(tmp_path / "a"), run(tmp_path / "right", gelu=1e-3, weight=1e-3)
    noisy, wrong = run(tmp_path / "b", gelu=-1e-3, weight=2e-3), run(tmp_path / "c", gelu=1e-3, tanh=1e-3)
    far = run(tmp_path / "d", gelu=2e-2)
    assert tensorprobe.compare(baseline, noisy).exit_code == 1
    assert tensorprobe.compare(baseline, noisy, noise=[str(right)]).exit_code == 0
    for candidate, op in ((wrong, "tanh"), (far, "gelu")):
        found = tensorprobe.compare(baseline, candidate, noise=[str(right), str(baseline)]).divergence
        assert found is not None and op in found.call


def test_a_run_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(RunNotFound):
        tensorprobe.compare(run(tmp_path / "a"), run(tmp_path / "b"), noise=[str(tmp_path / "none")])


def test_a_program_is_changed_by_one_unit_in_the_last_place() -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        model = nn.Linear(16, 16).to(dtype)
        before = model.weight.detach().clone()
        seen: list[torch.Tensor] = []
        model.register_forward_hook(lambda _, args, out, seen=seen: seen.append(args[0]))  # type: ignore[misc]
        move_by_one_unit(model, 1)
        x = torch.randn(4, 16, dtype=dtype)
        model(x)
        for ours, theirs in ((before, model.weight.detach()), (x, seen[-1])):
            size = ours.double().abs().clamp(min=torch.finfo(dtype).tiny)  # torch 2.6 draws a zero
            moved = (ours.double() - theirs.double()).abs() / size
            assert 0 < moved.max() <= torch.finfo(dtype).eps
            assert 0.3 < (moved > 0).double().mean() < 0.9


def test_another_number_of_threads() -> None:
    threads = torch.get_num_threads()
    try:
        for number, expected in ((4, 2), (1, 2)):
            torch.set_num_threads(number)
            change_threads(1)
            assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(threads)


def test_a_command_is_run_again_with_one_unit_moved(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\ntorch.manual_seed(0)\nmodel = torch.nn.Linear(8, 8)\nmodel(torch.randn(4, 8)).sum().backward()\n"
    )
    command = ["capture", "-o", str(tmp_path / "a"), "--repeat", "2", "--perturb", "ulp", "--", sys.executable]
    assert CliRunner().invoke(app, [*command, str(script)]).exit_code == 0
    result = tensorprobe.compare(tmp_path / "a", tmp_path / "a-2", noise=[str(tmp_path / "a-2")], prove="off")
    assert result.exit_code == 0
    assert "structure" not in str(result)
    assert not tensorprobe.compare(tmp_path / "a", tmp_path / "a-2", policy="bitwise")
