"""The name of a call in its parts, in every spelling that this family of tools has used.

Functional.conv2d.0.forward     ours, and msprobe's
Functional_conv2d_0_forward     ptdbg_ascend
Functional*conv2d*0             api_accuracy_checker
"""

from __future__ import annotations

import re
from typing import NamedTuple

FAMILIES = ("Functional", "Tensor", "Torch", "VF", "Distributed", "NPU", "Module", "Aten", "Ops")
"""What the name of an op begins with."""
DIRECTIONS = ("forward", "backward")


class CallName(NamedTuple):
    """A name in its parts. `number` and `direction` are empty when the name does not say them."""

    op: str
    number: str
    direction: str

    def __str__(self) -> str:
        tail = (self.direction, self.number) if self.op.startswith("Module.") else (self.number, self.direction)
        return ".".join(part for part in (self.op, *tail) if part)


FAMILY_SPELLINGS = {"_VF": "VF", "torch_npu": "NPU", "Torch_npu": "NPU", "Npu": "NPU", "aten": "Aten"}
"""Families as the older tools spell them."""

_KNOWN_FAMILY = "|".join(sorted((*FAMILIES, *FAMILY_SPELLINGS), key=len, reverse=True))
_WITH_STARS = re.compile(r"(\w+)\*(.+)\*([0-9]+)(?:[*._](forward|backward))?")
_WITH_UNDERSCORES = re.compile(rf"({_KNOWN_FAMILY})_(.+)_([0-9]+)(?:_(forward|backward))?")
_NUMBERED = re.compile(r"(.+)\.([0-9]+)")


def parse_call_name(text: str) -> CallName:
    """The parts of a name in any spelling, its op with dots but not yet canonical.

    `Module.layers.0` has no number: what stands last in a path is part of it unless a direction stands before it.
    """
    head, *tail = text.rsplit(".", 2)
    if len(tail) == 2:
        middle, last = tail
        if last in DIRECTIONS and middle.isdecimal():
            return CallName(head, middle, last)
        if middle in DIRECTIONS and last.isdecimal():
            return CallName(head, last, middle)
    return _parse_other_spelling(text)


def _parse_other_spelling(text: str) -> CallName:
    match = _WITH_STARS.fullmatch(text) or _WITH_UNDERSCORES.fullmatch(text)
    if match is not None:
        family, op, number, direction = match.groups(default="")
        if family == "Module":
            path, _, class_name = op.rpartition("_")
            op = f"{path}.{class_name}" if path else class_name
        return CallName(f"{family}.{op}", number, direction)
    match = _NUMBERED.fullmatch(text)
    if match is not None and not text.startswith("Module."):
        return CallName(match[1], match[2], "")
    return CallName(text, "", "")


def underscored(name: str) -> str:
    """A call's name as ptdbg_ascend spells it: `Functional.conv2d.0.forward` → `Functional_conv2d_0_forward`."""
    op, number, direction = parse_call_name(name)
    family, _, rest = op.partition(".")
    return "_".join(part for part in (family, rest, number, direction) if part)
