"""The result of a comparison in Python: the answer and its rows."""

from __future__ import annotations

import subprocess
import sys
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import msgspec

from tensorprobe.errors import NotFound
from tensorprobe.model.comparison import Comparison, Divergence, Finding, Row
from tensorprobe.model.diff import CallDiff, CallEvidence
from tensorprobe.report.forms import Answer
from tensorprobe.report.table import read_table

if TYPE_CHECKING:
    import pyarrow as pa


class Rows(Sequence[Row]):
    """The pairs of slots: a sequence of `Row`, in columns in memory, or on disk if there is an output folder."""

    def __init__(self, held: list[pa.RecordBatch] | Path | None, count: int) -> None:
        self._held = held
        self._count = count

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows as columns, in batches."""
        if isinstance(self._held, Path):
            yield from read_table(self._held)
        elif self._held is not None:
            yield from self._held
        elif self._count:
            raise LookupError("the rows of this comparison were not kept: pass out= or keep_rows=True")

    @property
    def path(self) -> Path | None:
        """The file of the rows, if they are on disk."""
        return self._held if isinstance(self._held, Path) else None

    def table(self) -> pa.Table:
        """Return all rows as one Arrow table; `.to_pandas()` converts it, if pandas is installed."""
        import pyarrow as pa

        from tensorprobe.report.table import arrow_schema

        return pa.Table.from_batches(list(self.batches()) or [], schema=arrow_schema())

    def to_pandas(self) -> Any:
        """Return all rows as a pandas frame. ImportError when pandas is not installed."""
        return self.table().to_pandas()

    def to_polars(self) -> Any:
        """Return all rows as a polars frame. ImportError when polars is not installed."""
        import polars

        return polars.from_arrow(self.table())

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
        """Return the rows at these positions, in one pass over the batches up to the last of them."""
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


class FoundDivergence(Divergence, frozen=True, dict=True):
    """A divergence of a comparison whose runs are known."""

    def __repr__(self) -> str:
        return f"<divergence: {self.call}, step {self.step}, rank {self.rank}, {self.status}>"

    def diff(self, slot: str | None = None) -> CallDiff:
        """Return the tensors of this call side by side, as `tensorprobe diff` does. NotFound if it has no partner."""
        from tensorprobe.engine.call_diff import diff_pair

        baseline, candidate = self.__dict__["_runs"]
        return diff_pair(baseline, candidate, self, slot=slot)

    def replay(self, *, seconds: float = 600) -> int:
        """Run the saved script of this call; return its exit code: 1 while the call is wrong, 0 when it is right, 2 when it cannot tell.

        NotFound when the comparison has saved none: it needs `out=`, and values.
        """
        script = self.__dict__["_script"]
        if script is None or not script.is_file():
            needs = "no replay script was saved; that takes out=FOLDER, values, and a call that is wrong. Notes of the answer:"
            raise NotFound("\n  ".join([needs, *self.__dict__["_notes"]]))
        return subprocess.run([sys.executable, str(script)], timeout=seconds, check=False).returncode


class Result(Answer):
    """The result of `tensorprobe.compare`. `print(result)` shows what the command prints."""

    summary: Comparison

    def __init__(
        self,
        summary: Comparison,
        rows: Rows,
        *,
        evidence: Sequence[CallEvidence] = (),
        notices: Sequence[str] = (),
        table: str = "",
    ) -> None:
        if summary.divergence is not None:
            found = FoundDivergence(**msgspec.structs.asdict(summary.divergence))
            found.__dict__["_runs"] = (summary.baseline.path, summary.candidate.path)
            found.__dict__["_notes"] = summary.notes
            found.__dict__["_script"] = None if rows.path is None else rows.path.parent / "replay.py"
            summary = msgspec.structs.replace(summary, divergence=found)
        super().__init__(summary, table=table)
        self.rows = rows
        self.evidence = list(evidence)
        """What was kept of the calls where the runs part, for the page."""
        self.notices = list(notices)
        """Notes on the written files that are not in them."""

    @property
    def divergence(self) -> FoundDivergence | None:
        """The first divergence; None if the runs agree. Its `diff()` shows its tensors side by side."""
        found = self.summary.divergence
        return found if isinstance(found, FoundDivergence) else None

    @property
    def findings(self) -> list[Finding]:
        """Calls and arguments that only one run has, or that differ."""
        return self.summary.findings

    @property
    def agrees(self) -> bool:
        """Whether nothing diverges."""
        return self.summary.answer == "agrees"

    def __repr__(self) -> str:
        told = " ".join(str(self).partition("\n")[0].split())
        return f"<comparison: {told}; {len(self.rows):,} rows>"
