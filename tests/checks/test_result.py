"""Counts that add up, and what the result says of itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tensorprobe.checks.plan import Finished, Plan, Planned, Task
from tensorprobe.checks.result import AuditResult, PrecheckResult, conclude
from tensorprobe.checks.settings import PrecheckSettings
from tensorprobe.record.run import Entry
from tests.checks.planting import check as check_alone
from tests.checks.planting import planted, record_one
from tests.report.made_precheck import check, failing, skipped, wrong


def concluded(*outcomes: Finished, equal: dict[int, list[str]] | None = None, **asked: Any) -> PrecheckResult:
    plan = Plan(notes=["from the plan"])
    for number, one in enumerate(outcomes):
        task = Task(0, 0, Entry(number, one.check.call, 0), None)
        plan.checks.append(Planned(task, "net", None, (equal or {}).get(number, [])))
    return conclude(
        plan, dict(enumerate(outcomes)), PrecheckSettings(**asked), run="runs/a", output=None, elapsed_s=1.0
    )


def test_counts_are_of_calls_and_add_up() -> None:
    outcomes = [
        Finished(check=one) for one in (check(), failing(), skipped(), check(backward="skip"), check(backward="fail"))
    ]
    summary = concluded(*outcomes, equal={0: ["a", "b"], 2: ["c"]}).summary
    assert (summary.calls, summary.distinct) == (8, 5)
    assert (summary.passed, summary.failed, summary.skipped) == (4, 2, 2)
    assert summary.reasons == {"empty returns memory that is not initialised": 2}
    assert (summary.backward_passed, summary.backward_failed) == (4, 1)
    assert [one.module for one in summary.checks] == ["net"] * 5
    assert summary.checks[0].equal == ["a", "b"]


@pytest.mark.parametrize(
    ("checks", "code"),
    [([check()], 0), ([check(), skipped()], 0), ([failing(), check()], 1), ([skipped()], 2), ([], 2)],
)
def test_exit_codes(checks: list[Any], code: int) -> None:
    result = concluded(*(Finished(check=one) for one in checks))
    assert (result.exit_code, result.passed) == (code, code == 0)


def test_failures_and_their_scripts_can_be_asked_for() -> None:
    result = concluded(
        Finished(check=check("Torch.exp.0.forward")), Finished(check=failing(), replay="out/failures/a.py")
    )
    assert [one.call for one in result.failures] == ["Functional.softmax.0.forward"]
    assert result.replays == {"Functional.softmax.0.forward": "out/failures/a.py"}
    assert str(result).splitlines()[-1] == "Run it alone: python out/failures/a.py"
    assert repr(result) == "<precheck: 1 passed, 1 failed, 0 skipped>"
    assert repr(AuditResult(result.summary)) == "<audit: 1 passed, 1 failed, 0 skipped>"
    assert json.loads(result.to_json()) == result.to_dict()


def test_an_error_of_the_tool_is_reported_once_with_its_count() -> None:
    notes = concluded(*(Finished(check=skipped(), trouble=f"Traceback {at}") for at in range(2))).summary.notes
    assert notes == [
        "from the plan",
        "2 checks in which tensorprobe itself failed; please report it. The first:\nTraceback 0",
    ]


def test_recorded_data_in_place_of_random_ones_are_told() -> None:
    outcomes = [Finished(check=check(data="real")), Finished(check=check())]
    note = "1 call run with recorded data: random ones mean nothing to the op"
    assert concluded(*outcomes).summary.notes == ["from the plan", note]
    assert concluded(*outcomes, data="real").summary.notes == ["from the plan"]


def test_a_call_is_explained_by_the_op_that_fails_inside_it() -> None:
    product = failing("Tensor.mul.0.forward", op="Tensor.mul", inside=["aten::mul"])
    half = failing(
        "Tensor.sin.0.forward", op="Tensor.sin", inside=["aten::mul"], details=[wrong(device_dtype="torch.half")]
    )
    outcomes = [
        failing("Tensor.exp.0.forward", op="Tensor.exp", inside=["aten::mul_", "aten::exp"]),
        product,
        half,
        failing("Tensor.tanh.0.forward", op="Tensor.tanh", inside=["aten::tanh_backward"]),
    ]
    result = concluded(*(Finished(check=one) for one in outcomes))
    assert [one.because for one in result.failures] == ["Tensor.mul.0.forward", "", "", ""]
    assert result.failures[0].message.endswith("; mul runs inside it and fails alone (Tensor.mul.0.forward)")


def test_a_failing_call_names_the_ops_inside_what_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = record_one(tmp_path / "run", lambda: torch.rand(40, 5, requires_grad=True).exp().sum().backward(), "exp")
    with planted(monkeypatch, gradients=lambda g: g * 1.01):
        found = check_alone(call)
    assert (found.forward, found.backward, found.inside) == ("pass", "fail", ["aten::detach", "aten::mul"])
