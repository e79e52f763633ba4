"""A planted fault: it is named where it first shows, kept on disk, can be run again, and everything about it adds up."""

from __future__ import annotations

import json
import logging
import math
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from safetensors.torch import load_file

import tensorprobe
from tensorprobe.errors import CaptureIncomplete, TrainingStopped
from tensorprobe.judge.policy import Policy, Rule
from tensorprobe.model.online import OnlineResult, OnlineRow
from tensorprobe.report.online_text import render_online
from tensorprobe.watches.online import findings
from tensorprobe.watches.online.watch import OnlineWatch
from tests.watches.online import faulty
from tests.watches.online.faulty import DOUBLE, NAME, make_model, train
from tests.watches.online.test_harmless import assert_accounted_for

STEPS = 2


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[None]:
    with faulty.installed():
        yield


def watch_training(steps: int = STEPS, **settings: Any) -> tuple[list[float], OnlineWatch]:
    model = make_model()
    settings = {"on_fail": "report", "libraries": (NAME,), **settings}
    with tensorprobe.online(model, **settings) as watch:
        losses = train(model, steps)
    return losses, watch


class Found(NamedTuple):
    losses: list[float]
    watch: OnlineWatch
    folder: Path
    lines: list[str]

    @property
    def result(self) -> OnlineResult:
        return self.watch.result


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Two steps of a training with the fault, with everything kept."""
    folder = tmp_path_factory.mktemp("online")
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("tensorprobe")
    log.addHandler(handler)
    try:
        losses, watch = watch_training(out=folder, on_fail="save")
    finally:
        log.removeHandler(handler)
    return Found(losses, watch, folder / "rank0", lines)


def test_training_goes_on_as_if_nobody_looked(found: Found) -> None:
    assert found.losses == train(make_model(), STEPS)


def test_the_fault_and_nothing_else_is_named_forward_and_backward(found: Found) -> None:
    calls = [(row.step, row.call) for row in found.result.failures]
    assert calls == [(step, f"{DOUBLE}.0.{way}") for step in range(STEPS) for way in ("forward", "backward")]
    assert found.result.failed == 2 * STEPS
    assert found.result.steps == [0, 1]
    assert [row.order for row in found.result.failures] == sorted(row.order for row in found.result.failures)


def test_a_row_says_where_and_how_much(found: Found) -> None:
    first, back, *_ = found.result.failures
    assert (first.slot, first.module, first.api) == ("output.0", "1", f"Ops.{NAME}.double.0.forward")
    assert "faulty.py" in first.stack[0] and first.stack[0].endswith("in forward")
    assert "faulty.py" in back.stack[0] and back.stack[0].endswith("in backward")
    assert any(line.endswith("in train") for line in first.stack)
    assert first.dtype == "float32" and first.shape == [4, 8] and first.reference == "float64"
    assert first.measured > first.allowed and first.result == "fail"
    assert first.relative_l2 == pytest.approx(0.01, rel=1e-3)
    assert first.op == DOUBLE


def test_every_call_is_accounted_for(found: Found) -> None:
    assert_accounted_for(found.result)
    assert found.result.ops[DOUBLE].failed == found.result.ops[DOUBLE].compared == 2 * STEPS
    assert found.result.broken == 0


def test_one_line_is_said_for_each_failure_at_once(found: Found) -> None:
    assert len(found.lines) == 2 * STEPS
    assert found.lines[0].startswith(f"Failed {DOUBLE}.0.forward output.0 (float32[4, 8]): ")
    assert "module 1" in found.lines[0] and "faulty.py:" in found.lines[0]


def test_the_report_has_the_answer_first_and_the_next_command_last(found: Found) -> None:
    lines = found.watch.report.splitlines()
    assert lines[0].startswith("FAILED: 4 of ") and "cpu-fp64, noise-aware" in lines[0]
    assert f"First: {DOUBLE}.0.forward output.0, step 0" in lines
    assert lines[-1] == f"Next: python {found.result.failures[0].saved}/replay.py"
    assert any(line.startswith(f"{found.result.seen:,} calls seen: ") for line in lines)


def test_the_report_counts_what_was_not_seen_more_than_once() -> None:
    unseen = {"what this torch cannot do": 1, "tracing": 2}
    result = OnlineResult(reference="cpu-fp64", policy="noise-aware", seen=1, compared=1, blind_spots=unseen)
    text = render_online(result).splitlines()
    assert text[-2:] == ["  not seen: what this torch cannot do", "  not seen: tracing (2 times)"]


def test_what_is_on_disk_is_the_result(found: Found) -> None:
    assert read(found.folder / "online.json", OnlineResult) == found.result
    assert read_rows(found.folder) == found.result.failures


def read(path: Path, kind: Any) -> Any:
    return msgspec.convert(json.loads(path.read_text()), kind, strict=False)


def read_rows(folder: Path) -> list[OnlineRow]:
    lines = (folder / "failures.jsonl").read_text().splitlines()
    return [msgspec.convert(json.loads(line), OnlineRow, strict=False) for line in lines]


def replay(saved: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    script = Path(saved) / "replay.py"
    monkeypatch.setattr(sys, "argv", [str(script)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 1
    return capsys.readouterr().out


def test_a_saved_call_runs_again_and_shows_the_error(
    found: Found, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = found.result.failures[0]
    saved = load_file(Path(row.saved) / "replay.safetensors")
    assert set(saved) == {"input.0", "device.output.0", "reference.output.0"}
    error = (saved["device.output.0"] - saved["reference.output.0"]).abs().max()
    assert error.item() == pytest.approx(row.max_abs)
    said = replay(row.saved, monkeypatch, capsys)
    assert len(re.findall(rf"max_abs +{re.escape(f'{row.max_abs:.4g}')}", said)) == 2  # then, and now


def test_a_failing_batch_norm_is_run_again_with_its_statistics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\nop = "*batch_norm*"\nslot = "output.0"\ndiverges = [{ max_abs = 0.0 }]\n')
    norm = torch.nn.BatchNorm1d(3)
    with tensorprobe.online(out=tmp_path / "out", policy=rules) as watch:
        norm(torch.randn(5, 3))
    (row,) = watch.failures
    said = replay(row.saved, monkeypatch, capsys)
    assert [line.split()[0] for line in said.splitlines() if line.startswith("output")] == [
        "output.0", "output.1", "output.2", "output.3", "output.4"
    ]  # fmt: skip
    assert f"max_abs {row.max_abs:.4g}" in said


def test_a_slice_is_saved_without_what_it_is_a_slice_of(tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text("[[rule]]\ndiverges = [{ max_abs = 0.0 }]\n")
    large, third = torch.full((1000, 1000), 3), torch.full((2, 2), 1 / 3)
    with tensorprobe.online(out=tmp_path / "out", policy=str(rules)) as watch:
        third * large[:2, :2] * third
    assert watch.failures
    assert all((Path(row.saved) / "replay.safetensors").stat().st_size < 100_000 for row in watch.failures)


def test_nonzero_values_in_place_of_zeros_fail_and_an_infinite_error_is_read_back(tmp_path: Path) -> None:
    with tensorprobe.online(out=tmp_path, libraries=NAME) as watch:
        torch.ops.tensorprobe_faulty.spoil(torch.zeros(3))
    (row,) = watch.failures
    assert not math.isfinite(row.relative_l2)
    assert read_rows(tmp_path / "rank0") == watch.failures
    assert read(tmp_path / "rank0" / "online.json", OnlineResult) == watch.result


def _without_place(row: OnlineRow) -> OnlineRow:
    return msgspec.structs.replace(row, saved="", stack=[])


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_find_the_same_rows(found: Found, workers: int) -> None:
    losses, watch = watch_training(workers=workers)
    assert losses == found.losses
    assert_accounted_for(watch.result)
    assert [_without_place(row) for row in watch.failures] == [_without_place(row) for row in found.result.failures]
    assert watch.failures[0].stack[:3] == found.result.failures[0].stack[:3]
    assert {op: count.compared for op, count in watch.result.ops.items()} == {
        op: count.compared for op, count in found.result.ops.items()
    }


def test_a_call_saved_by_a_worker_is_of_the_right_device(tmp_path: Path) -> None:
    _, watch = watch_training(1, workers=1, out=tmp_path, on_fail="save")
    script = (Path(watch.failures[0].saved) / "replay.py").read_text()
    assert "'device': 'cpu'" in script and "torch.ops.tensorprobe_faulty.double.default(" in script


def test_a_chain_tells_introduced_from_inherited() -> None:
    losses, watch = watch_training(1, chain=True)
    assert losses == train(make_model(), 1)
    first = watch.failures[0]
    assert first.inherited is not None and first.inherited < 1e-6
    assert first.accumulated == pytest.approx(0.01, rel=1e-2)
    assert watch.result.chained == watch.result.compared
    grown = {row.call: row for row in watch.result.diverged}
    assert f"{DOUBLE}.0.forward" in grown
    later = [row for row in watch.result.diverged if row.call not in (f"{DOUBLE}.0.forward", f"{DOUBLE}.0.backward")]
    assert all(row.result == "pass" for row in later)  # off, but not by their own doing
    assert "Compared with a chain computed on the CPU only" in watch.report


def test_the_chain_notices_numbers_that_were_changed_unseen() -> None:
    x = torch.ones(3)
    with tensorprobe.online(on_fail="report", chain=True) as watch:
        y = x * 2
        y.numpy()[:] = 7  # nobody can see this, and nobody is told
        y.add_(0)
        with tensorprobe_paused(watch):
            y.mul_(3)
        z = y * 1.0
    assert torch.equal(z, torch.full((3,), 21.0))
    assert watch.result.reseeded == 1 and watch.result.failed == 0


class tensorprobe_paused:
    """Between two steps that are watched, nothing is seen."""

    def __init__(self, watch: OnlineWatch) -> None:
        assert watch._probe is not None and watch._probe._session is not None
        self._session = watch._probe._session

    def __enter__(self) -> None:
        self._session.recording = False

    def __exit__(self, *_: object) -> None:
        self._session.recording = True


def test_healing_makes_the_training_right() -> None:
    losses, watch = watch_training(3, heal=True)
    right = train(make_model_without_fault(), 3)
    assert losses == pytest.approx(right, rel=1e-5)
    assert train(make_model(), 3) != pytest.approx(right, rel=1e-5)
    assert watch.result.healed == watch.result.failed == 6
    assert "6 results were replaced by the reference's (heal)" in watch.report


def make_model_without_fault() -> torch.nn.Module:
    model = make_model()

    class Twice(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    model[1] = Twice()
    return model


def test_healing_in_place_and_what_was_wrong_stays_on_disk(tmp_path: Path) -> None:
    x = torch.ones(4)
    with tensorprobe.online(out=tmp_path, libraries=NAME, heal=True, chain=True) as watch:
        torch.ops.tensorprobe_faulty.double_(x)
        x + 0
    assert torch.equal(x, torch.full((4,), 2.0))
    saved = load_file(Path(watch.failures[0].saved) / "replay.safetensors")
    assert torch.equal(saved["device.output.0"], torch.full((4,), 2.02))
    assert torch.equal(saved["input.0"], torch.ones(4))


@pytest.mark.parametrize("workers", [0, 1])
def test_training_can_be_stopped_after_so_many_failures(workers: int) -> None:
    model = make_model()
    watch = tensorprobe.online(model, on_fail="report", libraries=NAME, stop_after=2, workers=workers)
    with pytest.raises(TrainingStopped, match=f"stopped after 2 failing calls.*{DOUBLE}.0.forward") as stopped, watch:
        try:
            for _ in range(100):  # a worker may be behind
                train(model, 1)
        finally:
            kept = [parameter.clone() for parameter in model.parameters()]  # who is stopped may save his state
    assert len(kept) == 4 and isinstance(stopped.value, tensorprobe.TensorprobeError)
    assert watch.result.stopped and watch.result.failed >= 2
    assert "training was stopped (stop_after)" in watch.report
    assert_accounted_for(watch.result)


def test_an_op_without_a_wider_kernel_is_not_compared_with_itself() -> None:
    with tensorprobe.online(on_fail="report", libraries=NAME) as watch:
        torch.ops.tensorprobe_faulty.refuse(torch.ones(3))
    assert f"Aten.{NAME}.refuse.default" not in watch.result.ops
    (reason,) = [reason for reason in watch.result.skipped if "wider dtype" in reason]
    assert "only float32" in reason
    assert_accounted_for(watch.result)


@pytest.mark.parametrize("mask", [torch.finfo(torch.float32).min, -1e9])
def test_a_mask_hides_no_error_of_the_other_elements_and_is_none_itself(mask: float) -> None:
    scores = torch.linspace(-2, 2, 256).reshape(4, 8, 8)
    masked = torch.zeros(8, 8).masked_fill(torch.ones(8, 8).triu(1) > 0, mask)
    with tensorprobe.online(None, on_fail="report", libraries=(NAME,)) as watch:
        (scores + masked).softmax(-1)
        torch.ops.tensorprobe_faulty.shade(scores, masked)
    (row,) = watch.result.failures
    assert row.call == f"Aten.{NAME}.shade.default.0.forward"
    assert row.relative_l2 == pytest.approx(0.01, rel=1e-3)


def test_an_op_of_a_library_is_left_alone_unless_it_is_named() -> None:
    with tensorprobe.online(on_fail="report") as watch:
        torch.ops.tensorprobe_faulty.double(torch.ones(3))
    (reason,) = [reason for reason in watch.result.skipped if "library" in reason]
    assert NAME in reason and watch.result.failed == 0


def test_a_full_disk_costs_no_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(findings, "save", full)
    with pytest.warns(CaptureIncomplete, match="No space left on device"):
        losses, watch = watch_training(1, out=tmp_path, on_fail="save")
    assert [row.saved for row in watch.failures] == ["", ""]
    assert watch.result.failed == 2 and watch.result.broken == 0
    assert losses == train(make_model(), 1)


def test_only_so_many_calls_are_saved(tmp_path: Path) -> None:
    _, watch = watch_training(1, out=tmp_path, on_fail="save", most_saved=1)
    assert [bool(row.saved) for row in watch.failures] == [True, False]


def test_a_recomputed_call_has_a_folder_of_its_own(tmp_path: Path) -> None:
    from torch.utils.checkpoint import checkpoint

    x = torch.ones(3, requires_grad=True)
    with tensorprobe.online(out=tmp_path, libraries=NAME) as watch:
        checkpoint(faulty.Doubled(), x, use_reentrant=True).sum().backward()
    assert len({row.saved for row in watch.failures}) == len(watch.failures) == 3


def test_the_backward_of_an_earlier_step_has_no_line_that_is_not_its_own() -> None:
    """Stacks are numbered within a step: the number of a call of an earlier one would be that of another line now."""
    everything = Policy(name="all", rules=[Rule(op="*tanh_backward*", diverges=[{"max_abs": 0.0}]), Rule(ignore=True)])
    x = torch.linspace(0.1, 0.7, 5, requires_grad=True)
    with tensorprobe.online(on_fail="report", policy=everything) as watch:
        y = x.tanh()
        watch.step()
        torch.ones(2) + 1  # the first stack of the next step
        y.square().sum().backward()
    (backward,) = watch.failures
    assert (backward.step, backward.api, backward.stack) == (1, "Tensor.tanh.0.backward", [])
