"""Order-preserving alignment of two sequences of integers.

In: two arrays, in which equal numbers may be pairs. Out: positions of equal numbers in both, strictly increasing.

- `exact`: the longest common subsequence, if the sequences differ in at most `MOST_EDITS` insertions and deletions.
- `approximate`: beyond that. Numbers that each side has once are anchors; the gaps between them are searched step by step.
- `coarse`: if that takes too long, the n-th occurrence of a number is paired with the n-th on the other side.

A million numbers take a few seconds at most. No loop in Python compares positions: hashes of all prefixes give the length of
the common run at two positions in a few array operations, for all diagonals of the edit graph at once. `OrderSearch` applies
this to calls in passes, from calls that agree in everything to calls that agree in the op alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensorprobe.pairing.codes import Column, Mask, count_common, dense_both, merge, occurrences, pack_both, remaining

Method = Literal["exact", "approximate", "coarse"]
METHODS: tuple[Method, ...] = ("exact", "approximate", "coarse")
"""From the best method to the coarsest."""
MOST_EDITS = 2500
"""The alignment is exact up to this many insertions and deletions: about 2 seconds and 25 MB at the limit."""

_MOST_ROUNDS = 8
_EDITS_IN_A_STEP = 500
_MOST_STEPS = 24
_UNREACHED = -(1 << 40)


class Matches(NamedTuple):
    """Positions of the pairs on both sides, and how they were found."""

    baseline: Column
    candidate: Column
    method: Method


def align_sequences(baseline: Column, candidate: Column, *, most_edits: int = MOST_EDITS) -> Matches:
    """Return positions of equal numbers, strictly increasing on both sides."""
    a, b = dense_both(baseline, candidate)
    rows, columns = np.arange(len(a)), np.arange(len(b))
    found: list[tuple[Column, Column]] = []
    for _ in range(_MOST_ROUNDS):  # cutting common ends and dropping unshared numbers may each make more of the other
        head, tail = _common_ends(a, b)
        found += [(rows[:head], columns[:head]), (rows[len(a) - tail :], columns[len(b) - tail :])]
        a, rows = a[head : len(a) - tail], rows[head : len(rows) - tail]
        b, columns = b[head : len(b) - tail], columns[head : len(columns) - tail]
        keep_a, keep_b = _shared(a, b)
        if keep_a.all() and keep_b.all():
            break
        a, rows, b, columns = a[keep_a], rows[keep_a], b[keep_b], columns[keep_b]
    inner = _align_core(a, b, most_edits)
    found.append((rows[inner.baseline], columns[inner.candidate]))
    return Matches(
        merge(*(pair[0] for pair in found)),
        merge(*(pair[1] for pair in found)),
        inner.method,
    )


def gaps(matched: Column, rows: Column) -> Column:
    """Return for each row the number of matched rows before it: rows with the same number lie in the same gap."""
    return np.searchsorted(matched, rows).astype(np.int64)


def longest_increasing(values: Column) -> Column:
    """Return the positions of a longest strictly increasing subsequence."""
    if len(values) < 2 or bool(np.all(values[1:] > values[:-1])):
        return np.arange(len(values))
    tails: list[int] = []
    tail_places: list[int] = []
    before: list[int] = []
    for place, value in enumerate(values.tolist()):
        length = len(tails) if not tails or value > tails[-1] else bisect_left(tails, value)
        if length == len(tails):
            tails.append(value)
            tail_places.append(place)
        else:
            tails[length] = value
            tail_places[length] = place
        before.append(tail_places[length - 1] if length else -1)
    chosen = []
    place = tail_places[-1]
    while place >= 0:
        chosen.append(place)
        place = before[place]
    return np.array(chosen[::-1], dtype=np.int64)


def _common_ends(a: Column, b: Column) -> tuple[int, int]:
    shorter = min(len(a), len(b))
    head = _first_true(a[:shorter] != b[:shorter])
    rest = shorter - head
    tail = _first_true((a[len(a) - rest :] != b[len(b) - rest :])[::-1])
    return head, tail


def _first_true(flags: Mask) -> int:
    """Return the position of the first true flag; the length when there is none."""
    return int(flags.argmax()) if flags.any() else len(flags)


def _counts(a: Column, b: Column) -> tuple[Column, Column]:
    size = int(max(a.max(initial=-1), b.max(initial=-1))) + 1
    return np.bincount(a, minlength=size), np.bincount(b, minlength=size)


def _shared(a: Column, b: Column) -> tuple[Mask, Mask]:
    """Return which numbers occur on the other side too."""
    in_a, in_b = _counts(a, b)
    return in_b[a] > 0, in_a[b] > 0


def _align_core(a: Column, b: Column, most_edits: int) -> Matches:
    exact = _shortest_edit(a, b, most_edits)
    return _approximate(a, b, most_edits) if exact is None else Matches(*exact, "exact")


def _approximate(a: Column, b: Column, most_edits: int) -> Matches:
    """Pair anchors, then anchors between anchors until there are no more, then fill the gaps."""
    done: tuple[Column, Column] = (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
    method: Method = "approximate"
    for has_more in (True,) * _MOST_ROUNDS + (False,):
        rows, columns = remaining(len(a), done[0]), remaining(len(b), done[1])
        left = dense_both(*pack_both((gaps(done[0], rows), a[rows]), (gaps(done[1], columns), b[columns])))
        keep = _shared(*left)
        rows, columns, left = rows[keep[0]], columns[keep[1]], (left[0][keep[0]], left[1][keep[1]])
        found = _anchors(*left)
        if not len(found[0]) or not has_more:
            has_anchors = len(done[0]) > 0  # without them it is known that exactness takes too many edits
            *_, method = filled = _fill(*left, most_edits, try_exactly=has_anchors)
            found, has_more = filled[:2], False
        done = merge(done[0], rows[found[0]]), merge(done[1], columns[found[1]])
        if not has_more:
            break
    return Matches(*done, method)


def _fill(a: Column, b: Column, most_edits: int, *, try_exactly: bool) -> Matches:
    """Align exactly if possible, else in a bounded number of steps, and the rest coarsely."""
    exact = _shortest_edit(a, b, most_edits) if try_exactly else None
    if exact is not None:
        return Matches(*exact, "approximate")
    found = [(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))]
    row = column = 0
    for _ in range(_MOST_STEPS):
        search = _furthest(a[row:], b[column:], min(most_edits, _EDITS_IN_A_STEP))
        pairs = _walk_back(search)
        if not np.array_equal(a[row:][pairs[0]], b[column:][pairs[1]]):
            break
        found.append((pairs[0] + row, pairs[1] + column))
        row, column = row + search.end[0], column + search.end[1]
        if row == len(a) or column == len(b) or len(pairs[0]) < len(search.rows):
            break
    rest = _first_with_first(a[row:], b[column:])
    found.append((rest[0] + row, rest[1] + column))
    method: Method = "coarse" if row < len(a) and column < len(b) else "approximate"
    return Matches(np.concatenate([pair[0] for pair in found]), np.concatenate([pair[1] for pair in found]), method)


def _anchors(a: Column, b: Column) -> tuple[Column, Column]:
    """Return pairs of numbers that each side has once: the most that keep their order."""
    in_a, in_b = _counts(a, b)
    once = (in_a == 1) & (in_b == 1)
    rows, columns = np.flatnonzero(once[a]), np.flatnonzero(once[b])
    place_in_b = np.empty(len(in_b), dtype=np.int64)
    place_in_b[b[columns]] = columns
    partners = place_in_b[a[rows]]
    kept = longest_increasing(partners)
    return rows[kept], partners[kept]


def _first_with_first(a: Column, b: Column) -> tuple[Column, Column]:
    return _anchors(*dense_both(*pack_both((a, occurrences(a)), (b, occurrences(b)))))


class _CommonRuns:
    """Length of the common run of a from x and b from y, for many (x, y) at once."""

    def __init__(self, a: Column, b: Column) -> None:
        self._a, self._b = a, b
        random = np.random.default_rng(0x5EED)
        size = int(max(a.max(initial=0), b.max(initial=0))) + 1
        values = random.integers(1 << 63, size=size, dtype=np.uint64)
        odd = (
            int(random.integers(1 << 63, dtype=np.uint64)) * 2 + 1
        )  # in Python: numpy 1 makes floats of uint64 and int
        base = np.full(max(len(a), len(b)) + 1, odd, dtype=np.uint64)
        base[0] = 1
        self._powers = np.cumprod(base)
        self._hash_a, self._hash_b = (self._beginnings(values[side]) for side in (a, b))

    def _beginnings(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        hashes = np.zeros(len(values) + 1, dtype=np.uint64)
        np.cumsum(values * self._powers[: len(values)], out=hashes[1:])
        return hashes

    def lengths(self, x: Column, y: Column) -> Column:
        """Return for each pair of positions the length of the common run that begins there."""
        room = np.minimum(len(self._a) - x, len(self._b) - y)
        result = np.zeros(len(x), dtype=np.int64)
        inside = np.flatnonzero(room > 0)
        alike = inside[self._a[x[inside]] == self._b[y[inside]]]
        if len(alike):
            result[alike] = self._measure(x[alike], y[alike], room[alike])
        return result

    def _measure(self, x: Column, y: Column, room: Column) -> Column:
        got = np.ones(len(x), dtype=np.int64)
        step = 1 << int(room.max()).bit_length()
        while step := step >> 1:
            end = got + step
            fits = np.flatnonzero(end <= room)
            if len(fits):
                got[fits] += step * self._equal(x[fits] + got[fits], y[fits] + got[fits], step)
        return got

    def _equal(self, x: Column, y: Column, length: int) -> Mask:
        in_a = self._hash_a[x + length] - self._hash_a[x]
        in_b = self._hash_b[y + length] - self._hash_b[y]
        alike: Mask = in_a * self._powers[y] == in_b * self._powers[x]
        return alike


class _Row(NamedTuple):
    """The furthest point on each diagonal low, low + 2, … for one number of edits."""

    low: int
    reach: Column

    def at(self, diagonal: int) -> int:
        place, odd = divmod(diagonal - self.low, 2)
        return int(self.reach[place]) if not odd and 0 <= place < len(self.reach) else _UNREACHED


class _Search(NamedTuple):
    """What was reached with 0, 1, … edits in sequences of these lengths, and the furthest point."""

    rows: list[_Row]
    lengths: tuple[int, int]
    end: tuple[int, int]


def _shortest_edit(a: Column, b: Column, most_edits: int) -> tuple[Column, Column] | None:
    """Return a longest common subsequence by Myers' greedy search; None when it takes more than `most_edits` edits."""
    in_a, in_b = _counts(a, b)
    if int(np.abs(in_a - in_b).sum()) > most_edits:
        return None
    search = _furthest(a, b, most_edits)
    if search.end != search.lengths:
        return None
    pairs = _walk_back(search)
    # In theory, different runs may have equal hashes; then the search has gone wrong.
    return pairs if np.array_equal(a[pairs[0]], b[pairs[1]]) else None


