"""Figures computed on the device equal those of the kernel, and the host does not wait for them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from torch.utils._python_dispatch import TorchDispatchMode

from tensorprobe.numerics import device_summary
from tensorprobe.numerics.device_summary import device_moments, fetch_moments
from tensorprobe.numerics.summary import summarize_buffer
from tests.builders.dtypes import KNOWN_DTYPES

from .oracle import as_tensor, assert_figures, cases, make_bytes, quiet_about_complex_halves, values_of


class WatchedOps(TorchDispatchMode):
    """Remembers the names of all ops."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@settings(max_examples=200, deadline=None)
@given(case=cases)
def test_device_figures_equal_the_kernel(case) -> None:
    dtype, count, flavour, seed, _ = case
    content = make_bytes(dtype, count, flavour, seed)
    figures = device_moments(as_tensor(content, dtype))
    assert figures.shape == (6,) and figures.dtype == torch.float64
    (moments,) = fetch_moments([figures])
    assert_figures(moments, values_of(content, dtype), rel=1e-11)
    kernel = summarize_buffer(content, dtype)
    assert repr(moments[:2] + moments[4:]) == repr(kernel[:2] + kernel[4:])


@pytest.mark.parametrize("name", list(KNOWN_DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (2, 0, 4)])
def test_the_host_never_reads_from_the_device(name: str, shape: tuple[int, ...]) -> None:
    with quiet_about_complex_halves():
        tensor = torch.zeros(shape, dtype=torch.uint8).to(getattr(torch, name))
    watched = WatchedOps()
    with watched:
        figures = device_moments(tensor)
    assert "_local_scalar_dense" not in watched.names
    assert not figures.requires_grad


def test_a_meta_tensor_has_figures_without_values() -> None:
    # Nothing that depends on values can be done on this device: a hidden wait would raise.
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        assert device_moments(torch.empty(100, dtype=dtype, device="meta")).shape == (6,)


def test_a_batch_is_fetched_in_one_transfer_and_in_order() -> None:
    figures = [device_moments(torch.full((number + 1,), float(number))) for number in range(50)]
    watched = WatchedOps()
    with watched:
        moments = fetch_moments(figures)
    assert watched.names.count("stack") + watched.names.count("cat") == 1
    assert [row.max for row in moments] == [float(number) for number in range(50)]
    assert fetch_moments([]) == []


def test_views_conjugates_and_gradients_are_read_as_they_are() -> None:
    base = torch.arange(12.0, requires_grad=True).reshape(3, 4)
    assert fetch_moments([device_moments(base.t()[1:3])])[0].max == 10.0
    z = torch.tensor([1 + 2j, 3 - 4j])
    assert fetch_moments([device_moments(z.conj())])[0].min == -2.0
    assert fetch_moments([device_moments(z.conj().imag)])[0].max == 4.0


def test_half_norms_do_not_overflow() -> None:
    moments = fetch_moments([device_moments(torch.full((1000,), 60000.0, dtype=torch.float16))])[0]
    assert moments.norm == pytest.approx(60000 * math.sqrt(1000), rel=1e-3)


@pytest.mark.parametrize("magnitude", [1e308, 1e200, 1.0, 1e-200, 1e-308, 5e-324])
def test_squares_of_doubles_neither_overflow_nor_vanish(magnitude: float) -> None:
    tensor = torch.tensor([magnitude, -magnitude / 2, magnitude, math.inf] * 5, dtype=torch.float64)
    assert_figures(fetch_moments([device_moments(tensor)])[0], tensor.tolist())


@pytest.mark.parametrize("magnitude", [3e37, 1e20, 1.0, 1e-25, 1e-38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_device_without_float64_sums_in_float32(
    magnitude: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_summary, "_has_float64", lambda device_type: False)
    tensor = torch.tensor([magnitude, -magnitude / 4, math.nan] * 9, dtype=torch.float64).to(dtype)
    figures = device_moments(tensor)
    assert figures.dtype == torch.float32
    assert_figures(fetch_moments([figures])[0], tensor.float().double().tolist(), rel=1e-5)
