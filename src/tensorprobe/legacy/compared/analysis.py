"""What a finished table says at a glance: the first row that fails, what was not compared, and the advice for it.

In: a table. Out: sentences for the log and the text of `advisor_*.txt`. Nothing is called well of which a part was not compared.
"""

from __future__ import annotations

from dataclasses import dataclass

from tensorprobe.legacy.compared.tables import NOTHING, UNMATCHED, Table, TableStyle
from tensorprobe.model import Direction, Side
from tensorprobe.ops.names import parse_call_name
from tensorprobe.report.advisor import advice_on, render_entries
from tensorprobe.text import counted, printable

_FIRST_LINE = 2
"""Of the first row, as an editor shows it: the header is line 1."""
_SIDES: dict[str, Side] = {"output": "output", "parameters": "parameters"}


@dataclass(frozen=True)
class Analysis:
    """How many rows have each result, and which is the first."""

    style: TableStyle
    rows: int
    counts: dict[str, int]
    first: dict[str, tuple[int, str]]
    """Result → line and name of the first row that has it."""
    failure: tuple[int, str] | None
    """Line and name of the first row that fails."""
    place: tuple[Direction, Side]
    """Where that row has its tensor."""
    above: dict[str, int]
    """Result → rows that have it above the first that fails."""
    unread: int
    """Lines of the two dumps that could not be read, and are no rows."""

    @property
    def all_match(self) -> bool:
        """Whether some rows pass, none fails and none is unmatched."""
        return self.failure is None and self.counts[self.style.good] > 0 and not self.counts[UNMATCHED]

    def summary(self) -> str:
        """`12 rows: 10 Yes · 1 No · 1 Unmatched · 0 not measured (N/A)`."""
        shown = [f"{self.counts[name]:,} {word}" for name, word in self.style.results.items()]
        return f"{counted(self.rows, 'row')}: {' · '.join(shown)}"

    def first_failing(self) -> str:
        """The first node that fails, or that none does."""
        if self.failure is None:
            return f"no row is {self._bad()}"
        return f"the first row that does not reach the accuracy is {_where(self.failure)}"

    def not_compared(self) -> str:
        """What was not compared; empty when everything was."""
        parts = [
            f"{counted(self.counts[name], 'row')} {'is' if self.counts[name] == 1 else 'are'} {self.style.results[name]}, "
            f"first {_where(self.first[name])}"
            for name in (UNMATCHED, NOTHING)
            if self.counts[name]
        ]
        if not self.rows:
            parts.append("there is no row: the dumps hold no tensors")
        if self.unread:
            parts.append(f"{counted(self.unread, 'line')} of the dumps cannot be read and {_are(self.unread)} no rows")
        return "; ".join(parts)

    def advice(self) -> str:
        """The text of the advisor's file."""
        left = self.not_compared()
        if self.failure is not None:
            line, node = self.failure
            return render_entries(" ".join([advice_on(*self.place), *self._doubts()]), node=node, line=line)
        if not left:
            return render_entries(f"NA\nEvery row is within the tolerance ({self.style.rule}).")
        return render_entries(
            f"No row is {self._bad()}, but not everything was compared: {left}. Whether the runs agree there is not known: "
            "see Err_message in these rows, and compare what both programs do at that place."
        )

    def _bad(self) -> str:
        return " or ".join(map(repr, self.style.bad))

    def _doubts(self) -> list[str]:
        """What was not compared before the first failure, and may be the cause of it."""
        doubts = [f"{count:,} {_are(count)} {self.style.results[name]}" for name, count in self.above.items() if count]
        said = (
            [f"Note that of the rows above it {' and '.join(doubts)}: the difference may come from there."]
            if doubts
            else []
        )
        if self.unread:
            said.append(f"Note that {counted(self.unread, 'line')} of the dumps cannot be read.")
        return said


def analyse(table: Table) -> Analysis:
    """Look through a table."""
    style, paired = table.style, table.paired
    found = {name: table.find(name) for name in style.results}
    failing = table.find(*style.bad)
    place: tuple[Direction, Side] = "forward", "output"
    if len(failing):
        call, _, slot = paired.npu.key[paired.at[0][failing[0]]]  # a row that fails has both sides
        direction = parse_call_name(call).direction
        place = "backward" if direction == "backward" else "forward", _SIDES.get(slot.partition(".")[0], "input")

    def line(row: int) -> tuple[int, str]:
        return row + _FIRST_LINE, table.name(row)

    return Analysis(
        style=style,
        rows=len(table),
        counts={name: len(rows) for name, rows in found.items()},
        first={name: line(int(rows[0])) for name, rows in found.items() if len(rows)},
        failure=line(int(failing[0])) if len(failing) else None,
        place=place,
        above={name: int((found[name] < (failing[0] if len(failing) else 0)).sum()) for name in (UNMATCHED, NOTHING)},
        unread=paired.npu.damaged + paired.bench.damaged,
    )


def _where(found: tuple[int, str]) -> str:
    line, node = found
    return f"line {line}: {printable(node)}"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"
