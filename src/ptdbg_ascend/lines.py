"""The lines of one dump, in execution order: what a result table says of each tensor besides its errors.

In: one rank of a run. Out: columns as lists. A dump of ptdbg_ascend is spelled as its pkl has it; a run in another layout
by the same rules. Nothing here reads a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tensorprobe.errors import RunDamaged
from tensorprobe.model import Call, Stack
from tensorprobe.record import Damage, Run
from tensorprobe.record.layouts.ptdbg import PtdbgSegment
from tensorprobe.record.layouts.ptdbg_names import write_line_name
from tensorprobe.record.run import Segment

Statistics = tuple[float, float, float]
Spelled = tuple[str, str, str, Statistics | None]
"""Name, dtype, shape and statistics, as a pkl has them."""
Key = tuple[str, int, str]
"""Call, how often it had been recorded before, slot: what a row of a comparison says of itself."""


@dataclass
class Lines:
    """Columns with an entry for each tensor. `call` counts the calls of the dump."""

    key: list[Key] = field(default_factory=list)
    call: list[int] = field(default_factory=list)
    name: list[str] = field(default_factory=list)
    dtype: list[str] = field(default_factory=list)
    shape: list[str] = field(default_factory=list)
    elements: list[int] = field(default_factory=list)
    statistics: list[Statistics | None] = field(default_factory=list)
    """max, min, mean; None where the dump does not say."""
    has_values: list[bool] = field(default_factory=list)
    stack: list[int | None] = field(default_factory=list)
    damaged: int = 0
    """How many lines cannot be read."""

    def __len__(self) -> int:
        return len(self.key)


def read_lines(run: Run, step: int, rank: int) -> Lines:
    """Every tensor that the run has for that step and rank."""
    segment = run.segment(step, rank)
    spell = _as_in_the_pkl(segment) if isinstance(segment, PtdbgSegment) else _by_rule
    lines = Lines()
    sizes: dict[tuple[int, ...], int] = {}
    for number, item in enumerate(segment.calls()):
        if isinstance(item, Damage):
            lines.damaged += 1
            continue
        call = item[1]
        for slot, (name, dtype, shape, statistics) in zip(call.slots, spell(call), strict=True):
            lines.key.append((call.name, call.repeat, slot.name))
            lines.call.append(number)
            lines.name.append(name)
            lines.dtype.append(dtype)
            lines.shape.append(shape)
            if slot.shape not in sizes:
                sizes[slot.shape] = slot.count
            lines.elements.append(sizes[slot.shape])
            lines.statistics.append(statistics)
            lines.has_values.append(slot.has_data)
            lines.stack.append(call.stack)
    return lines


def _as_in_the_pkl(segment: PtdbgSegment) -> Callable[[Call], list[Spelled]]:
    def spell(call: Call) -> list[Spelled]:
        written = [segment.spelled(call.name, call.repeat, slot.name) for slot in call.slots]
        if None in written:
            return [held or rule for held, rule in zip(written, _by_rule(call), strict=True)]
        return written  # type: ignore[return-value]

    return spell


def _by_rule(call: Call) -> list[Spelled]:
    """The lines of a call as ptdbg_ascend would have written them."""
    # What a call has written into its arguments is nothing that it gave back.
    given_back = [slot for slot in call.slots if slot.side == "output" and not slot.name.startswith("output.changed")]
    single = len(given_back) == 1
    head = write_line_name(call.name, "", single=False)
    spelled: list[Spelled] = []
    for slot in call.slots:
        name = (
            write_line_name(call.name, slot.name, single=True) if single and slot is given_back[0] else head + slot.name
        )
        held = slot.summary
        statistics = None if held is None else (float(held.max), float(held.min), float(held.mean))
        spelled.append((name, f"torch.{slot.dtype}", str(list(slot.shape)), statistics))
    return spelled


class StackTexts:
    """The stacks of a segment, each worded once: innermost frame first."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._known: dict[int, str] = {}

    def of(self, number: int | None) -> str:
        """The stack on one line; empty when there is none."""
        if number is None:
            return ""
        if number not in self._known:
            try:
                stack: Stack | None = self._segment.stack(number)
            except RunDamaged as damage:
                self._known[number] = f"damaged: {damage}"
            else:
                self._known[number] = " <- ".join(map(str, stack.frames)) if stack is not None else ""
        return self._known[number]
