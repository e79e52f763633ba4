"""How to handle each function that a tap meets: its canonical name, or that it is not an operation.

There is no list of operations to record. Everything that torch lets a mode see is recorded, unless it only queries a tensor.
A function that returns no tensor and changes none is treated as a query from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

import msgspec
import torch
import torch.distributed
import torch.nn.functional

from tensorprobe import torch_names
from tensorprobe.arguments import changed_arguments
from tensorprobe.model.reason import Unrecorded
from tensorprobe.ops import Trait, has, is_collective, received_slots, short_name
from tensorprobe.ops.names import RECURRENT
from tensorprobe.taps.override_free import COMPOSITES, ENGINES, IN_C, body_of

_PREFIXES = (
    ("torch.nn.functional.", "Functional."),
    ("torch._C._nn.", "Functional."),
    ("torch.Tensor.", "Tensor."),
    ("torch._VF.", "VF."),
    ("torch.functional.", "Torch."),
    ("torch.distributed.", "Distributed."),
    ("torch_npu.", "NPU."),
    ("npu.", "NPU."),
    ("torch.", "Torch."),
)

_HOMES = {"torch": torch, "torch.nn.functional": torch.nn.functional, "torch.Tensor": torch.Tensor}
OUT = ("input.kwargs.out",)
WRITTEN_ONLY, UNINITIALISED = Unrecorded.WRITTEN_ONLY.value, Unrecorded.UNINITIALISED.value


_ANSWERS = ("__bool__", "__nonzero__")

Argument = int | str
"""A position or a keyword."""


class FunctionPlan(msgspec.Struct, frozen=True):
    """How calls of one function are handled. `name` is empty for a function that is not an operation.

    - `returns_changed`: everything the call changes is returned, as by `Tensor.add_`.
    - `receives`: prefixes of the slots that the call only writes to. Their values before the call are of no interest.
    - `writes`: slots, or lists of slots when they end with a dot, that may change without a new version number.
    - `overwrites`: arguments that every call changes.
    - `by_request`: the position of `inplace`, which functions of torch.nn.functional take; -1: there is none.
    - `is_view`: results and gradients hold only values of the inputs.
    - `is_special`: collectives, and functions made of others. They are described even for a sink that only looks.
    - `workspace`: the output that is not fully written.
    - `code`: the code of a Python function that calls the mode. torch hands it arguments by keyword, however the program
      passed them.
    - `answers`: returns no tensor and is recorded all the same.
    - `body`: a function that is made of others, without its override checks. Without a name: it runs the autograd engine.
    - `has_parts`: what it calls is seen without a body: a function of the program's own.
    - `original`: the function of torch, where the program has put another in its place.
    - `is_plain`: written in C, and executed as it is called: C code may handle the call.
    - `is_quick`: plain, and all it does is to return tensors, or to change the one it returns: C code may record the call.
    """

    name: str
    mutates: bool = False
    distributed: bool = False
    allocates: bool = False
    receives: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    returns_changed: bool = False
    overwrites: tuple[Argument, ...] = ()
    by_request: int = -1
    is_view: bool = False
    is_special: bool = False
    code: CodeType | None = None
    answers: bool = False
    workspace: str = ""
    body: Callable[..., Any] | None = None
    has_parts: bool = False
    original: Any = None
    is_plain: bool = False
    is_quick: bool = False

    def overwritten(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Return the tensors that a call is going to change, as far as its function and its arguments say."""
        arguments = self.overwrites
        asked = kwargs.get("inplace") or (0 <= self.by_request < len(args) and args[self.by_request] is True)
        if self.by_request >= 0 and asked:
            arguments = (0, "input")
        found: list[torch.Tensor] = []
        for argument in arguments:
            if isinstance(argument, int):
                value = args[argument] if argument < len(args) else None
            else:
                value = kwargs.get(argument)
            if isinstance(value, torch.Tensor):
                found.append(value)
            elif isinstance(value, (list, tuple)):
                found += [entry for entry in value if isinstance(entry, torch.Tensor)]
        return found


NOT_AN_OP = FunctionPlan("")


def plan_function(func: Any, only: frozenset[str] = frozenset()) -> FunctionPlan:
    """Return the plan for a function as a TorchFunctionMode meets it. A question in `only` is recorded as an op."""
    engine = body_of(func, ENGINES)
    if engine is not None:
        return FunctionPlan("", body=engine)
    name = getattr(func, "__name__", "")
    if has(f"Tensor.{name}", Trait.QUESTION):
        asked = f"Tensor.{name}"
        return FunctionPlan(asked, answers=True) if name in _ANSWERS and asked in only else NOT_AN_OP
    full = _full_name(func, name)
    if full is None or ".__get__" in full or ".__set__" in full:
        return NOT_AN_OP
    canonical = _canonical(full)
    if canonical is None:
        return NOT_AN_OP
    distributed, allocates = is_collective(canonical), has(canonical, Trait.ALLOCATES)
    mutates, writes = changed_arguments(canonical)
    in_place = canonical.startswith("Tensor.") and name.endswith("_") and not name.endswith("__")
    body = body_of(func, COMPOSITES)
    receives = received_slots(canonical)
    mutates = distributed or mutates
    overwrites = _overwritten_by(func, writes, mutates)
    code = getattr(func, "__code__", None)
    workspace = WORKSPACES.get(short_name(canonical), "")
    is_plain = code is None and body is None and not allocates and isinstance(func, IN_C)
    is_odd = distributed or receives or workspace or (mutates and not in_place) or canonical.startswith("Ops.")
    return FunctionPlan(
        canonical,
        mutates,
        distributed,
        allocates,
        receives,
        writes,
        in_place,
        overwrites,
        -1 if overwrites else _place_of_inplace(func),
        has(canonical, Trait.VIEW),
        distributed or body is not None,
        code,
        is_plain=is_plain,
        is_quick=is_plain and not is_odd,
        workspace=workspace,
        body=body,
    )


