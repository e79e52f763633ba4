"""One step of one rank for the walk: columns as lists, and questions about one row.

The table is facts only: nothing in it depends on what was judged before.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy

from tensorprobe.judge.graph import Graph
from tensorprobe.judge.limits import Limits
from tensorprobe.judge.noise_model import Allowance, Errors
from tensorprobe.judge.severity import Severity
from tensorprobe.model.measured import Calls, Measured, Rows
from tensorprobe.model.reason import Unmeasured
from tensorprobe.ops import Trait, argument_name, has

Array = numpy.ndarray[Any, Any]
_WHOLE = ("parameter ", "gradient ", "optimizer state ")
_OWNED = ("parameter ", "buffer ")
"""The roles of tensors that a module holds."""


@dataclass
class StepTable:
    """Rows have their position in `Rows`, calls theirs in `Calls`."""

    calls: Calls
    rows: Rows
    contents: list[Hashable]
    errors: Errors
    graph: Graph
    identity: list[Hashable]
    """For each row, the identity of its pair of tensors across steps."""
    made: list[bool]
    measured: list[bool]
    equal: list[bool]
    exact: list[bool]
    """Integers and bool."""
    severity: list[int]
    verdict: list[int]
    """Of a rule with fixed limits; -1 if the noise model decides."""
    drift: list[float]
    """The error relative to the natural size of the result."""
    nonfinite: list[bool]
    """Whether NaN or inf differ."""
    operands_equal: list[bool]
    """For each call."""
    largest_gradient: float | None = None
    """If the runs have other numbers of processes: the size of the largest gradient that an optimizer reads."""
    first_unpaired: int | None = None
    """The index of the first call without a partner."""
    fresh: set[tuple[tuple[int, ...], str]] = field(default_factory=set)
    """Shape and dtype of uninitialised memory that was allocated in this step."""

    @classmethod
    def of(
        cls, measured: Measured, errors: Errors, allowance: Allowance, limits: Limits, severity: Severity
    ) -> StepTable:
        """Return the table of a measured step."""
        rows = measured.rows
        size = numpy.maximum(allowance.size, 1e-300)
        return cls(
            calls=measured.calls,
            rows=rows,
            contents=measured.contents,
            errors=errors,
            graph=Graph(measured),
            identity=measured.identities(),
            made=rows.made.tolist(),
            measured=errors.measured.tolist(),
            equal=errors.equal.tolist(),
            exact=errors.exact.tolist(),
            severity=severity.level.tolist(),
            verdict=limits.verdict.tolist(),
            drift=numpy.minimum(errors.rms_error / size, 1.0).tolist(),
            nonfinite=(rows.figures["nonfinite_different"] > 0).tolist(),
            operands_equal=allowance.operands_equal.tolist(),
            largest_gradient=max(
                (float(errors.rms[row]) for row in rows.roles if is_meeting_place(measured, row)), default=0.0
            )
            if measured.other_layout
            else None,
            first_unpaired=min(
                (one.index for one in measured.findings if one.kind.startswith("only_") and not one.region),
                default=None,
            ),
            fresh={
                (rows.shapes[0][row], rows.dtype_names[0][row])
                for row, why in rows.unmeasured.items()
                if why is Unmeasured.UNINITIALISED
            },
        )

    @cached_property
    def numbers(self) -> dict[tuple[str, int], int]:
        """The position of each call, by its name and how many times it was recorded before."""
        return {key: at for at, key in enumerate(zip(self.calls.name, self.calls.repeat, strict=True))}

    @cached_property
    def first_noisy_gradient(self) -> float:
        """The position of the first backward with a result that differs or was not measured; infinite if there is none."""
        rows, calls = self.rows, self.calls
        unmeasured = (int(rows.call[row]) for row in rows.unmeasured if rows.slot[row].startswith("output"))
        noisy = numpy.unique(rows.call[rows.made & ~self.errors.equal]).tolist()
        return min((call for call in (*unmeasured, *noisy) if calls.direction[call] == "backward"), default=math.inf)

    def rows_of(self, call: int) -> range:
        """Return the rows of a call."""
        first = self.calls.first_row
        return range(first[call], first[call + 1] if call + 1 < len(first) else len(self.made))

    def is_parameter(self, row: int, call: int) -> bool:
        """Return whether the row is a named argument, such as a weight."""
        return bool(argument_name(self.calls.op[call], self.rows.slot[row]))

    def is_written_to(self, row: int, call: int) -> bool:
        """Return whether the call writes to this argument."""
        slots, span = self.rows.slot, self.rows_of(call)
        place = slots[row].removeprefix("input.")
        if f"output.changed.{place}" in slots[span.start : span.stop]:
            return True
        return place == "0" and self.calls.op[call].endswith(("_", ".__setitem__"))

    def is_fresh_memory(self, row: int, call: int) -> bool:
        """Return whether a differing argument looks like uninitialised memory that the call fills partly."""
        rows = self.rows
        fresh = (rows.shapes[0][row], rows.dtype_names[0][row]) in self.fresh
        return fresh and has(self.calls.op[call], Trait.WRITES_PART) and self.is_written_to(row, call)

    def may_enter(self, row: int, call: int, *, diverged: bool) -> bool:
        """Return whether a differing tensor of unknown origin is a cause of its own.

        Once something has diverged, the tensor may follow from that; a parameter does not. A call without a partner, or
        partners in other modules, may have made it.
        """
        calls = self.calls
        if self.largest_gradient is not None and self.rows.roles.get(row, "").startswith("gradient "):
            return not diverged
        owned = self.rows.roles.get(row, "").startswith(_OWNED)
        named = owned or calls.op[call].startswith("Region.optimizer")  # a gradient is known by its name
        unpaired = self.first_unpaired is not None and self.first_unpaired <= calls.index[call]
        if not named and (unpaired or calls.name[call].startswith("Region.")):
            return False
        if not _same_module(calls.module[call], calls.candidate_module[call]):
            return False
        if owned or (self.is_parameter(row, call) and self.rows.grad[row]):
            return True
        # Code between module calls makes tensors too.
        return not diverged and (not calls.level[call].is_module or not call)


def is_meeting_place(measured: Measured, row: int) -> bool:
    """Return whether a row is whole in every layout: a parameter, its gradient or its state, outside of backward."""
    return measured.rows.roles.get(row, "").startswith(_WHOLE) and (
        measured.calls.direction[measured.rows.call[row]] == "forward"
    )


def rows_of_parts(measured: Measured) -> Array:
    """Return the rows that hold another part of the batch or of a weight on each side, or are computed from one."""
    calls, rows = measured.calls, measured.rows
    found = numpy.zeros(len(rows.slot), dtype=bool)
    regions = (at for at in measured.region_positions if not calls.name[at].startswith("Region.optimizer"))
    calls_of_parts, contents = set(regions), set[tuple[int, int]]()
    for call in range(len(calls.name)):
        is_part = call in calls_of_parts or calls.forward[call] in calls_of_parts
        span = [row for row in measured.rows_of(call) if not is_meeting_place(measured, row)]
        for row in span:
            held = {(side, int(rows.content[side][row])) for side in (0, 1)}
            if rows.unmeasured.get(row) is Unmeasured.SHAPE or (not rows.made[row] and held & contents):
                found[row] = is_part = True
        if is_part:
            calls_of_parts.add(call)
            for row in span:
                if rows.made[row]:
                    found[row] = True
                    contents |= {(side, at) for side in (0, 1) if (at := int(rows.content[side][row])) >= 0}
    return found


def _same_module(one: str, other: str) -> bool:
    """Return whether two paths name the same module, perhaps wrapped on one side."""
    return one == other or one.endswith(f".{other}") or other.endswith(f".{one}")
