"""Statuses: an error is blamed on the call in which it appears, and on no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorprobe
from tests.builders.runs import Call, Tensor, call, write

RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 32)).astype(np.float32)
W = [RNG.normal(size=(32, 32)).astype(np.float32) / 6 for _ in range(3)]


def chain(*, weights: Any = None, error: Any = None, at: int = 1, dtype: Any = np.float32, x: Any = X) -> list[Call]:
    """Three linear layers; `error` is applied to the result of layer `at`."""
    calls, value = [], x.astype(dtype)
    for number, weight in enumerate(weights or W):
        made = (value.astype(np.float64) @ weight.astype(np.float64).T).astype(dtype)
        if error is not None and number == at:
            made = error(made).astype(dtype)
        calls.append(
            call(
                f"Functional.linear.{number}.forward",
                inputs=[value, Tensor(weight.astype(dtype), grad=True)],
                outputs=[made],
                module=f"layers.{number}",
            )
        )
        value = made
    return calls


def compare(folder: Path, left: Any, right: Any, **options: Any) -> tensorprobe.Result:
    return tensorprobe.compare(write(folder / "a", left), write(folder / "b", right), **options)


def statuses(result: tensorprobe.Result) -> list[str]:
    return [row.status for row in result.rows if row.slot == "output.0"]


@pytest.mark.parametrize(
    "error",
    [
        lambda y: y * 1.001,
        lambda y: y + 0.01,
        lambda y: np.where(y == y.max(), y + 1e-2, y),
        lambda y: np.roll(y, 1, 0),
    ],
    ids=["scaled", "shifted", "one element", "rolled"],
)
def test_the_call_that_introduces_an_error_is_named_and_the_rest_inherits(tmp_path: Path, error: Any) -> None:
    result = compare(tmp_path, chain(), chain(error=error))
    assert statuses(result) == ["agrees", "introduced", "inherited"]
    found = result.divergence
    assert found is not None
    assert (found.call, found.module, found.status, found.inputs) == (
        "Functional.linear.1.forward",
        "layers.1",
        "introduced",
        "identical",
    )
    assert result.exit_code == 1


def test_rounding_that_differs_is_no_divergence(tmp_path: Path) -> None:
    noise = np.random.default_rng(1)
    noisy = chain(error=lambda y: y * (1 + 5e-8 * noise.normal(size=y.shape)), at=0)
    result = compare(tmp_path, chain(), noisy)
    assert result.agrees and result.summary.first_difference is not None
    assert result.summary.first_difference.call == "Functional.linear.0.forward"


def test_errors_that_grow_by_rounding_from_call_to_call_are_no_divergence(tmp_path: Path) -> None:
    def noisy(seed: int) -> list[Call]:
        generator, calls, value = np.random.default_rng(seed), [], X
        for number in range(40):
            exact = value.astype(np.float64) @ W[number % 3].T.astype(np.float64) * 1.02
            made = (exact * (1 + 6e-8 * generator.normal(size=exact.shape))).astype(np.float32)
            calls.append(call(f"Functional.linear.{number}.forward", inputs=[value, W[number % 3]], outputs=[made]))
            value = made
        return calls

    assert compare(tmp_path, noisy(1), noisy(2)).agrees


def test_a_scaled_weight_is_named_though_cosine_is_one(tmp_path: Path) -> None:
    """Cosine is blind to scale: a weight scaled by 1.01 must not pass."""
    scaled = [W[0], W[1] * np.float32(1.01), W[2]]
    result = compare(tmp_path, chain(), chain(weights=scaled))
    assert not result.agrees
    assert [(one.kind, one.name, one.detail) for one in result.summary.externals] == [
        ("parameter", "layers.1.weight", "scaled by 1.01")
    ]
    assert "parameters differ before step 0: layers.1.weight, scaled by 1.01" in str(result)
    assert "introduced" not in statuses(result)


def test_other_data_is_said_to_be_other_data(tmp_path: Path) -> None:
    result = compare(tmp_path, chain(), chain(x=X[::-1]))
    assert [(one.kind, one.slot) for one in result.summary.externals] == [("data", "input.0")]
    assert result.divergence is not None and result.divergence.inputs == "diverge"


@pytest.mark.parametrize("policy", ["seed-2023", "seed-2024"])
def test_the_older_rules_let_a_scale_pass_and_ours_does_not(tmp_path: Path, policy: str) -> None:
    runs = chain(), chain(error=lambda y: y * 1.01)
    assert compare(tmp_path, *runs, policy=policy).agrees
    assert not compare(tmp_path, *runs).agrees


def test_bitwise_names_the_first_bit(tmp_path: Path) -> None:
    flipped = chain(error=lambda y: np.nextafter(y, np.float32(np.inf)), at=2)
    result = compare(tmp_path, chain(), flipped, policy="bitwise")
    assert result.divergence is not None and result.divergence.call == "Functional.linear.2.forward"
    assert compare(tmp_path, chain(), flipped).agrees


def test_a_sum_that_is_zero_but_for_rounding_is_not_blamed(tmp_path: Path) -> None:
    """The gradient of a convolution's bias before batch norm: the sum of numbers that cancel."""
    gradient = RNG.normal(size=(4096,)).astype(np.float32)
    gradient -= gradient.mean()
    forward = call("Functional.conv2d.0.forward", inputs=[X, W[0]], outputs=[gradient])
    runs = [
        [forward, call("Functional.conv2d.0.backward", inputs=[gradient], outputs=[np.float32([noise])])]
        for noise in (3e-6, -5e-6)
    ]
    assert compare(tmp_path, *runs).agrees
    wrong = [runs[0], [forward, call("Functional.conv2d.0.backward", inputs=[gradient], outputs=[np.float32([0.1])])]]
    assert not compare(tmp_path, *wrong).agrees