def _place_of_inplace(func: Any) -> int:
    code = getattr(func, "__code__", None)
    names = () if code is None else code.co_varnames[: code.co_argcount]
    return names.index("inplace") if "inplace" in names else -1


def _overwritten_by(func: Any, writes: tuple[str, ...], mutates: bool) -> tuple[Argument, ...]:
    """Return the arguments that a function changes whenever it is called."""
    if isinstance(func, (torch_names.OpOverload, torch_names.OpOverloadPacket)):
        overload = func if isinstance(func, torch_names.OpOverload) else getattr(func, func.overloads()[0])
        return tuple(
            place
            for number, argument in enumerate(overload._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
            for place in ((number, argument.name) if not argument.kwarg_only else (argument.name,))
        )
    if writes:
        slots = [slot.rstrip(".").removeprefix("input.") for slot in writes]
        return tuple(int(slot) if slot.isdecimal() else slot.removeprefix("kwargs.") for slot in slots)
    return (0, "input") if mutates else ()


def _canonical(full: str) -> str | None:
    if full.startswith(("profiler.", "torch._C._profiler")):
        return None
    for prefix, ours in _PREFIXES:
        if full.startswith(prefix):
            name = full[len(prefix) :]
            return f"VF.{name}" if ours == "Torch." and name in RECURRENT else ours + name
    return f"Ops.{full}"


def _is(one: Any, other: Any) -> bool:
    """Whether both are the same function. Each look-up makes a new object of a function that is written in C."""
    return callable(one) and type(one) is type(other) and bool(one == other)


def _full_name(func: Any, name: str) -> str | None:
    """Return the dotted name of a function, beginning with its home module; None if it is not public."""
    if isinstance(func, (torch_names.OpOverload, torch_names.OpOverloadPacket)):
        return str(func) if func.__module__ is None or "." in str(func) else f"{func.__module__}.{name}"
    module = getattr(func, "__module__", None) or ""
    if module.startswith("torch.distributed"):
        return f"torch.distributed.{name}"
    for alias in vars(torch.sparse):  # private functions of torch, under the names that users know
        if not alias.startswith("_") and _is(getattr(torch.sparse, alias), func):
            return f"torch.sparse.{alias}"
    resolved = torch_names.resolve_name(func)
    if resolved:
        home, _, last = str(resolved).rpartition(".")
        # Of the names of one function torch gives the last in its list: that of torch.mm would be torch.spmm.
        is_own = last != name and not name.startswith("_") and _is(getattr(_HOMES.get(home), name, None), func)
        return f"{home}.{name}" if is_own else str(resolved)
    if getattr(torch, name, None) is func:  # resolve_name leaves out private functions such as _foreach_add
        return f"torch.{name}"
    if getattr(torch_names.functions_of_nn, name, None) is func:
        return f"torch._C._nn.{name}"
    home = module.split(".")[0] or "torch"
    return f"{home}.{name}" if name else None


class AtenPlan(msgspec.Struct, frozen=True):
    """What the schema of an op says. `name` is None when no tensor comes out. `written` are its outputs when it returns nothing."""

    name: str | None
    written: tuple[str, ...] = ()
    allocates: bool = False
    receives: tuple[str, ...] = ()
    workspace: str = ""


WORKSPACES = {
    "mkldnn_rnn_layer": "output.3",
    "_cudnn_rnn": "output.4",
    "miopen_rnn": "output.4",
    "cudnn_batch_norm": "output.3",
    "all_gather_copy_in": "output.1",  # before torch 2.8 it makes the memory that all ranks are gathered in
}
"""Op → the output that is memory for the backward or for a collective."""


def plan_aten(func: Any) -> AtenPlan:
    """Return the plan for an op as a TorchDispatchMode meets it: `Aten.mm.default`. An op of another library keeps its namespace."""
    schema = func._schema
    returns_tensor = any("Tensor" in str(value.type) for value in schema.returns)
    written = tuple(
        f"input.{place}" if not argument.kwarg_only else f"input.kwargs.{argument.name}"
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    if not returns_tensor and not written:
        return AtenPlan(None)
    receives = tuple(f"input.kwargs.{argument.name}" for argument in schema.arguments if argument.is_out)
    base = schema.name.rpartition("::")[2]
    name = "Aten." + str(func).removeprefix("aten.")
    allocates = has(f"Aten.{base}", Trait.ALLOCATES)
    return AtenPlan(name, () if returns_tensor else written, allocates, receives, WORKSPACES.get(base, ""))
