"""Processes that die and disks that fill: what was recorded stays readable, and training goes on."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorprobe
from tensorprobe.errors import CaptureIncomplete
from tests import warm
from tests.conftest import recorders
from tests.taps.scripts import TIME_LIMIT_S, environment, run_python, write_script
from tests.taps.tiny import names, record, the_call

VICTIM = """
    import sys, torch, tensorprobe
    torch.set_num_threads(1)
    out, in_steps, settings = sys.argv[1], sys.argv[2] == "steps", eval(sys.argv[3])
    with tensorprobe.capture(out, **settings) as probe:
        data = torch.arange(1000.0)
        for number in range(40_000):
            torch.add(data, number)
            sys.stdout.write(f"{number}\\n")
            sys.stdout.flush()
            if in_steps and number % 50 == 49:
                probe.step()
"""


@pytest.mark.parametrize(
    ("moment", "in_steps", "settings"),
    [
        (1, False, {}),
        (2, False, {"mode": "summary"}),
        (37, False, {}),
        (173, True, {}),
        (399, True, {}),
        (60, False, {"ring_bytes": 1 << 20}),
    ],
    ids=str,
)
def test_run_of_a_killed_process_holds_every_call_that_was_complete(
    moment: int, in_steps: bool, settings: dict[str, Any], tmp_path: Path
) -> None:
    script = write_script(tmp_path, VICTIM)
    victim = warm.Popen(
        [sys.executable, str(script), str(tmp_path / "run"), "steps" if in_steps else "one", repr(settings)],
        stdout=subprocess.PIPE,
        env=environment(),
    )
    assert victim.stdout is not None
    with victim.stdout:
        for line in victim.stdout:
            if int(line) == moment:
                break
        victim.send_signal(signal.SIGKILL)
        rest = victim.stdout.read().split()
    assert victim.wait(TIME_LIMIT_S) == -signal.SIGKILL
    for pid in recorders(victim.pid):  # it writes what it was given, then it ends
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            assert select.select([descriptor], [], [], TIME_LIMIT_S)[0]
            os.close(descriptor)
    completed = int(rest[-1]) if rest else moment
    run = tensorprobe.open_run(tmp_path / "run")
    assert not run.closed
    calls = [call for call in run.calls() if call.op == "Torch.add"]
    assert completed - 1 <= len(calls) - 1 <= completed + 1
    for number, call in enumerate(calls):
        found = call.outputs[0]
        assert found.summary is not None
        assert found.summary.max == 999 + number
        if settings.get("mode") != "summary":
            assert torch.equal(found.tensor(), torch.arange(1000.0) + number)


@pytest.mark.parametrize("moment", ["before the first call", "in the middle", "while a tensor comes in pieces"])
def test_training_goes_on_when_the_recorder_is_killed(moment: str, tmp_path: Path) -> None:
    settings = {"ring_bytes": 1 << 20} if "pieces" in moment else {}
    size = 1_000_000 if settings else 1000
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with tensorprobe.capture(tmp_path / "run", **settings) as probe:
            results = []
            for number in range(20):
                if number == (0 if "first" in moment else 10):
                    (pid,) = recorders()
                    os.kill(pid, signal.SIGKILL)
                results.append(torch.add(torch.arange(size), number).sum().item())
    assert results == [(torch.arange(size) + number).sum().item() for number in range(20)]
    assert [warning.category for warning in caught] == [CaptureIncomplete]
    assert "the recorder has ended" in str(caught[0].message)
    assert probe.coverage is not None
    assert probe.coverage.first_error is not None
    run = tensorprobe.open_run(tmp_path / "run")
    assert not run.closed
    for call in run.calls() if run.steps else ():
        assert call.slots


@pytest.mark.parametrize("settings", [{}, {"in_process": True, "ring_bytes": 1 << 20}], ids=["process", "thread"])
def test_full_disk_is_told_and_training_goes_on(settings: dict[str, Any], tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import resource, sys, torch, tensorprobe, warnings
        from tests.conftest import recorders
        warnings.simplefilter("always")
        torch.set_num_threads(1)
        settings = eval(sys.argv[1])
        with tensorprobe.capture("run", **settings) as probe:
            limit = (1 << 20, resource.RLIM_INFINITY)
            for pid in recorders() or [0]:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)
            total = 0.0
            for number in range(40):
                total += torch.add(torch.arange(20_000.0), number).mean().item()
            probe.step()
            torch.sin(torch.ones(3))
        print(total, probe.coverage.recorded)
        """,
    )
    tests = str(Path(__file__).parents[2])
    done = run_python([script, repr(settings)], tmp_path, PYTHONPATH=f"{environment()['PYTHONPATH']}:{tests}")
    total, recorded = map(float, done.stdout.split())
    assert total == sum(torch.add(torch.arange(20_000.0), number).mean().item() for number in range(40))
    assert done.stderr.count("CaptureIncomplete") == 1
    assert "File too large" in done.stderr
    run = tensorprobe.open_run(tmp_path / "run")
    calls = list(run.calls(step=0))
    assert recorded == len(calls) + len(list(run.calls(step=1)))
    kept = [slot for call in calls for slot in call.slots if slot.has_data]
    assert 2 < len(kept) < 120
    for slot in kept:
        assert slot.summary is not None
        assert slot.tensor().max().item() == slot.summary.max
    assert all(slot.summary is not None for call in calls for slot in call.slots)
    assert (tmp_path / "run" / "step0" / "rank0" / "tensors.bin").stat().st_size <= 1 << 20
    after = the_call(run, "Torch.sin.0.forward", step=1)
    assert after.inputs[0].tensor().tolist() == [1, 1, 1]


