"""Read the paired calls of two segments side by side, and find how two paired calls differ in structure.

In: two segments and an alignment of their index entries. Out: the pairs in the baseline's order, and facts as (kind, detail):
other slots, shapes, dtypes, arguments, an exception. Devices are expected to differ and are not reported. Each file is read
once from front to back if the order allows it. Memory stays bounded: at most `MAX_KEPT` calls wait for their partner;
beyond that, a call is read again by itself.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterator, Sequence
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple

from tensorprobe.errors import RunDamaged
from tensorprobe.model import DTYPES, Call, Slot, Summary
from tensorprobe.model.call import forward_name
from tensorprobe.model.comparison import FindingKind
from tensorprobe.model.reason import Skipped, Unmeasured, Unrecorded
from tensorprobe.ops import parameter_names, positional_slot, signature_of
from tensorprobe.record.lines import Damage
from tensorprobe.record.run import Entry, Segment

OPTIMIZER = "optimizer"
"""The phase of the calls inside the step of an optimizer."""
MAX_KEPT = 20_000
CHUNK = 2048
"""Pairs that are processed together."""


class CallPair(NamedTuple):
    """Two paired calls, and the line of the baseline's call."""

    line: int
    baseline: Call
    candidate: Call


class StandIn(CallPair):
    """Two calls that stand for a region of calls without a partner."""

    __slots__ = ()


def against(segment: Segment, other: Segment) -> Segment:
    """Return a segment as it is compared with another. A reader of a tool that records otherwise may translate it.

    Such a segment has two methods more: `against(other)`, and `excuse(call, other, own=…)`: why a call that only one of
    the two has, `own` if it is this one, is no difference; or None.
    """
    translate = getattr(segment, "against", None)
    translated: Segment = segment if translate is None else translate(other)
    return translated


def why_alone(call: Call, own: Segment, other: Segment) -> Skipped | None:
    """Return why it is no difference that only one of two segments has a call; None if it is one, or nobody knows."""
    for segment, beside in ((own, other), (other, own)):
        excuse = getattr(segment, "excuse", None)
        found: Skipped | None = excuse and excuse(call, beside, own=segment is own)
        if found:
            return found
    return None


def read_in_step(baseline: Segment, candidate: Segment) -> Iterator[list[CallPair] | None]:
    """Yield chunks of pairs of two segments with the same calls in the same order; None at the first difference."""
    chunk: list[CallPair] = []
    ours, theirs = baseline.calls(), candidate.calls()
    for left in ours:
        right = next(theirs, None)
        if right is None or isinstance(left, Damage) or isinstance(right, Damage):
            yield None
            return
        one, other = left[1], right[1]
        if one.name != other.name or one.repeat != other.repeat or update_others(one, other):
            yield None
            return
        chunk.append(CallPair(left[0], one, other))
        if len(chunk) == CHUNK:
            yield chunk
            chunk = []
    yield chunk if next(theirs, None) is None else None


def read_pairs(
    segments: tuple[Segment, Segment],
    entries: tuple[Sequence[Entry], Sequence[Entry]],
    pairs: Sequence[tuple[int, int]],
) -> Iterator[CallPair | Skipped]:
    """Yield each pair, or the reason why one of its lines cannot be read."""
    readers = [
        _Reader(segment, entries_of_side, [pair[side] for pair in pairs])
        for side, (segment, entries_of_side) in enumerate(zip(segments, entries, strict=True))
    ]
    for ours, theirs in pairs:
        baseline, candidate = readers[0].get(ours), readers[1].get(theirs)
        if isinstance(baseline, Skipped):
            yield baseline
        elif isinstance(candidate, Skipped):
            yield candidate
        else:
            yield CallPair(entries[0][ours].line, baseline, candidate)


