"""Programs that do not end well, recorded by `tensorprobe capture`: the run says how it ended, and what was restarted is there."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import tensorprobe
from tests.taps.scripts import run_tool, write_script

TRAIN = """
    import os, signal, sys
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ends = sys.argv[1]
    for step in range(4):
        loss = model(torch.ones(4, 8)).square().mean()
        if step == 2 and ends == "killed":
            os.kill(os.getpid(), signal.SIGTERM)
        if step == 2 and ends == "interrupted":
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell lets its children ignore it
            os.kill(os.getpid(), signal.SIGINT)
        if step == 2 and ends == "raised":
            raise ValueError("no such batch")
        if step == 2 and ends == "restarted" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise ValueError("only once")
        if step == 2 and ends == "stopped" and os.environ["RANK"] == "0":
            os.kill(os.getppid(), signal.SIGTERM)
            signal.pause()
        loss.backward()
        optimizer.step()
"""
LAUNCH = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_script(tmp_path_factory.mktemp("program"), TRAIN)


@pytest.fixture(scope="module")
def whole(script: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    run_tool(["capture", "-o", "run", "--", sys.executable, script, "well"], folder)
    return folder / "run"


@pytest.mark.parametrize(
    ("how", "code", "told", "answer"),
    [
        ("killed", 143, "was never closed", "UNFINISHED  the candidate ends in step 2; steps 0-1 agree"),
        ("interrupted", 130, "ended with KeyboardInterrupt", "UNFINISHED  the candidate ends with KeyboardInterrupt in step 2"),
        ("raised", 1, "ended with ValueError: no such batch", "DIVERGED  first at step 2, rank 0"),
    ],
)  # fmt: skip
def test_the_run_says_how_the_program_ended(
    script: Path, whole: Path, tmp_path: Path, how: str, code: int, told: str, answer: str
) -> None:
    done = run_tool(["capture", "-o", "run", "--", sys.executable, script, how], tmp_path, code=code)
    assert f"RunIncomplete: 'run' {told}. Steps 0-1 are complete; step 2 has" in done.stderr
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["exit_code"] == code
    result = tensorprobe.compare(whole, tmp_path / "run")
    assert str(result).startswith(answer)
    assert tensorprobe.compare(whole, tmp_path / "run", steps="0-1").exit_code == 0


def test_after_sigterm_to_torchrun_the_whole_steps_agree(script: Path, tmp_path: Path) -> None:
    for name, how, code in (("whole", "well", 0), ("stopped", "stopped", None)):
        run_tool(["capture", "-o", name, "--", sys.executable, *LAUNCH, script, how], tmp_path, code=code)
    result = tensorprobe.compare(tmp_path / "whole", tmp_path / "stopped")
    assert (result.exit_code, result.findings) == (2, [])
    assert {ending.run for ending in result.summary.endings} == {"candidate"}
    last = max(ending.whole for ending in result.summary.endings if ending.rank == 0)
    assert last == 1 and tensorprobe.compare(tmp_path / "whole", tmp_path / "stopped", steps=[0], ranks=[0])


def test_an_elastic_restart_is_an_attempt_of_its_own(script: Path, tmp_path: Path) -> None:
    command = [sys.executable, *LAUNCH, "--max-restarts", "1", script, "restarted"]
    done = run_tool(["capture", "-o", "run", "--", *command], tmp_path)
    assert "It was started again: 'run/attempt1'." in done.stderr
    assert "The processes were started again. Attempt 1:" in done.stderr
    assert done.stderr.rstrip().endswith("tensorprobe inspect run/attempt1")
    second = tensorprobe.open_run(tmp_path / "run" / "attempt1")
    assert (second.closed, second.ranks, second.steps) == (True, [0, 1], [0, 1, 2, 3])
    assert 2 in tensorprobe.open_run(tmp_path / "run").steps
    run_tool(["capture", "-o", "run", "--overwrite", "--", sys.executable, script, "well"], tmp_path)
    assert not (tmp_path / "run" / "attempt1").exists()
