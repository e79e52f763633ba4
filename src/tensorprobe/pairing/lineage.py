"""Who made and who reads each tensor in one run, and which pairs of calls contradict that.

Content tells which call made what a call reads, inside each run by itself. Two calls of one op and one shape may be no pair: the
`mul` of a gate in one run, and of an activation in the other. Then they are computed from different tensors.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Sequence
from functools import cached_property

from tensorprobe.model import Call, Slot
from tensorprobe.ops import Trait, has, has_parts, plain_name
from tensorprobe.pairing.call_pairs import (
    OPTIMIZER,
    content_of,
    forward_of,
    is_made,
    of_one_kind,
    pair_slots,
    read_slots,
)

Border = tuple[int, str]
"""A slot of a pair of calls: the position of the pair, and the name of the slot."""
Pairs = Sequence[tuple[int, int]]
Calls = tuple[Sequence[Call | None], Sequence[Call | None]]
_MOST_SOURCES = 64
"""A call without a partner that is computed from more tensors is not looked at."""
_LONGEST_CHAIN = 8
"""Views of views of views that are looked at."""
_MOVING = frozenset("reshape view_as flatten expand expand_as __getitem__ getitem cat stack repeat roll".split())


class Side:
    """Who made and who reads each content in one run."""

    def __init__(self, calls: Sequence[Call | None], partner: dict[int, int]) -> None:
        self.calls, self.partner = calls, partner
        self.positions: dict[str, int] = {}
        self.tables: set[Hashable] = set()
        """Contents that are computed from constants and buffers alone, such as masks and tables of sines."""
        self._makers: defaultdict[Hashable, list[int]] = defaultdict(list)
        self._readers: defaultdict[Hashable, list[int]] = defaultdict(list)
        for position, call in enumerate(calls):
            if call is None:
                continue
            if not call.repeat:
                self.positions.setdefault(call.name, position)
            inner = has_parts(call.op) and position not in partner
            for slot in call.slots:
                if (content := content_of(slot)) is not None:
                    made = is_made(call, slot)
                    if not (made and inner and content in self._makers):  # a call inside made it
                        (self._makers if made else self._readers)[content].append(position)
            if self._is_table(call):
                self.tables.update(content_of(slot) for slot in call.slots if is_made(call, slot))

    def _is_table(self, call: Call) -> bool:
        constant = call.direction == "forward" and not has(call.op, Trait.RANDOM) and call.phase != OPTIMIZER
        return constant and all(
            slot.role.startswith("buffer ") or content in self.tables or (content is None and not slot.skipped)
            for slot in read_slots(call)
            for content in [content_of(slot)]
        )

    @cached_property
    def backwards(self) -> set[int]:
        """The calls of the backward pass: those that are named so, and forward calls in it that compute from their results.

        Compiled code and the backward of a function of the program make such calls.
        """
        named = {at for at, call in enumerate(self.calls) if call is not None and call.direction == "backward"}
        last, found = max(named, default=-1), set(named)
        for at, call in enumerate(self.calls):
            inside = call is not None and call.phase != OPTIMIZER and (at < last or call.op.startswith("Ops."))
            if inside and call is not None and at not in named:
                contents = (content_of(slot) for slot in read_slots(call))
                if any(content is not None and self.maker(content, at) in found for content in contents):
                    found.add(at)
        return found

    def maker(self, content: Hashable, before: int) -> int | None:
        """Return the last call before this one that made the content."""
        made = self._makers.get(content, ())
        at = bisect_left(made, before)
        return made[at - 1] if at else None

    def made_again(self, content: Hashable, at: int) -> int | None:
        """Return the next call that makes the content again, if no call reads it before."""
        made, read = self._makers.get(content, ()), self._readers.get(content, ())
        later = bisect_left(made, at + 1)
        if later == len(made):
            return None
        return None if bisect_left(read, at + 1) < bisect_left(read, made[later] + 1) else made[later]

    def readers(self, content: Hashable) -> list[int]:
        """Return the calls that read the content."""
        return self._readers.get(content, [])

    def border(self, content: Hashable, before: int, *, made: bool = False) -> Border | None:
        """Return the pair of calls that made a content, or else, unless it must be `made`, the first one that reads it.

        What a call makes later is read later, and not what is looked for.
        """
        position = self.maker(content, before)
        if reads := position is None and not made:
            end = len(self.calls) if content not in self._makers else before
            held = (each for each in self._readers.get(content, ()) if each < end and each in self.partner)
            position = next(held, None)
        if position is None or position not in self.partner:
            return None
        call = self.calls[position]
        assert call is not None
        slot = next(slot for slot in call.slots if is_made(call, slot) != reads and content_of(slot) == content)
        return self.partner[position], slot.name


def unlike_pairs(
    calls: tuple[Sequence[Call | None], Sequence[Call | None]], pairs: Sequence[tuple[int, int]]
) -> set[tuple[int, int]]:
    """Return the pairs of calls with other tensors, or tensors of other shapes or kinds, with the pairs of their other direction."""
    found: set[tuple[int, int]] = set()
    stems = set()
    for pair in pairs:
        ours, theirs = calls[0][pair[0]], calls[1][pair[1]]
        if ours is None or theirs is None:
            continue
        held, *only = pair_slots(ours, theirs)
        other_inputs = ours.direction == "forward" and any(name.startswith("input.") for side in only for name in side)
        # A tensor of which only its place is known has neither dtype nor shape.
        if other_inputs or any(
            one.shape != other.shape or not of_one_kind(one, other) for one, other in held if one.dtype and other.dtype
        ):
            found.add(pair)
            stems.add(_stem(ours))
    if found:
        found |= {pair for pair in pairs if (call := calls[0][pair[0]]) is not None and _stem(call) in stems}
    return found


def _stem(call: Call) -> str:
    """Return what a call and its backward have in common."""
    return forward_of(call) or call.name


def mismatched_pairs(
    calls: Calls, pairs: Pairs, alone: tuple[Sequence[int], Sequence[int]], without: set[tuple[int, int]]
) -> set[tuple[int, int]]:
    """Return the pairs of calls that are computed from other tensors on the two sides, besides those in `without`.

    What follows from such a pair is looked at without it. If that takes all calls to the end apart, the programs are wired
    differently: then a pair is left together whose sources differ by what differed before.
    """
    left = [pair for pair in pairs if pair not in without]
    for forgiving in (False, True):
        sweep = _Sweep(calls, left, alone, without)
        found = sweep.run(forgiving=forgiving)
        last = max((pair for pair in left if _is_of_model(calls[0][pair[0]])), default=None)
        if last not in found:
            break
    found |= sweep.inner_views([pair for pair in left if pair not in found])
    found |= {p for p in left if p not in found and (sweep.takes_another_part(p) or sweep.makes_another_table(p))}
    return with_backwards(calls, left, found)


def with_backwards(calls: Calls, pairs: Pairs, found: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """Return these pairs, and those of their other direction."""
    stems = {_stem(call) for pair in found if (call := calls[0][pair[0]]) is not None}
    return {pair for pair in pairs if (call := calls[0][pair[0]]) is not None and _stem(call) in stems}


def _is_of_model(call: Call | None) -> bool:
    """Return whether a call computes from its inputs alone: forward calls, and ATen ops in backward."""
    if call is None or call.phase == "optimizer":
        return False
    return call.direction == "forward" or not call.level.links_backward


class _Sweep:
    """Goes through the pairs in order, and takes those apart that are computed from other tensors."""

    def __init__(
        self,
        calls: Calls,
        pairs: Pairs,
        alone: tuple[Sequence[int], Sequence[int]],
        without: set[tuple[int, int]],
    ) -> None:
        self._pairs = pairs
        self._calls = calls
        roles = set.intersection(
            *({slot.role for call in held if call is not None for slot in call.slots} - {""} for held in calls)
        )
        self._sides = [
            _Sources(
                Side(held, {pair[at]: number for number, pair in enumerate(pairs)}),
                {*alone[at], *(pair[at] for pair in without)},
                roles,
            )
            for at, held in enumerate(calls)
        ]

    def run(self, *, forgiving: bool) -> set[tuple[int, int]]:
        """Return the pairs that are taken apart. `forgiving`: not for a difference that was there before."""
        found: set[tuple[int, int]] = set()
        known: set[Hashable] = set()
        for pair in self._pairs:
            if not _is_of_model(self._calls[0][pair[0]]):
                continue
            ours, theirs = (side.of_call(position) for side, position in zip(self._sides, pair, strict=True))
            apart: set[Hashable] = set()
            for name, (sources, is_border) in ours.items():
                others, others_are = theirs.get(name, (None, False))
                if sources is not None and others is not None and sources != others:
                    if forgiving and is_border != others_are:
                        known |= sources ^ others  # one side computes more before: that is what differs
                    apart |= sources ^ others
            if apart and not (forgiving and apart <= known):
                known |= apart
                found.add(pair)
                for side, position in zip(self._sides, pair, strict=True):
                    side.alone.add(position)
        return found

    def inner_views(self, pairs: Pairs) -> set[tuple[int, int]]:
        """Return the pairs of views and copies among calls without a partner: nothing says which belongs to which."""
        views = [
            pair
            for pair in pairs
            if (call := self._calls[0][pair[0]]) and self._calls[1][pair[1]] and _is_of_model(call) and only_moves(call)
        ]
        found: set[tuple[int, int]] = set()
        for _ in range(_LONGEST_CHAIN):
            inner = {p for p in views if p not in found and (self._is_inner(p) or self._joins_other_parts(p))}
            if not inner:
                break
            found |= inner
            for at, side in enumerate(self._sides):
                side.alone.update(pair[at] for pair in inner)
        return found

    def _is_inner(self, pair: tuple[int, int]) -> bool:
        for side, position in zip(self._sides, pair, strict=True):
            call = side.side.calls[position]
            assert call is not None
            for slot in call.slots:
                content = content_of(slot)
                if content is None or slot.role:
                    return False
                if is_made(call, slot):
                    readers = [each for each in side.side.readers(content) if each != position]
                    if not side.alone.issuperset(readers) or not (readers or plain_name(call.op) == "detach"):
                        return False  # what nobody reads may be the result of the program
                elif side.side.maker(content, position) not in side.alone:
                    return False
        return True

    def _joins_other_parts(self, pair: tuple[int, int]) -> bool:
        """Return whether calls without a partner made a part of what is put together on both sides, and another on one only."""
        ours, theirs = (
            {slot.name: side.side.maker(content_of(slot), position) in side.alone for slot in read_slots(call)}
            for side, position in zip(self._sides, pair, strict=True)
            if (call := side.side.calls[position]) is not None
        )
        made = [{alone, theirs[name]} for name, alone in ours.items() if name in theirs]
        return {True} in made and {True, False} in made

    def takes_another_part(self, pair: tuple[int, int]) -> bool:
        """Return whether two views lead into calls without a partner, and show other parts, or get other gradients.

        They show other parts if their arguments differ, and nothing else reads them. The gradients that come back through
        them are other parts of the gradient if calls without a partner read the whole tensor in one run only.
        """
        around: list[bool] = []
        inner = True
        for side, position in zip(self._sides, pair, strict=True):
            call = side.side.calls[position]
            if call is None or not _is_of_model(call) or not only_moves(call):
                return False
            made = [content for slot in call.slots if is_made(call, slot) and (content := content_of(slot)) is not None]
            readers = {each for content in made for each in side.side.readers(content)} - {position}
            if not readers & side.alone:
                return False
            inner = inner and readers <= side.alone
            read = [content for slot in read_slots(call) if (content := content_of(slot)) is not None]
            beside = {each for content in read for each in side.side.readers(content)} & side.alone
            # A view of all of it has the same content, and may be what this view is made of.
            around.append(any((other := side.side.calls[each]) and not only_moves(other) for each in beside))
        ours, theirs = self._calls[0][pair[0]], self._calls[1][pair[1]]
        unlike = ours is not None and theirs is not None and ours.args != theirs.args
        return (inner and unlike) or around[0] != around[1]

    def makes_another_table(self, pair: tuple[int, int]) -> bool:
        """Return whether two calls make numbers from other arguments and constants alone, and no pair reads both results."""
        ours, theirs = self._calls[0][pair[0]], self._calls[1][pair[1]]
        if ours is None or theirs is None or not _is_of_model(ours) or ours.args == theirs.args:
            return False
        read: list[set[int]] = []
        for side, call in zip(self._sides, (ours, theirs), strict=True):
            made = [content_of(slot) for slot in call.slots if is_made(call, slot)]
            if not made or not side.side.tables.issuperset(made):
                return False
            readers = {each for content in made for each in side.side.readers(content)} - side.alone
            read.append({number for each in readers if (number := side.side.partner.get(each)) is not None})
        return not read[0] & read[1]


class _Sources:
    """From which tensors of paired calls the calls of one run are computed, through calls without a partner and copies."""

    def __init__(self, side: Side, alone: set[int], roles: set[str]) -> None:
        self.alone = alone
        self.side, self._roles = side, roles
        self._made: dict[int, frozenset[Hashable] | None] = {}
        self._next = 0

    def of_call(self, position: int) -> dict[str, tuple[frozenset[Hashable] | None, bool]]:
        """Return the sources of each tensor that a call reads, and whether that is what a paired call made.

        None stands for unknown sources. Ask in the order of the calls.
        """
        while self._next < position:
            if (before := self.side.calls[self._next]) is not None and (self._next in self.alone or only_moves(before)):
                self._made[self._next] = self._union(before)
            self._next += 1
        call = self.side.calls[position]
        if call is None:
            return {}
        return {
            slot.name: (self._of_slot(slot, position), self._is_border(slot, position)) for slot in read_slots(call)
        }

    def _is_border(self, slot: Slot, position: int) -> bool:
        content = content_of(slot)
        return content is not None and self.side.maker(content, position) not in self.alone

    def _union(self, call: Call) -> frozenset[Hashable] | None:
        parts = [self._of_slot(slot, self._next) for slot in read_slots(call)]
        known = [part for part in parts if part is not None]
        total = frozenset[Hashable]().union(*known)
        return total if len(known) == len(parts) and len(total) <= _MOST_SOURCES else None

    def _of_slot(self, slot: Slot, position: int) -> frozenset[Hashable] | None:
        if slot.role in self._roles:
            return frozenset([slot.role])
        if slot.skipped:
            return None
        if (content := content_of(slot)) is None:
            return frozenset()
        maker = self.side.maker(content, position)
        if maker in self._made:
            return self._made[maker]
        if content in self.side.tables:
            return frozenset()  # which calls are paired for it says nothing
        border = self.side.border(content, position, made=True)
        return None if border is None else frozenset([border])


def only_moves(call: Call) -> bool:
    return has(call.op, Trait.VIEW | Trait.COPIES | Trait.MAY_DO_NOTHING) or plain_name(call.op) in _MOVING


def computes_nothing(call: Call) -> bool:
    """Return whether a call copies numbers, shows or converts them without a loss, or makes a constant from nothing."""
    if (
        len(call.slots) == 2
        and len({slot.dtype for slot in call.slots}) == len({slot.side for slot in call.slots}) == 2
    ):
        one, other = call.slots
        return one.shape == other.shape and one.summary is not None and one.summary == other.summary
    return only_moves(call) or has(call.op, Trait.ALLOCATES)


def returns_what_it_got(call: Call) -> bool:
    """Return whether a random op drew nothing, as dropout with a rate of zero."""
    read = {content_of(slot) for slot in read_slots(call)} - {None}
    return all(content_of(slot) in read for slot in call.slots if is_made(call, slot))
