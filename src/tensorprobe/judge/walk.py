"""Walks through the calls of one rank, step by step, and gives rows a verdict and calls a status.

A call's inputs are judged by where they come from: a tensor that an earlier call produced has the verdict it got there,
recognised by its content. A tensor that no recorded call produced is judged by itself. So an error is blamed on the call in
which it first exceeds what arithmetic explains, and what follows from it is inherited.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy

from tensorprobe.judge.inside import Inside
from tensorprobe.judge.limits import Limits, judge_by_limits
from tensorprobe.judge.noise_model import Allowance, allow, errors_of
from tensorprobe.judge.origins import Lineage, Origins
from tensorprobe.judge.policy import Policy
from tensorprobe.judge.severity import AMPLIFIED, UNEXPLAINED, Attention, Severity, choose_calls, rate_rows
from tensorprobe.judge.step_table import StepTable, is_meeting_place, rows_of_parts
from tensorprobe.model.comparison import STATUSES, Proof
from tensorprobe.model.measured import (
    AGREES,
    DIVERGES,
    HARD,
    INPUTS,
    JUDGED,
    NONE,
    STATISTICS,
    UNMEASURED,
    Calls,
    Entering,
    Measured,
    Opinions,
    Update,
)
from tensorprobe.model.reason import Unmeasured
from tensorprobe.ops import has_parts, module_path

Array = numpy.ndarray[Any, Any]

_AGREE, _INTRODUCED, _ENTERED, _INHERITED, _AMPLIFIED, _STRUCTURAL, _UNMEASURED = range(len(STATUSES))
_IDENTICAL, _INPUTS_AGREE, _INPUTS_DIVERGE, _INPUTS_UNKNOWN = range(len(INPUTS))
_DIFFERENT = JUDGED.index("different")


class Known(NamedTuple):
    """What was found out about a step since it was measured."""

    proofs: Mapping[int, Proof] = MappingProxyType({})
    """By the position of the call."""
    updates: Mapping[int, Update | None] = MappingProxyType({})
    """By row: answers to the questions of the opinions; None where nothing can be measured."""


_NOTHING = Known()


class RankJudge:
    """Judges the steps of one rank, in order."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._lineage = Lineage()
        self._rules_used: set[int] = set()

    @property
    def unused_rules(self) -> list[str]:
        """The rules that decided on no row so far. One that matches every row is the rest of a policy, and not listed."""
        return [
            f"rule {at + 1} ({rule.selects})"
            for at, rule in enumerate(self._policy.rules)
            if at not in self._rules_used and not rule.fits_all
        ]

    def judge_again(self, measured: Measured, known: Known) -> Opinions:
        """Return the verdicts on the last step once more, with what was found out since."""
        self._lineage = self._before
        return self.judge(measured, known)

    def judge(self, measured: Measured, known: Known = _NOTHING) -> Opinions:
        """Return the verdicts and statuses of one step."""
        self._before = replace(self._lineage, verdicts=dict(self._lineage.verdicts))
        errors = errors_of(measured)
        if measured.other_layout:
            errors.measured &= ~rows_of_parts(measured)
        with numpy.errstate(all="ignore"):
            inside = Inside.of(measured)
            allowance = allow(measured, errors, inside)
            limits = judge_by_limits(measured, self._policy)
            self._rules_used |= limits.rules
            severity = rate_rows(measured.rows, errors, allowance, limits.noise)
            alone = severity
            if inside.around:
                alone = rate_rows(measured.rows, errors, allow(measured, errors, Inside.nothing()), limits.noise)
            table = StepTable.of(measured, errors, allowance, limits, severity)
        opinions = _blank_opinions(measured, severity, limits, allowance)
        opinions.proofs = known.proofs
        attention = choose_calls(measured, errors, limits, severity)
        for call, proof in known.proofs.items():
            if proof.at_fault:
                attention.wanted[call] = attention.doubtful[call] = True
        walk_step(table, attention, opinions, self._lineage, known.updates, (inside, alone))
        _drop_contradictions(measured, opinions)
        opinions.untold += _other_updates(measured, opinions)
        if measured.other_layout and self._before.before is not None:
            whole = [row for row in measured.rows.roles if is_meeting_place(measured, row) and table.measured[row]]
            opinions.whole = sum(opinions.verdict[row] == AGREES for row in whole)
        self._lineage.before = table, opinions
        return opinions


