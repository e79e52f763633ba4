"""Find the pattern in which two arrays differ: which rows, columns, tiles, tails, and what the candidate holds there.

In: a `PairView`, its `Spread`, a name for each axis. Out: a `Pattern`, or None where there is nothing to say. A pattern is named
only if elements that differ at random would hardly ever lie like this, so noise has none. It says what is there and
gives no verdict.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tensorprobe.model.diff import AxisPart, Effect, Extent, Pattern
from tensorprobe.numerics.pair_view import Array, Numbers, PairView
from tensorprobe.numerics.spread import Spread

SAMPLE = 1 << 20
"""Elements that are looked at to see what the candidate holds."""
_CHANCE = math.log(1e-3)
"""A place is a pattern if it is less probable than this for elements that differ at random."""
_LARGEST_BOX = 0.75
"""A box that is a greater share of the tensor tells nothing."""
_NOISE_ULPS = 32.0
_DWARFED = 1e-3
"""Differences below this share of the greatest one are dwarfed by it."""
_REST = 0.05
"""What a scale, bias or move leaves of the difference, at most."""
_MOST_REST = 0.35
_LEAST = 8
"""Fewer elements show no effect."""
_FEW = 3
_PROPORTIONAL = ("zero", "scale", "sign")
"""Effects that a zero of the baseline does not show."""
_MOST_SHIFT = 4
_MOST_LISTED = 6


@dataclass(frozen=True)
class _Box:
    """The indices, axis by axis, at which elements differ by more than a threshold."""

    axes: list[AxisPart]
    members: list[Array]
    count: int
    others: float

    @property
    def share(self) -> float:
        """How much of the tensor lies in it."""
        return math.prod(len(held) / part.size for held, part in zip(self.members, self.axes, strict=True))


class _Found(NamedTuple):
    effect: Effect
    value: float = 0.0
    axis: int = -1
    by: tuple[int, ...] = ()


def find_pattern(pair: PairView, found: Spread, names: Sequence[str]) -> Pattern | None:
    """Return the pattern, or None if there is none or nothing differs."""
    shape = pair.shape
    if not found.count or pair.size < _LEAST:
        return None
    noise = _NOISE_ULPS * pair.eps * found.rms(pair.size)
    whole = tuple(slice(0, size) for size in shape)
    if found.count * 2 > pair.size or (found.most == math.inf):
        effect = _effect(pair, whole, None)
        if effect.effect and effect.effect not in ("nan", "inf"):
            axes = [_part(axis, names[axis], size, np.arange(size)) for axis, size in enumerate(shape) if size > 1]
            return _pattern(_Box(axes, [], found.count, 0.0), effect, names)
    boxes = [_box(pair, found, names, threshold) for threshold in _thresholds(found, noise)]
    few = next((box for box in boxes if box.count <= _FEW and _is_few(box)), None)
    placed = [box for box in boxes if box.share <= _LARGEST_BOX and _log_chance(box, pair.size) < _CHANCE]
    if placed:  # a higher threshold may show a tile where a lower one shows rows here and there
        box = min(placed, key=lambda box: sum(part.extent == "some" for part in box.axes))
        if few is None or few.others >= box.others:
            effect = _swap(pair, box) or _effect(pair, _index_of(box, shape), box.others)
            return _pattern(_widened(pair, box) if effect.effect in _PROPORTIONAL else box, effect, names)
    if few is not None:
        elements = [worst.index for worst in found.worst[: few.count]]
        return _pattern(few, _few_effect(found, few.count), names, elements=elements)
    return None


def _pattern(box: _Box, found: _Found, names: Sequence[str], elements: Sequence[list[int]] = ()) -> Pattern:
    return Pattern(
        count=box.count,
        axes=[] if elements else box.axes,
        elements=list(elements),
        others=box.others,
        effect=found.effect,
        value=found.value,
        axis=found.axis,
        axis_name=names[found.axis] if found.axis >= 0 else "",
        by=list(found.by),
    )


def _thresholds(found: Spread, noise: float) -> list[float]:
    """Return what a difference must exceed to count: nothing, noise, or what the greatest difference dwarfs."""
    most = found.most if math.isfinite(found.most) else 0.0
    wanted = [0.0, noise, most * _DWARFED]
    if found.most == math.inf:
        finite = [worst.difference for worst in found.worst if math.isfinite(worst.difference)]
        wanted.append(max((abs(each) for each in finite), default=0.0))
    return sorted({each for each in wanted if each < found.most})


def _box(pair: PairView, found: Spread, names: Sequence[str], threshold: float) -> _Box:
    count, others = 0, 0.0
    for block in pair.blocks():
        above = block.error > threshold
        count += int(np.count_nonzero(above))
        rest = block.error[~above]
        others = max(others, float(rest.max()) if rest.size else 0.0)
    axes, members = [], []
    for axis, size in enumerate(pair.shape):
        if size < 2:
            continue
        width = found.widths[axis]
        held = np.flatnonzero(found.greatest[axis] > threshold)
        held = held if width == 1 else np.minimum((held[:, None] * width + np.arange(width)).ravel(), size - 1)
        axes.append(_part(axis, names[axis], size, held))
        members.append(held)
    return _Box(axes, members, count, others)


def _part(axis: int, name: str, size: int, held: Array) -> AxisPart:
    """Describe a set of indices, sorted."""
    first, last, count = int(held[0]), int(held[-1]), len(held)
    period = 0
    extent: Extent
    if count == size:
        extent = "all"
    elif count == 1:
        extent = "one"
    elif last - first + 1 == count:
        extent = "head" if first == 0 else "tail" if last == size - 1 else "range"
    elif repeated := _repeated(held, size):
        extent, period, first, last = repeated
        count = last - first + 1
    else:
        extent = "some"
    listed = [int(each) for each in held[:_MOST_LISTED]] if extent == "some" and len(held) <= _MOST_LISTED else []
    return AxisPart(
        axis=axis,
        name=name,
        size=size,
        extent=extent,
        first=first,
        last=last,
        count=count,
        period=period,
        listed=listed,
    )


def _repeated(held: Array, size: int) -> tuple[Extent, int, int, int] | None:
    """Return the period of the indices and the first run of them, if the same ones of every `period` are there."""
    gaps = np.diff(held)
    run = int(np.argmax(gaps > 1)) + 1
    if run >= len(held):
        return None
    period = int(held[run] - held[0])
    first, last = int(held[0]), int(held[run - 1])
    residues = np.arange(size) % period
    wanted = np.flatnonzero((residues >= first % period) & (residues <= last % period))
    if first >= period or size // period < _FEW or not np.array_equal(wanted, held):
        return None
    return ("every" if run == 1 else "blocks"), period, first, last


def _is_few(box: _Box) -> bool:
    """Whether the elements are named one by one: a whole row of three is a row."""
    return box.count == 1 or math.prod(len(held) for held in box.members) > box.count or box.count == 2


def _log_chance(box: _Box, size: int) -> float:
    """Return the logarithm of how probable such a box is if `count` of `size` elements are chosen at random."""
    inside = math.prod(len(held) for held in box.members)
    choices = 0.0
    for part, held in zip(box.axes, box.members, strict=True):
        if part.extent == "some":
            choices += _log_choose(part.size, len(held))
        elif part.extent != "all":
            choices += 2 * math.log(part.size)
    return choices + _log_choose(inside, box.count) - _log_choose(size, box.count)


def _log_choose(total: int, chosen: int) -> float:
    return math.lgamma(total + 1) - math.lgamma(chosen + 1) - math.lgamma(total - chosen + 1)


def _widened(pair: PairView, box: _Box) -> _Box:
    """Return the box with all indices of an axis, where it is limited along it only because the baseline is zero elsewhere."""
    axes, members = list(box.axes), list(box.members)
    for at, part in enumerate(box.axes):
        wide = np.arange(part.size)
        tried = [*members[:at], wide, *members[at + 1 :]]
        inside = math.prod(len(held) for held in tried)
        if part.extent == "all" or inside > min(SAMPLE, _LARGEST_BOX * pair.size):
            continue
        index: list[Any] = [slice(0, size) for size in pair.shape]
        for held, other in zip(tried, box.axes, strict=True):
            index[other.axis] = held
        index[part.axis] = np.setdiff1d(wide, members[at])
        if not _read(pair, tuple(index))[0].any():
            axes[at], members[at] = _part(part.axis, part.name, part.size, wide), wide
    return _Box(axes, members, box.count, box.others)


def _index_of(box: _Box, shape: Sequence[int]) -> tuple[Any, ...]:
    """Return the box as an index of the arrays: slices, where that is exact, else lists of indices."""
    index: list[Any] = [slice(0, size) for size in shape]
    for part, held in zip(box.axes, box.members, strict=True):
        if part.extent in ("one", "head", "tail", "range"):
            index[part.axis] = slice(part.first, part.last + 1)
        elif part.extent == "every":
            index[part.axis] = slice(part.first, part.size, part.period)
        elif part.extent != "all":
            index[part.axis] = held
    return tuple(index)


def _read(pair: PairView, index: tuple[Any, ...]) -> tuple[Numbers, Numbers]:
    """Return both sides at an index, or at the first SAMPLE elements of it along its outermost axes."""
    own = list(index[: pair.baseline.ndim])
    room = SAMPLE
    lists = []
    for axis in reversed(range(len(own))):
        part = own[axis]
        places = np.arange(pair.baseline.shape[axis])[part] if isinstance(part, slice) else np.asarray(part)
        places = places[: max(1, room)]
        room //= max(1, len(places))
        lists.append(places)
    chosen: Any = tuple(reversed(lists))
    shape = tuple(slice(int(held[0]), int(held[-1]) + 1) if len(held) else slice(0, 0) for held in chosen)
    block = pair.block(shape)
    inner = np.ix_(*(held - held[0] if len(held) else held for held in chosen)) if chosen else ()
    return block.baseline[inner], block.candidate[inner]


def _few_effect(found: Spread, count: int) -> _Found:
    candidate = [float(worst.candidate) for worst in found.worst[:count]]
    if all(math.isnan(each) for each in candidate):
        return _Found("nan")
    if all(math.isinf(each) for each in candidate):
        return _Found("inf")
    return _Found("zero") if all(each == 0 for each in candidate) else _Found("")


def _effect(pair: PairView, index: tuple[Any, ...], others: float | None) -> _Found:
    """Return what the candidate holds at an index: of the whole tensor (`others` is None) or where it differs by more."""
    first, second = _read(pair, index)
    with np.errstate(all="ignore"):
        error = np.abs(second - first)
        if others is not None:
            hit = ~(error <= others)
            first, second = first[hit], second[hit]
        if first.size and np.isnan(second).all():
            return _Found("nan")
        if first.size and np.isinf(second).all():
            return _Found("inf")
        finite = np.isfinite(first) & np.isfinite(second)
        if first.size < _LEAST or not finite.all():
            return _Found("")
        return next((found for found in _effects(pair, first, second, others is None) if found.effect), _Found(""))


def _effects(pair: PairView, first: Numbers, second: Numbers, whole: bool) -> Iterator[_Found]:
    difference = second - first
    size = float(np.linalg.norm(difference))
    if not size:
        return
    if not second.any():
        yield _Found("zero")
    if np.ptp(second) == 0:
        yield _Found("constant", float(second.flat[0]))
    norm = float(np.linalg.norm(first))
    allowed = min(_MOST_REST, _REST + 2 * pair.eps * norm / size)
    if norm:
        factor = float(np.vdot(first, second)) / norm**2
        if float(np.linalg.norm(second - factor * first)) <= allowed * size:
            yield _Found("sign") if abs(factor + 1) < _REST else _Found("scale", factor)
    mean = float(difference.mean())
    if float(np.linalg.norm(difference - mean)) <= allowed * size:
        yield _Found("bias", mean)
    if whole:
        yield from _moves(first, second, allowed * size)
        yield _rounded(pair, first, second)


def _moves(first: Numbers, second: Numbers, allowed: float) -> Iterator[_Found]:
    """Yield how the values of the whole tensor were moved: shifted along an axis, or transposed."""
    for axis in range(first.ndim):
        for by in range(1, min(_MOST_SHIFT, first.shape[axis] - 2) + 1):
            ours, theirs = (_cut(first, axis, part) for part in (slice(None, -by), slice(by, None)))
            moved = [
                (_cut(second, axis, slice(by, None)), ours, by),
                (_cut(second, axis, slice(None, -by)), theirs, -by),
            ]
            for there, here, shift in moved:
                if float(np.linalg.norm(there - here)) <= allowed and np.ptp(here):
                    yield _Found("shift", axis=axis, by=(shift,))
    square = first.ndim > 1 and first.shape[-1] == first.shape[-2]
    if square and float(np.linalg.norm(second - np.swapaxes(first, -1, -2))) <= allowed:
        yield _Found("transposed")


def _cut(values: Numbers, axis: int, part: slice) -> Numbers:
    return values[(slice(None),) * axis + (part,)]


def _swap(pair: PairView, box: _Box) -> _Found | None:
    """Return which two slices have changed places, if that is all."""
    axes = [(part, held) for part, held in zip(box.axes, box.members, strict=True) if part.extent != "all"]
    if len(axes) != 1 or len(axes[0][1]) != 2:
        return None
    part, held = axes[0]
    index: list[Any] = [slice(0, size) for size in pair.shape]
    index[part.axis] = held
    first, second = _read(pair, tuple(index))
    if first.shape[part.axis] != 2:
        return None
    with np.errstate(all="ignore"):
        size = float(np.linalg.norm(second - first))
        rest = float(np.linalg.norm(second - np.flip(first, part.axis)))
    return _Found("swap", axis=part.axis, by=(int(held[0]), int(held[1]))) if rest <= _REST * size else None


def _rounded(pair: PairView, first: Numbers, second: Numbers) -> _Found:
    """Return how many bits of the mantissa the candidate uses, if these are fewer than the baseline's and the dtype's."""
    bits = [_bits(values) for values in (first, second)]
    own = round(-math.log2(pair.eps)) if pair.eps else 0
    return _Found("rounded", bits[1]) if bits[1] <= min(bits[0], own) - 3 else _Found("")


def _bits(values: Numbers) -> int:
    mantissa, _ = np.frexp(values[values != 0])
    scaled = np.abs(mantissa * 2.0**53).astype(np.int64)
    if not scaled.size:
        return 0
    together = int(np.bitwise_or.reduce(scaled))
    return 52 - ((together & -together).bit_length() - 1)
