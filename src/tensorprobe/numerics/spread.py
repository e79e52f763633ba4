"""How the difference of two arrays is spread: along each axis, over its worst elements, over its sizes.

In: a `PairView`. Out: plain structs of `model.diff`. Facts only; `numerics.pattern` looks for a pattern in them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tensorprobe.model.diff import Histogram, Profile, Worst
from tensorprobe.numerics.pair_view import Array, Block, Numbers, PairView

MOST_BINS = 64
MOST_PLACES = 1 << 20
"""An axis with more indices is looked at in steps of several."""
WORST = 20
SAMPLE = 1 << 18
"""Elements that a histogram counts at most."""
_HALF_BINS = 16
"""Bins on each side of zero in a signed logarithmic histogram, one for each power of ten or less."""
_ULP_EDGES = [0.0, 0.5, 1.5, 2.5, 4.5, 8.5, 16.5, 64.5, 256.5, 1024.5, 2.0**16, 2.0**20, math.inf]


class _Element(NamedTuple):
    order: float
    """Minus the difference: the worst come first."""
    place: list[int]
    baseline: float
    candidate: float


@dataclass
class Spread:
    """The greatest difference at each index of each axis, and sums over all elements."""

    greatest: list[Numbers]
    different: list[Array]
    widths: list[int]
    """Indices that share a place in `greatest`, for each axis."""
    most: float = 0.0
    """The greatest difference; infinite where only one side is NaN or infinite."""
    count: int = 0
    """Elements that differ."""
    squares: float = 0.0
    """Of the baseline, finite values only."""
    worst: list[Worst] = field(default_factory=list)

    def rms(self, size: int) -> float:
        """Return the root mean square of the baseline."""
        return math.sqrt(self.squares / size) if size else 0.0


def spread_of(pair: PairView) -> Spread:
    """Return where the two arrays differ, in one pass."""
    shape = pair.shape
    widths = [max(1, -(-size // MOST_PLACES)) for size in shape]
    places = [-(-size // width) for size, width in zip(shape, widths, strict=True)]
    found = Spread([np.zeros(n) for n in places], [np.zeros(n, np.int64) for n in places], widths)
    held: list[_Element] = []
    for block in pair.blocks():
        error = block.error
        if not error.size:
            continue
        with np.errstate(all="ignore"):
            finite = block.baseline[np.isfinite(block.baseline)]
            found.squares += float(np.dot(finite, finite))
        found.most = max(found.most, float(error.max()))
        differs = error > 0
        count = int(np.count_nonzero(differs))
        if not count:
            continue
        found.count += count
        for axis in range(error.ndim):
            others = tuple(other for other in range(error.ndim) if other != axis)
            at = (np.arange(error.shape[axis]) + block.index[axis].start) // widths[axis]
            np.maximum.at(found.greatest[axis], at, error.max(axis=others))
            np.add.at(found.different[axis], at, differs.sum(axis=others))
        held = _worst_of(held, block)
    found.worst = [_describe(pair, element) for element in held]
    return found


def _worst_of(held: list[_Element], block: Block) -> list[_Element]:
    """Return the elements that differ most, of those held and those of the block; the first in order where equal."""
    flat = block.error.ravel()
    most = min(WORST, flat.size)
    at = np.sort(np.argpartition(-flat, most - 1)[:most]) if flat.size > most else np.arange(flat.size)
    for place in at[flat[at] > 0]:
        index = np.unravel_index(place, block.error.shape)
        where = [int(here) + start for here, start in zip(index, block.start, strict=True)]
        held.append(_Element(-float(flat[place]), where, float(block.baseline[index]), float(block.candidate[index])))
    return sorted(held, key=lambda element: (element.order, element.place))[:WORST]


def _describe(pair: PairView, element: _Element) -> Worst:
    first, second = element.baseline, element.candidate
    difference = second - first
    return Worst(
        index=element.place,
        baseline=first,
        candidate=second,
        difference=difference if math.isfinite(difference) else math.inf,
        ulp=float(ulps_of(pair, np.array([first]), np.array([second]))[0]),
    )


def ulps_of(pair: PairView, baseline: Numbers, candidate: Numbers) -> Numbers:
    """Return how many numbers of the coarser dtype lie between each two elements, as the pair kernel does; of integers, the difference."""
    with np.errstate(all="ignore"):
        if not pair.eps:
            return np.asarray(np.abs(candidate - baseline))
        return np.asarray(np.abs(_ordinals(pair, candidate) - _ordinals(pair, baseline)), dtype=np.float64)


def _ordinals(pair: PairView, values: Numbers) -> Array:
    """Return how many numbers of the dtype lie between zero and each value, with its sign."""
    values = np.ascontiguousarray(values, dtype=np.float64)
    if pair.eps == np.finfo(np.float64).eps:
        bits = values.view(np.int64)
        return np.where(bits < 0, -(bits & np.int64(2**63 - 1)), bits)
    fraction, exponent = np.frexp(np.abs(values))
    normal = (exponent - 1 - math.log2(pair.tiny) + 2 * fraction) / pair.eps
    below = np.abs(values) / (pair.tiny * pair.eps)
    return np.copysign(np.where(np.abs(values) >= pair.tiny, normal, below), values)


def profiles_of(found: Spread, shape: Sequence[int], names: Sequence[str]) -> list[Profile]:
    """Return the error along each axis of more than one index, in at most MOST_BINS bins."""
    profiles = []
    for axis, size in enumerate(shape):
        if size < 2:
            continue
        greatest, different = found.greatest[axis], found.different[axis]
        step = -(-len(greatest) // MOST_BINS)
        starts = range(0, len(greatest), step)
        profiles.append(
            Profile(
                axis=axis,
                name=names[axis],
                size=size,
                width=step * found.widths[axis],
                greatest=[float(greatest[at : at + step].max()) for at in starts],
                different=[int(different[at : at + step].sum()) for at in starts],
            )
        )
    return profiles


def histograms_of(pair: PairView, most: float) -> tuple[Histogram, Histogram, Histogram]:
    """Return histograms of the values of both sides, of the differences (signed, logarithmic), and of these in ULP.

    Of a large pair, evenly chosen elements are counted, and `sampled` says how many.
    """
    first, second, sampled = _sample(pair)
    sides = [side[np.isfinite(side)] for side in (first, second)]
    edges = _value_edges([side for side in sides if side.size])
    counts = [np.histogram(side, edges)[0].tolist() for side in sides]
    with np.errstate(all="ignore"):
        difference = second - first
    kept = np.isfinite(difference)
    signed = _signed_edges(most)
    differences = np.histogram(difference[kept], signed)[0]
    ulps = np.histogram(ulps_of(pair, first[kept], second[kept]), _ULP_EDGES)[0]
    return (
        Histogram(edges=edges.tolist(), counts={"baseline": counts[0], "candidate": counts[1]}, sampled=sampled),
        Histogram(edges=signed.tolist(), counts={"difference": differences.tolist()}, sampled=sampled),
        Histogram(edges=_ULP_EDGES, counts={"ulp": ulps.tolist()}, sampled=sampled),
    )


def _sample(pair: PairView) -> tuple[Numbers, Numbers, int]:
    """Return the elements of both sides, or every n-th of them, and how many these are (0 for all)."""
    if pair.size <= SAMPLE:
        blocks = list(pair.blocks())
        first, second = (
            np.concatenate([np.empty(0), *(getattr(block, side).ravel() for block in blocks)])
            for side in ("baseline", "candidate")
        )
        return first, second, 0
    step = -(-pair.size // SAMPLE)
    # Copies: a slice would keep its whole block in memory.
    parts = [(block.baseline.ravel()[::step].copy(), block.candidate.ravel()[::step].copy()) for block in pair.blocks()]
    first, second = (np.concatenate(side) for side in zip(*parts, strict=True))
    return first, second, first.size


def _value_edges(sides: Sequence[Numbers]) -> Numbers:
    """Return evenly spaced edges that hold all values."""
    low = min((float(side.min()) for side in sides), default=0.0)
    high = max((float(side.max()) for side in sides), default=1.0)
    with np.errstate(all="ignore"):
        edges = np.linspace(low, high, 2 * _HALF_BINS + 1)
    if np.isfinite(edges).all() and (np.diff(edges) > 0).all():
        return edges
    return (
        np.array([low, high]) if low < high else np.array([low - 0.5, low + 0.5]) if abs(low) < 1e15 else _around(low)
    )


def _around(value: float) -> Numbers:
    return np.array([np.nextafter(value, -np.inf), np.nextafter(value, np.inf)])


def _signed_edges(most: float) -> Numbers:
    """Return edges from -most to most: powers of ten towards zero on both sides, with one bin in the middle."""
    top = most if 0 < most < math.inf else 1.0
    least = max(top * 10.0**-_HALF_BINS, 1e-300)
    steps = np.geomspace(least, top, _HALF_BINS + 1)
    return np.concatenate([-steps[::-1], steps])