def walk_step(
    table: StepTable,
    attention: Attention,
    opinions: Opinions,
    lineage: Lineage,
    updates: Mapping[int, Update | None],
    inside: tuple[Inside, Severity],
) -> None:
    """Judge the calls of one step in order: fill in `opinions` and update `lineage`.

    As long as nothing has diverged only doubtful calls are looked at; the others agree.
    """
    walk = _Walk(table, opinions, lineage, Origins(table, opinions, lineage, updates), *inside)
    quiet = attention.wanted & ~attention.doubtful
    opinions.inputs[quiet] = numpy.where(table.operands_equal, _IDENTICAL, _INPUTS_AGREE)[quiet]
    opinions.status[quiet & attention.amplified] = _AMPLIFIED
    results = _QuietResults(table, quiet)
    start = 0
    if not lineage.diverged:
        for call in numpy.flatnonzero(attention.doubtful).tolist():
            results.accept(start, call, lineage)
            walk.judge_call(call)
            start = call + 1
            if lineage.diverged:
                break
        else:
            results.accept(start, len(table.calls.name), lineage)
            start = len(table.calls.name)
    # From here on every call is judged: it may have inherited an error.
    for call in (numpy.flatnonzero(attention.wanted[start:]) + start).tolist():
        opinions.status[call] = _AGREE
        walk.judge_call(call)


class _QuietResults:
    """Results of calls that agree if nothing before them diverges."""

    def __init__(self, table: StepTable, quiet: Array) -> None:
        rows = table.rows
        self._table = table
        self._rows = numpy.flatnonzero(quiet[rows.call] & rows.made & ~numpy.array(table.equal, dtype=bool))
        self._call = rows.call[self._rows]

    def accept(self, start: int, end: int, lineage: Lineage) -> None:
        """Remember that the results of the calls from `start` to `end` agree."""
        first, last = numpy.searchsorted(self._call, (start, end))
        rows, table = self._rows[first:last].tolist(), self._table
        lineage.verdicts.update(dict.fromkeys((table.identity[row] for row in rows), AGREES))
        lineage.drift = max(lineage.drift, max((table.drift[row] for row in rows), default=0.0))


