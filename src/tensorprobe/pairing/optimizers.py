"""Compare the steps of two optimizers that are written with different calls, by parameter and by state.

In: the calls of one step of both sides, and their alignment. Out: one region that holds the calls of both optimizers, with a
stand-in for each parameter: what the optimizer read of it, its gradient and its state, and what it left there. Names of
parameters and states decide what belongs together, never values. A call that writes to something without a name, or makes
what no call of the optimizer reads, is not in the region: nothing explains it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence, Set
from typing import NamedTuple

import msgspec

from tensorprobe.model import Call, Slot
from tensorprobe.ops import Trait, has, short_name
from tensorprobe.pairing.call_pairs import OPTIMIZER, comparable, content_of, read_slots, update_others
from tensorprobe.pairing.roles import parameter_of

Positions = tuple[list[int], list[int]]


class OptimizerRegion(NamedTuple):
    """The calls of both optimizers, and a pair that stands for each parameter."""

    members: Positions
    parts: list[tuple[Call, Call]]
    pairs: list[tuple[int, int]]
    """The pairs that are left besides it."""
    alone: Positions
    """The calls without a partner that are left."""


def pair_optimizers(
    calls: tuple[Sequence[Call | None], Sequence[Call | None]],
    pairs: Sequence[tuple[int, int]],
    alone: tuple[Sequence[int], Sequence[int]],
    name: str,
) -> OptimizerRegion | None:
    """Return the region, or None where both optimizers make the same calls in one order, or cannot be compared by name."""
    known = [{*side, *(pair[at] for pair in pairs)} for at, side in enumerate(alone)]
    inside = [
        [at for at, call in enumerate(held) if call is not None and call.phase == OPTIMIZER and at in known[side]]
        for side, held in enumerate(calls)
    ]
    if not all(inside):
        return None
    differ = any(set(own) & set(lone) for own, lone in zip(inside, alone, strict=True))
    held = ((calls[0][one], calls[1][other]) for one, other in pairs)
    if not differ and not any(one and other and update_others(one, other) for one, other in held):
        return None
    ours, theirs = (_Side(held, own) for held, own in zip(calls, inside, strict=True))
    if only := set(ours.after) ^ set(theirs.after):
        # A state that one of them writes to, and the other replaces by a new tensor, is compared where it is read again.
        excused = only & set(ours.before) & set(theirs.before)
        # Steps that the other one counts in a number that is no tensor show in the parameters.
        excused |= (ours.counters() | theirs.counters()) & only
        ours, theirs = (_Side(held, own, only - excused) for held, own in zip(calls, inside, strict=True))
        for role in excused:
            ours.after.pop(role, None), theirs.after.pop(role, None)
    if not ours.after or ours.after.keys() != theirs.after.keys():
        return None
    parts = list(_parts(ours, theirs, name))
    if sum(slot.side == "output" for part in parts for slot in part[0].slots) < len(ours.after):
        return None  # of another shape or dtype
    members = ours.members, theirs.members
    own = [set(side) for side in members]
    left = [pair for pair in pairs if not any(pair[at] in own[at] for at in (0, 1))]
    rest = [
        sorted(side - mine - {pair[at] for pair in left})
        for at, (side, mine) in enumerate(zip(known, own, strict=True))
    ]
    return OptimizerRegion(members, parts, left, (rest[0], rest[1]))


class _Side:
    """What one optimizer reads and leaves, by role. What writes to roles that only one of them has is not a member."""

    def __init__(self, calls: Sequence[Call | None], inside: Sequence[int], only: Set[str] = frozenset()) -> None:
        self.before: dict[str, Slot] = {}
        self.after: dict[str, Slot] = {}
        self._alone: dict[str, bool] = {}
        """By what is written: whether it is a single number that is computed from itself alone, or from such."""
        self.members: list[int] = []
        held = [(at, call) for at in inside if (call := calls[at]) is not None]
        read = {_held(slot) for _, call in held for slot in read_slots(call)}
        made: set[Hashable] = set()
        for at, call in held:
            outputs = [slot for slot in call.slots if slot.side == "output"]
            roles = {slot.role for slot in outputs if slot.role}
            elsewhere = self._writes_elsewhere(call, outputs, made) or (roles and roles <= only)
            if not elsewhere and _is_used(call, outputs, read):
                self.members.append(at)
                self._follow(call, outputs, made)
            made |= {_held(slot) for slot in outputs} - {None}

    def _follow(self, call: Call, outputs: Sequence[Slot], made: Set[Hashable]) -> None:
        for slot in read_slots(call):
            own = content_of(slot) in made  # zeros are everywhere, and have none
            if slot.role and slot.role not in self.after and not own:
                self.before.setdefault(slot.role, slot)
        for slot in outputs:
            if slot.role and not slot.role.startswith("gradient "):  # some use it up
                self.after[slot.role] = slot
        written = {slot.role for slot in outputs}
        alone = written == {slot.role for slot in read_slots(call)} and all(slot.count == 1 for slot in call.slots)
        self._alone |= {role: alone and self._alone.get(role, True) for role in written}

    def counters(self) -> set[str]:
        """Return the states that hold a single number which is computed from itself alone, as that of the steps."""
        return {role for role, alone in self._alone.items() if alone and " of " in role}

    @staticmethod
    def _writes_elsewhere(call: Call, outputs: Sequence[Slot], made: Set[Hashable]) -> bool:
        """Return whether a call changes a tensor that is no parameter, gradient or state, and that no call here has made."""
        name = short_name(call.op)
        if not name.endswith("_") or name.endswith("__"):
            return False
        slots = {slot.name: slot for slot in read_slots(call)}
        for slot in outputs:
            place = slot.name.removeprefix("output")
            old = slots.get(f"input{place}") or slots.get(f"input.0{place}")
            if not slot.role and old is not None and _held(old) not in made:
                return True
        return False


def _held(slot: Slot) -> Hashable:
    """Return what is known of the content of a slot. On some devices there is no digest, only statistics."""
    return slot.digest or slot.summary


def _is_used(call: Call, outputs: Sequence[Slot], read: set[Hashable]) -> bool:
    """Return whether a call leaves something in a tensor with a name, makes what another call reads, or computes nothing.

    The program may read a single number itself, such as the norm of a parameter.
    """
    quiet = Trait.VIEW | Trait.COPIES | Trait.ALLOCATES | Trait.MAY_DO_NOTHING
    used = any(slot.role or _held(slot) in read or slot.count == 1 for slot in outputs)
    return used or not outputs or has(call.op, quiet)


def _parts(ours: _Side, theirs: _Side, name: str) -> Iterator[tuple[Call, Call]]:
    """Yield two calls for each parameter that stand for what both optimizers do to it."""
    parameters: defaultdict[str, list[str]] = defaultdict(list)
    for role in ours.after:
        parameters[parameter_of(role)].append(role)
    for number, (parameter, written) in enumerate(parameters.items()):
        slots: tuple[list[Slot], list[Slot]] = ([], [])
        read = [role for role in ours.before if parameter_of(role) == parameter]
        held = [(f"input.{role}", ours.before[role], theirs.before.get(role)) for role in read]
        held += [(f"output.{role}", ours.after[role], theirs.after[role]) for role in written]
        for slot_name, *pair in held:
            if found := comparable(*pair):
                for side, slot in zip(slots, found, strict=True):
                    side.append(msgspec.structs.replace(slot, name=slot_name))
        module = parameter.rpartition(".")[0]
        one, other = (Call(name=name, module=module, repeat=number, slots=tuple(side)) for side in slots)
        yield one, other