class _Reader:
    """One side: reads the file forward and keeps the calls that are wanted later."""

    def __init__(self, segment: Segment, entries: Sequence[Entry], wanted: list[int]) -> None:
        self._segment = segment
        self._entries = entries
        self._calls = segment.calls()
        self._next = 0
        self._kept: dict[int, Call | Skipped] = {}
        # If positions only increase, as they nearly always do, no call is wanted later.
        rising = all(one < other for one, other in pairwise(wanted))
        self._wanted: set[int] = set() if rising else {entries[position].line for position in wanted}

    def get(self, position: int) -> Call | Skipped:
        entry = self._entries[position]
        if entry.line in self._kept:
            return self._kept.pop(entry.line)
        while self._next <= entry.line:
            item = next(self._calls, None)
            if item is None:
                return Skipped.FILE_SHORTENED
            line, call = (item.line - 1, Skipped.DAMAGED_LINE) if isinstance(item, Damage) else item
            self._next = line + 1
            if line == entry.line:
                return call
            if line in self._wanted and len(self._kept) < MAX_KEPT:
                self._kept[line] = call
        return self._read_alone(entry)

    def _read_alone(self, entry: Entry) -> Call | Skipped:
        try:
            return self._segment.call_at(entry)
        except RunDamaged:
            return Skipped.DAMAGED_LINE


def update_others(ours: Call, theirs: Call) -> bool:
    """Return whether two calls of optimizers are about other parameters."""
    return ours.phase == OPTIMIZER and any(
        one.role and other.role and one.role != other.role for one, other in zip(ours.slots, theirs.slots, strict=False)
    )


def content_of(slot: Slot) -> Hashable:
    """Return what identifies the content of a slot in its run; None where nothing does, as for a tensor of zeros."""
    if slot.skipped or (slot.digest is None and slot.summary is None):
        return None
    summary = slot.summary
    constant = summary is not None and summary.max == summary.min
    if constant and (slot.count != 1 or float(summary.max).is_integer()):  # type: ignore[union-attr]
        return None
    return slot.digest or summary


