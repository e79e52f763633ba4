"""Calls of modules: what is allowed follows from the calls inside them, and blame goes to the earliest one whose inputs agree."""

from __future__ import annotations

import math

import pytest

from tensorprobe.judge import POLICIES
from tensorprobe.judge.walk import RankJudge
from tensorprobe.model.comparison import STATUSES
from tensorprobe.model.measured import Measured
from tests.builders.columns import HandCall, call, row, step

NOISE, WRONG = 1e-5, 5e-2


def status(measured: Measured) -> list[str]:
    return [STATUSES[code] for code in RankJudge(POLICIES["noise-aware"]).judge(measured).status]


def module(path: str, error: float, *, given: float = 0.0, key: object = None) -> HandCall:
    name = f"Module.{path}.Block.forward.0" if path else "Module.Model.forward.0"
    return call(name, row("input.0", given), row("output.0", error, key=key), module=path)


@pytest.mark.parametrize(("error", "expected"), [(4 * NOISE, "agrees"), (WRONG, "introduced")])
def test_a_module_may_be_as_far_off_as_what_is_inside_it_explains(error: float, expected: str) -> None:
    for path in ("layers.0", ""):
        inside = module("layers.0.attn", NOISE)
        assert status(step(inside, module(path, error)))[1] == expected
    assert status(step(module("layers.1", NOISE), module("layers.0", error)))[1] == "introduced"


def test_a_module_that_names_no_path_takes_nothing_from_the_model() -> None:
    loss = call("Module.CrossEntropyLoss.forward.0", row("input.0", NOISE), row("output.0", NOISE))
    assert status(step(module("layers.0", NOISE), loss, module("", 4 * NOISE))) == ["agrees"] * 3


def test_the_earliest_module_whose_inputs_agree_is_blamed() -> None:
    found = status(
        step(
            module("layers.0.attn.q", NOISE),
            module("layers.0.attn.o", WRONG, given=WRONG),  # code of layers.0.attn made what it is given
            module("layers.0.attn", WRONG),
            module("layers.0", WRONG),
        )
    )
    assert found == ["agrees", "inherited", "introduced", "inherited"]


def test_a_module_is_not_blamed_for_what_a_call_inside_it_made() -> None:
    narrow = row("output.0", 1e-3, key="x", dtype="bfloat16")
    data = call("Functional.gelu.0.forward", row("input.0", dtype="bfloat16"), narrow)
    read = row("input.0", 1e-3, key="x", dtype="bfloat16")
    linear = call("Functional.linear.0.forward", read, row("output.0", 5e-3, key="y"), module="body")
    head = module("head", 5e-3, key="y")
    assert status(step(data, linear, head)) == ["agrees"] * 3
    assert status(step(data, head)) == ["agrees", "introduced"]


def test_a_gradient_that_is_zero_on_one_side_has_the_size_of_the_other() -> None:
    none = {"relative_l2": math.inf, "max_abs": 1e-10, "different": 9, "baseline_norm": 0.0, "candidate_norm": 1e-10}
    none |= {"baseline_max": 0.0, "baseline_min": 0.0, "max_rel": 1.0}
    forward = call("Tensor.transpose.0.forward", row("input.0"), row("output.0"))
    linear = call("Functional.linear.0.forward", row("input.0"), row("output.0"))
    made = call("Functional.linear.0.backward", row("input.0", 1e-8), row("output.0", key="g", **none))
    moved = call("Tensor.transpose.0.backward", row("input.0", key="g", **none), row("output.0", **none))
    assert status(step(forward, linear, made, moved))[2:] == ["agrees", "agrees"]
