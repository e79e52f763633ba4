"""Which calls of a comparison are proved, and what the proofs say.

In: a measured step and what was inferred of it. Out: for calls that differ, a `Proof`: each side's own error against float64,
recomputed from its own recorded inputs. The calls that are inferred to introduce an error come first, then the others in
execution order, up to the first proved fault, or to the first call that an error enters from outside. The budget is counted
in calls and bytes, so the answer does not depend on the machine.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy

from tensorprobe.engine.settings import Prove
from tensorprobe.engine.tracing import CallFinder, Finders
from tensorprobe.errors import TensorprobeError
from tensorprobe.judge.policy import POLICIES, Policy
from tensorprobe.model import DTYPES
from tensorprobe.model.call import forward_name
from tensorprobe.model.comparison import STATUSES, Divergence, Proof, Proving, Region, RegionProof
from tensorprobe.model.level import Level
from tensorprobe.model.measured import STATISTICS, VALUES, Measured, Opinions
from tensorprobe.model.precheck import Checked
from tensorprobe.model.reason import NotReplayed, Unmeasured
from tensorprobe.ops import is_collective
from tensorprobe.record import Run
from tensorprobe.replay.isolation import (
    ProofStart,
    Replayed,
    SideRows,
    SideTask,
    default_replay_bytes,
    replay_job,
    too_large,
)
from tensorprobe.work.pool import Death, StartFailed, pack, run_in_processes

AUTO_CALLS, AUTO_BYTES = 2000, 2 << 30
"""What `auto` replays of one rank at most: pairs of calls, and bytes of their tensors."""
AUTO_REPLAY_BYTES = 4 << 30
"""The memory that one replay may need in `auto`, whatever the machine has."""
_FIRST = 16
"""How many calls that are inferred to introduce an error come first."""
_MOST_JOBS = 4
_INTRODUCED = STATUSES.index("introduced")
_TARGET, _SCRIPTS = "tensorprobe.replay.proof:serve_proofs", "tensorprobe.replay.proof:serve_scripts"


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
        self._most_bytes = AUTO_REPLAY_BYTES if prove == "auto" else default_replay_bytes()
        self.told = Proving()
        self.unproved: dict[int, str] = {}
        """Why calls of the last step that differ were not replayed, by their position."""

    def prove(self, measured: Measured, opinions: Opinions, finders: Sequence[CallFinder]) -> dict[int, Proof]:
        """Return what is proved of the calls of a step, by their position."""
        end = min((each.call for each in opinions.entering), default=len(measured.calls.name))
        self.unproved = dict.fromkeys(_differing(measured, STATISTICS), NotReplayed.ONLY_STATISTICS) if self._on else {}
        if not self._on or not (wanted := {call for call in _differing(measured) if call <= end}):
            return {}
        reasons: dict[int, str] = {}
        proofs: dict[int, Proof] = {}
        if importlib.util.find_spec("torch") is None:
            reasons = dict.fromkeys(wanted, NotReplayed.NO_TORCH)
        else:
            units = list(self._units(measured, opinions, finders, wanted, reasons))
            proofs = self._run(units, reasons)
        forwards = enumerate(measured.calls.forward)
        self.unproved |= reasons | {at: reasons[forward] for at, forward in forwards if forward in reasons}
        first = min((call for call, proof in proofs.items() if proof.at_fault), default=len(measured.calls.name))
        self._on = first == end == len(measured.calls.name)
        # What is known beyond the first fault depends on the number of processes.
        proofs = {call: proof for call, proof in proofs.items() if call in wanted and call <= first}
        self.told.replayed += len(proofs)
        for at, reason in reasons.items():
            if at > first:
                continue
            if reason is NotReplayed.OVER_BUDGET:
                self.told.unreached += 1
            else:
                self.told.unprovable[reason] = self.told.unprovable.get(reason, 0) + 1
        return proofs

    def _units(
        self,
        measured: Measured,
        opinions: Opinions,
        finders: Sequence[CallFinder],
        wanted: set[int],
        reasons: dict[int, str],
    ) -> Iterator[_Unit]:
        """Yield what is replayed, in order, as far as the budget goes. Why the rest is not goes to `reasons`, by position."""
        calls = measured.calls
        backwards = {forward: at for at, forward in enumerate(calls.forward) if forward >= 0}
        positions: dict[int, int] = {}
        for at in sorted(wanted):
            linked = calls.direction[at] == "backward" and calls.level[at].links_backward
            positions.setdefault(calls.forward[at] if linked else at, at)
        positions.pop(-1, None)
        blamed = [
            at
            for at in positions
            if _INTRODUCED in (opinions.status[each] for each in (at, backwards.get(at)) if each is not None)
        ]
        sides = list(zip(finders, (calls.name, calls.candidate), strict=True))
        for at in dict.fromkeys([*blamed[:_FIRST], *positions]):
            try:
                back = backwards.get(at)
                found = [
                    _task(finder, names[at], None if back is None else names[back], calls.repeat[at], self._most_bytes)
                    for finder, names in sides
                ]
            except _NotProvable as reason:
                reasons[positions[at]] = str(reason)
                continue
            size = sum(size for _, size in found)
            if self._calls < 1 or self._bytes < size:
                reasons[positions[at]] = NotReplayed.OVER_BUDGET
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
                random = any(side.random for side in sides)
                if call is not None and (proof := _proof(*rows, random=random)) is not None:
                    proofs[call] = proof
            faults = [call for call, proof in proofs.items() if proof.at_fault]
            if faults and not any(position < min(faults) for position in pending):
                raise _Enough

        def died(death: Death) -> None:
            position = units[death.number].position
            pending.discard(position)
            reasons[position] = f"the process of its replay {death.how}"

        start = pack(ProofStart.of(self._runs))
        try:
            parcels = [pack(unit.sides) for unit in units]
            run_in_processes(replay_job(_TARGET, start), parcels, jobs=self._jobs, take=take, died=died)
        except _Enough:
            pass
        except (StartFailed, TensorprobeError, OSError) as failed:  # what was inferred holds without a proof
            reason = f"a process that replays calls could not start: {str(failed).splitlines()[0]}"
            reasons.update(dict.fromkeys(pending, reason))
        return proofs


def replay_divergence(finders: Finders, divergence: Divergence) -> tuple[Proof | None, Replayed]:
    """Return what a replay says of a diverging call, and the script of the side that is wrong."""
    names = (divergence.call, divergence.candidate_call)
    backward = divergence.direction == "backward" and divergence.level.links_backward
    held = finders[0].run.segment(divergence.step, divergence.rank).index().entries
    repeat = next((entry.repeat for entry in held if (entry.line, entry.name) == (divergence.index, names[0])), 0)
    replies: list[Replayed] = []

    def died(death: Death) -> None:
        replies.append(Replayed(reason=f"the process of its replay {death.how}"))

    try:
        tasks = [
            _task(
                finder,
                forward_name(name) if backward else name,
                name if backward else None,
                repeat,
                AUTO_REPLAY_BYTES,
            )[0]
            for finder, name in zip(finders, names, strict=True)
        ]
        job = replay_job(_SCRIPTS, pack(ProofStart.of(finder.run for finder in finders)))
        run_in_processes(
            job,
            [pack(tasks)],
            jobs=1,
            take=lambda _, content: replies.append(msgspec.msgpack.decode(content, type=Replayed)),
            died=died,
        )
    except (_NotProvable, StartFailed, TensorprobeError, OSError) as failed:
        return None, Replayed(reason=str(failed).splitlines()[0])
    way = "backward" if backward else "forward"
    rows = [[row for row in side.rows if row.direction == way] for side in replies[0].sides]
    random = any(side.random for side in replies[0].sides)
    return _proof(*rows, random=random) if rows else None, replies[0]


def replay_region(finders: Finders, region: Region) -> RegionProof:
    """Return what replays say of every call of a region, each on its own side, as far as the budget of `auto` goes."""
    right: list[str] = []
    wrong: list[str] = []
    unproved: Counter[str] = Counter()
    calls, most = AUTO_CALLS, AUTO_BYTES
    for finder, side, names in zip(
        finders, ("baseline", "candidate"), (region.baseline, region.candidate), strict=True
    ):
        held: dict[str, str | None] = {}
        """Forward call → its backward, if that is in the region."""
        for name in names:
            forward = _linked_forward(name)
            held[forward or name] = name if forward else held.get(name)
        named: list[list[str]] = []
        parcels = []
        for forward, backward in held.items():
            try:
                task, size = _task(finder, forward, backward, 0, AUTO_REPLAY_BYTES)
            except _NotProvable as reason:
                unproved[str(reason)] += 1
                continue
            calls, most = calls - 1, most - size
            if calls < 0 or most < 0:
                unproved[NotReplayed.OVER_BUDGET.value] += 1
                continue
            parcels.append(pack([task]))
            named.append([each for each in (forward, backward) if each in names])

        def take(number: int, content: bytes, side: str = side, named: list[list[str]] = named) -> None:
            (found,) = msgspec.msgpack.decode(content, type=list[SideRows])
            for name in named[number]:
                way = "backward" if _linked_forward(name) else "forward"
                results = {row.result for row in found.rows if row.direction == way}
                if "fail" in results:
                    wrong.append(f"{side} {name}")
                elif "pass" in results:
                    right.append(name)
                else:
                    unproved[found.reason or NotReplayed.NO_TENSOR.value] += 1

        def died(death: Death) -> None:
            unproved[f"the process of its replay {death.how}"] += 1

        try:
            job = replay_job(_TARGET, pack(ProofStart.of([finder.run])))
            run_in_processes(job, parcels, jobs=1, take=take, died=died)
        except (StartFailed, TensorprobeError, OSError) as failed:
            unproved[f"a process that replays calls could not start: {str(failed).splitlines()[0]}"] += 1
    return RegionProof(right=len(right), wrong=wrong, unproved=dict(unproved))


def _linked_forward(name: str) -> str:
    """Return the forward call that a backward is replayed with; empty for a forward, and for an ATen op, which stands alone."""
    return forward_name(name) if Level.of(name).links_backward else ""


def _task(finder: CallFinder, name: str, backward: str | None, repeat: int, most_bytes: int) -> tuple[SideTask, int]:
    """Return where a call stands, and the bytes of its tensors; _NotProvable where that is known without a replay."""
    entry, found = finder.entry(name, repeat), finder.find(name, repeat)
    if entry is None or found is None:
        raise _NotProvable(NotReplayed.LINE_MISSING if entry is None else NotReplayed.LINE_DAMAGED)
    call = found.model
    if call.args is None and call.kwargs is None:
        raise _NotProvable(NotReplayed.NO_ARGUMENTS)
    if is_collective(name):
        raise _NotProvable(NotReplayed.COLLECTIVE)
    if not all(slot.has_data or slot.skipped is not None for slot in call.slots):
        raise _NotProvable(NotReplayed.NO_VALUES)
    if reason := too_large(call, most_bytes):
        raise _NotProvable(reason)
    size = sum(slot.count * DTYPES[slot.dtype].itemsize for slot in call.slots if slot.dtype in DTYPES)
    back = None if backward is None else finder.entry(backward, repeat)
    return SideTask(finder.step, finder.rank, entry, back), size


def _differing(measured: Measured, basis: int = VALUES) -> set[int]:
    """Return the calls of an op that made different values: all others need no proof."""
    rows, calls = measured.rows, measured.calls
    differs = rows.made & (rows.basis == basis) & ~rows.figures["bit_identical"].astype(bool)
    if measured.other_layout and basis == VALUES:  # other parts of a batch are replayed, too
        shapes = [row for row, why in rows.unmeasured.items() if why is Unmeasured.SHAPE]
        differs[[row for row in shapes if rows.made[row]]] = True
    found = set(numpy.unique(rows.call[differs]).tolist()).difference(measured.region_positions)
    return {call for call in found if calls.level[call].is_op}


def _proof(baseline: Sequence[Checked], candidate: Sequence[Checked], *, random: bool = False) -> Proof | None:
    """Return the proof from the judged rows of both sides; None where one of them has none, and nothing is random."""
    sides = [{row.slot: row for row in rows if row.result != "skip"} for rows in (baseline, candidate)]
    common = [slot for slot in sides[1] if slot in sides[0]]
    if not common:
        unknown = Proof(slot="", baseline=0.0, candidate=0.0, baseline_wrong=False, candidate_wrong=False, random=True)
        return unknown if random else None

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
        random=random,
    )
