"""`compare`: two dumps in, `compare_result_{time}.csv` and `advisor_{time}.txt` out.

Dumps are those of ptdbg_ascend; a run in another layout that tensorprobe reads is taken as well. Pairing, measuring and the
rule of 2023 are tensorprobe's; here the answer is given in the old form. A difference is never an exception.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ptdbg_ascend.analysis import Analysis, analyse
from ptdbg_ascend.arguments import LOG_KEY, Wish, check_stack_mode, demand_output, read_parameters
from ptdbg_ascend.lines import StackTexts, read_lines
from ptdbg_ascend.log import logger, speak
from ptdbg_ascend.result_file import result_files, timestamp, write_csv
from ptdbg_ascend.table import ROW_COLUMNS, Table, make_table
from tensorprobe.engine import Result
from tensorprobe.engine import compare as compare_runs
from tensorprobe.errors import CannotCompare
from tensorprobe.record import Run, open_run
from tensorprobe.record.run import ranges
from tensorprobe.report import wording
from tensorprobe.report.inspect import plain
from tensorprobe.report.table import printable

if TYPE_CHECKING:
    import pyarrow as pa

_POLICY = "seed-2023"

Places = tuple[tuple[int, int], tuple[int, int]]
"""Step and rank of the NPU's run, and of the bench's."""


def compare(
    input_param: Mapping[str, Any],
    output_path: str | os.PathLike[str],
    shape_flag: bool = False,
    stack_mode: bool = False,
    auto_analyze: bool = True,
    suffix: str = "",
    fuzzy_match: bool = False,
) -> Path:
    """Compare the dump of a device with that of the bench; the path of the CSV comes back.

    `input_param` has `npu_pkl_path`, `bench_pkl_path`, the folders with their .npy files, `npu_dump_data_dir` and
    `bench_dump_data_dir` (by default those beside the pkl), and `is_print_compare_log`. `output_path` must exist.
    `shape_flag` changes nothing: tensors of different shapes are `Unmatched` always. `stack_mode` is for dumps of the mode
    api_stack, and adds the column with the stacks. `auto_analyze` logs the first node that fails and writes the advice.
    `fuzzy_match` pairs the calls of an API in their order, whatever their numbers.
    """
    speak()
    given = read_parameters(input_param)
    wish = Wish(
        output=demand_output(output_path),
        shape_flag=shape_flag,
        stack_mode=stack_mode,
        auto_analyze=auto_analyze,
        suffix=suffix,
        fuzzy_match=fuzzy_match,
        print_log=given.get(LOG_KEY, False),
    )
    check_stack_mode([(given["npu_pkl_path"], given["bench_pkl_path"])], stack_mode)
    npu, bench = (open_run(given[f"{side}_pkl_path"], given.get(f"{side}_dump_data_dir")) for side in ("npu", "bench"))
    places = _only_places(npu, bench)
    compared = Compared.of(npu, bench, wish)
    written = compared.write(places)
    compared.log_answer()
    return written.csv


def _only_places(npu: Run, bench: Run) -> Places:
    """The step and rank of each: the table has no column for more than one."""
    held = (npu.segments(), bench.segments())
    if len(held[0]) == len(held[1]) == 1:
        return held[0][0], held[1][0]  # the pkl of one rank may be compared with that of another
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

    csv: Path
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
    stamp: str
    """The time that all files of this comparison have in their names."""

    @classmethod
    def of(cls, npu: Run, bench: Run, wish: Wish, *, jobs: int = 1) -> Compared:
        """Compare them; errors are those of tensorprobe."""
        result = compare_runs(bench, npu, policy=_POLICY, fuzzy=wish.fuzzy_match, jobs=jobs)
        return cls(npu, bench, result, wish, timestamp())

    def write(self, places: Places, title: str = "") -> Written:
        """The table of one step and rank, and the advice beside it; the title becomes part of their names. All is logged."""
        npu, bench = read_lines(self.npu, *places[0]), read_lines(self.bench, *places[1])
        stack = StackTexts(self.npu.segment(*places[0])).of if self.wish.stack_mode else None
        table = make_table(npu, bench, self._rows(*places[1]), stack=stack)
        analysis = analyse(table, npu, unread=npu.damaged + bench.damaged)
        suffix = f"{self.wish.suffix}_{title}" if title else self.wish.suffix
        with result_files(self.wish.output, suffix, self.stamp) as (partial, final, advice):
            write_csv(table, partial)
            if self.wish.auto_analyze:
                advice.write_text(analysis.advice(), encoding="utf-8")
        self._log(table, analysis, final, f"[{title}] " if title else "")
        return Written(final, analysis, title)

    def _rows(self, step: int, rank: int) -> pa.Table:
        """The rows of one step and rank of the bench."""
        import pyarrow.compute as compute

        rows = self.result.rows.table().select(["step", "rank", *ROW_COLUMNS])
        return rows.filter(compute.and_(compute.equal(rows["step"], step), compute.equal(rows["rank"], rank)))

    def _log(self, table: Table, analysis: Analysis, csv: Path, said: str) -> None:
        """Say what the table says: its rows when that is wanted, then the first that fails and what was not compared."""
        if self.wish.print_log:
            _log_rows(table, said)
        logger.info("%s%s: %s", said, plain(csv), analysis.summary())
        if self.wish.auto_analyze:
            level = logger.warning if analysis.fails else logger.info
            level("%s%s", said, analysis.first_failing())
        if left := analysis.not_compared():
            logger.warning("%s%s", said, left)

    def log_answer(self) -> None:
        """What tensorprobe itself says, and how to have it judge by more than the rule of 2023."""
        summary = self.result.summary
        for note in summary.notes:
            logger.info("%s", plain(note))
        logger.info(
            "tensorprobe says, by the same rule: %s %s. The rule is blind to scale (a tensor times 1.01 passes); "
            "to judge each op by its own rounding:   %s",
            wording.headline(summary),
            wording.verdict(summary),
            _command(self.npu, self.bench),
        )


def _log_rows(table: Table, said: str) -> None:
    titles = ("Cosine", "MaxAbsErr", "Accuracy Reached or Not", "Err_message")
    for row, (cosine, error, accuracy, message) in enumerate(
        zip(*(table.columns[name] for name in titles), strict=True)
    ):
        text = f"{said}[{table.name(row)}] Cosine {cosine}, MaxAbsErr {error}: {accuracy}"
        logger.info("%s", printable(f"{text} ({message})" if message else text))


def _command(npu: Run, bench: Run) -> str:
    """How to compare the same with tensorprobe; the command finds values only where the pkl is."""
    if all(run.data is None or run.data.absolute().parent == run.path.absolute().parent for run in (npu, bench)):
        return f"tensorprobe compare {shlex.quote(plain(bench.path))} {shlex.quote(plain(npu.path))}"
    opened = [
        f"open_run({plain(run.path)!r}{f', {plain(run.data)!r}' if run.data is not None else ''})"
        for run in (bench, npu)
    ]
    return f"from tensorprobe import compare, open_run; print(compare({', '.join(opened)}))"
