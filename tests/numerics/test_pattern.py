"""The sentence about where two tensors differ, for faults of the simulated device and for noise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorprobe.numerics.pair_view import PairView
from tensorprobe.numerics.pattern import find_pattern
from tensorprobe.numerics.spread import spread_of
from tensorprobe.ops import axis_names
from tensorprobe.report.pattern import pattern_words
from tensorprobe.sim.kinds import KINDS, OpCall

EPS = 2.0**-23


def sentence(baseline: torch.Tensor, candidate: torch.Tensor, op: str = "Functional.softmax", eps: float = EPS) -> str:
    pair = PairView(baseline.numpy(), candidate.numpy(), eps=eps, tiny=2.0**-126)
    return pattern_words(find_pattern(pair, spread_of(pair), axis_names(op, baseline.dim())))


def scores(seed: int = 0) -> torch.Tensor:
    return torch.randn(2, 4, 32, 64, generator=torch.Generator().manual_seed(seed))


FAULTS: list[tuple[str, str, dict[str, Any], str]] = [
    ("columns", "tile", {"rows": 32, "column": 8, "columns": 16, "factor": 1.5},
     "only columns 8-23, in all rows, heads and batches: the candidate is 1.5 times the baseline"),
    ("tile", "tile", {"row": 8, "column": 16, "factor": 0.5},
     "only one tile: rows 8-15 by columns 16-23, in all heads and batches: the candidate is 0.5 times the baseline"),
    ("tail", "tail", {"block": 4},
     "only the last 4 columns (60-63 of axis 3), in all rows, heads and batches: zero in the candidate"),
    ("heads", "tail", {"block": 1, "dim": 1}, "only head 3, in all columns, rows and batches: zero in the candidate"),
    ("one element", "element", {"index": 777}, "only one element, [0, 0, 12, 9]"),
    ("scale", "scale", {"factor": 1.01}, "every element: the candidate is 1.01 times the baseline"),
    ("bias", "bias", {"amount": 0.01}, "every element: the candidate is the baseline plus 0.01"),
    ("shifted row", "roll", {"dim": 2},
     "rows (axis 2) are shifted by 1: the candidate's row i holds the baseline's row i - 1"),
    ("every n-th", "every", {"n": 8, "start": 3},
     "only every 8th column, from 3 on, in all rows, heads and batches: zero in the candidate"),
    ("swapped rows", "swap-rows", {"dim": -2, "first": 3, "second": 4},
     "rows 3 and 4 (axis 2) have changed places"),
    ("rounding", "rounding", {"bits": 7}, "every element: the candidate has only 7 bits of mantissa"),
    ("nan", "nan", {"index": 777}, "only one element, [0, 0, 12, 9]: NaN in the candidate"),
    ("gradient", "gradient", {"factor": 0.9}, "every element: the candidate is 0.9 times the baseline"),
]  # fmt: skip
"""What goes wrong, the kind of the simulated device and its parameters, and what is to be said. A stale rank is tested with four ranks."""


@pytest.mark.parametrize(("kind", "params", "said"), [row[1:] for row in FAULTS], ids=[row[0] for row in FAULTS])
def test_a_fault_of_the_device_is_put_into_words(kind: str, params: dict[str, Any], said: str) -> None:
    right = scores()
    wrong = KINDS[kind](right, **params)
    assert sentence(right, wrong) == said


@pytest.mark.parametrize(
    ("kind", "params", "said"), [row[1:] for row in FAULTS[:5]], ids=[row[0] for row in FAULTS[:5]]
)
def test_a_fault_is_seen_through_rounding_noise(kind: str, params: dict[str, Any], said: str) -> None:
    right = scores()
    wrong = KINDS[kind](right, **params) + torch.randn(right.shape, generator=torch.Generator().manual_seed(1)) * 1e-7
    told = sentence(right, wrong)
    assert told.split(":")[0].split(" (other")[0] == said.split(": zero")[0].split(":")[0].split(" (other")[0]
    assert "other elements differ by at most" in told


def test_a_stale_result_has_no_place_of_its_own() -> None:
    call = OpCall("op", scores, (0,), {})
    KINDS["stale"](call)
    call.args = (1,)
    assert sentence(scores(1), KINDS["stale"](call)) == ""


def test_masked_rows_do_not_hide_that_all_rows_are_meant() -> None:
    future = torch.ones(32, 32).triu(1).bool()
    right = torch.softmax(torch.randn(4, 4, 32, 32).masked_fill(future, float("-inf")), -1)
    told = sentence(right, KINDS["tail"](right, block=4))
    assert told == "only the last 4 columns (28-31 of axis 3), in all rows, heads and batches: zero in the candidate"


def test_elements_that_repeat_in_blocks_are_named() -> None:
    right = torch.randn(16, 64)
    wrong = right.clone()
    for start in range(4, 64, 16):
        wrong[:, start : start + 4] = 0
    assert sentence(right, wrong) == "only columns 4-7 of every 16, in all rows: zero in the candidate"


def test_a_transposed_result_is_named() -> None:
    right = torch.randn(3, 16, 16)
    assert "last two axes transposed" in sentence(right, right.mT.contiguous())


def test_a_scaled_bfloat16_result_is_named_although_it_is_rounded() -> None:
    right = torch.randn(64, 64).bfloat16()
    told = sentence(right.float(), (right * 1.05).bfloat16().float(), eps=2.0**-7)
    assert told.startswith("every element: the candidate is 1.0") and told.endswith("times the baseline")


def test_equal_tensors_and_single_numbers_have_no_pattern() -> None:
    right = scores()
    assert sentence(right, right.clone()) == ""
    assert sentence(torch.tensor([1.0]), torch.tensor([2.0])) == ""
    assert sentence(torch.zeros(0, 4), torch.zeros(0, 4)) == ""


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.sampled_from(
        [(2, 4, 32, 64), (64,), (32, 32), (8, 128), (4, 16, 16), (3, 3), (1, 7), (128, 1), (2, 2, 2, 2)]
    ),
    share=st.sampled_from([1.0, 0.4, 0.1]),
    relative=st.sampled_from([1e-7, 1e-6, 1e-3]),
)
def test_random_noise_has_no_pattern(seed: int, shape: tuple[int, ...], share: float, relative: float) -> None:
    source = np.random.default_rng(seed)
    right = source.standard_normal(shape)
    hit = source.random(shape) < share
    wrong = np.where(hit, right * (1 + relative * source.standard_normal(shape)), right)
    pair = PairView(right, wrong, eps=2.0**-52, tiny=2.0**-1022)
    found = find_pattern(pair, spread_of(pair), axis_names("Torch.add", len(shape)))
    assert found is None or (found.elements and not found.axes)  # a few elements are named one by one


def test_a_tensor_in_many_blocks_gives_the_same_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    right = scores()
    wrong = KINDS["tail"](right, block=4)
    whole = sentence(right, wrong)
    monkeypatch.setattr(PairView.blocks, "__defaults__", (1000,))
    assert sentence(right, wrong) == whole


def test_large_integers_that_float64_cannot_tell_apart_differ() -> None:
    right = np.full((8, 8), 2**60, dtype=np.int64)
    wrong = right.copy()
    wrong[3] += 1
    pair = PairView(right, wrong)
    assert pattern_words(find_pattern(pair, spread_of(pair), ["rows", "columns"])).startswith(
        "only row 3, in all columns"
    )


@pytest.mark.parametrize("dtype", [np.int64, np.float32])
def test_single_numbers_have_one_error(dtype: Any) -> None:
    pair = PairView(np.array(2**53, dtype=dtype), np.array(2**53 if dtype is np.float32 else 2**53 + 1, dtype=dtype))
    (block,) = pair.blocks()
    assert block.error.shape == () and block.error == (0.0 if dtype is np.float32 else 1.0)


def test_real_tensors_are_compared_with_complex_ones_as_if_the_imaginary_part_were_zero() -> None:
    pair = PairView(np.ones((2, 3)), np.full((2, 3), 1 + 2j))
    (block,) = pair.blocks()
    assert pair.shape == block.error.shape == (2, 3, 2)
    assert block.error[..., 0].max() == 0 and block.error[..., 1].min() == 2
