"""Kernel, portable C and numpy twin measure a pair alike, bit for bit, and what they measure is true."""

from __future__ import annotations

import math
import struct
from array import array
from math import inf, nan
from types import ModuleType

import mpmath
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorprobe.model import DTYPES, Summary
from tensorprobe.numerics import twin
from tensorprobe.numerics.pairs import RAW, table_of

from . import pair_oracle as oracle
from . import test_kernel_and_twin as one_tensor
from .oracle import make_bytes, tame_bytes
from .pair_oracle import make_pair, measure
from .test_kernel_and_twin import built_kernel

portable, module = one_tensor.portable, one_tensor.module
SLACK = 1e-9
"""In ULP: a fraction of one is rounded to the precision of float64."""
SUMS = ("squares_a", "squares_b", "squares_d", "d_times_sum", "abs_d", "sum_d")


@settings(max_examples=900, deadline=None)
@given(case=oracle.cases)
def test_kernel_portable_code_and_twin_agree_bit_for_bit(portable: ModuleType, case) -> None:
    (left, right), count, flavour, seed, offsets = case
    baseline, candidate = make_pair(left, right, count, flavour, seed)
    sides = [(baseline, left), (candidate, right)]
    wanted = measure(twin, sides, offsets=offsets)
    for implementation in (built_kernel(), portable):
        found = measure(implementation, sides, offsets=offsets)
        assert found.tobytes() == wanted.tobytes(), [
            (name, found[name][0], wanted[name][0])
            for name in RAW.names
            if found[name].tobytes() != wanted[name].tobytes()
        ]


@pytest.mark.parametrize("count", [65535, 65536, 65537, 200_003])
@pytest.mark.parametrize("names", [("float32",) * 2, ("bfloat16",) * 2, ("float16", "float32"), ("float64",) * 2])
def test_tensors_of_many_blocks_agree_too(names: tuple[str, str], count: int, portable: ModuleType) -> None:
    left, right = DTYPES[names[0]], DTYPES[names[1]]
    sides = [(make_bytes(left, count, "special", count), left), (make_bytes(right, count, "special", 7), right)]
    wanted = measure(twin, sides, offsets=(1, 0))
    assert measure(built_kernel(), sides, offsets=(1, 0)).tobytes() == wanted.tobytes()
    assert measure(portable, sides, offsets=(1, 0)).tobytes() == wanted.tobytes()


@settings(max_examples=400, deadline=None)
@given(
    dtypes=oracle.dtype_pairs,
    count=st.integers(1, 50),
    flavour=st.sampled_from(["noise", "special", "tame"]),
    seed=st.integers(0, 2**32),
)
def test_figures_are_those_of_exact_arithmetic(dtypes, count: int, flavour: str, seed: int) -> None:
    left, right = dtypes
    baseline, candidate = make_pair(left, right, count, flavour, seed)
    raw = measure(built_kernel(), [(baseline, left), (candidate, right)])[0]
    pairs = oracle.side_by_side([(baseline, left), (candidate, right)])
    parts = 2 if "complex" in (left.kind, right.kind) else 1
    assert_counts(raw, pairs, parts)
    exact_integers = "int" in (left.kind, right.kind) and {left.kind, right.kind} <= {"int", "bool"}
    if not exact_integers:
        pairs = [(float(a), float(b)) for a, b in pairs]
    finite = [pair for pair in pairs if oracle.is_finite(pair)]
    assert_errors(raw, finite)
    names = (left.name, right.name)
    # A distance counts in fractions of the coarser dtype down to the precision of float64.
    distances = [oracle.distance(a, b, names) for a, b in finite]
    oracle.assert_close(raw["ulp_max"], max(distances, default=0), rel=1e-14, slack=1e-8)
    oracle.assert_close(raw["ulp_sum"], sum(distances), rel=1e-13, slack=1e-8)
    for name, limit in (("ulp_over_1", 1), ("ulp_over_4", 4)):
        sure = sum(one > limit + SLACK for one in distances)
        assert sure <= raw[name] <= sum(one > limit - SLACK for one in distances)


