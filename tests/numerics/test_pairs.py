"""Measuring pairs from Python: laws, the figures of a report against mpmath, joining pieces, refusals."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorprobe.model import DTYPES
from tensorprobe.model.comparison import FIGURES, Row
from tensorprobe.numerics import pairs, twin
from tensorprobe.numerics.pairs import RAW, SUMS, derive, join_pairs, measure_pairs

from . import pair_oracle as oracle
from .oracle import make_bytes, placed
from .pair_oracle import make_pair

ROUNDED = (*SUMS, "ulp_sum")
"""Figures that joined pieces have but for rounding; all others they have exactly."""
SUBNORMAL = 5e-324
EXACT = [name for name in RAW.names if name not in ROUNDED]


def measured(baseline: np.ndarray, candidate: np.ndarray) -> np.ndarray:
    """The raw figures of two numpy arrays."""
    codes = [DTYPES[array.dtype.name].code for array in (baseline, candidate)]
    return measure_pairs(np.array([[baseline.ctypes.data, candidate.ctypes.data, baseline.size, *codes]]))


def figures(baseline, candidate, dtype=np.float64) -> dict[str, float]:
    arrays = np.array(baseline, dtype), np.array(candidate, dtype)
    return {name: values[0] for name, values in derive(measured(*arrays)).items()}


def test_fields_are_those_of_a_row_in_order() -> None:
    names = list(Row.__struct_fields__)
    wanted = names[names.index("count") : names.index("nonfinite_index") + 1]
    found = derive(np.zeros(2, RAW))
    assert list(found) == [*wanted, "bit_identical"]
    assert {values.shape for values in found.values()} == {(2,)}


@settings(max_examples=200, deadline=None)
@given(case=oracle.cases)
def test_a_tensor_against_itself_is_clean(case) -> None:
    (dtype, _), count, flavour, seed, offsets = case
    content = make_bytes(dtype, count, flavour, seed)
    with placed(content, offsets[0]) as a, placed(content, offsets[1]) as b:
        raw = measure_pairs(np.array([[a, b, count, dtype.code, dtype.code]]))
    for name, values in derive(raw).items():
        wanted = {"count": raw["finite"][0], "max_abs_index": -1, "nonfinite_index": -1}
        assert values[0] == (FIGURES[name].equal if name in FIGURES else wanted[name]), name
    assert raw["squares_a"] == raw["squares_b"]


@settings(max_examples=200, deadline=None)
@given(case=oracle.cases)
def test_swapping_the_sides_keeps_every_distance(case) -> None:
    (left, right), count, flavour, seed, offsets = case
    baseline, candidate = make_pair(left, right, count, flavour, seed)
    with placed(baseline, offsets[0]) as a, placed(candidate, offsets[1]) as b:
        there, back = measure_pairs(
            np.array([[a, b, count, left.code, right.code], [b, a, count, right.code, left.code]])
        )
    same = ("squares_d", "abs_d", "max_abs", "ulp_max", "ulp_sum", "scale", "max_abs_index", "finite", "different")
    same += ("ulp_over_1", "ulp_over_4", "nonfinite_different", "nonfinite_index", "bit_identical")
    for name in same:
        assert there[name] == back[name], name
    assert (there["sum_d"], there["d_times_sum"]) == (-back["sum_d"], -back["d_times_sum"])
    for name in ("squares", "nan", "inf"):
        assert (there[f"{name}_a"], there[f"{name}_b"]) == (back[f"{name}_b"], back[f"{name}_a"])


@settings(max_examples=150, deadline=None)
@given(
    count=st.integers(2, 60),
    noise=st.sampled_from([1.0, 1e-3, 1e-6, 1e-9, 1e-12]),
    size=st.sampled_from([1.0, 1e-300, 1e-120, 1e150, 1e300]),
    shift=st.sampled_from([0.0, 0.0, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_figures_of_a_report_agree_with_mpmath(count: int, noise: float, size: float, shift: float, seed: int) -> None:
    source = np.random.default_rng(seed)
    a = source.standard_normal(count)
    b = (a * (1 + noise * source.standard_normal(count)) + noise * shift) * size
    a = a * size
    found, wanted = figures(a, b), oracle.derived(list(zip(a.tolist(), b.tolist(), strict=True)))
    for name in ("mean_abs", "relative_l2", "norm_ratio", "slope"):
        oracle.assert_close(found[name], wanted[name], rel=1e-12, slack=1e-323)
    # What cancels is right to the size of what it is the difference of.
    oracle.assert_close(found["bias"], wanted["bias"], rel=1e-12, slack=1e-13 * found["mean_abs"] + 1e-323)
    oracle.assert_close(found["one_minus_cosine"], wanted["one_minus_cosine"], rel=1e-9, slack=1e-14 * noise**2)
    for name in ("bias_z", "slope_z"):
        z = float(wanted[name])
        assert found[name] == pytest.approx(z, rel=1e-6 + 1e-13 * z**2, abs=1e-9)


@pytest.mark.parametrize("noise", [1e-6, 1e-8, 1e-10, 1e-12])
def test_one_minus_cosine_is_right_where_it_is_tiny(noise: float) -> None:
    source = np.random.default_rng(5)
    a = source.standard_normal(20_000)
    b = a + noise * source.standard_normal(a.size)
    wanted = oracle.derived(list(zip(a.tolist(), b.tolist(), strict=True)))
    found = figures(a, b)["one_minus_cosine"]
    assert found == pytest.approx(noise**2 / 2, rel=0.05)
    oracle.assert_close(found, wanted["one_minus_cosine"], rel=1e-10)


def test_a_scaled_tensor_has_a_slope_and_no_angle() -> None:
    a = np.random.default_rng(0).standard_normal(5000)
    found = figures(a, 1.01 * a)
    assert found["one_minus_cosine"] < 1e-18
    assert found["norm_ratio"] == pytest.approx(1.01, rel=1e-14)
    assert found["slope"] == pytest.approx(1.01, rel=1e-14)
    assert found["slope_z"] > 1e10
    assert abs(found["bias_z"]) < 5


def test_a_shifted_tensor_has_a_bias() -> None:
    a = np.random.default_rng(0).standard_normal(5000)
    found = figures(a, a + 0.125)
    assert found["bias"] == pytest.approx(0.125, rel=1e-12)
    assert found["bias_z"] == math.inf
    assert figures(a + 0.125, a)["bias_z"] == -math.inf


@pytest.mark.parametrize(
    ("a", "b", "wanted"),
    [
        ([0, 0], [0, 0], {"relative_l2": 0, "one_minus_cosine": 0, "norm_ratio": 1, "slope": 1, "slope_z": 0}),
        ([0, 0], [3, 4], {"relative_l2": math.inf, "one_minus_cosine": 1, "norm_ratio": math.inf, "slope": 1}),
        ([3, 4], [0, 0], {"relative_l2": 1, "one_minus_cosine": 1, "norm_ratio": 0, "slope": 0, "slope_z": -math.inf}),
        ([3, 4], [-3, -4], {"relative_l2": 2, "one_minus_cosine": 2, "norm_ratio": 1, "slope": -1}),
        ([1, 0], [0, 1], {"one_minus_cosine": 1, "bias": 0, "bias_z": 0, "max_rel": 1}),
        (
            [5],
            [7],
            {"count": 1, "bias": 2, "bias_z": 0, "slope_z": 0, "max_abs": 2, "max_abs_index": 0, "max_rel": 0.4},
        ),
        ([0, 2], [1, 2], {"max_rel": 0, "max_abs": 1, "within_1e2": 0.5, "different": 1, "mean_abs": 0.5}),
        ([], [], {"count": 0, "mean_abs": 0, "within_1e4": 1, "norm_ratio": 1, "max_abs_index": -1, "ulp_mean": 0}),
        (
            [math.nan],
            [1],
            {"count": 0, "different": 1, "nonfinite_different": 1, "nonfinite_index": 0, "within_1e4": 1},
        ),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_figures_at_the_borders(a, b, wanted, dtype) -> None:
    found = figures(a, b, dtype)
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-15)
    assert not any(np.isnan(value) for value in found.values())


def test_shares_are_of_the_finite_values() -> None:
    a = [100.0, 100.0, 100.0, 100.0, math.inf]
    found = figures(a, [100.005, 100.05, 100.3, 100.9, math.inf])
    assert [found[name] for name in oracle.TOLERANCES] == [0.25, 0.5, 0.75, 1.0]
    steps = np.array([0, 1, 2, 5, 0], np.int32)
    found = figures(a, (np.array(a, np.float32).view(np.int32) + steps).view(np.float32), np.float32)
    assert (found["ulp_max"], found["ulp_mean"], found["ulp_over_1"], found["ulp_over_4"]) == (5, 2, 0.5, 0.25)


@settings(max_examples=150, deadline=None)
@given(case=oracle.cases, cuts=st.lists(st.integers(0, 5000), max_size=4))
def test_pieces_join_to_the_whole(case, cuts) -> None:
    (left, right), count, flavour, seed, offsets = case
    baseline, candidate = make_pair(left, right, count, flavour, seed)
    borders = sorted({0, count, *(cut % (count + 1) for cut in cuts)})
    starts, stops = borders[:-1] or [0], borders[1:] or [0]
    with placed(baseline, offsets[0]) as a, placed(candidate, offsets[1]) as b:
        rows = [
            [a + start * left.itemsize, b + start * right.itemsize, stop - start, left.code, right.code]
            for start, stop in zip(starts, stops, strict=True)
        ]
        pieces, whole = measure_pairs(np.array(rows)), measure_pairs(np.array([[a, b, count, left.code, right.code]]))
    joined = join_pairs(list(pieces), starts)
    assert joined.dtype == RAW and joined.shape == (1,)
    assert joined["scale"] == whole["scale"]
    for name in EXACT:
        assert joined[name] == whole[name], name
    # Of sums whose terms have both signs: what their rounding is relative to.
    sizes = {"sum_d": whole["abs_d"], "d_times_sum": whole["squares_a"] + whole["squares_b"]}
    for name in ROUNDED:
        size = float(sizes.get(name, whole[name])[0])
        rounding = 1e-12 * size + count * SUBNORMAL  # below 1e-308 a sum is rounded to multiples of SUBNORMAL
        assert abs(float(joined[name][0]) - float(whole[name][0])) <= rounding, name


@pytest.mark.parametrize(("first", "second"), [(1e200, 1.0), (1e-200, 0.0), (1e-200, 1.0), (1e-200, 1e200)])
def test_pieces_of_different_scale_join(first: float, second: float) -> None:
    a = np.array([first, 2 * first, second, 3 * second])
    b = a * np.array([1.5, 1.0, 0.5, 1.0])
    pieces = [measured(a[:2], b[:2])[0], measured(a[2:], b[2:])]
    joined, whole = derive(join_pairs(pieces, [0, 2])), derive(measured(a, b))
    for name, values in whole.items():
        assert joined[name][0] == pytest.approx(values[0], rel=1e-12), name


def test_an_extension_that_was_built_from_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs.implementation(), "PAIR_BYTES", RAW.itemsize - 8)
    with pytest.raises(RuntimeError, match="built from other sources"):
        measured(np.ones(1), np.ones(1))


def test_joining_nothing_or_without_starts_is_refused() -> None:
    with pytest.raises(ValueError, match="0 pieces with 0 starts"):
        join_pairs([], [])
    with pytest.raises(ValueError, match="1 pieces with 2 starts"):
        join_pairs([np.zeros(1, RAW)], [0, 4])


@pytest.mark.parametrize("shape", [(5,), (2, 3), (1, 5, 1)])
def test_rows_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"rows of pairs have the shape \[n, 5\], not \["):
        measure_pairs(np.zeros(shape, np.int64))


def test_no_rows_give_no_figures() -> None:
    assert measure_pairs(np.zeros((0, 5), np.int64)).shape == (0,)


def test_a_bad_row_is_refused() -> None:
    with pytest.raises(ValueError, match="row 0: unknown dtype code: 99"):
        measure_pairs(np.array([[64, 64, 1, 99, 0]]))


def test_threads_do_not_disturb_each_other() -> None:
    source = np.random.default_rng(3)
    tensors = [source.standard_normal(30_000 + i).astype(np.float32) for i in range(8)]
    shifted = [tensor + np.float32(i) for i, tensor in enumerate(tensors)]
    wanted = [measured(a, b).tobytes() for a, b in zip(tensors, shifted, strict=True)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: measured(tensors[i % 8], shifted[i % 8]).tobytes(), range(64)))
    assert found == wanted * 8


def test_the_twin_serves_where_the_kernel_is_switched_off() -> None:
    code = (
        "import sys, numpy as np\n"
        "from tensorprobe.numerics.pairs import measure_pairs\n"
        "a, b = np.arange(3000.), np.arange(3000.) * 1.01\n"
        "print(measure_pairs(np.array([[a.ctypes.data, b.ctypes.data, 3000, 1, 1]])).tobytes().hex(), 'torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TENSORPROBE_NO_NATIVE": "1"}
    command = [sys.executable, "-c", code]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
    a = np.arange(3000.0)
    assert printed == [measured(a, a * 1.01).tobytes().hex(), "False"]


def test_the_scales_of_python_are_those_of_the_twin() -> None:
    assert twin.measure_pairs is not pairs.measure_pairs
    assert {measured(np.full(3, size), np.full(3, size / 2))["scale"][0] for size in (1e300, 1.0, 1e-300)} == {
        pairs.HUGE_SCALE,
        1.0,
        pairs.TINY_SCALE,
    }
