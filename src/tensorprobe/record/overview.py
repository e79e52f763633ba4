"""Gathers what `tensorprobe inspect` shows from an open run: the run as a whole, or one call with sample values.

In: a `Run`. Out: the structs of `model.overview`, which know nothing of files. Damage is counted and reported, not raised.
Samples are read through numpy; a tensor of more than `MAX_SCANNED` bytes is not searched for its extremes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any

from tensorprobe.errors import NotFound, RunDamaged, TensorDamaged, nearest
from tensorprobe.model import Call, Coverage
from tensorprobe.model.overview import CallLine, CallView, Element, Number, RunOverview, SegmentOverview, SlotView
from tensorprobe.record.elements import widen
from tensorprobe.record.endings import describe_end
from tensorprobe.record.run import Run
from tensorprobe.record.stored import StoredCall, StoredSlot

if TYPE_CHECKING:
    import numpy

MAX_SCANNED = 64 << 20
FIRST = 6
"""Values of a tensor that are shown."""
_EARLY = 100


def describe_run(run: Run) -> RunOverview:
    """Return an overview of the run; this reads its index, a few calls and no tensor."""
    segments = [_describe_segment(run, step, rank) for step, rank in run.segments()]
    return RunOverview(
        path=str(run.path),
        closed=run.closed,
        incomplete=describe_end(run),
        steps=run.steps,
        ranks=run.ranks,
        calls=sum(segment.calls for segment in segments),
        damaged=sum(segment.damaged for segment in segments),
        size_bytes=sum(segment.size_bytes for segment in segments),
        devices={rank: part.device for rank, part in run.parts.items()},
        coordinates={rank: part.coordinates for rank, part in run.parts.items()},
        tool=run.manifest.tool,
        torch=run.manifest.torch,
        python=run.manifest.python,
        created=run.manifest.created,
        world_size=run.manifest.world_size,
        settings=run.manifest.settings,
        coverage=merge_coverage(run.coverage.values()),
        segments=segments,
        provenance=run.manifest.provenance,
        exit_code=run.manifest.exit_code,
        lacks=run.manifest.lacks,
        example=_example(run),
    )


def describe_call(run: Run, call: StoredCall, *, slot: str | None = None, values: int = FIRST) -> CallView:
    """Return one call with its stack and the first values of its tensors, or only the given slot of it."""
    slots = [held for held in call.slots if slot is None or held.name == slot or held.name.startswith(slot + ".")]
    if slot is not None and not slots:
        known = [held.name for held in call.slots]
        hint = f"Nearest: {', '.join(nearest(slot, known))}" if nearest(slot, known) else f"It has: {', '.join(known)}"
        raise NotFound(f"{call.name} has no slot {slot!r}.\n  {hint}")
    stack = run.stack(call)
    return CallView(
        name=call.name,
        step=call.step,
        rank=call.rank,
        index=call.index,
        level=call.level,
        direction=call.direction,
        module=call.module,
        parent=call.parent,
        origin=call.origin,
        thread=call.thread,
        repeat=call.repeat,
        raised=call.raised,
        frames=list(stack.frames) if stack else [],
        args=call.args,
        kwargs=call.kwargs,
        slots=[describe_slot(held, values) for held in slots],
        phase=call.phase,
        microbatch=call.microbatch,
    )


def describe_slot(slot: StoredSlot, values: int = FIRST) -> SlotView:
    """Return one tensor with its first values and the indices of its extremes, if its values can be read."""
    first: list[Number] = []
    places: dict[str, Element] = {}
    problem = None
    if slot.has_data:
        try:
            first = [_number(value) for value in widen(slot.stored().flat[:values], slot.dtype).tolist()]
            places = _places(slot.numpy()) if slot.nbytes <= MAX_SCANNED else {}
        except (TensorDamaged, RunDamaged) as error:
            problem = str(error)
    return SlotView(
        name=slot.name,
        dtype=slot.dtype,
        shape=slot.shape,
        device=slot.device,
        stride=slot.stride,
        grad=slot.grad,
        summary=slot.summary,
        digest=slot.digest,
        nbytes=slot.nbytes,
        skipped=slot.skipped,
        first=first,
        places=places,
        problem=problem,
    )


def list_calls(run: Run, step: int | None, rank: int | None, *, limit: int) -> tuple[list[CallLine], int]:
    """Return the first `limit` calls of the chosen steps and ranks, and the total number."""
    total = sum(len(run.segment(*key).index().entries) for key in run.segments(step, rank))
    lines: list[CallLine] = []
    for call in run.calls(step, rank, on_damage="skip"):
        if len(lines) == limit:
            break
        lines.append(describe_line(call))
    return lines, total


def describe_line(call: StoredCall) -> CallLine:
    """Return one call as a line of a list."""
    outputs = [f"{slot.dtype} {list(slot.shape)}" for slot in call.outputs]
    return CallLine(call.name, call.step, call.rank, call.index, call.repeat, call.module, outputs, call.phase)


def count_ops(run: Run) -> dict[str, int]:
    """Return how often each op was called, in both directions together; no call is decoded."""
    counts: Counter[str] = Counter()
    for place in run.segments():
        counts.update(Call(entry.name).op for entry in run.segment(*place).index().entries)
    return dict(counts.most_common())


def merge_coverage(parts: Iterable[Coverage]) -> Coverage:
    """Return the coverage of all ranks together: sums of the counts, distinct notes and limits, the first error."""
    counts: Any = Counter()
    skipped: Counter[str] = Counter()
    blind: Counter[str] = Counter()
    unmatched: dict[str, list[str]] = {}
    notes: dict[str, None] = {}
    limits: dict[str, None] = {}
    first_error = None
    for part in parts:
        for field in ("seen", "recorded", "filtered", "failed", "slots", "bytes_seen", "bytes_written"):
            counts[field] += getattr(part, field)
        skipped.update(part.slots_skipped)
        blind.update(part.blind_spots)
        unmatched.update(part.unmatched)
        notes.update(dict.fromkeys(part.notes))
        limits.update(dict.fromkeys(part.limits))
        first_error = first_error or part.first_error
    return Coverage(
        **counts,
        slots_skipped=dict(skipped),
        blind_spots=dict(blind),
        unmatched=unmatched,
        notes=list(notes),
        first_error=first_error,
        limits=list(limits),
    )


def _describe_segment(run: Run, step: int, rank: int) -> SegmentOverview:
    segment = run.segment(step, rank)
    try:
        index = segment.index()
        return SegmentOverview(step, rank, len(index.entries), len(index.damage), segment.size_bytes())
    except RunDamaged:
        return SegmentOverview(step, rank, 0, 1, 0)


def _example(run: Run) -> str | None:
    """Return the name of a call worth showing: an early one that is not a module and has inputs, else the first."""
    first = None
    for step, rank in run.segments()[:1]:
        try:
            for call in islice(run.calls(step, rank, on_damage="skip"), _EARLY):
                first = first or call.name
                if call.level.is_op and call.inputs:
                    return call.name
        except RunDamaged:
            return first
    return first


def _places(array: numpy.ndarray[Any, Any]) -> dict[str, Element]:
    """Return the greatest and the least element, and the first NaN and infinity."""
    import numpy

    if not array.size or array.dtype.kind not in "fiu":
        return {}
    places = {}
    if array.dtype.kind == "f":
        for name, found in (("nan", numpy.isnan(array)), ("inf", numpy.isinf(array))):
            if found.any():
                places[name] = _place(array, int(found.argmax()))
        if "nan" in places:
            if numpy.isnan(array).all():
                return places
            return {
                "max": _place(array, int(numpy.nanargmax(array))),
                "min": _place(array, int(numpy.nanargmin(array))),
                **places,
            }
    return {"max": _place(array, int(array.argmax())), "min": _place(array, int(array.argmin())), **places}


def _place(array: numpy.ndarray[Any, Any], flat: int) -> Element:
    import numpy

    index = [int(at) for at in numpy.unravel_index(flat, array.shape)]
    return Element(_number(array[tuple(index)].item()), index)


def _number(value: Any) -> Number:
    return str(value) if isinstance(value, complex) else value
