"""Tables of a benchmark that has parts and targets: printed one after the other, the targets last."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

Row = dict[str, Any]
Target = tuple[str, str, str, bool | str]
"""What, target, measured, and whether it is reached: a bool, or a word that says more."""
Part = Callable[[list[Row]], tuple[list[Table], list[Target]]]
_WIDTH = 200


def print_parts(parts: Mapping[str, Part], measured: dict[str, list[Row]]) -> None:
    """The tables of the parts that were measured, and the targets of all."""
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    lines: list[Target] = []
    for name, rows in measured.items():
        tables, targets = parts[name](rows)
        lines += targets
        for each in tables:
            console.print(each)
    console.print(targets_table(lines))


def targets_table(targets: Iterable[Target]) -> Table:
    """The targets beside what was measured."""
    said = {True: "yes", False: "NO"}
    lines = [[what, target, measured, said.get(reached, str(reached))] for what, target, measured, reached in targets]
    return table("Targets", ["what", "target", "measured", "reached"], lines)


def table(title: str, columns: list[str], lines: list[list[str]]) -> Table:
    """A table whose cells are folded, never cut."""
    made = Table(title=title, box=box.SIMPLE_HEAD)
    for column in columns:
        made.add_column(column, overflow="fold")
    for line in lines:
        made.add_row(*line)
    return made