def assert_counts(raw, pairs, parts: int) -> None:
    finite = [oracle.is_finite(pair) for pair in pairs]
    places = [
        place
        for place, (a, b) in enumerate(pairs)
        if not finite[place] and a != b and not (math.isnan(a) and math.isnan(b))
    ]
    assert raw["finite"] == sum(finite)
    assert raw["nonfinite_different"] == len(places)
    assert raw["nonfinite_index"] == (places[0] // parts if places else -1)
    for side, letter in enumerate("ab"):
        values = [pair[side] for pair in pairs if not isinstance(pair[side], int)]
        assert raw[f"nan_{letter}"] == sum(map(math.isnan, values))
        assert raw[f"inf_{letter}"] == sum(map(math.isinf, values))
    errors = [abs(b - a) if is_finite else 0 for (a, b), is_finite in zip(pairs, finite, strict=True)]
    if max(errors) and all(isinstance(value, float) for pair in pairs for value in pair):
        errors = [min(error, float(np.finfo(float).max)) for error in errors]
        assert raw["max_abs_index"] == errors.index(max(errors)) // parts
    if max(errors) == 0:
        assert raw["max_abs_index"] == -1


def assert_errors(raw, finite) -> None:
    with mpmath.workdps(60):
        errors = [abs(mpmath.mpf(b) - mpmath.mpf(a)) for a, b in finite]
        sizes = [abs(mpmath.mpf(a)) for a, _ in finite]
        assert raw["different"] - raw["nonfinite_different"] == sum(error != 0 for error in errors)
        oracle.assert_close(raw["max_abs"], max(errors, default=0), rel=1e-15)
        quotients = [error / size for error, size in zip(errors, sizes, strict=True) if size]
        if max(errors, default=0) < 1.7e308:
            oracle.assert_close(raw["max_rel"], max(quotients, default=0), rel=1e-15, slack=1e-320)
        for name, tolerance in oracle.TOLERANCES.items():
            # In float32 a quotient this near to the tolerance, or a subnormal, may go either way.
            loose, strict = mpmath.mpf(tolerance) * (1 + 1e-6), mpmath.mpf(tolerance) * (1 - 1e-6)
            pairs = list(zip(errors, sizes, strict=True))
            assert raw[name] <= sum(error <= loose * size + 1e-45 for error, size in pairs)
            assert raw[name] >= sum(error <= strict * size - (1e-45 if error else 0) for error, size in pairs)


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from([name for name in oracle.FORMATS if hasattr(torch, name)]),
    seed=st.integers(0, 2**32),
    count=st.integers(1, 40),
)
def test_distance_within_one_dtype_is_that_of_the_stored_bits(name: str, seed: int, count: int) -> None:
    dtype = DTYPES[name]
    baseline, candidate = make_pair(dtype, dtype, count, "special", seed)
    size = dtype.itemsize // (2 if dtype.kind == "complex" else 1)
    pairs = oracle.side_by_side([(baseline, dtype), (candidate, dtype)])
    distances = [
        oracle.stored_distance(baseline[i * size : (i + 1) * size], candidate[i * size : (i + 1) * size], dtype)
        for i, pair in enumerate(pairs)
        if oracle.is_finite(pair)
    ]
    for implementation in (built_kernel(), twin):
        raw = measure(implementation, [(baseline, dtype), (candidate, dtype)])[0]
        assert raw["ulp_max"] == float(max(distances, default=0))
        assert raw["ulp_sum"] == pytest.approx(sum(distances), rel=1e-15)
        assert raw["ulp_over_1"] == sum(distance > 1 for distance in distances)
        assert raw["ulp_over_4"] == sum(distance > 4 for distance in distances)


def test_distance_of_different_floats_is_counted_in_the_coarser_one(module: ModuleType) -> None:
    for left, right, a, b, wanted in (
        ("bfloat16", "float32", 1.0, 1.0 + 2**-7, 1.0),
        ("float32", "bfloat16", 1.0 + 2**-9, 1.0, 0.25),
        ("float16", "float64", 2.0**-24, 2.0**-23, 1.0),
        ("float16", "bfloat16", 1.0, 1.0 + 2**-6, 2.0),
        ("int32", "float16", 2048, 2052.0, 2.0),
        ("float64", "int64", 1.0, 1, 0.0),
        ("bool", "float32", True, 1.0 + 2**-23, 1.0),
    ):
        sides = [(pack(name, value), DTYPES[name]) for name, value in ((left, a), (right, b))]
        assert measure(module, sides)["ulp_max"][0] == wanted, (left, right)


def pack(name: str, value: float) -> bytes:
    return torch.tensor([value], dtype=getattr(torch, name)).view(torch.uint8).numpy().tobytes()


