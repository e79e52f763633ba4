"""Find the pairs of calls between a factor that one program applies before a product, and the other one elsewhere around it.

In: the calls of one step of both sides, their pairs and the regions. Out: pairs to take apart. `(q * s) @ k`, `(q @ k) * s` and
`q @ (k * s)` have the same product by name, but not by value: the two programs do not meet between a region that scales in one
run only and that product. Only the calls decide it, never a value; what lies around is one region, and what it makes is compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tensorprobe.model import Call
from tensorprobe.ops import Trait, has, plain_name
from tensorprobe.pairing.call_pairs import content_of, is_made, read_slots
from tensorprobe.pairing.lineage import Calls, Pairs, Side, computes_nothing, only_moves, with_backwards

_SCALING = frozenset("mul multiply div divide true_divide truediv rmul rtruediv rdiv neg".split())
_LONGEST_CHAIN = 8
"""Views and copies between a region and the product that are looked at."""

Members = tuple[list[int], list[int]]


def commuting_pairs(calls: Calls, pairs: Pairs, members: Sequence[Members]) -> set[tuple[int, int]]:
    """Return the pairs to take apart; `members` are the positions of the calls of each region on both sides."""
    search = _Search(calls, pairs, members)
    found = {pair for number in range(len(members)) for pair in search.around(number)}
    return with_backwards(calls, pairs, found)


class _Search:
    def __init__(self, calls: Calls, pairs: Pairs, members: Sequence[Members]) -> None:
        self._pairs = pairs
        self._sides = [
            Side(held, {pair[at]: number for number, pair in enumerate(pairs)}) for at, held in enumerate(calls)
        ]
        self._members = members
        self._computing = [
            [
                [call for call in self._calls(at, positions) if not computes_nothing(call)]
                for at, positions in enumerate(one)
            ]
            for one in members
        ]
        self._region_of = [
            {position: number for number, one in enumerate(members) for position in one[at]} for at in (0, 1)
        ]

    def _calls(self, at: int, positions: Sequence[int]) -> list[Call]:
        """Return the forward calls among these."""
        held = (self._sides[at].calls[each] for each in positions if each not in self._sides[at].backwards)
        return [call for call in held if call is not None]

    def around(self, number: int) -> Iterator[tuple[int, int]]:
        """Yield the pairs between a region that only scales, in one run only, and those on the other side of a product."""
        ours, theirs = self._computing[number]
        if bool(ours) == bool(theirs) or not all(plain_name(call.op) in _SCALING for call in (*ours, *theirs)):
            return
        at = 0 if ours else 1
        for down in (True, False):
            for position in self._members[number][at]:
                for chain in self._chains(at, position, down=down):
                    last = self._pairs[chain[-1]]
                    for side in (0, 1):
                        # The factor may be in what the product becomes, or in its other operand.
                        for way in (True, False) if down else (False,):
                            for other, views in self._regions(side, last[side], down=way):
                                if other != number and self._computing[other][1 - at]:
                                    yield from (self._pairs[each] for each in (*chain, *views))

    def _chains(self, at: int, position: int, *, down: bool) -> Iterator[list[int]]:
        """Yield the pairs from a call to each product that only views and copies lie before."""
        waiting: list[tuple[int, list[int]]] = [(position, [])]
        while waiting:
            here, chain = waiting.pop()
            for each in self._next(at, here, down=down):
                pair, call = self._sides[at].partner.get(each), self._sides[at].calls[each]
                if pair is None or call is None or pair in chain or each in self._sides[at].backwards:
                    continue
                if only_moves(call) and len(chain) < _LONGEST_CHAIN:
                    waiting.append((each, [*chain, pair]))
                elif _is_product(call):
                    yield [*chain, pair]

    def _regions(self, at: int, position: int, *, down: bool) -> Iterator[tuple[int, list[int]]]:
        """Yield the regions next to a call, and the pairs of views and copies between."""
        waiting: list[tuple[int, list[int]]] = [(position, [])]
        while waiting:
            here, views = waiting.pop()
            for each in self._next(at, here, down=down):
                pair, call = self._sides[at].partner.get(each), self._sides[at].calls[each]
                if (region := self._region_of[at].get(each)) is not None:
                    yield region, views
                elif pair is not None and call is not None and only_moves(call) and len(views) < _LONGEST_CHAIN:
                    waiting.append((each, [*views, pair]))

    def _next(self, at: int, position: int, *, down: bool) -> Iterator[int]:
        """Yield the calls that read what a call makes, or those that made what it reads."""
        side = self._sides[at]
        call = side.calls[position]
        if call is None:
            return
        for slot in call.slots if down else read_slots(call):
            if (content := content_of(slot)) is None or is_made(call, slot) != down:
                continue
            if down:
                yield from (each for each in side.readers(content) if each > position)
            elif (made := side.maker(content, position)) is not None:
                yield made


def _is_product(call: Call) -> bool:
    """Return whether a call multiplies tensors, or divides one by another."""
    if plain_name(call.op) in _SCALING:
        return sum(slot.count > 1 for slot in read_slots(call)) > 1
    return has(call.op, Trait.MULTIPLIES)
