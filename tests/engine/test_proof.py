"""Compare answers with proof: replays in float64 decide which side is wrong, what is noise, and what inference hides."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tensorprobe
from tensorprobe.engine import proof
from tensorprobe.replay.proof import serve_proofs
from tensorprobe.work.pool import Job
from tests.checks.test_audit import Wrong, record, scaled

NORM = "native_layer_norm.default"


@pytest.fixture(autouse=True)
def replay_here(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Replay in this process: what a process of its own changes is tested once."""
    if "process" in request.keywords:
        return

    def run_here(job: Job, parcels: list[bytes], *, take: Callable[[int, bytes], None], **_: Any) -> None:
        with serve_proofs(job.start, None) as answer:
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
    assert found.exit_code == 1 and found.summary.proving.unprovable == {"it draws random numbers": 1}


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
    assert (off.statuses, off.divergence) == (auto.statuses, auto.divergence)
    assert not auto.proving.replayed


def test_equal_runs_need_no_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "run_in_processes", None)
    assert compare(record(tmp_path / "a"), record(tmp_path / "b")).exit_code == 0


@pytest.mark.process
def test_without_proof_no_torch_is_imported(tmp_path: Path) -> None:
    import subprocess

    right, wrong = record(tmp_path / "a"), record(tmp_path / "b", Wrong("_softmax.default", scaled))
    program = (
        "import sys, tensorprobe\n"
        f"found = tensorprobe.compare({str(right)!r}, {str(wrong)!r}, prove='off')\n"
        "assert found.exit_code == 1 and 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
