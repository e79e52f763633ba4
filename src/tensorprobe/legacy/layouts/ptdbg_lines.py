"""One line of a pkl of ptdbg_ascend, which is text: a JSON list that describes a tensor, or the stack of a call.

["Functional_conv2d_0_forward_input.0", 1, [], "torch.float32", [2, 3, 8, 8], [max, min, mean]]
["Functional_conv2d_0_forward_stack_info", [["conv.py", "560", "_conv_forward", "return F.conv2d("], ...]]

In: bytes that are trusted in nothing. Out: a `TensorLine` or a `StackLine`, or one of `JSON_ERRORS` or ValueError with the
reason. Python's json writes NaN and Infinity bare, which is not JSON; such lines are read all the same.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import msgspec

from tensorprobe.model import Frame
from tensorprobe.model.call import MAX_NAME
from tensorprobe.ops.names import CallName, parse_call_name, underscored
from tensorprobe.record.elements import MAX_DIMENSIONS

WITHOUT_STATISTICS = 100
"""A second field above this says that the line has no statistics."""
MAX_FRAMES = 1000
_LARGEST = 2**63 - 1
_LINE_NUMBER = re.compile("[0-9]{1,9}", re.ASCII)

Statistics = tuple[float, float, float]
"""Greatest, least, mean."""

_MOST_SHAPES = 10_000
_known_shapes: dict[str, tuple[int, ...]] = {"[]": ()}
"""Shapes by their text, which that of a number among the arguments is already: there are few, and checking one takes time."""

_decode = msgspec.json.Decoder().decode


class TensorLine(NamedTuple):
    """What a line says of a tensor or of a number, in its own spelling."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shape_text: str
    statistics: Statistics | None


class StackLine(NamedTuple):
    """Where in the program a call was made, innermost frame first."""

    name: str
    frames: tuple[Frame, ...]


def decode_line(raw: bytes) -> TensorLine | StackLine:
    """The line in its parts."""
    try:
        values = _decode(raw)
    except msgspec.DecodeError:
        if b"NaN" not in raw and b"Infinity" not in raw:
            raise
        values = _decode_leniently(raw)
    if type(values) is not list or not values or type(values[0]) is not str:
        raise ValueError("not a list that begins with a name")
    if len(values) == 2:
        return StackLine(values[0], _frames(values[1]))
    if len(values) not in (5, 6):
        raise ValueError(f"{len(values):,} fields; a tensor has 6, or 5 without statistics, and a stack has 2")
    name, number, nothing, dtype, shape = values[:5]
    if type(number) is not int or type(nothing) is not list or type(dtype) is not str:
        raise ValueError("its fields are not a name, a number, a list, a dtype, a shape and statistics")
    if len(values) == 5 and number <= WITHOUT_STATISTICS:
        raise ValueError(f"5 fields; without statistics its second field must be above {WITHOUT_STATISTICS}")
    statistics = _statistics(values[5]) if len(values) == 6 else None
    if type(shape) is not list and shape != "[]":
        raise ValueError("its shape is not a list of whole numbers")
    text = str(shape)
    known = _known_shapes.get(text)
    if known is None:
        known = _shape(shape)
        if len(_known_shapes) < _MOST_SHAPES:
            _known_shapes[text] = known
    return TensorLine(name, dtype, known, text, statistics)


def _decode_leniently(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at character {error.pos:,})") from None


def _shape(given: list[Any]) -> tuple[int, ...]:
    if not all(type(size) is int for size in given):
        raise ValueError("its shape is not a list of whole numbers")
    if len(given) > MAX_DIMENSIONS:
        raise ValueError(f"its shape has {len(given):,} dimensions, more than {MAX_DIMENSIONS}")
    if given and not 0 <= min(given) <= max(given) <= _LARGEST:
        raise ValueError("its shape is impossible")
    return tuple(given)


def _statistics(given: Any) -> Statistics | None:
    """Three numbers; None when one of them was not computed, as those of bool tensors in the older tool."""
    if type(given) is not list or len(given) != 3:
        raise ValueError("its statistics are not three numbers")
    numbers = []
    for value in given:
        if type(value) is float:
            numbers.append(value)
        elif isinstance(value, int) and -_LARGEST - 1 <= value <= 2 * _LARGEST + 1:
            numbers.append(float(value))
        elif value is None or value == []:
            return None
        else:
            raise ValueError("its statistics are not three numbers")
    return numbers[0], numbers[1], numbers[2]


def _frames(given: Any) -> tuple[Frame, ...]:
    if type(given) is not list or len(given) > MAX_FRAMES:
        raise ValueError(f"its stack is not a list of at most {MAX_FRAMES:,} frames")
    return tuple(_frame(frame) for frame in given)


def _frame(given: Any) -> Frame:
    if type(given) is not list or len(given) != 4:
        raise ValueError("a frame of its stack is not a list of file, line, function and code")
    file, line, function, code = given
    if type(line) is str and _LINE_NUMBER.fullmatch(line):
        line = int(line)
    if type(line) is not int or not all(type(text) is str for text in (file, function, code)):
        raise ValueError("a frame of its stack is not a list of file, line, function and code")
    return Frame(file, line, function, code)


STACK = "stack_info"
_LINE = re.compile(rf"(.+_[0-9]+_(?:forward|backward))_(?:{STACK}|(input|output)((?:\.[^.]+)*))")


class LineName(NamedTuple):
    """The call, spelled our way but not yet canonical, and the slot; no slot for the line with the call's stack."""

    call: str
    slot: str


def read_line_name(text: str) -> LineName | None:
    """The parts of a line's name; None for a name that is not of this layout."""
    match = _LINE.fullmatch(text) if len(text) <= MAX_NAME else None
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
