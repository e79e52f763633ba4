"""Compare answers with proof: replays in float64 decide which side is wrong, what is noise, and what inference hides."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest
import torch
import torch.nn.functional as F

import tensorprobe
from tensorprobe import engine
from tensorprobe.engine import proof
from tensorprobe.engine.tracing import CallFinder
from tensorprobe.model.comparison import Divergence
from tensorprobe.model.level import Level
from tensorprobe.work.pool import Job, resolve
from tests.checks.test_audit import Wrong, record, scaled

NORM = "native_layer_norm.default"


@pytest.fixture(autouse=True)
def replay_here(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Replay in this process: what a process of its own changes is tested once."""
    if "process" in request.keywords:
        return

    def run_here(job: Job, parcels: list[bytes], *, take: Callable[[int, bytes], None], **_: Any) -> None:
        with resolve(job.target)(job.start, None) as answer:  # type: ignore[arg-type]
            for number, parcel in enumerate(parcels):
                take(number, answer(parcel).content)  # type: ignore[operator]

    monkeypatch.setattr(proof, "run_in_processes", run_here)


def compare(one: Path, other: Path, **settings: Any) -> tensorprobe.Result:
    return tensorprobe.compare(one, other, **settings)


class OtherSums(Wrong):
    """A right device whose products are computed in float64 and rounded once."""

    def __init__(self, op: str = "", spoil: Any = None) -> None:
        super().__init__(op, spoil)

    def compute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if str(func) in ("aten.addmm.default", "aten.mm.default"):
            return func(*(each.double() for each in args)).to(args[0].dtype)
        return super().compute(func, args, kwargs)


@pytest.mark.process
def test_the_answer_says_how_far_each_side_is_off(tmp_path: Path) -> None:
    right, wrong = record(tmp_path / "a"), record(tmp_path / "b", Wrong("_softmax.default", scaled))
    found = compare(right, wrong)
    assert found.divergence is not None and found.divergence.call == "Functional.softmax.0.forward"
    assert "introduced here: the candidate is off by 1.0e-03, the baseline by" in str(found)
    swapped = compare(wrong, right)
    assert "the baseline is off by 1.0e-03, the candidate by" in str(swapped)
    assert "; the baseline is the wrong one" in str(swapped)
    assert compare(right, wrong, jobs=2).summary.divergence == found.summary.divergence


def test_a_fault_behind_other_roundings_is_found_by_proof_only(tmp_path: Path) -> None:
    right = record(tmp_path / "a")
    wrong = record(tmp_path / "b", OtherSums(NORM, lambda t: (t[0] * (1 + 3e-6), *t[1:])))
    inferred, proved = compare(right, wrong, prove="off"), compare(right, wrong)
    assert inferred.divergence is None or inferred.divergence.call != "Functional.layer_norm.0.forward"
    assert proved.divergence is not None
    assert (proved.divergence.call, proved.divergence.status) == ("Functional.layer_norm.0.forward", "introduced")
    row = proved.divergence.row
    assert row is not None and row.verdict == "diverges"
    assert not row.judged_by or row.measured > row.allowed


def test_a_kernel_of_the_backward_pass_is_replayed_by_itself(tmp_path: Path) -> None:
    """At level aten it has no forward that it would be replayed with."""
    runs = [tensorprobe.open_run(record(tmp_path / name, level="aten")) for name in "ab"]
    name = "Aten.gelu_backward.default.0.backward"
    at = next(at for at, each in enumerate(runs[0].calls()) if each.name == name)
    here = Divergence(
        step=0, rank=0, index=at, call=name, candidate_call=name, level=Level.ATEN, direction="backward", module="",
        status="introduced", inputs="identical", input_error=0.0,
    )  # fmt: skip
    finders = tuple(CallFinder(run, 0, 0) for run in runs)
    proved, _ = proof.replay_divergence(finders, here)  # type: ignore[arg-type]
    assert proved is not None and proved.slot == "output.0" and not proved.at_fault


def test_other_roundings_are_no_fault(tmp_path: Path) -> None:
    right, other = record(tmp_path / "a"), record(tmp_path / "b", OtherSums())
    found = compare(right, other)
    assert found.exit_code == 0 and found.summary.proving.replayed > 0


def test_an_alarm_where_both_sides_are_right_is_withdrawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorprobe.judge import severity, walk

    right, other = record(tmp_path / "a"), record(tmp_path / "b", OtherSums())

    def doubt_the_first(rows: Any, errors: Any, *rest: Any) -> Any:
        rated = severity.rate_rows(rows, errors, *rest)
        rated.level[(rows.made & ~errors.equal).argmax()] = severity.UNEXPLAINED
        return rated

    monkeypatch.setattr(walk, "rate_rows", doubt_the_first)
    inferred, proved = compare(right, other, prove="off"), compare(right, other)
    assert inferred.exit_code == 1
    assert proved.exit_code == 0 and proved.summary.proving.withdrawn > 0
    assert "within rounding of float64 on both sides: noise, not a fault" in str(proved)


