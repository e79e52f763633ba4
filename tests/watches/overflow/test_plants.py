"""What is planted is named: the call, the kind, or that it came in; and what is meant is not blamed."""

from __future__ import annotations

import warnings

import pytest
import torch

from tensorprobe.watches.overflow import OverflowWatch
from tests.watches.overflow.plants import MODEL, PLANTS

HALVES = pytest.mark.needs_torch("2.4", "half precision on the CPU")
IN_HALVES = ("half_attention_overflows", "product_of_large_halves")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[HALVES] if name in IN_HALVES else []) for name in PLANTS])
def test_what_is_planted_is_named(name: str) -> None:
    program, expected = PLANTS[name]
    with torch.no_grad():
        MODEL.weight[0, 0] = float("nan")
    with OverflowWatch(MODEL) as watch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a variance of one number
        program()
    if expected is None:
        assert (watch.first_nonfinite, watch.arrivals) == ([], [])
    elif isinstance(expected, str):
        assert watch.first_nonfinite == []
        assert f"came in: {watch.arrivals[0].what}" == expected
        assert watch.arrivals[0].spread_count > 0
    else:
        assert [(first.call, first.kind) for first in watch.first_nonfinite] == [expected]
        assert watch.arrivals == []
    assert watch.result.exit_code == (0 if expected is None else 1)