def test_an_error_of_a_forward_input_is_inherited_by_the_backward(tmp_path: Path) -> None:
    """The gradient of a weight depends on the forward's input, though it is no input of the backward call."""

    def run(x: Any) -> list[Call]:
        return [
            *chain(x=x)[:1],
            call("Functional.linear.0.backward", inputs=[W[0]], outputs=[W[1] * np.float32(x.sum())]),
        ]

    result = compare(tmp_path, run(X), run(X * np.float32(1.1)))
    backward = next(row for row in result.rows if row.direction == "backward" and row.slot == "output.0")
    assert backward.verdict == "diverges" and backward.status in ("inherited", "amplified")


def test_integers_that_differ_on_equal_inputs_are_introduced(tmp_path: Path) -> None:
    runs = [[call("Torch.topk.0.forward", inputs=[X], outputs=[np.array(index)])] for index in ([3, 1], [3, 2])]
    assert statuses(compare(tmp_path, *runs)) == ["introduced"]


def test_a_decision_that_noise_turned_is_amplified_and_no_alarm(tmp_path: Path) -> None:
    noisy = np.nextafter(X, np.float32(np.inf))
    maker = [call("Functional.linear.0.forward", inputs=[W[0]], outputs=[value]) for value in (X, noisy)]
    runs = [
        [maker[at], call("Torch.topk.0.forward", inputs=[value], outputs=[np.array(index)])]
        for at, (value, index) in enumerate(((X, [3, 1]), (noisy, [3, 2])))
    ]
    result = compare(tmp_path, *runs)
    assert result.agrees and statuses(result) == ["agrees", "amplified"]


def test_nan_that_only_one_side_has_is_introduced_where_it_is_born(tmp_path: Path) -> None:
    def spoil(y: Any) -> Any:
        y[3, 4] = np.nan
        return y

    result = compare(tmp_path, chain(), chain(error=spoil))
    assert result.divergence is not None
    assert (result.divergence.call, result.divergence.place) == ("Functional.linear.1.forward", [3, 4])


def test_half_precision_sums_in_half_precision_are_seen(tmp_path: Path) -> None:
    """A product that is right but for its rounding differs in few elements; one accumulated in float16 in most."""
    a, b = (RNG.normal(size=(64, 64)).astype(np.float16) for _ in range(2))
    exact = a.astype(np.float64) @ b.astype(np.float64)
    poor = np.zeros((64, 64), np.float16)
    for k in range(64):
        poor = (poor + a[:, k, None] * b[None, k]).astype(np.float16)
    fine = (exact * (1 + 1e-7 * RNG.normal(size=exact.shape))).astype(np.float16)
    runs = {
        name: [call("Torch.matmul.0.forward", inputs=[a, b], outputs=[value])]
        for name, value in (("right", exact.astype(np.float16)), ("fine", fine), ("poor", poor))
    }
    assert compare(tmp_path, runs["right"], runs["fine"]).agrees
    assert not compare(tmp_path, runs["right"], runs["poor"]).agrees


