"""What would make the tool lie: say that runs agree when they do not, or blame a call that is right.

Runs are made by hand, or recorded and then changed in one place, so that what is true is known beforehand.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorprobe
from tensorprobe.errors import CannotCompare
from tensorprobe.record import Run
from tests.builders.runs import Call, Tensor, call, write
from tests.taps import tiny

Array = Any
RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 32)).astype(np.float32)
W = (RNG.normal(size=(32, 32)) / 6).astype(np.float32)
UNWRITTEN = "memory not yet initialised"


def compare(
    folder: Path, left: Any, right: Any, *, modes: tuple[str, str] = ("tensor", "tensor"), **options: Any
) -> tensorprobe.Result:
    runs = [
        write(folder / name, calls, mode=mode) for name, calls, mode in zip("ab", (left, right), modes, strict=True)
    ]
    return tensorprobe.compare(*runs, **options)


# Every op of two trainings: an error in any output of any call is blamed on that call.


def train(out: Path, make: Callable[[], torch.nn.Module], data: torch.Tensor, level: str) -> Run:
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with tensorprobe.capture(out, model=model, level=level, mode="tensor"):
        model(data).sum().backward()
        optimizer.step()
    return tensorprobe.open_run(out)


def with_errors(run: Run, direction: str, error: Callable[[Array], Array] | None) -> list[Call]:
    """The calls of a run; `error` changes everything that calls of that direction have made, and nothing that they were given."""
    calls = []
    for each in run.calls(step=0, rank=0):
        made = ("output", "parameters") if direction == "backward" else ("output",)
        slots = {}
        for slot in each.slots:
            if slot.skipped is not None:
                continue
            value = slot.numpy().copy()
            if (
                error is not None
                and each.direction == direction
                and slot.side in made
                and value.dtype.kind == "f"
                and value.size
            ):
                value = error(value).astype(value.dtype)
            slots[slot.name] = Tensor(value, dtype=slot.dtype, grad=slot.grad)
        calls.append(
            {"name": each.name, "level": each.level, "module": each.module, "parent": each.parent, "slots": slots}
        )
    return calls


def scaled(value: Array) -> Array:
    return value * np.float32(1.01)


def one_element_wrong(value: Array) -> Array:
    """The greatest element that is no mask, off by 5 %."""
    flat = value.reshape(-1)
    place = np.abs(np.where(np.isfinite(flat) & (np.abs(flat) < 1e6), flat, 0)).argmax()
    flat[place] *= 1.05
    return value


CANCELLED = {
    ("Functional.conv2d.0.backward", "output.2"),
    ("Aten.convolution_backward.default.1.backward", "output.2"),
    ("Module.conv1.Conv2d.backward.0", "parameters.bias"),
}
"""The gradient of a convolution's bias before batch norm is zero but for rounding: no error of it can be seen."""


