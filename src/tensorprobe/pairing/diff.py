"""One call of two runs, tensor by tensor: figures, the pattern of the error, its worst elements, histograms and pictures.

In: the call in both runs. Out: structs of `model.diff`. Values are read block by block, so a tensor of any size can be looked at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy

from tensorprobe.errors import NoData, NotFound, TensorDamaged
from tensorprobe.model import DTYPES
from tensorprobe.model.comparison import FIGURES
from tensorprobe.model.diff import CallDiff, SlotLine, TensorDiff
from tensorprobe.model.dtypes import EPS, TINY
from tensorprobe.model.measured import Update
from tensorprobe.numerics.pair_view import PairView
from tensorprobe.numerics.pairs import derive
from tensorprobe.numerics.pattern import find_pattern
from tensorprobe.numerics.picture import picture_of
from tensorprobe.numerics.spread import histograms_of, profiles_of, spread_of
from tensorprobe.ops import axis_names
from tensorprobe.pairing.align import Options, align_calls
from tensorprobe.pairing.call_pairs import pair_slots
from tensorprobe.pairing.measure import details_of
from tensorprobe.pairing.tensor_pairs import Kernel
from tensorprobe.record.elements import widen
from tensorprobe.record.run import Run
from tensorprobe.record.stored import StoredCall, StoredSlot

Array = numpy.ndarray[Any, Any]
Runs = tuple[Run, Run]
CallPair = tuple[StoredCall, StoredCall]


def partners(
    runs: Runs, calls: Sequence[StoredCall], candidate_at: tuple[int, int], options: Options
) -> list[CallPair]:
    """Return the calls of the baseline with their partners at that step and rank of the candidate. Calls without one are left out."""
    if not calls:
        return []
    place = (calls[0].step, calls[0].rank)
    segments = (runs[0].segment(*place), runs[1].segment(*candidate_at))
    entries = (segments[0].index().entries, segments[1].index().entries)
    lines = {call.index for call in calls}
    found = {
        entries[0][ours].line: entries[1][theirs]
        for ours, theirs in align_calls(*entries, details_of(segments), options).pairs
        if entries[0][ours].line in lines
    }
    return [(call, runs[1].at(*candidate_at, found[call.index])) for call in calls if call.index in found]


def diff_call(runs: Runs, pair: CallPair, *, slot: str | None = None, pictures: bool = False) -> CallDiff:
    """Return all slots of a call in brief, and one in detail: `slot`, or the output that differs most, else the input that does.

    NotFound for a slot that the call does not have.
    """
    slots, _, _ = pair_slots(pair[0].model, pair[1].model)
    stored = [(StoredSlot(ours, pair[0]), StoredSlot(theirs, pair[1])) for ours, theirs in slots]
    lines = [_line(runs, each) for each in stored]
    if slot is not None:
        names = [line.slot for line in lines]
        named = [at for at, name in enumerate(names) if name == slot] or [
            at for at, name in enumerate(names) if name.startswith(slot + ".")
        ]
        if not named:
            raise NotFound(f"{pair[0].name} has no slot {slot!r} in both runs. It has {', '.join(names) or 'none'}.")
        chosen = max(named, key=lambda at: _rank_of(lines[at])[1:])
    elif lines:
        chosen = max(range(len(lines)), key=lambda at: _rank_of(lines[at]))
    return CallDiff(
        call=pair[0].name,
        candidate_call=pair[1].name,
        step=pair[0].step,
        rank=pair[0].rank,
        module=pair[0].module,
        slots=lines,
        tensor=diff_tensor(runs, *stored[chosen], pictures=pictures) if lines else None,
    )


def _rank_of(line: SlotLine) -> tuple[bool, bool, float]:
    """Sort key: an output that differs comes first, then whatever differs most."""
    differs = line.equal is False
    error = math.inf if math.isnan(line.relative_l2) else line.relative_l2
    return differs and line.slot.startswith("output"), differs, error if differs else 0.0


def _line(runs: Runs, slots: tuple[StoredSlot, StoredSlot]) -> SlotLine:
    ours, theirs = slots
    facts = {"slot": ours.name, "dtypes": (ours.dtype, theirs.dtype), "shapes": (list(ours.shape), list(theirs.shape))}
    if ours.digest is not None and ours.digest == theirs.digest and ours.dtype == theirs.dtype:
        return SlotLine(**facts, equal=True, max_abs=0.0, relative_l2=0.0)  # type: ignore[arg-type]
    if problem := _problem(slots):
        equal = None if ours.digest is None or theirs.digest is None else False
        return SlotLine(**facts, equal=equal, problem=problem)  # type: ignore[arg-type]
    figures = _figures(runs, slots)
    return SlotLine(
        **facts,  # type: ignore[arg-type]
        equal=bool(figures["bit_identical"]),
        max_abs=figures["max_abs"],
        relative_l2=figures["relative_l2"],
    )


def _problem(slots: tuple[StoredSlot, StoredSlot]) -> str:
    """Return why the values of a pair cannot be compared; nothing if they can."""
    if slots[0].shape != slots[1].shape:
        return f"shape {list(slots[0].shape)} in the baseline, {list(slots[1].shape)} in the candidate"
    for side, slot in zip(("baseline", "candidate"), slots, strict=True):
        if slot.dtype not in DTYPES:
            return f"unknown dtype {slot.dtype} in the {side}"
        try:
            slot.stored()
        except (NoData, TensorDamaged) as reason:
            return f"no values in the {side}: {str(reason).splitlines()[0]}"
    return ""


def _figures(runs: Runs, slots: tuple[StoredSlot, StoredSlot]) -> dict[str, float]:
    segments = tuple(run.segment(slot.call.step, slot.call.rank) for run, slot in zip(runs, slots, strict=True))
    with Kernel(segments, 1) as kernel:  # type: ignore[arg-type]
        kernel.measure(slots[0].model, slots[1].model)
        derived = derive(kernel.results())
    return {name: float(column[0]) for name, column in derived.items() if name in FIGURES or name == "count"}


def view_of(ours: StoredSlot, theirs: StoredSlot) -> PairView:
    """Return the values of both slots side by side, on the memory of the files. They have one shape and values."""
    sides = (ours, theirs)
    eps, tiny = (max(table.get(slot.dtype, 0.0) for slot in sides) for table in (EPS, TINY))
    first, second = (partial(widen, dtype=slot.dtype) for slot in sides)
    return PairView(ours.stored(), theirs.stored(), eps=eps, tiny=tiny, widen=(first, second))


def diff_tensor(
    runs: Runs, ours: StoredSlot, theirs: StoredSlot, *, pictures: bool = False, most: int | None = None
) -> TensorDiff:
    """Return everything about one slot of both runs. A tensor of more than `most` elements has figures only."""
    facts = {
        "call": ours.call.name,
        "candidate_call": theirs.call.name,
        "step": ours.call.step,
        "rank": ours.call.rank,
        "slot": ours.name,
        "dtypes": (ours.dtype, theirs.dtype),
        "shapes": (list(ours.shape), list(theirs.shape)),
        "summaries": (ours.summary, theirs.summary),
    }
    if problem := _problem((ours, theirs)):
        return TensorDiff(**facts, problem=problem)  # type: ignore[arg-type]
    figures = _figures(runs, (ours, theirs))
    if most is not None and ours.count > most:
        problem = f"{ours.count:,} elements: more than are looked at in a comparison ({most:,})"
        return TensorDiff(**facts, figures=figures, problem=problem)  # type: ignore[arg-type]
    pair = view_of(ours, theirs)
    found = spread_of(pair)
    names = axis_names(ours.call.op, len(ours.shape))
    names += ["parts"] * (len(pair.shape) - len(names))
    values, differences, ulps = histograms_of(pair, found.most)
    shown = []
    if pictures and pair.size:
        shown.append(picture_of(pair))
        if len(ours.shape) > 2 and found.worst:
            shown.append(picture_of(pair, fixed=found.worst[0].index[: len(ours.shape) - 2]))
    return TensorDiff(
        **facts,  # type: ignore[arg-type]
        figures=figures,
        pattern=find_pattern(pair, found, names),
        profiles=profiles_of(found, pair.shape, names),
        worst=found.worst,
        values=values,
        differences=differences,
        ulps=ulps,
        pictures=shown,
    )


MOST_UPDATED = 1 << 24
"""Of larger tensors, the update of the first elements is measured."""
_MOVED = 8
"""How many units in the last place an element must have changed to have a factor, and how many elements must."""
_SURE = 0.0025
"""How far two gradients of an element may be apart, as a share of them, for its changes to be alike to a hundredth."""
_PARTED = 0.05
"""The share of its change by which the two sides of an element may be apart before, if its changes are to be alike."""
_FARTHEST = 4.0
"""How many times the greatest change in the baseline two changes made of noise may be apart."""


def measure_update(
    before: tuple[Array, Array], now: tuple[Array, Array], eps: float, gradients: tuple[Array, Array] | None = None
) -> Update:
    """Return how differently two tensors have changed, each from `before` to `now` on its own side.

    An optimizer that divides by the size of the gradient makes whole steps of a gradient that is rounding noise. Of such an
    element is known only that it moves no further than others. The same holds where it has moved otherwise in earlier steps:
    the optimizer remembers the gradients of these.
    """
    flat = [side.reshape(-1)[:MOST_UPDATED].astype(numpy.float64) for side in (*before, *now, *(gradients or ()))]
    ours, theirs = flat[2] - flat[0], flat[3] - flat[1]
    size = numpy.maximum(abs(ours), abs(theirs))
    unit = eps * numpy.maximum(abs(flat[2]), abs(flat[3]))
    sure = abs(flat[1] - flat[0]) <= _PARTED * size + 2 * unit
    if gradients is not None:
        sure &= abs(flat[5] - flat[4]) <= _SURE * numpy.maximum(abs(flat[4]), abs(flat[5]))
    farthest = _FARTHEST * abs(ours).max(initial=0.0)
    off = abs(theirs - ours) > numpy.where(sure, 0.01 * size, farthest) + 2 * unit
    some = sure & (abs(ours) > _MOVED * unit)
    factor = float(numpy.median(theirs[some] / ours[some])) if some.sum() >= _MOVED else float("nan")
    whole, squares = _rms(flat[2]), float(numpy.square(flat[2][sure]).sum())
    slope = float((flat[2] * flat[3])[sure].sum()) / squares if squares else float("nan")
    gain = _gain(abs(theirs - ours) - 2 * unit, size, flat[4:], some, eps) if gradients is not None else float("nan")
    return Update(float(off.mean()) if off.size else 0.0, factor, _rms(ours) / whole if whole else 0.0, slope, gain)


def _gain(apart: Array, size: Array, gradients: Sequence[Array], some: Array, eps: float) -> float:
    """Return by how much the relative difference of changes exceeds that of the gradients, at the median of `some` elements."""
    known = some & (gradients[0] != 0)
    if known.sum() < _MOVED:
        return float("nan")
    noise = abs(gradients[1] - gradients[0])[known] / abs(gradients[0])[known]
    return float(numpy.median(apart[known].clip(0) / size[known]) / max(float(numpy.median(noise)), eps))


def _rms(values: Array) -> float:
    return float(numpy.sqrt(numpy.mean(numpy.square(values)))) if values.size else 0.0
