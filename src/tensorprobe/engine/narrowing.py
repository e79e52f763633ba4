"""Where one side computes in a narrower dtype than the other, and how much each call loses by that.

In: judged steps. Out: one line for the notes of the answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec
import numpy

from tensorprobe.judge.noise_model import errors_of
from tensorprobe.model.dtypes import EPS
from tensorprobe.model.measured import AGREES, Measured, Opinions

MOST = 5


class Narrowing(msgspec.Struct):
    """Results in another dtype: `bfloat16 in the candidate, float32 in the baseline` → how many; and the greatest losses."""

    results: dict[str, int] = {}
    lost: list[tuple[float, str, str]] = []
    """Relative error that the call adds to that of its inputs, its name and its module."""

    def add(self, measured: Measured, opinion: Opinions) -> None:
        """Add the results of one step that agree."""
        rows, calls = measured.rows, measured.calls
        if numpy.array_equal(*rows.dtypes):
            return
        errors = errors_of(measured)
        chosen = numpy.flatnonzero(errors.mixed & rows.made & (rows.side == 1) & (opinion.verdict == AGREES))
        kinds = Counter(dict(self.results))
        lost = list(self.lost)
        for row in chosen.tolist():
            call = int(rows.call[row])
            names = (rows.dtype_names[0][row], rows.dtype_names[1][row])
            narrow = int(EPS.get(names[1], 0.0) > EPS.get(names[0], 0.0))
            sides = ("baseline", "candidate")
            kinds[f"{names[narrow]} in the {sides[narrow]}, {names[1 - narrow]} in the {sides[1 - narrow]}"] += 1
            lost.append((float(errors.relative[row] - opinion.input_error[call]), calls.name[call], calls.module[call]))
        self.results, self.lost = dict(kinds), sorted(lost, key=lambda one: -one[0])[:MOST]


def describe_narrowing(found: Iterable[Narrowing], *, agrees: bool) -> list[str]:
    """Return what the notes say: how much is in a narrower dtype, and where most is lost."""
    total: Counter[str] = Counter()
    lost: list[tuple[float, str, str]] = []
    for each in found:
        total.update(each.results)
        lost += each.lost
    notes = []
    for kind, count in total.most_common():
        narrow = kind.partition(" ")[0]
        said = f"explained by {narrow}: " if agrees else ""
        notes.append(f"{said}{count:,} results that agree are {kind}")
    if notes:
        shown = [
            f"{name}{f' in {module}' if module else ''} ({loss:.1e})"
            for loss, name, module in sorted(lost, key=lambda one: -one[0])[:MOST]
            if loss > 0
        ]
        notes[0] += f"; most is lost in {', '.join(shown)}" if shown else ""
    return notes
