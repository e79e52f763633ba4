"""Tensors that no pair of calls made: parameters, data, sums of gradients, and what was changed between two calls.

In: a row whose pair of tensors no earlier call made. Out: a verdict, by where the tensor comes from as far as the record shows:
- autograd added it up from recorded gradients: its error is that of its parts;
- a call made it in one run, and the other run reads something else: both sides must be as near as what that call made;
- the same slot was read in the step before: it must have changed alike on both sides, as far as the gradients are alike;
- otherwise it is judged by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy

from tensorprobe.judge.noise_model import MEASURED_FACTOR
from tensorprobe.judge.severity import SYSTEMATIC_Z
from tensorprobe.judge.step_table import StepTable
from tensorprobe.model.comparison import ExternalKind
from tensorprobe.model.measured import (
    AGREES,
    DIVERGES,
    JUDGED,
    STATISTICS,
    UNMEASURED,
    VALUES,
    Entering,
    Opinions,
    Question,
    Update,
)
from tensorprobe.ops import argument_name

Array = numpy.ndarray[Any, Any]

_L2, _PEAK, _SLOPE, _DIFFERENT, _NONFINITE = (
    JUDGED.index(name) for name in ("relative_l2", "max_abs", "slope", "different", "nonfinite_different")
)
ROUNDOFFS = 2.0
"""By which equal tensors may differ: they may have been converted to another dtype and back."""
FACTOR = 4.0
"""How many times the error of its parts, or of what a call made, a tensor may have."""
DRIFT_FACTOR = 8.0
"""For a tensor of which nothing is known: how many times the largest relative error accepted so far."""
SAME_NORM = 1e-6
"""The relative difference of the norms of equal numbers in another order."""
PARTS_ROUNDOFFS = 8.0
"""By which a gradient may differ that was added up in other parts, times FACTOR."""
NEAR = 64
"""How many calls before a module are looked at."""
SHARE_OFF, SHARE_FACTOR = 1e-3, 200.0
"""The share of elements that may be updated otherwise (none, where the gradients have equal bits), and how it grows with the
relative error of the gradient: an optimizer that divides by the size of an element turns the small ones over."""
SCALE_OFF, SCALE_FACTOR = 1e-3, 4.0
"""The same for the factor between two updates."""
UPDATE_GAIN, MANY_UPDATES = 30.0, 8
"""How many times further apart the changes of a parameter may be than its gradients, if those of half the others are not; and how
many parameters must be known. An optimizer that computes with whole matrices may amplify the noise of all of them."""
STATISTICS_OFF = 2e-3
"""How much norms may move apart in a step where values were not recorded, and nobody can tell why."""
UNRECORDED_ROUNDOFFS = 16.0
"""By which a result of calls that were not recorded may differ. From there to the square root of a roundoff nobody can tell."""


class Expected(NamedTuple):
    """What is known of the error of a tensor. `rms`, `peak` and `slope` are explained; the rest is not."""

    kind: ExternalKind
    rms: float
    peak: float = math.inf
    slope: float = math.inf
    diverging: bool = False
    """Whether that error diverges already: then the tensor inherits it."""
    source: str = ""
    """Where it comes from, in words."""


@dataclass
class Lineage:
    """The findings of earlier calls and steps of the rank."""

    verdicts: dict[object, int] = field(default_factory=dict)
    """The tensors that differ, by content."""
    drift: float = 0.0
    """The largest relative error accepted as noise."""
    before: tuple[StepTable, Opinions] | None = None
    """The step before."""
    diverged: bool = False


class Origins:
    """Judges the tensors of one step that no pair of calls made. Fills in `opinions`."""

    def __init__(
        self, table: StepTable, opinions: Opinions, lineage: Lineage, updates: Mapping[int, Update | None]
    ) -> None:
        self._table, self._opinions, self._lineage, self._updates = table, opinions, lineage, updates

    def judge(self, row: int, call: int, *, overwritten: bool) -> int:
        """Return the verdict on an input; UNMEASURED for fresh memory that the call fills."""
        table, lineage = self._table, self._lineage
        if table.is_fresh_memory(row, call):
            return UNMEASURED
        if overwritten and table.is_written_to(row, call):
            return AGREES
        expected = self._expected(row, call)
        if self._is_measured_noise(row):
            lineage.verdicts.setdefault(table.identity[row], AGREES)
            return AGREES
        verdict = self._hold_against(row, expected)
        near = float(table.errors.relative[row]) < math.sqrt(float(table.errors.roundoff[row]))
        if verdict == DIVERGES and near and not expected.source and self._is_unrecorded_result(row, call):
            self._opinions.untold.append(Entering(row, call, "input", "the calls that made it were not recorded"))
            verdict = AGREES
        if expected.kind == "parameter" and lineage.before is not None and not expected.source:
            verdict = self._judge_update(row, call, verdict)
        if verdict == DIVERGES and not expected.diverging:
            self.note(row, call, expected)
        lineage.verdicts.setdefault(table.identity[row], verdict)
        return verdict

    def _is_measured_noise(self, row: int) -> bool:
        """Return whether right runs of the baseline differ as much there."""
        errors = self._table.errors
        rms, peak = (MEASURED_FACTOR * float(each[row]) for each in errors.noise)
        within = errors.rms_error[row] <= rms and errors.peak_error[row] <= peak
        return rms > 0 and bool(within) and not self._table.nonfinite[row] and not self._table.exact[row]

    def note(self, row: int, call: int, expected: Expected | None = None) -> None:
        """Remember a tensor that differs although no recorded call produced the difference."""
        if self._table.may_enter(row, call, diverged=self._lineage.diverged):
            expected = expected or self._expected(row, call)
            words = [expected.source] if expected.source else []
            if same := self._known_elsewhere(row):
                words.append(same)
            self._opinions.entering.append(Entering(row, call, expected.kind, "; ".join(words)))

    def _expected(self, row: int, call: int) -> Expected:
        return (
            self._from_summands(row)
            or self._from_maker(row, call)
            or self._from_rearranged(row, call)
            or self._by_itself(row, call)
        )

    def _hold_against(self, row: int, expected: Expected) -> int:
        """Return whether the error of a row is explained, and note the figure that decided."""
        table, opinions, errors = self._table, self._opinions, self._table.errors
        size, floor = float(errors.rms[row]), ROUNDOFFS * float(errors.roundoff[row])
        if table.rows.basis[row] == STATISTICS:  # those of its parts may agree by chance
            floor = max(floor, FACTOR * self._lineage.drift)
        figures, opinion = table.rows.figures, (_L2, 0.0, 0.0)
        if table.nonfinite[row]:
            opinion = (_NONFINITE, float(figures["nonfinite_different"][row]), 0.0)
        elif table.exact[row]:
            opinion = (_DIFFERENT, max(float(figures["different"][row]), float(not table.equal[row])), expected.rms)
        else:
            found = [
                (_L2, float(errors.relative[row]), floor + FACTOR * expected.rms / size if size else 0.0),
                (_PEAK, float(errors.peak_error[row]), floor * float(errors.peak[row]) + FACTOR * expected.peak),
            ]
            if table.rows.basis[row] == VALUES and abs(float(figures["slope_z"][row])) > SYSTEMATIC_Z:
                found.append((_SLOPE, abs(float(figures["slope"][row]) - 1), floor + FACTOR * expected.slope))
            opinion = next((one for one in found if one[1] > one[2]), found[0])
        opinions.judged_by[row], opinions.measured[row], opinions.allowed[row] = opinion
        return DIVERGES if expected.diverging or opinion[1] > opinion[2] else AGREES

    def _by_itself(self, row: int, call: int) -> Expected:
        table, lineage = self._table, self._lineage
        # What a module is given is made by code around it, and may need a gradient without being a parameter.
        learned = table.rows.grad[row] and not table.calls.level[call].is_module
        kind: ExternalKind = "parameter" if table.is_parameter(row, call) or learned else "data"
        if table.calls.direction[call] == "backward":
            kind = "gradient"
        loose = table.calls.level[call].is_module and lineage.drift > 0
        if table.exact[row]:
            return Expected(kind, math.inf if loose else 0.0)
        if kind == "data" and not loose and (before := self._in_step_before(row, call)) is not None:
            table_before, at = before
            then, now = (int(each.rows.content[0][place]) for each, place in ((table_before, at), (table, row)))
            changed = then < 0 or now < 0 or table_before.contents[then] != table.contents[now]
            # It was read in the step before, and there was no noise in it. What is new and read after a gradient with
            # noise may be a sum of gradients, which no call makes.
            if table_before.equal[at] and not (changed and call > table.first_noisy_gradient):
                return Expected(kind, 0.0)
        size, drift = float(table.errors.rms[row]), lineage.drift
        if table.largest_gradient and table.rows.roles.get(row, "").startswith("gradient "):
            # Added up over other parts of the batch. It may be zero in exact arithmetic, so the others give its size.
            return Expected(
                "gradient", PARTS_ROUNDOFFS * float(table.errors.roundoff[row]) * (size + table.largest_gradient)
            )
        if self._is_unrecorded_result(row, call):
            rms = max(UNRECORDED_ROUNDOFFS * float(table.errors.roundoff[row]), DRIFT_FACTOR * drift) / FACTOR * size
            return Expected("input", rms)
        if table.calls.level[call].is_module:  # code between modules made it, and its terms may cancel
            size, drift = max(size, self._size_around(call)), max(drift, ROUNDOFFS * float(table.errors.roundoff[row]))
        return Expected(kind, DRIFT_FACTOR / FACTOR * drift * size)

    def _is_unrecorded_result(self, row: int, call: int) -> bool:
        """Return whether a forward call reads what needs a gradient and is no parameter, where parameters are known."""
        rows, calls = self._table.rows, self._table.calls
        if not rows.grad[row] or calls.level[call].is_module or calls.direction[call] != "forward":
            return False
        return bool(rows.roles) and row not in rows.roles and not self._table.is_parameter(row, call)

    def _size_around(self, call: int) -> float:
        """Return the size of what the calls before this one made in the same direction, inside the module around it."""
        table, calls = self._table, self._table.calls
        around = calls.module[call].rpartition(".")[0]
        near = [
            each
            for each in range(max(0, call - NEAR), call)
            if calls.direction[each] == calls.direction[call] and calls.module[each].startswith(around)
        ]
        made = (row for each in near for row in table.rows_of(each) if table.rows.side[row] == 1)
        return max((float(table.errors.rms[row]) for row in made if not table.exact[row]), default=0.0)

    def _from_summands(self, row: int) -> Expected | None:
        table, errors = self._table, self._table.errors
        parts = table.graph.summands(row)
        if not parts or not all(table.measured[part] for part in parts):
            return None
        names = dict.fromkeys(table.calls.name[int(table.rows.call[part])] for part in parts)
        size = sum(float(errors.rms[part]) for part in parts)
        rms = sum(float(errors.rms_error[part]) for part in parts)
        peak = sum(float(errors.peak_error[part]) for part in parts)
        roundoff = float(errors.roundoff[row])
        if float(errors.rms[row]) > 1.01 * size:  # a part was not recorded: it has an error like theirs
            rms = max(float(errors.relative[part]) for part in parts) * float(errors.rms[row])
            peak = math.inf
        return Expected(
            "gradient",
            rms + roundoff * size,
            peak + roundoff * sum(float(errors.peak[part]) for part in parts),
            max(self._slope(table, part) for part in parts) + len(parts) * roundoff if len(parts) == 1 else math.inf,
            any(self._opinions.verdict[part] == DIVERGES for part in parts),
            f"{_listed(list(names))} {'agrees' if len(names) == 1 else 'agree'}",
        )

    def _from_maker(self, row: int, call: int) -> Expected | None:
        """What a call made that one of the two runs reads here."""
        for table, opinions, made in self._makers(row, call):
            if not table.measured[made]:
                continue
            errors, by = table.errors, int(table.rows.call[made])
            when = " in the step before" if table is not self._table else ""
            backward = table.calls.direction[by] == "backward"
            return Expected(
                "gradient" if backward else "parameter" if when and self._table.rows.grad[row] else "input",
                float(errors.rms_error[made]),
                float(errors.peak_error[made]),
                self._slope(table, made),
                opinions.verdict[made] == DIVERGES,
                f"{table.calls.name[by]}, which made it{when}, agrees",
            )
        return None

    def _from_rearranged(self, row: int, call: int) -> Expected | None:
        """What a call of this step made on both sides, read here in another order: `x.mT` is no call that is recorded.

        The same numbers have the same ends and the same norm, and in the same order on both sides the same error.
        """
        table, rows = self._table, self._table.rows
        figures, errors = rows.figures, table.errors
        order, first, end = self._same_ends
        if first[row] == end[row]:
            return None
        held = order[first[row] : end[row]]
        held = held[rows.call[held] < call]
        if not len(held) or table.calls.level[call].is_module or not figures["baseline_norm"][row] or table.exact[row]:
            return None
        if argument_name(table.calls.op[call], rows.slot[row]) in ("weight", "bias"):
            return None
        alike = errors.count[held] == errors.count[row]
        for side, content in zip(("baseline", "candidate"), rows.content, strict=True):
            alike &= (content[held] >= 0) & (content[row] >= 0) & (content[held] != content[row])
            for end_name in ("max", "min"):
                alike &= figures[f"{side}_{end_name}"][held] == figures[f"{side}_{end_name}"][row]
            norm = figures[f"{side}_norm"]
            alike &= abs(norm[held] - norm[row]) <= SAME_NORM * norm[row]
        for error in (errors.rms_error, errors.peak_error):
            alike &= abs(error[held] - error[row]) <= SAME_NORM * error[row]
        held = held[alike].tolist()
        if not held or figures["baseline_max"][row] == figures["baseline_min"][row]:
            return None
        made = held[-1]
        return Expected(
            "input",
            float(errors.rms_error[made]),
            float(errors.peak_error[made]),
            self._slope(table, made),
            self._opinions.verdict[made] == DIVERGES,
            f"{table.calls.name[int(rows.call[made])]}, which made its numbers in another order, agrees",
        )

    @cached_property
    def _same_ends(self) -> tuple[Array, list[int], list[int]]:
        """The rows that calls made, with the same maximum and minimum together; and where those of each row start and end."""
        rows = self._table.rows
        code = numpy.zeros(len(rows.slot), dtype=numpy.uint64)
        for side in ("baseline", "candidate"):
            for end in ("max", "min"):  # a hash: which of them are equal is asked again
                code = code * numpy.uint64(0x9E3779B97F4A7C15) + (rows.figures[f"{side}_{end}"] + 0.0).view(
                    numpy.uint64
                )
        made = numpy.flatnonzero(rows.made & self._table.errors.measured)
        order = made[numpy.argsort(code[made], kind="stable")]
        first, end = (numpy.searchsorted(code[order], code, side).tolist() for side in ("left", "right"))
        return order, first, end

    def _makers(self, row: int, call: int) -> Iterator[tuple[StepTable, Opinions, int]]:
        table, before = self._table, self._lineage.before
        if not table.rows.figures["baseline_norm"][row] or table.calls.level[call].is_module:
            return  # zeros are everywhere; between modules code may have made it
        for side in (0, 1):
            if (made := table.graph.maker(side, row)) is not None:
                yield table, self._opinions, made
            elif before is not None and (content := int(table.rows.content[side][row])) >= 0:
                known = before[0].graph.number(table.contents[content])
                if (made := before[0].graph.last_maker(side, known)) is not None:
                    yield *before, made

    @staticmethod
    def _slope(table: StepTable, row: int) -> float:
        slope = float(table.rows.figures["slope"][row])
        return abs(slope - 1) if slope == slope else math.inf

    def _in_step_before(self, row: int, call: int) -> tuple[StepTable, int] | None:
        """Return where the same slot was read in the step before."""
        if self._lineage.before is None:
            return None
        table, calls = self._lineage.before[0], self._table.calls
        at = table.numbers.get((calls.name[call], calls.repeat[call]))
        found = None if at is None else table.graph.row(at, self._table.rows.slot[row])
        return None if found is None or not table.measured[found] else (table, found)

    def _judge_update(self, row: int, call: int, verdict: int) -> int:
        """Return the verdict on a parameter that was changed since the step before, by code that was not recorded."""
        found, table = self._in_step_before(row, call), self._table
        if found is None or table.nonfinite[row] or table.exact[row]:
            return verdict
        before, at = found
        parts = self._gradients(before, at)
        noise, diverging = self._gradient_error(before, parts)
        if diverging:
            return DIVERGES
        if row not in self._updates:
            self._opinions.questions.append(Question(row, call, tuple(self._name(before, part) for part in parts)))
        update = self._updates.get(row)
        own, slope_z = table.errors, float(table.rows.figures["slope_z"][row])
        known = self._lineage.drift if noise is None else noise
        opinions = self._opinions
        opinions.unseen_updates += 1
        if update is None:  # no values
            error, then = float(own.relative[row]), float(before.errors.relative[at]) + known
            opinions.judged_by[row], opinions.measured[row], opinions.allowed[row] = _L2, error, STATISTICS_OFF + then
            if ROUNDOFFS * float(own.roundoff[row]) + FACTOR * then < error <= STATISTICS_OFF + then:
                opinions.untold.append(Entering(row, call, "parameter", "its update and its values were not recorded"))
            return DIVERGES if error > STATISTICS_OFF + then else AGREES
        allowed = (SCALE_OFF + SCALE_FACTOR * known) * update.size + ROUNDOFFS * float(own.roundoff[row])
        if own.mixed[row]:  # in a narrower dtype all of an update may be lost
            allowed = max(allowed, update.size)
        slope = abs((float(table.rows.figures["slope"][row]) if update.slope is None else update.slope) - 1)
        if abs(slope_z) > SYSTEMATIC_Z and slope > allowed + FACTOR * self._slope(before, at):
            opinions.judged_by[row], opinions.measured[row], opinions.allowed[row] = _SLOPE, slope, allowed
            return DIVERGES
        count, scale = float(own.count[row]), SCALE_OFF + SCALE_FACTOR * known
        share = (0.0 if noise == 0 else SHARE_OFF) + SHARE_FACTOR * known
        opinion = _DIFFERENT, update.off * count, share * count
        usual = 1.0 if noise == 0 else max(1.0, self._usual_gain)
        if update.gain > UPDATE_GAIN * usual and noise is not None:
            opinion = _DIFFERENT, max(update.off, 0.5) * count, share * count
        if abs(update.factor - 1) > scale:
            opinion = _SLOPE, abs(update.factor - 1), scale
        opinions.judged_by[row], opinions.measured[row], opinions.allowed[row] = opinion
        if not opinion[1] > opinion[2]:
            return AGREES
        if noise is None:
            opinions.untold.append(Entering(row, call, "parameter", "its gradients and its update were not recorded"))
            return AGREES
        return DIVERGES

    @cached_property
    def _usual_gain(self) -> float:
        """The median gain of the updates of all parameters; infinite where few are known."""
        gains = sorted(each.gain for each in self._updates.values() if each is not None and each.gain == each.gain)
        return gains[len(gains) // 2] if len(gains) >= MANY_UPDATES else math.inf

    @staticmethod
    def _gradients(before: StepTable, row: int) -> list[int]:
        """Return the rows of the recorded gradients of a parameter. All zeros are alike: of those only that of this call."""
        rows, figures = before.rows, before.rows.figures
        content = int(rows.content[0][row]), int(rows.content[1][row])
        parts = [part for part in before.graph.gradients_of(content) if before.measured[part]]
        if figures["baseline_max"][row] == figures["baseline_min"][row]:
            parts = [part for part in parts if before.calls.forward[int(rows.call[part])] == int(rows.call[row])]
        return parts

    @staticmethod
    def _name(table: StepTable, row: int) -> tuple[str, str, int, str]:
        call, calls = int(table.rows.call[row]), table.calls
        return calls.name[call], calls.candidate[call], calls.repeat[call], table.rows.slot[row]

    def _gradient_error(self, before: StepTable, parts: list[int]) -> tuple[float | None, bool]:
        """Return the relative error of the recorded gradients of a parameter, if there are any; and whether they diverge."""
        assert self._lineage.before is not None
        verdicts = self._lineage.before[1].verdict
        if not parts:
            return None, False
        size = max(float(before.errors.rms[part]) for part in parts)
        error = sum(float(before.errors.rms_error[part]) for part in parts)
        return (error / size if size else math.inf), any(verdicts[part] == DIVERGES for part in parts)

    def _known_elsewhere(self, row: int) -> str:
        """Say what the candidate's tensor is, if the baseline has it in another place or had it in the step before."""
        table = self._table
        content = int(table.rows.content[1][row])
        if (before := self._in_step_before(row, int(table.rows.call[row]))) is not None and content >= 0:
            then = before[0].contents[int(before[0].rows.content[1][before[1]])]
            if then == table.contents[content]:
                return "in the candidate it is still that of the step before"
        for other in table.graph.holding(0, content):
            if other != row:
                name = table.calls.name[int(table.rows.call[other])]
                return f"in the candidate it is what {table.rows.slot[other]} of {name} is in the baseline"
        return ""


def _listed(names: list[str], most: int = 2) -> str:
    """`a and b`; `a, b and 3 more`."""
    shown = names[:most] + ([f"{len(names) - most:,} more"] if len(names) > most else [])
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
