"""What the caller wrote, read from its current instruction: operators by their names in Python, arguments as they were passed.

`x + y` is `Tensor.__add__`, which torch itself shows as `Tensor.add`; older tools name and count the two apart. An argument
passed by position keeps its position, though torch shows it as a keyword. No value of the caller is looked at, and each
place in a program is looked up once.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Sequence
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor

_COMPARISONS = ("ne", "lt", "le", "gt", "ge")
OPERATORS: dict[str, dict[str, str]] = {
    "Tensor.add": {"+": "add", "+=": "radd"},  # `+=` on a tensor is `add_`, so a number is on the left
    "Tensor.sub": {"-": "sub"},
    "Tensor.mul": {"*": "mul", "*=": "rmul"},
    "Tensor.div": {"/": "truediv"},
    "Tensor.remainder": {"%": "mod"},
    "Tensor.matmul": {"@": "matmul", "@=": "imatmul"},
    "Tensor.neg": {"NEGATIVE": "neg"},
    "Tensor.positive": {"POSITIVE": "pos"},
    "Tensor.abs": {"abs": "abs"},
    "Tensor.bitwise_and": {"&": "rand"},
    "Tensor.bitwise_or": {"|": "ror"},
    "Tensor.bitwise_xor": {"^": "rxor"},
    "Tensor.add_": {"+=": "iadd"},
    "Tensor.sub_": {"-=": "isub"},
    "Tensor.mul_": {"*=": "imul"},
    "Tensor.div_": {"/=": "itruediv"},
    "Tensor.floor_divide_": {"//=": "ifloordiv"},
    "Tensor.remainder_": {"%=": "imod"},
    **{f"Tensor.{name}": {"compare": name} for name in _COMPARISONS},
}
"""Functions as torch shows them → symbol in the program → Python's name."""

WITH_INDICES = "_with_indices"
"""The older tools see what the program calls: `F.max_pool2d(x, 2, return_indices=True)` is `max_pool2d` to them."""
LINEAR_ALGEBRA = "Torch.linalg."
"""The older tools name these functions as if they stood in torch itself."""
_REFLECTED = {"add": "radd", "mul": "rmul"}
"""Operators with another name if the tensor is on the right. To torch they are the same."""
_SYMBOLS_3_10 = {
    "ADD": "+",
    "SUBTRACT": "-",
    "MULTIPLY": "*",
    "TRUE_DIVIDE": "/",
    "MODULO": "%",
    "MATRIX_MULTIPLY": "@",
    "FLOOR_DIVIDE": "//",
    "AND": "&",
    "OR": "|",
    "XOR": "^",
}
_MOST_PLACES = 100_000
_UNKNOWN = object()


class _Operation(NamedTuple):
    """One place in a program: an operator with what loads its operands, or the name of what is called there."""

    symbol: str
    left: Sequence[dis.Instruction] = ()
    right: Sequence[dis.Instruction] = ()
    callee: str = ""
    is_attribute: bool = False
    owner: Sequence[dis.Instruction] = ()
    """The instructions that load the object whose attribute is called."""


_known: dict[tuple[int, int], tuple[CodeType, _Operation]] = {}
"""The code is kept so that its id remains its own."""


def spell_operator(name: str, frame: FrameType, args: Sequence[Any]) -> str:
    """The name of an op that `frame` is calling: as an operator has it, or as it is."""
    if name.startswith(LINEAR_ALGEBRA):
        return f"Torch.{name.removeprefix(LINEAR_ALGEBRA)}"
    if name.endswith(WITH_INDICES):
        chooser = frame.f_back and frame.f_back.f_back
        return name.removesuffix(WITH_INDICES) if chooser is not None and _chooses(chooser) else name
    place, symbols = _place_of(frame), OPERATORS[name]
    python_name = symbols.get(place.symbol) or _called(name, place, symbols)
    if python_name is None:
        return name
    if python_name in _REFLECTED and not isinstance(args[-1], Tensor) and _is_reflected(place, frame):
        python_name = _REFLECTED[python_name]
    return f"Tensor.__{python_name}__"


