"""The example scripts, run as a user runs them: in a process of their own, from another folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TIME_LIMIT_S = 240
pytestmark = pytest.mark.usefixtures("warm_processes")


def run_script(command: list[str], folder: Path, *, exit_code: int = 0) -> str:
    """stdout of a command that must end as expected and must not warn."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT_S
    )
    assert done.returncode == exit_code, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return done.stdout


def read_losses(stdout: str) -> list[float]:
    """The losses that a script printed, in order."""
    return [float(loss) for loss in re.findall(r"step \d+ loss (\S+)", stdout)]


def test_gpt_prints_the_same_losses_twice_and_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [str(EXAMPLES / "train_gpt.py"), "--steps", "4", "--lr", "3e-3"]
    first = run_script(command, tmp_path)
    monkeypatch.undo()
    assert run_script(command, tmp_path) == first
    losses = read_losses(first)
    assert len(losses) == 4
    assert losses[-1] < losses[0]


def test_gpt_losses_depend_on_the_seed_and_on_the_dtype(tmp_path: Path) -> None:
    script = str(EXAMPLES / "train_gpt.py")
    variants = [[], ["--seed", "1"], ["--dtype", "bf16"]]
    outputs = {run_script([script, "--steps", "1", *variant], tmp_path) for variant in variants}
    assert len(outputs) == len(variants)


def test_gpt_takes_its_size_from_the_arguments(tmp_path: Path) -> None:
    size = ["--layers", "1", "--width", "32", "--batch", "2", "--length", "8", "--steps", "2"]
    assert len(read_losses(run_script([str(EXAMPLES / "train_gpt.py"), *size], tmp_path))) == 2


def test_gpt_refuses_a_width_that_the_heads_cannot_share(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "train_gpt.py"), "--width", "30"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "--width 30 is not a multiple of 4" in done.stderr


def test_cnn_prints_the_same_losses_twice_and_learns(tmp_path: Path) -> None:
    command = [str(EXAMPLES / "train_cnn.py"), "--steps", "6"]
    first, second = run_script(command, tmp_path), run_script(command, tmp_path)
    assert first == second
    losses = read_losses(first)
    assert len(losses) == 6
    assert min(losses[-2:]) < losses[0]


@pytest.mark.needs_torch("2.8", "fully_shard on the CPU")
def test_replicated_and_sharded_training_agree_on_each_rank(tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    losses = []
    for variant in ([], ["--fsdp"]):
        stdout = run_script([*launcher, str(EXAMPLES / "train_ddp.py"), "--steps", "3", *variant], tmp_path)
        losses.append(
            {(rank, step): float(loss) for rank, step, loss in re.findall(r"rank (.) step (.) loss (.+)", stdout)}
        )
    replicated, sharded = losses
    assert sorted(replicated) == [(rank, step) for rank in "01" for step in "012"]
    assert sharded == pytest.approx(replicated, rel=1e-4)


def test_capture_with_records_the_steps_it_names(tmp_path: Path) -> None:
    stdout = run_script([str(EXAMPLES / "capture_with.py"), "--out", "runs/a"], tmp_path)
    about_run, about_slot = stdout.splitlines()
    assert re.fullmatch(r"runs/a: steps \[0, 2\], [1-9]\d* calls", about_run)
    assert re.fullmatch(r"Functional\.linear\.0\.forward input\.0: float32 \[4, 8\], mean -?\d\.\d{6}", about_slot)
    assert (tmp_path / "runs" / "a" / "manifest.json").is_file()


def test_compare_runs_names_the_gelu_that_was_changed(tmp_path: Path) -> None:
    command = [str(EXAMPLES / "compare_runs.py"), "--approximate", "tanh"]
    verdict, evidence, *_ = run_script(command, tmp_path, exit_code=1).splitlines()
    assert verdict.startswith("DIVERGED  first at step 0, rank 0: Functional.gelu.0.forward in module '1', output.0")
    assert "inputs agree exactly" in evidence and "introduced here" in evidence
    assert "'none' → 'tanh'" in evidence


def test_compare_runs_finds_two_equal_trainings_to_agree(tmp_path: Path) -> None:
    verdict, *_, count = run_script([str(EXAMPLES / "compare_runs.py"), "--out", "here"], tmp_path).splitlines()
    assert verdict.startswith("AGREES")
    assert count.startswith("0 of ")
    assert (tmp_path / "here" / "other" / "manifest.json").is_file()
