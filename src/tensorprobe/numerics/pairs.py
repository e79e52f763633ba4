"""Measure pairs of tensors, baseline first, from the raw bytes in memory.

In: addresses, a number of elements and two dtypes, for many pairs in one call. Out: figures. The kernel measures sums and
counts (`RAW`), which can be joined for a tensor in pieces. `derive` computes the figures of a
`tensorprobe.model.comparison.Row` from them.

- d is candidate minus baseline in float64.
- Every figure except the counts of NaN and infinity covers the values that are finite on both sides.
- Complex numbers count as their real and imaginary parts.
- Different dtypes are compared in the wider one; 64-bit integers are subtracted as integers.
- `_distance.h` has the rules for distances in ULP.

No verdicts, no torch, no warnings from numpy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tensorprobe.model import Summary
from tensorprobe.numerics.native import implementation

Figures = NDArray[Any]
"""A structured array of `RAW`."""
Numbers = NDArray[np.float64]

SUMS = {"squares_a": 2, "squares_b": 2, "squares_d": 2, "d_times_sum": 2, "abs_d": 1, "sum_d": 1}
"""The sums of `_scans.h`, in its order → how many values are multiplied in each: so often it has `scale` as a factor."""
_GREATEST = ("max_abs", "max_rel", "ulp_max")
_WITHIN = ("within_1e4", "within_1e3", "within_5e3", "within_1e2")
_OVER = ("ulp_over_1", "ulp_over_4")
_INDICES = ("max_abs_index", "nonfinite_index")
_NONFINITE = ("nan_a", "nan_b", "inf_a", "inf_b")

_FLOATS = (*SUMS, *_GREATEST, "ulp_sum", "scale")
_COUNTS = (
    *("max_abs_index", "finite", "different", *_WITHIN, *_OVER),
    *("nonfinite_different", "nonfinite_index", *_NONFINITE, "bit_identical"),
)
RAW = np.dtype([(name, "<f8") for name in _FLOATS] + [(name, "<i8") for name in _COUNTS])
"""`PairFigures` of `_pairs.h`: a baseline, b candidate.

