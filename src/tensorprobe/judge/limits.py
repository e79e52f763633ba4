"""Rules with fixed limits: on columns of rows, and on the figures of one pair.

For columns, rows of the same kind look up their rule once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy

from tensorprobe.judge.policy import Policy, Rule
from tensorprobe.model.comparison import FIGURES
from tensorprobe.model.measured import AGREES, DIVERGES, JUDGED, NONE, UNMEASURED, Measured, Opinion

Array = numpy.ndarray[Any, Any]
Values = TypeVar("Values", float, Array)


@dataclass
class Limits:
    """The verdict of the rules on each row. `verdict` is -1 if a rule gives a noise factor, which is in `noise`."""

    verdict: Array
    noise: Array
    judged_by: Array
    measured: Array
    allowed: Array
    rules: set[int]
    """The rules of the policy that decided on a row, by position."""


def judge_by_limits(measured: Measured, policy: Policy) -> Limits:
    """Return the verdicts of all rules that do not depend on the inputs of a call."""
    rows = measured.rows
    number = len(rows.slot)
    limits = Limits(
        verdict=numpy.full(number, -1, dtype=numpy.int8),
        noise=numpy.ones(number),
        judged_by=numpy.zeros(number, dtype=numpy.int8),
        measured=numpy.zeros(number),
        allowed=numpy.zeros(number),
        rules=set(),
    )
    which = _rules_of_rows(measured, policy.rules)
    for position, rule in enumerate(policy.rules):
        mine = which == position
        if not mine.any():
            continue
        limits.rules.add(position)
        if rule.noise is not None:
            limits.noise[mine] = rule.noise
        elif rule.ignore:
            limits.verdict[mine] = AGREES
        else:
            _apply(rule, measured, mine, limits)
    limits.verdict[rows.basis == NONE] = -1
    return limits


def judge_figures(rule: Rule, figures: Mapping[str, float]) -> Opinion:
    """Return the opinion of one rule on one pair: by the first group of conditions that is met, else by the first group."""
    shown: Opinion | None = None
    for group in rule.diverges:
        found = [Opinion(figure, _badness(figure, figures[figure]), limit) for figure, limit in group.items()]
        if not any(opinion.passes for opinion in found):
            return found[0]
        shown = shown or next(opinion for opinion in found if opinion.passes)
    return shown or Opinion("ignored", 0.0, 0.0)


def _badness(figure: str, value: Values) -> Values:
    """Return how far a figure is from its value for equal tensors."""
    return abs(value - float(FIGURES[figure].equal or 0.0))


def _rules_of_rows(measured: Measured, rules: list[Rule]) -> Array:
    """Return for each row the index of the first matching rule; len(rules) if none matches."""
    calls, rows = measured.calls, measured.rows
    if rules[0].fits_all:
        return numpy.zeros(len(rows.slot), dtype=numpy.int64)
    chosen: dict[tuple[str, ...], int] = {}
    out = numpy.empty(len(rows.slot), dtype=numpy.int64)
    for row, (call, slot, dtype) in enumerate(zip(rows.call.tolist(), rows.slot, rows.dtype_names[1], strict=True)):
        about = (calls.name[call], calls.op[call], slot, dtype, calls.module[call])
        if about not in chosen:
            chosen[about] = next((at for at, rule in enumerate(rules) if rule.fits(*about)), len(rules))
        out[row] = chosen[about]
    return out


def _apply(rule: Rule, measured: Measured, mine: Array, limits: Limits) -> None:
    """A row diverges if all figures of one group exceed their limits. A figure that was not measured (NaN) exceeds none."""
    figures = {figure for group in rule.diverges for figure in group}
    values = {figure: _badness(figure, measured.rows.figures[figure].astype(float)) for figure in figures}
    diverges = numpy.zeros(len(mine), dtype=bool)
    for group in rule.diverges:
        beyond = mine.copy()
        for figure, limit in group.items():
            beyond &= values[figure] > limit
        figure, limit = next(iter(group.items()))
        fresh = beyond & ~diverges
        diverges |= beyond
        shown = fresh if figure == "nonfinite_different" else mine & (fresh | (limits.judged_by == 0))
        limits.judged_by[shown] = JUDGED.index(figure)
        limits.measured[shown] = values[figure][shown]
        limits.allowed[shown] = limit
    lacking = numpy.zeros(len(mine), dtype=bool)
    for column in values.values():
        lacking |= numpy.isnan(column)
    limits.verdict[mine] = numpy.where(diverges, DIVERGES, numpy.where(lacking, UNMEASURED, AGREES))[mine]
