"""See one parameter as the parameters that the other program has in its place: a fused projection as three.

In: the calls of one step of both sides, with common names of parameters. Out: the same calls; a parameter that only one side has,
its gradient and its state are in parts there, with the names of the other side's parameters, if these follow each other in the
order of use and have as many rows in all. Which rows belong to which name follows from that order alone, never from values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod

import msgspec

from tensorprobe.model import DTYPES, Call, Slot
from tensorprobe.pairing.roles import parameter_of

Calls = list[Call | None]
_Shapes = dict[str, tuple[int, ...]]
_Parts = dict[str, list[tuple[str, int]]]
"""By the name of a parameter: the names of its parts, and how many rows each has."""
_ALIGNMENT = 64
"""Of the first byte of a tensor in a file."""


def split_fused(calls: tuple[Calls, Calls]) -> tuple[Calls, Calls]:
    """Return the calls with fused parameters in parts."""
    shapes = [_shapes_of(side) for side in calls]
    only = [{name: shape for name, shape in own.items() if name not in other} for own, other in (shapes, shapes[::-1])]
    if not all(only):
        return calls
    fused = [dict(_fused(*held)) for held in ((only[0], only[1]), (only[1], only[0]))]
    names = {name for parts in fused for whole, held in parts.items() for name in (whole, *(part for part, _ in held))}
    if not all(_has_values(side, names) for side in calls):
        return calls
    ours, theirs = (
        [call if call is None else _split(call, parts) for call in side] if parts else side
        for side, parts in zip(calls, fused, strict=True)
    )
    return ours, theirs


def _has_values(calls: Calls, names: set[str]) -> bool:
    """Return whether the values of these parameters, their gradients and states are recorded: statistics have no parts."""
    slots = (slot for call in calls if call is not None for slot in call.slots if slot.role and slot.shape)
    return all(slot.offset is not None for slot in slots if parameter_of(slot.role) in names)


def _shapes_of(calls: Sequence[Call | None]) -> _Shapes:
    """Return the shapes of the parameters that the forward calls read, in the order of their first use."""
    found: _Shapes = {}
    for call in calls:
        for slot in call.slots if call is not None and call.direction == "forward" else ():
            if slot.role.startswith("parameter ") and slot.shape:
                found.setdefault(parameter_of(slot.role), slot.shape)
    return found


def _fused(own: _Shapes, other: _Shapes) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """Yield the parameters that stand for several of the other side, with those."""
    kinds: defaultdict[tuple[int, ...], tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for at, side in enumerate((own, other)):
        for name, shape in side.items():
            kinds[shape[1:]][at].append(name)
    for ours, theirs in kinds.values():
        free = iter(theirs)
        for name in ours:
            parts: list[tuple[str, int]] = []
            while sum(rows for _, rows in parts) < own[name][0] and (part := next(free, None)) is not None:
                parts.append((part, other[part][0]))
            if sum(rows for _, rows in parts) != own[name][0]:
                break
            if len(parts) > 1:
                yield name, parts


def _split(call: Call, fused: _Parts) -> Call:
    if not any(slot.role and parameter_of(slot.role) in fused for slot in call.slots):
        return call
    slots = [each for slot in call.slots for each in _parts_of(slot, fused.get(parameter_of(slot.role), []))]
    return msgspec.structs.replace(call, slots=tuple(slots))


def _parts_of(slot: Slot, parts: list[tuple[str, int]]) -> Iterator[Slot]:
    """Yield the parts of a slot; the slot itself, if its rows are not where their number says."""
    owner, ends = parameter_of(slot.role), list(accumulate((rows for _, rows in parts), initial=0))
    width = prod(slot.shape[1:]) * DTYPES[slot.dtype].itemsize if slot.dtype in DTYPES else 0
    whole = slot.shape and slot.shape[0] == ends[-1] and slot.stride is None and width
    aligned = slot.offset is None or not any(end * width % _ALIGNMENT for end in ends[:-1])
    if not parts or (slot.shape and not (whole and aligned)):
        yield slot
        return
    content = slot.digest or (slot.summary and str(slot.summary))
    constant = slot.summary is not None and slot.summary.max == slot.summary.min
    for number, ((name, rows), start) in enumerate(zip(parts, ends, strict=False)):
        part = msgspec.structs.replace(
            slot, name=f"{slot.name}+{number}", role=slot.role[: len(slot.role) - len(owner)] + name
        )
        if not slot.shape:  # a number, as that of the steps
            yield part
            continue
        yield msgspec.structs.replace(
            part,
            shape=(rows, *slot.shape[1:]),
            offset=None if slot.offset is None else slot.offset + start * width,
            nbytes=rows * width if slot.offset is not None else slot.nbytes,
            digest=f"{content}+{number}" if content and not constant else None,
            summary=None,
            sketch=None,
        )
