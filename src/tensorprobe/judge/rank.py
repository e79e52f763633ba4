"""One rank, step after step: verdicts for rows, a status for every call.

A call's inputs are judged by where they come from: a tensor that an earlier call made has the verdict it got there, known
again by its content. A tensor that no recorded call has made is judged by itself. So an error is blamed on the call in which
it first goes beyond what arithmetic explains, and what follows from it is inherited.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy

from tensorprobe.judge.limits import Limits, judge_by_limits
from tensorprobe.judge.noise_model import Allowance, Errors, allow, errors_of
from tensorprobe.judge.policy import Policy
from tensorprobe.model.comparison import STATUSES
from tensorprobe.model.measured import (
    AGREES,
    DIVERGES,
    HARD,
    INPUTS,
    JUDGED,
    NONE,
    UNMEASURED,
    VALUES,
    Measured,
    Opinions,
)
from tensorprobe.ops import Trait, argument_name, has

Array = numpy.ndarray[Any, Any]

_AGREE, _INTRODUCED, _INHERITED, _AMPLIFIED, _STRUCTURAL, _UNMEASURED = range(len(STATUSES))
_IDENTICAL, _INPUTS_AGREE, _INPUTS_DIVERGE, _INPUTS_UNKNOWN = range(len(INPUTS))
_L2, _PEAK, _SLOPE, _BIAS, _DIFFERENT, _NONFINITE, _ULP = (
    JUDGED.index(name)
    for name in ("relative_l2", "max_abs", "slope", "bias", "different", "nonfinite_different", "ulp_max")
)

SYSTEMATIC_SHARE = 0.25
"""A scale or bias that all elements share counts from this part of the RMS allowance on: rounding has no common sign."""
SYSTEMATIC_Z = 12.0
FAR_ULP = 4.0
"""Units in the last place by which single elements of a sum, product or quotient of equal numbers may differ."""
ORIGIN_ROUNDOFFS = 2.0
DRIFT_FACTOR = 8.0
UNINITIALISED = "memory not yet initialised"
"""The note of a result that capture has not recorded because nothing was written to it yet."""
LATER_STEP_ERROR = 0.05
"""What parameters may differ by, relative, at the start of a later step when the calls that made them were not recorded."""


@dataclass
class _Judged:
    """Rows with their ratio to each allowance, before it is known what their inputs are worth."""

    level: Array
    """0 within noise, 1 explained by the inputs, 2 by amplification, 3 unexplained."""
    judged_by: Array
    measured: Array
    allowed: Array


class RankJudge:
    """Judges the steps of one rank, which must come in order."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._known: dict[Any, int] = {}
        self._drift = 0.0
        self._steps = 0
        self._diverged = False

    def judge(self, measured: Measured) -> Opinions:
        """Verdicts and statuses of one step."""
        errors = errors_of(measured)
        with numpy.errstate(all="ignore"):
            allowance = allow(measured, errors)
            limits = judge_by_limits(measured, self._policy)
            judged = _against_allowance(measured, errors, allowance, limits.noise)
        opinion = _blank_opinion(measured, judged, limits, allowance)
        self._walk(measured, errors, allowance, limits, judged, opinion)
        self._steps += 1
        return opinion

    def _walk(
        self,
        measured: Measured,
        errors: Errors,
        allowance: Allowance,
        limits: Limits,
        judged: _Judged,
        opinion: Opinions,
    ) -> None:
        calls, rows = measured.calls, measured.rows
        bounds = [*calls.first_row, len(rows.slot)]
        trivial = errors.equal & (limits.verdict <= AGREES)
        opinion.verdict[trivial] = AGREES
        hard = numpy.array(calls.structural, dtype=numpy.int64) == HARD
        wanted = _any_row(rows.call, ~trivial, len(calls.name)) | hard
        state = _State(measured, errors, allowance, limits, judged, opinion, [False] * len(calls.name))
        doubtful = wanted & (hard | _doubtful(measured, errors, limits, judged))
        quiet = _Quiet(measured, errors, judged, wanted & ~doubtful, state)
        opinion.inputs[quiet.calls] = numpy.where(allowance.operands_equal, _IDENTICAL, _INPUTS_AGREE)[quiet.calls]
        opinion.status[quiet.calls & quiet.amplified] = _AMPLIFIED
        start = 0
        for call in numpy.flatnonzero(doubtful).tolist():
            self._accept(quiet, start, call)
            self._judge_call(call, range(bounds[call], bounds[call + 1]), state)
            start = call + 1
            if self._diverged:
                break
        if not self._diverged:
            self._accept(quiet, start, len(calls.name))
            return
        # From here on a call may have inherited what was found: each is looked at by itself.
        for call in (numpy.flatnonzero(wanted[start:]) + start).tolist():
            opinion.status[call] = _AGREE
            self._judge_call(call, range(bounds[call], bounds[call + 1]), state)

    def _accept(self, quiet: _Quiet, start: int, end: int) -> None:
        """Remember the results of calls between two places, none of which raises a doubt."""
        keys, drift = quiet.results(start, end)
        self._known.update(dict.fromkeys(keys, AGREES))
        self._drift = max(self._drift, drift)

    def _judge_call(self, call: int, rows: range, state: _State) -> None:
        opinion = state.opinion
        outputs = [row for row in rows if state.made[row]]
        inputs = self._judge_inputs(call, [row for row in rows if not state.made[row]], outputs, state)
        diverging = inputs == _INPUTS_DIVERGE
        beyond = amplified = seen = False
        for row in outputs:
            if not state.measured_rows[row]:
                opinion.verdict[row] = UNMEASURED
                continue
            level, explicit = state.levels[row], state.explicit[row]
            seen |= explicit != UNMEASURED
            if explicit >= 0:
                verdict = explicit
                amplified |= diverging and verdict == DIVERGES and level == 3
            elif call in state.filling and not state.equal[row]:
                verdict = UNMEASURED
                seen = False
            else:
                verdict = DIVERGES if level == 3 or (level and diverging) else AGREES
                amplified |= level >= 2
            opinion.verdict[row] = verdict
            beyond |= verdict == DIVERGES
            self._remember(row, verdict, state)
        state.diverging[call] = beyond or diverging
        self._diverged |= state.diverging[call]
        opinion.inputs[call] = inputs
        opinion.status[call] = self._status(call, state, beyond, diverging, amplified, seen or not outputs)
        state.leave(call)
        if opinion.status[call] == _INTRODUCED or call in state.wrong_parameters:
            state.spoil(call)

    def _status(self, call: int, state: _State, beyond: bool, diverging: bool, amplified: bool, seen: bool) -> int:
        if beyond and not diverging:
            return _INTRODUCED
        if state.structural[call] == HARD:
            return _STRUCTURAL
        if beyond:
            return _AMPLIFIED if amplified and not state.is_spoiled(call) else _INHERITED
        if call in state.external:
            return _INHERITED
        if not seen:
            return _UNMEASURED
        return _AMPLIFIED if amplified and not diverging else _AGREE

    def _judge_inputs(self, call: int, rows: list[int], outputs: list[int], state: _State) -> int:
        """The verdict of each input, and what they are worth together; a backward call has those of its forward too."""
        opinion = state.opinion
        overwritten = bool(outputs) and all(state.equal[row] for row in outputs)
        forward = state.measured.calls.forward[call]
        # What a module computes is computed by the calls inside it, which ended before it did.
        diverging = state.is_spoiled(call) or (forward >= 0 and state.diverging[forward])
        seen = False
        for row in rows:
            if not state.measured_rows[row]:
                opinion.verdict[row] = UNMEASURED
                continue
            seen |= state.explicit[row] != UNMEASURED
            if state.equal[row] and state.explicit[row] <= 0:
                continue
            verdict = state.explicit[row]
            if verdict < 0:
                known = self._known.get(state.measured.keys[state.keys[row]])
                if known is None or (known == UNMEASURED and not state.is_fresh_memory(row, call)):
                    known = self._judge_origin(row, call, state, harmless=overwritten)
                if known == UNMEASURED:
                    state.filling.add(call)
                verdict = known
            elif verdict == DIVERGES and state.measured.keys[state.keys[row]] not in self._known:
                self._note_external(row, call, state)
            opinion.verdict[row] = verdict
            if verdict == DIVERGES:
                diverging = True
                if argument_name(state.measured.calls.op[call], state.measured.rows.slot[row]):
                    state.wrong_parameters.add(call)
        if diverging:
            return _INPUTS_DIVERGE
        if rows and not seen:
            return _INPUTS_UNKNOWN
        return _IDENTICAL if state.operands_equal[call] else _INPUTS_AGREE

    def _judge_origin(self, row: int, call: int, state: _State, *, harmless: bool) -> int:
        """A tensor that no recorded call has made: a parameter, data, or a sum made inside the autograd engine.

        UNMEASURED for fresh memory that the call fills: what stands there before is nobody's result.
        """
        if state.is_fresh_memory(row, call):
            return UNMEASURED
        if harmless and state.is_written_to(row, call):
            return AGREES
        errors, opinion = state.errors, state.opinion
        forward = state.measured.calls.direction[call] == "forward"
        allowed = max(ORIGIN_ROUNDOFFS * float(errors.roundoff[row]), DRIFT_FACTOR * self._drift)
        if self._steps and forward:
            allowed = max(allowed, LATER_STEP_ERROR)
        error = float(errors.relative[row])
        broken = state.measured.rows.figures["nonfinite_different"][row] > 0
        verdict = DIVERGES if error > allowed or broken or (errors.exact[row] and not self._drift) else AGREES
        opinion.judged_by[row] = _NONFINITE if broken else _L2
        opinion.measured[row], opinion.allowed[row] = error, allowed
        if verdict == DIVERGES:
            self._note_external(row, call, state)
        self._known.setdefault(state.measured.keys[state.keys[row]], verdict)
        return verdict

    def _note_external(self, row: int, call: int, state: _State) -> None:
        """Remember a tensor that differs in the first step although no recorded call has made it."""
        forward = state.measured.calls.direction[call] == "forward"
        if forward and not self._steps and state.may_be_external(row, call, self._diverged):
            state.opinion.externals.append((row, call))
            state.external.add(call)

    def _remember(self, row: int, verdict: int, state: _State) -> None:
        if state.equal[row]:
            return
        self._known[state.measured.keys[state.keys[row]]] = verdict
        if verdict == AGREES:
            self._drift = max(self._drift, state.drift[row])