def test_other_arguments_are_not_withdrawn(tmp_path: Path) -> None:
    x = torch.randn(8, 8)
    for name, eps in (("a", 1e-5), ("b", 1e-2)):
        with tensorprobe.capture(tmp_path / name, level="api", in_process=True):
            F.layer_norm(x, (8,), eps=eps)
    assert compare(tmp_path / "a", tmp_path / "b").exit_code == 1


def test_other_random_numbers_are_not_withdrawn(tmp_path: Path) -> None:
    x = torch.randn(64, 64)
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        with tensorprobe.capture(tmp_path / name, level="api", in_process=True):
            F.dropout(x, 0.5)
    found = compare(tmp_path / "a", tmp_path / "b")
    assert found.exit_code == 1 and found.summary.proving.withdrawn == 0
    assert found.divergence is not None and found.divergence.random


def test_the_budget_counts_calls_and_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, other = record(tmp_path / "a"), record(tmp_path / "b", OtherSums())
    monkeypatch.setattr(proof, "AUTO_CALLS", 2)
    found = compare(right, other)
    assert found.summary.proving.unreached > 0 and "--prove all recomputes every one" in str(found)
    assert compare(right, other, prove="all").summary.proving.unreached == 0


@pytest.mark.parametrize("policy", ["bitwise", "seed-2023"])
def test_proof_decides_under_noise_aware_only(tmp_path: Path, policy: str) -> None:
    right, other = record(tmp_path / "a"), record(tmp_path / "b", OtherSums())
    off, auto = (compare(right, other, policy=policy, prove=prove).summary for prove in ("off", "auto"))
    assert off.statuses == auto.statuses and not auto.proving.replayed
    if off.divergence is not None and auto.divergence is not None:
        assert msgspec.structs.replace(auto.divergence, proof=None) == off.divergence
    assert (off.divergence is None) == (auto.divergence is None)


def test_under_another_policy_proof_is_shown_and_changes_nothing(tmp_path: Path) -> None:
    right, wrong = record(tmp_path / "a"), record(tmp_path / "b", Wrong("_softmax.default", scaled))
    assert "the candidate is off by 1.0e-03, the baseline by" in str(compare(right, wrong, policy="bitwise"))
    other = compare(right, record(tmp_path / "c", OtherSums()), policy="bitwise")
    assert other.exit_code == 1 and "(float64 replay); both are within rounding" in str(other)