def comparable(ours: Slot | None, theirs: Slot | None) -> tuple[Slot, Slot] | None:
    """Return both slots if they hold tensors of one shape and dtype."""
    if ours is None or theirs is None or (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return None
    return ours, theirs


def of_one_kind(ours: Slot, theirs: Slot) -> bool:
    """Return whether both slots hold floating-point numbers, integers, or the like."""
    return ours.dtype == theirs.dtype or _KINDS.get(ours.dtype, "") == _KINDS.get(theirs.dtype)


def is_made(call: Call, slot: Slot) -> bool:
    """Return whether the call made the tensor: its outputs, and in a backward call the gradients of its parameters."""
    return slot.side == "output" or (slot.side == "parameters" and call.direction == "backward")


def forward_of(call: Call) -> str:
    """Return the name of the forward call of a backward call; empty where its number does not tell."""
    return forward_name(call.name) if call.level.links_backward else ""


def read_slots(call: Call) -> Iterator[Slot]:
    """Yield the slots that a call reads."""
    return (slot for slot in call.slots if not is_made(call, slot))


Fact = tuple[FindingKind, str]

_KINDS = {name: dtype.kind for name, dtype in DTYPES.items()}
_MAX_TEXT = 80
_ABSENT = object()
_DEVICE = re.compile(r"(cpu|cuda|npu|xpu|mps|hpu|mlu|musa|privateuseone)(:[0-9]+)?")


def pair_slots(baseline: Call, candidate: Call) -> tuple[list[tuple[Slot, Slot]], list[str], list[str]]:
    """Return the slots that both calls have, in the baseline's order, and the names that only one of them has."""
    ours, theirs = baseline.slots, candidate.slots
    if len(ours) == len(theirs) and all(a.name == b.name for a, b in zip(ours, theirs, strict=True)):
        return list(zip(ours, theirs, strict=True)), [], []
    by_name = {slot.name: slot for slot in theirs}
    pairs = [(slot, by_name.pop(slot.name)) for slot in ours if slot.name in by_name]
    paired = {slot.name for slot, _ in pairs}
    if by_name and len(pairs) < len(ours) and baseline.op == candidate.op:
        more = _positional_slot(baseline.op, [slot for slot in ours if slot.name not in paired], by_name)
        if more:
            order = {slot.name: at for at, slot in enumerate(ours)}
            pairs = sorted([*pairs, *more], key=lambda pair: order[pair[0].name])
            paired |= {slot.name for slot, _ in more}
    # What a side did not record, or could not mean, the other side may lack.
    lacking = [slot.name for slot in ours if slot.name not in paired and not slot.skipped]
    return pairs, lacking, [name for name, slot in by_name.items() if not slot.skipped]


def _positional_slot(op: str, lacking: list[Slot], by_name: dict[str, Slot]) -> list[tuple[Slot, Slot]]:
    """Return pairs of slots where one side passed the tensor by keyword and the other by position."""
    if not parameter_names(op):
        return []
    places = {positional_slot(op, name): name for name in by_name}
    found = [
        (slot, places[positional_slot(op, slot.name)]) for slot in lacking if positional_slot(op, slot.name) in places
    ]
    return [(slot, by_name.pop(name)) for slot, name in found]


def lacking_slots(lacking: list[str], extra: list[str], *, backward: bool) -> Fact:
    """Return the fact that some slots are on one side only.

    The gradient that a backward call receives is not seen where its result was overwritten: that changes no number.
    """
    received = backward and all(name.startswith("input.") for name in (*lacking, *extra))
    sides = [(f"only in baseline: {', '.join(lacking)}", lacking), (f"only in candidate: {', '.join(extra)}", extra)]
    return "received" if received else "slots", "; ".join(text for text, names in sides if names)


def call_facts(baseline: Call, candidate: Call) -> Iterator[Fact]:
    """Yield the differences between two calls other than in their tensors."""
    if baseline.raised != candidate.raised:
        yield "raised", _raised(baseline.raised, candidate.raised)
    unknown = any(
        call.args is None and call.kwargs is None for call in (baseline, candidate)
    )  # no such layout has both
    if not unknown and (baseline.args != candidate.args or baseline.kwargs != candidate.kwargs):
        difference = next(_argument_differences(baseline, candidate), None)
        if difference is not None:
            yield "arguments", difference


def slot_facts(baseline: Slot, candidate: Slot) -> Iterator[Fact]:
    """Yield the differences in shape and dtype, if both sides know theirs."""
    if not baseline.dtype or not candidate.dtype:
        return
    if baseline.shape != candidate.shape:
        yield "shape", f"{baseline.name}: {list(baseline.shape)} in baseline, {list(candidate.shape)} in candidate"
    if baseline.dtype != candidate.dtype:
        yield "dtype", f"{baseline.name}: {baseline.dtype} in baseline, {candidate.dtype} in candidate"


def _raised(baseline: str | None, candidate: str | None) -> str:
    if baseline is None:
        return f"raised {candidate} in the candidate only"
    if candidate is None:
        return f"raised {baseline} in the baseline only"
    return f"raised {baseline} in the baseline, {candidate} in the candidate"


def _argument_differences(baseline: Call, candidate: Call) -> Iterator[str]:
    """Yield where the arguments of two calls differ: `argument 1: 2 → 3`, `kwarg approximate: absent → 'tanh'`.

    What is absent on one side and is its default on the other is no difference.
    """
    ours, theirs = _as_list(baseline.args) or [], _as_list(candidate.args) or []
    names, defaults = parameter_names(baseline.op), signature_of(baseline.op).defaults
    if names and isinstance(ours, list) and isinstance(theirs, list) and len(ours) != len(theirs):
        # One side was given by keyword what the other was given by position.
        left, right = _by_name(names, ours, baseline.kwargs), _by_name(names, theirs, candidate.kwargs)
        for key in dict.fromkeys([*left, *right]):
            a, b = left.get(key, _ABSENT), right.get(key, _ABSENT)
            if not (isinstance(a, dict) and isinstance(b, dict) and "slot" in a and "slot" in b):
                yield from _unless_default(a, b, f"argument {key}", defaults.get(key, _ABSENT))
        return
    if isinstance(ours, list) and isinstance(theirs, list):
        for number, (one, other) in enumerate(zip_longest(ours, theirs, fillvalue=_ABSENT)):
            yield from _tree_differences(one, other, f"argument {number}")
    else:
        yield from _tree_differences(ours, theirs, "arguments")
    named, others = _as_dict(baseline.kwargs), _as_dict(candidate.kwargs)
    for key in [*named, *(key for key in others if key not in named)]:
        one, other = named.get(key, _ABSENT), others.get(key, _ABSENT)
        yield from _unless_default(one, other, f"kwarg {key}", defaults.get(key, _ABSENT))


def _unless_default(baseline: Any, candidate: Any, place: str, default: Any) -> Iterator[str]:
    given = [value for value in (baseline, candidate) if value is not _ABSENT]
    if len(given) == 2 or next(_tree_differences(given[0], default, place), None) is not None:
        yield from _tree_differences(baseline, candidate, place)


def _by_name(names: tuple[str, ...], args: list[Any], kwargs: Any) -> dict[str, Any]:
    named = {names[at] if at < len(names) and names[at] else str(at): tree for at, tree in enumerate(args)}
    return named | _as_dict(kwargs)


def _as_dict(kwargs: Any) -> dict[str, Any]:
    return kwargs if isinstance(kwargs, dict) else {}


def _tree_differences(baseline: Any, candidate: Any, place: str) -> Iterator[str]:
    """Yield where two argument trees differ, in words, first the first."""
    baseline, candidate = _as_list(baseline), _as_list(candidate)
    if baseline == candidate or (_is_device(baseline) and _is_device(candidate)):
        return
    if (
        isinstance(baseline, float)
        and isinstance(candidate, float)
        and math.isclose(baseline, candidate, rel_tol=1e-12)
    ):
        return  # computed in another order
    if _repeats(baseline, candidate) or _repeats(candidate, baseline):
        return
    both = isinstance(baseline, dict) and isinstance(candidate, dict)
    kinds = {baseline.get("type"), candidate.get("type")} if both else set()
    if "object" in kinds and kinds <= {"object", "torch.distributed.ReduceOp"}:
        return  # what cannot be rebuilt is known by the name of its type only
    if len(kinds) == 1:
        for key in [*baseline, *(key for key in candidate if key not in baseline)]:
            inside = place if key == "value" else f"{place}.{key}"
            yield from _tree_differences(baseline.get(key, _ABSENT), candidate.get(key, _ABSENT), inside)
    elif isinstance(baseline, list) and isinstance(candidate, list) and len(baseline) == len(candidate):
        for number, (ours, theirs) in enumerate(zip(baseline, candidate, strict=True)):
            yield from _tree_differences(ours, theirs, f"{place}[{number}]")
    else:
        yield f"{place}: {_short(baseline)} → {_short(candidate)}"


def _repeats(values: Any, value: Any) -> bool:
    """Return whether a list gives for each dimension the number that the other side gives for all."""
    return (
        isinstance(values, list) and isinstance(value, int) and bool(values) and all(each == value for each in values)
    )


def _as_list(value: Any) -> Any:
    """Return a tuple as a list: msprobe writes both alike, and no op tells them apart."""
    return value["value"] if isinstance(value, dict) and value.get("type") == "tuple" else value


def _is_device(value: Any) -> bool:
    if isinstance(value, dict):
        return value.get("type") == "torch.device"
    return isinstance(value, str) and _DEVICE.fullmatch(value) is not None


def _short(value: Any) -> str:
    if value is _ABSENT:
        return "absent"
    if isinstance(value, dict) and "slot" in value:
        return "a tensor"
    text = repr(value["value"] if isinstance(value, dict) and "value" in value else value)
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"


def why_not(ours: Slot, theirs: Slot) -> tuple[Unmeasured, str]:
    """Return why a pair of slots cannot be measured, and the note that says so."""
    if note := ours.skipped or theirs.skipped:
        fresh = Unrecorded.of(note) is Unrecorded.UNINITIALISED
        return Unmeasured.UNINITIALISED if fresh else Unmeasured.UNRECORDED, note
    why = Unmeasured.UNRECORDED
    if ours.shape != theirs.shape:
        why = Unmeasured.SHAPE
    elif ours.summary is not None and theirs.summary is not None:
        why = Unmeasured.HIDDEN
    return why, why.value


def are_hidden(ours: Summary, theirs: Summary) -> bool:
    """Return whether NaN hides every statistic: some tools do not leave NaN out, and then nothing describes the rest."""
    if ours.nan >= 0 or theirs.nan >= 0:
        return False
    pairs = ((ours.max, theirs.max), (ours.min, theirs.min), (ours.mean, theirs.mean), (ours.norm, theirs.norm))
    return all(one != one or other != other for one, other in pairs)