def _chooses(frame: FrameType) -> bool:
    """Whether this is torch's function that calls one of two by an argument: `max_pool2d` by `return_indices`."""
    return frame.f_code.co_filename.endswith("_jit_internal.py")


def is_held(frame: FrameType) -> bool:
    """Whether the program calls a function of torch by a name of its own, such as `self.activation`, and not as `F.relu`.

    `frame` is the frame that called the mode. The older tools put wrappers into torch's modules. A function that the
    program took out before is the unwrapped one: they see what it calls.
    """
    caller = frame.f_back and frame.f_back.f_back
    if frame.f_code.co_name != "handle_torch_function" or caller is None:
        return False
    place = _place_of(caller)
    return bool(place.callee) and not (place.is_attribute and isinstance(_look_up(place.owner, caller), ModuleType))


def _place_of(frame: FrameType) -> _Operation:
    code, at = frame.f_code, frame.f_lasti
    found = _known.get((id(code), at))
    if found is None:
        if len(_known) >= _MOST_PLACES:
            _known.clear()
        found = _known[id(code), at] = code, _read_operation(code, at)
    return found[1]


def _called(name: str, place: _Operation, symbols: dict[str, str]) -> str | None:
    """Return the operator behind a call: `x.__iadd__(y)`, `sum(…)`, `operator.add(x, y)`, `abs(x)`; None for a method."""
    (own,) = list(symbols.values())[:1]
    if not place.callee:
        return None
    plain = place.callee.strip("_")
    if place.callee.startswith("__"):
        return plain if plain in (*symbols.values(), _REFLECTED.get(own)) else None
    is_builtin = not place.is_attribute and place.callee in ("sum", "abs", "reduce", "map")
    return own if is_builtin or (place.callee == own != name.partition(".")[2]) else None


def _is_reflected(place: _Operation, frame: FrameType) -> bool:
    """Return whether the operand that is not a tensor is on the left, as in `2 * x` and `self.scale * x`."""
    if place.callee:
        return place.callee in ("sum", "__radd__", "__rmul__")
    left = _is_tensor(place.left, frame)
    return bool(_is_tensor(place.right, frame)) if left is None else not left


_NUMBERS = frozenset(
    ("bool", "float", "int", "len", "round", "item", "dim", "size", "numel", "nelement", "element_size")
)
"""Functions and methods of tensors that return numbers."""


def _is_tensor(loads: Sequence[dis.Instruction], frame: FrameType) -> bool | None:
    """Return whether an expression gives a tensor, without running it; None if that is not known."""
    value = _look_up(loads, frame)
    if value is not _UNKNOWN or not loads:
        return isinstance(value, Tensor) if loads else None
    before, last = list(loads[:-1]), loads[-1]
    if _is_call(last):
        called = _read_callee(before, last)
        owner = _look_up(called.owner, frame)
        if isinstance(owner, ModuleType):
            return owner.__name__.startswith("torch") if owner.__name__ != "math" else False
        if called.callee in _NUMBERS:
            return False
        return True if called.is_attribute and _is_tensor(called.owner, frame) else None
    right = _operand(before)
    kinds = {_is_tensor(part, frame) for part in (right, _operand(before)) if part}
    if last.opname == "BINARY_SUBSCR":
        return True if _is_tensor(_operand(list(loads[: -1 - len(right)])), frame) else None
    if not _symbol(last):
        return None
    return True if True in kinds else False if kinds == {False} else None


def _is_call(instruction: dis.Instruction) -> bool:
    return instruction.opname in ("CALL", "CALL_FUNCTION", "CALL_METHOD", "CALL_KW", "CALL_FUNCTION_KW")


