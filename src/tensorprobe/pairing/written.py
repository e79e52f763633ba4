"""Find what a region leaves in tensors that it writes in place, as optimizers and buffers are written.

In: the calls of one side of a region. Out: the last content of each such tensor, by its name or by what it was computed from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from functools import cached_property

from tensorprobe.model import Call, Slot
from tensorprobe.ops import short_name
from tensorprobe.pairing.call_pairs import OPTIMIZER, content_of, is_made, read_slots
from tensorprobe.pairing.lineage import Border, Side


class Ends:
    """What one side of a region leaves in tensors that it writes in place. `positions` are those of its forward calls, in order."""

    def __init__(self, side: Side, positions: Sequence[int]) -> None:
        self._side = side
        self._sources: dict[Hashable, frozenset[Border]] = {}
        self._begun: dict[Hashable, Hashable] = {}
        """Written content → what is known of the tensor that it was written to."""
        self._last: dict[Hashable, Slot] = {}
        for position in positions:
            if (call := side.calls[position]) is not None:
                self._follow(call, position)

    @cached_property
    def by_sources(self) -> dict[Hashable, list[Slot]]:
        """What is left, by the name of the tensor or by what it was computed from, in the order in which it was made.

        What neither tells apart stands under None: it cannot be compared.
        """
        found: defaultdict[Hashable, list[Slot]] = defaultdict(list)
        for content, slot in self._last.items():
            sources, begun = self._sources[content], self._begun[content]
            known: Hashable = slot.role or ((sources, begun, slot.shape, slot.dtype) if sources or begun else None)
            found[known].append(slot)
        return found

    def _follow(self, call: Call, position: int) -> None:
        name = short_name(call.op)
        lists = name.startswith(("_foreach_", "_fused_"))
        writes = name.endswith("_") and not name.endswith("__")
        read: defaultdict[str, set[Border]] = defaultdict(set)
        before: dict[str, Slot] = {}
        for slot in read_slots(call):
            content = content_of(slot)
            place = slot.name.rpartition(".")[2] if lists else ""
            if content in self._sources:
                read[place] |= self._sources[content]
            elif content is not None and (border := self._side.border(content, position, made=True)) is not None:
                read[place].add(border)
            before[slot.name] = slot
        for slot in call.slots:
            content = content_of(slot)
            if not is_made(call, slot) or content is None:
                continue
            place = slot.name.rpartition(".")[2] if lists else ""
            self._sources[content] = frozenset(read[place])
            suffix = slot.name.removeprefix("output")
            changed = suffix.startswith(".changed.")
            suffix = suffix.removeprefix(".changed")
            old = before.get(f"input{suffix}") or (before.get(f"input.0{suffix}") if lists else None)
            if not (writes or changed) or old is None:
                continue
            was = content_of(old)
            if was in self._last:
                self._last.pop(was)
                begun = self._begun[was]
            elif was in self._sources or (was is None and self._is_filled(call, slot)):
                continue  # a tensor of its own, which it fills
            else:
                begun = None if was is None else self._side.border(was, position)
            self._begun[content] = begun
            self._last[content] = slot

    def _is_filled(self, call: Call, slot: Slot) -> bool:
        """Return whether a tensor of zeros or the like that a call writes to is one that the region made: it reads it next."""
        readers = self._side.readers(content_of(slot))
        return not slot.role and call.phase != OPTIMIZER and bool(readers)
