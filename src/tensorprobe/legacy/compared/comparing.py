"""Two dumps compared and written in the form of an older tool: `compare_result_{time}`, `advisor_{time}.txt`, a log.

Pairing, measuring and judging are tensorprobe's; here the answer is given in the old form. A difference is never an exception.
"""

from __future__ import annotations

import csv
import functools
import os
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorprobe.engine.comparison import compare as compare_runs
from tensorprobe.engine.result import Result
from tensorprobe.errors import CannotCompare, SettingsError, UnknownSetting, did_you_mean
from tensorprobe.legacy.compared.analysis import Analysis, analyse
from tensorprobe.legacy.compared.paired import Paired, join
from tensorprobe.legacy.compared.tables import (
    MESSAGE,
    StackOf,
    StackTexts,
    Table,
    TableStyle,
    listed,
    read_lines,
)
from tensorprobe.record import Run
from tensorprobe.report import wording
from tensorprobe.report.xlsx import MOST_ROWS, RED, load_xlsxwriter, open_workbook, write_row
from tensorprobe.text import few, plain, printable, ranges, sheet_text

if TYPE_CHECKING:
    import pyarrow as pa


Places = tuple[tuple[int, int], tuple[int, int]]
"""Step and rank of the NPU's run, and of the bench's."""
_ROW_COLUMNS = (
    "step", "rank", "call", "candidate_call", "repeat", "slot", "side", "baseline_dtype", "candidate_dtype", "baseline_shape",
    "candidate_shape", "basis", "count", "max_abs",
    "max_rel", "relative_l2", "one_minus_cosine", "within_1e3", "within_5e3", "nonfinite_different", "baseline_norm", "candidate_norm",
    "verdict", "judged_by", "measured", "allowed", "status", "note",
)  # fmt: skip
"""What a table may need of the rows of a comparison."""
_REMARKED = ("arguments", "raised")
"""Findings that no row of a table shows by itself."""


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
    style: TableStyle
    stamp: str
    """The time that all files of this comparison have in their names."""

    @classmethod
    def of(cls, npu: Run, bench: Run, wish: Wish, style: TableStyle, *, jobs: int = 1) -> Compared:
        """Compare them; errors are those of tensorprobe. In one process each dump is read once."""
        npu, bench = listed(npu, style), listed(bench, style)
        result = compare_runs(bench, npu, policy=style.policy, fuzzy=wish.fuzzy_match, jobs=jobs)
        return cls(npu, bench, result, wish, style, timestamp())

    def write(self, places: Places, title: str = "", *, stack: StackOf | None = None) -> Written:
        """The table of one step and rank, and the advice beside it; the title becomes part of their names. All is logged.

        `stack` finds stacks where the run itself does not have them.
        """
        style, wish = self.style, self.wish
        segments = self.npu.segment(*places[0]), self.bench.segment(*places[1])
        npu, bench = read_lines(*segments), read_lines(*segments[::-1])
        paired = Paired(npu, bench, self._rows(*places[1]), style=style, remarks=self._remarks(*places[1]))
        if wish.stack_mode and stack is None:
            if not any(number is not None for number in npu.stack):
                style.logger.warning("the NPU dump '%s' has no stacks to show", plain(self.npu.path))
            stack = StackTexts(segments[0]).of
        table = Table(style, paired, style.lay_out(paired, stack if wish.stack_mode else None))
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
        logger = self.style.logger
        if self.wish.print_log:
            self._log_rows(table, said)
        logger.info("%s%s: %s", said, plain(written), analysis.summary())
        if self.wish.auto_analyze:
            level = logger.info if analysis.failure is None else logger.warning
            level("%s%s", said, analysis.first_failing())
        if left := analysis.not_compared():
            logger.warning("%s%s", said, left)

    def _log_rows(self, table: Table, said: str) -> None:
        columns = [table.columns[name] for name in (*self.style.logged, self.style.verdict, MESSAGE)]
        for row, (*figures, verdict, message) in enumerate(zip(*columns, strict=True)):
            shown = ", ".join(f"{name} {figure}" for name, figure in zip(self.style.logged, figures, strict=True))
            text = f"{said}[{table.name(row)}] {shown}: {verdict}"
            self.style.logger.info("%s", printable(f"{text} ({message})" if message else text))

    def log_answer(self) -> None:
        """What tensorprobe itself says, and how to have it judge by more than the rule of the old tool."""
        summary = self.result.summary
        for note in summary.notes:
            self.style.logger.info("%s", plain(note))
        self.style.logger.info(
            "tensorprobe says, by the same rule: %s %s. %s:   %s",
            wording.headline(summary),
            wording.verdict(summary),
            self.style.blindness,
            _command(self.npu, self.bench),
        )

    def log_ranks(self, written: Sequence[Written]) -> None:
        """Which ranks fail, the one with the earliest line first."""
        logger, bad = self.style.logger, " or ".join(map(repr, self.style.bad))
        failing = sorted(
            (done.analysis.failure, at, done.title) for at, done in enumerate(written) if done.analysis.failure
        )
        if not failing:
            logger.info("no rank of %d has a row that is %s", len(written), bad)
            return
        shown = [f"{title} (line {line}: {plain(node)})" for (line, node), _, title in failing]
        logger.warning(
            "%d of %d ranks have rows that are %s, the earliest first: %s",
            *(len(failing), len(written), bad, few(shown)),
        )


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


