"""Measure every pair of slots of one rank in one step. Facts only: no threshold, no verdict.

In: two runs, a step and a rank of each, the options of the alignment. Out: `Measured` columns, structural findings, and the
bucket of every call. Tensors with equal digests are not read. A pair of tensors that occurs in several calls is measured
once. If a tensor has no recorded values, its statistics are compared, and the column `basis` says so.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, count, islice

import numpy

from tensorprobe.errors import RunDamaged, TensorDamaged
from tensorprobe.model import DTYPES, Call, Slot
from tensorprobe.model.call import forward_name
from tensorprobe.model.comparison import Buckets, Finding, FindingKind
from tensorprobe.model.measured import DIGEST, HARD, NONE, SOFT, STATISTICS, VALUES, Calls, Measured
from tensorprobe.model.reason import Skipped, Unmeasured
from tensorprobe.numerics.masks import mask_values, other_masks
from tensorprobe.ops import Trait, has
from tensorprobe.ops.names import canonical_op
from tensorprobe.pairing.align import Alignment, Detail, Options, RunSideName, Suggestions, align_calls
from tensorprobe.pairing.call_pairs import (
    CHUNK,
    CallPair,
    Fact,
    StandIn,
    against,
    are_hidden,
    call_facts,
    lacking_slots,
    pair_slots,
    read_in_step,
    read_pairs,
    slot_facts,
    why_alone,
    why_not,
)
from tensorprobe.pairing.meeting import meet_again
from tensorprobe.pairing.regions import Region, with_regions
from tensorprobe.pairing.roles import parameter_of
from tensorprobe.pairing.tensor_pairs import Kernel, RowLists, stored_alike
from tensorprobe.record.lines import Damage
from tensorprobe.record.run import Entry, Run, Segment

_SIDES: tuple[RunSideName, RunSideName] = ("baseline", "candidate")
MAX_SUGGESTED = 50
"""Unpaired calls for which the nearest call is suggested; each costs a search."""
MAX_FINDINGS = 10_000
_HARD = ("shape", "slots", "raised")

_AFTER_END = {"baseline": Skipped.AFTER_END_OF_CANDIDATE, "candidate": Skipped.AFTER_END_OF_BASELINE}
_AGAIN = {"baseline": Skipped.AGAIN_IN_BASELINE, "candidate": Skipped.AGAIN_IN_CANDIDATE}
_DTYPE_CODES = {name: dtype.code for name, dtype in DTYPES.items()}

Progress = Callable[[int], None]


@dataclass(frozen=True)
class SegmentPair:
    """One step and rank of the baseline, and the step and rank of the candidate to compare it with."""

    step: int
    rank: int
    candidate_step: int
    candidate_rank: int
    cut: tuple[bool, ...] = (False, False)
    """Whether the recording of the baseline, and of the candidate, ended in the middle of the step."""
    other_layout: bool = False
    """Whether the runs had other numbers of processes: then tensors of other shapes are other parts, and no difference."""


def measure_segment(
    runs: tuple[Run, Run],
    pair: SegmentPair,
    *,
    options: Options | None = None,
    threads: int = 1,
    progress: Progress | None = None,
) -> Measured:
    """Align and measure one step of one rank; call `progress` with the number of call pairs that each chunk adds."""
    ours = runs[0].segment(pair.step, pair.rank)
    theirs = runs[1].segment(pair.candidate_step, pair.candidate_rank)
    segments = (against(ours, theirs), against(theirs, ours))
    options = options or Options()
    with _collector_paused(), Kernel(segments, threads) as kernel:
        if options.mapping is None:
            measured = _measure_in_step(segments, pair, kernel, progress)
            if measured is not None:
                return measured
        return _measure_aligned(segments, pair, options, kernel, progress)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause the garbage collector: millions of small objects without cycles would double the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _measure_in_step(
    segments: tuple[Segment, Segment], pair: SegmentPair, kernel: Kernel, progress: Progress | None
) -> Measured | None:
    """Measure two segments that have the same calls in the same order, in one pass; None if they do not."""
    table = _Table(kernel, pair)
    for chunk in read_in_step(*segments):
        if chunk is None:
            return None
        table.add(chunk)
        if progress is not None:
            progress(len(chunk))
    return table.measured()


def _measure_aligned(
    segments: tuple[Segment, Segment], pair: SegmentPair, options: Options, kernel: Kernel, progress: Progress | None
) -> Measured:
    """Align two segments, then measure the pairs. Tensors that `_measure_in_step` has measured are not measured again."""
    indexes = (segments[0].index(), segments[1].index())
    entries = (indexes[0].entries, indexes[1].entries)
    details = details_of(segments)
    alignment = align_calls(*entries, details, options)
    table = _Table(kernel, pair)
    damaged = (len(indexes[0].damage), len(indexes[1].damage))
    if any(damaged):
        table.skip(Skipped.DAMAGED_LINE, sum(damaged))
    alone = table.unpaired(segments, entries, alignment, damaged)
    alignment.pairs, alone, regions = meet_again(segments, entries, alignment.pairs, alone, options.renames)
    pairs = with_regions(read_pairs(segments, entries, alignment.pairs), regions)
    while chunk := list(islice(pairs, CHUNK)):
        table.add([read for read in chunk if isinstance(read, CallPair)])
        for reason in chunk:
            if isinstance(reason, Skipped):
                table.skip(reason, 2)
        if progress is not None:
            progress(len(chunk))
    table.add_unpaired(segments, entries, alignment, details, alone, regions)
    measured = table.measured()
    measured.read = (len(entries[0]) + damaged[0], len(entries[1]) + damaged[1])
    measured.unused_map, measured.coarse = alignment.unused_map, alignment.method != "exact"
    return measured


def details_of(segments: tuple[Segment, Segment]) -> Callable[[RunSideName], list[Detail]]:
    """Return what tells the alignment more of the calls of a side. They are read when it is first asked."""
    return cache(lambda side: _read_details(segments[side == "candidate"]))


def _read_details(segment: Segment) -> list[Detail]:
    by_line: dict[int, Detail] = {}
    for item in segment.calls():
        if not isinstance(item, Damage):
            line, call = item
            by_line[line] = Detail(
                call.level,
                call.module,
                tuple((slot.name, slot.dtype, slot.shape) for slot in call.slots),
                tuple(parameter_of(slot.role) for slot in call.slots if slot.role),
            )
    unreadable = Detail("", "", None)
    return [by_line.get(entry.line, unreadable) for entry in segment.index().entries]


class _Table:
    """The columns while they are filled."""

    def __init__(self, kernel: Kernel, pair: SegmentPair) -> None:
        self._kernel = kernel
        self._pair = pair
        self._calls = Calls()
        self._buckets = Buckets()
        self._findings: list[Finding] = []
        self._findings_left_out = 0
        self._found: dict[str, int] = {}
        self._contents: defaultdict[Hashable, int] = defaultdict(count().__next__)
        """The number of what a slot holds: the same for equal bytes, wherever they are."""
        self._layouts: dict[Hashable, int] = {None: 0}
        self._forwards: dict[str, int] = {}
        self._rows = RowLists()
        self._regions: dict[str, tuple[list[str], list[str]]] = {}
        self._idle: set[str] = set()

    def add(self, pairs: list[CallPair]) -> None:
        """Add the columns of more pairs of calls."""
        first, calls = len(self._calls.name), self._calls
        ours, theirs = [pair.baseline for pair in pairs], [pair.candidate for pair in pairs]
        calls.name += [call.name for call in ours]
        calls.candidate += [call.name for call in theirs]
        calls.op += [canonical_op(call.op) for call in ours]
        calls.index += [pair.line for pair in pairs]
        calls.repeat += [call.repeat for call in ours]
        calls.level += [call.level for call in ours]
        calls.module += [call.module for call in ours]
        calls.candidate_module += [call.module for call in theirs]
        calls.stack += [call.stack for call in ours]
        calls.candidate_stack += [call.stack for call in theirs]
        for number, call in enumerate(ours, start=first):
            if forward := forward_name(call.name):
                calls.direction.append("backward")
                # ATen ops are counted in each direction by itself: equal numbers do not link backward to forward.
                calls.forward.append(self._forwards.get(forward, -1) if call.level.links_backward else -1)
            else:
                calls.direction.append("forward")
                calls.forward.append(-1)
                self._forwards[call.name] = number
        self._buckets.paired += sum(not isinstance(pair, StandIn) for pair in pairs)
        facts = {
            number: list(call_facts(a, b))
            for number, (a, b) in enumerate(zip(ours, theirs, strict=True))
            if a.raised != b.raised or a.args != b.args or a.kwargs != b.kwargs
        }
        counts = self._add_slots(ours, theirs, facts)
        calls.first_row += accumulate(counts[:-1], initial=len(self._rows.slot) - sum(counts)) if counts else []
        calls.structural += [0] * len(pairs)
        for number in sorted(facts):
            self._note_facts(pairs[number], first + number, facts[number])

    def _note_facts(self, pair: CallPair, number: int, facts: list[Fact]) -> None:
        hard = [kind for kind in _HARD if not (kind == "shape" and self._pair.other_layout)]
        self._calls.structural[number] = max((HARD if kind in hard else SOFT for kind, _ in facts), default=0)
        for kind, detail in facts:
            self._find(kind, pair.line, pair.baseline.name, pair.baseline.module, detail)

    def _add_slots(self, ours: list[Call], theirs: list[Call], facts: dict[int, list[Fact]]) -> list[int]:
        """Add the rows of some calls, and return how many rows each call has."""
        left, right = [slot for call in ours for slot in call.slots], [slot for call in theirs for slot in call.slots]
        counts = [len(call.slots) for call in ours]
        in_step = counts == [len(call.slots) for call in theirs]
        if not in_step or [slot.name for slot in left] != [slot.name for slot in right]:
            left, right, counts = self._pair_slots(ours, theirs, facts)
        numbers = numpy.repeat(numpy.arange(len(ours)), counts)
        if not self._rows.add(left, right, numbers + len(self._calls.forward) - len(ours)):
            for number, a, b in zip(numbers.tolist(), left, right, strict=True):
                if a.shape != b.shape or a.dtype != b.dtype:
                    facts.setdefault(number, []).extend(slot_facts(a, b))
        self._measure(left, right)
        return counts

    def _pair_slots(
        self, ours: list[Call], theirs: list[Call], facts: dict[int, list[Fact]]
    ) -> tuple[list[Slot], list[Slot], list[int]]:
        """Return the paired slots of both sides and their number for each call; note the slots that only one side has."""
        left: list[Slot] = []
        right: list[Slot] = []
        counts = []
        for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            pairs, lacking, extra = pair_slots(a, b)
            left += [pair[0] for pair in pairs]
            right += [pair[1] for pair in pairs]
            counts.append(len(pairs))
            # A call that raised has no outputs; the exception is reported already.
            if (lacking or extra) and a.raised == b.raised:
                facts.setdefault(number, []).append(lacking_slots(lacking, extra, backward=a.direction == "backward"))
        return left, right, counts

    def _measure(self, left: list[Slot], right: list[Slot]) -> None:
        """Decide what each pair is measured from, and start measuring."""
        rows = self._rows
        start = len(rows.basis)
        rows.basis += [
            NONE
            if a.skipped or b.skipped or a.shape != b.shape
            else DIGEST
            if a.digest is not None
            and a.digest == b.digest
            and a.dtype == b.dtype
            and (a.stride == b.stride or stored_alike(a, b))
            else VALUES
            if a.offset is not None and b.offset is not None
            else STATISTICS
            if a.summary is not None and b.summary is not None and not are_hidden(a.summary, b.summary)
            else NONE
            for a, b in zip(left, right, strict=True)
        ]
        rows.job += [-1] * len(left)
        rows.note += [""] * len(left)
        for at, (basis, a, b) in enumerate(zip(rows.basis[start:], left, right, strict=True), start=start):
            if basis == STATISTICS:
                if a.sketch or b.sketch:
                    rows.distances[at] = self._kernel.distance(a, b)
            elif basis == VALUES:
                self._hand_over(at, a, b)
            elif basis == NONE:
                rows.leave_out(at, *why_not(a, b))
            elif a.has_data and mask_values(a):
                with suppress(TensorDamaged):  # its statistics hold with the mask, too
                    rows.job[at] = self._kernel.measure(a, b)
        for side, slots in enumerate((left, right)):
            held = [slot.digest or slot.summary or self._place_of(slot) for slot in slots]
            numbers = self._contents.__getitem__ if None not in held else self._number_of
            rows.content[side].extend(map(numbers, held))
        rows.layout += [
            0 if a.stride == b.stride else self._layouts.setdefault((a.stride, b.stride), len(self._layouts))
            for a, b in zip(left, right, strict=True)
        ]

    def _place_of(self, slot: Slot) -> Hashable:
        """Return what tells the content of a slot without digest and statistics from others; None if it has no values."""
        return None if slot.offset is None else (self._pair.step, self._pair.rank, slot.offset)

    def _number_of(self, held: Hashable) -> int:
        return -1 if held is None else self._contents[held]

    def _hand_over(self, at: int, ours: Slot, theirs: Slot) -> None:
        """Let the kernel measure the values of a row, unless another row has the same pair or the values cannot be read."""
        rows = self._rows
        if ours.dtype not in _DTYPE_CODES or theirs.dtype not in _DTYPE_CODES:
            rows.leave_out(at, Unmeasured.DTYPE, f"dtype {ours.dtype} is unknown")
            return
        if ours.dtype != theirs.dtype:
            rows.note[at] = f"{ours.dtype} against {theirs.dtype}, in the wider of both"
        if masks := other_masks(ours, theirs):
            rows.masked[at] = masks
        if (ours.stride is not None or theirs.stride is not None) and stored_alike(ours, theirs):
            rows.permuted[at] = ours
        try:
            rows.job[at] = self._kernel.measure(ours, theirs)
        except TensorDamaged as damage:
            rows.permuted.pop(at, None)
            rows.leave_out(at, Unmeasured.DAMAGED, f"damaged: {damage}")
            if ours.summary is not None and theirs.summary is not None:
                rows.basis[at] = STATISTICS

    def measured(self) -> Measured:
        """Wait for the threads and return the finished columns."""
        rows = self._rows.finish(self._kernel.results(), self._kernel.apart, self._calls.direction)
        return Measured(
            self._pair.step,
            self._pair.rank,
            self._calls,
            rows,
            list(self._contents),
            list(self._layouts),
            self._buckets,
            self._findings,
            self._findings_left_out,
            read=(self._buckets.paired, self._buckets.paired),
            other_layout=self._pair.other_layout,
            regions=self._regions,
            idle=self._idle,
        )

    def unpaired(
        self,
        segments: tuple[Segment, Segment],
        entries: tuple[Sequence[Entry], Sequence[Entry]],
        alignment: Alignment,
        damaged: tuple[int, int],
    ) -> tuple[list[int], list[int]]:
        """Return the calls that only one side has, and skip those that the other side could not have."""
        only: list[list[int]] = []
        alone = (alignment.only_baseline, alignment.only_candidate)
        for at, (side, positions, held, lost) in enumerate(zip(_SIDES, alone, entries, damaged[::-1], strict=True)):
            if self._pair.cut[1 - at]:
                last = max((pair[at] for pair in alignment.pairs), default=-1)
                self.skip(_AFTER_END[side], sum(position > last for position in positions))
                positions = [position for position in positions if position < last]
            # With activation checkpointing in one run only, recomputed calls have no partner. That is no difference.
            only.append([position for position in positions if not held[position].repeat])
            if again := len(positions) - len(only[-1]):
                self.skip(_AGAIN[side], again)
            paired = {held[pair[at]].name for pair in alignment.pairs}
            only[-1] = self._not_idle(only[-1], held, paired)
            only[-1] = self._not_excused(only[-1], held, segments, side)
            if 0 < len(only[-1]) <= lost:
                self.skip(Skipped.PARTNER_DAMAGED, len(only.pop()))
                only.append([])
        return only[0], only[1]

    def add_unpaired(
        self,
        segments: tuple[Segment, Segment],
        entries: tuple[Sequence[Entry], Sequence[Entry]],
        alignment: Alignment,
        details: Callable[[RunSideName], Sequence[Detail]],
        only: tuple[list[int], list[int]],
        regions: Sequence[Region],
    ) -> None:
        """Add the calls that only one side has; suggest the nearest call of the other side for the first of them."""
        self._idle.update(region.name for region in regions if region.idle)
        for region in regions:
            ours, theirs = ([held[at].name for at in side] for held, side in zip(entries, region.members, strict=True))
            self._regions[region.name] = ours, theirs
        inside = tuple(
            {position: region.name for region in regions for position in region.members[at]} for at in (0, 1)
        )
        self._buckets.in_regions += sum(map(len, inside))
        self._buckets.only_baseline += len(only[0]) - len(inside[0])
        self._buckets.only_candidate += len(only[1]) - len(inside[1])
        if any(only):
            suggestions = Suggestions(alignment, *entries, details)
            for side, positions, region_of in zip(_SIDES, only, inside, strict=True):
                self._add_unpaired_side(side, positions, segments, entries, details, suggestions, region_of)

    def _not_idle(self, positions: list[int], entries: Sequence[Entry], paired: set[str]) -> list[int]:
        """Return the calls without the backward of copies and casts whose forward has a partner.

        A tensor has another layout on another device: what is copied there may be contiguous here. The gradient that such a
        call passes on is compared where it is used.
        """
        left = []
        for position in positions:
            forward = forward_name(name := entries[position].name)
            if forward not in paired or not has(name.rsplit(".", 2)[0], Trait.MAY_DO_NOTHING):
                left.append(position)
        self.skip(Skipped.NOTHING_TO_DO, len(positions) - len(left))
        return left

    def _not_excused(
        self, positions: list[int], entries: Sequence[Entry], segments: tuple[Segment, Segment], side: RunSideName
    ) -> list[int]:
        """Return the calls that the other side should have; skip those that its tool does not record."""
        own, other = segments if side == "baseline" else segments[::-1]
        if not any(hasattr(segment, "excuse") for segment in segments):
            return positions
        left = []
        for position in positions:
            if found := why_alone(own.call_at(entries[position]), own, other):
                self.skip(found, 1)
            else:
                left.append(position)
        return left

    def _add_unpaired_side(
        self,
        side: RunSideName,
        positions: Sequence[int],
        segments: tuple[Segment, Segment],
        entries: tuple[Sequence[Entry], Sequence[Entry]],
        details: Callable[[RunSideName], Sequence[Detail]],
        suggestions: Suggestions,
        region_of: Mapping[int, str],
    ) -> None:
        ours, theirs = entries if side == "baseline" else entries[::-1]
        kind: FindingKind = "only_baseline" if side == "baseline" else "only_candidate"
        for number, position in enumerate(positions[:MAX_FINDINGS]):
            near = suggestions.nearest(side, position) if number < MAX_SUGGESTED else None
            suggestion = "" if near is None else f"{theirs[near.position].name} ({near.reason})"
            module = details(side)[position].module
            parent = ""
            with suppress(RunDamaged):  # the line is counted as damaged where it is read
                parent = segments[side == "candidate"].call_at(ours[position]).parent or ""
            self._find(
                kind,
                ours[position].line,
                ours[position].name,
                module,
                suggestion=suggestion,
                parent=parent,
                region=region_of.get(position, ""),
            )
        self._findings_left_out += max(0, len(positions) - MAX_FINDINGS)

    def _find(
        self,
        kind: FindingKind,
        line: int,
        call: str,
        module: str,
        detail: str = "",
        suggestion: str = "",
        parent: str = "",
        region: str = "",
    ) -> None:
        self._found[kind] = self._found.get(kind, 0) + 1
        if self._found[kind] > MAX_FINDINGS:  # for each kind: many findings about dtypes must not hide a missing call
            self._findings_left_out += 1
            return
        pair = self._pair
        self._findings.append(
            Finding(
                kind=kind,
                step=pair.step,
                rank=pair.rank,
                index=line,
                call=call,
                module=module,
                detail=detail,
                suggestion=suggestion,
                parent=parent,
                region=region,
            )
        )

    def skip(self, reason: Skipped, count: int) -> None:
        """Count calls that cannot be compared."""
        if count:
            self._buckets.add(Buckets(skipped={reason.value: count}))
