"""How ptdbg_ascend names the lines of its pkl and the files beside it: `Functional_conv2d_0_forward_input.0`.

One tensor that a forward call gives back has no index (`…_forward_output`); ours is `output.0`. Gradients always have one.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from tensorprobe.model.call_name import CallName, parse_call_name, underscored

STACK = "stack_info"
_LINE = re.compile(rf"(.+_[0-9]+_(?:forward|backward))_(?:{STACK}|(input|output)((?:\.[^.]+)*))")


class LineName(NamedTuple):
    """The call, spelled our way but not yet canonical, and the slot; no slot for the line with the call's stack."""

    call: str
    slot: str


def read_line_name(text: str) -> LineName | None:
    """The parts of a line's name; None for a name that is not of this layout."""
    match = _LINE.fullmatch(text)
    if match is None:
        return None
    call, side, path = match.groups(default="")
    parts: CallName = parse_call_name(call)
    if not (parts.number and parts.direction):
        return None
    return LineName(str(parts), f"{side}{path or '.0'}" if side else "")


def write_line_name(call: str, slot: str, *, single: bool) -> str:
    """The name of a slot's line and file. `single`: it is the one thing that the call gave back."""
    shown = "output" if single and slot == "output.0" and call.endswith("forward") else slot
    return f"{underscored(call)}_{shown}"


def stack_line_name(call: str) -> str:
    """The name of the line with the stack of a call."""
    return f"{underscored(call)}_{STACK}"
