"""Names of calls are completed by the shell."""

from __future__ import annotations

from pathlib import Path

import torch
from typer.testing import CliRunner

import tensorprobe
from tensorprobe.cli.main import app


def complete(words: str) -> list[str]:
    environment = {"_TENSORPROBE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = CliRunner().invoke(app, [], prog_name="tensorprobe", env=environment)
    return done.stdout.split()


def test_calls_of_the_run_that_was_typed_are_offered(tmp_path: Path) -> None:
    with tensorprobe.capture(tmp_path / "run"):
        torch.ones(2).exp().cos()
    assert complete(f"tensorprobe inspect {tmp_path / 'run'} Tensor.c") == ["Tensor.cos.0.forward"]
    assert complete(f"tensorprobe diff {tmp_path / 'run'} {tmp_path / 'run'} Tensor.e") == ["Tensor.exp.0.forward"]
    assert complete(f"tensorprobe inspect {tmp_path / 'none'} Tensor.c") == []
