"""Who made and who reads each tensor: a graph of one step of one rank, inside each run by itself.

A tensor is recognised by its content, so nothing of the other run is needed, and no bit has to be equal on both sides. In:
the columns of a step. Out: rows. Rows of a call come in execution order, and so do all answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy

from tensorprobe.model.measured import Measured

Array = numpy.ndarray[Any, Any]


class Graph:
    """The graph of one step. It costs nothing until it is asked."""

    def __init__(self, measured: Measured) -> None:
        self._measured = measured

    def holding(self, side: int, content: int) -> list[int]:
        """Return the rows that hold this content in one run."""
        if content < 0:
            return []
        order, held = self._sorted[side]
        first, end = numpy.searchsorted(held, (content, content + 1))
        found: list[int] = order[first:end].tolist()
        return found

    def maker(self, side: int, row: int) -> int | None:
        """Return the last row in which an earlier call made what this row holds in one run."""
        made = int(self._makers[side][row])
        return None if made < 0 else made

    def last_maker(self, side: int, content: int) -> int | None:
        """Return the last row in which a call made the content."""
        made = [row for row in self.holding(side, content) if self._measured.rows.made[row]]
        return made[-1] if made else None

    def number(self, content: Any) -> int:
        """Return the number of a content of another step in this one; -1 where it does not occur."""
        return self._numbers.get(content, -1)

    def row(self, call: int, slot: str) -> int | None:
        """Return the row of a slot of a call."""
        return next((row for row in self._measured.rows_of(call) if self._measured.rows.slot[row] == slot), None)

    def gradients_of(self, content: tuple[int, int], *, since: int = -1) -> list[int]:
        """Return the rows of all recorded gradients of a tensor: one for each call after `since` that read it on both sides."""
        calls, rows = self._measured.calls, self._measured.rows
        readers = set(self.holding(0, content[0])) & set(self.holding(1, content[1]))
        found = []
        for reader in sorted(readers):
            call = int(rows.call[reader])
            if rows.made[reader] or call <= since or calls.direction[call] != "forward":
                continue
            slot = rows.slot[reader]
            name = slot if slot.startswith("parameters.") else f"output{slot.removeprefix('input')}"
            found += [row for each in self._backwards.get(call, ()) if (row := self.row(each, name)) is not None]
        return found

    def summands(self, row: int) -> list[int]:
        """Return the gradients that autograd has added up to what this row is: the gradient of a result or of a parameter."""
        calls, rows = self._measured.calls, self._measured.rows
        call = int(rows.call[row])
        forward = calls.forward[call]
        if not rows.made[row] and (role := rows.roles.get(row, "")).startswith("gradient "):
            parts = [part for part in self._gradients.get(role, ()) if rows.call[part] < call]
            whole = all(calls.level[int(rows.call[part])].is_module for part in parts)
            parts = [part for part in parts if calls.level[int(rows.call[part])].is_module is whole]
            return parts if len(parts) > 1 else []  # what is not the one that was recorded was changed by somebody
        if forward < 0 or rows.made[row]:
            return []
        result = self.row(forward, f"output{rows.slot[row].removeprefix('input')}")
        if result is None or (rows.made[result] and any(held[result] for held in self._unique)):
            return []  # nothing else holds it, so no call reads it
        parts = self.gradients_of((int(rows.content[0][result]), int(rows.content[1][result])), since=forward)
        level = calls.level[call]
        return [part for part in parts if rows.call[part] < call and calls.level[int(rows.call[part])] is level]

    def lacks_a_part(self, row: int, reader: int) -> bool:
        """Return whether this gradient of a result lacks the part of a forward call that read the result, as after a `detach`."""
        calls, rows = self._measured.calls, self._measured.rows
        forward = calls.forward[int(rows.call[row])]
        result = None if forward < 0 else self.row(forward, f"output{rows.slot[row].removeprefix('input')}")
        if result is None:
            return False
        contents = [side[result] for side in rows.content]
        read = [one for one in self._measured.rows_of(reader) if not rows.made[one]]
        names = [rows.slot[one] for one in read if contents == [side[one] for side in rows.content]]
        given = {rows.slot[part] for call in self._backwards.get(reader, ()) for part in self._measured.rows_of(call)}
        return any(f"output{name.removeprefix('input')}" not in given for name in names)

    @cached_property
    def _sorted(self) -> Sequence[tuple[Array, Array]]:
        orders = [numpy.argsort(side, kind="stable") for side in self._measured.rows.content]
        return [(order, side[order]) for order, side in zip(orders, self._measured.rows.content, strict=True)]

    @cached_property
    def _makers(self) -> Sequence[Array]:
        return [makers_of(self._measured, side) for side in (0, 1)]

    @cached_property
    def _unique(self) -> Sequence[Array]:
        """For each side, whether no other row holds the same."""
        return [(numpy.bincount(side + 1)[side + 1] == 1) | (side < 0) for side in self._measured.rows.content]

    @cached_property
    def _gradients(self) -> dict[str, list[int]]:
        """By role of a parameter's gradient, the rows of backward calls that made parts of it."""
        found: dict[str, list[int]] = {}
        calls, rows = self._measured.calls, self._measured.rows
        for row, role in sorted(rows.roles.items()):
            backward = rows.made[row] and calls.direction[int(rows.call[row])] == "backward"
            if backward and role.startswith("gradient "):
                found.setdefault(role, []).append(row)
        return found

    @cached_property
    def _backwards(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for at, forward in enumerate(self._measured.calls.forward):
            if forward >= 0:
                found.setdefault(forward, []).append(at)
        return found

    @cached_property
    def _numbers(self) -> dict[Any, int]:
        return {content: number for number, content in enumerate(self._measured.contents)}


def makers_of(measured: Measured, side: int) -> Array:
    """Return for each row the last row in which an earlier call made what it holds in one run; -1 where none did."""
    rows, content = measured.rows, measured.rows.content[side]
    places = content * (len(measured.calls.name) + 1) + rows.call
    made = numpy.flatnonzero(rows.made)
    if not len(made):
        return numpy.full(len(places), -1)
    made = made[numpy.argsort(places[made], kind="stable")]
    found = made[numpy.searchsorted(places[made], places) - 1]
    known = (content >= 0) & (content[found] == content) & (rows.call[found] < rows.call)
    return numpy.where(known, found, -1)
