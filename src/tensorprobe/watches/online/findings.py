"""The sink of an online compare: keeps the failing calls, and writes each to disk with a replay script as it is found."""

from __future__ import annotations

import heapq
import logging
import shutil
import threading
from pathlib import Path
from typing import Any

from tensorprobe.errors import RunExists, SettingsError, TrainingStopped
from tensorprobe.model import Coverage
from tensorprobe.model.event import Event, Frames
from tensorprobe.model.interrupts import let_through
from tensorprobe.model.online import OnlineResult, OnlineRow
from tensorprobe.model.sink import AtenNumbers, SecondSink
from tensorprobe.replay.randomness import draws_random, sampling
from tensorprobe.replay.script import LIMIT_NAMES, Results, Sampling, make_script
from tensorprobe.report.online_text import failure_line
from tensorprobe.standard_json import encode
from tensorprobe.watches.online.chain import Chain, Compared
from tensorprobe.watches.online.checker import Checker
from tensorprobe.watches.online.verdict import Case, Judged, call_of
from tensorprobe.watches.online.workers import Workers

_MOST_ROWS, _MOST_LINES, _MOST_DIVERGED, _MOST_STACKS = 1000, 50, 10, 10_000
_log = logging.getLogger("tensorprobe")


class Findings(SecondSink):
    """The failing rows, and where they happened."""

    def __init__(
        self,
        *,
        reference: str,
        policy: str,
        rank: int,
        folder: Path | None,
        workers: Workers,
        chain: Chain | None,
        saves: bool,
        stop_after: int | None,
        most_saved: int,
    ) -> None:
        self._reference, self._policy, self._rank, self.folder = reference, policy, rank, folder
        self._workers, self._chain = workers, chain
        self._saves, self._stop_after, self._most_saved = saves, stop_after, most_saved
        self._checker: Checker | None = None
        self._rows: list[OnlineRow] = []
        self._failed_calls = 0
        self._saved = 0
        self._diverged: list[tuple[float, int, OnlineRow]] = []
        self._step = 0
        self._steps: dict[int, None] = {}
        self._stacks: dict[tuple[int, int], list[str]] = {}
        self._lock = threading.Lock()
        self._blind_spots: dict[str, int] = {}
        self._stopped = False

    def ask(self, checker: Checker) -> None:
        """Set the checker of the calls."""
        self._checker = checker

    def begin(self, func: Any, args: Any, kwargs: Any, numbers: AtenNumbers) -> Any:
        """Hand the inputs of a call to the checker."""
        return None if self._checker is None else self._checker.begin(func, args, kwargs, numbers)

    def end(self, opened: Any, result: Any) -> Any:
        """Hand the result of a call to the checker."""
        return result if self._checker is None else self._checker.end(opened, result)

    def raised(self, opened: Any, error: BaseException) -> None:
        """Withdraw a call that raised."""
        if self._checker is not None:
            self._checker.raised(opened, error)

    def begin_step(self, step: int) -> None:
        """Start a step. Stacks are numbered from 0 again."""
        self._step = step
        if len(self._stacks) > _MOST_STACKS:
            self._workers.settle()  # now nothing refers to them
            self._stacks.clear()

    @property
    def result(self) -> OnlineResult:
        """The result so far."""
        checker = self._checker
        assert checker is not None
        skipped: dict[str, dict[str, int]] = {}
        for (reason, op), count in list(checker.skipped.items()):  # workers may be adding to it
            skipped.setdefault(str(reason), {})[op] = count
        return OnlineResult(
            reference=self._reference,
            policy=self._policy,
            rank=self._rank,
            steps=list(self._steps),
            seen=checker.seen,
            compared=checker.compared,
            failed=self._failed_calls,
            filtered=checker.filtered,
            unsampled=checker.unsampled,
            broken=checker.broken,
            first_error=checker.first_error,
            skipped=skipped,
            ops=dict(checker.ops),
            failures=sorted(self._rows, key=lambda row: row.order),
            healed=checker.healed,
            chained=0 if self._chain is None else self._chain.followed,
            reseeded=0 if self._chain is None else self._chain.reseeded,
            diverged=[row for _, _, row in sorted(self._diverged, reverse=True)],
            blind_spots=self._blind_spots,
            stopped=self._stopped,
        )

    def stack(self, number: int, frames: Frames) -> None:
        """Keep a stack for the calls that refer to it."""
        lines = [f'File "{file}", line {line}, in {function}' for file, line, function in frames]
        self._stacks[self._step, number] = lines

    def close(self, coverage: Coverage, coordinates: dict[str, int], device: str) -> None:
        """Judge the remaining calls and write the result."""
        self._workers.close()
        self._blind_spots = {**coverage.blind_spots, **dict.fromkeys(coverage.limits, 1)}
        if coverage.failed and self._checker is not None:
            spot = "API calls that could not be recorded; the ATen calls inside them are not named after them"
            self._blind_spots[spot] = coverage.failed
            self._checker.first_error = self._checker.first_error or coverage.first_error
        if self.folder is not None:
            self._write("online.json", _json(self.result), "wb")
            self._write_page()

    def found(
        self, case: Case, event: Event, step: int, order: int, rows: list[Judged], chained: Compared | None
    ) -> None:
        if not case.plan.reads:  # the loss is often read when the step is over
            self._steps[step] = None
        failing = [row for row in rows if not row.opinion.passes]
        if chained is not None:
            self._note_chain(case, event, step, order, rows, chained)
        if not failing:
            return
        with self._lock:
            self._failed_calls += 1
            number = self._failed_calls
        saved = self._save(case, event, step, rows, failing)
        for row in failing:
            self._note(self._row(case, event, step, order, row, chained, saved), number)
        if self._stop_after is not None and number >= self._stop_after:
            self._stopped = True
            raise TrainingStopped(
                f"stopped after {number} failing calls (stop_after). First: {failure_line(self._rows[0])}"
            )

    def _save(self, case: Case, event: Event, step: int, rows: list[Judged], failing: list[Judged]) -> str:
        with self._lock:
            wanted = self._saves and self.folder is not None and self._saved < self._most_saved
            self._saved += wanted
        if not wanted or self.folder is None:
            return ""
        again = f"_again{event.repeat}" if event.repeat else ""
        folder = self.folder / "failed" / f"step{step}_{event.name}{again}"
        first = failing[0]
        title = f"{event.name}, {first.slot}: {first.opinion.judged_by} {first.opinion.measured:.3g}"
        try:
            save(case, rows, folder, title)
        except Exception as error:  # a full disk must not lose the finding too
            let_through(error)
            self._remember(f"{folder} could not be written: {type(error).__name__}: {error}")
            return ""
        return str(folder)

    def _write_page(self) -> None:
        """Write the page. A mistake in it must not reach the training."""
        from tensorprobe.report.page.html import to_html
        from tensorprobe.report.page.watches import online_page

        try:
            self._write("report.html", to_html(online_page(self.result)).encode(), "wb")
        except Exception as error:
            let_through(error)
            self._remember(f"the page could not be made: {type(error).__name__}: {error}")

    def _write(self, name: str, line: bytes, how: str) -> None:
        assert self.folder is not None
        try:
            with (self.folder / name).open(how) as file:
                file.write(line)
        except OSError as error:
            let_through(error)
            self._remember(f"{self.folder / name} could not be written: {error}")

    def _remember(self, failure: str) -> None:
        """Keep the first failure for a warning at the end."""
        self.failure = self.failure or failure

    def _note(self, row: OnlineRow, number: int) -> None:
        with self._lock:
            if len(self._rows) < _MOST_ROWS:
                self._rows.append(row)
            if self.folder is not None:
                self._write("failures.jsonl", _json(row) + b"\n", "ab")
        self.say(row, number)

    def say(self, row: OnlineRow, number: int) -> None:
        """Log a row of a failing call; `number` counts the failing calls."""
        if number <= _MOST_LINES:
            _log.warning("%s", failure_line(row))
            if number == _MOST_LINES:
                _log.warning("further failures are not logged; see the report")

    def _note_chain(
        self, case: Case, event: Event, step: int, order: int, rows: list[Judged], chained: Compared
    ) -> None:
        grown = chained.accumulated - chained.inherited
        with self._lock:
            if len(self._diverged) == _MOST_DIVERGED and grown <= self._diverged[0][0]:
                return
            judged = next((row for row in rows if row.slot == chained.slot), None)
            if judged is None or not grown > 0:  # it may be NaN
                return
            entry = (grown, -order, self._row(case, event, step, order, judged, chained, ""))
            push = heapq.heappushpop if len(self._diverged) == _MOST_DIVERGED else heapq.heappush
            push(self._diverged, entry)

    def _row(
        self, case: Case, event: Event, step: int, order: int, row: Judged, chained: Compared | None, saved: str
    ) -> OnlineRow:
        opinion, figures = row.opinion, row.figures
        stack = [] if event.stack is None else self._stacks.get((step, event.stack), [])
        return OnlineRow(
            call=event.name,
            slot=row.slot,
            step=step,
            rank=self._rank,
            order=order,
            api=event.origin or event.parent or "",
            module=event.module,
            stack=stack,
            dtype=str(row.result.dtype).removeprefix("torch."),
            shape=list(row.result.shape),
            result="pass" if opinion.passes else "fail",
            judged_by=opinion.judged_by,
            measured=opinion.measured,
            allowed=opinion.allowed,
            message=row.message,
            reference="" if row.wide is None else str(row.wide.dtype).removeprefix("torch."),
            relative_l2=figures["relative_l2"],
            one_minus_cosine=figures["one_minus_cosine"],
            max_abs=figures["max_abs"],
            accumulated=None if chained is None else chained.accumulated,
            inherited=None if chained is None else chained.inherited,
            saved=saved,
        )


