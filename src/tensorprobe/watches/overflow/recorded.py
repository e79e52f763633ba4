"""Finds the call that made the first NaN or inf in a recorded run of any layout, on any number of ranks.

The calls of each rank are judged in execution order by the rules of a watch. Across ranks the order is: step, number of
collectives started before, number of the call. Statistics are enough. If values were recorded, findings are replayed.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from tensorprobe.errors import NoData, RunDamaged, RunNotFound
from tensorprobe.model import Slot, Summary
from tensorprobe.model.call import Frame, forward_name
from tensorprobe.model.dtypes import DTYPES
from tensorprobe.model.overflow import Arrival, Arrived, FirstNonfinite, Kind, NearLimit, OverflowReport
from tensorprobe.numerics.summary import LIMITS, Moments, greatest_finite
from tensorprobe.ops import is_collective
from tensorprobe.record import Run, open_run
from tensorprobe.record.lines import Damage
from tensorprobe.record.run import Entry
from tensorprobe.record.stored import StoredCall, StoredSlot
from tensorprobe.settings import Names, Numbers
from tensorprobe.version import VERSION
from tensorprobe.watches.overflow.ledger import Finding, Ledger
from tensorprobe.watches.overflow.result import SCHEMA_VERSION, OverflowResult, merge_findings, merge_watches
from tensorprobe.watches.overflow.rules import Facts, Seen, forward_extents
from tensorprobe.watches.overflow.settings import OverflowSettings

_RING = 16


def find_overflow(
    path: str | os.PathLike[str] | Run,
    *,
    steps: Numbers | None = None,
    ranks: Numbers | None = None,
    allow: Names = (),
    near: float | None = None,
    replay: bool = True,
    max_replay_bytes: int | str | None = None,
) -> OverflowResult:
    """Return the findings of a recorded run, or of a watch that wrote into this folder, over all ranks.

    Raises NoData if the run has neither statistics nor values, NotFound for a step or rank that does not exist.
    """
    chosen = OverflowSettings.of(
        steps=steps, ranks=ranks, allow=allow, near=near, replay=replay, max_replay_bytes=max_replay_bytes
    )
    if not isinstance(path, Run):
        folder = Path(path)
        if folder.is_dir() and any(folder.glob("overflow.rank*.json")):
            return OverflowResult(merge_watches(folder))
        try:
            path = open_run(folder)
        except RunNotFound as error:
            raise RunNotFound(f"{error}\n  It holds no findings of an overflow watch either.") from None
    return OverflowResult(_Search(path, chosen).report())


class _Search:
    """A search through one run."""

    def __init__(self, run: Run, chosen: OverflowSettings) -> None:
        self._most_bytes: int | None = chosen.max_replay_bytes
        self._run, self._allow, self._near, self._replay = run, chosen.allow, chosen.near, chosen.replay
        self._steps, self._ranks = chosen.steps, chosen.ranks
        self._ledgers: dict[int, Ledger] = {}
        self._notes: Counter[str] = Counter()
        self._calls = self._slots = self._known = 0

    def report(self) -> OverflowReport:
        run = self._run
        for step in self._steps or ():
            run.segments(step)
        for rank in self._ranks or ():
            run.segments(rank=rank)
        for step, rank in run.segments():
            if (self._steps is None or step in self._steps) and (self._ranks is None or rank in self._ranks):
                ledger = self._ledgers.setdefault(rank, Ledger(self._allow))
                _Rank(self, ledger, step, rank).go()
        if self._slots and not self._known:
            raise NoData(
                f"'{run.path}' has neither statistics nor values of floating-point tensors, so it cannot be checked.\n"
                "  Capture it with mode='summary' or mode='tensor'."
            )
        first_nonfinite, arrivals = merge_findings([ledger.findings for ledger in self._ledgers.values()])
        if self._replay:
            first_nonfinite = self._judged(first_nonfinite)
        intended: Counter[str] = Counter()
        for ledger in self._ledgers.values():
            ledger.begin_step()
            intended.update(ledger.intended)
        return OverflowReport(
            schema_version=SCHEMA_VERSION,
            tool=VERSION,
            source=str(run.path),
            ranks=sorted(self._ledgers),
            calls=self._calls,
            exit_code=1 if first_nonfinite or arrivals else 0 if self._calls else 2,
            first_nonfinite=first_nonfinite,
            arrivals=arrivals,
            near=[near for ledger in self._ledgers.values() for near in ledger.near.values()],
            intended=dict(intended.most_common()),
            skipped_by_scaler=[],
            last_calls={},
            left_out=sum(ledger.left_out for ledger in self._ledgers.values()),
            closed=run.closed,
            notes=[f"{note} ({count} times)" if count > 1 else note for note, count in self._notes.items()],
        )

    def _judged(self, first_nonfinite: list[FirstNonfinite]) -> list[FirstNonfinite]:
        """Return the findings with a verdict, where the values are in the record."""
        asked = [self._asked(first) for first in first_nonfinite]
        replayed = [each for each in asked if not isinstance(each, str)]
        if replayed:
            from tensorprobe.watches.overflow.replaying import Recorded, recorded_verdicts

            verdicts = iter(recorded_verdicts(self._run, [Recorded(*each) for each in replayed], self._most_bytes))
        judged = []
        for first, each in zip(first_nonfinite, asked, strict=True):
            if isinstance(each, str):
                judged.append(msgspec.structs.replace(first, reason=each))
            else:
                found = next(verdicts)
                judged.append(msgspec.structs.replace(first, verdict=found.verdict, reason=found.reason))
        return judged

    def _asked(self, first: FirstNonfinite) -> tuple[int, int, Entry, Entry | None] | str:
        """Return what is replayed: step, rank, the call and the forward of a backward call; or why it is not."""
        call = self._run.find(first.call, step=first.step, rank=first.rank, repeat=first.repeat)[0]
        forward = call
        if first.direction == "backward":
            name = forward_name(first.call)
            if name not in self._run.names(first.step, first.rank, on_damage="skip"):
                return "its forward was not recorded"
            forward = self._run.call(name, first.step, first.rank)
        if forward.model.args is None and forward.model.kwargs is None:
            return "its arguments were not recorded, only its tensors"
        if not all(slot.has_data for slot in (*forward.inputs, *call.inputs)) or not _float_data(call):
            return "its values were not recorded: capture with mode='tensor'"
        entries = [Entry(each.index, each.name, each.repeat) for each in (call, forward)]
        return first.step, first.rank, entries[0], None if forward is call else entries[1]


class _Rank:
    """One rank in one step."""

    def __init__(self, search: _Search, ledger: Ledger, step: int, rank: int) -> None:
        self._search, self._ledger = search, ledger
        self._step, self._rank = step, rank
        self._epoch = 0
        self._last: list[str] = []
        self._makers: dict[Any, str] = {}

    def go(self) -> None:
        search, run = self._search, self._search._run
        self._ledger.begin_step()
        source = run.segment(self._step, self._rank).source
        for item in run.segment(self._step, self._rank).calls():
            if isinstance(item, Damage):
                search._notes["a damaged line of the run was skipped"] += 1
                continue
            line, model = item
            call = StoredCall(model, step=self._step, rank=self._rank, index=line, run=run.path, source=source)
            search._calls += 1
            self._look(call)
            self._last = [*self._last[1 - _RING :], call.name]

    def _look(self, call: StoredCall) -> None:
        given: list[Facts] = []
        made: list[Facts] = []
        for slot in call.slots:
            facts = self._facts(slot)
            if facts is not None:
                (
                    given
                    if slot.side == "input" or (slot.side == "parameters" and call.direction == "forward")
                    else made
                ).append(facts)
        seen = Seen(call.name, call.op, call.module, call.model.args, call.model.kwargs, given, made)
        if not all(facts.clean for facts in made):
            self._judge(call, seen)
        else:
            self._look_at_limits(call, made)
        for facts in made:
            self._makers[facts.key] = call.name
        self._epoch += is_collective(call.name)

    def _judge(self, call: StoredCall, seen: Seen) -> None:
        def make_first(kind: Kind) -> Finding:
            return Finding(self._first(call, seen, kind))

        def make_arrival(facts: Facts) -> Finding:
            return Finding(self._arrival(call, seen, facts))

        self._ledger.judge(seen, make_first, make_arrival)

    def _look_at_limits(self, call: StoredCall, made: list[Facts]) -> None:
        near = self._search._near
        for facts in made if near is not None else ():
            limit = greatest_finite(facts.dtype)
            greatest = max((abs(end) for end in facts.moments[:2] if math.isfinite(end)), default=0.0)
            if near is not None and greatest >= limit / near:
                found = NearLimit(
                    call=call.name, module=call.module, step=self._step, rank=self._rank, dtype=facts.dtype,
                    greatest=greatest, limit=limit, times=1,
                )  # fmt: skip
                self._ledger.add_near(found)

    def _facts(self, slot: StoredSlot) -> Facts | None:
        if slot.dtype not in LIMITS or slot.skipped is not None:
            return None
        self._search._slots += 1
        moments = _moments(slot)
        if moments is None:
            return None
        self._search._known += 1
        key = slot.digest or (slot.dtype, slot.shape, moments)
        gradient = slot.call.direction == "backward" or slot.side == "parameters"
        never_mask = gradient or (slot.grad and self._may_be_weight(slot, key))
        return Facts(
            slot.name, slot.dtype, slot.shape, moments, key, slot.tensor if slot.has_data else None, never_mask
        )

    def _may_be_weight(self, slot: StoredSlot, key: Any) -> bool:
        """Return whether a tensor that requires a gradient was made by no call, or changed in place by this one."""
        return key not in self._makers if slot.side == "input" else slot.call.op.endswith("_")

    def _forward_of(self, call: StoredCall) -> list[Facts]:
        """Return the facts of the inputs of a backward's forward, if that was recorded."""
        run, name = self._search._run, forward_name(call.name)
        if not name or name not in run.names(self._step, self._rank, on_damage="skip"):
            return []
        inputs = run.call(name, self._step, self._rank).inputs
        return [facts for slot in inputs if (facts := self._facts(slot)) is not None]

    def _first(self, call: StoredCall, seen: Seen, kind: Kind) -> FirstNonfinite:
        outputs = [_output(facts) for facts in seen.outputs if not facts.clean]
        makers = {facts.slot: self._makers[facts.key] for facts in seen.inputs if facts.key in self._makers}
        return FirstNonfinite(
            number=0,
            call=call.name,
            op=call.op,
            direction=call.direction,
            kind=kind,
            module=call.module,
            step=self._step,
            rank=self._rank,
            index=call.index,
            repeat=call.repeat,
            epoch=self._epoch,
            outputs=outputs,
            inputs=[facts.extent(makers.get(facts.slot)) for facts in seen.inputs],
            forward=forward_extents(self._forward_of(call), outputs),
            frames=self._frames(call),
            chain=list(dict.fromkeys(makers.values())),
            before=self._last,
            spread=[],
            spread_count=0,
            verdict="unknown",
            reason="not replayed",
            script=None,
            note="",
        )

    def _arrival(self, call: StoredCall, seen: Seen, facts: Facts) -> Arrival:
        return Arrival(
            call=call.name,
            slot=facts.slot,
            what=str(_arrived(call, facts)),
            module=call.module,
            step=self._step,
            rank=self._rank,
            index=call.index,
            epoch=self._epoch,
            dtype=facts.dtype,
            shape=list(facts.shape),
            nan=facts.moments.nan,
            inf=facts.moments.inf,
            frames=self._frames(call),
            spread=[],
            spread_count=0,
        )

    def _frames(self, call: StoredCall) -> list[Frame]:
        try:
            stack = self._search._run.stack(call)
        except RunDamaged:
            self._search._notes["stacks of the run cannot be read"] += 1
            return []
        return [] if stack is None else list(stack.frames)