def _furthest(a: Column, b: Column, most_edits: int) -> _Search:
    """Search with more and more edits until the ends of both are reached, or `most_edits` are used."""
    runs = _CommonRuns(a, b)
    across, down = len(a), len(b)
    zero = most_edits + 2
    reach = np.full(2 * zero + 1, _UNREACHED, dtype=np.int64)
    reach[zero + 1] = 0
    rows: list[_Row] = []
    for edits in range(most_edits + 1):
        low = -edits + 2 * max(0, edits - down)
        high = edits - 2 * max(0, edits - across)
        diagonals = np.arange(low, high + 1, 2)
        inserted = reach[zero + low + 1 : zero + high + 2 : 2]
        deleted = reach[zero + low - 1 : zero + high : 2] + 1
        x = np.maximum(
            np.where(inserted - diagonals > down, _UNREACHED, inserted), np.where(deleted > across, _UNREACHED, deleted)
        )
        alive = np.flatnonzero(x >= 0)
        x[alive] += runs.lengths(x[alive], (x - diagonals)[alive])
        reach[zero + low : zero + high + 1 : 2] = x
        rows.append(_Row(low, x))
        if rows[-1].at(across - down) >= across:
            break
    furthest = int(np.argmax(2 * x - diagonals))
    return _Search(rows, (across, down), (int(x[furthest]), int(x[furthest] - diagonals[furthest])))


