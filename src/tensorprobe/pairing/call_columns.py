"""The calls of one side as columns of integers: what an alignment works on.

In: index entries, and details when they are needed. Out: arrays, a row for each call. Equal numbers mean equal ops, numbers,
repeats, places and signatures on both sides, because both are read with one `Vocabulary`. Names are made canonical once
for each distinct op, not for each call.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple, TypeVar

import numpy as np

from tensorprobe.ops.names import CallName, canonical_op, parse_call_name
from tensorprobe.pairing.codes import Column, Mask, dense, dense_both, occurrences, pack
from tensorprobe.record.run import Entry

_IS_BACKWARD = {"forward": 0, "backward": 1}
_MOST_DIGITS = 18


class Detail(NamedTuple):
    """What the line of a call says beyond its name: level, module path, and a signature of the shapes and dtypes."""

    level: str
    module: str
    signature: Hashable


Key = TypeVar("Key")


def _numbering() -> defaultdict[Key, int]:
    """Gives each new key the next number when it is looked up; with `get` it is an ordinary dict."""
    return defaultdict(count().__next__)


class Vocabulary:
    """Numbers for what both sides speak of."""

    def __init__(self) -> None:
        self.ops: defaultdict[str, int] = _numbering()
        self.numbers: defaultdict[str, int] = _numbering()
        self.repeats: defaultdict[int, int] = _numbering()
        self.places: defaultdict[tuple[str, str], int] = _numbering()
        self.signatures: defaultdict[Hashable, int] = _numbering()


@dataclass(frozen=True)
class Columns:
    """One side. `spelling` numbers the ops as this side spells them; several may have one `op`."""

    spelling: Column
    op: Column
    number: Column
    backward: Column
    repeat: Column
    stem: Column
    """What a call has in common with its own repetitions and, except at level aten, with its backward."""
    leads: Mask
    """Calls that are aligned for themselves; the others follow the one that has the same stem and leads."""
    spellings: dict[str, int]
    op_of_spelling: Column


def read_columns(entries: Sequence[Entry], vocabulary: Vocabulary, rename: Callable[[str], str]) -> Columns:
    """The columns of one side; `rename` is applied to its canonical ops."""
    spellings: defaultdict[str, int] = _numbering()
    numbers, repeats = vocabulary.numbers, vocabulary.repeats
    rows: tuple[list[int], ...] = ([], [], [], [])
    add_spelling, add_number, add_backward, add_repeat = (row.append for row in rows)
    for _, name, repeat in entries:
        try:
            op, number, last = name.rsplit(".", 2)
            backward = _IS_BACKWARD.get(last)
            if backward is None:
                backward, number = _IS_BACKWARD[number], last
        except (ValueError, KeyError):
            op, number, direction = parse_call_name(name)
            backward = _IS_BACKWARD.get(direction, 0)
        add_spelling(spellings[op])
        add_number(numbers[number])
        add_backward(backward)
        add_repeat(repeat and 1 + repeats[repeat])
    spelling, number_column, backward_column, repeat_column = (np.array(row, dtype=np.int64) for row in rows)
    canonical = [rename(canonical_op(op)) for op in spellings]
    ops = np.array([vocabulary.ops[op] for op in canonical], dtype=np.int64)
    # At level aten forward and backward are counted apart: equal numbers say nothing there.
    is_aten = np.array([op.startswith("Aten.") for op in canonical], dtype=np.bool_)[spelling]
    return Columns(
        spelling=spelling,
        op=ops[spelling],
        number=number_column,
        backward=backward_column,
        repeat=repeat_column,
        stem=pack((spelling, number_column, backward_column * is_aten)),
        leads=(repeat_column == 0) & ((backward_column == 0) | is_aten),
        spellings=spellings,
        op_of_spelling=ops,
    )


def common_numbers(columns: Columns, vocabulary: Vocabulary) -> Column | None:
    """The numbers, counted anew in execution order where several spellings have become one op.

    None when that cannot be done, because a call that would have to be counted has only its backward in the record.
    """
    merged = (np.bincount(columns.op_of_spelling) > 1)[columns.op]
    if not merged.any():
        return columns.number
    leading = np.flatnonzero(merged & columns.leads)
    counts = occurrences(pack((columns.op[leading], columns.backward[leading])))
    order = np.argsort(columns.stem[leading])
    stems = columns.stem[leading][order]
    rows = np.flatnonzero(merged)
    if not len(stems):
        return None
    places = np.searchsorted(stems, columns.stem[rows]).clip(max=len(stems) - 1)
    if not np.array_equal(stems[places], columns.stem[rows]):
        return None
    spelled = [vocabulary.numbers[str(number)] for number in range(counts.max() + 1)]
    numbers = columns.number.copy()
    numbers[rows] = np.array(spelled, dtype=np.int64)[counts[order][places]]
    return numbers


def number_values(vocabulary: Vocabulary) -> Column:
    """What each code of `Vocabulary.numbers` stands for; -1 for a text that is no number."""

    def value(text: str) -> int:
        if not text.isdecimal():
            return -1
        return int(text) if len(text) <= _MOST_DIGITS else 10**_MOST_DIGITS

    return np.array([value(text) for text in vocabulary.numbers], dtype=np.int64)


def has_holes(kinds: Column, values: Column, others: Column) -> Mask:
    """For each row of one side whether the numbers of its kind leave some out; `others` are the kinds of the other side.

    A side that counts every kind from 1, and has most kinds as often as the other side, leaves nothing out.
    """
    kind, other = dense_both(kinds, others)
    size = 1 + int(max(kind.max(initial=0), other.max(initial=0)))
    least, most = np.full(size, np.iinfo(np.int64).max), np.full(size, -1)
    np.minimum.at(least, kind, values)
    np.maximum.at(most, kind, values)
    first = np.unique(pack((kind, dense(values + 1))), return_index=True)[1]
    distinct = np.bincount(kind[first], minlength=size)
    used = distinct > 0
    if ((least == 1) & (most == distinct))[used].all():
        as_often = (np.bincount(kind, minlength=size) == np.bincount(other, minlength=size))[used]
        if 2 * as_often.sum() > len(as_often):
            return np.zeros(len(kinds), dtype=np.bool_)
    holes: Mask = ((least >= 0) & (most + 1 > distinct))[kind]
    return holes


def read_details(
    details: Sequence[Detail], vocabulary: Vocabulary, rename: Callable[[str], str]
) -> tuple[Column, Column]:
    """The columns `place` (level and module path) and `signature`; `rename` is applied to module paths."""
    distinct: defaultdict[Detail, int] = _numbering()
    rows = np.array([distinct[detail] for detail in details], dtype=np.int64)
    places, signatures = vocabulary.places, vocabulary.signatures
    place = [places[level, rename(module)] for level, module, _ in distinct]
    signature = [signatures[detail.signature] for detail in distinct]
    return np.array(place, dtype=np.int64)[rows], np.array(signature, dtype=np.int64)[rows]


class CallFinder:
    """Finds the rows of calls by name: as this side spells it, else by its canonical name."""

    def __init__(self, side: Columns, vocabulary: Vocabulary, names: Sequence[CallName]) -> None:
        self._side = side
        self._numbers = vocabulary.numbers
        wanted = [self._numbers[name.number] for name in names if name.number in self._numbers]
        rows = np.flatnonzero(np.isin(side.number, wanted))
        rows = rows[np.argsort(side.number[rows], kind="stable")]
        numbers, starts = np.unique(side.number[rows], return_index=True)
        self._by_number = dict(zip(numbers.tolist(), np.split(rows, starts[1:]), strict=False))
        self._canonical: dict[str, list[int]] = {}
        for op, spelling in side.spellings.items():
            self._canonical.setdefault(canonical_op(op), []).append(spelling)

    def rows(self, name: CallName) -> Column:
        """The rows of one call: all its repetitions, and both directions if the name does not say which."""
        side = self._side
        rows: Column = self._by_number.get(self._numbers.get(name.number, -1), np.empty(0, dtype=np.int64))
        if name.direction:
            rows = rows[side.backward[rows] == (name.direction == "backward")]
        exact: Column = rows[side.spelling[rows] == side.spellings.get(name.op, -1)]
        alias: Column = rows[np.isin(side.spelling[rows], self._canonical.get(canonical_op(name.op), []))]
        return exact if len(exact) else alias
