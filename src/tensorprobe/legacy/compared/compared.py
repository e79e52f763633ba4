"""Two dumps compared and written in the form of an older tool: `compare_result_{time}`, `advisor_{time}.txt`, a log.

Pairing, measuring and judging are tensorprobe's; here the answer is given in the old form. A difference is never an exception.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorprobe.engine.comparison import compare as compare_runs
from tensorprobe.engine.result import Result
from tensorprobe.errors import CannotCompare
from tensorprobe.legacy.compared.analysis import Analysis, analyse
from tensorprobe.legacy.compared.arguments import Wish
from tensorprobe.legacy.compared.form import MESSAGE, Form, Table
from tensorprobe.legacy.compared.lines import StackTexts, read_lines
from tensorprobe.legacy.compared.paired import Paired, StackOf, join
from tensorprobe.legacy.compared.result_file import result_files, timestamp, write_csv, write_workbook
from tensorprobe.record import Run
from tensorprobe.record.run import ranges
from tensorprobe.report import wording
from tensorprobe.text import plain, printable

if TYPE_CHECKING:
    import pyarrow as pa

Places = tuple[tuple[int, int], tuple[int, int]]
"""Step and rank of the NPU's run, and of the bench's."""
_ROW_COLUMNS = (
    "step", "rank", "call", "candidate_call", "repeat", "slot", "side", "baseline_shape", "candidate_shape", "basis", "count", "max_abs",
    "max_rel", "relative_l2", "one_minus_cosine", "within_1e3", "within_5e3", "nonfinite_different", "baseline_norm", "candidate_norm",
    "verdict", "judged_by", "measured", "allowed", "status", "note",
)  # fmt: skip
"""What a table may need of the rows of a comparison."""
_REMARKED = ("arguments", "raised")
"""Findings that no row of a table shows by itself."""
_SHOWN = 5


def only_places(npu: Run, bench: Run) -> Places:
    """The step and rank of each: the table has no column for more than one."""
    held = (npu.segments(), bench.segments())
    if len(held[0]) == len(held[1]) == 1:
        return held[0][0], held[1][0]  # the dump of one rank may be compared with that of another
    common = sorted({*held[0]} & {*held[1]})
    if len(common) == 1:
        return common[0], common[0]
    said = [
        f"{who} '{plain(run.path)}' has steps {ranges(run.steps) or '(none)'} of ranks {ranges(run.ranks) or '(none)'}"
        for who, run in (("NPU", npu), ("bench", bench))
    ]
    what = "more than one step of a rank is" if common else "no step of a rank is"
    raise CannotCompare(
        f"{what} in both dumps, and a table of this kind is for exactly one. {'; '.join(said)}.\n"
        "  For dumps of several ranks there is compare_distributed; for all steps and ranks at once:\n"
        f"  {_command(npu, bench)}"
    )


@dataclass(frozen=True)
class Written:
    """A table that was written, and what it says."""

    path: Path
    analysis: Analysis
    title: str
    """Which ranks it is about; empty for the only ones."""


@dataclass(frozen=True)
class Compared:
    """Two runs and what a comparison of them gave, ready to be written."""

    npu: Run
    bench: Run
    result: Result
    wish: Wish
    form: Form
    stamp: str
    """The time that all files of this comparison have in their names."""

    @classmethod
    def of(cls, npu: Run, bench: Run, wish: Wish, form: Form, *, jobs: int = 1) -> Compared:
        """Compare them; errors are those of tensorprobe."""
        result = compare_runs(bench, npu, policy=form.policy, fuzzy=wish.fuzzy_match, jobs=jobs)
        return cls(npu, bench, result, wish, form, timestamp())

    def write(self, places: Places, title: str = "", *, stack: StackOf | None = None) -> Written:
        """The table of one step and rank, and the advice beside it; the title becomes part of their names. All is logged.

        `stack` finds stacks where the run itself does not have them.
        """
        form, wish = self.form, self.wish
        npu, bench = (
            read_lines(run, *place, form.spell_for) for run, place in zip((self.npu, self.bench), places, strict=True)
        )
        paired = Paired(
            npu, bench, self._rows(*places[1]), bases=form.bases, files=form.files, remarks=self._remarks(*places[1])
        )
        if wish.stack_mode and stack is None:
            if not any(number is not None for number in npu.stack):
                form.logger.warning("the NPU dump '%s' has no stacks to show", plain(self.npu.path))
            stack = StackTexts(self.npu.segment(*places[0])).of
        table = Table(form, paired, form.lay_out(paired, stack if wish.stack_mode else None))
        analysis = analyse(table)
        suffix, kind = f"{wish.suffix}_{title}" if title else wish.suffix, "xlsx" if wish.xlsx else "csv"
        with result_files(wish.output, suffix, self.stamp, kind) as (partial, final, advice):
            (write_workbook if wish.xlsx else write_csv)(table, partial)
            if wish.auto_analyze:
                advice.write_text(analysis.advice(), encoding="utf-8")
        self._log(table, analysis, final, f"[{title}] " if title else "")
        return Written(final, analysis, title)

    def _rows(self, step: int, rank: int) -> pa.Table:
        """The rows of one step and rank of the bench."""
        import pyarrow.compute as compute

        rows = self.result.rows.table().select(_ROW_COLUMNS)
        return rows.filter(compute.and_(compute.equal(rows["step"], step), compute.equal(rows["rank"], rank)))

    def _remarks(self, step: int, rank: int) -> dict[str, str]:
        """Call of the bench → how it differs besides its tensors."""
        remarks: dict[str, str] = {}
        for found in self.result.findings:
            if found.kind in _REMARKED and (found.step, found.rank) == (step, rank):
                about = f"{found.detail} (baseline: bench, candidate: NPU)"
                remarks[found.call] = join(remarks.get(found.call, ""), about)
        return remarks

    def _log(self, table: Table, analysis: Analysis, written: Path, said: str) -> None:
        """Say what the table says: its rows when that is wanted, then the first that fails and what was not compared."""
        logger = self.form.logger
        if self.wish.print_log:
            self._log_rows(table, said)
        logger.info("%s%s: %s", said, plain(written), analysis.summary())
        if self.wish.auto_analyze:
            level = logger.info if analysis.failure is None else logger.warning
            level("%s%s", said, analysis.first_failing())
        if left := analysis.not_compared():
            logger.warning("%s%s", said, left)

    def _log_rows(self, table: Table, said: str) -> None:
        columns = [table.columns[name] for name in (*self.form.logged, self.form.verdict, MESSAGE)]
        for row, (*figures, verdict, message) in enumerate(zip(*columns, strict=True)):
            shown = ", ".join(f"{name} {figure}" for name, figure in zip(self.form.logged, figures, strict=True))
            text = f"{said}[{table.name(row)}] {shown}: {verdict}"
            self.form.logger.info("%s", printable(f"{text} ({message})" if message else text))

    def log_answer(self) -> None:
        """What tensorprobe itself says, and how to have it judge by more than the rule of the old tool."""
        summary = self.result.summary
        for note in summary.notes:
            self.form.logger.info("%s", plain(note))
        self.form.logger.info(
            "tensorprobe says, by the same rule: %s %s. %s:   %s",
            wording.headline(summary),
            wording.verdict(summary),
            self.form.blindness,
            _command(self.npu, self.bench),
        )

    def log_ranks(self, written: Sequence[Written]) -> None:
        """Which ranks fail, the one with the earliest line first."""
        logger, bad = self.form.logger, " or ".join(map(repr, self.form.bad))
        failing = sorted(
            (done.analysis.failure, at, done.title) for at, done in enumerate(written) if done.analysis.failure
        )
        if not failing:
            logger.info("no rank of %d has a row that is %s", len(written), bad)
            return
        shown = [f"{title} (line {line}: {plain(node)})" for (line, node), _, title in failing[:_SHOWN]]
        more = f" and {len(failing) - _SHOWN} more" if len(failing) > _SHOWN else ""
        logger.warning(
            "%d of %d ranks have rows that are %s, the earliest first: %s%s",
            len(failing), len(written), bad, ", ".join(shown), more,
        )  # fmt: skip


def demand_same_ranks(folders: tuple[Any, Any], ranks: tuple[list[int], list[int]]) -> None:
    """CannotCompare unless both dumps, NPU and bench, are of the same ranks."""
    if ranks[0] == ranks[1]:
        return
    held = [
        f"{who} '{plain(folder)}' has {len(numbers)} (rank {ranges(numbers)})"
        for who, folder, numbers in zip(("NPU", "bench"), folders, ranks, strict=True)
    ]
    only = [
        f"only in the {who} dump: rank {ranges(sorted(set(mine) - set(other)))}"
        for who, mine, other in (("NPU", *ranks), ("bench", *ranks[::-1]))
        if set(mine) - set(other)
    ]
    raise CannotCompare(
        f"the dumps are not of the same ranks: {'; '.join(held)}; {'; '.join(only)}.\n"
        "  Dump both with the same number of processes, or compare single ranks with compare."
    )


def _command(npu: Run, bench: Run) -> str:
    """How to compare the same with tensorprobe; the command finds values only where the layout has them."""
    if all(run.data is None or run.data.absolute().parent == run.path.absolute().parent for run in (npu, bench)):
        return f"tensorprobe compare {shlex.quote(plain(bench.path))} {shlex.quote(plain(npu.path))}"
    opened = [
        f"open_run({plain(run.path)!r}{f', {plain(run.data)!r}' if run.data is not None else ''})"
        for run in (bench, npu)
    ]
    return f"from tensorprobe import compare, open_run; print(compare({', '.join(opened)}))"
