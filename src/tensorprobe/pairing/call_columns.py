"""The calls of one side as columns of integers, which an alignment works on.

In: index entries, and details when they are needed. Out: arrays with a row for each call. Both sides are read with one
`Vocabulary`, so equal codes mean equal ops, numbers, repeats, modules and signatures. Names are made canonical once for
each distinct op, not for each call.
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
    """What a call's line says beyond its name: level, module path, a signature of its shapes and dtypes, its parameters."""

    level: str
    module: str
    signature: Hashable
    parameters: tuple[str, ...] = ()


Key = TypeVar("Key")


def _numbering() -> defaultdict[Key, int]:
    """Return a dict that gives each new key the next number on lookup; `get` adds nothing."""
    return defaultdict(count().__next__)


class Vocabulary:
    """The codes that both sides share."""

    def __init__(self) -> None:
        self.ops: defaultdict[str, int] = _numbering()
        self.numbers: defaultdict[str, int] = _numbering()
        self.repeats: defaultdict[int, int] = _numbering()
        self.modules: defaultdict[tuple[str, str], int] = _numbering()
        self.signatures: defaultdict[Hashable, int] = _numbering()


@dataclass(frozen=True)
class Columns:
    """One side. `spelling` numbers the ops as this side spells them; several spellings may have one `op`."""

    spelling: Column
    op: Column
    number: Column
    backward: Column
    repeat: Column
    stem: Column
    """Equal for a call, its recomputations and, except at level aten, its backward call."""
    leads: Mask
    """Calls that are aligned by themselves; the others follow the leading call with the same stem."""
    spellings: dict[str, int]
    respelled: Mask
    """Calls of ops that this side spells in several ways: each spelling has numbers of its own."""


def read_columns(entries: Sequence[Entry], vocabulary: Vocabulary, rename: Callable[[str], str]) -> Columns:
    """Return the columns of one side; `rename` is applied to its canonical ops."""
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
    # ATen ops are counted in each direction by itself: equal numbers do not link backward to forward.
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
        respelled=(np.bincount(ops) > 1)[ops[spelling]],
    )


def common_numbers(columns: Columns, vocabulary: Vocabulary) -> Column | None:
    """Return the numbers, counted again in execution order where several spellings are one op.

    Return None when that is impossible, because only the backward of a call to be counted was recorded.
    """
    merged = columns.respelled
    if not merged.any():
        return columns.number
    leading = np.flatnonzero(merged & columns.leads)
    counts = occurrences(pack((columns.op[leading], columns.backward[leading])))
    order = np.argsort(columns.stem[leading])
    stems = columns.stem[leading][order]
    rows = np.flatnonzero(merged)
    if not len(stems):
        return None
    at = np.searchsorted(stems, columns.stem[rows]).clip(max=len(stems) - 1)
    if not np.array_equal(stems[at], columns.stem[rows]):
        return None
    spelled = [vocabulary.numbers[str(number)] for number in range(counts.max() + 1)]
    numbers = columns.number.copy()
    numbers[rows] = np.array(spelled, dtype=np.int64)[counts[order][at]]
    return numbers


def number_values(vocabulary: Vocabulary) -> Column:
    """Return the value of each code of `Vocabulary.numbers`; -1 for a text that is not a number."""

    def value(text: str) -> int:
        if not text.isdecimal():
            return -1
        return int(text) if len(text) <= _MOST_DIGITS else 10**_MOST_DIGITS

    return np.array([value(text) for text in vocabulary.numbers], dtype=np.int64)


def has_holes(kinds: Column, values: Column, others: Column) -> Mask:
    """Return for each row of one side whether the numbers of its kind have gaps; `others` are the other side's kinds.

    A side that counts every kind from 1, and has most kinds as often as the other side, has no gaps.
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
    """Return the columns of modules (level and path) and signatures; `rename` is applied to module paths."""
    distinct: defaultdict[Detail, int] = _numbering()
    rows = np.array([distinct[detail] for detail in details], dtype=np.int64)
    modules, signatures = vocabulary.modules, vocabulary.signatures
    module_codes = [modules[detail.level, rename(detail.module)] for detail in distinct]
    signature = [signatures[detail.signature] for detail in distinct]
    return np.array(module_codes, dtype=np.int64)[rows], np.array(signature, dtype=np.int64)[rows]


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
        """Return the rows of one call: all its repetitions, and both directions if the name does not say which."""
        side = self._side
        rows: Column = self._by_number.get(self._numbers.get(name.number, -1), np.empty(0, dtype=np.int64))
        if name.direction:
            rows = rows[side.backward[rows] == (name.direction == "backward")]
        exact: Column = rows[side.spelling[rows] == side.spellings.get(name.op, -1)]
        alias: Column = rows[np.isin(side.spelling[rows], self._canonical.get(canonical_op(name.op), []))]
        return exact if len(exact) else alias
