"""Check a whole run against every rule of docs/format.md, and list all that are broken.

In: an open run. Out: a `Verification` that counts what was checked and lists what is wrong. With `data=True` every
stored byte is read and its digest recomputed, which finds flipped bits. Nothing is repaired or written.
"""

from __future__ import annotations

import mmap
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from tensorprobe.errors import RunDamaged, TensorDamaged
from tensorprobe.model import Call, Slot
from tensorprobe.record.lines import Damage
from tensorprobe.record.reader import NativeSegment
from tensorprobe.record.run import Run, Segment

MAX_PROBLEMS = 1000
_BLOCK = 64 << 20
_DIGEST = re.compile("[0-9a-f]{32}")
_SIDES = ("input", "output", "parameters")


@dataclass(frozen=True)
class Problem:
    """One broken rule: where (a file, a call or a slot) and what."""

    where: str
    fact: str

    def __str__(self) -> str:
        return f"{self.where}: {self.fact}"


@dataclass
class Verification:
    """What was checked, and what is wrong. `cut` is true when there are more problems than are kept."""

    calls: int = 0
    slots: int = 0
    bytes_hashed: int = 0
    problems: list[Problem] = field(default_factory=list)
    cut: bool = False

    @property
    def sound(self) -> bool:
        return not self.problems

    def add(self, problem: Problem) -> None:
        """Add a problem, up to a limit: a hostile run must not fill the memory."""
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)
        else:
            self.cut = True


def verify_run(run: Run, *, data: bool = False) -> Verification:
    """Check every call and slot of the run; with `data=True` every byte of its tensors too."""
    result = Verification()
    recorded: Counter[int] = Counter()
    for step, rank in run.segments():
        before = result.calls
        for problem in _SegmentCheck(run.segment(step, rank), step, rank, result, data).problems():
            result.add(problem)
        recorded[rank] += result.calls - before
    for problem in _check_parts(run, recorded):
        result.add(problem)
    return result


def _check_parts(run: Run, recorded: Counter[int]) -> Iterator[Problem]:
    held = set(run.segments())
    for rank, part in run.parts.items():
        if not part.closed or not part.pid:  # a part without a process is another tool's dump, which has no counts
            continue
        where = f"rank{rank}.json"
        for step in part.steps:
            if (step, rank) not in held:
                yield Problem(where, f"lists step {step}, which has no folder step{step}/rank{rank}")
        if part.coverage.recorded != recorded[rank]:
            yield Problem(where, f"counts {part.coverage.recorded:,} calls; {recorded[rank]:,} can be read")


class _SegmentCheck:
    """The checks of one rank in one step."""

    def __init__(self, segment: Segment, step: int, rank: int, result: Verification, data: bool) -> None:
        self._segment = segment
        self._source = segment.source.apart() if isinstance(segment, NativeSegment) else segment.source
        self._drops = isinstance(segment, NativeSegment) and hasattr(mmap, "MADV_DONTNEED")
        self._place = f"step{step}/rank{rank}"
        self._result = result
        self._data = data
        self._names: set[tuple[str, int]] = set()
        self._owners: dict[tuple[int, int], tuple[str, Slot]] = {}
        """Offset and length of stored bytes → the first slot with a digest, or else the first, that has them."""

    def problems(self) -> Iterator[Problem]:
        try:
            for item in self._segment.calls():
                if isinstance(item, Damage):
                    yield Problem(f"{item.file}, line {item.line:,}", item.reason)
                else:
                    yield from self._check_call(item[1], f"{self._place}, line {item[0] + 1:,}")
        except RunDamaged as error:
            yield Problem(self._place, str(error))
        overlapping: set[tuple[int, int]] = set()
        if isinstance(self._segment, NativeSegment):
            yield from self._check_overlap(overlapping)
        for place, (where, slot) in sorted(self._owners.items(), key=lambda held: held[0]):
            # Overlapping ranges are forged, and could make one file cost more than all its bytes.
            if self._data and place not in overlapping and _has_digest(slot):
                yield from self._check_content(slot, where)

    def _check_call(self, call: Call, where: str) -> Iterator[Problem]:
        self._result.calls += 1
        where = f"{where} ({call.name})"
        if (call.name, call.repeat) in self._names:
            yield Problem(where, f"recorded twice with repeat {call.repeat}")
        self._names.add((call.name, call.repeat))
        if call.stack is not None and self._segment.stack(call.stack) is None:
            yield Problem(where, f"its stack {call.stack} is not in stacks.jsonl")
        for slot in call.slots:
            self._result.slots += 1
            yield from self._check_slot(slot, f"{where}, {slot.name}")

    def _check_slot(self, slot: Slot, where: str) -> Iterator[Problem]:
        if slot.side not in _SIDES:
            yield Problem(where, "is neither an input nor an output nor a parameter")
        if _has_digest(slot) and _DIGEST.fullmatch(slot.digest or "") is None:
            yield Problem(where, f"its digest {(slot.digest or '')[:40]!r} is not 32 hexadecimal digits")
        if slot.offset is None:
            return
        try:
            self._source.read(slot)
        except TensorDamaged as fact:
            yield Problem(where, str(fact))
            return
        place = (slot.offset, slot.nbytes)
        owner, first = self._owners.setdefault(place, (where, slot))
        if first.digest is None:
            self._owners[place] = (where, slot)
        elif slot.digest not in (None, first.digest):
            yield Problem(where, f"shares its bytes with {owner}, which has another digest")

    def _check_content(self, slot: Slot, where: str) -> Iterator[Problem]:
        import xxhash

        try:
            content = self._source.read(slot)
        except TensorDamaged as fact:  # it was sound a moment ago
            yield Problem(where, str(fact))
            return
        self._result.bytes_hashed += content.nbytes
        digest = xxhash.xxh3_128()
        for at in range(0, content.nbytes, _BLOCK):
            digest.update(content[at : at + _BLOCK])
            if content.nbytes > _BLOCK and self._drops and isinstance(content.obj, mmap.mmap):
                content.obj.madvise(mmap.MADV_DONTNEED)  # pages that were read count as memory of this process
        found = digest.hexdigest()
        if found != slot.digest:
            yield Problem(
                where, f"its bytes changed since they were written: digest {found}, recorded as {slot.digest}"
            )

    def _check_overlap(self, overlapping: set[tuple[int, int]]) -> Iterator[Problem]:
        """Yield ranges that overlap without being equal: one was overwritten, or the index is forged."""
        end, last = 0, ""
        for place, (owner, _) in sorted(self._owners.items(), key=lambda held: held[0]):
            offset, nbytes = place
            if nbytes and offset < end:
                overlapping.add(place)
                yield Problem(owner, f"its bytes {offset:,}-{offset + nbytes:,} overlap those of {last}")
            if offset + nbytes > end:
                end, last = offset + nbytes, owner


def _has_digest(slot: Slot) -> bool:
    """Return whether a slot has a digest of ours: those of other tools have their kind before a colon."""
    return slot.digest is not None and ":" not in slot.digest
