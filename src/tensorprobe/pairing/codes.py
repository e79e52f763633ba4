"""Combine columns of integers into one, and join columns: the arithmetic of an alignment.

Equal rows get equal codes and different rows different codes, on both sides. A code has no other meaning.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.int64]
Mask = NDArray[np.bool_]

_MOST = 1 << 62
_WIDEST_TABLE = 8


def pack(columns: Sequence[Column]) -> Column:
    """Return one code for each row. The columns hold no negative numbers."""
    code = columns[0]
    for column in columns[1:]:
        width = int(column.max(initial=0)) + 1
        if (int(code.max(initial=0)) + 1) * width >= _MOST:
            code = dense(code)
        code = code * width + column
    return code


def dense(column: Column) -> Column:
    """Return the column with its distinct numbers replaced by 0, 1, …"""
    most = int(column.max(initial=0))
    if most > _WIDEST_TABLE * len(column):
        return np.unique(column, return_inverse=True)[1].reshape(-1).astype(np.int64)
    occurs = np.zeros(most + 1, dtype=np.bool_)  # a table is ten times faster than sorting
    occurs[column] = True
    return (np.cumsum(occurs) - 1)[column]


def pack_both(baseline: Sequence[Column], candidate: Sequence[Column]) -> tuple[Column, Column]:
    """Return `pack` of two sides, with codes that can be compared between them."""
    both = pack([np.concatenate(pair) for pair in zip(baseline, candidate, strict=True)])
    return both[: len(baseline[0])], both[len(baseline[0]) :]


def dense_both(baseline: Column, candidate: Column) -> tuple[Column, Column]:
    """Return `dense` of two sides, with the same numbers on both."""
    both = dense(np.concatenate((baseline, candidate)))
    return both[: len(baseline)], both[len(baseline) :]


def remaining(count: int, done: Column) -> Column:
    """Return the rows below `count` that are not in `done`."""
    left = np.ones(count, dtype=np.bool_)
    left[done] = False
    return np.flatnonzero(left)


def merge(*rows: Column) -> Column:
    """Return all rows, sorted."""
    return np.sort(np.concatenate(rows), kind="stable")


def occurrences(codes: Column) -> Column:
    """Return for each row how many rows before it have the same code."""
    order = np.argsort(codes, kind="stable")
    ordered = codes[order]
    places = np.arange(len(codes))
    is_first = np.ones(len(codes), dtype=np.bool_)
    is_first[1:] = ordered[1:] != ordered[:-1]
    counts = np.empty(len(codes), dtype=np.int64)
    counts[order] = places - np.maximum.accumulate(np.where(is_first, places, 0))
    return counts


def join(baseline: Column, candidate: Column) -> tuple[Column, Column]:
    """Return the pairs of rows with equal codes, n-th occurrence with n-th, in the baseline's order."""
    codes = pack_both((baseline, occurrences(baseline)), (candidate, occurrences(candidate)))
    _, rows, partners = np.intersect1d(*codes, assume_unique=True, return_indices=True)
    order = np.argsort(rows)
    return rows[order].astype(np.int64), partners[order].astype(np.int64)


def count_common(baseline: Column, candidate: Column) -> int:
    """Return how many rows could be joined."""
    codes = dense_both(baseline, candidate)
    size = int(max(codes[0].max(initial=-1), codes[1].max(initial=-1))) + 1
    return int(np.minimum(*(np.bincount(side, minlength=size) for side in codes)).sum())
