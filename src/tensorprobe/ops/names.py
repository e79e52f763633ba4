"""The names of calls and ops: their parts, and which names mean the same op.

Names come in as a capture or an older tool spells them:

    Functional.conv2d.0.forward     ours, and msprobe's
    Functional_conv2d_0_forward     ptdbg_ascend
    Functional*conv2d*0             api_accuracy_checker

The canonical name of an op is the one that our own capture gives. Two names share a canonical name only if they call the
same function with the same arguments in the same positions: `1 - x` is `Tensor.__rsub__`, which is not `Tensor.sub`.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from tensorprobe.model import Level

FAMILIES = ("Functional", "Tensor", "Torch", "VF", "Function", "Distributed", "NPU", "Module", "Aten", "Ops")
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
    """Return the parts of a name in any spelling, its op with dots but not yet canonical.

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
    """Return a call's name as ptdbg_ascend spells it: `Functional.conv2d.0.forward` → `Functional_conv2d_0_forward`."""
    op, number, direction = parse_call_name(name)
    family, _, rest = op.partition(".")
    return "_".join(part for part in (family, rest, number, direction) if part)


_OPERATORS = {
    "add": "__add__ __radd__",
    "sub": "__sub__ subtract",
    "mul": "__mul__ __rmul__ multiply",
    "div": "__truediv__ __div__ true_divide divide",
    "__rtruediv__": "__rdiv__",
    "floor_divide": "__floordiv__",
    "remainder": "__mod__",
    "pow": "__pow__",
    "matmul": "__matmul__ __imatmul__",
    "neg": "__neg__ negative",
    "positive": "__pos__",
    "abs": "__abs__ absolute",
    "bitwise_not": "__invert__",
    "bitwise_and": "__and__ __rand__",
    "bitwise_or": "__or__ __ror__",
    "bitwise_xor": "__xor__ __rxor__",
    "bitwise_left_shift": "__lshift__",
    "bitwise_right_shift": "__rshift__",
    "eq": "__eq__",
    "ne": "__ne__ not_equal",
    "lt": "__lt__ less",
    "le": "__le__ less_equal",
    "gt": "__gt__ greater",
    "ge": "__ge__ greater_equal",
    "clamp": "clip",
    "add_": "__iadd__",
    "sub_": "__isub__ subtract_",
    "mul_": "__imul__ multiply_",
    "div_": "__itruediv__ __idiv__ true_divide_ divide_",
    "floor_divide_": "__ifloordiv__",
    "remainder_": "__imod__",
    "pow_": "__ipow__",
    "bitwise_and_": "__iand__",
    "bitwise_or_": "__ior__",
    "bitwise_xor_": "__ixor__",
    "bitwise_left_shift_": "__ilshift__",
    "bitwise_right_shift_": "__irshift__",
    "clamp_": "clip_",
}
"""Name without the family → other spellings of it, in the families `Tensor` and `Torch`."""

RECURRENT = frozenset("lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell".split())
"""Functions of `torch._VF`; `torch` has them too."""
ONE_FUNCTION = frozenset(
    (
        "adaptive_avg_pool1d avg_pool1d bilinear celu_ channel_shuffle conv1d conv2d conv3d conv_tbc conv_transpose1d "
        "conv_transpose2d conv_transpose3d cosine_similarity hardshrink native_channel_shuffle pairwise_distance pdist "
        "pixel_shuffle pixel_unshuffle prelu relu_ rrelu_ selu_ threshold_"
    ).split()
)
"""Functions that are the same object in `torch` and in `torch.nn.functional`."""

_ALIASES: dict[str, str] = {
    **{
        f"{family}.{other}": f"{family}.{op}"
        for family in ("Tensor", "Torch")
        for op, others in _OPERATORS.items()
        for other in others.split()
    },
    **{f"Torch.{op}": f"VF.{op}" for op in RECURRENT},
    **{f"Torch.{op}": f"Functional.{op}" for op in ONE_FUNCTION},
    "Torch.spmm": "Torch.mm",
    "Torch.dsmm": "Torch.mm",
    "Torch.saddmm": "Torch.sspaddmm",
    "Torch.hsmm": "Torch.hspmm",
    "Distributed._all_gather_base": "Distributed.all_gather_single",
    "Distributed.all_gather_into_tensor": "Distributed.all_gather_single",
    "Distributed._reduce_scatter_base": "Distributed.reduce_scatter_single",
    "Distributed.reduce_scatter_tensor": "Distributed.reduce_scatter_single",
}


@lru_cache(maxsize=1 << 16)
def canonical_op(op: str) -> str:
    """Return the op as our own capture names it: `Tensor.__add__` → `Tensor.add`, `Torch.lstm` → `VF.lstm`."""
    family, dot, rest = op.partition(".")
    spelled = f"{FAMILY_SPELLINGS.get(family, family)}{dot}{rest}"
    return _ALIASES.get(spelled, spelled)


def canonical_call_name(text: str) -> str:
    """Return the canonical name of a call, or of all calls of an op when `text` has no number or direction."""
    op, number, direction = parse_call_name(text)
    return str(CallName(canonical_op(op), number, direction))


def family_of(name: str) -> str:
    """Return the first part of a name, spelled as in `FAMILIES` if it is one of them."""
    family = parse_call_name(name).op.partition(".")[0]
    return FAMILY_SPELLINGS.get(family, family)


def level_of(name: str) -> Level:
    """Return the level of a call or an op with this name, in any spelling."""
    return Level.of(family_of(name))


def without_prefix(path: str, prefix: str | None) -> str:
    """Return a module path without the prefix that a wrapper added; `module` and `module.` mean the same."""
    prefix = prefix.rstrip(".") if prefix else None
    if path == prefix:
        return ""
    return path.removeprefix(f"{prefix}.") if prefix else path


def op_without_prefix(op: str, prefix: str | None) -> str:
    """Return an op without the prefix that a wrapper added to its module path; only the ops of modules have a path."""
    if not op.startswith("Module."):
        return op
    return f"Module.{without_prefix(op[len('Module.') :], prefix)}"