def _same_but_wrapped(one: str, other: str) -> bool:
    return one.endswith(f".{other}") or other.endswith(f".{one}")


def module_path(op: str) -> str:
    """`layers.0.attn` for `Module.layers.0.attn.Attention`; empty for the model itself and for what is no module."""
    return op.removeprefix("Module.").rpartition(".")[0] if op.startswith("Module.") else ""


def _any_row(call: Array, mask: Array, calls: int) -> Array:
    """For each call whether the mask holds for one of its rows."""
    return numpy.bincount(call[mask], minlength=calls) > 0


def _doubtful(measured: Measured, errors: Errors, limits: Limits, judged: _Judged) -> Array:
    """Calls that need a look of their own even while nothing has diverged: a result beyond every allowance, a slot that
    was not measured or has a limit of its own, an input that no call of this step has made.
    """
    rows = measured.rows
    made = numpy.full(len(measured.keys) + 1, len(rows.slot), dtype=numpy.int64)
    outputs = numpy.flatnonzero(rows.made & ~errors.equal & errors.measured)
    numpy.minimum.at(made, rows.key[outputs], outputs)
    strange = ~rows.made & ~errors.equal & (made[rows.key] > numpy.arange(len(rows.slot)))
    beyond = rows.made & (judged.level == 3)
    return _any_row(rows.call, strange | beyond | ~errors.measured | (limits.verdict >= 0), len(measured.calls.name))


