"""Folders of runs: claimed by one process, writable, moved or deleted while they are written."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import tensorprobe
from tensorprobe.errors import CannotWrite, CaptureIncomplete, RunExists
from tests.taps.scripts import run_tool, write_script

HELPER_FIRST = """
    import subprocess, sys, torch
    if len(sys.argv) > 1:
        torch.nn.Linear(2, 2)(torch.ones(1, 2))
        sys.exit()
    subprocess.run([sys.executable, __file__, "helper"], check=True)
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
"""


@pytest.mark.parametrize("overwrite", [False, True])
def test_training_is_what_a_reader_sees_when_a_helper_was_first(overwrite: bool, tmp_path: Path) -> None:
    script = write_script(tmp_path, HELPER_FIRST)
    if overwrite:
        run_tool(["capture", "-o", "run", "--", sys.executable, script, "helper"], tmp_path)
    flags = ["--overwrite"] if overwrite else []
    done = run_tool(["capture", "-o", "run", *flags, "--", sys.executable, script], tmp_path)
    run = tensorprobe.open_run(tmp_path / "run")
    assert run.steps == [0, 1]
    assert any(call.name.endswith(".backward") for call in run.calls())
    (other,) = (tmp_path / "run").glob("process*")
    assert str(other.name) in done.stderr
    helper = tensorprobe.open_run(other)
    assert [call.outputs[0].shape for call in helper.calls() if call.op == "Functional.linear"] == [(1, 2)]


def test_folder_that_another_process_writes_is_refused(tmp_path: Path) -> None:
    with tensorprobe.capture(tmp_path / "run"):
        torch.ones(2) + 1
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                f"import tensorprobe, torch\nwith tensorprobe.capture({str(tmp_path / 'run')!r}, overwrite=True): torch.ones(2)",
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        torch.ones(2) + 1
    assert done.returncode == 1
    assert "RunExists" in done.stderr
    assert "another process is writing rank 0 of this run now" in done.stderr
    assert len([call for call in tensorprobe.open_run(tmp_path / "run").calls() if call.op == "Tensor.add"]) == 2


def test_of_two_that_begin_together_one_is_refused(tmp_path: Path) -> None:
    from tensorprobe.record.run_folder import make_run

    claims: list[int] = []
    refused: list[RunExists] = []
    barrier = threading.Barrier(8)

    def begin() -> None:
        barrier.wait()
        try:
            claims.append(make_run(tmp_path / "run", 0, 1, torch_version="", settings={}, overwrite=True))
        except RunExists as error:
            refused.append(error)

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(claims) == 1
    assert len(refused) == 7
    import os

    os.close(claims[0])


def _wait_for(path: Path) -> None:
    for _ in range(6000):
        if path.exists():
            return
        time.sleep(0.01)
    raise AssertionError(f"{path} was not written in a minute")


@pytest.mark.parametrize("in_process", [False, True])
def test_deleted_folder_is_reported(in_process: bool, tmp_path: Path) -> None:
    with pytest.warns(CaptureIncomplete, match=r"was deleted during the run"):  # noqa: SIM117
        with tensorprobe.capture(tmp_path / "run", in_process=in_process) as probe:
            for number in range(6):
                torch.ones(2) + number
                probe.step()
                if number == 2:
                    _wait_for(tmp_path / "run" / "step2" / "rank0" / "calls.jsonl")
                    while (tmp_path / "run").exists():  # the recorder may write while we remove
                        shutil.rmtree(tmp_path / "run", ignore_errors=True)
    assert probe.coverage is not None
    assert probe.coverage.failed >= 4
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("in_process", [False, True])
def test_moved_folder_gets_the_rest(in_process: bool, tmp_path: Path) -> None:
    with pytest.warns(CaptureIncomplete, match=r"was moved during the run, and is now '.*/moved'"):  # noqa: SIM117
        with tensorprobe.capture(tmp_path / "run", in_process=in_process) as probe:
            for number in range(6):
                torch.ones(2) + number
                probe.step()
                if number == 2:
                    _wait_for(tmp_path / "run" / "step2" / "rank0" / "calls.jsonl")
                    (tmp_path / "run").rename(tmp_path / "moved")
    run = tensorprobe.open_run(tmp_path / "moved")
    assert run.closed
    assert run.steps == list(range(6))
    assert probe.coverage is not None
    assert probe.coverage.failed == 0


def test_folder_that_cannot_be_written_is_found_out_before_the_program_starts(tmp_path: Path) -> None:
    script = write_script(tmp_path, "open('started', 'w')")
    (tmp_path / "file").write_text("")
    for out in ("file/run", "/proc/nothing/run"):
        done = run_tool(["capture", "-o", out, "--", sys.executable, script], tmp_path, code=2)
        assert "cannot write into" in done.stderr
    assert not (tmp_path / "started").exists()
    with pytest.raises(CannotWrite, match="cannot write into"):
        tensorprobe.Probe("/proc/nothing/run").start()


def test_forgotten_dashes_are_refused_with_what_to_type(tmp_path: Path) -> None:
    script = write_script(tmp_path, "open('started', 'w')")
    done = run_tool(["capture", "-o", "run", "python", script, "--steps", "3"], tmp_path, code=2)
    assert f"tensorprobe capture -o run -- python {script} --steps 3" in done.stderr
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("filters", [["--steps", "7"], ["--op", "Torch.nothing"]])
def test_nothing_recorded_is_reported_and_ends_with_2(filters: list[str], tmp_path: Path) -> None:
    script = write_script(tmp_path, "import torch; torch.nn.Linear(2, 2)(torch.ones(1, 2))")
    done = run_tool(["capture", "-o", "run", *filters, "--", sys.executable, script], tmp_path, code=2)
    assert "Nothing was recorded." in done.stderr
