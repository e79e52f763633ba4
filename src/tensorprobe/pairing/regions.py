"""Find the places where two programs meet again, although they compute the part between with different calls.

In: the calls of one step of both sides, and their alignment. Out: regions. A region is a group of calls without a partner:
`matmul, softmax, matmul` in one run and `scaled_dot_product_attention` in the other, or a copy that only one run makes. It is
measured as one call: its inputs are what paired calls made, or read too; its outputs are what paired calls read next.

Content tells which call made what a call reads, inside each run by itself; no bit has to be equal on both sides. Which tensor
of the one run is compared with which of the other follows from the paired calls alone: a wrong tensor is compared where it is
read, and never moved to where it would fit. What a region writes in place, as optimizers do, is known by the paired tensors
that it was computed from.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence, Set
from functools import cached_property
from itertools import takewhile
from typing import NamedTuple

import msgspec

from tensorprobe.model import Call, Slot
from tensorprobe.model.reason import Skipped
from tensorprobe.ops import Trait, has, has_parts, module_path
from tensorprobe.pairing.call_pairs import (
    OPTIMIZER,
    CallPair,
    StandIn,
    comparable,
    content_of,
    forward_of,
    is_made,
    of_one_kind,
    read_slots,
)
from tensorprobe.pairing.lineage import Border, Side, computes_nothing, returns_what_it_got
from tensorprobe.pairing.written import Ends

Node = tuple[int, int]
"""A call: 0 for the baseline or 1 for the candidate, and its position."""


class Region(NamedTuple):
    """Calls without a partner that belong together. `pairs` has one entry for each direction that can be measured."""

    name: str
    members: tuple[list[int], list[int]]
    """Positions of the calls on both sides."""
    pairs: list[tuple[int, CallPair]]
    """The calls that stand for the region, each with the position of the pair before which it is measured."""
    idle: bool = False
    """Whether its random ops drew nothing: they returned what they were given, as dropout does with a rate of zero."""


def find_regions(
    calls: tuple[Sequence[Call | None], Sequence[Call | None]],
    pairs: Sequence[tuple[int, int]],
    alone: tuple[Sequence[int], Sequence[int]],
    lines: Sequence[int],
) -> list[Region]:
    """Return the regions among the calls without a partner; `lines` are those of the baseline's calls.

    Calls that are in none may belong to a neighbour: then the two are one region.
    """
    banned: set[Border] = set()
    for last in (False, False, False, True):
        search = _Search(calls, pairs, alone, lines, banned)
        regions = list(search.regions())
        between = search.around_the_rest()
        banned |= set(search._met[0].values()) if last else between
        if not between:
            return regions
    return list(_Search(calls, pairs, alone, lines, banned).regions())


def with_regions(pairs: Iterable[CallPair | Skipped], regions: Sequence[Region]) -> Iterator[CallPair | Skipped]:
    """Yield the pairs, with the calls that stand for regions among them."""
    waiting = sorted((each for region in regions for each in region.pairs), key=lambda each: each[0])
    number = at = 0
    for number, pair in enumerate(pairs):
        while at < len(waiting) and waiting[at][0] <= number:
            yield waiting[at][1]
            at += 1
        yield pair
    yield from (stand_in for _, stand_in in waiting[at:])


class _Search:
    def __init__(
        self,
        calls: tuple[Sequence[Call | None], Sequence[Call | None]],
        pairs: Sequence[tuple[int, int]],
        alone: tuple[Sequence[int], Sequence[int]],
        lines: Sequence[int],
        banned: Set[Border] = frozenset(),
    ) -> None:
        self._pairs, self._lines, self._banned = pairs, lines, banned
        self._rest: list[Node] = []
        """Calls without a region."""
        partners: tuple[dict[int, int], dict[int, int]] = ({}, {})
        for number, (ours, theirs) in enumerate(pairs):
            partners[0][ours] = partners[1][theirs] = number
        self._sides = [Side(*side) for side in zip(calls, partners, strict=True)]
        self._paired = [sorted(side) for side in partners]
        self._alone: set[Node] = {
            (at, position) for at, held in enumerate(alone) for position in held if self._sides[at].calls[position]
        }
        self._parent: dict[Node, Node] = {node: node for node in self._alone}
        self._out: defaultdict[Node, list[Border]] = defaultdict(list)
        """By the call without a partner that made it: where paired calls read it."""
        self._met: tuple[dict[Hashable, Border], dict[Hashable, Border]] = ({}, {})
        """Contents that calls without a partner made on both sides, and that a pair of calls reads: regions end there."""
        self._numbers: Counter[str] = Counter()

    def regions(self) -> Iterator[Region]:
        self._join_where_read()
        self._join_within_runs()
        self._join_where_made()
        self._join_neighbours(self._join_constants())
        groups: defaultdict[Node, list[Node]] = defaultdict(list)
        for node in sorted(self._alone):
            groups[self._root(node)].append(node)
        for members in sorted(groups.values(), key=self._order):
            if (region := self._region(members)) is not None:
                yield region
            else:
                self._rest += members

    def _order(self, members: list[Node]) -> tuple[int, list[str]]:
        """Return what sorts groups of calls alike, whichever run is the baseline: it numbers the regions."""
        return min(position for _, position in members), sorted(self._call(node).name for node in members)

    def around_the_rest(self) -> set[Border]:
        """Return the places where calls without a region meet their neighbours."""
        return {
            self._met[node[0]][content]
            for node in self._rest
            for slot in self._call(node).slots
            if (content := content_of(slot)) in self._met[node[0]]
        }

    # Which calls belong together

    def _root(self, node: Node) -> Node:
        while self._parent[node] != node:
            self._parent[node] = node = self._parent[self._parent[node]]
        return node

    def _join(self, one: Node, other: Node) -> None:
        one, other = self._root(one), self._root(other)
        self._parent[max(one, other)] = min(one, other)

    def _call(self, node: Node) -> Call:
        call = self._sides[node[0]].calls[node[1]]
        assert call is not None
        return call

    def _maker(self, node: Node, slot: Slot) -> Node | None:
        """Return the call without a partner that made what a call reads."""
        content = content_of(slot)
        made = None if content is None else self._sides[node[0]].maker(content, node[1])
        return (node[0], made) if made is not None and (node[0], made) in self._alone else None

    def _is_inside(self, node: Node, slot: Slot) -> bool:
        """Return whether a call of the same region made what a call reads."""
        maker = self._maker(node, slot)
        return maker is not None and (self._meeting(node, slot) is None or self._root(maker) == self._root(node))

    def _meeting(self, node: Node, slot: Slot) -> Border | None:
        """Return where both programs read what a call reads, if that was made for it: the same numbers may be made before."""
        content, side = content_of(slot), self._sides[node[0]]
        border = self._met[node[0]].get(content)
        if border is None or content is None:
            return None
        reader = self._pairs[border[0]][node[0]]
        return border if side.maker(content, node[1]) == side.maker(content, reader) else None

    def _join_within_runs(self) -> None:
        given: set[tuple[Node, Hashable]] = set()
        for node in sorted(self._alone):
            call, tables = self._call(node), self._sides[node[0]].tables
            table = any(is_made(call, slot) and content_of(slot) in tables for slot in call.slots)
            for slot in read_slots(call):
                maker, content = self._maker(node, slot), content_of(slot)
                if maker is None or self._meeting(node, slot) is not None:
                    continue
                if content in tables and not table:  # a mask that all layers read makes them no one region
                    if (maker, content) in given:
                        continue
                    given.add((maker, content))
                self._join(node, maker)
            for slot in call.slots:
                if is_made(call, slot) and (content := content_of(slot)) is not None:
                    again = self._sides[node[0]].made_again(content, node[1])
                    if again is not None and (node[0], again) in self._alone:
                        self._join(node, (node[0], again))
                    if has_parts(call.op) and (inside := self._maker(node, slot)) is not None:
                        self._join(node, inside)
            forward = self._sides[node[0]].positions.get(forward_of(call))
            if forward is not None and (node[0], forward) in self._alone:
                self._join(node, (node[0], forward))

    def _join_where_read(self) -> None:
        """Join calls of both runs that made what a pair of calls reads in the same slot: there the programs meet."""
        meetings: dict[tuple[Hashable, Hashable], Border] = {}
        for number, pair in enumerate(self._pairs):
            calls = [self._sides[at].calls[position] for at, position in enumerate(pair)]
            if None in calls:
                continue
            found: defaultdict[str, list[Node]] = defaultdict(list)
            for at, (position, call) in enumerate(zip(pair, calls, strict=True)):
                assert call is not None
                for slot in read_slots(call):
                    if (maker := self._maker((at, position), slot)) is not None:
                        found[slot.name].append(maker)
            for name, makers in found.items():
                for maker in makers:
                    self._out[maker].append((number, name))
                    self._join(makers[0], maker)
                if len({maker[0] for maker in makers}) == 2 and (slots := self._slots((number, name))) is not None:
                    meetings.setdefault((content_of(slots[0]), content_of(slots[1])), (number, name))
        counts = [Counter(pair[at] for pair in meetings) for at in (0, 1)]
        for contents, border in meetings.items():
            for at, met in enumerate(self._met):
                if counts[0][contents[0]] == counts[1][contents[1]] == 1 and border not in self._banned:
                    met[contents[at]] = border

    def _join_where_made(self) -> None:
        """Join groups of one run with groups of the other that read the same tensors of paired calls."""
        sides: defaultdict[Node, set[int]] = defaultdict(set)
        for node in self._alone:
            sides[self._root(node)].add(node[0])
        readers: defaultdict[Border, tuple[list[Node], list[Node]]] = defaultdict(lambda: ([], []))
        for node in self._alone:
            if len(sides[self._root(node)]) == 1:
                for slot in read_slots(self._call(node)):
                    if (border := self._border(node, slot)) is not None:
                        readers[border][node[0]].append(node)
        for ours, theirs in readers.values():
            if ours and theirs:
                for node in (*ours, *theirs):
                    self._join(ours[0], node)

    def _join_neighbours(self, joined: Set[Node]) -> None:
        """Join calls that lead nowhere, and are not `joined` yet, with the calls before and after them.

        Those are calls on constants alone, such as counters of steps, and results in generated code that nothing reads.
        """
        for node in sorted(self._alone):
            call = self._call(node)
            contents = [content_of(slot) for slot in call.slots]
            made = [content_of(slot) for slot in call.slots if is_made(call, slot)]
            unread = call.op.startswith("Ops.") and not any(map(self._sides[node[0]].readers, made))
            if unread or not (node in joined or any(content is not None for content in contents)):
                for near in ((node[0], node[1] - 1), (node[0], node[1] + 1)):
                    if near in self._alone:
                        self._join(node, near)

    def _join_constants(self) -> set[Node]:
        """Join calls that made the same number everywhere, as an empty mask, with the next call that reads such a tensor.

        Return those calls.
        """
        joined: set[Node] = set()
        waiting: defaultdict[Hashable, list[Node]] = defaultdict(list)
        for node in sorted(self._alone):
            call = self._call(node)
            if call.phase == OPTIMIZER or node[1] in self._sides[node[0]].backwards:
                continue
            for slot in read_slots(call):
                for maker in waiting.pop((node[0], slot.digest, slot.shape), ()):
                    self._join(node, maker)
                    joined.add(maker)
            made = [slot for slot in call.slots if is_made(call, slot) and slot.digest]
            if not any(content_of(slot) for slot in made):
                for slot in made:
                    waiting[node[0], slot.digest, slot.shape].append(node)
        return joined

    def _border(self, node: Node, slot: Slot) -> Border | None:
        content = content_of(slot)
        if (met := self._meeting(node, slot)) is not None and self._maker(
            node, slot
        ) is not None:  # it is not made later
            return met
        return None if content is None else self._sides[node[0]].border(content, node[1])

    # What a region reads and makes

    def _region(self, members: list[Node]) -> Region | None:
        way: dict[bool, list[Node]] = {False: [], True: []}
        for node in members:
            way[node[1] in self._sides[node[0]].backwards].append(node)
        forward, backward = way.values()
        module = _common_path([self._call(node).module for node in members])
        op = f"Region.{module}" if module else "Region"
        while any(f"{op}.{self._numbers[op]}.forward" in side.positions for side in self._sides):
            self._numbers[op] += 1  # a file may hold any name
        name = f"{op}.{self._numbers[op]}"
        pairs: list[tuple[int, CallPair]] = []
        inputs = self._inputs(forward)
        ends = [
            Ends(side, [node[1] for node in forward if node[0] == at]).by_sources for at, side in enumerate(self._sides)
        ]
        results = self._results(forward) + self._written(*ends)
        if results:
            pairs.append(self._stand_in(f"{name}.forward", module, forward, inputs, results))
        gradients = self._gradients(forward, backward, list(inputs))
        if gradients:
            read = self._inputs(backward) | self._received(forward, backward)
            pairs.append(self._stand_in(f"{name}.backward", module, backward, read, gradients))
        if not pairs and not all(computes_nothing(self._call(node)) or self._is_enclosed(node) for node in members):
            return None
        if not pairs and not self._makes_same_gradients(members):
            return None
        compared = {content_of(slot) for result in results for slot in (result.baseline, result.candidate)}
        if any(content_of(slot) not in compared for end in ends for slots in end.values() for slot in slots):
            return None  # a side writes what cannot be compared
        self._numbers[op] += 1
        positions = tuple([node[1] for node in members if node[0] == at] for at in (0, 1))
        drawing = [call for call in map(self._call, members) if has(call.op, Trait.RANDOM)]
        return Region(name, (positions[0], positions[1]), pairs, idle=all(map(returns_what_it_got, drawing)))

    def _is_enclosed(self, node: Node) -> bool:
        """Return whether a call of a module is made inside a module that both programs call: what that makes is compared."""
        call = self._call(node)
        path = module_path(call.op) if call.level.is_module else ""
        while path:
            path = path.rpartition(".")[0]
            if (call.direction, path) in self._modules:
                return True
        return False

    def _makes_same_gradients(self, members: Sequence[Node]) -> bool:
        """Return whether gradients of parameters, which no module around shows, are known of one side only, or the same."""
        made: tuple[Counter[Hashable], Counter[Hashable]] = (Counter(), Counter())
        for node in members:
            for slot in self._call(node).slots:
                if slot.side == "parameters" and self._call(node).direction == "backward":
                    made[node[0]][slot.shape, slot.digest or (node, slot.name)] += 1
        return not all(made) or made[0] == made[1]

    @cached_property
    def _modules(self) -> set[tuple[str, str]]:
        """The modules of which calls are paired, with the direction of these."""
        calls = (self._sides[0].calls[pair[0]] for pair in self._pairs)
        return {(call.direction, module_path(call.op)) for call in calls if call is not None and call.level.is_module}

    def _slots(self, border: Border, *, read: bool = False) -> tuple[Slot, Slot] | None:
        """Return what both sides hold at a border, if that can be compared. What is read may be narrower on one side."""
        calls = [self._sides[at].calls[position] for at, position in enumerate(self._pairs[border[0]])]
        found = [
            next((slot for slot in call.slots if slot.name == border[1]), None) for call in calls if call is not None
        ]
        if len(found) != 2:
            return None
        ours, theirs = found
        if read and ours and theirs and ours.shape == theirs.shape and of_one_kind(ours, theirs):
            return ours, theirs
        return comparable(ours, theirs)

    def _inputs(self, nodes: Sequence[Node]) -> dict[Border, tuple[Slot, Slot]]:
        found: dict[Border, tuple[Slot, Slot]] = {}
        parameters: defaultdict[str, dict[int, Slot]] = defaultdict(dict)
        for node in nodes:
            for slot in read_slots(self._call(node)):
                if self._is_inside(node, slot):
                    continue
                border = self._border(node, slot)
                if border is not None and border not in found and (slots := self._slots(border, read=True)) is not None:
                    found[border] = slots
                elif border is None and slot.role:
                    parameters[slot.role].setdefault(node[0], slot)
        for role, sides in parameters.items():  # no paired call reads it
            if (slots := comparable(sides.get(0), sides.get(1))) is not None:
                found[-1, role] = slots
        return found

    def _results(self, nodes: Sequence[Node]) -> list[_Result]:
        """Return what paired calls read of what these calls made, each pair of tensors once."""
        found: dict[Hashable, _Result] = {}
        for border in sorted({border for node in nodes for border in self._out[node]}):
            if (slots := self._slots(border)) is not None:
                key = (content_of(slots[0]), content_of(slots[1]))
                found.setdefault(key, _Result(border[0], *slots))
        return list(found.values())

    def _written(self, ours: dict[Hashable, list[Slot]], theirs: dict[Hashable, list[Slot]]) -> list[_Result]:
        """Return what is left in tensors that both sides of the region write in place."""
        return [
            _Result(len(self._pairs), one, other)
            for sources, left in ours.items()
            if sources is not None and len(left) == len(right := theirs.get(sources, []))
            for one, other in zip(left, right, strict=True)
            if comparable(one, other)
        ]

    def _gradients(self, forward: Sequence[Node], backward: Sequence[Node], inputs: list[Border]) -> list[_Result]:
        """Return what the backward of a region makes: gradients that paired calls read, and those of its inputs."""
        results = self._results(backward)
        known = {content_of(result.baseline) for result in results}
        parts: defaultdict[Border, tuple[list[Slot], list[Slot]]] = defaultdict(lambda: ([], []))
        backwards = {(node[0], forward_of(self._call(node))): node for node in backward}
        for node in forward:
            call = self._call(node)
            own = backwards.get((node[0], call.name))
            made = {} if own is None else {slot.name: slot for slot in self._call(own).slots}
            for slot in read_slots(call):
                name = slot.name if slot.side == "parameters" else f"output{slot.name.removeprefix('input')}"
                border = None if self._is_inside(node, slot) else self._border(node, slot)
                if border is not None and name in made:
                    parts[border][node[0]].append(made[name])
        for border, (ours, theirs) in parts.items():
            # Several gradients of one input are added up by autograd, which no call shows.
            if len(ours) == len(theirs) == 1 and ours[0].shape == theirs[0].shape and border in inputs:
                number = inputs.index(border)
                at = next(
                    (at for at, one in enumerate(results) if content_of(one.baseline) == content_of(ours[0])), None
                )
                if at is not None:
                    results[at] = results[at]._replace(number=number)
                elif content_of(ours[0]) not in known:
                    results.append(_Result(len(self._pairs), ours[0], theirs[0], number))
        return results

    def _received(self, forward: Sequence[Node], backward: Sequence[Node]) -> dict[Border, tuple[Slot, Slot]]:
        """Return the gradients of what the region makes that no call made: autograd adds them up."""
        backwards = {(node[0], forward_of(self._call(node))): node for node in backward}
        found: defaultdict[Border, dict[int, Slot]] = defaultdict(dict)
        for node in forward:
            own = backwards.get((node[0], self._call(node).name))
            received = {} if own is None else {slot.name: slot for slot in read_slots(self._call(own))}
            for slot in self._call(node).slots:
                border = self._met[node[0]].get(content_of(slot)) if is_made(self._call(node), slot) else None
                gradient = received.get(f"input{slot.name.removeprefix('output')}")
                if border is None or gradient is None or own is None or (content := content_of(gradient)) is None:
                    continue
                if self._sides[node[0]].maker(content, own[1]) is None:
                    found[border].setdefault(node[0], gradient)
        return {
            (border[0], f"gradient of {border[1]}"): slots
            for border, sides in found.items()
            if (slots := comparable(sides.get(0), sides.get(1))) is not None
        }

    def _stand_in(
        self,
        name: str,
        module: str,
        nodes: Sequence[Node],
        inputs: dict[Border, tuple[Slot, Slot]],
        results: list[_Result],
    ) -> tuple[int, CallPair]:
        """Return two calls that stand for the region, and the position of the pair before which they are measured."""
        before = min(result.before for result in results)
        if before == len(self._pairs):
            before = self._pairs_before(nodes)
        taken = {result.number for result in results}
        free = (number for number in range(len(inputs), len(inputs) + len(results)) if number not in taken)
        slots: tuple[list[Slot], list[Slot]] = ([], [])
        named = [(f"input.{number}", *pair) for number, pair in enumerate(inputs.values())]
        named += [
            (f"output.{next(free) if result.number is None else result.number}", result.baseline, result.candidate)
            for result in results
        ]
        for slot_name, *pair in named:
            for held, slot in zip(slots, pair, strict=True):
                held.append(msgspec.structs.replace(slot, name=slot_name))
        first: list[Call | None] = [
            next((self._call(node) for node in sorted(nodes) if node[0] == at), None) for at in (0, 1)
        ]
        ours, theirs = (
            Call(name=name, module=module, stack=None if call is None else call.stack, slots=tuple(held))
            for call, held in zip(first, slots, strict=True)
        )
        positions = [position for at, position in nodes if at == 0]
        near = self._pairs[min(before, len(self._pairs) - 1)][0]
        return before, StandIn(self._lines[min(positions, default=near)], ours, theirs)

    def _pairs_before(self, nodes: Iterable[Node]) -> int:
        """Return how many pairs stand before the last of these calls."""
        at, last = max(nodes)
        return bisect_left(self._paired[at], last)


class _Result(NamedTuple):
    """What a region makes, on both sides, and the first pair of calls that reads it."""

    before: int
    baseline: Slot
    candidate: Slot
    number: int | None = None


def _common_path(paths: Sequence[str]) -> str:
    """Return the innermost module that holds all of these."""
    parts = [path.split(".") for path in paths]
    return ".".join(each[0] for each in takewhile(lambda each: len(set(each)) == 1, zip(*parts, strict=False)))