def _look_up(loads: Sequence[dis.Instruction], frame: FrameType) -> Any:
    """Return the object behind a name or a chain of attributes without running code of the program; else _UNKNOWN."""
    value: Any = _UNKNOWN
    for at, load in enumerate(loads):
        if not at and load.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
            value = load.argval
        elif not at and load.opname.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_NAME", "LOAD_GLOBAL")):
            value = frame.f_locals.get(load.argval, frame.f_globals.get(load.argval, _UNKNOWN))
        elif load.opname == "LOAD_ATTR" and value is not _UNKNOWN:
            value = inspect.getattr_static(value, load.argval, _UNKNOWN)
            value = _UNKNOWN if isinstance(value, property) else value
        else:
            return _UNKNOWN
    return value


def _read_operation(code: CodeType, at: int) -> _Operation:
    before: list[dis.Instruction] = []
    last: dis.Instruction | None = None
    for instruction in dis.get_instructions(code):
        if instruction.offset > at:
            break
        # A frame that waits for a call in Python may stand at the inline cache behind the instruction.
        if last is not None:
            before += _split(last)
        last = instruction
    if last is None:
        return _Operation("")
    if symbol := _symbol(last):
        right = _operand(before)
        return _Operation(symbol, left=_operand(before), right=right)
    if _is_call(last):
        return _read_callee(before, last)
    return _Operation("")


def _split(instruction: dis.Instruction) -> list[dis.Instruction]:
    """Python 3.13 loads two variables with one instruction."""
    if not isinstance(instruction.argval, tuple) or "LOAD_FAST" not in instruction.opname:
        return [instruction]
    return [
        instruction._replace(opname="LOAD_FAST", opcode=dis.opmap["LOAD_FAST"], argval=each)
        for each in instruction.argval
    ]


def _operand(before: list[dis.Instruction]) -> list[dis.Instruction]:
    """Take the instructions that leave one value on the stack off the end of `before`, and return them."""
    taken: list[dis.Instruction] = []
    wanted = 1
    while before and wanted > 0:
        instruction = before.pop()
        taken.append(instruction)
        wanted -= dis.stack_effect(instruction.opcode, instruction.arg, jump=False)
    return taken[::-1]


def _read_callee(before: list[dis.Instruction], call: dis.Instruction) -> _Operation:
    if start := _start_of(call):  # an argument may be a condition: its instructions leave more than one value
        behind: list[dis.Instruction] = []
        while before and not (_start_of(before[-1]) == start and before[-1].opname.startswith("LOAD_")):
            behind.append(before.pop())
        while behind and behind[-1].opname in ("LOAD_ATTR", "LOAD_METHOD"):  # `.relu` on a line of its own
            before.append(behind.pop())
    else:
        while before and before[-1].opname in ("PRECALL", "KW_NAMES", "EXTENDED_ARG"):
            before.pop()
        for _ in range(call.arg or 0):
            _operand(before)
    while before and before[-1].opname == "PUSH_NULL":
        before.pop()
    callee = before[-1] if before else None
    if callee is None or not isinstance(callee.argval, str):
        return _Operation("")
    if callee.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
        return _Operation("", callee=callee.argval)
    before.pop()
    return _Operation("", callee=callee.argval, is_attribute=True, owner=_operand(before))


def _start_of(instruction: dis.Instruction) -> tuple[int, int] | None:
    """Return line and column at which the expression begins; None before Python 3.11, and with -X no_debug_ranges."""
    at = getattr(instruction, "positions", None)
    return None if at is None or at.lineno is None or at.col_offset is None else (at.lineno, at.col_offset)


def _symbol(instruction: dis.Instruction) -> str:
    name = instruction.opname
    if name == "COMPARE_OP":
        return "compare"
    if name == "BINARY_OP":
        return instruction.argrepr
    if name == "CALL_INTRINSIC_1":  # Python 3.12 and later
        return "POSITIVE" if "POSITIVE" in instruction.argrepr else ""
    kind, _, operation = name.partition("_")
    if kind == "UNARY":
        return operation
    if kind in ("BINARY", "INPLACE"):
        return _SYMBOLS_3_10.get(operation, "") + ("=" if kind == "INPLACE" else "")
    return ""


