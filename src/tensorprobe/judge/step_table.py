"""One step of one rank for the walk: columns as lists, and questions about one row.

The table is facts only: nothing in it depends on what was judged before.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property

import numpy

from tensorprobe.judge.graph import Graph
from tensorprobe.judge.limits import Limits
from tensorprobe.judge.noise_model import Allowance, Errors
from tensorprobe.judge.severity import Severity
from tensorprobe.model.measured import Calls, Measured, Rows
from tensorprobe.model.reason import Unmeasured
from tensorprobe.ops import Trait, argument_name, has


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
            identity=[measured.identity(row) for row in range(len(rows.slot))],
            made=rows.made.tolist(),
            measured=errors.measured.tolist(),
            equal=errors.equal.tolist(),
            exact=errors.exact.tolist(),
            severity=severity.level.tolist(),
            verdict=limits.verdict.tolist(),
            drift=numpy.minimum(errors.rms_error / size, 1.0).tolist(),
            nonfinite=(rows.figures["nonfinite_different"] > 0).tolist(),
            operands_equal=allowance.operands_equal.tolist(),
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
        named = calls.op[call].startswith("Region.optimizer")  # a gradient is known by its name
        unpaired = self.first_unpaired is not None and self.first_unpaired <= calls.index[call]
        if not named and (unpaired or calls.name[call].startswith("Region.")):
            return False
        if not _same_module(calls.module[call], calls.candidate_module[call]):
            return False
        if self.is_parameter(row, call) and self.rows.grad[row]:
            return True
        # Code between module calls makes tensors too.
        return not diverged and (not calls.level[call].is_module or not call)


def _same_module(one: str, other: str) -> bool:
    """Return whether two paths name the same module, perhaps wrapped on one side."""
    return one == other or one.endswith(f".{other}") or other.endswith(f".{one}")
