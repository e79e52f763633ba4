"""Which calls of a dump an optimizer made, and whether the other dump could have them.

On an accelerator an optimizer updates lists of tensors, with ops that the older tools do not record; on the CPU it updates one
tensor after the other. So of one training, one dump has the calls of the optimizer and the other has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tensorprobe.legacy.layouts.gradients import writes_in_place
from tensorprobe.model import Call
from tensorprobe.model.call import forward_name
from tensorprobe.ops.names import parse_call_name
from tensorprobe.record.run import Entry


class Dumped(Protocol):
    """A segment of a dump in one of the old layouts."""

    @property
    def optimizer_calls(self) -> frozenset[str]:
        """The names of the calls that the optimizer made."""
        ...


def is_only_of_optimizer(call: Call, own: Dumped, other: object) -> bool:
    """Return whether the optimizer made a call, and the other one is a dump that has none of its calls."""
    theirs = getattr(other, "optimizer_calls", None)
    return theirs is not None and not theirs and call.name in own.optimizer_calls


def find_optimizer_calls(entries: Sequence[Entry]) -> frozenset[str]:
    """Return the names of the calls after a backward and before the next forward, up to the last that writes in place."""
    with_backward = {forward_name(entry.name) for entry in entries}
    found: set[str] = set()
    since: list[str] = []
    written, is_after = 0, False
    for entry in entries:
        if forward_name(entry.name):
            since, written, is_after = [], 0, True
        elif entry.name in with_backward or (is_after and parse_call_name(entry.name).op.startswith("Functional.")):
            found.update(since[:written])
            since, written, is_after = [], 0, False
        elif is_after:
            since.append(entry.name)
            written = len(since) if writes_in_place(parse_call_name(entry.name).op) else written
    return frozenset(found.union(since[:written]))