LOG_KEY = "is_print_compare_log"


@dataclass(frozen=True, kw_only=True)
class Wish:
    """How results are wanted: what the compare functions take besides the dumps."""

    output: Path
    stack_mode: bool
    auto_analyze: bool
    fuzzy_match: bool
    print_log: bool
    suffix: str = ""
    xlsx: bool = False

    def __post_init__(self) -> None:
        for name in ("stack_mode", "auto_analyze", "fuzzy_match", "xlsx"):
            demand_bool(name, getattr(self, name))
        demand_bool(LOG_KEY, self.print_log)
        if not isinstance(self.suffix, str) or not self.suffix.isprintable() or {*self.suffix} & {*"/\\"}:
            raise SettingsError(f"suffix is {self.suffix!r}; it becomes part of a file name: a text without slashes.")
        if self.xlsx:
            load_xlsxwriter()  # not only after an hour of comparing


def known_parameters(given: Any, known: Sequence[str]) -> dict[str, Any]:
    """The dict that a compare function is given, without what is None; an unknown key is an error."""
    if not isinstance(given, Mapping):
        raise SettingsError(f"the first argument is {type(given).__name__}; it must be a dict with {', '.join(known)}.")
    for key in given:
        if key not in known:
            raise UnknownSetting(
                f"there is no parameter {key!r}.{did_you_mean(str(key), known)}\n  There are {', '.join(known)}."
            )
    return {key: value for key, value in given.items() if value is not None}


def demand_path(name: str, given: Any) -> Path:
    """The path."""
    if not isinstance(given, str | os.PathLike) or not os.fspath(given):
        raise SettingsError(f"{name} is {given!r}; it must be a path.")
    return Path(given)


def demand_folder(name: str, given: Any) -> Path:
    """The folder with the dumps of the ranks."""
    folder = demand_path(name, given)
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise SettingsError(f"{name} '{plain(folder)}' {what}; it must be the folder with rank0, rank1, …")
    return folder


def demand_output(given: Any, *, create: bool = False) -> Path:
    """The folder for results. It must be there, unless it is to be made."""
    folder = demand_path("output_path", given)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise SettingsError(f"output_path '{plain(folder)}' is a file; results go into a folder.")
    if create:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError(f"output_path '{plain(folder)}' cannot be made: {error.strerror}.") from None
        return folder
    raise SettingsError(
        f"output_path '{plain(folder)}' does not exist. Make it:   mkdir -p {shlex.quote(plain(folder))}"
    )


def demand_bool(name: str, value: Any) -> None:
    """SettingsError unless it is True or False."""
    if not isinstance(value, bool):
        raise SettingsError(f"{name} is {value!r}; it must be True or False.")


def write_csv(table: Table, partial: Path) -> None:
    """The table into a file that is there already."""
    columns = [_safe_column(table, name, values) for name, values in table.columns.items()]
    with partial.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(table.columns)
        writer.writerows(zip(*columns, strict=True))


def _safe_column(table: Table, name: str, values: list[Any]) -> Iterable[Any]:
    """Numbers as they are; a text is looked at once, however often it occurs."""
    return values if name in table.style.figures else map(functools.cache(sheet_text), values)


def write_workbook(table: Table, partial: Path) -> None:
    """The same as XLSX: one sheet, rows that fail in red. SettingsError without xlsxwriter, or for more rows than a sheet holds."""
    if len(table) > MOST_ROWS:
        raise SettingsError(f"the table has {len(table):,} rows, a sheet holds {MOST_ROWS:,}: have it as csv.")
    with open_workbook(partial) as workbook:
        sheet = workbook.add_worksheet("comparison")
        heading, red = workbook.add_format({"bold": True}), workbook.add_format(RED)
        sheet.write_row(0, 0, list(table.columns), heading)
        sheet.freeze_panes(1, 0)
        results = table.columns[table.style.verdict]
        columns = [_safe_column(table, name, values) for name, values in table.columns.items()]
        for row, values in enumerate(zip(*columns, strict=True), start=1):
            write_row(sheet, row, values, red if results[row - 1] in table.style.bad else None)


def timestamp() -> str:
    """The time of day as it stands in the names of results."""
    return time.strftime("%Y%m%d%H%M%S")


@contextmanager
def result_files(folder: Path, suffix: str, stamp: str, kind: str = "csv") -> Iterator[tuple[Path, Path, Path]]:
    """Names for a result that nobody has: of the table while it is written, of the table, of the advice that goes with it.

    The table gets its name at the end, unless an exception came first. A second result within one second has `_1` behind
    its time: the old tools wrote over the first.
    """
    number = 0
    while True:
        ending = f"{suffix}_{stamp}{f'_{number}' if number else ''}"
        final, advice = folder / f"compare_result{ending}.{kind}", folder / f"advisor{ending}.txt"
        partial = folder / f".{final.name}.partial"
        number += 1
        try:
            partial.touch(exist_ok=False)  # whoever makes it owns the name
        except FileExistsError:
            continue
        if not final.exists() and not advice.exists():
            break
        partial.unlink()
    try:
        yield partial, final, advice
        partial.replace(final)
    finally:
        partial.unlink(missing_ok=True)
