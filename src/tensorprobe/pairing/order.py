"""Pairs of calls by their order, in passes from what agrees in everything to what agrees in the op alone.

In: columns of integers for the calls of both sides, in execution order. Out: rows of both, strictly increasing. Rows that
an earlier pass has paired stand; a later pass only fills the gaps between them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tensorprobe.pairing.codes import Column, Mask, count_common, dense_both, merge, pack_both, remaining
from tensorprobe.pairing.sequence import METHODS, Method, align_sequences, gaps


class OrderSearch:
    """Order-preserving pairs, found in passes: each pass looks only into the gaps that those before it left."""

    def __init__(self, kinds: tuple[Column, Column], *, swapped: bool) -> None:
        self._lengths = len(kinds[0]), len(kinds[1])
        self._swapped = swapped
        self.found: tuple[Column, Column] = (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
        self.method: Method = "exact"

    def find(self, tokens: tuple[Column, Column]) -> None:
        """One pass: tokens that are equal may be a pair."""
        rows, columns, in_gaps = self._left(tokens)
        self._align(rows, columns, in_gaps)

    def find_where_counts_agree(self, tokens: tuple[Column, Column]) -> None:
        """One pass over those tokens only that a gap has equally often on both sides."""
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
    kinds: tuple[Column, Column], places: tuple[Column, Column], signatures: tuple[Column, Column], unplaced: Column
) -> Iterator[tuple[Column, Column]]:
    """What must agree, pass by pass.

    A pass for which most calls have no counterpart is left out: with another batch size or dtype nearly all signatures
    differ, and the few that agree by accident would pin the rest to the wrong places.
    """
    placed = dense_both(*pack_both((kinds[0], places[0]), (kinds[1], places[1])))
    signed = dense_both(*pack_both((placed[0], signatures[0]), (placed[1], signatures[1])))
    in_module = count_common(*placed)
    places_help = 2 * in_module >= count_common(*kinds)
    if places_help and 2 * count_common(*signed) >= in_module:
        yield signed
    if places_help:
        yield placed
    # A module that only one side knows may be any: the model was wrapped, or a module got another name.
    size = 1 + int(max(place.max(initial=0) for place in (*places, unplaced)))
    known = np.minimum(*(np.bincount(place, minlength=size) for place in places)) > 0
    known[unplaced] = False
    yield pack_both(*((kind, np.where(known[place], place + 1, 0)) for kind, place in zip(kinds, places, strict=True)))