def test_zeros_of_both_signs_do_not_differ(module: ModuleType) -> None:
    for name in ("float32", "float64", "bfloat16", "float16", "float8_e5m2"):
        sides = [
            (tame_bytes(DTYPES[name], [0.0] * 40), DTYPES[name]),
            (tame_bytes(DTYPES[name], [-0.0] * 40), DTYPES[name]),
        ]
        raw = measure(module, sides)[0]
        assert (raw["different"], raw["ulp_max"], raw["max_abs_index"], raw["within_1e4"]) == (0, 0.0, -1, 40)
        assert raw["bit_identical"] == 0


@pytest.mark.parametrize(
    ("left", "right", "a", "b", "wanted"),
    [
        ("int64", "int64", 2**60, 2**60 + 1, 1.0),
        ("uint64", "uint64", 2**64 - 1, 2**64 - 3, 2.0),
        ("int64", "uint64", 2**63 - 1, 2**63, 1.0),
        ("int64", "uint64", -1, 2**64 - 1, 2.0**64),
        ("uint64", "int64", 2**63, -(2**63), 2.0**64),
        ("int64", "int8", -(2**62), -128, 2.0**62),
        ("int64", "int64", -(2**63), 2**63 - 1, 2.0**64),
        ("int64", "int64", -(2**60) - 1, -(2**60), 1.0),
        ("int32", "uint32", -(2**31), 2**32 - 1, 3.0 * 2**31 - 1),
        ("bool", "int64", 1, 2**60 + 1, 2.0**60),
    ],
)
def test_integers_are_subtracted_as_integers(left, right, a, b, wanted, module: ModuleType) -> None:
    formats = {"int8": "b", "bool": "B", "int32": "i", "uint32": "I", "int64": "q", "uint64": "Q"}
    sides = [(struct.pack(f"<{formats[name]}", value), DTYPES[name]) for name, value in ((left, a), (right, b))]
    raw = measure(module, sides)[0]
    assert (raw["max_abs"], raw["abs_d"], raw["ulp_max"], raw["different"]) == (wanted, wanted, wanted, 1)
    assert raw["sum_d"] == (wanted if b > a else -wanted)


def test_any_byte_but_zero_is_true(module: ModuleType) -> None:
    raw = measure(module, [(bytes([0, 1, 2, 0]), DTYPES["bool"]), (bytes([0, 7, 0, 1]), DTYPES["bool"])])[0]
    assert (raw["different"], raw["sum_d"], raw["max_abs_index"], raw["bit_identical"]) == (2, 0.0, 2, 0)


def test_nan_and_infinity_poison_no_other_figure(module: ModuleType) -> None:
    inf, nan = math.inf, math.nan
    a = [1.0, nan, inf, inf, nan, -inf, 2.0, 5.0]
    b = [1.5, nan, inf, -inf, 3.0, 1.0, 2.0, nan]
    for name in ("float32", "float64", "bfloat16", "float16", "float8_e5m2"):
        raw = measure(
            module, [(tame_bytes(DTYPES[name], a), DTYPES[name]), (tame_bytes(DTYPES[name], b), DTYPES[name])]
        )[0]
        assert (raw["finite"], raw["different"], raw["nonfinite_different"], raw["nonfinite_index"]) == (2, 5, 4, 3)
        assert (raw["nan_a"], raw["nan_b"], raw["inf_a"], raw["inf_b"]) == (2, 2, 3, 2)
        assert [raw[one] for one in SUMS] == [5.0, 6.25, 0.25, 1.25, 0.5, 0.5]
        assert (raw["max_abs"], raw["max_abs_index"], raw["max_rel"], raw["within_1e2"]) == (0.5, 0, 0.5, 1)


def test_an_index_counts_elements_of_a_complex_tensor(module: ModuleType) -> None:
    values = np.zeros(700, np.complex64)
    other = values.copy()
    other[613] = 3j
    other[650] = complex(math.nan, 0)
    dtype = DTYPES["complex64"]
    raw = measure(module, [(values.tobytes(), dtype), (other.tobytes(), dtype)])[0]
    assert (raw["max_abs_index"], raw["nonfinite_index"], raw["finite"], raw["different"]) == (613, 650, 1399, 2)


def test_a_real_tensor_beside_a_complex_one_has_imaginary_parts_of_zero(module: ModuleType) -> None:
    real = np.arange(600, dtype=np.float32)
    sides = [(real.tobytes(), DTYPES["float32"]), ((real + 1j).astype(np.complex64).tobytes(), DTYPES["complex64"])]
    raw = measure(module, sides)[0]
    assert (raw["finite"], raw["different"], raw["sum_d"], raw["squares_b"] - raw["squares_a"]) == (1200, 600, 600, 600)


