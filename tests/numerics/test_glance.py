"""The first look at a pair: its sums against numpy's, and what it says nothing about."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tensorprobe.model import DTYPES
from tensorprobe.numerics import twin
from tensorprobe.numerics.native import kernel

CODES = {name: dtype.code for name, dtype in DTYPES.items()}
PAIRS = [
    ("float64", "float32"),
    ("float64", "bfloat16"),
    ("float64", "float16"),
    ("float32", "float32"),
    ("float64", "float64"),
]


def glance(one: torch.Tensor, other: torch.Tensor) -> tuple[float, ...] | None:
    found = kernel()
    assert found is not None, "the extension is built wherever the tests run"
    codes = (CODES[str(tensor.dtype).removeprefix("torch.")] for tensor in (one, other))
    sums: tuple[float, ...] | None = found.glance(one.data_ptr(), other.data_ptr(), one.numel(), *codes)
    return sums


def expected(one: torch.Tensor, other: torch.Tensor) -> list[float]:
    a = one.double().numpy()
    d = other.double().numpy() - a
    size, error = np.abs(a), np.abs(d)
    astray = [float((error > tolerance * size).sum()) for tolerance in (1e-3, 1e-2)]
    return [(a * a).sum(), (d * d).sum(), (a * d).sum(), d.sum(), error.max(), size.max(), (d != 0).sum(), *astray]


@pytest.mark.parametrize("names", PAIRS, ids="-".join)
@pytest.mark.parametrize("count", [1, 7, 8, 1023, 1024, 1025, 5000])
def test_sums_are_those_of_numpy(names: tuple[str, str], count: int) -> None:
    source = torch.Generator().manual_seed(count)
    values = torch.randn(count + 1, dtype=torch.float64, generator=source)
    noise = torch.randn(count + 1, dtype=torch.float64, generator=source)
    one = values.to(getattr(torch, names[0]))[1:]  # memory that is aligned to its elements only
    other = (values + 1e-3 * noise).to(getattr(torch, names[1]))[1:]
    found = glance(one, other)
    assert found is not None
    np.testing.assert_allclose(found, expected(one, other), rtol=1e-11, atol=1e-13)


def test_complex_numbers_count_as_their_parts() -> None:
    one = torch.tensor([1 + 2j, 3 - 4j])
    found = glance(one, one + 0.5j)
    assert found is not None
    assert found[:7] == (30.0, 0.5, -1.0, 1.0, 0.5, 4.0, 2.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("side", [0, 1])
def test_nothing_is_said_of_what_is_not_finite(bad: float, side: int) -> None:
    pair = [torch.ones(3000, dtype=torch.float64), torch.ones(3000, dtype=torch.float32)]
    pair[side][2500] = bad
    assert glance(*pair) is None


def test_equal_bytes_are_equal_whatever_they_are() -> None:
    held = torch.tensor([1.0, float("nan"), float("-inf")])
    assert glance(held, held.clone()) == (0.0,) * 9


def test_whole_numbers_and_parts_beside_wholes_are_left_to_others() -> None:
    large = torch.tensor([2**60, 2**60 + 1])
    assert glance(large, large + 1) is None
    assert glance(torch.ones(2), torch.ones(2, dtype=torch.complex64)) is None


def test_what_cannot_be_is_refused_by_kernel_and_twin() -> None:
    held = torch.ones(2)
    for module in (kernel(), twin):
        assert module is not None
        with pytest.raises(ValueError, match="unknown dtype code: 999"):
            module.glance(held.data_ptr(), held.data_ptr(), 2, CODES["float32"], 999)
        with pytest.raises(ValueError, match="impossible number of elements"):
            module.glance(held.data_ptr(), held.data_ptr(), -1, CODES["float32"], CODES["float32"])
        with pytest.raises(ValueError, match="null address"):
            module.glance(held.data_ptr(), 0, 2, CODES["float32"], CODES["float32"])


def test_the_twin_tells_nothing() -> None:
    held = torch.ones(2)
    assert twin.glance(held.data_ptr(), held.data_ptr(), 2, CODES["float32"], CODES["float32"]) is None
