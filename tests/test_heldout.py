"""The held-out benchmark knows where a fault is, and what an answer is worth."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from bench.heldout import answer, device, kinds, record
from bench.heldout.cases import PARTS, Setting
from bench.heldout.open.sequences import FAMILIES
from bench.heldout.plant import Plant, kernel, optimizer
from bench.heldout.truth import Truth, find_truth

TRUTH = Truth(
    step=1, ranks=[0], calls=["Functional.gelu.1.forward"], region=["Functional.gelu.1.backward"], roundoffs=9.0
)


def find(folder: Path, plant: Plant, family: str = "skipgram", steps: int = 2, level: str = "api") -> Truth:
    for name, planted in (("right", None), ("again", None), ("wrong", plant)):
        program = record.Program(FAMILIES[family].build, steps=steps, plant=planted)
        record.record(folder / name, program, "cpu", Setting(level=level))
    return find_truth(folder / "right", folder / "again", folder / "wrong")


def test_a_wrong_kernel_is_found_where_it_strikes(tmp_path: Path) -> None:
    found = find(tmp_path, kernel("bmm", kinds.scaled(1.01), step=1))
    assert (found.step, found.calls, found.above) == (1, ["Torch.bmm.0.forward"], True)


def test_a_fault_of_the_size_of_rounding_is_not_above_it(tmp_path: Path) -> None:
    found = find(tmp_path, kernel("bmm", kinds.scaled(1 + 1e-6)))
    assert found.calls == ["Torch.bmm.0.forward"] and not found.above


def test_a_replaced_kernel_that_does_the_same_changes_no_bit(tmp_path: Path) -> None:
    def plant(_: Any) -> contextlib.AbstractContextManager[None]:
        for op in (*device.WIDE, "mul.Tensor", "add_.Tensor", "embedding"):
            device.add_layer(op, lambda below, args, kwargs: below(*args, **kwargs))
        return contextlib.nullcontext()

    assert find(tmp_path, plant).calls == []


def said(call: str, status: str = "introduced", step: int = 1, external: str = "") -> dict[str, Any]:
    found = {"step": step, "rank": 0, "call": call, "candidate_call": call, "status": status, "finding": None}
    outside = [{"name": external, "step": step, "rank": 0}] if external else []
    return {"answer": "diverged", "exit_code": 1, "divergence": found, "externals": outside}


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        (said("Functional.gelu.1.forward"), "exact"),
        (said("Functional.gelu.1.forward", step=0), "misleading"),
        (said("Functional.gelu.1.backward"), "region"),
        (said("Functional.linear.2.forward"), "misleading"),
        (said("Functional.linear.2.forward", external="head.weight"), "misleading"),
        (said("Functional.linear.2.forward", "inherited", external="head.weight"), "exact"),
        (said("Functional.linear.2.forward", "inherited", external="other.weight"), "unlocated"),
        ({"answer": "agrees", "exit_code": 0, "divergence": None, "externals": []}, "missed"),
        ({"answer": "refused", "exit_code": 2, "text": ""}, "cannot say"),
        ({"answer": "crashed", "exit_code": 3, "text": ""}, "crashed"),
    ],
)
def test_an_answer_is_worth_what_it_names(reply: dict[str, Any], outcome: str) -> None:
    assert answer.judge_fault(reply, TRUTH, ("head.*",)) == outcome


def test_closed_files_say_so_in_their_first_line() -> None:
    folder = Path(record.__file__).parent / PARTS[1]
    assert all(path.read_text().startswith("# CLOSED: held out.") for path in folder.glob("*.py"))


def test_weights_that_changed_unseen_are_found_where_they_are_read(tmp_path: Path) -> None:
    found = find(tmp_path, optimizer(momentum=0.5), "fftconv", 3, "module")
    assert (found.step, found.outside, found.calls) == (2, True, ["Module.0.enter.Linear.forward.0"])