def _walk_back(search: _Search) -> tuple[Column, Column]:
    """Return the pairs on the path to the furthest point."""
    x, y = search.end
    runs: list[tuple[int, int, int]] = []
    for row in reversed(search.rows[:-1]):
        diagonal = x - y
        inserted, deleted = row.at(diagonal + 1), row.at(diagonal - 1) + 1
        if inserted - diagonal > search.lengths[1]:
            inserted = _UNREACHED
        if deleted > search.lengths[0]:
            deleted = _UNREACHED
        start = max(inserted, deleted)
        runs.append((start, start - diagonal, x - start))
        x = inserted if inserted >= deleted else deleted - 1
        y = x - diagonal - 1 if inserted >= deleted else x - diagonal + 1
    runs.append((0, 0, x))
    runs.reverse()
    return (
        np.concatenate([np.arange(start, start + length) for start, _, length in runs]),
        np.concatenate([np.arange(start, start + length) for _, start, length in runs]),
    )


class OrderSearch:
    """Order-preserving pairs, found in passes: each pass searches only the gaps that earlier passes left."""

    def __init__(self, kinds: tuple[Column, Column], *, swapped: bool) -> None:
        self._lengths = len(kinds[0]), len(kinds[1])
        self._swapped = swapped
        self.found: tuple[Column, Column] = (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
        self.method: Method = "exact"

    def find(self, tokens: tuple[Column, Column]) -> None:
        """Run one pass, in which equal tokens may be pairs."""
        rows, columns, in_gaps = self._left(tokens)
        self._align(rows, columns, in_gaps)

    def find_where_counts_agree(self, tokens: tuple[Column, Column]) -> None:
        """Run one pass over the tokens that both sides of a gap have equally often."""
        rows, columns, in_gaps = self._left(tokens)
        equal = _equally_often(*in_gaps)
        self._align(rows[equal[0]], columns[equal[1]], (in_gaps[0][equal[0]], in_gaps[1][equal[1]]))

    def _left(self, tokens: tuple[Column, Column]) -> tuple[Column, Column, tuple[Column, Column]]:
        rows, columns = (remaining(length, done) for length, done in zip(self._lengths, self.found, strict=True))
        in_gaps = pack_both(
            (gaps(self.found[0], rows), tokens[0][rows]), (gaps(self.found[1], columns), tokens[1][columns])
        )
        return rows, columns, in_gaps

    def _align(self, rows: Column, columns: Column, tokens: tuple[Column, Column]) -> None:
        if not len(rows) or not len(columns):
            return
        if self._swapped:
            partners, found, method = align_sequences(tokens[1], tokens[0])
        else:
            found, partners, method = align_sequences(*tokens)
        self.found = merge(self.found[0], rows[found]), merge(self.found[1], columns[partners])
        self.method = max(self.method, method, key=METHODS.index)


def _equally_often(left: Column, right: Column) -> tuple[Mask, Mask]:
    codes = dense_both(left, right)
    size = len(left) + len(right)
    counts = [np.bincount(side, minlength=size) for side in codes]
    equal = counts[0] == counts[1]
    return equal[codes[0]], equal[codes[1]]


def tokens_from_fine_to_coarse(
    kinds: tuple[Column, Column],
    modules: tuple[Column, Column],
    signatures: tuple[Column, Column],
    without_module: Column,
) -> Iterator[tuple[Column, Column]]:
    """Yield the tokens of each pass.

    A pass in which most calls have no counterpart is left out. With another batch size or dtype nearly all signatures
    differ, and the few that agree by accident would hold the rest in wrong positions.
    """
    in_modules = dense_both(*pack_both((kinds[0], modules[0]), (kinds[1], modules[1])))
    signed = dense_both(*pack_both((in_modules[0], signatures[0]), (in_modules[1], signatures[1])))
    in_module = count_common(*in_modules)
    modules_help = 2 * in_module >= count_common(*kinds)
    if modules_help and 2 * count_common(*signed) >= in_module:
        yield signed
    if modules_help:
        yield in_modules
    # A module that only one side has matches any module: the model was wrapped, or a module was renamed.
    size = 1 + int(max(module.max(initial=0) for module in (*modules, without_module)))
    known = np.minimum(*(np.bincount(module, minlength=size) for module in modules)) > 0
    known[without_module] = False
    yield pack_both(
        *((kind, np.where(known[module], module + 1, 0)) for kind, module in zip(kinds, modules, strict=True))
    )
