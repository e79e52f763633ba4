"""How one of the older tools writes a result: its columns, its words, its rule; and the table that comes of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from tensorprobe.legacy.compared.lines import Spell
from tensorprobe.legacy.compared.paired import BY_VALUES, NOTHING, UNMATCHED, Paired, StackOf
from tensorprobe.record.run import Segment

NAMES = ("NPU Name", "Bench Name")
MESSAGE = "Err_message"
STACK_COLUMN = "NPU_Stack_Info"
BLIND_TO_SCALE = "The rule is blind to scale (a tensor times 1.01 passes); to judge each op by its own rounding"
Columns = dict[str, list[Any]]


@dataclass(frozen=True, kw_only=True)
class Form:
    """What is the tool's own."""

    logger: logging.Logger
    policy: str
    """By which the engine judges."""
    rule: str
    """What that means, for somebody who reads that nothing failed."""
    blindness: str
    """What the rule does not see, and what the command behind this sentence is good for."""
    verdict: str
    """The title of the column with the results."""
    good: str
    bad: tuple[str, ...]
    """What stands there for a row that passes, and for one that fails."""
    figures: Collection[str]
    """Titles of columns with numbers and our own words; nothing in them comes from a dump."""
    logged: tuple[str, ...]
    """Titles of columns that a line of the log says of its row."""
    spell_for: Callable[[Segment], Spell]
    lay_out: Callable[[Paired, StackOf | None], Columns]
    bases: Sequence[str] = BY_VALUES
    files: str = ".npy"
    """What the files with values are called."""

    @property
    def results(self) -> dict[str, str]:
        """Every result a row can have, and how it is spoken of."""
        own = {word: word for word in (self.good, *self.bad, UNMATCHED)}
        return {**own, NOTHING: f"not measured ({NOTHING})"}


@dataclass
class Table:
    """A finished table."""

    form: Form
    paired: Paired
    columns: Columns

    def __len__(self) -> int:
        return len(self.paired)

    def find(self, *results: str) -> Any:
        """The rows with one of these results, from 0; in an editor, where the header is line 1, row 0 is line 2."""
        return numpy.flatnonzero(numpy.isin(numpy.array(self.columns[self.form.verdict], dtype=object), results))

    def name(self, row: int) -> str:
        """The name of the row's line: the NPU's, or the bench's where only that has one. As the dump has it."""
        held: str = self.columns[NAMES[bool(self.paired.at[0][row] < 0)]][row]
        return held
