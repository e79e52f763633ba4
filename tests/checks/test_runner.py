"""Checks from end to end: in this process, in one process and in several; calls that die, hang, and a parent that is killed."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import tensorprobe
from tensorprobe.checks import PrecheckResult, precheck
from tensorprobe.errors import RunDamaged, SettingsError
from tensorprobe.model.precheck import Precheck
from tensorprobe.replay.script import Script
from tensorprobe.standard_json import decode
from tensorprobe.work import pool as pool_of_processes
from tests.builders.runs import call, write
from tests.checks.deadly_ops import deadly, harmless, set_environment

pytestmark = pytest.mark.usefixtures("warm_processes")
FILES = [
    *("accuracy_checking_details.csv", "accuracy_checking_result.csv", "checks.jsonl"),
    *("evidence.json", "report.html", "summary.json"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of something with linear, gelu, softmax, dropout, in-place and a gradient, recorded."""
    folder = tmp_path_factory.mktemp("recorded") / "run"
    torch.manual_seed(0)
    weight = torch.randn(8, 8, requires_grad=True)
    with tensorprobe.capture(folder, level="api") as probe:
        for _ in range(2):
            x = torch.randn(4, 8)
            for _ in range(3):
                x = F.gelu(F.linear(x, weight))
            x = F.dropout(F.softmax(x, -1), 0.5)
            x.mul(2).add_(1).sum().backward()
            torch.empty(3)
            probe.step()
    return folder


def verdicts(result: PrecheckResult) -> dict[str, tuple[str, str]]:
    return {check.call: (check.forward, check.backward) for check in result.checks}


def files_of(folder: Path) -> dict[str, Any]:
    """The content of an output folder, without times and without the order in which checks were finished."""
    tables = {name: (folder / name).read_bytes() for name in FILES[:2]}
    summary = decode((folder / "summary.json").read_bytes(), Precheck, what="a precheck")
    checks = [msgspec.structs.replace(check, elapsed_s=0.0) for check in summary.checks]
    lines = [json.loads(line) for line in (folder / "checks.jsonl").read_text().splitlines()]
    for line in lines[1:]:
        line["check"]["elapsed_s"] = 0.0
    journal = sorted(json.dumps(line, sort_keys=True) for line in lines)
    return {
        **tables,
        "summary": msgspec.structs.replace(summary, checks=checks, elapsed_s=0.0, output=""),
        "journal": journal,
    }


