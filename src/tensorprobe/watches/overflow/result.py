"""The result of a watch or a search, its files, and the merge of several ranks. Nothing here imports torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from tensorprobe.errors import RunDamaged, TensorprobeError
from tensorprobe.files import read_file, replace_file
from tensorprobe.model.interrupts import let_through
from tensorprobe.model.overflow import Arrival, Arrived, FirstNonfinite, OverflowReport
from tensorprobe.ops import is_collective
from tensorprobe.report.forms import Answer
from tensorprobe.standard_json import decode, encode
from tensorprobe.version import VERSION
from tensorprobe.watches.overflow.ledger import SHOWN_SPREAD, Finding
from tensorprobe.watches.overflow.ring import read_ring

SCHEMA_VERSION = 1


class OverflowResult(Answer):
    """What a watch, or a search in a recorded run, returns. `print(result)` shows what the command shows."""

    summary: OverflowReport

    @property
    def first_nonfinite(self) -> list[FirstNonfinite]:
        """The calls that made a NaN or inf from finite inputs, in causal order."""
        return self.summary.first_nonfinite

    births = first_nonfinite
    """The old name of `first_nonfinite`."""

    @property
    def arrivals(self) -> list[Arrival]:
        """NaN and inf that no watched call made."""
        return self.summary.arrivals

    def __repr__(self) -> str:
        return f"<overflow: {len(self.first_nonfinite)} findings, {len(self.arrivals)} arrivals in {self.summary.calls:,} calls>"


def report_path(folder: Path, rank: int) -> Path:
    """Return the file with the findings of a rank."""
    return folder / f"overflow.rank{rank}.json"


def ring_path(folder: Path, rank: int) -> Path:
    """Return the file with the last calls of a rank."""
    return folder / f"ring.rank{rank}"


def write_report(folder: Path, rank: int, report: OverflowReport) -> None:
    """Write the report atomically."""
    replace_file(report_path(folder, rank), encode(report, indent=1).encode() + b"\n")


def merge_findings(ranks: Iterable[Sequence[Finding]]) -> tuple[list[FirstNonfinite], list[Arrival]]:
    """Return the findings and arrivals of all ranks in causal order."""
    return merge_facts([finding.written() for findings in ranks for finding in findings])


def merge_facts(facts: Iterable[FirstNonfinite | Arrival]) -> tuple[list[FirstNonfinite], list[Arrival]]:
    """Return findings and arrivals in causal order. A rank that only received one is added to its spread."""
    kept: list[FirstNonfinite | Arrival] = []
    for fact in sorted(facts, key=_when):
        source = next((each for each in kept if _explains(each, fact)), None)
        if source is None:
            kept.append(fact)
        else:
            at = kept.index(source)
            reached = [f"{name} (rank {fact.rank})" for name in (fact.call, *fact.spread)]
            kept[at] = msgspec.structs.replace(
                source,
                spread=[*source.spread, *reached][:SHOWN_SPREAD],
                spread_count=source.spread_count + fact.spread_count + 1,
            )
    first_nonfinite = [fact for fact in kept if isinstance(fact, FirstNonfinite)]
    numbered = [msgspec.structs.replace(first, number=number) for number, first in enumerate(first_nonfinite, 1)]
    return numbered, [fact for fact in kept if isinstance(fact, Arrival)]


def _when(fact: FirstNonfinite | Arrival) -> tuple[int, int, bool, int, int]:
    return fact.step, fact.epoch, is_collective(fact.call), fact.index, fact.rank


def _explains(earlier: FirstNonfinite | Arrival, fact: FirstNonfinite | Arrival) -> bool:
    """Return whether this rank received the finding of another one."""
    if earlier.rank == fact.rank:
        return False
    if isinstance(fact, Arrival):
        # Gradients and parameters pass between ranks unseen: DDP sums them in C++.
        return fact.kind in (Arrived.OTHER_RANK, Arrived.GRADIENT, Arrived.PARAMETER)
    return is_collective(fact.call) and not is_collective(earlier.call)


def merge_watches(folder: Path) -> OverflowReport:
    """Merge what the watches of all ranks wrote into a folder. For a rank that died, add the last calls of its ring."""
    reports: list[OverflowReport] = []
    for path in sorted(folder.glob("overflow.rank*.json")):
        try:
            # Older versions wrote another name.
            text = read_file(path).replace(b'\n "births": [', b'\n "first_nonfinite": [')
            reports.append(decode(text, OverflowReport, what="an overflow report"))
        except (TensorprobeError, OSError) as error:
            let_through(error)
            raise RunDamaged(f"'{path}' cannot be read: {error}. Remove it to see the other ranks.") from None
    first_nonfinite, arrivals = merge_facts(
        [*(b for r in reports for b in r.first_nonfinite), *(a for r in reports for a in r.arrivals)]
    )
    intended: Counter[str] = Counter()
    for report in reports:
        intended.update(report.intended)
    died = {rank: read_ring(folder / f"ring.rank{rank}") for r in reports if not r.closed for rank in r.ranks}
    calls = sum(report.calls for report in reports)
    return OverflowReport(
        schema_version=SCHEMA_VERSION,
        tool=VERSION,
        source=str(folder),
        ranks=sorted(rank for report in reports for rank in report.ranks),
        calls=calls,
        exit_code=1 if first_nonfinite or arrivals else 0 if calls or any(died.values()) else 2,
        first_nonfinite=first_nonfinite,
        arrivals=arrivals,
        near=[near for report in reports for near in report.near],
        intended=dict(intended.most_common()),
        skipped_by_scaler=[name for report in reports for name in report.skipped_by_scaler],
        last_calls=died,
        left_out=sum(report.left_out for report in reports),
        closed=all(report.closed for report in reports),
        notes=[note for report in reports for note in report.notes],
    )