class GivenBy(NamedTuple):
    """What a place in a program passes to a function: how many arguments by position, and which by keyword."""

    positions: int
    keywords: tuple[str, ...]


_sites: dict[tuple[int, int], tuple[CodeType, GivenBy | None]] = {}


def as_given(func: Any, args: Any, kwargs: Any, frame: FrameType, *, only_given: bool) -> tuple[Any, Any]:
    """Return the arguments by position or by keyword as the program passed them; unchanged if that is not known.

    A function of torch that is written in Python hands itself to a mode with most arguments by keyword, whatever its
    caller did, and with every default. `frame` is the frame that called the mode. `only_given` leaves out the defaults
    that the caller did not write.
    """
    if frame.f_code.co_name != "handle_torch_function" or frame.f_back is None:
        return args, kwargs
    own = frame.f_back
    code, caller = own.f_code, own.f_back
    names = code.co_varnames[: code.co_argcount]
    if caller is None or len(args) > len(names) or "args" in kwargs:
        return args, kwargs
    if _chooses(caller):
        given = caller.f_locals
        return (given["args"], given["kwargs"]) if only_given and "kwargs" in given else (args, kwargs)
    passed = {**dict(zip(names, args, strict=False)), **kwargs}
    site = _given_by(caller)
    if site is None or site.positions > len(names) or not set(names[: site.positions]).issubset(passed):
        return args, kwargs
    positions = names[: site.positions]
    others = {name: value for name, value in passed.items() if name not in positions}
    if only_given and (wanted := _without_defaults(func, others, site.keywords)) is not None:
        others = wanted
    return tuple(passed[name] for name in positions), others


def _without_defaults(func: Any, others: dict[str, Any], written: tuple[str, ...]) -> dict[str, Any] | None:
    """Return the arguments that the caller wrote; None if one of the others is not its default: it came another way."""
    defaults = _defaults_of(func)
    for name, value in others.items():
        if name not in written:
            default = defaults.get(name, _NO_DEFAULT)
            if value is not default and (type(value) is not type(default) or value != default):
                return None
    return {name: others[name] for name in written if name in others}


_NO_DEFAULT = object()


@functools.lru_cache(maxsize=1024)
def _defaults_of(func: Any) -> dict[str, Any]:
    code, defaults = getattr(func, "__code__", None), getattr(func, "__defaults__", None) or ()
    if code is None:
        return {}
    names = code.co_varnames[: code.co_argcount]
    return {**dict(zip(names[len(names) - len(defaults) :], defaults, strict=True)), **(func.__kwdefaults__ or {})}


def _given_by(frame: FrameType) -> GivenBy | None:
    code, at = frame.f_code, frame.f_lasti
    found = _sites.get((id(code), at))
    if found is None:
        if len(_sites) >= _MOST_PLACES:
            _sites.clear()
        found = _sites[id(code), at] = code, _read_site(code, at)
    return found[1]


def _read_site(code: CodeType, at: int) -> GivenBy | None:
    """Read the call instruction. None for `f(*args)`, and for a place that calls nothing by itself."""
    # A frame that waits for a call in Python may stand at the inline cache behind the instruction.
    passed = [instruction for instruction in dis.get_instructions(code) if instruction.offset <= at][-3:]
    if not passed:
        return None
    call, before = passed[-1], passed[:-1]
    if call.opname in ("CALL_KW", "CALL_FUNCTION_KW"):
        keywords = before[-1].argval
    elif call.opname in ("CALL", "CALL_FUNCTION", "CALL_METHOD"):  # Python 3.11 and 3.12 have KW_NAMES just before
        named = [each for each in before if each.opname == "KW_NAMES"]
        keywords = code.co_consts[named[-1].arg or 0] if named else ()
    else:
        return None
    return GivenBy((call.arg or 0) - len(keywords), tuple(keywords))
