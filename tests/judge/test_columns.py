"""The rules of the judge, each on a few hand-made columns in memory: statuses, verdicts, lineage, externals, order of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensorprobe.judge import POLICIES, Policy
from tensorprobe.judge.divergence import StepAnswer, conclude_step, first_divergence, settle_ranks
from tensorprobe.judge.inside import Inside
from tensorprobe.judge.limits import judge_by_limits, judge_figures
from tensorprobe.judge.noise_model import allow, errors_of
from tensorprobe.judge.policy import Rule
from tensorprobe.judge.severity import AMPLIFIED, EXPLAINED, NOISE, UNEXPLAINED, choose_calls, rate_rows
from tensorprobe.judge.walk import FaultyModules, RankJudge
from tensorprobe.model.comparison import STATUSES, Divergence
from tensorprobe.model.measured import DIVERGES, HARD, INPUTS, STATISTICS, VERDICTS, Measured, Opinions
from tensorprobe.model.reason import Unmeasured
from tests.builders.columns import call, only_in_baseline, row, step

LINEAR, GELU, TOPK, SQRT = "Functional.linear", "Functional.gelu", "Torch.topk", "Torch.sqrt"
WRONG = 1e-2
"""An error that no allowance of float32 explains on equal inputs."""
ROUNDED = 5e-8


def judge(*steps: Measured, policy: str | Policy = "noise-aware") -> list[Opinions]:
    judge = RankJudge(POLICIES[policy] if isinstance(policy, str) else policy)
    return [judge.judge(measured) for measured in steps]


def statuses(*steps: Measured, policy: str | Policy = "noise-aware") -> list[str]:
    return [STATUSES[code] for opinions in judge(*steps, policy=policy) for code in opinions.status]


def chain(first: float, second: float, *, op: str = GELU) -> Measured:
    """A linear call whose result, with the error `first`, is the input of `op`; its result has the error `second`."""
    return step(
        call(f"{LINEAR}.0.forward", row("input.0"), row("output.0", first, key="y")),
        call(f"{op}.0.forward", row("input.0", first, key="y"), row("output.0", second)),
    )


def severities(measured: Measured) -> list[int]:
    errors = errors_of(measured)
    with np.errstate(all="ignore"):
        allowance = allow(measured, errors, Inside.of(measured))
        found: list[int] = rate_rows(measured.rows, errors, allowance, np.ones(len(errors.rms))).level.tolist()
    return found


# Columns: how severe one row is.


@pytest.mark.parametrize(
    ("first", "second", "op", "expected"),
    [
        (0.0, 0.0, GELU, NOISE),
        (0.0, ROUNDED, GELU, NOISE),
        (0.0, WRONG, GELU, UNEXPLAINED),
        (1e-5, 1e-5, GELU, EXPLAINED),
        (1e-5, 3e-3, SQRT, UNEXPLAINED),
        (1e-4, 1e-2, "Functional.relu", AMPLIFIED),
    ],
)
def test_severity_of_a_result(first: float, second: float, op: str, expected: int) -> None:
    assert severities(chain(first, second, op=op))[-1] == expected


def test_an_error_that_all_elements_share_is_severe_though_it_is_small() -> None:
    small = {"relative_l2": 2e-7, "max_abs": 6e-7, "different": 4096}
    plain = step(call(f"{GELU}.0.forward", row("input.0"), row("output.0", **small)))
    biased = step(call(f"{GELU}.0.forward", row("input.0"), row("output.0", **small, slope=1 + 2e-7, slope_z=50.0)))
    assert (severities(plain)[-1], severities(biased)[-1]) == (NOISE, UNEXPLAINED)


@pytest.mark.parametrize("op", ["Aten.sum.dim_IntList", "Tensor.sum", "Torch.mean", "Functional.kl_div"])
def test_a_sum_that_cancels_is_measured_against_what_was_summed(op: str) -> None:
    """The terms have a size of 1. The error is as large as the result, a millionth of them."""

    def result(size: float) -> dict[str, float]:
        norms = {f"{side}_norm": 64 * size for side in ("baseline", "candidate")}
        ends = {f"{side}_{end}": size for side in ("baseline", "candidate") for end in ("max", "min")}
        return {"relative_l2": 1.0, "max_abs": size, **norms, **ends}

    noise, wrong = (
        severities(step(call(f"{op}.0.forward", row("input.0", ROUNDED), row("output.0", **result(size)))))[-1]
        for size in (1e-7, 1e-3)
    )
    assert noise <= EXPLAINED and wrong == UNEXPLAINED


def test_moved_values_must_be_equal_and_numbers_rounded_once_near() -> None:
    one_ulp = {"relative_l2": 1e-9, "max_abs": 1e-7, "different": 1}
    assert severities(step(call("Tensor.view.0.forward", row("input.0"), row("output.0", **one_ulp)))) == [0, 3]
    assert (
        severities(step(call("Tensor.add.0.forward", row("input.0"), row("output.0", **one_ulp, ulp_max=4.0))))[1] == 0
    )
    assert (
        severities(step(call("Tensor.add.0.forward", row("input.0"), row("output.0", **one_ulp, ulp_max=5.0))))[1] == 3
    )


def test_integers_are_exact_unless_their_inputs_differ() -> None:
    picked = row("output.0", dtype="int64", different=1, max_abs=1.0, relative_l2=0.1)
    assert severities(step(call(f"{TOPK}.0.forward", row("input.0"), picked)))[-1] == UNEXPLAINED
    noisy = step(call(f"{TOPK}.0.forward", row("input.0", ROUNDED), picked))
    assert severities(noisy)[-1] == AMPLIFIED


def test_only_what_differs_or_was_not_measured_needs_attention() -> None:
    measured = step(
        call(f"{GELU}.0.forward", row("input.0"), row("output.0")),
        call(f"{GELU}.1.forward", row("input.0"), row("output.0", ROUNDED, key="y")),
        call(f"{GELU}.2.forward", row("input.0", ROUNDED, key="y"), row("output.0", ROUNDED)),
        call(f"{GELU}.3.forward", row("input.0", ROUNDED, key="x"), row("output.0", ROUNDED)),
        call(f"{GELU}.4.forward", row("input.0"), row("output.0", WRONG)),
        call(f"{GELU}.5.forward", row("input.0"), row("output.0", why=Unmeasured.UNRECORDED)),
        call(f"{GELU}.6.forward", row("input.0"), row("output.0"), structural=HARD),
    )
    errors = errors_of(measured)
    with np.errstate(all="ignore"):
        severity = rate_rows(
            measured.rows, errors, allow(measured, errors, Inside.of(measured)), np.ones(len(errors.rms))
        )
        attention = choose_calls(measured, errors, judge_by_limits(measured, POLICIES["noise-aware"]), severity)
    assert attention.wanted.tolist() == [False, True, True, True, True, True, True]
    assert attention.doubtful.tolist() == [False, False, False, True, True, True, True]


# The walk: what a call has to do with the calls before it.


def test_an_error_on_equal_inputs_is_introduced_and_what_follows_is_inherited() -> None:
    measured = chain(WRONG, WRONG)
    [opinions] = judge(measured)
    assert [STATUSES[code] for code in opinions.status] == ["introduced", "inherited"]
    assert [INPUTS[code] for code in opinions.inputs] == ["identical", "diverge"]
    assert [VERDICTS[code] for code in opinions.verdict] == ["agrees", "diverges", "diverges", "diverges"]


def test_rounding_is_passed_on_without_blame() -> None:
    [opinions] = judge(chain(ROUNDED, 1e-7))
    assert [STATUSES[code] for code in opinions.status] == ["agrees", "agrees"]
    assert [INPUTS[code] for code in opinions.inputs] == ["identical", "agree"]


def test_an_error_that_shrinks_to_noise_is_not_inherited() -> None:
    assert statuses(chain(WRONG, 0.0)) == ["introduced", "agrees"]


def test_a_decision_that_noise_turned_is_amplified_and_agrees() -> None:
    measured = step(
        call(f"{LINEAR}.0.forward", row("input.0"), row("output.0", ROUNDED, key="y")),
        call(
            f"{TOPK}.0.forward",
            row("input.0", ROUNDED, key="y"),
            row("output.0", dtype="int64", different=1, max_abs=1.0, relative_l2=0.1),
        ),
    )
    [opinions] = judge(measured)
    assert [STATUSES[code] for code in opinions.status] == ["agrees", "amplified"]
    assert not (opinions.verdict == DIVERGES).any()


def test_amplified_is_said_of_a_call_beside_the_divergence_too() -> None:
    beside = step(
        call(f"{LINEAR}.0.forward", row("input.0"), row("output.0", WRONG)),
        call(f"{LINEAR}.1.forward", row("input.0"), row("output.0", ROUNDED, key="y")),
        call(
            f"{TOPK}.0.forward",
            row("input.0", ROUNDED, key="y"),
            row("output.0", dtype="int64", different=1, max_abs=1.0, relative_l2=0.1),
        ),
    )
    assert statuses(beside) == ["introduced", "agrees", "amplified"]


def test_a_diverging_input_that_grows_beyond_explanation_is_amplified() -> None:
    assert statuses(chain(WRONG, 0.9, op="Tensor.neg")) == ["introduced", "amplified"]


def test_a_result_without_values_is_unmeasured_and_no_agreement() -> None:
    measured = step(
        call(f"{GELU}.0.forward", row("input.0"), row("output.0", why=Unmeasured.UNRECORDED)),
        call(f"{GELU}.1.forward", row("input.0", why=Unmeasured.DAMAGED), row("output.0", WRONG)),
    )
    [opinions] = judge(measured)
    assert [STATUSES[code] for code in opinions.status] == ["unmeasured", "introduced"]
    assert INPUTS[opinions.inputs[1]] == "unknown"
    assert conclude_step(measured, opinions).judged == 1


def test_a_call_of_another_shape_is_structural() -> None:
    measured = step(
        call(f"{GELU}.0.forward", row("input.0"), row("output.0", why=Unmeasured.SHAPE), structural=HARD),
        call(f"{GELU}.1.forward", row("input.0"), row("output.0", WRONG), structural=HARD),
    )
    assert statuses(measured) == ["structural", "introduced"]


def test_a_call_with_an_input_of_another_shape_and_later_calls_only_inherit() -> None:
    read = row("input.0", why=Unmeasured.SHAPE)
    measured = step(
        call(f"{GELU}.0.forward", row("input.0"), row("output.0", why=Unmeasured.SHAPE), structural=HARD),
        call(f"{GELU}.1.forward", read, row("output.0", WRONG, key="x"), structural=HARD),
        call(f"{GELU}.2.forward", row("input.0", WRONG, key="x"), row("output.0", WRONG)),
        call(f"{GELU}.3.forward", read, row("output.0"), structural=HARD),
    )
    assert statuses(measured) == ["structural", "structural", "inherited", "structural"]


def test_a_backward_call_inherits_from_the_inputs_of_its_forward_call() -> None:
    forward = call(f"{LINEAR}.0.forward", row("input.0", WRONG, key="x"), row("output.0", WRONG))
    backward = call(f"{LINEAR}.0.backward", row("input.0"), row("output.0", WRONG))
    assert statuses(step(forward, backward))[1] == "inherited"
    assert statuses(step(backward)) == ["introduced"]


def test_a_module_inherits_what_went_wrong_inside_it_once() -> None:
    inner = call(f"{GELU}.0.forward", row("input.0"), row("output.0", WRONG), module="net.act")
    outer = call("Module.net.act.GELU.forward.0", row("input.0"), row("output.0", WRONG))
    again = call("Module.net.act.GELU.forward.1", row("input.0"), row("output.0", WRONG))
    other = call("Module.net.norm.Norm.forward.0", row("input.0"), row("output.0", WRONG))
    assert statuses(step(inner, outer, again)) == ["introduced", "inherited", "introduced"]
    assert statuses(step(inner, other)) == ["introduced", "introduced"]


def test_faulty_modules_are_those_around_the_call_until_they_end() -> None:
    calls = step(
        call(f"{GELU}.0.forward", module="a.b"),
        call("Module.a.b.B.forward.0"),
        call("Module.a.A.forward.0"),
        call("Module.a.b.B.backward.0"),
        call("Module.ab.B.forward.0"),
    ).calls
    modules = FaultyModules(calls)
    modules.blame(0)
    assert [modules.is_faulty(at) for at in range(5)] == [False, True, True, False, False]
    modules.leave(1)
    assert [modules.is_faulty(at) for at in range(5)] == [False, False, True, False, False]


# Lineage: from step to step.


def update(error: float, key: str = "w1") -> Any:
    return call("Tensor.add_.0.forward", row("input.0"), row("output.0", error, key=key))


def use(error: float, key: str = "w1") -> Any:
    weight = row("input.1", error, key=key, grad=True)
    return call(f"{LINEAR}.0.forward", row("input.0"), weight, row("output.0", error), module="fc")


def test_a_weight_that_a_step_made_wrong_is_inherited_in_the_next() -> None:
    steps = step(update(WRONG)), step(use(WRONG), step=1)
    assert statuses(*steps) == ["introduced", "inherited"]
    assert judge(*steps)[1].entering == []


def test_a_weight_that_a_step_made_with_noise_agrees_in_the_next() -> None:
    assert statuses(step(update(ROUNDED)), step(use(ROUNDED), step=1)) == ["agrees", "agrees"]


@pytest.mark.parametrize("unmeasured", [False, True])
def test_a_result_that_agreed_though_it_differs_is_known_in_the_next_step(unmeasured: bool) -> None:
    """An index that noise turned. The call without values makes the walk stop and look, after the index was accepted."""
    index = {"dtype": "int64", "different": 1, "max_abs": 1.0, "relative_l2": 0.1}
    calls = [
        call(f"{LINEAR}.0.forward", row("input.0"), row("output.0", ROUNDED, key="y")),
        call(f"{TOPK}.0.forward", row("input.0", ROUNDED, key="y"), row("output.0", key="index", **index)),
    ]
    if unmeasured:
        calls.append(call(f"{GELU}.0.forward", row("input.0"), row("output.0", why=Unmeasured.UNRECORDED)))
    later = call("Tensor.view.0.forward", row("input.0", key="index", **index), row("output.0", **index))
    assert VERDICTS[judge(step(*calls), step(later, step=1))[1].verdict[0]] == "agrees"
    assert VERDICTS[judge(step(calls[0]), step(later, step=1))[1].verdict[0]] == "diverges"


# Externals: what differs before the first call.


def test_a_parameter_that_differs_from_the_start_enters_with_its_call() -> None:
    measured = step(use(WRONG))
    [opinions] = judge(measured)
    assert opinions.entering[0][:2] == (1, 0)
    assert STATUSES[opinions.status[0]] == "entered"
    [external] = conclude_step(measured, opinions).externals
    assert (external.kind, external.name) == ("parameter", "fc.weight")


def test_a_difference_enters_though_the_result_is_right() -> None:
    weight = row("input.1", WRONG, grad=True)
    assert statuses(step(call(f"{LINEAR}.0.forward", row("input.0"), weight, row("output.0")))) == ["entered"]


@pytest.mark.parametrize("policy", ["noise-aware", "bitwise"])
def test_data_that_differs_is_external_until_something_has_diverged(policy: str) -> None:
    data = call(f"{GELU}.1.forward", row("input.0", WRONG), row("output.0", WRONG))
    assert judge(step(data), policy=policy)[0].entering[0][:2] == (0, 0)
    wrong = call(f"{GELU}.0.forward", row("input.0"), row("output.0", WRONG))
    assert judge(step(wrong, data), policy=policy)[0].entering == []
    assert judge(step(wrong, use(WRONG)), policy=policy)[0].entering[0][:2] == (3, 1), (
        "a parameter does not follow from it"
    )


def test_what_a_call_without_a_partner_may_have_made_is_not_external() -> None:
    late = only_in_baseline("Tensor.add.0.forward", 5)
    early = only_in_baseline("Tensor.add.0.forward", 0)
    assert judge(step(use(WRONG), findings=(late,)))[0].entering[0][:2] == (1, 0)
    assert judge(step(use(WRONG), findings=(early,)))[0].entering == []


def test_a_tensor_of_another_module_is_not_external() -> None:
    def used(other: str) -> Measured:
        rows = row("input.0"), row("input.1", WRONG, grad=True), row("output.0", WRONG)
        return step(call(f"{LINEAR}.0.forward", *rows, module="a.fc", candidate_module=other))

    assert judge(used("module.a.fc"))[0].entering[0][:2] == judge(used("fc"))[0].entering[0][:2] == (1, 0)
    assert judge(used("head"))[0].entering == []


def test_memory_that_is_filled_in_part_is_neither_external_nor_introduced() -> None:
    fresh = call("Torch.empty.0.forward", row("output.0", why=Unmeasured.UNINITIALISED))
    half = row("output.changed.0", 0.5, key="half")
    fill = call("Tensor.__setitem__.0.forward", row("input.0", 0.9), half)
    done = call("Tensor.__setitem__.1.forward", row("input.0", 0.5, key="half"), row("output.changed.0"))
    [opinions] = judge(step(fresh, fill, done))
    assert [STATUSES[code] for code in opinions.status] == ["unmeasured", "unmeasured", "agrees"]
    assert opinions.entering == []
    recorded = call("Torch.empty.0.forward", row("output.0", why=Unmeasured.UNRECORDED))
    assert judge(step(recorded, fill, done))[0].entering[0][:2] == (1, 1)


# Rules with fixed limits.


def test_a_rule_with_limits_decides_alone_and_the_first_that_fits_counts() -> None:
    rules = [Rule(op=GELU, ignore=True), Rule(diverges=[{"max_abs": 0.05, "relative_l2": 0.001}, {"max_abs": 0.5}])]
    policy = Policy(name="mine", rules=rules)

    def verdict(op: str, **figures: float) -> str:
        measured = step(call(f"{op}.0.forward", row("input.0"), row("output.0", **figures)))
        return VERDICTS[judge(measured, policy=policy)[0].verdict[1]]

    assert verdict(GELU, max_abs=9.0, relative_l2=9.0) == "agrees"
    assert verdict(LINEAR, max_abs=0.06, relative_l2=0.0005) == "agrees"
    assert verdict(LINEAR, max_abs=0.06, relative_l2=0.002) == "diverges"
    assert verdict(LINEAR, max_abs=0.6, relative_l2=0.0) == "diverges"
    assert verdict(LINEAR, max_abs=float("nan"), relative_l2=0.0) == "unmeasured"


def test_limits_on_one_pair_are_those_on_columns() -> None:
    for policy in POLICIES.values():
        if policy.name == "noise-aware":
            continue
        for error in (0.0, 1e-4, 0.02, 0.2, 2.0):
            measured = step(call(f"{GELU}.0.forward", row("output.0", error)))
            figures = {name: column[0].item() for name, column in measured.rows.figures.items()}
            one = judge_figures(policy.rules[0], figures)
            assert one.passes == (judge_by_limits(measured, policy).verdict[0] != DIVERGES), (policy.name, error)


def test_statistics_that_are_equal_are_equal_tensors_as_far_as_is_known() -> None:
    same = row("output.0", basis=STATISTICS)
    other = row("output.0", basis=STATISTICS, candidate_norm=70.0, candidate_max=3.3)
    assert statuses(step(call("Tensor.clone.0.forward", row("input.0"), same))) == ["agrees"]
    assert statuses(step(call("Tensor.clone.0.forward", row("input.0"), other))) == ["introduced"]


# Across ranks.


def answer(measured: Measured) -> StepAnswer:
    return conclude_step(measured, judge(measured)[0])


def first_across_ranks(answers: list[StepAnswer]) -> Divergence | None:
    found = first_divergence(settle_ranks(answers))
    return None if found is None else found.divergence


def quiet(number: int) -> Any:
    return call(f"{GELU}.{number}.forward", row("input.0"), row("output.0"))


def wrong(number: int) -> Any:
    return call(f"{GELU}.{number}.forward", row("input.0"), row("output.0", WRONG))


def reduce(error: float = 0.0, number: int = 0) -> Any:
    return call(f"Distributed.all_reduce.{number}.forward", row("input.0"), row("output.0", error))


def test_ranks_are_ordered_by_the_collectives_they_have_passed() -> None:
    """Rank 0 goes wrong at its call 1, after the collective; rank 1 at its call 3, before it."""
    after = answer(step(reduce(), wrong(0), rank=0))
    before = answer(step(quiet(0), quiet(1), quiet(2), wrong(3), reduce(), rank=1))
    found = first_across_ranks([after, before])
    assert found is not None and (found.rank, found.call) == (1, f"{GELU}.3.forward")


def test_a_collective_that_spreads_an_error_of_another_rank_is_not_blamed() -> None:
    guilty = answer(step(quiet(0), wrong(1), reduce(WRONG), rank=1))
    victim = answer(step(reduce(WRONG), rank=0))
    assert victim.introduced is not None and victim.introduced.collective
    spread = first_divergence(settle_ranks([victim, guilty])[:1])
    assert spread is not None and spread.divergence.status == "inherited"
    alone = first_across_ranks([victim])
    assert alone is not None and alone.status == "introduced"
    first = first_across_ranks([victim, guilty])
    assert first is not None and (first.rank, first.call) == (1, f"{GELU}.1.forward")


def test_an_introduced_error_comes_first_unless_an_earlier_step_diverges() -> None:
    later = conclude_step(measured := step(wrong(0), step=3), judge(measured)[0])
    first = answer(step(call(f"{GELU}.0.forward", row("input.0", WRONG), row("output.0", WRONG)), step=1))
    found = first_across_ranks([later, first])
    assert found is not None and (found.step, found.status) == (1, "entered")
    assert first_across_ranks([later]).step == 3  # type: ignore[union-attr]


def test_the_first_bit_that_differs_is_found_whatever_is_allowed() -> None:
    found = answer(step(quiet(0), call(f"{GELU}.1.forward", row("input.0"), row("output.0", ROUNDED))))
    assert found.difference is not None and found.difference.divergence.call == f"{GELU}.1.forward"
    assert found.introduced is None
