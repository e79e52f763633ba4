"""The result of a comparison, for Python: the answer, and the rows behind it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, overload

from tensorprobe.model.comparison import Comparison, Divergence, Finding, Row
from tensorprobe.report.forms import Answer
from tensorprobe.report.table import read_table

if TYPE_CHECKING:
    import pyarrow as pa


class Rows(Sequence[Row]):
    """The pairs of slots: a sequence of `Row`, held as columns; or on disk, when the comparison has an output folder."""

    def __init__(self, held: list[pa.RecordBatch] | Path | None, count: int) -> None:
        self._held = held
        self._count = count

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows as columns, a part at a time."""
        if isinstance(self._held, Path):
            yield from read_table(self._held)
        elif self._held is not None:
            yield from self._held
        elif self._count:
            raise LookupError("the rows of this comparison were not kept: pass out= or keep_rows=True")

    def table(self) -> pa.Table:
        """All rows as one arrow table; `.to_pandas()` makes a data frame of it."""
        import pyarrow as pa

        from tensorprobe.report.table import arrow_schema

        return pa.Table.from_batches(list(self.batches()) or [], schema=arrow_schema())

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Row]:
        for batch in self.batches():
            for fields in batch.to_pylist():
                yield Row(**fields)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return self._pick(range(*index.indices(self._count)))
        wanted = index + self._count if index < 0 else index
        if not 0 <= wanted < self._count:
            raise IndexError(f"row {index} of {self._count:,}")
        for batch in self.batches():
            if wanted < batch.num_rows:
                return Row(**batch.slice(wanted, 1).to_pylist()[0])
            wanted -= batch.num_rows
        raise IndexError(f"row {index}: the table on disk has become shorter")

    def _pick(self, wanted: range) -> list[Row]:
        """Return the rows at these places, from one pass over the batches, which ends after the last of them."""
        rising = wanted if wanted.step > 0 else wanted[::-1]
        found: list[Row] = []
        start = 0
        for batch in self.batches() if rising else ():
            last = start + batch.num_rows
            here = rising[bisect_left(rising, start) : bisect_left(rising, last)]
            if here:
                found += [Row(**fields) for fields in batch.take([at - start for at in here]).to_pylist()]
            if rising[-1] < last:
                break
            start = last
        return found if wanted.step > 0 else found[::-1]

    def __repr__(self) -> str:
        return f"<{self._count:,} rows>"


class Result(Answer):
    """What `tensorprobe.compare` returns. `print(result)` shows what the command shows."""

    summary: Comparison

    def __init__(self, summary: Comparison, rows: Rows, *, notices: Sequence[str] = (), table: str = "") -> None:
        super().__init__(summary, table=table)
        self.rows = rows
        self.notices = list(notices)
        """What a reader of the written files should know, and the files do not say."""

    @property
    def divergence(self) -> Divergence | None:
        """Where the runs part ways; None when they agree."""
        return self.summary.divergence

    @property
    def findings(self) -> list[Finding]:
        """Calls and arguments that only one run has, or that differ."""
        return self.summary.findings

    @property
    def agrees(self) -> bool:
        """Whether nothing diverges."""
        return self.summary.answer == "agrees"

    def __repr__(self) -> str:
        first = f", first at {self.divergence.call or self.divergence.candidate_call}" if self.divergence else ""
        return f"<comparison: {self.summary.answer}{first}; {len(self.rows):,} rows>"
