"""The overflow watch: `with tensorprobe.overflow(model, out=...) as watch:` around the code to watch.

Findings are kept in memory and written to the folder as they happen: `overflow.rank{R}.json`, the ring of the last calls, a
replay script for each finding. Wrong settings raise before anything starts. In the training only TrainingStopped is raised, and
only on request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensorprobe.errors import RunExists, SettingsError, TrainingStopped
from tensorprobe.files import replace_file
from tensorprobe.model import Coverage
from tensorprobe.model.interrupts import let_through
from tensorprobe.model.overflow import Arrival, FirstNonfinite, NearLimit, OverflowReport
from tensorprobe.model.sink import CallRules
from tensorprobe.report.notebook import Text
from tensorprobe.taps.probe import Probe
from tensorprobe.taps.ranks import find_rank, find_world_size
from tensorprobe.version import VERSION
from tensorprobe.watches.overflow.keeping import Describer, KeptCall
from tensorprobe.watches.overflow.ledger import Finding, Ledger
from tensorprobe.watches.overflow.looker import OverflowLooker
from tensorprobe.watches.overflow.registrar import Registrar
from tensorprobe.watches.overflow.result import (
    SCHEMA_VERSION,
    OverflowResult,
    merge_watches,
    report_path,
    ring_path,
    write_report,
)
from tensorprobe.watches.overflow.ring import RingFile
from tensorprobe.watches.overflow.settings import OverflowSettings

MOST_FINDINGS = 100
_RANKS_IN_PAGE = 64
"""Each rank reads the reports of all others when it stops; that is cheap for so many."""


class OverflowWatch:
    """Watches a program. Findings can be read at any time. Call `step` after each step if there is no optimizer."""

    def __init__(
        self,
        model: Any = None,
        *,
        on_first: Callable[[KeptCall], None] | None = None,
        stop_with: Callable[[], Exception] | None = None,
        rank: int | None = None,
        steps_by: str = "optimizer",
        rules: CallRules | None = None,
        **settings: Any,
    ) -> None:
        on_first = settings.pop("on_birth", on_first)  # the old name
        chosen = OverflowSettings.of(**settings)
        self.out = None if chosen.out is None else Path(chosen.out)
        self.rank = find_rank() if rank is None else rank
        self._stop_after, self._replay, self._on_first = chosen.stop_after, chosen.replay, on_first
        self._model, self._overwrite, self._ring_rows = model, chosen.overwrite, chosen.ring
        self._stop_with = stop_with
        self._notes: Counter[str] = Counter()
        self._found = 0
        self._ring: RingFile | None = None
        self._closed = False
        self._ledger = Ledger(chosen.allow, most=MOST_FINDINGS)
        self._registrar = Registrar(
            self._ledger,
            rank=self.rank,
            keep_bytes=chosen.keep_bytes,
            near=chosen.near,
            under_scaler=chosen.under_scaler,
            on_new=self._settle,
        )
        self._looker = self._registrar.looker = OverflowLooker(
            self._registrar,
            self._close,
            near=chosen.near,
            saturation=chosen.saturation,
            status=chosen.status,
            keep=chosen.keep,
            rules=rules,
        )
        self._probe = Probe(
            self.out or "overflow",
            model=model,
            rank=self.rank,
            sink=self._looker,
            steps=chosen.steps,
            ranks=chosen.ranks,
            steps_by=steps_by,
            stacks=False,
        )

    def start(self) -> OverflowWatch:
        """Start watching. Raises RunExists if the folder holds findings of another watch, SettingsError if a probe is running."""
        if self._probe.running:
            return self
        folder = None if self.out is None else _prepare(self.out, self.rank, self._overwrite)
        try:
            self._ring = RingFile(folder, self._ring_rows)
            self._looker.restart(self._ring, self._ring_rows)
            self._registrar.describer = Describer(self._looker, self.rank, self._model, self._ring.lines)
            self._probe.start()
            self._write()
            return self
        except BaseException:
            self._probe.stop()
            if self._ring is not None:
                self._ring.close()
            raise

    def stop(self) -> OverflowResult:
        """Stop watching, remove everything that was installed, and return the result."""
        if self._probe.running:
            self._probe.stop()
            self._write_page()
        return self.result

    def _write_page(self) -> None:
        """Write the page of all ranks, in the last one to stop. Of many ranks `tensorprobe report` makes it.

        A rank that is not the last would say of others that they never ended.
        """
        if self.out is None or find_world_size() > _RANKS_IN_PAGE:
            return
        from tensorprobe.report.page.html import to_html
        from tensorprobe.report.page.watches import overflow_page

        try:
            if (merged := merge_watches(self.out)).closed:
                replace_file(self.out / "report.html", to_html(overflow_page(merged)).encode())
        except Exception as error:  # it must not reach the training
            let_through(error)
            self._notes[f"the page could not be made: {type(error).__name__}: {error}"] += 1

    def step(self) -> None:
        """End a training step."""
        self._probe.step()

    @property
    def numbers(self) -> dict[str, int]:
        """The next number of each op, once the watch has stopped."""
        return self._probe.numbers

    def __enter__(self) -> OverflowWatch:
        return self.start()

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
        except BaseException:
            self._probe.stop()
            raise

    @property
    def first_nonfinite(self) -> list[FirstNonfinite]:
        """The calls that made a NaN or inf from finite inputs, in execution order."""
        return self._ledger.first_nonfinite

    births = first_nonfinite
    """The old name of `first_nonfinite`."""

    @property
    def arrivals(self) -> list[Arrival]:
        """NaN and inf that no watched call made."""
        return self._ledger.arrivals

    @property
    def near(self) -> list[NearLimit]:
        """Outputs near the limit of their dtype, if `near` is set."""
        return list(self._ledger.near.values())

    @property
    def result(self) -> OverflowResult:
        """The result so far."""
        return OverflowResult(self._described())

    @property
    def report(self) -> Text:
        """The result so far, as text; a card in a notebook."""
        result = self.result
        return Text.of(str(result), result.exit_code)

    def _described(self) -> OverflowReport:
        first_nonfinite, arrivals = self.first_nonfinite, self.arrivals
        calls = 0 if self._ring is None else self._looker.calls
        notes = [f"{note} ({count} times)" if count > 1 else note for note, count in self._notes.items()]
        return OverflowReport(
            schema_version=SCHEMA_VERSION,
            tool=VERSION,
            source="" if self.out is None else str(self.out),
            ranks=[self.rank],
            calls=calls,
            exit_code=1 if first_nonfinite or arrivals else 0 if calls else 2,
            first_nonfinite=first_nonfinite,
            arrivals=arrivals,
            near=self.near,
            intended=dict(self._ledger.intended.most_common()),
            skipped_by_scaler=self._registrar.scaler.skipped,
            last_calls={},
            left_out=self._ledger.left_out,
            closed=self._closed,
            notes=notes,
        )

    def _write(self) -> None:
        """Write the findings so far. A full disk does not stop the training; the report mentions it."""
        if self.out is None:
            return
        try:
            write_report(self.out, self.rank, self._described())
        except OSError as error:
            let_through(error)
            self._notes[f"findings could not be written: {error}"] += 1

    def _settle(self, new: list[Finding]) -> None:
        """Replay and save new findings, call the callback, and stop the training if requested."""
        self._write()
        for finding in new:
            if isinstance(finding.fact, FirstNonfinite):
                self._judge(finding)
        self._write()
        self._found += sum(isinstance(finding.fact, FirstNonfinite) for finding in new)
        if self._stop_after is not None and self._found >= self._stop_after:
            self._looker.stop = self._stopped(new[-1].fact) if self._stop_with is None else self._stop_with()

    def _stopped(self, last: FirstNonfinite | Arrival) -> TrainingStopped:
        calls = "1 call that made a NaN or inf" if self._found == 1 else f"{self._found} calls that made a NaN or inf"
        see = "" if self.out is None else f"\n  Show the report: tensorprobe overflow {self.out}"
        return TrainingStopped(
            f"stopped after {calls}; the last is {last.call}, step {last.step}, rank {last.rank}.{see}"
        )

    def _judge(self, finding: Finding) -> None:
        from tensorprobe.watches.overflow.replaying import judge_finding

        folder = None if self.out is None else self.out / "first_nonfinite" / f"rank{self.rank}"
        judge_finding(finding, folder, replay=self._replay, notes=self._notes)
        if self._on_first is not None and finding.kept is not None:
            try:
                self._on_first(finding.kept)
            except Exception as error:
                let_through(error)
                self._notes[f"on_first raised {type(error).__name__}: {error}"] += 1
        if finding.kept is not None:
            self._registrar.keeper.let_go(finding.kept)
            finding.kept = None

    def _close(self, covered: Coverage) -> None:
        self._registrar.begin_step()
        if covered.failed:
            self._notes[f"{covered.failed:,} calls could not be checked. First error: {covered.first_error}"] += 1
        for spot, count in covered.blind_spots.items():
            self._notes[f"{spot} ({count})"] += 1
        self._notes.update(dict.fromkeys([*covered.notes, *covered.limits], 1))
        self._closed = True
        self._write()
        if self._ring is not None:
            self._ring.close()


def _prepare(out: Path, rank: int, overwrite: bool) -> Path:
    """Make the folder and return the path of the ring. Raises RunExists if it holds findings of another watch."""
    if report_path(out, rank).exists() and not overwrite:
        raise RunExists(
            f"{str(out)!r} holds the findings of another watch. Pass another folder, or overwrite=True (--overwrite)."
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        let_through(error)
        raise SettingsError(f"cannot write to out={str(out)!r}: {error.strerror}.") from None
    return ring_path(out, rank)