@pytest.mark.parametrize(
    ("op", "spoil", "call"),
    [
        ("_softmax.default", scaled, "Functional.softmax.0.forward"),
        ("gelu_backward.default", scaled, "Functional.gelu.1.backward"),
    ],
)
def test_a_divergence_comes_with_a_script_of_the_wrong_side(tmp_path: Path, op: str, spoil: Any, call: str) -> None:
    right, wrong = record(tmp_path / "a"), record(tmp_path / "b", Wrong(op, spoil))
    out = tmp_path / "result"
    found = compare(wrong, right, out=out)
    assert found.divergence is not None and found.divergence.call == call
    assert found.summary.replay == "replay.py" and f"Run it alone: python {out}/replay.py" in str(found)
    done = subprocess.run([sys.executable, out / "replay.py"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr  # this CPU is right
    assert "when it was recorded: max_abs" in done.stdout
    compare(right, right, out=out)
    assert not (out / "replay.py").exists() and not (out / "replay.safetensors").exists()


def test_shards_write_the_same_script(tmp_path: Path) -> None:
    right, wrong = record(tmp_path / "a"), record(tmp_path / "b", Wrong("_softmax.default", scaled))
    compare(right, wrong, out=tmp_path / "whole")
    engine.compare_shard(right, wrong, shard="1/1", out=tmp_path / "parts")
    engine.merge_shards(tmp_path / "parts")
    for name in ("replay.py", "replay.safetensors"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_with_statistics_only_the_answer_is_unproved_and_says_what_to_record(tmp_path: Path) -> None:
    right, wrong = record(tmp_path / "a"), record(tmp_path / "b", Wrong("_softmax.default", scaled), mode="summary")
    found = str(compare(right, wrong))
    assert "introduced here (unproved: only statistics were recorded)" in found
    assert "tensorprobe capture -o DIR --steps 0 --call Functional.softmax.0 -- COMMAND" in found
    assert "First difference in any bit" not in found  # equal tensors with statistics of two ways to compute them


def test_random_numbers_have_no_script(tmp_path: Path) -> None:
    x = torch.randn(64, 64)
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        with tensorprobe.capture(tmp_path / name, level="api", in_process=True):
            F.dropout(x, 0.5)
    found = compare(tmp_path / "a", tmp_path / "b", out=tmp_path / "result")
    assert "it draws random numbers, from another random stream, by its law on both sides" in str(found)
    assert "no replay.py: the recorded results are right for their inputs" in str(found)


def _accumulate(folder: Path, *, other: bool, factor: float = 1.0) -> Path:
    """Two backward passes of one layer before each update: no recorded call makes the sum of the gradients."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(24, 24)
    optimizer, xs = torch.optim.Adam(layer.parameters(), lr=1e-3), torch.randn(2, 30, 24)
    with tensorprobe.capture(folder, model=layer, level="api", in_process=True) as probe:
        for step in range(2):
            optimizer.zero_grad()
            with OtherSums() if other and step else contextlib.nullcontext():
                for x in xs:
                    F.gelu(layer(x)).square().mean().backward()
            if factor != 1.0 and step:
                for each in layer.parameters():
                    numpy.multiply(each.grad.numpy(), factor, out=each.grad.numpy())  # type: ignore[union-attr]
            optimizer.step()
            probe.step()
    return folder


def test_gradients_that_are_added_up_have_noise_and_a_wrong_sum_has_no_script(tmp_path: Path) -> None:
    right = _accumulate(tmp_path / "right", other=False)
    noisy = compare(right, _accumulate(tmp_path / "noisy", other=True))
    assert noisy.exit_code == 0 and noisy.summary.first_difference is not None
    found = compare(right, _accumulate(tmp_path / "wrong", other=True, factor=1.0001), out=tmp_path / "result")
    assert found.divergence is not None and found.divergence.status == "entered" and found.divergence.step == 1
    assert found.divergence.call == "Tensor.lerp_.0.forward" and found.summary.replay == ""
    assert "no replay.py: no recorded call is wrong; what differs comes from outside of them" in str(found)


def test_equal_runs_need_no_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "run_in_processes", None)
    assert compare(record(tmp_path / "a"), record(tmp_path / "b")).exit_code == 0


@pytest.mark.process
def test_without_proof_no_torch_is_imported(tmp_path: Path) -> None:
    right, wrong = record(tmp_path / "a"), record(tmp_path / "b", Wrong("_softmax.default", scaled))
    program = (
        "import sys, tensorprobe\n"
        f"found = tensorprobe.compare({str(right)!r}, {str(wrong)!r}, prove='off')\n"
        "assert found.exit_code == 1 and 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_backward_of_a_call_with_another_argument_is_no_noise(tmp_path: Path) -> None:
    """Its result is zero on both sides, and each side computes its gradient right."""
    for name, factor in (("a", 1.0), ("b", 1.01)):
        with tensorprobe.capture(tmp_path / name, in_process=True):
            x = torch.full((4,), -1.0, requires_grad=True)
            (torch.relu(x) * factor).sum().backward()
    result = tensorprobe.compare(tmp_path / "a", tmp_path / "b")
    assert result.exit_code == 1
    assert result.divergence is not None and result.divergence.call == "Tensor.mul.0.backward"


def test_a_gradient_that_is_missing_comes_before_the_sum_that_lacks_it(tmp_path: Path) -> None:
    weight = torch.full((4,), 2.0, requires_grad=True)
    for name, detached in (("a", False), ("b", True)):
        with tensorprobe.capture(tmp_path / name, in_process=True):
            x = torch.linspace(0.5, 2, 4, requires_grad=True)
            y = torch.exp(x)
            (F.layer_norm(y.detach() if detached else y, (4,), weight) * torch.sin(y)).sum().backward()
    divergence = compare(tmp_path / "a", tmp_path / "b").divergence
    assert divergence is not None and divergence.call == "Functional.layer_norm.0.backward"


def test_other_roundings_next_to_zero_are_no_fault_where_only_statistics_were_recorded(tmp_path: Path) -> None:
    """The gradient of a square root is greatest where its argument is next to zero, and so is the error of that argument."""
    for name, device in (("a", contextlib.nullcontext()), ("b", OtherSums()), ("c", OtherSums("mul.Tensor", scaled))):
        torch.manual_seed(1)
        data, weight = torch.randn(16, 256), torch.randn(256, 16, requires_grad=True)
        near = (data @ weight).detach() + torch.linspace(1e-3, 1, 16)
        with tensorprobe.capture(tmp_path / name, mode="summary", level="api", in_process=True), device:
            off = torch.matmul(data, weight) - near
            (off.square() + 1e-9).sqrt().mul(2).mean().backward()
    assert compare(tmp_path / "a", tmp_path / "b").agrees
    wrong = compare(tmp_path / "a", tmp_path / "c").divergence
    assert wrong is not None and wrong.call == "Tensor.mul.0.forward"
