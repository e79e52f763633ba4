"""Where a differing tensor comes from: sums of gradients, results that are read otherwise, parameters of a later step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tensorprobe.judge import POLICIES
from tensorprobe.judge.divergence import conclude_step
from tensorprobe.judge.graph import Graph
from tensorprobe.judge.walk import Known, RankJudge
from tensorprobe.model.comparison import STATUSES, Proof
from tensorprobe.model.measured import STATISTICS, VERDICTS, Measured, Opinions, Update
from tensorprobe.model.reason import Unmeasured
from tests.builders.columns import call, row, step

GELU, LINEAR, ADD = "Functional.gelu", "Functional.linear", "Tensor.add"
ROUNDED, WRONG = 5e-8, 1e-2


RIGHT = Proof(slot="output.1", baseline=1e-8, candidate=1e-8, baseline_wrong=False, candidate_wrong=False)


def judge(*steps: Measured, updates: Update | None = None, right: tuple[int, ...] = ()) -> list[Opinions]:
    """Judge as the engine does: with an answer to every question. The calls `right` are proved to be right on both sides."""
    judge, found = RankJudge(POLICIES["noise-aware"]), []
    for measured in steps:
        opinions = judge.judge(measured)
        if opinions.questions or right:
            answers = dict.fromkeys((each.row for each in opinions.questions), updates)
            opinions = judge.judge_again(measured, Known(dict.fromkeys(right, RIGHT), answers))
        found.append(opinions)
    return found


def status(opinions: Opinions) -> list[str]:
    return [STATUSES[code] for code in opinions.status]


def reading(error: float, key: Any) -> Measured:
    """A result with rounding noise, which another call reads; it holds `key`, with this error."""
    return step(
        call(f"{LINEAR}.0.forward", row("input.0"), row("output.0", ROUNDED, key=("a", "b"))),
        call(f"{GELU}.0.forward", row("input.0", error, key=key), row("output.0", error)),
    )


def test_what_a_call_made_is_known_again_where_it_is_read() -> None:
    assert status(judge(reading(ROUNDED, ("a", "b")))[0]) == ["agrees", "agrees"]


@pytest.mark.parametrize("key", [("a", "other"), ("other", "b")])
def test_an_input_that_is_not_what_the_call_before_made_enters_with_its_reader(key: tuple[str, str]) -> None:
    measured = reading(WRONG, key)
    [opinions] = judge(measured)
    assert status(opinions) == ["agrees", "entered"]
    found = conclude_step(measured, opinions).entered
    assert found is not None and found.divergence.entered is not None
    entered = found.divergence.entered
    assert (entered.kind, entered.slot) == ("input", "input.0")
    assert entered.origin == f"{LINEAR}.0.forward, which made it, agrees"


def test_an_input_that_is_off_by_little_more_than_rounding_is_no_other_input() -> None:
    assert status(judge(reading(3 * ROUNDED, ("a", "other")))[0]) == ["agrees", "agrees"]
    assert status(judge(reading(1e-6, ("a", "other")))[0]) == ["agrees", "entered"]


def test_an_input_follows_a_call_that_diverged() -> None:
    measured = step(
        call(f"{LINEAR}.0.forward", row("input.0"), row("output.0", WRONG, key=("a", "b"))),
        call(f"{GELU}.0.forward", row("input.0", 2 * WRONG, key=("a", "other")), row("output.0", WRONG)),
    )
    assert status(judge(measured)[0]) == ["introduced", "inherited"]


def test_zeros_are_nobodys_result() -> None:
    none = {"relative_l2": math.inf, "max_abs": 1e-12, "different": 9, "baseline_norm": 0.0, "candidate_norm": 1e-12}
    none |= {"baseline_max": 0.0, "baseline_min": 0.0}
    measured = step(
        call("Torch.zeros.0.forward", row("output.0", key="zeros")),
        call(f"{GELU}.0.forward", row("input.0", key=("zeros", "tiny"), **none), row("output.0")),
    )
    assert "which made it" not in judge(measured)[0].entering[0].origin


def backward(error: float, *parts: float) -> Measured:
    """A result that as many calls read as there are parts; the gradient that comes back to it has the error `error`."""
    readers = [
        call(f"{GELU}.{at}.forward", row("input.0", ROUNDED, key="y"), row("output.0")) for at in range(len(parts))
    ]
    gradients = [
        call(f"{GELU}.{at}.backward", row("input.0"), row("output.0", part, key=f"part {at}"))
        for at, part in enumerate(parts)
    ]
    return step(
        call(f"{LINEAR}.0.forward", row("input.0"), row("output.0", ROUNDED, key="y")),
        *readers,
        *gradients,
        call(f"{LINEAR}.0.backward", row("input.0", error, key="sum"), row("output.0", error)),
    )


def test_the_graph_knows_which_gradients_were_added_up() -> None:
    measured = backward(1e-6, 0.0, 0.0)
    graph, calls = Graph(measured), measured.calls
    last = measured.rows_of(len(calls.name) - 1)[0]
    assert [calls.name[int(measured.rows.call[part])] for part in graph.summands(last)] == [
        f"{GELU}.0.backward", f"{GELU}.1.backward",
    ]  # fmt: skip
    made = graph.row(0, "output.0")
    assert made is not None
    held = graph.holding(0, int(measured.rows.content[0][made]))
    assert [int(measured.rows.call[at]) for at in held] == [0, 1, 2]
    assert [graph.maker(side, at) for side in (0, 1) for at in held] == [None, made, made] * 2
    assert graph.last_maker(1, int(measured.rows.content[1][made])) == made
    assert graph.last_maker(1, int(measured.rows.content[1][last])) is None


@pytest.mark.parametrize(
    ("error", "parts", "expected"),
    [
        (1e-6, (4e-7, 4e-7), "agrees"),
        (1e-5, (4e-7, 4e-7), "entered"),
        (2e-6, (7e-7, 0.0), "agrees"),
    ],
)
def test_a_sum_of_gradients_has_the_error_of_its_parts(error: float, parts: tuple[float, ...], expected: str) -> None:
    [opinions] = judge(backward(error, *parts))
    assert status(opinions)[-1] == expected
    assert [each.kind for each in opinions.entering] == (["gradient"] if expected == "entered" else [])


@pytest.mark.parametrize(("error", "expected"), [(1e-5, "agrees"), (1e-3, "entered")])
def test_the_gradient_of_a_parameter_that_two_calls_read_is_the_sum_of_their_parts(error: float, expected: str) -> None:
    """Its terms may cancel: the error is measured by the size of the parts."""
    role, small = "gradient weight", {"baseline_norm": 0.64, "candidate_norm": 0.64, "max_abs": 0.03 * error}
    measured = step(
        *(
            call(f"{LINEAR}.{at}.backward", row("input.0"), row("output.1", 4e-7, key=f"part {at}", role=role))
            for at in (0, 1)
        ),
        call("Tensor.lerp_.0.forward", row("input.1", error, key="sum", role=role, **small), row("output.0", error)),
    )
    assert status(judge(measured)[0])[-1] == expected


def test_a_sum_with_a_part_that_diverges_inherits() -> None:
    found = judge(backward(WRONG, WRONG, 0.0))[0]
    assert status(found)[-1] == "inherited" and not found.entering


def training(error: float, gradient: float = 0.0, *, number: int = 0, recorded: bool = True, **more: Any) -> Measured:
    """One step of a linear layer whose optimizer is not recorded."""
    weight = row("input.1", error, key=f"weight {number}", grad=True, **more)
    calls = [
        call(f"{LINEAR}.0.forward", row("input.0"), weight, row("output.0", error, key=f"out {number}"), module="fc")
    ]
    if recorded:
        calls.append(call(f"{LINEAR}.0.backward", row("input.0"), row("output.1", gradient, key=f"gradient {number}")))
    return step(*calls, step=number)


ALIKE = Update(off=0.001, factor=1.0, size=0.01)


@pytest.mark.parametrize(
    ("gradient", "update", "expected"),
    [
        (ROUNDED, ALIKE, "agrees"),
        (ROUNDED, ALIKE._replace(off=0.5), "entered"),
        (ROUNDED, ALIKE._replace(factor=1.01), "entered"),
        (ROUNDED, ALIKE._replace(factor=math.nan), "agrees"),
        (0.01, ALIKE._replace(off=0.5, factor=1.01), "agrees"),
    ],
)
def test_a_parameter_of_a_later_step_is_judged_by_its_update(gradient: float, update: Update, expected: str) -> None:
    """The noise of the gradient explains how differently the two parameters were updated."""
    _first, second = judge(training(0.0, gradient), training(1e-4, number=1), updates=update, right=(1,))
    assert status(second)[0] == expected and not second.untold
    if expected == "entered":
        [external] = conclude_step(training(1e-4, number=1), second).externals
        assert (external.kind, external.name, external.step) == ("parameter", "fc.weight", 1)


def test_a_scaled_parameter_is_found_however_noisy_its_gradients_are() -> None:
    scaled = training(0.01, number=1, slope=1.01, slope_z=100.0)
    assert status(judge(training(0.0, 0.02), scaled, updates=ALIKE, right=(1,))[1])[0] == "entered"


@pytest.mark.parametrize(
    ("update", "figure", "measured"),
    [(ALIKE._replace(off=0.5), "different", 2048.0), (ALIKE._replace(factor=1.25), "slope", 0.25)],
)
def test_an_update_that_differs_is_reported_with_the_figure_that_decided(
    update: Update, figure: str, measured: float
) -> None:
    later = training(1e-4, number=1)
    [found] = [judge(training(0.0, ROUNDED), later, updates=update, right=(1,))[1]]
    entered = conclude_step(later, found).entered
    assert entered is not None and entered.divergence.row is not None
    row = entered.divergence.row
    assert (row.judged_by, row.measured) == (figure, measured) and row.measured > row.allowed


def test_a_slope_without_the_noise_is_what_counts() -> None:
    scaled = training(0.01, number=1, slope=1.01, slope_z=100.0)
    before = training(0.0, ROUNDED)
    assert status(judge(before, scaled, updates=ALIKE._replace(slope=1.0), right=(1,))[1])[0] == "agrees"
    assert status(judge(before, scaled, updates=ALIKE._replace(slope=1.01), right=(1,))[1])[0] == "entered"


def test_from_gradients_with_equal_bits_no_element_may_be_updated_otherwise() -> None:
    for gradient, expected in ((ROUNDED, "agrees"), (0.0, "entered")):
        second = judge(training(0.0, gradient), training(1e-4, number=1), updates=ALIKE, right=(1,))[1]
        assert status(second)[0] == expected
        assert second.unseen_updates == 1


@pytest.mark.parametrize(
    ("gradient", "gain", "usual", "others", "expected"),
    [
        (ROUNDED, 100.0, 1.0, 9, "entered"),
        (ROUNDED, 20.0, 1.0, 9, "agrees"),
        (ROUNDED, 100.0, 50.0, 9, "agrees"),
        (ROUNDED, 100.0, 1.0, 3, "agrees"),
        (0.0, 100.0, 1.0, 0, "entered"),
    ],
)
def test_one_parameter_whose_update_is_much_further_off_than_its_gradient(
    gradient: float, gain: float, usual: float, others: int, expected: str
) -> None:
    """Noise of 2 % in a gradient that nobody recorded moves an update of Adam by far less than a hundredth."""
    alike = Update(off=0.0, factor=1.0, size=0.01, gain=usual)
    judge, later = RankJudge(POLICIES["noise-aware"]), training(1e-6, number=1)
    judge.judge(training(0.0, gradient))
    [question] = judge.judge(later).questions
    answers = {-1 - at: alike for at in range(others)} | {question.row: alike._replace(gain=gain)}
    found = judge.judge_again(later, Known({1: RIGHT}, answers))
    assert status(found)[0] == expected


def test_the_gradient_of_zeros_is_that_of_their_own_call() -> None:
    """Two biases of zeros hold the same bytes, and have gradients of their own."""
    zeros = {"baseline_max": 0.0, "baseline_min": 0.0, "grad": True, "key": "zeros"}
    first, second = (
        call(f"{LINEAR}.{at}.forward", row("input.0"), row("input.1", **zeros), row("output.0")) for at in (0, 1)
    )
    backs = [
        call(f"{LINEAR}.{at}.backward", row("input.0"), row("output.1", error, key=f"gradient {at}"))
        for at, error in ((1, ROUNDED), (0, 0.0))
    ]
    later = step(
        call(f"{LINEAR}.0.forward", row("input.0"), row("output.0")),
        call(f"{LINEAR}.1.forward", row("input.0"), row("input.1", 1.0, key="bias", grad=True), row("output.0")),
        step=1,
    )
    judge = RankJudge(POLICIES["noise-aware"])
    judge.judge(step(first, second, *backs))
    assert [each.gradients for each in judge.judge(later).questions] == [
        ((f"{LINEAR}.1.backward", f"{LINEAR}.1.backward", 0, "output.1"),)
    ]


def test_without_gradients_an_update_of_another_kind_cannot_be_told() -> None:
    steps = training(0.0, recorded=False), training(1e-3, number=1, recorded=False)
    other = judge(*steps, updates=ALIKE._replace(off=0.5))[1]
    assert status(other)[0] == "agrees"
    assert [each.origin for each in other.untold] == ["its gradients and its update were not recorded"]
    assert not judge(*steps, updates=ALIKE)[1].untold


def test_without_values_the_norms_of_a_parameter_may_part_a_little() -> None:
    def later(ratio: float) -> Measured:
        norm = {"candidate_norm": 64.0 * ratio, "norm_ratio": ratio, "basis": STATISTICS}
        return training(0.0, number=1, **norm)

    assert status(judge(training(0.0), later(1.001))[1])[0] == "agrees"
    assert status(judge(training(0.0), later(1.01))[1])[0] == "entered"


def test_without_values_a_norm_that_its_gradients_do_not_explain_is_unclear() -> None:
    def later(ratio: float) -> Measured:
        norm = {"candidate_norm": 64.0 * ratio, "norm_ratio": ratio, "basis": STATISTICS}
        return training(0.0, number=1, **norm)

    for ratio, told in ((1 + 1e-7, True), (1 + 1e-6, False)):
        second = judge(training(0.0), later(ratio))[1]
        assert status(second)[0] == "agrees" and bool(second.untold) is not told


@pytest.mark.parametrize(("error", "expected"), [(5e-7, "agrees"), (1e-5, "untold"), (1e-2, "entered")])
def test_a_result_of_calls_that_were_not_recorded_may_have_noise(error: float, expected: str) -> None:
    """Only one module was recorded: what the calls before it made on two devices is no parameter, and is rounded otherwise."""
    weight = row("input.1", grad=True, role="parameter fc.weight")
    given = row("input.0", error, grad=True, key="given")
    [found] = judge(step(call(f"{LINEAR}.0.forward", given, weight, row("output.0", error, key="y"), module="fc")))
    assert [each.kind for each in found.untold] == (["input"] if expected == "untold" else [])
    assert status(found) == ["entered" if expected == "entered" else "agrees"]


def test_a_parameter_changed_after_its_recorded_update_enters() -> None:
    update = call("Tensor.add_.0.forward", row("input.0"), row("output.0", ROUNDED, key=("new a", "new b")))
    use = call(f"{LINEAR}.0.forward", row("input.0"), row("input.1", WRONG, key=("new a", "x"), grad=True), module="fc")
    _first, second = judge(step(update), step(use, step=1))
    assert status(second) == ["entered"]
    assert second.entering[0].kind == "parameter"
    assert second.entering[0].origin == "Tensor.add_.0.forward, which made it in the step before, agrees"


def test_data_that_was_equal_before_must_stay_equal() -> None:
    def read(error: float, number: int) -> Measured:
        return step(
            call(f"{LINEAR}.0.forward", row("input.0"), row("output.0", 1e-2 * ROUNDED, key=f"y {number}")),
            call(f"{GELU}.0.forward", row("input.0", error, key=f"data {number}"), row("output.0", error)),
            step=number,
        )

    assert status(judge(read(0.0, 0), read(3e-7, 1))[1])[1] == "entered"
    whole = step(call(f"{GELU}.0.forward", row("input.0", dtype="int64", different=1, max_abs=1.0), row("output.0")))
    assert [VERDICTS[code] for code in judge(whole)[0].verdict] == ["diverges", "agrees"]


@pytest.mark.parametrize(("why", "expected"), [(None, "entered"), (Unmeasured.UNRECORDED, "agrees")])
def test_a_gradient_that_was_not_measured_where_it_was_made_may_have_noise(
    why: Unmeasured | None, expected: str
) -> None:
    def update(error: float, number: int) -> Measured:
        return step(
            call(f"{LINEAR}.0.forward", row("input.0"), row("output.0", ROUNDED, key=f"y {number}")),
            call(f"{LINEAR}.0.backward", row("input.0"), row("output.1", why=why)),
            call(
                "Tensor.lerp_.0.forward",
                row("input.0"),
                row("input.1", error, key=f"gradient {number}"),
                row("output.0"),
            ),
            step=number,
        )

    assert status(judge(update(0.0, 0), update(3e-7, 1))[1])[2] == expected


def test_data_of_the_step_before_is_recognised() -> None:
    def read(key: Any, error: float, number: int) -> Measured:
        return step(call(f"{GELU}.0.forward", row("input.0", error, key=key), row("output.0", error)), step=number)

    found = judge(read("first", 0.0, 0), read(("second", "first"), 0.5, 1))[1]
    assert found.entering[0].origin == "in the candidate it is still that of the step before"


def test_the_parameter_of_another_layer_is_recognised() -> None:
    one = call(f"{LINEAR}.0.forward", row("input.0"), row("input.1", key="one", grad=True), row("output.0"))
    other = call(
        f"{LINEAR}.1.forward", row("input.0"), row("input.1", 0.9, key=("two", "one"), grad=True), row("output.0", 0.9)
    )
    [found] = judge(step(one, other))
    assert found.entering[0].origin == f"in the candidate it is what input.1 of {LINEAR}.0.forward is in the baseline"


def test_only_tensors_with_the_same_ends_are_looked_at_for_the_same_numbers() -> None:
    """A step with n inputs that nobody made took time with n². One whose numbers were made in another order is found."""
    rows = [row(f"input.{at}", WRONG, baseline_max=at + 1.0, candidate_max=at + 1.0) for at in range(200)]
    made = row("output.0", ROUNDED, baseline_max=7.5, candidate_max=7.5)
    read = row("input.0", ROUNDED, baseline_max=7.5, candidate_max=7.5)
    makers = [call(f"{ADD}.{at}.forward", row("output.0", ROUNDED)) for at in range(200)]
    measured = step(*makers, call(f"{GELU}.0.forward", made), call(f"{GELU}.1.forward", read, *rows[1:]))
    looked_at: list[int] = []

    class Counted(np.ndarray[Any, Any]):
        def __array_finalize__(self, source: Any) -> None:
            looked_at.append(self.size)

    [before] = judge(measured)
    measured.rows.figures["candidate_min"] = measured.rows.figures["candidate_min"].view(Counted)
    [opinions] = judge(measured)
    assert opinions.verdict[201] == before.verdict[201] == VERDICTS.index("agrees")
    assert sum(looked_at) < 20 * len(measured.rows.slot)