class _Quiet:
    """Calls that agree as long as nothing before them has diverged."""

    def __init__(self, measured: Measured, errors: Errors, judged: _Judged, calls: Array, state: _State) -> None:
        rows = measured.rows
        self.calls = calls
        self.amplified = _any_row(rows.call, rows.made & (judged.level >= 2), len(calls))
        self._rows = numpy.flatnonzero(calls[rows.call] & rows.made & ~errors.equal)
        self._call = rows.call[self._rows]
        self._state = state

    def results(self, start: int, end: int) -> tuple[list[Any], float]:
        """What identifies the results of the calls from `start` to `end`, and the greatest error among them."""
        first, last = numpy.searchsorted(self._call, (start, end))
        rows, state = self._rows[first:last].tolist(), self._state
        keys = [state.measured.keys[state.keys[row]] for row in rows]
        return keys, max((state.drift[row] for row in rows), default=0.0)


class _State:
    """The columns of one step as lists, which are read row by row."""

    def __init__(
        self,
        measured: Measured,
        errors: Errors,
        allowance: Allowance,
        limits: Limits,
        judged: _Judged,
        opinion: Opinions,
        diverging: list[bool],
    ) -> None:
        self.measured, self.errors, self.opinion, self.diverging = measured, errors, opinion, diverging
        self.made: list[bool] = measured.rows.made.tolist()
        self.keys: list[int] = measured.rows.key.tolist()
        self.measured_rows: list[bool] = errors.measured.tolist()
        self.equal: list[bool] = errors.equal.tolist()
        self.levels: list[int] = judged.level.tolist()
        self.explicit: list[int] = limits.verdict.tolist()
        self.structural = measured.calls.structural
        self.operands_equal: list[bool] = allowance.operands_equal.tolist()
        self.filling: set[int] = set()
        """Calls that write into memory that was never initialised."""
        self.external: set[int] = set()
        self.wrong_parameters: set[int] = set()
        """Calls with a parameter that diverges."""
        self._spoiled: set[tuple[str, str]] = set()
        unpaired = [finding.index for finding in measured.findings if finding.kind.startswith("only_")]
        self.first_unpaired = min(unpaired, default=None)
        notes = zip(measured.rows.note, measured.rows.shapes[0], measured.rows.dtype_names[0], strict=True)
        self._fresh = {(shape, dtype) for note, shape, dtype in notes if note == UNINITIALISED}
        size = numpy.maximum(allowance.size, 1e-300)
        self.drift: list[float] = numpy.minimum(errors.rms_error / size, 1.0).tolist()

    def spoil(self, call: int) -> None:
        """Remember that a call inside these modules went wrong, or has other parameters: they inherit that.

        An input that diverges is no such thing: code of the module itself, which is no call, may have made it.
        """
        calls = self.measured.calls
        direction, path = calls.direction[call], calls.module[call]
        if calls.level[call].is_module:
            own = module_path(calls.op[call])
            path = own.rpartition(".")[0]
            if not own:
                return
        while path:
            self._spoiled.add((direction, path))
            path = path.rpartition(".")[0]
        self._spoiled.add((direction, ""))

    def leave(self, call: int) -> None:
        """A module has ended: what went wrong inside it is no excuse for its next call."""
        calls = self.measured.calls
        if calls.level[call].is_module and self._spoiled:
            own, direction = module_path(calls.op[call]), calls.direction[call]
            self._spoiled = {
                (way, path)
                for way, path in self._spoiled
                if way != direction or (path != own and not path.startswith(f"{own}." if own else ""))
            }

    def is_spoiled(self, call: int) -> bool:
        """Whether the call is that of a module in which something has diverged."""
        calls = self.measured.calls
        if not calls.level[call].is_module:
            return False
        return (calls.direction[call], module_path(calls.op[call])) in self._spoiled

    def may_be_external(self, row: int, call: int, diverged: bool) -> bool:
        """Whether a differing tensor of unknown origin was there before the first call, or may have been made on the way.

        Once something has diverged it may well follow from that; a parameter does not. A call without a partner, or
        partners in other modules, may have made it.
        """
        rows, calls = self.measured.rows, self.measured.calls
        if self.first_unpaired is not None and self.first_unpaired <= calls.index[call]:
            return False
        if calls.module[call] != calls.candidate_module[call] and not _same_but_wrapped(
            calls.module[call], calls.candidate_module[call]
        ):
            return False
        if argument_name(calls.op[call], rows.slot[row]) and rows.grad[row]:
            return True
        # Between calls of modules there is code that makes tensors too.
        return not diverged and (not calls.level[call].is_module or not call)

    def is_written_to(self, row: int, call: int) -> bool:
        """Whether the call writes into this argument of it."""
        calls, slots = self.measured.calls, self.measured.rows.slot
        place = slots[row].removeprefix("input.")
        end = calls.first_row[call + 1] if call + 1 < len(calls.first_row) else len(slots)
        if f"output.changed.{place}" in slots[calls.first_row[call] : end]:
            return True
        return place == "0" and calls.op[call].endswith(("_", ".__setitem__"))

    def is_fresh_memory(self, row: int, call: int) -> bool:
        """Whether a differing argument is of the shape of memory that was allocated bare, and is filled in part."""
        rows, op = self.measured.rows, self.measured.calls.op[call]
        fresh = (rows.shapes[0][row], rows.dtype_names[0][row]) in self._fresh
        return fresh and has(op, Trait.WRITES_PART) and self.is_written_to(row, call)