def _json(value: OnlineRow | OnlineResult) -> bytes:
    return encode(value).encode()


def make_folder(folder: Path, overwrite: bool) -> Path:
    """Make the folder for the results of one process. Raises RunExists if it holds something."""
    if folder.exists() and any(folder.iterdir()):
        if not overwrite:
            raise RunExists(f"'{folder}' already holds results. Pass another folder, or overwrite=True (--overwrite).")
        if not (folder / "failures.jsonl").exists():
            raise RunExists(f"'{folder}' holds other files than those of an online compare, so it is not replaced.")
        shutil.rmtree(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "failures.jsonl").touch()
    except OSError as error:
        let_through(error)
        raise SettingsError(f"cannot write to out='{folder}': {error.strerror}.") from None
    return folder


def save(case: Case, rows: list[Judged], folder: Path, title: str) -> None:
    """Write `replay.py` and `replay.safetensors` into the folder."""
    call, inputs = call_of(case)
    held = {f"device.{row.slot}": row.result for row in rows}
    held |= {f"reference.{row.slot}": row.wide for row in rows if row.wide is not None}
    changed = {
        row.slot: f"{'input.' if isinstance(at, int) else 'input.kwargs.'}{at}{row.slot.removeprefix(f'output.{at}')}"
        for at in case.plan.written
        for row in rows
        if row.slot == f"output.{at}" or row.slot.startswith(f"output.{at}.")
    }
    drawn = Sampling(*sampling(call, rows[0].result.numel())) if case.plan.draws and draws_random(call) else None
    limits = {row.slot: _limit(row) for row in (rows if drawn is None else rows[:1])}
    script = make_script(call, inputs, {}, Results(limits, held, changed, drawn), device=case.device, about=[title])
    script.write(folder, "replay")


def _limit(row: Judged) -> dict[str, float]:
    """Return the limit of a slot in the figures of the script."""
    name = row.opinion.judged_by
    return {name: row.opinion.allowed} if name in LIMIT_NAMES else {}
