"""Callbacks for trainers, with the real libraries: three steps are three steps, micro-batches and phases are recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

import tensorprobe
from tests.taps.scripts import run_python

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize(
    ("library", "script", "module"),
    [("accelerate", "hf_trainer.py", "transformer.h.0.*"), ("lightning", "lightning_trainer.py", "layers.*")],
)
def test_three_steps_with_two_micro_batches_each(tmp_path: Path, library: str, script: str, module: str) -> None:
    pytest.importorskip(library)
    run_python([EXAMPLES / script, "run"], tmp_path)
    run = tensorprobe.open_run(tmp_path / "run")
    assert run.closed and run.steps == [0, 1, 2]
    for step in run.steps:
        calls = list(run.calls(step, module=module))
        assert {call.microbatch for call in calls} == {0, 1}
        assert {call.phase for call in calls} == {"train"}