def test_folder_that_vanishes_is_told_and_training_goes_on(tmp_path: Path) -> None:
    import shutil

    with (
        pytest.warns(CaptureIncomplete, match="was deleted during the run"),
        tensorprobe.capture(tmp_path / "run") as probe,
    ):
        shutil.rmtree(tmp_path / "run")
        (tmp_path / "run").write_text("in the way")
        result = torch.sin(torch.ones(2))
    assert torch.equal(result, torch.sin(torch.ones(2)))
    assert probe.coverage is not None
    assert probe.coverage.first_error is not None


@pytest.mark.parametrize("in_process", [False, True])
@pytest.mark.parametrize("file", ["calls.jsonl", "tensors.bin", "stacks.jsonl", "manifest.json"])
def test_file_of_an_earlier_step_that_vanishes_is_reported(file: str, in_process: bool, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with (
        pytest.warns(CaptureIncomplete, match=f"{file}: was deleted during the run"),
        tensorprobe.capture(run, in_process=in_process) as probe,
    ):
        torch.sin(torch.ones(2))
        probe.step()
        path = run / file if file == "manifest.json" else run / "step0" / "rank0" / file
        while b'"ended": 0' not in (run / "rank0.json").read_bytes():
            os.sched_yield()
        path.unlink()
    assert probe.coverage is not None
    assert (probe.coverage.failed, file == "calls.jsonl") in ((0, False), (2, True))


def test_capture_in_one_process_leaves_no_descriptor_open(tmp_path: Path) -> None:
    def descriptors() -> set[str]:
        return {fd for fd in os.listdir("/proc/self/fd") if int(fd) > 99}  # noqa: PTH208 - none is that of the listing

    before = descriptors()
    for number in range(3):
        with tensorprobe.capture(tmp_path / str(number), in_process=True) as probe:
            for _ in range(2):
                torch.sin(torch.ones(2))
                probe.step()
    assert descriptors() == before


@pytest.mark.parametrize("name", ["with spaces in it", "运行一", "quote'and\"more", "percent%20#hash", "-dash"])
def test_any_name_of_a_folder_will_do(name: str, tmp_path: Path) -> None:
    run = record(tmp_path / name / "run", lambda: torch.sin(torch.ones(2)))
    assert "Torch.sin.0.forward" in names(run)
    assert run.closed


@pytest.mark.parametrize("ring_bytes", [1 << 20, (1 << 20) + 4, (1 << 20) + 12345])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.bfloat16], ids=str)
def test_tensor_larger_than_the_ring_is_recorded_whole(ring_bytes: int, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(3_000_000 // dtype.itemsize, dtype=dtype)
    small = torch.arange(5.0)
    run = record(
        tmp_path / "run", lambda: (torch.sin(small), torch.neg(tensor), torch.cos(small)), ring_bytes=ring_bytes
    )
    large = the_call(run, "Torch.neg.0.forward")
    assert torch.equal(large.inputs[0].tensor(), tensor)
    assert torch.equal(large.outputs[0].tensor(), -tensor)
    assert large.inputs[0].summary is not None
    real = torch.view_as_real(tensor) if dtype.is_complex else tensor
    assert large.inputs[0].summary.max == real.max().item()
    assert large.inputs[0].summary.norm == pytest.approx(real.double().norm().item(), rel=1e-6)
    for name in ("Torch.sin.0.forward", "Torch.cos.0.forward"):
        assert torch.equal(the_call(run, name).inputs[0].tensor(), small)


def test_many_tensors_through_a_small_ring(tmp_path: Path) -> None:
    def action() -> None:
        for number in range(60):
            torch.add(torch.arange(30_000.0 + 17 * number), number)

    for in_process in (False, True):
        run = record(tmp_path / str(in_process), action, ring_bytes=1 << 20, in_process=in_process)
        adds = [call for call in run.calls() if call.op == "Torch.add"]
        assert len(adds) == 60
        for number, call in enumerate(adds):
            assert torch.equal(call.outputs[0].tensor(), torch.arange(30_000.0 + 17 * number) + number)


def test_recording_from_a_thread_gives_the_same_record(tmp_path: Path) -> None:
    def action() -> None:
        torch.manual_seed(0)
        hidden = torch.sin(torch.randn(5, 4, requires_grad=True)).t()
        (hidden @ hidden.t()).sum().backward()

    runs = [record(tmp_path / str(flag), action, in_process=flag) for flag in (False, True)]
    described = [
        [
            (call.name, [(s.name, s.dtype, s.shape, s.stride, s.digest, s.summary) for s in call.slots])
            for call in run.calls()
        ]
        for run in runs
    ]
    assert described[0] == described[1]


def test_process_that_may_start_no_other_records_from_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    run = record(tmp_path / "run", lambda: torch.sin(torch.ones(2)))
    assert "Torch.sin.0.forward" in names(run)
    assert run.closed


def test_limits_of_this_process_are_untouched() -> None:
    """The tests of the full disk work on processes of their own."""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_signal_to_the_whole_group_loses_no_call(name: str, tmp_path: Path) -> None:
    script = write_script(tmp_path, VICTIM)
    victim = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "run"), "one", "{}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment(),
        start_new_session=True,
    )
    assert victim.stdout is not None
    with victim.stdout:
        for line in victim.stdout:
            if int(line) == 300:
                break
        os.killpg(victim.pid, getattr(signal, name))
        rest = victim.stdout.read().split()
    victim.wait(TIME_LIMIT_S)
    completed = int(rest[-1]) if rest and rest[-1].isdigit() else 300
    run = tensorprobe.open_run(tmp_path / "run")
    assert len([call for call in run.calls() if call.op == "Torch.add"]) >= completed
