"""What is kept of the calls where runs part: stacks, arguments, and their tensors side by side; later the lines of the program.

A report needs no run then. The tensors are looked at where the rank is compared, because only there are its values at hand. What
is kept is bounded: some calls of each rank, tensors up to a size, pictures of at most 128 by 128 cells.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import msgspec

from tensorprobe.engine.tracing import Finders
from tensorprobe.errors import RunDamaged
from tensorprobe.judge.divergence import StepAnswer
from tensorprobe.model import Frame
from tensorprobe.model.call import forward_name
from tensorprobe.model.comparison import STATUSES, Divergence
from tensorprobe.model.diff import CallEvidence, SourceLines, TensorDiff
from tensorprobe.model.measured import AGREES, DIGEST, SIDES, Measured, Opinions
from tensorprobe.pairing.call_pairs import pair_slots
from tensorprobe.pairing.diff import Runs, diff_tensor
from tensorprobe.record.run import Run
from tensorprobe.record.source import source_lines
from tensorprobe.record.stored import StoredCall, StoredSlot
from tensorprobe.report.inspect import render_arguments

CALLS = 24
"""Calls with evidence in a result, and in one rank at most a quarter of them."""
_TENSORS = 3
_ELEMENTS = 1 << 22
"""A larger tensor is not looked at in a comparison; `tensorprobe diff` does."""
_ARGUMENTS = 2000
_FRAMES = 12
_INTRODUCED = STATUSES.index("introduced")
_OUTPUT = SIDES.index("output")


def calls_of_each(ranks: int) -> int:
    """Return for how many calls of each rank there is evidence."""
    return max(1, min(CALLS // 4, CALLS // max(ranks, 1)))


def evidence_of(
    runs: Runs, finders: Finders, measured: Measured, opinion: Opinions, answer: StepAnswer, *, most: int
) -> list[CallEvidence]:
    """Return the evidence of a step: of its first divergences, then of further calls that introduce an error."""
    wanted = list(dict.fromkeys([*_first_calls(measured, answer), *_introduced(opinion)]))[:most]
    if not wanted:
        return []
    calls = measured.calls
    found = []
    for call in wanted:
        line = calls.index[call]  # of the baseline; most often of the candidate too
        ours = finders[0].find(calls.name[call], calls.repeat[call], line=line)
        theirs = finders[1].find(calls.candidate[call], calls.repeat[call], line=line)
        if ours is None or theirs is None:
            continue
        worst = _worst_slots(measured, opinion, call)
        found.append(_describe((runs[0], ours), (runs[1], theirs), list(_tensors(runs, ours, theirs, worst))))
    return found


def _first_calls(measured: Measured, answer: StepAnswer) -> Iterator[int]:
    """Return the positions of the first calls that the answer may name."""
    candidates = (answer.introduced, answer.random, answer.entered, answer.structural, answer.diverging)
    wanted = [(each.divergence.index, each.divergence.call) for each in candidates if each is not None]
    places = enumerate(zip(measured.calls.index, measured.calls.name, strict=True))
    at = {place: call for call, place in places if place in wanted} if wanted else {}
    return (at[place] for place in wanted if place in at)


def _introduced(opinion: Opinions) -> Iterator[int]:
    return (call for call, status in enumerate(opinion.status) if status == _INTRODUCED)


def _worst_slots(measured: Measured, opinion: Opinions, call: int) -> list[str]:
    """Return the slots of a call that differ: outputs that diverge first, the largest error first."""
    rows, entering = measured.rows, {each.row for each in opinion.entering}
    error = rows.figures["relative_l2"]

    def order(row: int) -> tuple[bool, bool, float]:
        value = float(error[row])
        return (
            rows.side[row] != _OUTPUT and row not in entering,
            opinion.verdict[row] == AGREES,
            -value if value == value else 0.0,
        )

    own = [row for row in measured.rows_of(call) if rows.basis[row] != DIGEST]
    return [rows.slot[row] for row in sorted(own, key=order)[:_TENSORS]]


def _tensors(runs: Runs, ours: StoredCall, theirs: StoredCall, worst: Sequence[str]) -> Iterator[TensorDiff]:
    pairs = {first.name: (first, second) for first, second in pair_slots(ours.model, theirs.model)[0]}
    for name in worst:
        if name in pairs:
            first, second = pairs[name]
            slots = StoredSlot(first, ours), StoredSlot(second, theirs)
            yield diff_tensor(runs, *slots, pictures=True, most=_ELEMENTS)


def _describe(ours: tuple[Run, StoredCall], theirs: tuple[Run, StoredCall], tensors: list[TensorDiff]) -> CallEvidence:
    call = ours[1]
    return CallEvidence(
        step=call.step,
        rank=call.rank,
        index=call.index,
        call=call.name,
        candidate_call=theirs[1].name,
        module=call.module,
        stacks=(_frames(*ours), _frames(*theirs)),
        arguments=(_arguments(call), _arguments(theirs[1])),
        tensors=tensors,
    )


def _arguments(call: StoredCall) -> str:
    try:
        if call.args is None and call.kwargs is None:
            return ""
        return render_arguments(call.args, call.kwargs)[:_ARGUMENTS]
    except RunDamaged:
        return ""


def _frames(run: Run, call: StoredCall) -> list[Frame]:
    """Return the stack of a call; that of its forward if it has none, because backward runs in the autograd engine."""
    try:
        stack = run.stack(call)
        if stack is None and (forward := forward_name(call.name)):
            found = run.find(forward, step=call.step, rank=call.rank, repeat=0)
            stack = run.stack(found[0])
    except (RunDamaged, LookupError):
        return []
    return [] if stack is None else list(islice(stack.frames, _FRAMES))


def choose_evidence(found: Iterable[CallEvidence], divergences: Sequence[Divergence | None]) -> list[CallEvidence]:
    """Return the evidence to keep: that of these divergences first, then the rest, each with the lines of the program around it."""
    wanted = {
        (each.step, each.rank, each.index, each.call): at for at, each in enumerate(divergences) if each is not None
    }
    ordered = sorted(found, key=lambda one: wanted.get((one.step, one.rank, one.index, one.call), len(wanted)))
    return [msgspec.structs.replace(one, source=_source(one)) for one in ordered[:CALLS]]


def _source(evidence: CallEvidence) -> SourceLines | None:
    """Return the lines around the innermost frame, of the candidate or else of the baseline."""
    frame = next((frames[0] for frames in reversed(evidence.stacks) if frames), None)
    return None if frame is None else source_lines(frame)
