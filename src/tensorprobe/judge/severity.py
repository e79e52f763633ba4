"""The severity of each row's error: column computations over the rows of one step of one rank.

In: measured columns, their errors and the allowance of the noise model. Out: a severity for each row and the figure that
decides; and which calls the walk must look at one by one. No call depends on another here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy

from tensorprobe.judge.limits import Limits
from tensorprobe.judge.noise_model import Allowance, Errors
from tensorprobe.model.measured import AGREES, HARD, JUDGED, VALUES, Measured, Rows

Array = numpy.ndarray[Any, Any]

NOISE, EXPLAINED, AMPLIFIED, UNEXPLAINED = range(4)
"""Severities: within noise, explained by the errors of the inputs, explained by amplification of these, unexplained."""
SYSTEMATIC_SHARE = 0.25
"""A common scale or bias counts from this share of the RMS allowance on, because rounding has no common sign."""
SYSTEMATIC_Z = 12.0
FAR_ULP = 4.0
"""Units in the last place by which an element of a sum, product or quotient of equal numbers may differ."""
_L2, _PEAK, _SLOPE, _BIAS, _DIFFERENT, _NONFINITE, _ULP = (
    JUDGED.index(name)
    for name in ("relative_l2", "max_abs", "slope", "bias", "different", "nonfinite_different", "ulp_max")
)
_TINY = 1e-300


@dataclass
class Severity:
    """The severity of each row and the opinion behind it, as columns."""

    level: Array
    judged_by: Array
    measured: Array
    allowed: Array


def rate_rows(rows: Rows, errors: Errors, allowance: Allowance, factor: Array) -> Severity:
    """Return for each row the figure that exceeds its limit most, and its severity.

    `factor` is the multiple of the noise that the policy allows each row.
    """
    figures = rows.figures
    valued = (rows.basis == VALUES) & (errors.count >= 8)
    slope, bias = abs(figures["slope"] - 1), abs(figures["bias"])
    systematic = [valued & (abs(figures[name]) > SYSTEMATIC_Z) for name in ("slope_z", "bias_z")]
    ratios = []
    for rms_allowed, peak_allowed in (allowance.noise, allowance.explained, allowance.amplified):
        rms_limit, peak_limit = factor * rms_allowed, factor * peak_allowed
        shared = SYSTEMATIC_SHARE * rms_limit
        relative_limit = shared / numpy.maximum(errors.rms, _TINY)
        ratios.append(
            numpy.stack(
                [
                    _ratio(errors.rms_error, rms_limit),
                    _ratio(errors.peak_error, peak_limit),
                    numpy.where(systematic[0], _ratio(slope, relative_limit), 0.0),
                    numpy.where(systematic[1], _ratio(bias, shared), 0.0),
                ]
            )
        )
    worst = [each.max(axis=0) for each in ratios]
    level = (worst[0] > 1).astype(numpy.int8) + (worst[1] > 1) + (worst[2] > 1)
    changed = errors.exact & ~errors.equal
    identical = allowance.operands_equal[rows.call]
    far = (rows.basis == VALUES) & allowance.rounded_once & (figures["ulp_max"] > FAR_ULP)
    level = numpy.where(identical & (far | (allowance.exact & ~errors.equal)), UNEXPLAINED, level)
    level = numpy.where(changed, numpy.where(identical, UNEXPLAINED, AMPLIFIED), level)
    broken = figures["nonfinite_different"] > 0
    level = numpy.where(broken, UNEXPLAINED, numpy.where(errors.equal, NOISE, level)).astype(numpy.int8)

    # Report the final allowance: noise if the inputs are identical, else what they explain.
    judged = numpy.array([_L2, _PEAK, _SLOPE, _BIAS])[ratios[1].argmax(axis=0)]
    rms_limit, peak_limit = (factor * limit for limit in allowance.explained)
    relative_limit = rms_limit / numpy.maximum(errors.rms, _TINY)
    choices = [judged == _L2, judged == _PEAK, judged == _SLOPE, judged == _BIAS]
    value = numpy.select(choices, [errors.relative, errors.peak_error, slope, bias])
    limit = numpy.select(
        choices, [relative_limit, peak_limit, SYSTEMATIC_SHARE * relative_limit, SYSTEMATIC_SHARE * rms_limit]
    )
    for special, code, column, allowed in (
        (identical & far & (worst[1] <= 1), _ULP, "ulp_max", FAR_ULP),
        (changed, _DIFFERENT, "different", 0.0),
        (broken, _NONFINITE, "nonfinite_different", 0.0),
    ):
        judged = numpy.where(special, code, judged)
        value = numpy.where(special, figures[column], value)
        limit = numpy.where(special, allowed, limit)
    return Severity(level, judged, value, limit)


def _ratio(error: Array, limit: Array) -> Array:
    return numpy.where(error > 0, error / numpy.maximum(limit, _TINY), 0.0)


@dataclass
class Attention:
    """For each call, whether the walk must judge it. The others agree in any case."""

    wanted: Array
    """Something differs, so it may inherit an error."""
    doubtful: Array
    """Even while nothing has diverged: a result beyond every allowance, a slot that was not measured or has a limit of its own,
    an input that no call of this step produced."""
    amplified: Array
    """Only amplified input errors explain a result."""


def choose_calls(measured: Measured, errors: Errors, limits: Limits, severity: Severity) -> Attention:
    """Return which calls the walk must judge. In two good runs there are nearly none."""
    rows, number = measured.rows, len(measured.calls.name)
    trivial = errors.equal & (limits.verdict <= AGREES)
    hard = numpy.array(measured.calls.structural, dtype=numpy.int64) == HARD
    wanted = _any_row(rows.call, ~trivial, number) | hard
    produced_at = numpy.full(len(rows.slot) + 1, len(rows.slot), dtype=numpy.int64)
    outputs = numpy.flatnonzero(rows.made & ~errors.equal & errors.measured)
    numpy.minimum.at(produced_at, rows.key[outputs], outputs)
    of_unknown_origin = ~rows.made & ~errors.equal & (produced_at[rows.key] > numpy.arange(len(rows.slot)))
    beyond = rows.made & (severity.level == UNEXPLAINED)
    doubt = of_unknown_origin | beyond | ~errors.measured | (limits.verdict >= 0)
    return Attention(
        wanted=wanted,
        doubtful=wanted & (hard | _any_row(rows.call, doubt, number)),
        amplified=_any_row(rows.call, rows.made & (severity.level >= AMPLIFIED), number),
    )


def _any_row(call: Array, mask: Array, calls: int) -> Array:
    """Return for each call whether the mask holds for one of its rows."""
    return numpy.bincount(call[mask], minlength=calls) > 0