def test_a_difference_beyond_float64_is_the_greatest_number(module: ModuleType) -> None:
    sides = [
        (struct.pack("<2d", 1.7e308, 1.0), DTYPES["float64"]),
        (struct.pack("<2d", -1.7e308, 1.0), DTYPES["float64"]),
    ]
    raw = measure(module, sides)[0]
    assert raw["max_abs"] == np.finfo(float).max
    assert raw["scale"] == 2.0**-600
    assert all(math.isfinite(raw[one]) for one in SUMS)


def test_empty_pair_has_no_figures_and_needs_no_address(module: ModuleType) -> None:
    row, out = np.array([[0, 0, 0, 0, 0], [0, 0, 0, 0, 1]], np.int64), np.zeros(2, RAW)
    module.measure_pairs(row.ctypes.data, 2, out.ctypes.data)
    for name in RAW.names:
        wanted = {"scale": [1, 1], "max_abs_index": [-1, -1], "nonfinite_index": [-1, -1], "bit_identical": [1, 0]}
        assert out[name].tolist() == wanted.get(name, [0, 0]), name


def test_subnormals_count_although_the_thread_flushes_them_to_zero() -> None:
    sides = [
        (struct.pack("<20I", *range(20)), DTYPES["float32"]),
        (struct.pack("<20I", *range(1, 21)), DTYPES["float32"]),
    ]
    wanted = measure(twin, sides)
    flushes = torch.set_flush_denormal(True)
    try:
        found = measure(built_kernel(), sides)
        still_flushing = float(np.float32(1e-38) * np.float32(0.01)) == 0.0
    finally:
        torch.set_flush_denormal(False)
    assert found.tobytes() == wanted.tobytes()
    assert found["different"][0] == 20
    assert still_flushing == flushes


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((64, 64, -1, 0, 0), "impossible number of elements: -1"),
        ((64, 64, 2**60, 0, 0), "impossible number of elements: 1152921504606846976"),
        ((64, 64, 1, 21, 0), "unknown dtype code: 21"),
        ((64, 64, 1, 0, -1), "unknown dtype code: -1"),
        ((0, 64, 1, 0, 0), "null address for 1 elements"),
        ((64, -8, 3, 0, 0), "null address for 3 elements"),
    ],
)
def test_a_bad_row_is_refused_before_any_is_measured(row, message: str, module: ModuleType) -> None:
    rows, out = array("q", (0, 0, 0, 0, 0, *row)), array("d", [7.0] * 54)
    with pytest.raises(ValueError, match=f"^row 1: {message}$"):
        module.measure_pairs(rows.buffer_info()[0], 2, out.buffer_info()[0])
    assert set(out) == {7.0}, "a refused batch writes nothing"


def test_bad_addresses_of_a_batch_are_refused(module: ModuleType) -> None:
    with pytest.raises(ValueError, match="negative number of rows: -1"):
        module.measure_pairs(64, -1, 64)
    for addresses in ((0, 64), (64, 0), (-1, 64)):
        with pytest.raises(ValueError, match="null address"):
            module.measure_pairs(addresses[0], 1, addresses[1])
    assert module.measure_pairs(0, 0, 0) is None


def test_kernel_refuses_what_is_no_integer() -> None:
    with pytest.raises(TypeError, match="expected 3 integers, got 2 arguments"):
        built_kernel().measure_pairs(1, 2)
    with pytest.raises(ValueError, match="integer out of range"):
        built_kernel().measure_pairs(2**70, 1, 0)


@pytest.mark.parametrize(
    "odd", [Summary(nan, 2.0, -0.0, inf, 3, 200), Summary(1, 2, 3, 4, -1, 5), Summary(1.0, 2.0, 3.0, 4.0, -1, -40)]
)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_statistics_become_a_table_whatever_they_are(odd: Summary, at: int) -> None:
    held = [Summary(1.5, -1.5, 0.1, inf, -1, 127), Summary(nan, nan, nan, nan, -32, 0)]
    held.insert(at, odd)
    for summaries in (held, held * 40, [odd], []):
        expected = np.array([msgspec.structs.astuple(each) for each in summaries], dtype=float).reshape(-1, 6)
        np.testing.assert_array_equal(table_of(summaries), expected)