def _against_allowance(measured: Measured, errors: Errors, allowance: Allowance, factor: Array) -> _Judged:
    """For each row the figure that is worst against its limit, and how far it has to be explained."""
    rows, figures = measured.rows, measured.rows.figures
    valued = (rows.basis == VALUES) & (errors.count >= 8)
    slope, bias = abs(figures["slope"] - 1), abs(figures["bias"])
    systematic = [valued & (abs(figures[name]) > SYSTEMATIC_Z) for name in ("slope_z", "bias_z")]
    candidates = []
    for rms_allowed, peak_allowed in (allowance.noise, allowance.explained, allowance.amplified):
        rms_limit, peak_limit = factor * rms_allowed, factor * peak_allowed
        shared = SYSTEMATIC_SHARE * rms_limit
        relative_limit = shared / numpy.maximum(errors.rms, 1e-300)
        candidates.append(
            numpy.stack(
                [
                    _ratio(errors.rms_error, rms_limit),
                    _ratio(errors.peak_error, peak_limit),
                    numpy.where(systematic[0], _ratio(slope, relative_limit), 0.0),
                    numpy.where(systematic[1], _ratio(bias, shared), 0.0),
                ]
            )
        )
    worst = [ratios.max(axis=0) for ratios in candidates]
    level = (worst[0] > 1).astype(numpy.int8) + (worst[1] > 1) + (worst[2] > 1)
    changed = errors.exact & ~errors.equal
    identical = allowance.operands_equal[rows.call]
    far = (rows.basis == VALUES) & allowance.rounded_once & (figures["ulp_max"] > FAR_ULP)
    level = numpy.where(identical & (far | (allowance.exact & ~errors.equal)), 3, level)
    level = numpy.where(changed, numpy.where(allowance.operands_equal[rows.call], 3, 2), level)
    broken = figures["nonfinite_different"] > 0
    level = numpy.where(broken, 3, numpy.where(errors.equal, 0, level)).astype(numpy.int8)

    # Said against what was allowed in the end: noise where the inputs are identical, else what they explain.
    judged = numpy.array([_L2, _PEAK, _SLOPE, _BIAS])[candidates[1].argmax(axis=0)]
    rms_limit, peak_limit = (factor * limit for limit in allowance.explained)
    relative_limit = rms_limit / numpy.maximum(errors.rms, 1e-300)
    choices = [judged == _L2, judged == _PEAK, judged == _SLOPE, judged == _BIAS]
    value = numpy.select(choices, [errors.relative, errors.peak_error, slope, bias])
    limit = numpy.select(
        choices, [relative_limit, peak_limit, SYSTEMATIC_SHARE * relative_limit, SYSTEMATIC_SHARE * rms_limit]
    )
    worst_ulp = identical & far & (candidates[1].max(axis=0) <= 1)
    judged = numpy.where(worst_ulp, _ULP, judged)
    value = numpy.where(worst_ulp, figures["ulp_max"], value)
    limit = numpy.where(worst_ulp, FAR_ULP, limit)
    for special, code, column in ((changed, _DIFFERENT, "different"), (broken, _NONFINITE, "nonfinite_different")):
        judged = numpy.where(special, code, judged)
        value = numpy.where(special, figures[column], value)
        limit = numpy.where(special, 0.0, limit)
    return _Judged(level, judged, value, limit)


def _ratio(error: Array, limit: Array) -> Array:
    return numpy.where(error > 0, error / numpy.maximum(limit, 1e-300), 0.0)


def _blank_opinion(measured: Measured, judged: _Judged, limits: Limits, allowance: Allowance) -> Opinions:
    """All agrees, with the figures that will be said of each row."""
    by_limits = limits.verdict >= 0
    verdict = numpy.where(measured.rows.basis == NONE, UNMEASURED, numpy.maximum(limits.verdict, AGREES))
    number = len(measured.calls.name)
    return Opinions(
        verdict=verdict.astype(numpy.int8),
        judged_by=numpy.where(by_limits, limits.judged_by, judged.judged_by).astype(numpy.int8),
        measured=numpy.where(by_limits, limits.measured, judged.measured),
        allowed=numpy.where(by_limits, limits.allowed, judged.allowed),
        status=numpy.full(number, _AGREE, dtype=numpy.int8),
        inputs=numpy.full(number, _IDENTICAL, dtype=numpy.int8),
        input_error=allowance.input_error,
        externals=[],
    )
