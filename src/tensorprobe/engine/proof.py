"""Which calls of a comparison are proved, and what the proofs say.

In: a measured step and what was inferred of it. Out: for calls that differ, a `Proof`: each side's own error against float64,
recomputed from its own recorded inputs. The calls that are inferred to introduce an error come first, then the others in
execution order, up to the first proved fault. The budget is counted in calls and bytes, so the answer does not depend on
the machine.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy

from tensorprobe.engine.settings import Prove
from tensorprobe.errors import RunDamaged, TensorprobeError
from tensorprobe.judge.policy import POLICIES, Policy
from tensorprobe.model import DTYPES, Call
from tensorprobe.model.comparison import STATUSES, Proof, Proving
from tensorprobe.model.measured import VALUES, Measured, Opinions
from tensorprobe.model.precheck import Checked
from tensorprobe.ops import is_collective
from tensorprobe.pairing.measure import SegmentPair
from tensorprobe.record import Run
from tensorprobe.record.run import Entry
from tensorprobe.replay.isolation import RunPlace, SideRows, SideTask, default_replay_bytes, replay_job, too_large
from tensorprobe.work.pool import Death, StartFailed, run_in_processes

AUTO_CALLS, AUTO_BYTES = 2000, 2 << 30
"""What `auto` replays of one rank at most: pairs of calls, and bytes of their tensors."""
_FIRST = 16
"""How many calls that are inferred to introduce an error come first."""
_MOST_JOBS = 4
_BEYOND = "beyond the budget"
_INTRODUCED = STATUSES.index("introduced")
_TARGET = "tensorprobe.replay.proof:serve_proofs"


class _Unit(NamedTuple):
    """A forward call of both runs, with its backward: positions in the step, and where they stand in each run."""

    position: int
    """Of the first of the two that differs."""
    call: int
    backward: int | None
    sides: list[SideTask]


class _NotProvable(Exception):
    """A call cannot be replayed, with the reason."""


class _Enough(Exception):
    """Everything before the first proved fault is known."""


class Prover:
    """Proves calls of one rank, step after step, until a fault is proved or the budget is spent."""

    def __init__(self, runs: tuple[Run, Run], policy: Policy, prove: Prove, jobs: int) -> None:
        self._runs, self._jobs = runs, max(1, min(jobs, _MOST_JOBS))
        self._on = prove != "off" and policy == POLICIES["noise-aware"]
        self._calls, self._bytes = (AUTO_CALLS, AUTO_BYTES) if prove == "auto" else (1 << 62, 1 << 62)
        self.told = Proving()

    def prove(self, measured: Measured, opinions: Opinions, place: SegmentPair) -> dict[int, Proof]:
        """Return what is proved of the calls of a step, by their position."""
        if not self._on or not (wanted := _differing(measured)):
            return {}
        reasons: dict[int, str] = {}
        proofs: dict[int, Proof] = {}
        if importlib.util.find_spec("torch") is None:
            reasons = dict.fromkeys(wanted, "torch is not installed")
        else:
            units = list(self._units(measured, opinions, place, wanted, reasons))
            proofs = self._run(units, reasons)
        first = min((call for call, proof in proofs.items() if proof.at_fault), default=len(measured.calls.name))
        self._on = first == len(measured.calls.name)
        # What is known beyond the first fault depends on the number of processes.
        proofs = {call: proof for call, proof in proofs.items() if call in wanted and call <= first}
        self.told.replayed += len(proofs)
        for at, reason in reasons.items():
            if at > first:
                continue
            if reason == _BEYOND:
                self.told.unreached += 1
            else:
                self.told.unprovable[reason] = self.told.unprovable.get(reason, 0) + 1
        return proofs

    def _units(
        self, measured: Measured, opinions: Opinions, place: SegmentPair, wanted: set[int], reasons: dict[int, str]
    ) -> Iterator[_Unit]:
        """Yield what is replayed, in order, as far as the budget goes. Why the rest is not goes to `reasons`, by position."""
        calls = measured.calls
        backwards = {forward: at for at, forward in enumerate(calls.forward) if forward >= 0}
        positions: dict[int, int] = {}
        for at in sorted(wanted):
            positions.setdefault(calls.forward[at] if calls.direction[at] == "backward" else at, at)
        positions.pop(-1, None)
        blamed = [
            at
            for at in positions
            if _INTRODUCED in (opinions.status[each] for each in (at, backwards.get(at)) if each is not None)
        ]
        sides = (
            _SideIndex(self._runs[0], place.step, place.rank, calls.name),
            _SideIndex(self._runs[1], place.candidate_step, place.candidate_rank, calls.candidate),
        )
        for at in dict.fromkeys([*blamed[:_FIRST], *positions]):
            try:
                found = [side.find(at, backwards.get(at), calls.repeat[at]) for side in sides]
            except _NotProvable as reason:
                reasons[positions[at]] = str(reason)
                continue
            size = sum(size for _, size in found)
            if self._calls < 1 or self._bytes < size:
                reasons[positions[at]] = _BEYOND
                continue
            self._calls -= 1
            self._bytes -= size
            yield _Unit(positions[at], at, backwards.get(at), [task for task, _ in found])

    def _run(self, units: Sequence[_Unit], reasons: dict[int, str]) -> dict[int, Proof]:
        proofs: dict[int, Proof] = {}
        pending = {unit.position for unit in units}

        def take(number: int, content: bytes) -> None:
            unit = units[number]
            pending.discard(unit.position)
            sides = msgspec.msgpack.decode(content, type=list[SideRows])
            reason = next((side.reason for side in sides if side.reason), "")
            if reason:
                reasons[unit.position] = reason
            for call, direction in ((unit.call, "forward"), (unit.backward, "backward")):
                rows = [[row for row in side.rows if row.direction == direction] for side in sides]
                if call is not None and (proof := _proof(*rows)) is not None:
                    proofs[call] = proof
            faults = [call for call, proof in proofs.items() if proof.at_fault]
            if faults and not any(position < min(faults) for position in pending):
                raise _Enough

        def died(death: Death) -> None:
            position = units[death.number].position
            pending.discard(position)
            reasons[position] = f"the process of its replay {death.how}"

        start = msgspec.msgpack.encode([RunPlace.of(run) for run in self._runs])
        try:
            parcels = [msgspec.msgpack.encode(unit.sides) for unit in units]
            run_in_processes(replay_job(_TARGET, start), parcels, jobs=self._jobs, take=take, died=died)
        except _Enough:
            pass
        except (StartFailed, TensorprobeError, OSError) as failed:  # what was inferred holds without a proof
            reason = f"a process that replays calls could not start: {str(failed).splitlines()[0]}"
            reasons.update(dict.fromkeys(pending, reason))
        return proofs


class _SideIndex:
    """The calls of one step and rank of one run, found by name."""

    def __init__(self, run: Run, step: int, rank: int, names: Sequence[str]) -> None:
        self._step, self._rank, self._names = step, rank, names
        self._segment = run.segment(step, rank)
        self._entries: dict[tuple[str, int], Entry] = {}
        for entry in self._segment.index().entries:
            self._entries.setdefault((entry.name, entry.repeat), entry)
        self._most_bytes = default_replay_bytes()

    def find(self, call: int, backward: int | None, repeat: int) -> tuple[SideTask, int]:
        """Return where the call stands, and the bytes of its tensors; _NotProvable where that is known without a replay."""
        name = self._names[call]
        entry = self._entries.get((name, repeat))
        if entry is None:
            raise _NotProvable("its line in the run was not found")
        try:
            found: Call = self._segment.call_at(entry)
        except RunDamaged:
            raise _NotProvable("its line in the run is damaged") from None
        if found.args is None and found.kwargs is None:
            raise _NotProvable("its arguments were not recorded, only its tensors")
        if is_collective(name):
            raise _NotProvable("it is a collective")
        if not all(slot.has_data or slot.skipped is not None for slot in found.slots):
            raise _NotProvable("not all of its values were recorded")
        if reason := too_large(found, self._most_bytes):
            raise _NotProvable(reason)
        back = None if backward is None else self._entries.get((self._names[backward], repeat))
        size = sum(slot.count * DTYPES[slot.dtype].itemsize for slot in found.slots if slot.dtype in DTYPES)
        return SideTask(self._step, self._rank, entry, back), size


def _differing(measured: Measured) -> set[int]:
    """Return the calls of an op that made different values: all others need no proof."""
    rows, calls = measured.rows, measured.calls
    differs = rows.made & (rows.basis == VALUES) & ~rows.figures["bit_identical"].astype(bool)
    return {call for call in numpy.unique(rows.call[differs]).tolist() if calls.level[call].is_op}


def _proof(baseline: Sequence[Checked], candidate: Sequence[Checked]) -> Proof | None:
    """Return the proof from the judged rows of both sides; None where one of them has none."""
    sides = [{row.slot: row for row in rows if row.result != "skip"} for rows in (baseline, candidate)]
    common = [slot for slot in sides[1] if slot in sides[0]]
    if not common:
        return None

    def weight(slot: str) -> tuple[bool, float]:
        wrong = [side[slot].result == "fail" for side in sides]
        return wrong[0] != wrong[1], max(side[slot].relative_l2 for side in sides)

    slot = max(common, key=weight)
    here, there = sides[0][slot], sides[1][slot]
    return Proof(
        slot=slot,
        baseline=here.relative_l2,
        candidate=there.relative_l2,
        baseline_wrong=here.result == "fail",
        candidate_wrong=there.result == "fail",
    )
