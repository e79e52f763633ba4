"""Rules with plain limits, and which rows a rule is for. Vectorised; rows of the same kind share one look at the rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy

from tensorprobe.judge.policy import Policy, Rule
from tensorprobe.model.measured import AGREES, DIVERGES, JUDGED, NONE, UNMEASURED, Measured

Array = numpy.ndarray[Any, Any]


@dataclass
class Limits:
    """What the rules say. `verdict` is -1 where a rule asks for noise, and `noise` then holds its factor."""

    verdict: Array
    noise: Array
    judged_by: Array
    measured: Array
    allowed: Array


def judge_by_limits(measured: Measured, policy: Policy) -> Limits:
    """The verdicts of all rules that need no knowledge of the inputs."""
    rows = measured.rows
    number = len(rows.slot)
    limits = Limits(
        verdict=numpy.full(number, -1, dtype=numpy.int8),
        noise=numpy.ones(number),
        judged_by=numpy.zeros(number, dtype=numpy.int8),
        measured=numpy.zeros(number),
        allowed=numpy.zeros(number),
    )
    which = _rules_of_rows(measured, policy.rules)
    for position, rule in enumerate(policy.rules):
        mine = which == position
        if not mine.any():
            continue
        if rule.noise is not None:
            limits.noise[mine] = rule.noise
        elif rule.ignore:
            limits.verdict[mine] = AGREES
        else:
            _apply(rule, measured, mine, limits)
    limits.verdict[rows.basis == NONE] = -1
    return limits


def _rules_of_rows(measured: Measured, rules: list[Rule]) -> Array:
    """For each row the position of the first rule that fits; len(rules) when none does."""
    calls, rows = measured.calls, measured.rows
    if rules[0] == Rule(noise=rules[0].noise, diverges=rules[0].diverges, ignore=rules[0].ignore):
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
    """A row diverges when in one of the groups every figure is beyond its limit; the worst figure is kept."""
    diverges = numpy.zeros(len(mine), dtype=bool)
    for group in rule.diverges:
        beyond = mine.copy()
        for figure, limit in group.items():
            beyond &= _values(figure, measured) > limit
        figure, limit = next(iter(group.items()))
        fresh = beyond & ~diverges
        diverges |= beyond
        shown = fresh if figure == "nonfinite_different" else mine & (fresh | (limits.judged_by == 0))
        limits.judged_by[shown] = JUDGED.index(figure)
        limits.measured[shown] = _values(figure, measured)[shown]
        limits.allowed[shown] = limit
    lacking = numpy.zeros(len(mine), dtype=bool)
    for figure in {figure for group in rule.diverges for figure in group}:
        lacking |= numpy.isnan(_values(figure, measured))
    limits.verdict[mine] = numpy.where(diverges, DIVERGES, numpy.where(lacking, UNMEASURED, AGREES))[mine]


def _values(figure: str, measured: Measured) -> Array:
    """A figure so that greater is worse. NaN, which no limit is below of, stands for what was not measured."""
    column = measured.rows.figures[figure]
    if figure == "bit_identical":
        return (~column.astype(bool)).astype(float)
    if figure in ("slope", "norm_ratio"):
        return abs(column.astype(float) - 1)
    return abs(column.astype(float))
