"""The overflow watch: `with tensorprobe.overflow(model, out=...) as watch:` around whatever is to be watched.

In: a program at work. Out: findings in memory and, as they happen, in the folder: `overflow.rank{R}.json`, the ring of the last
calls, a script for each birth. Errors in the settings are raised before anything begins. In the training nothing of ours is
raised but TrainingStopped, when it was asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensorprobe.errors import RunExists, SettingsError, TrainingStopped
from tensorprobe.model import Coverage
from tensorprobe.model.overflow import Arrival, Birth, NearLimit, OverflowReport
from tensorprobe.model.sink import CallRules
from tensorprobe.taps.probe import Probe
from tensorprobe.taps.ranks import find_rank
from tensorprobe.version import VERSION
from tensorprobe.watches.overflow.describing import Describer
from tensorprobe.watches.overflow.keeping import BornCall
from tensorprobe.watches.overflow.ledger import Finding, Ledger
from tensorprobe.watches.overflow.looker import OverflowLooker
from tensorprobe.watches.overflow.registrar import Registrar
from tensorprobe.watches.overflow.result import SCHEMA_VERSION, OverflowResult, report_path, ring_path, write_report
from tensorprobe.watches.overflow.ring import RingFile
from tensorprobe.watches.overflow.settings import OverflowSettings

MOST_BIRTHS = 100


class OverflowWatch:
    """A watch. It may be asked for its findings at any time; `step` ends a step where no optimizer does."""

    def __init__(
        self,
        model: Any = None,
        *,
        on_birth: Callable[[BornCall], None] | None = None,
        stop_with: Callable[[], Exception] | None = None,
        rank: int | None = None,
        steps_by: str = "optimizer",
        rules: CallRules | None = None,
        **settings: Any,
    ) -> None:
        chosen = OverflowSettings.of(**settings)
        self.out = None if chosen.out is None else Path(chosen.out)
        self.rank = find_rank() if rank is None else rank
        self._stop_after, self._replay, self._on_birth = chosen.stop_after, chosen.replay, on_birth
        self._model, self._overwrite, self._ring_rows = model, chosen.overwrite, chosen.ring
        self._stop_with = stop_with
        self._notes: Counter[str] = Counter()
        self._births = 0
        self._ring: RingFile | None = None
        self._closed = False
        self._ledger = Ledger(chosen.allow, most=MOST_BIRTHS)
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
        """Begin. RunExists when the folder holds the findings of another watch, SettingsError when a probe is running."""
        if self._probe.running:
            return self
        self._ring = RingFile(
            None if self.out is None else _prepare(self.out, self.rank, self._overwrite), self._ring_rows
        )
        self._looker.restart(self._ring, self._ring_rows)
        self._registrar.describer = Describer(self._looker, self.rank, self._model, self._ring.lines)
        try:
            self._probe.start()
        except BaseException:
            self._ring.close()
            raise
        self._write()
        return self

    def stop(self) -> OverflowResult:
        """End, and take away everything that was installed."""
        if self._probe.running:
            self._probe.stop()
        return self.result

    def step(self) -> None:
        """Say that a training step has ended."""
        self._probe.step()

    @property
    def numbers(self) -> dict[str, int]:
        """After the end: the next number of each op."""
        return self._probe.numbers

    def __enter__(self) -> OverflowWatch:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def births(self) -> list[Birth]:
        """Calls that gave birth to something not finite, in the order in which they did."""
        return self._ledger.births

    @property
    def arrivals(self) -> list[Arrival]:
        """What was not finite when it came in."""
        return self._ledger.arrivals

    @property
    def near(self) -> list[NearLimit]:
        """Outputs near to the limit of their dtype, if that was asked for."""
        return list(self._ledger.near.values())

    @property
    def result(self) -> OverflowResult:
        """The answer so far."""
        return OverflowResult(self._described())

    @property
    def report(self) -> str:
        """The answer so far, as text."""
        return str(self.result)

    def _described(self) -> OverflowReport:
        births, arrivals = self.births, self.arrivals
        calls = 0 if self._ring is None else self._looker.calls
        notes = [f"{note} ({count} times)" if count > 1 else note for note, count in self._notes.items()]
        return OverflowReport(
            schema_version=SCHEMA_VERSION,
            tool=VERSION,
            source="" if self.out is None else str(self.out),
            ranks=[self.rank],
            calls=calls,
            exit_code=1 if births or arrivals else 0 if calls else 2,
            births=births,
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
        """Put the findings on disk as they are. A full disk must not end the training: it is said at the end."""
        if self.out is None:
            return
        try:
            write_report(self.out, self.rank, self._described())
        except OSError as error:
            self._notes[f"the findings could not be written: {error}"] += 1

    def _settle(self, new: list[Finding]) -> None:
        """Findings that are sure now: replay them, save them, tell whoever wants to know, and stop if that was asked for."""
        self._write()
        for finding in new:
            if isinstance(finding.fact, Birth):
                self._judge(finding)
        self._write()
        self._births += sum(isinstance(finding.fact, Birth) for finding in new)
        if self._stop_after is not None and self._births >= self._stop_after:
            self._looker.stop = self._stopped(new[-1].fact) if self._stop_with is None else self._stop_with()

    def _stopped(self, last: Birth | Arrival) -> TrainingStopped:
        births = "1 birth" if self._births == 1 else f"{self._births} births"
        see = "" if self.out is None else f"\n  See them: tensorprobe overflow {self.out}"
        return TrainingStopped(
            f"stopped after {births}, the last in {last.call}, step {last.step}, rank {last.rank}.{see}"
        )

    def _judge(self, finding: Finding) -> None:
        from tensorprobe.watches.overflow.replaying import judge_birth

        folder = None if self.out is None else self.out / "births" / f"rank{self.rank}"
        judge_birth(finding, folder, replay=self._replay, notes=self._notes)
        if self._on_birth is not None and finding.born is not None:
            try:
                self._on_birth(finding.born)
            except Exception as error:
                self._notes[f"on_birth raised {type(error).__name__}: {error}"] += 1
        if finding.born is not None:
            self._registrar.keeper.let_go(finding.born)
            finding.born = None

    def _close(self, covered: Coverage) -> None:
        self._registrar.begin_step()
        if covered.failed:
            self._notes[f"{covered.failed:,} calls could not be looked at. First: {covered.first_error}"] += 1
        for spot, count in covered.blind_spots.items():
            self._notes[f"{spot} ({count})"] += 1
        self._notes.update(dict.fromkeys(covered.notes, 1))
        self._closed = True
        self._write()
        if self._ring is not None:
            self._ring.close()


def _prepare(out: Path, rank: int, overwrite: bool) -> Path:
    """Make the folder; where the ring goes. RunExists when it holds the findings of another watch."""
    if report_path(out, rank).exists() and not overwrite:
        raise RunExists(f"{str(out)!r} holds the findings of another watch. Take another folder, or overwrite=True.")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"nothing can be written to out {str(out)!r}: {error.strerror}.") from None
    return ring_path(out, rank)