def _moments(slot: StoredSlot) -> Moments | None:
    """Return the recorded statistics. If they are missing or lack counts, compute them from the values."""
    summary = slot.summary
    if summary is not None and _tells_counts(summary, slot.model):
        high, low, mean, norm = (float(figure) for figure in (summary.max, summary.min, summary.mean, summary.norm))
        return Moments(high, low, mean, norm, summary.nan, summary.inf)
    if not slot.has_data:
        return None if summary is None else _guessed(summary, slot.model)
    from tensorprobe.numerics.summary import summarize_buffer

    return summarize_buffer(slot.buffer(), DTYPES[slot.dtype])


def _tells_counts(summary: Summary, slot: Slot) -> bool:
    """Return whether the counts of NaN and inf are real. Layouts of older tools have none, and read as 0."""
    ends = (float(summary.max), float(summary.min))
    return not slot.count or bool(summary.nan or summary.inf) or all(math.isfinite(end) for end in ends)


def _guessed(summary: Summary, slot: Slot) -> Moments:
    """Derive from maximum and minimum that there are some NaN or inf; their number is unknown."""
    high, low, mean, norm = (float(figure) for figure in (summary.max, summary.min, summary.mean, summary.norm))
    nan = int(math.isnan(high) or math.isnan(low))
    return Moments(high, low, mean, norm, nan, int(math.isinf(high) or math.isinf(low)))


def _output(facts: Facts) -> Any:
    if facts.values is None:
        return facts.as_output()
    from tensorprobe.watches.overflow.looker import places_of

    return facts.as_output(*places_of(facts.values()))


def _arrived(call: StoredCall, facts: Facts) -> Arrived:
    if call.direction == "backward":
        return Arrived.GRADIENT
    slot = next(slot for slot in call.slots if slot.name == facts.slot)
    learned = slot.side == "parameters" or (slot.grad and call.module != "" and slot.name != "input.0")
    return Arrived.PARAMETER if learned else Arrived.INPUT


def _float_data(call: StoredCall) -> bool:
    return all(slot.has_data for slot in call.slots if slot.dtype in LIMITS and slot.skipped is None)
