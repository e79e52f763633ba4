"""Random inputs have the recorded dtype, shape, stride and range, depend on nothing but the names, and mean something to the op."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tensorprobe.model import Slot, Summary
from tensorprobe.replay.functions import CannotReplay
from tensorprobe.replay.inputs import draw, make_inputs
from tensorprobe.replay.layout import laid_out, room
from tests.checks.planting import record, record_one


def slot(dtype: str, shape: tuple[int, ...], low: float, high: float, **more: object) -> Slot:
    summary = Summary(float(high), float(low), 0.0, 1.0, 0, int(more.pop("inf", 0)))  # type: ignore[call-overload]
    return Slot(name="input.0", dtype=dtype, shape=shape, summary=summary, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8"])
def test_values_lie_in_the_recorded_range_and_its_ends_are_first_and_last(dtype: str) -> None:
    found = draw(slot(dtype, (5, 7), 2.0, 6.0), "a call:input.0")
    assert found.dtype is getattr(torch, dtype) and found.shape == (5, 7)
    assert found.flatten()[0] == found.min() == 2 and found.flatten()[-1] == found.max() == 6
    assert found.unique().numel() > 3


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "complex64", "int64", "uint8", "bool"])
def test_a_range_that_the_dtype_cannot_hold_is_cut(dtype: str) -> None:
    assert draw(slot(dtype, (2, 3), -0.5, 1e308), "a call:input.0").shape == (2, 3)


def test_the_same_names_give_the_same_values_and_others_do_not() -> None:
    one, again, other = (draw(slot("float32", (4, 4), -1, 1), key) for key in ("a", "a", "b"))
    assert torch.equal(one, again) and not torch.equal(one, other)


def test_drawing_leaves_the_generator_of_the_program_alone() -> None:
    before = torch.get_rng_state()
    draw(slot("float32", (4, 4), -1, 1), "a")
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("stride", [(1, 4), (0, 1), (12, 3), (1, 1)])
def test_strides_are_those_of_the_record(stride: tuple[int, int]) -> None:
    found = draw(slot("float32", (4, 4), -1, 1, stride=stride), "a")
    assert found.stride() == stride
    assert found.untyped_storage().nbytes() == 4 * room((4, 4), stride)


def test_one_value_throughout_is_given_a_range_that_begins_there() -> None:
    """In a weight that is all ones no kernel can be seen to take the wrong element."""
    for value in (1.0, 0.0, -2.0):
        found = draw(slot("float32", (64,), value, value), "a")
        assert found.unique().numel() > 32 and value in (float(found.min()), float(found.max()))
        assert (found >= 0).all() or value < 0
    assert draw(slot("float32", (1,), 1.0, 1.0), "a").item() == 1.0
    assert draw(slot("int64", (9,), 3, 3), "a").unique().tolist() == [3]


def test_a_mask_keeps_its_infinities_and_leaves_each_row_something() -> None:
    found = draw(slot("float32", (32, 16), float("-inf"), 0.5, inf=256), "a")
    assert 0.2 < float(found.isinf().float().mean()) < 0.6
    assert found.isfinite().any(-1).all() and (found[found.isinf()] < 0).all()


def test_a_range_without_an_inside_gives_its_two_ends() -> None:
    found = draw(slot("float32", (64,), torch.finfo(torch.float32).min, 0.0), "a")
    assert found.unique().numel() == 2


def test_bools_have_the_recorded_share() -> None:
    summary = Summary(1.0, 0.0, 0.9, 1.0)
    found = draw(Slot(name="input.0", dtype="bool", shape=(4000,), summary=summary), "a")
    assert 0.85 < float(found.float().mean()) < 0.95


def test_impossible_tensors_are_refused_before_memory_is_taken() -> None:
    for shape, stride in (((1 << 40,), None), ((2, 2), (1 << 50, 1)), ((2,), (1, 1)), ((-1,), None)):
        with pytest.raises(CannotReplay):
            draw(slot("float32", shape, 0, 1, stride=stride), "a")
    with pytest.raises(CannotReplay, match=r"input\.0: sparse"):
        draw(slot("float32", (2,), 0, 1, skipped="sparse coo tensor"), "a")


def test_values_laid_out_are_the_same_values() -> None:
    values = torch.arange(12.0).view(3, 4)
    for stride in ((4, 1), (1, 3), (8, 2)):
        found = laid_out(values, stride)
        assert found.stride() == stride and torch.equal(found, values)


def test_boundaries_are_sorted(tmp_path: Path) -> None:
    edges, values = torch.arange(10.0), torch.rand(7) * 10
    for program, name in (
        (lambda: torch.bucketize(values, edges), "input.1"),
        (lambda: torch.searchsorted(edges, values), "input.0"),
    ):
        call = record(tmp_path / name, program)[-1]
        found = make_inputs(call, "random")[name]
        assert torch.equal(found, found.sort().values) and found.min() == 0 and found.max() == 9


def test_places_are_written_to_once(tmp_path: Path) -> None:
    index = torch.rand(4, 8).argsort(1)[:, :5]
    call = record_one(tmp_path / "a", lambda: torch.zeros(4, 8).scatter(1, index, torch.rand(4, 5)), "scatter")
    found = make_inputs(call, "random")["input.2"]
    assert all(row.unique().numel() == 5 for row in found) and 0 <= int(found.min()) <= int(found.max()) < 8
    call = record_one(
        tmp_path / "b", lambda: torch.zeros(16).__setitem__(torch.randperm(16)[:9], torch.rand(9)), "setitem"
    )
    assert make_inputs(call, "random")["input.1"].unique().numel() == 9


def test_classes_are_classes_or_left_out(tmp_path: Path) -> None:
    target = torch.randint(0, 10, (64,)).masked_fill(torch.rand(64) < 0.3, -100)
    call = record_one(tmp_path / "run", lambda: F.cross_entropy(torch.randn(64, 10), target), "cross_entropy")
    found = make_inputs(call, "random")["input.1"]
    assert ((found == -100) | (found >= 0)).all() and int(found.max()) <= 9
    assert torch.equal(make_inputs(call, "real")["input.1"], target)


def test_attention_masks_leave_every_row_something(tmp_path: Path) -> None:
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    q = torch.randn(1, 2, 8, 4)
    call = record_one(
        tmp_path / "run", lambda: F.scaled_dot_product_attention(q, q, q, attn_mask=mask), "scaled_dot_product"
    )
    found = make_inputs(call, "random")["input.kwargs.attn_mask"]
    assert found.any(-1).all() and not found.all()


def test_real_values_are_those_of_the_record(tmp_path: Path) -> None:
    x = torch.randn(6, 9)
    call = record_one(tmp_path / "run", lambda: torch.exp(x[:, ::2]), "exp")
    (found,) = make_inputs(call, "real").values()
    assert torch.equal(found, x[:, ::2]) and found.stride() == x[:, ::2].stride()
    found.zero_()
    assert torch.equal(make_inputs(call, "real")["input.0"], x[:, ::2])
