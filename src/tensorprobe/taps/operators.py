"""Operators by their names in Python: `x + y` is `Tensor.__add__`, which torch itself shows as `Tensor.add`.

Older tools name and count the two apart. Which one a call is, is told by the instruction that the caller is at: no value
of the caller's is looked at, and each place in a program is looked up once.
"""

from __future__ import annotations

import dis
from types import CodeType, FrameType

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
