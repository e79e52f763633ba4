"""Columns of integers made into one column, and columns joined: the arithmetic under an alignment.

Equal rows get equal codes and different rows different ones, on both sides alike; a code has no other meaning.
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
    """One code for each row. The columns hold no negative numbers."""
    code = columns[0]
    for column in columns[1:]:
        width = int(column.max(initial=0)) + 1
        if (int(code.max(initial=0)) + 1) * width >= _MOST:
            code = dense(code)
        code = code * width + column
    return code


def dense(column: Column) -> Column:
    """The same column with the numbers 0, 1, … instead of any."""
    most = int(column.max(initial=0))
    if most > _WIDEST_TABLE * len(column):
        return np.unique(column, return_inverse=True)[1].reshape(-1).astype(np.int64)
    occurs = np.zeros(most + 1, dtype=np.bool_)  # a table is ten times faster than sorting
    occurs[column] = True
    return (np.cumsum(occurs) - 1)[column]


def pack_both(baseline: Sequence[Column], candidate: Sequence[Column]) -> tuple[Column, Column]:
    """`pack` for two sides, so that codes can be compared between them."""
    both = pack([np.concatenate(pair) for pair in zip(baseline, candidate, strict=True)])
    return both[: len(baseline[0])], both[len(baseline[0]) :]


def dense_both(baseline: Column, candidate: Column) -> tuple[Column, Column]:
    """`dense` for two sides."""
    both = dense(np.concatenate((baseline, candidate)))
    return both[: len(baseline)], both[len(baseline) :]


def remaining(count: int, done: Column) -> Column:
    """The rows from 0 to `count` that are not done."""
    left = np.ones(count, dtype=np.bool_)
    left[done] = False
    return np.flatnonzero(left)


def merge(*rows: Column) -> Column:
    """Rows from several places, sorted."""
    return np.sort(np.concatenate(rows), kind="stable")


def occurrences(codes: Column) -> Column:
    """For each row how many rows before it have the same code."""
    order = np.argsort(codes, kind="stable")
    ordered = codes[order]
    places = np.arange(len(codes))
    is_first = np.ones(len(codes), dtype=np.bool_)
    is_first[1:] = ordered[1:] != ordered[:-1]
    counts = np.empty(len(codes), dtype=np.int64)
    counts[order] = places - np.maximum.accumulate(np.where(is_first, places, 0))
    return counts


def join(baseline: Column, candidate: Column) -> tuple[Column, Column]:
    """The rows with equal codes, the first of them with the first, the second with the second; in the baseline's order."""
    codes = pack_both((baseline, occurrences(baseline)), (candidate, occurrences(candidate)))
    _, rows, partners = np.intersect1d(*codes, assume_unique=True, return_indices=True)
    order = np.argsort(rows)
    return rows[order].astype(np.int64), partners[order].astype(np.int64)


def count_common(baseline: Column, candidate: Column) -> int:
    """How many rows could be joined."""
    codes = dense_both(baseline, candidate)
    size = int(max(codes[0].max(initial=-1), codes[1].max(initial=-1))) + 1
    return int(np.minimum(*(np.bincount(side, minlength=size) for side in codes)).sum())
