"""What the caller wrote, read from the instruction it is at: operators by their names in Python, arguments as they were passed.

`x + y` is `Tensor.__add__`, which torch itself shows as `Tensor.add`; older tools name and count the two apart. An argument
passed by position keeps its position, though torch shows it as a keyword. No value of the caller is looked at, and each
place in a program is looked up once.
"""

from __future__ import annotations

import dis
import functools
from types import CodeType, FrameType
from typing import Any, NamedTuple

_COMPARISONS = ("ne", "lt", "le", "gt", "ge")
OPERATORS: dict[str, dict[str, str]] = {
    "Tensor.add": {"+": "add"},
    "Tensor.sub": {"-": "sub"},
    "Tensor.mul": {"*": "mul"},
    "Tensor.div": {"/": "truediv"},
    "Tensor.remainder": {"%": "mod"},
    "Tensor.matmul": {"@": "matmul", "@=": "imatmul"},
    "Tensor.add_": {"+=": "iadd"},
    "Tensor.sub_": {"-=": "isub"},
    "Tensor.mul_": {"*=": "imul"},
    "Tensor.div_": {"/=": "itruediv"},
    "Tensor.floor_divide_": {"//=": "ifloordiv"},
    "Tensor.remainder_": {"%=": "imod"},
    **{f"Tensor.{name}": {"compare": name} for name in _COMPARISONS},
}
"""Functions as torch shows them → symbol in the program → Python's name."""

_REFLECTED = {"add": "radd", "mul": "rmul"}
"""What has a name of its own when the tensor stands on the right, and is otherwise the same to torch."""
_SYMBOLS_3_10 = {
    "ADD": "+",
    "SUBTRACT": "-",
    "MULTIPLY": "*",
    "TRUE_DIVIDE": "/",
    "MODULO": "%",
    "MATRIX_MULTIPLY": "@",
    "FLOOR_DIVIDE": "//",
}
_MOST_PLACES = 100_000

_known: dict[tuple[int, int, str], tuple[CodeType, str]] = {}
"""The code is kept so that its id remains its own."""


def spell_operator(name: str, frame: FrameType) -> str:
    """The name of an op that `frame` is calling: as an operator has it, or as it is."""
    code, at = frame.f_code, frame.f_lasti
    found = _known.get((id(code), at, name))
    if found is None:
        if len(_known) >= _MOST_PLACES:
            _known.clear()
        found = _known[id(code), at, name] = code, _spell(name, code, at)
    return found[1]


def _spell(name: str, code: CodeType, at: int) -> str:
    before: list[dis.Instruction] = []
    for instruction in dis.get_instructions(code):
        if instruction.offset == at:
            python_name = OPERATORS[name].get(_symbol(instruction))
            if python_name is None:
                return name
            if python_name in _REFLECTED and _left_is_constant(before):
                python_name = _REFLECTED[python_name]
            return f"Tensor.__{python_name}__"
        before.append(instruction)
    return name


def _symbol(instruction: dis.Instruction) -> str:
    name = instruction.opname
    if name == "COMPARE_OP":
        return "compare"
    if name == "BINARY_OP":
        return instruction.argrepr
    kind, _, operation = name.partition("_")
    if kind in ("BINARY", "INPLACE"):
        return _SYMBOLS_3_10.get(operation, "") + ("=" if kind == "INPLACE" else "")
    return ""


def _left_is_constant(before: list[dis.Instruction]) -> bool:
    """Whether the left operand is written out, as in `2 * x`: its instruction is the one before those of the right operand."""
    wanted = 1
    while before and wanted > 0:
        instruction = before.pop()
        wanted -= dis.stack_effect(instruction.opcode, instruction.arg, jump=False)
    return wanted == 0 and bool(before) and before[-1].opname in ("LOAD_CONST", "LOAD_SMALL_INT")


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
    if caller.f_code.co_filename.endswith(
        "_jit_internal.py"
    ):  # one of two functions, chosen by an argument: max_pool2d
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
