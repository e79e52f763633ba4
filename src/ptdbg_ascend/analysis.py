"""What a finished table says at a glance: the first row that fails, what was not compared, and the advice for it.

In: a table. Out: sentences for the log and the text of `advisor_*.txt`. Nothing is called well of which a part was not compared.
"""

from __future__ import annotations

from dataclasses import dataclass

from ptdbg_ascend.lines import Lines
from ptdbg_ascend.table import NO, NOTHING, UNMATCHED, YES, Table
from tensorprobe.model import Direction, Side
from tensorprobe.model.call_name import parse_call_name
from tensorprobe.report.advisor import advice_on, render_entries
from tensorprobe.report.inspect import counted
from tensorprobe.report.table import printable

_FIRST_LINE = 2
"""Of the first row, as an editor shows it: the header is line 1."""
_WORDS = {YES: "Yes", NO: "No", UNMATCHED: "Unmatched", NOTHING: "not measured (N/A)"}
_SIDES: dict[str, Side] = {"output": "output", "parameters": "parameters"}


@dataclass(frozen=True)
class Analysis:
    """How many rows have each result, and which is the first."""

    rows: int
    counts: dict[str, int]
    first: dict[str, tuple[int, str]]
    """Result → line and name of the first row that has it."""
    place: tuple[Direction, Side]
    """Where the first row that fails has its tensor."""
    above: dict[str, int]
    """Result → rows that have it above the first that fails."""
    unread: int
    """Lines of the two dumps that could not be read, and are no rows."""

    @property
    def fails(self) -> bool:
        """Whether a row does not reach the accuracy."""
        return bool(self.counts[NO])

    def summary(self) -> str:
        """`12 rows: 10 Yes · 1 No · 1 Unmatched · 0 not measured (N/A)`."""
        shown = [f"{self.counts[name]:,} {word}" for name, word in _WORDS.items()]
        return f"{counted(self.rows, 'row')}: {' · '.join(shown)}"

    def first_failing(self) -> str:
        """The first node that fails, or that none does."""
        if not self.fails:
            return "no row is 'No'"
        return f"the first row that does not reach the accuracy is {self._where(NO)}"

    def not_compared(self) -> str:
        """What was not compared; empty when everything was."""
        parts = [
            f"{counted(self.counts[name], 'row')} {'is' if self.counts[name] == 1 else 'are'} {_WORDS[name]}, "
            f"first {self._where(name)}"
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
        if self.fails:
            line, node = self.first[NO]
            return render_entries(" ".join([advice_on(*self.place), *self._doubts()]), node=node, line=line)
        if not left:
            return render_entries("NA\nEvery row is within the tolerance (No: Cosine < 0.99 and MaxAbsErr > 0.001).")
        return render_entries(
            f"No row is 'No', but not everything was compared: {left}. Whether the runs agree there is not known: "
            "see Err_message in these rows, and compare what both programs do at that place."
        )

    def _doubts(self) -> list[str]:
        """What was not compared before the first failure, and may be the cause of it."""
        doubts = [f"{count:,} {_are(count)} {_WORDS[name]}" for name, count in self.above.items() if count]
        said = (
            [f"Note that of the rows above it {' and '.join(doubts)}: the difference may come from there."]
            if doubts
            else []
        )
        if self.unread:
            said.append(f"Note that {counted(self.unread, 'line')} of the dumps cannot be read.")
        return said

    def _where(self, name: str) -> str:
        line, node = self.first[name]
        return f"line {line}: {printable(node)}"


def analyse(table: Table, npu: Lines, *, unread: int = 0) -> Analysis:
    """Look through a table; `npu` are the lines of the NPU that it was made of."""
    found = {name: table.find(name) for name in _WORDS}
    failing = int(found[NO][0]) if len(found[NO]) else 0
    place: tuple[Direction, Side] = "forward", "output"
    if len(found[NO]):
        call, _, slot = npu.key[table.npu[failing]]  # a row that fails has both sides
        direction = parse_call_name(call).direction
        place = "backward" if direction == "backward" else "forward", _SIDES.get(slot.partition(".")[0], "input")
    return Analysis(
        rows=len(table),
        counts={name: len(rows) for name, rows in found.items()},
        first={
            name: (int(rows[0]) + _FIRST_LINE, table.name(int(rows[0]))) for name, rows in found.items() if len(rows)
        },
        place=place,
        above={name: int((found[name] < failing).sum()) for name in (UNMATCHED, NOTHING)},
        unread=unread,
    )


def _are(count: int) -> str:
    return "is" if count == 1 else "are"