`scale` is the power of two by which the values were multiplied before the sums: 1, unless squares of float64 values
would have overflowed or vanished.
"""
ROW_WIDTH = 5
HUGE_SCALE, TINY_SCALE = 2.0**-600, 2.0**600
"""Factors for float64 values whose squares would overflow or vanish."""

NOISE = 1e-13
"""A variance below this share of the mean square is rounding error and counts as zero."""


def measure_pairs(rows: NDArray[np.int64]) -> Figures:
    """Return the raw figures of every row (baseline address, candidate address, elements, baseline code, candidate code).

    ValueError when a row is bad; then nothing was measured. The memory is read without the interpreter's lock, so it must
    stay as it is until the call returns.
    """
    rows = np.ascontiguousarray(rows, dtype=np.int64)
    if rows.ndim != 2 or rows.shape[1] != ROW_WIDTH:
        raise ValueError(f"rows of pairs have the shape [n, {ROW_WIDTH}], not {list(rows.shape)}")
    out = np.zeros(len(rows), RAW)
    kernel = implementation()
    if getattr(kernel, "PAIR_BYTES", None) != RAW.itemsize:  # it would write past the end, or the wrong figures
        raise RuntimeError(
            "the C extension was built from other sources. Build it again: python setup.py build_ext --inplace"
        )
    if len(rows):
        kernel.measure_pairs(rows.ctypes.data, len(rows), out.ctypes.data)
    return out


def join_pairs(parts: Sequence[Any], starts: Sequence[int]) -> Figures:
    """Return the raw figures of a pair that was measured in consecutive pieces, as one row.

    `parts` are rows of `RAW`; `starts` says with which element of the whole each piece begins.
    """
    if not parts or len(parts) != len(starts):
        raise ValueError(f"{len(parts)} pieces with {len(starts)} starts")
    pieces = np.concatenate([np.asarray(part, RAW).reshape(1) for part in parts])
    whole = np.zeros(1, RAW)
    scale = _common_scale(pieces)
    ratio = scale / pieces["scale"]
    with np.errstate(all="ignore"):
        for name, factors in SUMS.items():
            scaled = pieces[name]
            for _ in range(factors):  # one after the other: their product may overflow float64
                scaled = scaled * ratio
            whole[name] = math.fsum(scaled)
    whole["scale"] = scale
    whole["ulp_sum"] = math.fsum(pieces["ulp_sum"])
    for name in _GREATEST:
        whole[name] = pieces[name].max()
    for name in set(_COUNTS) - {*_INDICES, "bit_identical"}:
        whole[name] = pieces[name].sum()
    worst, first = int(pieces["max_abs"].argmax()), int((pieces["nonfinite_index"] >= 0).argmax())
    for name, piece in zip(_INDICES, (worst, first), strict=True):
        index = int(pieces[name][piece])
        whole[name] = index if index < 0 else index + starts[piece]
    whole["bit_identical"] = pieces["bit_identical"].all()
    return whole


def derive(raw: Figures) -> dict[str, NDArray[Any]]:
    """Return the figures of a `Row` from `count` to `nonfinite_index`, and `bit_identical`, each for all rows of `raw`.

    Where no value is finite on both sides, errors are 0, ratios 1 and shares 1. A z-score is 0 for fewer than two values
    and where nothing differs, and infinite where the difference has no spread.
    """
    raw = np.atleast_1d(raw)
    count = raw["finite"]
    some = np.maximum(count, 1).astype(np.float64)
    with np.errstate(all="ignore"):
        figures: dict[str, NDArray[Any]] = {
            "count": count,
            "different": raw["different"],
            "max_abs": raw["max_abs"],
            "max_abs_index": raw["max_abs_index"],
            "max_rel": raw["max_rel"],
            "mean_abs": raw["abs_d"] / some / raw["scale"],
            **_angles(raw),
            **_trends(raw, some),
        }
        for name in _WITHIN:
            figures[name] = np.where(count > 0, raw[name] / some, 1.0)
        figures["ulp_max"] = raw["ulp_max"]
        figures["ulp_mean"] = raw["ulp_sum"] / some
        for name in _OVER:
            figures[name] = raw[name] / some
    for name in ("nonfinite_different", "nonfinite_index", "bit_identical"):
        figures[name] = raw[name]
    return figures


def _common_scale(pieces: Figures) -> float:
    """Return the scale of the piece with the greatest values; pieces of zeros do not count."""
    scales = pieces["scale"][(pieces["squares_a"] != 0) | (pieces["squares_b"] != 0)]
    if (scales == HUGE_SCALE).any():
        return HUGE_SCALE
    return TINY_SCALE if scales.size and (scales == TINY_SCALE).all() else 1.0


def _angles(raw: Figures) -> dict[str, Numbers]:
    """Return the figures of the two tensors as vectors."""
    a, b, d = (np.sqrt(raw[name]) for name in ("squares_a", "squares_b", "squares_d"))
    a_zero, b_zero = a == 0, b == 0
    # 1 - cos = (|d|^2 - (|b| - |a|)^2) / (2 |a| |b|), where |b| - |a| = sum d (a + b) / (|a| + |b|) loses no digits.
    stretch = raw["d_times_sum"] / (a + b)
    cosine = np.clip((d - stretch) / a * ((d + stretch) / b) / 2, 0.0, 2.0)
    cosine = np.where(a_zero | b_zero, np.where(a_zero & b_zero, 0.0, 1.0), cosine)
    return {
        "relative_l2": np.where(d == 0, 0.0, np.where(a_zero, np.inf, d / a)),
        "one_minus_cosine": cosine,
        "norm_ratio": np.where(a_zero, np.where(b_zero, 1.0, np.inf), b / a),
    }


def _trends(raw: Figures, some: Numbers) -> dict[str, Numbers]:
    """Return whether the difference leans to one side (bias), or grows with the baseline (slope), and how surely."""
    squares_a, squares_d = raw["squares_a"], raw["squares_d"]
    bias_part = raw["sum_d"] / np.sqrt(some)
    a_times_d = (raw["d_times_sum"] - squares_d) / 2
    slope_part = np.where(squares_a > 0, a_times_d / np.sqrt(squares_a), 0.0)
    slope = np.where(squares_a > 0, 1 + a_times_d / squares_a, 1.0)
    return {
        "bias": raw["sum_d"] / some / raw["scale"],
        "bias_z": _z_score(bias_part, squares_d, raw["finite"]),
        "slope": slope,
        "slope_z": _z_score(slope_part, squares_d, raw["finite"]),
    }


def _z_score(part: Numbers, squares: Numbers, count: NDArray[np.int64]) -> Numbers:
    """Return an estimate over its standard error, from its share of the norm of d: d is `part` along the estimate, and the rest.

    The mean of d is `part` / sqrt(n), and its standard error the root of rest / (n - 1) / n; the slope is `part` / |a|, and
    its standard error the root of rest / (n - 1) / |a|^2: the same quotient for both.
    """
    rest = squares - part * part
    z = part / np.sqrt(rest / np.maximum(count - 1, 1))
    z = np.where(rest <= NOISE * squares, np.copysign(np.inf, part), z)
    return np.where((count < 2) | (part == 0), 0.0, z)


_ROW, _FLOAT = 0x96, 0xCB
_PACKED = np.dtype([("is_row", "u1"), ("figures", [("is_float", "u1"), ("value", ">f8")], 4), ("counts", "i1", 2)])
"""A summary as MessagePack: an array of six, four floats, and two numbers of one byte, if they are from -32 to 127."""


def table_of(summaries: Sequence[Summary]) -> Numbers:
    """Return the statistics as a table with a row for each."""
    # As MessagePack each has the same bytes, of which numpy makes columns: twenty times as fast as tuples.
    try:
        raw = msgspec.msgpack.encode(summaries)
    except OverflowError:  # counts beyond 64 bits, from a hostile file
        raw = b""
    head = 1 if len(summaries) < 1 << 4 else 3 if len(summaries) < 1 << 16 else 5
    if len(raw) == head + len(summaries) * _PACKED.itemsize:
        packed = np.frombuffer(raw, dtype=_PACKED, offset=head)
        if (
            (packed["is_row"] == _ROW).all()
            and (packed["figures"]["is_float"] == _FLOAT).all()
            and (packed["counts"] >= -32).all()
        ):
            return np.hstack((packed["figures"]["value"], packed["counts"]))
    return np.array([*map(msgspec.structs.astuple, summaries)], dtype=np.float64).reshape(-1, 6)
