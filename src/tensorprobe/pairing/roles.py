"""Give the parameters of both sides one name and one orientation.

In: the calls of one step of both sides. Out: the same calls; the roles of their slots have the names that the map says, and a
matrix that one program multiplies as it is, and the other transposed, is seen in the baseline's orientation. The calls that
use it say which one that is; values do not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache

import msgspec

from tensorprobe.model import Call, Slot
from tensorprobe.ops import plain_name

Rename = Callable[[str], str]
Calls = list[Call | None]
_TURNED = frozenset("linear t transpose mT T".split())
"""What multiplies by the transposed matrix, or transposes it first."""
_STRAIGHT = frozenset("addmm matmul mm rmatmul".split())


def parameter_of(role: str) -> str:
    """Return the name of the parameter that a role is about."""
    return role.rpartition(" of ")[2] if " of " in role else role.partition(" ")[2]


def unify_roles(calls: tuple[Calls, Calls], renames: tuple[Rename, Rename]) -> tuple[Calls, Calls]:
    """Return the calls with the roles of both sides unified. `renames` give a parameter of each side its common name."""
    ours, theirs = (
        [call if call is None else _renamed(call, rename) for call in side]
        for side, rename in zip(calls, map(_of_roles, renames), strict=True)
    )
    used = _orientations(ours), _orientations(theirs)
    turned = {name for name, how in used[0].items() if len(how) == 1 and not how & used[1].get(name, how)}
    if turned:
        theirs = [call if call is None else _turned(call, turned) for call in theirs]
    return ours, theirs


def _of_roles(rename: Rename) -> Rename:
    def renamed(role: str) -> str:
        parameter = parameter_of(role)
        return role[: len(role) - len(parameter)] + rename(parameter)

    return cache(renamed)


def _renamed(call: Call, rename: Rename) -> Call:
    if all(not slot.role or rename(slot.role) == slot.role for slot in call.slots):
        return call
    slots = [msgspec.structs.replace(slot, role=rename(slot.role)) if slot.role else slot for slot in call.slots]
    return msgspec.structs.replace(call, slots=tuple(slots))


def _orientations(calls: Sequence[Call | None]) -> dict[str, set[bool]]:
    """Return for each matrix among the parameters whether products use it transposed."""
    found: defaultdict[str, set[bool]] = defaultdict(set)
    for call in calls:
        if call is None or call.direction == "backward":
            continue
        name = plain_name(call.op)
        if name in _TURNED or name in _STRAIGHT:
            for slot in call.slots:
                if slot.role.startswith("parameter ") and len(slot.shape) == 2 and slot.side == "input":
                    found[parameter_of(slot.role)].add(name in _TURNED)
    return found


def _turned(call: Call, names: set[str]) -> Call:
    if not any(slot.role and parameter_of(slot.role) in names for slot in call.slots):
        return call
    slots = [_transposed(slot) if slot.role and parameter_of(slot.role) in names else slot for slot in call.slots]
    return msgspec.structs.replace(call, slots=tuple(slots))


def _transposed(slot: Slot) -> Slot:
    if len(slot.shape) != 2:
        return slot
    stride = slot.stride or (slot.shape[1], 1)
    return msgspec.structs.replace(slot, shape=slot.shape[::-1], stride=stride[::-1])