class _Walk:
    """One step, call by call."""

    def __init__(
        self,
        table: StepTable,
        opinions: Opinions,
        lineage: Lineage,
        origins: Origins,
        inside: Inside,
        alone: Severity,
    ) -> None:
        self._table, self._opinions, self._lineage, self._origins = table, opinions, lineage, origins
        self._inside, self._alone = inside, alone
        self._unexcused: set[int] = set()
        """Calls of modules with a call inside that diverges: what is inside them explains nothing."""
        self._modules = FaultyModules(table.calls)
        self._diverging: set[int] = set()
        """Calls with an input or an output that diverges."""
        self._filling: set[int] = set()
        """Calls that write to uninitialised memory."""
        self._wrong_parameters: set[int] = set()
        """Calls with a parameter that diverges."""

    def judge_call(self, call: int) -> None:
        """Give verdicts to the rows of a call and a status to the call."""
        table, opinions = self._table, self._opinions
        rows = table.rows_of(call)
        outputs = [row for row in rows if table.made[row]]
        inputs = self._judge_inputs(call, [row for row in rows if not table.made[row]], outputs)
        diverging = inputs == _INPUTS_DIVERGE
        proof = opinions.proofs.get(call)
        proved = proof is not None and proof.at_fault
        # A call with other arguments is right on both sides, and the runs differ for all that.
        cleared = proof is not None and not (proof.baseline_wrong or proof.candidate_wrong or proof.random)
        masked = [row for row in rows if row in table.rows.masked and not table.made[row]]
        forward = table.calls.forward[call]
        other = table.calls.structural[call] or (forward >= 0 and table.calls.structural[forward])
        cleared = cleared and not (diverging or masked or other)
        beyond = amplified = seen = False
        for row in outputs:
            if not table.measured[row]:
                wrong = proved and proof is not None and table.rows.slot[row] == proof.slot
                opinions.verdict[row] = DIVERGES if wrong else UNMEASURED
                beyond |= wrong
                continue
            severity, by_limit = self._severity(row, call), table.verdict[row]
            seen |= by_limit != UNMEASURED
            if by_limit >= 0:
                verdict = by_limit
                amplified |= diverging and verdict == DIVERGES and severity == UNEXPLAINED
            elif call in self._filling and not table.equal[row]:
                verdict = UNMEASURED
                seen = False
            elif has_parts(table.calls.op[call]) and self._lineage.verdicts.get(table.identity[row]) == AGREES:
                verdict = AGREES  # a call inside the module or function made it
            elif cleared:
                verdict = AGREES
                if severity == UNEXPLAINED:
                    opinions.withdrawn.add(call)
                    opinions.judged_by[row] = 0
                    self._lineage.verdicts[table.identity[row]] = AGREES
            else:
                verdict = DIVERGES if severity == UNEXPLAINED or (severity and diverging) else AGREES
                if proved and proof is not None and table.rows.slot[row] == proof.slot:
                    verdict = DIVERGES
                amplified |= severity >= AMPLIFIED
            opinions.verdict[row] = verdict
            beyond |= verdict == DIVERGES
            if call not in opinions.withdrawn:
                self._remember(row, verdict)
        if beyond and any(table.rows.unmeasured.get(row) is Unmeasured.SHAPE for row in rows if not table.made[row]):
            inputs, diverging = _INPUTS_DIVERGE, True  # of other numbers: nothing is known of what the call adds
        if beyond and masked and not diverging:
            inputs, diverging = self._blame_mask(masked[0], call), True
        if beyond or diverging:
            self._diverging.add(call)
            self._unexcused.update(self._inside.chain(call))
            self._lineage.diverged = True
        opinions.inputs[call] = inputs
        status = self._status(call, beyond, diverging, amplified, seen or not outputs)
        opinions.status[call] = _INTRODUCED if proved and beyond else status
        self._modules.leave(call)
        if opinions.status[call] == _INTRODUCED or call in self._wrong_parameters:
            self._modules.blame(call)

    def _blame_mask(self, row: int, call: int) -> int:
        """The two runs mask elements by different numbers, and here that matters: blame the call that made the mask."""
        maker = self._table.graph.maker(0, row)
        if maker is None:
            self._origins.note(row, call)
        else:
            self._opinions.status[self._table.rows.call[maker]] = _INTRODUCED
            self._opinions.verdict[maker] = DIVERGES
        return _INPUTS_DIVERGE

    def _severity(self, row: int, call: int) -> int:
        """Return the severity of a result, and report the figures behind it."""
        if call not in self._unexcused and not (self._diverging and call in self._inside.whole):
            return self._table.severity[row]
        opinions, alone = self._opinions, self._alone
        opinions.judged_by[row], opinions.measured[row] = alone.judged_by[row], alone.measured[row]
        opinions.allowed[row] = alone.allowed[row]
        return int(alone.level[row])

    def _status(self, call: int, beyond: bool, diverging: bool, amplified: bool, seen: bool) -> int:
        if beyond and not diverging:
            return _INTRODUCED
        if self._table.calls.structural[call] == HARD:
            return _STRUCTURAL
        entering = self._opinions.entering
        if entering and entering[-1].call == call:
            return _ENTERED
        if beyond:
            return _AMPLIFIED if amplified and not self._modules.is_faulty(call) else _INHERITED
        if not seen:
            return _UNMEASURED
        return _AMPLIFIED if amplified and not diverging else _AGREE

    def _judge_inputs(self, call: int, rows: list[int], outputs: list[int]) -> int:
        """Give each input a verdict and return the overall one. A backward call also has the inputs of its forward call."""
        table = self._table
        overwritten = bool(outputs) and all(table.equal[row] for row in outputs)
        # The calls inside a module compute its result, and end before it.
        diverging = self._modules.is_faulty(call) or table.calls.forward[call] in self._diverging
        seen = False
        for row in rows:
            if not table.measured[row]:
                self._opinions.verdict[row] = UNMEASURED
                continue
            seen |= table.verdict[row] != UNMEASURED
            if table.equal[row] and table.verdict[row] <= 0:
                continue
            verdict = self._judge_input(row, call, overwritten)
            self._opinions.verdict[row] = verdict
            if verdict == DIVERGES:
                diverging = True
                if table.is_parameter(row, call):
                    self._wrong_parameters.add(call)
        if diverging:
            return _INPUTS_DIVERGE
        if rows and not seen:
            return _INPUTS_UNKNOWN
        return _IDENTICAL if table.operands_equal[call] else _INPUTS_AGREE

    def _judge_input(self, row: int, call: int, overwritten: bool) -> int:
        table = self._table
        known = self._lineage.verdicts.get(table.identity[row])
        by_limit = table.verdict[row]
        if by_limit >= 0:
            if by_limit == DIVERGES and known is None:
                self._origins.note(row, call)
            return by_limit
        if known is None or (known == UNMEASURED and not table.is_fresh_memory(row, call)):
            known = self._origins.judge(row, call, overwritten=overwritten)
        if known == UNMEASURED:
            self._filling.add(call)
        return known

    def _remember(self, row: int, verdict: int) -> None:
        if self._table.equal[row]:
            return
        self._lineage.verdicts[self._table.identity[row]] = verdict
        if verdict == AGREES:
            self._lineage.drift = max(self._lineage.drift, self._table.drift[row])