def test_a_sound_run_passes_here_and_in_processes_with_the_same_bytes(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = [precheck(run, out=tmp_path / f"jobs{jobs}", jobs=jobs) for jobs in (0, 2)]
    monkeypatch.undo()
    precheck(run, out=tmp_path / "jobs1", jobs=1)
    found = verdicts(results[0])
    assert found["Functional.linear.0.forward"] == found["Functional.softmax.0.forward"] == ("pass", "pass")
    assert found["Functional.dropout.0.forward"][0] == found["Tensor.add_.0.forward"][0] == "pass"
    summary = results[0].summary
    assert (summary.exit_code, summary.failed, summary.distinct < summary.calls) == (0, 0, True)
    assert summary.passed + summary.failed + summary.skipped == summary.calls
    assert summary.calls == sum(1 + len(check.equal) for check in summary.checks)
    assert summary.reasons == {"empty returns memory that is not initialised": 1}
    for jobs in (0, 1, 2):
        assert sorted(path.name for path in (tmp_path / f"jobs{jobs}").iterdir()) == FILES
        assert files_of(tmp_path / f"jobs{jobs}") == files_of(tmp_path / "jobs0")


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_the_room_can_be_called_and_leaves_no_trace(run: Path, two_threads: None) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    done: list[tuple[int, int]] = []
    result = tensorprobe.precheck(
        tensorprobe.open_run(run), jobs=0, calls="Functional.*", progress=lambda *at: done.append(at)
    )
    assert result.passed and result.failures == []
    assert done == [(at + 1, len(result.checks)) for at in range(len(result.checks))]
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == 2


def test_real_data_are_used(run: Path) -> None:
    result = precheck(run, data="real", jobs=0, calls="Functional.linear")
    assert verdicts(result) == {f"Functional.linear.{number}.forward": ("pass", "pass") for number in range(3)}


def test_without_backward_no_gradient_is_checked(run: Path) -> None:
    result = precheck(run, jobs=0, calls="Functional.linear", backward=False)
    assert [(check.backward, {one.direction for one in check.details}) for check in result.checks] == [
        ("skip", {"forward"}), ("skip", {"forward"}),
    ]  # fmt: skip


@pytest.fixture
def deadly_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of harmless calls with deadly ones between them."""
    set_environment(monkeypatch).close()
    calls = [harmless(0, 4), deadly("crash"), harmless(1, 5), deadly("leave"), harmless(2, 6), harmless(3, 7)]
    return write(tmp_path / "run", calls)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_call_that_kills_its_process_fails_and_the_others_are_checked(jobs: int, deadly_run: Path) -> None:
    result = precheck(deadly_run, jobs=jobs)
    assert verdicts(result) == {
        "Torch.exp.0.forward": ("pass", "skip"),
        "Ops.deadly.crash.0.forward": ("fail", "skip"),
        "Torch.exp.1.forward": ("pass", "skip"),
        "Ops.deadly.leave.0.forward": ("fail", "skip"),
        "Torch.exp.2.forward": ("pass", "skip"),
        "Torch.exp.3.forward": ("pass", "skip"),
    }
    assert [check.message for check in result.failures] == [
        "the process was killed by signal 11 (SIGSEGV)",
        "the process ended with exit code 7: nothing to be done",
    ]
    assert (result.exit_code, result.summary.failed) == (1, 2)


def test_a_call_that_hangs_fails_after_the_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with set_environment(monkeypatch) as told:
        result = precheck(write(tmp_path / "run", [deadly("hang"), harmless(0)]), time_limit_s=5)
        pid = told.recv(100).decode()
    assert verdicts(result)["Torch.exp.0.forward"] == ("pass", "skip")
    (failure,) = result.failures
    assert failure.message == "the process did not end within 5 s"
    assert_gone(pid)


def assert_gone(pids: str) -> None:
    """Every process of the list has ended, or does so within 30 seconds."""
    for pid in pids.split():
        try:
            descriptor = os.pidfd_open(int(pid))
        except ProcessLookupError:
            continue
        try:
            assert select.select([descriptor], [], [], 30)[0], f"process {pid} is still there"
        finally:
            os.close(descriptor)


KILLED = """
import os, signal, tensorprobe
def progress(done, total):
    if done == {after}:
        os.kill(os.getpid(), signal.SIGKILL)
tensorprobe.precheck({run!r}, out={out!r}, progress=progress)
"""


def test_a_precheck_that_was_killed_is_continued(run: Path, tmp_path: Path) -> None:
    out, whole = tmp_path / "out", tmp_path / "whole"
    code = KILLED.format(after=4, run=str(run), out=str(out))
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    before = (out / "checks.jsonl").read_bytes()
    assert before.count(b"\n") == 5 and [path.name for path in out.iterdir()] == ["checks.jsonl"]
    (out / "checks.jsonl").write_bytes(before + before.splitlines(keepends=True)[1][:40])
    done: list[int] = []
    result = precheck(run, out=out, resume=True, progress=lambda at, of: done.append(at))
    assert done == list(range(5, len(result.checks) + 1))
    assert (out / "checks.jsonl").read_bytes().startswith(before)
    precheck(run, out=whole)
    assert files_of(out) == files_of(whole)


def test_a_finished_precheck_is_continued_without_a_process(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    precheck(run, out=tmp_path / "out", jobs=0)
    expected = files_of(tmp_path / "out")
    monkeypatch.setattr(pool_of_processes, "_Worker", None)
    assert precheck(run, out=tmp_path / "out", resume=True, jobs=2).passed
    assert files_of(tmp_path / "out") == expected


def test_a_process_at_a_call_that_hangs_dies_with_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write(tmp_path / "run", [harmless(0), deadly("hang")])
    code = f"""
import os, signal, threading, tensorprobe
threading.Thread(target=lambda: (os.read(0, 1), os.kill(os.getpid(), signal.SIGKILL)), daemon=True).start()
tensorprobe.precheck({str(run)!r})
"""
    with (
        set_environment(monkeypatch) as told,
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as parent,
    ):
        assert select.select([told], [], [], 60)[0], "the call that hangs has not begun"
        pid = told.recv(100).decode()
        assert Path("/proc", pid).exists()
        parent.communicate(b"x")
    assert parent.returncode == -signal.SIGKILL
    assert_gone(pid)


def remember_processes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every process that is started from here on."""
    started: list[Any] = []
    real = pool_of_processes.subprocess.Popen

    def remembered(*arguments: Any, **settings: Any) -> Any:
        started.append(real(*arguments, **settings))
        return started[-1]

    monkeypatch.setattr(pool_of_processes.subprocess, "Popen", remembered)
    return started


def test_an_interrupt_leaves_no_process_and_can_be_continued(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = remember_processes(monkeypatch)

    def interrupt(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        precheck(run, out=tmp_path / "out", progress=interrupt)
    assert [process.returncode is not None for process in started] == [True]
    assert len((tmp_path / "out" / "checks.jsonl").read_text().splitlines()) == 3
    monkeypatch.undo()
    assert precheck(run, out=tmp_path / "out", resume=True, jobs=0).passed


def test_another_precheck_is_not_continued(run: Path, tmp_path: Path) -> None:
    out, few = tmp_path / "out", "Functional.linear"
    precheck(run, out=out, jobs=0, calls=few)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    for settings, message in (
        ({"standard": "seed"}, "standard was 'noise-aware', not 'seed'"),
        ({"backward": False, "dedupe": False}, "dedupe was True, not False; backward was True, not False"),
        ({"calls": "Functional.gelu"}, r"calls was \['Functional.linear'\], not \['Functional.gelu'\]"),
    ):
        with pytest.raises(SettingsError, match=f"holds a precheck that is another: {message}"):
            precheck(run, out=out, jobs=0, resume=True, **{"calls": few, **settings})
    other = write(tmp_path / "other", [harmless(0)])
    with pytest.raises(SettingsError, match=r"it is of the run .*run, not .*other"):
        precheck(other, out=out, jobs=0, resume=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_run_that_was_recorded_again_is_another(tmp_path: Path) -> None:
    precheck(write(tmp_path / "run", [harmless(0)]), out=tmp_path / "out", jobs=0)
    with pytest.raises(SettingsError, match="the run is not the one that it was"):
        precheck(write(tmp_path / "run", [harmless(0), harmless(1, 9)]), out=tmp_path / "out", jobs=0, resume=True)


def test_a_damaged_journal_is_told(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [harmless(0), harmless(1, 5)])
    precheck(run, out=tmp_path / "out", jobs=0)
    journal = tmp_path / "out" / "checks.jsonl"
    lines = journal.read_text().splitlines()
    journal.write_text("\n".join([lines[0], "{}", lines[2], ""]))
    with pytest.raises(RunDamaged, match=r"line 2 of .*checks.jsonl' cannot be read"):
        precheck(run, out=tmp_path / "out", jobs=0, resume=True)


def test_folders_of_others_are_not_touched(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [harmless(0)])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "summary.json").write_text("precious")
    with pytest.raises(SettingsError, match=r"holds files that are not of a precheck: summary\.json"):
        precheck(run, out=tmp_path / "mine", jobs=0)
    assert (tmp_path / "mine" / "summary.json").read_text() == "precious"
    with pytest.raises(SettingsError, match="holds files that are not of a precheck"):
        precheck(run, out=run, jobs=0)
    with pytest.raises(SettingsError, match="cannot be used as an output folder"):
        precheck(run, out=tmp_path / "mine" / "summary.json", jobs=0)
    with pytest.raises(SettingsError, match=r"holds no precheck that could be continued"):
        precheck(run, out=tmp_path / "mine", jobs=0, resume=True)


def test_an_earlier_precheck_is_replaced_only_when_the_new_one_has_begun(tmp_path: Path) -> None:
    out = tmp_path / "out"
    precheck(write(tmp_path / "a", [harmless(0)]), out=out, jobs=0)
    (out / "failures").mkdir()
    before = {path.name for path in out.iterdir()}
    other = write(tmp_path / "b", [harmless(0, 9)])
    for wrong in ({"device": "nowhere"}, {"standard": "sede"}):
        with pytest.raises(SettingsError):
            precheck(other, out=out, jobs=0, **wrong)
        assert {path.name for path in out.iterdir()} == before
        with pytest.raises(SettingsError):
            precheck(other, out=tmp_path / "new", jobs=0, **wrong)
        assert not (tmp_path / "new").exists()
    precheck(other, out=out, jobs=0)
    assert decode((out / "summary.json").read_bytes(), Precheck, what="a precheck").run == str(tmp_path / "b")
    assert sorted(path.name for path in out.iterdir()) == FILES


def test_two_at_once_do_not_write_into_one_folder(tmp_path: Path) -> None:
    run, out = write(tmp_path / "run", [harmless(0), harmless(1, 5)]), tmp_path / "out"
    refused = []

    def again(done: int, total: int) -> None:
        with pytest.raises(SettingsError, match="another precheck is writing") as caught:
            precheck(run, out=out, jobs=0)
        refused.append(caught.value)

    assert precheck(run, out=out, jobs=0, progress=again).passed
    assert len(refused) == 2


def test_a_device_or_standard_that_is_not_there_is_told_by_a_process(run: Path, tmp_path: Path) -> None:
    with pytest.raises(
        SettingsError, match=r"torch has no device 'nowhere' here(.|\n)*sim --name nowhere -- "
    ) as raised:
        precheck(run, device="nowhere", out=tmp_path / "out")
    assert "jobs" not in str(raised.value)  # this process does not know the device either
    assert not (tmp_path / "out").exists()
    with pytest.raises(SettingsError, match="Did you mean 'seed'"):
        precheck(run, standard="sede")


def test_the_device_is_by_default_the_one_the_run_was_recorded_on(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [harmless(0)])
    assert precheck(run, jobs=0).summary.device == "cpu"
    (calls,) = run.rglob("calls.jsonl")
    calls.write_text(calls.read_text().replace('"name": "input.0"', '"name": "input.0", "device": "nowhere:1"'))
    with pytest.raises(SettingsError, match=r"no device 'nowhere' here(.|\n)*The run was recorded on it.*--device cpu"):
        precheck(run, jobs=0, out=tmp_path / "out")
    with pytest.raises(SettingsError) as named:
        precheck(run, jobs=0, device="nowhere")
    assert "recorded on" not in str(named.value)
    assert precheck(run, jobs=0, device="cpu").summary.device == "cpu"


def test_a_process_that_cannot_begin_is_an_error_with_its_last_words(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_of_processes, "_PROGRAM", "import sys; sys.exit('no licence, {descriptor}')")
    with pytest.raises(
        SettingsError,
        match=r"no process could begin on device 'cpu': it ended with exit code 1.\n  no licence",
    ):
        precheck(run)


def test_files_need_a_folder(run: Path) -> None:
    with pytest.raises(SettingsError, match="save_failures writes files: pass out"):
        precheck(run, save_failures=True)
    with pytest.raises(SettingsError, match="continues in the folder of a precheck: pass out"):
        precheck(run, resume=True)


def test_a_bug_of_ours_skips_the_call_and_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorprobe.checks import check as checker

    real = checker.check_call

    def broken(call: Any, *rest: Any) -> Any:
        return real(call, *rest) if call.number else 1 / 0

    monkeypatch.setattr(checker, "check_call", broken)
    result = precheck(write(tmp_path / "run", [harmless(0), harmless(1, 5)]), jobs=0)
    assert verdicts(result) == {"Torch.exp.0.forward": ("skip", "skip"), "Torch.exp.1.forward": ("pass", "skip")}
    assert result.summary.reasons == {"the check itself failed with ZeroDivisionError: division by zero": 1}
    assert "1 check in which tensorprobe itself failed" in result.summary.notes[0]
    assert "ZeroDivisionError" in result.summary.notes[0]


def test_a_device_that_broke_fails_the_call_and_ends_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorprobe.checks import check as checker

    monkeypatch.setattr(checker.Checker, "_device_answers", lambda self: False)
    monkeypatch.setattr(checker, "check_call", lambda *rest: 1 / 0)
    result = precheck(write(tmp_path / "run", [harmless(0)]), jobs=0)
    assert result.checks[0].forward == "fail"
    assert result.checks[0].message == "it broke cpu: ZeroDivisionError: division by zero"


def test_a_run_without_calls_cannot_be_checked(tmp_path: Path) -> None:
    result = precheck(write(tmp_path / "run", []), jobs=1)
    assert (result.exit_code, result.summary.calls) == (2, 0)
    assert not result.passed


def test_a_call_without_its_arguments_is_skipped_with_the_reason(tmp_path: Path) -> None:
    """Dumps of ptdbg_ascend hold the tensors alone."""
    bare = {key: value for key, value in harmless(0).items() if key != "args"}
    result = precheck(write(tmp_path / "run", [bare]), jobs=0)
    assert result.summary.reasons == {"its arguments were not recorded, only its tensors": 1}
    assert result.exit_code == 2


def test_importing_the_room_imports_no_torch() -> None:
    code = "import sys, tensorprobe.checks; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def inexact(number: int) -> dict[str, Any]:
    """A call that fails when every bit counts."""
    return harmless(number, 1000 + number)


def saving(monkeypatch: pytest.MonkeyPatch, save: Any) -> None:
    module = ModuleType("tensorprobe.replay.failures")
    module.failure_script = save  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


def test_failing_calls_are_saved_and_their_scripts_are_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[Any] = []

    def save(call: Any, backward: Any, conditions: Any, check: Any, imports: Any) -> Script:
        saved.append((call.name, backward, conditions.standard, check.forward, imports))
        return Script("pass", b"tensors")

    saving(monkeypatch, save)
    run, out = write(tmp_path / "run", [inexact(0), deadly("crash")]), tmp_path / "out"
    settings: dict[str, Any] = {"standard": "binary", "jobs": 0, "save_failures": True, "out": out}
    result = precheck(run, **settings)
    assert saved == [("Torch.exp.0.forward", None, "binary", "fail", ())]
    script = out / "failures" / "Torch.exp.0.forward.py"
    assert result.replays == {"Torch.exp.0.forward": str(script)}
    assert script.read_text() == "pass" and script.with_suffix(".safetensors").read_bytes() == b"tensors"
    assert precheck(run, resume=True, **settings).replays == result.replays
    assert len(saved) == 1


@pytest.mark.parametrize("jobs", [0, 1])
def test_a_failure_that_cannot_be_written_is_still_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    def full(*_: Any, **__: Any) -> Path:
        raise OSError("no space left on device")

    monkeypatch.setattr(Script, "write", full)
    run = write(tmp_path / "run", [inexact(0)])
    result = precheck(run, standard="binary", jobs=jobs, save_failures=True, out=tmp_path / "out")
    assert (result.exit_code, result.replays) == (1, {})
    assert "Torch.exp.0.forward could not be saved: no space left on device" in result.summary.notes[0]


def test_a_call_that_needs_too_much_memory_is_skipped_with_the_reason(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [harmless(0), inexact(1)])
    result = precheck(run, jobs=0, max_replay_bytes=64)
    assert result.exit_code == 2
    assert all("more than max_replay_bytes (64 bytes)" in reason for reason in result.summary.reasons)


def test_an_op_that_allocates_beyond_the_limit_is_skipped_and_the_rest_goes_on(tmp_path: Path) -> None:
    """The tensors of the record are small; what the op makes of its arguments is not."""
    args = [[60_000, 60_000]]
    huge = call("Torch.zeros.0.forward", outputs=[np.zeros(2, "float32")], args=args)
    result = precheck(write(tmp_path / "run", [huge, harmless(1)]), max_replay_bytes="1G")
    found = verdicts(result)
    assert found["Torch.zeros.0.forward"] == ("skip", "skip") and found["Torch.exp.1.forward"][0] == "pass"
    assert "its arguments ask for results of 3,600,000,000 elements" in next(iter(result.summary.reasons))


def test_a_process_whose_device_does_not_answer_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deaf = "from tensorprobe.checks import check; check.Checker._device_answers = lambda self: False; "
    program = pool_of_processes._PROGRAM.replace("from tensorprobe", deaf + "from tensorprobe")
    monkeypatch.setattr(pool_of_processes, "_PROGRAM", program)
    started = remember_processes(monkeypatch)
    result = precheck(write(tmp_path / "run", [inexact(0), inexact(1), harmless(2, 1)]), standard="binary")
    assert verdicts(result) == {
        "Torch.exp.0.forward": ("fail", "skip"),
        "Torch.exp.1.forward": ("fail", "skip"),
        "Torch.exp.2.forward": ("pass", "skip"),
    }
    assert [check.message[:26] for check in result.failures] == ["forward output.0: bit_iden"] * 2
    assert [process.returncode is not None for process in started] == [True] * 3