@pytest.mark.parametrize("error", [scaled, one_element_wrong], ids=["scaled", "one element"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("level", ["api", "module", "aten"])
@pytest.mark.parametrize("model", ["gpt", "cnn"])
def test_an_error_in_any_output_of_any_call_is_blamed_on_that_call(
    model: str, level: str, direction: str, error: Callable[[Array], Array], tmp_path: Path
) -> None:
    make, data = {"gpt": (tiny.TiedGPT, tiny.tokens()), "cnn": (tiny.Residual, tiny.images())}[model]
    run = train(tmp_path / "run", make, data, level)
    result = compare(tmp_path, with_errors(run, direction, None), with_errors(run, direction, error))
    wrong = [
        row
        for row in result.rows
        if row.different > 0 and row.side != "input" and (row.call, row.slot) not in CANCELLED
    ]
    assert len({row.call for row in wrong}) >= 5
    blamed = ("introduced",)
    around = ("introduced", "inherited")  # the whole model: what went wrong inside it may be blamed instead
    missed = [
        f"{row.call} {row.slot}: {row.verdict}, {row.status}; {row.judged_by} {row.measured:.2g}, allowed {row.allowed:.2g}"
        for row in wrong
        if row.verdict != "diverges"
        or row.status not in (around if row.level == "module" and not row.module else blamed)
    ]
    assert missed == []


def test_a_wrong_weight_gradient_of_a_module_is_no_agreement(tmp_path: Path) -> None:
    """In a backward call `parameters` are what it makes: the gradients of the weights."""
    runs = [
        [
            call(
                "Module.stem.Linear.forward.0",
                level="module",
                module="stem",
                inputs=[X],
                outputs=[X @ W.T],
                parameters={"weight": W},
            ),
            call(
                "Module.stem.Linear.backward.0",
                level="module",
                module="stem",
                inputs=[X],
                parameters={"weight": np.float32(scale) * (X.T @ X)},
            ),
        ]
        for scale in (1, 3)
    ]
    found = compare(tmp_path, *runs).divergence
    assert found is not None
    assert (found.call, found.status, found.inputs) == ("Module.stem.Linear.backward.0", "introduced", "identical")


# Large numbers beside small ones do not excuse errors of the small ones.


def softmax(scores: Array) -> Array:
    powers = np.exp((scores - scores.max(-1, keepdims=True)).astype(np.float64))
    return (powers / powers.sum(-1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("mask", [-1e9, float(np.finfo(np.float32).min), -np.inf, -1e4])
def test_a_mask_does_not_excuse_an_error_of_softmax(mask: float, tmp_path: Path) -> None:
    scores = RNG.normal(size=(4, 16, 16)).astype(np.float32)
    scores[:, np.triu(np.ones((16, 16), bool), 1)] = mask
    made = softmax(scores)
    runs = [
        [call("Functional.softmax.0.forward", inputs=[scores], outputs=[value])]
        for value in (made, made * np.float32(1.05))
    ]
    result = compare(tmp_path, *runs)
    assert result.divergence is not None, f"allowed {result.rows[1].allowed:.2g}"


@pytest.mark.parametrize("mask", [-1e9, float(np.finfo(np.float32).min), -np.inf])
def test_a_mask_does_not_excuse_an_error_of_the_sum_with_it(mask: float, tmp_path: Path) -> None:
    scores = RNG.normal(size=(4, 16, 16)).astype(np.float32)
    hidden = np.where(np.triu(np.ones((16, 16), bool), 1), np.float32(mask), np.float32(0))
    wrong = np.where(hidden == 0, scores * np.float32(1.5), scores + hidden)
    runs = [
        [call("Tensor.add.0.forward", inputs=[scores, hidden], outputs=[value])] for value in (scores + hidden, wrong)
    ]
    assert not compare(tmp_path, *runs).agrees


def test_one_large_element_does_not_excuse_errors_of_all_others(tmp_path: Path) -> None:
    """An outlier, as activations of large models have them."""
    value = X.copy()
    value[0, 0] = 1e5
    wrong = value * np.float32(1.01)
    wrong[0, 0] = value[0, 0]
    runs = [[call("Functional.gelu.0.forward", inputs=[value], outputs=[made])] for made in (value, wrong)]
    assert not compare(tmp_path, *runs).agrees


def test_a_backward_aten_op_is_not_linked_to_the_forward_op_of_the_same_number(tmp_path: Path) -> None:
    """At level aten both directions are counted apart: operands of number 0 forward excuse nothing of number 0 backward."""
    large = X * np.float32(1e8)
    runs = [
        [
            call("Aten.mm.default.0.forward", level="aten", inputs=[large, W], outputs=[large @ W.T]),
            call("Aten.mm.default.0.backward", level="aten", inputs=[X, W], outputs=[(X @ W.T) * np.float32(scale)]),
        ]
        for scale in (1, 1.01)
    ]
    found = compare(tmp_path, *runs).divergence
    assert found is not None and found.call == "Aten.mm.default.0.backward"


# Memory that nobody has written to does not excuse what is written to it.


def through_a_buffer(given: Array, *, stored: Array | None = None, seed: int = 0) -> list[Call]:
    """torch.empty, copy_ into it, a linear layer with it."""
    garbage = np.random.default_rng(seed).normal(size=given.shape).astype(np.float32)
    held = given if stored is None else stored
    return [
        call("Torch.empty.0.forward", outputs=[Tensor(garbage, skipped=UNWRITTEN)]),
        {"name": "Tensor.copy_.0.forward", "slots": {"input.0": garbage, "input.1": given, "output.changed.0": held}},
        call("Functional.linear.0.forward", inputs=[held, Tensor(W, grad=True)], outputs=[held @ W.T]),
    ]


def test_the_same_through_a_buffer_agrees(tmp_path: Path) -> None:
    assert compare(tmp_path, through_a_buffer(X, seed=1), through_a_buffer(X, seed=2)).agrees


def test_other_data_that_goes_through_a_buffer_is_seen(tmp_path: Path) -> None:
    result = compare(tmp_path, through_a_buffer(X, seed=1), through_a_buffer(X * 2, seed=2))
    assert not result.agrees
    assert result.summary.statuses["introduced"] == 0


def test_a_copy_into_a_buffer_that_goes_wrong_is_seen(tmp_path: Path) -> None:
    damaged = X.copy()
    damaged[3, 4] += 1
    result = compare(tmp_path, through_a_buffer(X, seed=1), through_a_buffer(X, stored=damaged, seed=2))
    assert not result.agrees


def test_weights_changed_in_place_are_found_despite_allocations_of_their_shape(tmp_path: Path) -> None:
    def run(weight: Array) -> list[Call]:
        return [
            call("Torch.empty.0.forward", outputs=[Tensor(weight, skipped=UNWRITTEN)]),
            {"name": "Tensor.mul_.0.forward", "slots": {"input.0": weight, "output.changed.0": weight * 2}},
            call("Functional.linear.0.forward", inputs=[X, weight * 2], outputs=[X @ (weight * 2).T]),
        ]

    assert not compare(tmp_path, run(W), run(W * 3)).agrees


def test_no_call_agrees_whose_output_differs_and_was_not_judged(tmp_path: Path) -> None:
    result = compare(tmp_path, through_a_buffer(X, seed=1), through_a_buffer(X * 2, seed=2))
    for row in result.rows:
        if row.side == "output" and row.relative_l2 > 0.5:
            assert row.status != "agrees", row.call


# Names and numbers lead nowhere.


@pytest.mark.parametrize("path", ["lm", "backward_lm", "encoder.backward", "forward.backward.cell"])
def test_a_module_may_be_called_backward(path: str, tmp_path: Path) -> None:
    """The gradient of the weight differs because the data do: the backward inherits it, whatever the module is called."""

    def run(given: Array) -> list[Call]:
        more: dict[str, Any] = {"level": "module", "module": path}
        return [
            call(f"Module.{path}.Linear.forward.0", inputs=[given], outputs=[given @ W.T], **more),
            call(f"Module.{path}.Linear.backward.0", inputs=[X], outputs=[X @ W, X.T @ given], **more),
        ]

    result = compare(tmp_path, run(X), run(X * 2))
    found = result.divergence
    assert found is not None and found.call == f"Module.{path}.Linear.forward.0"
    assert result.summary.statuses["introduced"] == 0


@pytest.mark.parametrize("recorded", [(3,), (0, 2, 3, 5), (4, 5)])
@pytest.mark.parametrize("swapped", [False, True], ids=["", "swapped"])
def test_a_call_is_paired_with_the_call_of_its_number_when_others_were_not_recorded(
    recorded: tuple[int, ...], swapped: bool, tmp_path: Path
) -> None:
    """Numbers with holes in them (a selection, a damaged line) have not shifted: they say which call it is."""
    values = [RNG.normal(size=(8, 8)).astype(np.float32) for _ in range(6)]
    whole = [
        call(f"Functional.linear.{at}.forward", inputs=[value], outputs=[value @ value])
        for at, value in enumerate(values)
    ]
    runs = [whole, [whole[at] for at in recorded]]
    result = compare(tmp_path, *(runs[::-1] if swapped else runs))
    assert {(row.call, row.candidate_call) for row in result.rows} == {
        (f"Functional.linear.{at}.forward",) * 2 for at in recorded
    }
    assert result.summary.statuses["agrees"] == len(recorded)


def test_tensors_without_digest_are_not_taken_for_those_of_another_step(tmp_path: Path) -> None:
    """Where only offsets tell tensors apart, the offsets of two steps are different places."""
    near = X.copy()
    near[0, 0] = np.nextafter(near[0, 0], np.float32(9))
    first = [[call("Functional.gelu.0.forward", inputs=[], outputs=[value])] for value in (X, near)]
    second = [[call("Functional.gelu.0.forward", inputs=[value], outputs=[value])] for value in (X, X * 2)]
    runs = []
    for name, one, other in zip("ab", first, second, strict=True):
        root = write(tmp_path / name, {(0, 0): one, (1, 0): other})
        for file in root.glob("step*/rank0/calls.jsonl"):
            _forget(file)
        runs.append(root)
    result = tensorprobe.compare(*runs)
    assert result.divergence is not None and result.divergence.step == 1
    assert result.divergence.inputs == "diverge" and result.summary.statuses["introduced"] == 0


def test_rounding_is_no_divergence_where_only_values_were_recorded(tmp_path: Path) -> None:
    """The sizes that noise is judged by are those of the values, when no summary stands beside them."""
    given = X * np.float32(100)
    noisy = (given * (1 + 4e-8 * RNG.normal(size=X.shape))).astype(np.float32)
    runs = []
    for name, value in (("a", given), ("b", noisy)):
        runs.append(write(tmp_path / name, [call("Functional.gelu.0.forward", inputs=[given], outputs=[value])]))
    assert tensorprobe.compare(*runs).agrees
    for root in runs:
        _forget(root / "step0" / "rank0" / "calls.jsonl")
    assert tensorprobe.compare(*runs).agrees


def _forget(file: Path) -> None:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        for slot in line["slots"]:
            del slot["digest"], slot["summary"]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_two_layers_called_in_the_other_order_are_not_said_to_have_other_weights(tmp_path: Path) -> None:
    weights = {"first": W, "second": np.ascontiguousarray(W.T)}

    def run(order: tuple[str, str]) -> list[Call]:
        calls, value = [], X
        for number, name in enumerate(order):
            made = value @ weights[name].T
            inputs = [value, Tensor(weights[name], grad=True)]
            calls.append(call(f"Functional.linear.{number}.forward", inputs=inputs, outputs=[made], module=name))
            value = made
        return calls

    result = compare(tmp_path, run(("first", "second")), run(("second", "first")))
    assert not result.agrees
    assert "parameters differ" not in str(result)


# What was not measured did not agree.


def assert_no_agreement(compared: Callable[[], tensorprobe.Result]) -> None:
    """The runs cannot be compared, or something diverges."""
    try:
        result = compared()
    except CannotCompare:
        return
    assert not result.agrees, str(result)


def test_a_run_whose_tensors_are_lost_does_not_agree(tmp_path: Path) -> None:
    a = write(tmp_path / "a", [call("Functional.gelu.0.forward", inputs=[X], outputs=[X])])
    b = write(tmp_path / "b", [call("Functional.gelu.0.forward", inputs=[X + 1], outputs=[X * 3])])
    (b / "step0" / "rank0" / "tensors.bin").write_bytes(b"")
    assert_no_agreement(lambda: tensorprobe.compare(a, b))


@pytest.mark.parametrize("policy", ["seed-2023", "seed-2024"])
def test_a_policy_that_can_judge_nothing_does_not_agree(policy: str, tmp_path: Path) -> None:
    """Cosine and greatest error need values; statistics have neither."""
    runs = [[call("Functional.gelu.0.forward", inputs=[X], outputs=[X * np.float32(scale)])] for scale in (1, 3)]
    assert_no_agreement(lambda: compare(tmp_path, *runs, modes=("summary", "summary"), policy=policy))


def test_integers_with_other_digests_differ_whatever_their_statistics(tmp_path: Path) -> None:
    """The same indices in another order: maximum, minimum, mean and norm are equal, and the digests are not."""
    runs = [
        [call("Torch.argsort.0.forward", inputs=[X], outputs=[np.array(order)])]
        for order in ([0, 1, 2, 3], [3, 2, 1, 0])
    ]
    result = compare(tmp_path, *runs, modes=("summary", "summary"))
    assert not result.agrees


def test_rows_in_another_order_are_seen_by_digest_where_values_are_only_moved(tmp_path: Path) -> None:
    value = np.arange(64, dtype=np.float32).reshape(8, 8)
    runs = [[call("Functional.embedding.0.forward", inputs=[value], outputs=[made])] for made in (value, value[::-1])]
    assert not compare(tmp_path, *runs, modes=("summary", "summary")).agrees


@pytest.mark.parametrize("mode", ["summary", "bare summary"])
def test_bitwise_on_statistics_sees_other_bits_or_says_that_it_cannot(mode: str, tmp_path: Path) -> None:
    value = np.arange(64, dtype=np.float32).reshape(8, 8)
    runs = [[call("Functional.gelu.0.forward", inputs=[value], outputs=[made])] for made in (value, value[::-1])]
    result = compare(tmp_path, *runs, modes=(mode, mode), policy="bitwise")
    assert not result.agrees or any("weaker" in note for note in result.summary.notes)
    if mode == "summary":
        assert not result.agrees


def test_nan_everywhere_on_one_side_only_is_a_divergence(tmp_path: Path) -> None:
    runs = [[call("Functional.gelu.0.forward", inputs=[X], outputs=[value])] for value in (X, np.full_like(X, np.nan))]
    assert not compare(tmp_path, *runs).agrees
    assert not compare(tmp_path, *runs[::-1]).agrees


@pytest.mark.parametrize(("one", "other"), [(0.0, 1e-3), (1e-3, 0.0), (0.0, -0.0)])
def test_zeros_against_numbers(one: float, other: float, tmp_path: Path) -> None:
    runs = [
        [call("Functional.gelu.0.forward", inputs=[X], outputs=[np.full(64, value, np.float32)])]
        for value in (one, other)
    ]
    assert compare(tmp_path, *runs).agrees == (one == other)


def test_a_second_error_does_not_hide_the_first(tmp_path: Path) -> None:
    def run(errors: dict[int, float]) -> list[Call]:
        calls, value = [], X
        for number in range(6):
            made = ((value @ W.T) * np.float32(errors.get(number, 1))).astype(np.float32)
            calls.append(call(f"Functional.linear.{number}.forward", inputs=[value, W], outputs=[made]))
            value = made
        return calls

    for errors in ({2: 1.001, 4: 3.0}, {1: 3.0, 2: 1 / 3}):
        found = compare(tmp_path / str(len(errors) + min(errors)), run({}), run(errors)).divergence
        assert found is not None and found.call == f"Functional.linear.{min(errors)}.forward"