class FaultyModules:
    """The modules with a diverging call or parameter inside; their own calls inherit that."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._paths: set[tuple[str, str]] = set()

    def blame(self, call: int) -> None:
        """Mark every module around the call.

        An input that diverges is not enough: code of the module itself, which is no call, may have made it.
        """
        direction, path = self._calls.direction[call], self._calls.module[call]
        if self._calls.level[call].is_module:
            own = module_path(self._calls.op[call])
            path = own.rpartition(".")[0]
            if not own:
                return
        while path:
            self._paths.add((direction, path))
            path = path.rpartition(".")[0]
        self._paths.add((direction, ""))

    def leave(self, call: int) -> None:
        """Forget a module that has ended: an error inside it does not excuse its next call."""
        if self._paths and self._calls.level[call].is_module:
            own, direction = module_path(self._calls.op[call]), self._calls.direction[call]
            self._paths = {
                (way, path)
                for way, path in self._paths
                if way != direction or (path != own and not path.startswith(f"{own}." if own else ""))
            }

    def is_faulty(self, call: int) -> bool:
        """Return whether the call is of a module in which something diverged."""
        if not self._calls.level[call].is_module:
            return False
        return (self._calls.direction[call], module_path(self._calls.op[call])) in self._paths


def _other_updates(measured: Measured, opinions: Opinions) -> Iterator[Entering]:
    """Yield parameters and states that an optimizer updates with other arguments, where only statistics are known.

    A learning rate that is 1 % larger changes a parameter by less than what statistics show.
    """
    calls, rows = measured.calls, measured.rows
    asked = {each.index for each in measured.findings if each.kind == "arguments"}
    last: dict[str, int] = {}
    for row, role in sorted(rows.roles.items()) if asked else ():
        updates = rows.made[row] and role.startswith(("parameter ", "optimizer state "))
        told = rows.basis[row] != STATISTICS or opinions.verdict[row] != AGREES
        if updates and not told and calls.index[int(rows.call[row])] in asked:
            last[role] = row
    for row in last.values():
        call = int(rows.call[row])
        text = f"{calls.name[call]} has other arguments, and the values that it made were not recorded"
        yield Entering(row, call, "parameter", text)


def _drop_contradictions(measured: Measured, opinions: Opinions) -> None:
    """No row that diverges is reported with a figure that is within its limit.

    Such rows diverge because what they inherit diverges, because no difference at all is allowed, or by proof.
    """
    within = (opinions.verdict == DIVERGES) & (opinions.measured <= opinions.allowed)
    exact = within & (opinions.status[measured.rows.call] == _INTRODUCED)
    exact &= ~numpy.isin(measured.rows.call, [call for call, proof in opinions.proofs.items() if proof.at_fault])
    opinions.judged_by[within] = 0
    opinions.judged_by[exact] = _DIFFERENT
    opinions.measured[exact] = measured.rows.figures["different"][exact]
    opinions.allowed[exact] = 0.0


def _blank_opinions(measured: Measured, severity: Severity, limits: Limits, allowance: Allowance) -> Opinions:
    """Return opinions that all agree, with the reported figures of each row."""
    by_limit = limits.verdict >= 0
    verdict = numpy.where(measured.rows.basis == NONE, UNMEASURED, numpy.maximum(limits.verdict, AGREES))
    number = len(measured.calls.name)
    return Opinions(
        verdict=verdict.astype(numpy.int8),
        judged_by=numpy.where(by_limit, limits.judged_by, severity.judged_by).astype(numpy.int8),
        measured=numpy.where(by_limit, limits.measured, severity.measured),
        allowed=numpy.where(by_limit, limits.allowed, severity.allowed),
        status=numpy.full(number, _AGREE, dtype=numpy.int8),
        inputs=numpy.full(number, _IDENTICAL, dtype=numpy.int8),
        input_error=allowance.input_error,
    )