def test_moving_values_must_not_change_a_bit(tmp_path: Path) -> None:
    moved = np.nextafter(X, np.float32(np.inf))
    runs = [[call("Tensor.reshape.0.forward", inputs=[X], outputs=[value])] for value in (X, moved)]
    assert statuses(compare(tmp_path, *runs)) == ["introduced"]


def test_errors_are_followed_from_step_to_step(tmp_path: Path) -> None:
    """A weight that step 0 spoiled is an inherited error in step 1, not a parameter that differs from the start."""
    spoiled = W[0] * np.float32(1.1)
    update = [call("Torch._foreach_add_.0.forward", inputs=[W[0]], outputs=[made]) for made in (W[1], W[1] + spoiled)]
    runs = [
        {(0, 0): [update[at]], (1, 0): chain(weights=[made, W[1], W[2]])}
        for at, made in enumerate((W[1], W[1] + spoiled))
    ]
    result = compare(tmp_path, *runs)
    assert result.divergence is not None
    assert (result.divergence.step, result.divergence.call) == (0, "Torch._foreach_add_.0.forward")
    assert not result.summary.externals
    assert result.summary.statuses["introduced"] == 1


def test_an_error_without_a_recorded_cause_enters_with_its_call(tmp_path: Path) -> None:
    wrong = [
        call("Functional.linear.0.backward", inputs=[X * scale], outputs=[W[0] * scale])
        for scale in (np.float32(1), np.float32(1.5))
    ]
    result = compare(tmp_path, wrong[:1], wrong[1:])
    assert result.divergence is not None and result.divergence.inputs == "diverge"
    assert "the difference enters here with input.0" in str(result)


def test_memory_that_is_filled_bit_by_bit_is_not_blamed_for_what_stood_there(tmp_path: Path) -> None:
    """torch.empty, then two assignments: what is not yet written to differs from run to run."""

    def run(seed: int) -> list[Call]:
        garbage = np.random.default_rng(seed).integers(0, 2**60, size=8)
        half, whole = garbage.copy(), np.arange(8)
        half[:4] = whole[:4]
        slots = {"input.0": garbage, "output.changed.0": half}
        return [
            call("Torch.empty.0.forward", outputs=[Tensor(garbage, skipped="memory not yet initialised")]),
            {"name": "Tensor.__setitem__.0.forward", "slots": slots},
            {"name": "Tensor.__setitem__.1.forward", "slots": {"input.0": half, "output.changed.0": whole}},
            call("Tensor.add.0.forward", inputs=[whole], outputs=[whole + 1]),
        ]

    result = compare(tmp_path, run(1), run(2))
    assert result.agrees and not result.summary.externals
    assert result.summary.statuses["introduced"] == 0


def test_a_policy_of_limits_names_the_parameters_that_differ_too(tmp_path: Path) -> None:
    scaled = [W[0], W[1] * np.float32(1.01), W[2]]
    result = compare(tmp_path, chain(), chain(weights=scaled), policy="bitwise")
    assert [one.name for one in result.summary.externals] == ["layers.1.weight"]
    assert result.summary.statuses["introduced"] == 0


@pytest.mark.parametrize(("mode", "expected"), [("bare summary", "agrees"), ("summary", "introduced")])
def test_sums_of_the_same_numbers_differ_in_their_last_bits(tmp_path: Path, mode: str, expected: str) -> None:
    """Another order is all that a device needs for it. A digest that differs says more than statistics that do not."""
    for number in range(5):
        shuffled = np.random.default_rng(number).permutation(X.ravel()).reshape(X.shape)
        runs = [
            write(tmp_path / f"{side}{number}", [call("Tensor.clone.0.forward", inputs=[X], outputs=[made])], mode=mode)
            for side, made in (("a", X), ("b", shuffled))
        ]
        assert statuses(tensorprobe.compare(*runs)) == [expected]
