"""How ptdbg_ascend spells the tensors of a call.

A dump of ptdbg_ascend is spelled as its pkl has it; a run in another layout by the same rules.
"""

from __future__ import annotations

from tensorprobe.legacy.compared.lines import Spell, Spelled
from tensorprobe.legacy.layouts.ptdbg import PtdbgSegment
from tensorprobe.legacy.layouts.ptdbg_names import write_line_name
from tensorprobe.model import Call
from tensorprobe.record.run import Segment


def spell_for(segment: Segment) -> Spell:
    """The lines of a call of that segment."""
    return _as_in_the_pkl(segment) if isinstance(segment, PtdbgSegment) else _by_rule


def _as_in_the_pkl(segment: PtdbgSegment) -> Spell:
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
