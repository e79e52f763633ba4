"""The one pass over an output: native code, its twins, and what it says of every bit pattern."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorprobe import _fast as fast
from tensorprobe.model.dtypes import DTYPES
from tensorprobe.numerics import _native, summary, twin
from tensorprobe.watches.overflow import OverflowWatch, looker
from tensorprobe.watches.overflow.looker import _alarms
from tests.watches.overflow.plants import PLANTS

NAMES = sorted(summary.LIMITS)
IN_HALVES = pytest.param("half_attention_overflows", marks=pytest.mark.needs_torch("2.4", "half precision on the CPU"))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NAMES), st.integers(0, 200), st.integers(0, 7), st.randoms(use_true_random=False))
def test_kernel_and_twin_give_the_same_bits(name: str, count: int, shift: int, source: Any) -> None:
    dtype = DTYPES[name]
    memory = torch.frombuffer(bytearray(source.randbytes((count + 1) * dtype.itemsize + 8)), dtype=torch.uint8)
    address = memory.data_ptr() + shift
    found = _native.peak(address, count, dtype.code)
    assert found == twin.peak(address, count, dtype.code)
    assert found == summary.peak_at(address, count, dtype)


@pytest.mark.parametrize("name", [name for name in NAMES if "complex" not in name])
def test_peaks_are_ordered_as_magnitudes_are(name: str) -> None:
    dtype = getattr(torch, name)
    limits = summary.LIMITS[name]
    assert summary.greatest_finite(name) == torch.finfo(dtype).max
    assert summary.magnitude(limits.greatest, name) == torch.finfo(dtype).max
    assert not math.isfinite(summary.magnitude(limits.infinite, name))
    assert math.isnan(summary.magnitude(limits.nan, name))
    for value in (0.0, 1.0, 100.0, torch.finfo(dtype).max):
        rounded = float(torch.tensor(value).to(dtype)) if value <= torch.finfo(dtype).max else value
        assert summary.magnitude(summary.peak_of_number(rounded, name), name) == rounded
    assert summary.peak_of_number(math.nan, name) == limits.nan
    assert summary.peak_of_number(-math.inf, name) == limits.infinite


@pytest.mark.parametrize("call", [_native.peak, twin.peak])
def test_what_has_no_peak_is_refused(call: Any) -> None:
    for arguments in (
        (0, 1, 0),
        (1, -1, 0),
        (1, 1, 99),
        (1, 1, DTYPES["int32"].code),
        (1, 1, DTYPES["float8_e4m3fnuz"].code),
    ):
        with pytest.raises(ValueError, match=r"null|impossible|unknown|without a peak"):
            call(*arguments)


def test_the_scanner_looks_only_at_what_is_plain() -> None:
    scanner = fast.scanner(torch.Tensor, torch.nn.Parameter, _alarms(None, True))
    assert fast.greatest(scanner, [torch.tensor([1.0, -3.0]), None, torch.tensor([2.0]).half()]) == 3.0
    assert fast.greatest(scanner, (torch.arange(3), torch.empty(0), torch.nn.Parameter(torch.ones(2)))) == 1.0
    assert fast.greatest(scanner, (torch.full((3,), 2.5, dtype=torch.bfloat16),)) == 2.5
    assert fast.greatest(scanner, [torch.full((2, 3), 4.0).t()]) == 4.0
    for strange in (
        torch.ones(4, 6)[::2, ::2],
        torch.ones(1).expand(3),
        torch.empty(2, device="meta"),
        torch.eye(2).to_sparse(),
        7,
        "text",
    ):
        assert fast.greatest(scanner, [strange]) is None
    for bad in (math.nan, math.inf, torch.finfo(torch.float32).max):
        assert fast.greatest(scanner, [torch.ones(2), torch.tensor([1.0, bad])]) is None
    large = torch.ones(1 << 18)
    assert fast.greatest(scanner, [large]) == 1.0
    large[-1] = math.nan
    assert fast.greatest(scanner, [large]) is None
    for arguments in ((scanner, 1), (scanner,), (object(), [])):
        with pytest.raises((TypeError, ValueError)):
            fast.greatest(*arguments)
    for dtypes in ({torch.float32: 1}, {torch.float32: (4, 1)}, {torch.float32: (99, 1)}):
        with pytest.raises((TypeError, ValueError)):
            fast.scanner(torch.Tensor, torch.nn.Parameter, dtypes)


@pytest.mark.parametrize("name", ["mask_by_where", "log_of_zero", "in_the_optimizer", IN_HALVES])
def test_without_native_code_the_answer_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looker, "fast", None)
    monkeypatch.setattr(looker, "implementation", lambda: twin)
    program, expected = PLANTS[name]
    with OverflowWatch() as watch:
        program()
    assert [(first.call, first.kind) for first in watch.first_nonfinite] == ([expected] if expected else [])
