"""What to do with each function a tap meets: its canonical name, or that it is not an operation.

No list of operations to record is kept: whatever torch lets itself be watched at is recorded, unless it only asks a
tensor about itself. A function that turns out to give back no tensor and to change none is learnt to be such a question.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed

from tensorprobe import torch_names
from tensorprobe.arguments import changed_arguments
from tensorprobe.model.reason import Unrecorded
from tensorprobe.ops import Trait, has, is_collective, received_slots
from tensorprobe.ops.names import RECURRENT
from tensorprobe.taps.override_free import COMPOSITES, ENGINES

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

OUT = ("input.kwargs.out",)
WRITTEN_ONLY, UNINITIALISED = Unrecorded.WRITTEN_ONLY.value, Unrecorded.UNINITIALISED.value


class Plan(NamedTuple):
    """How calls of one function are handled. `name` is None for a function that is not an operation.

    `returns_changed` is set where all that the call changes is what it gives back, as for `Tensor.add_`.
    `receives` are the beginnings of the slots that the call only writes to: what stands in them before is nobody's result.
    `writes` are slots, or with a dot at the end lists of them, that the call may change without a trace in the version.
    """

    name: str | None
    mutates: bool = False
    distributed: bool = False
    allocates: bool = False
    receives: tuple[str, ...] = ()
    is_leaf: bool = True
    writes: tuple[str, ...] = ()
    returns_changed: bool = False


NOT_AN_OP = Plan(None)
ENGINE = Plan(None, is_leaf=False)
"""For functions that run the autograd engine: no operations themselves, but what happens in them is watched."""


def plan_function(func: Any) -> Plan:
    """The plan for a function as a TorchFunctionMode meets it."""
    if func in ENGINES:
        return ENGINE
    name = getattr(func, "__name__", "")
    if has(f"Tensor.{name}", Trait.QUESTION):
        return NOT_AN_OP
    full = _full_name(func, name)
    if full is None or ".__get__" in full or ".__set__" in full:
        return NOT_AN_OP
    canonical = _canonical(full)
    if canonical is None:
        return NOT_AN_OP
    distributed, allocates = is_collective(canonical), has(canonical, Trait.ALLOCATES)
    mutates, writes = changed_arguments(canonical)
    in_place = canonical.startswith("Tensor.") and name.endswith("_") and not name.endswith("__")
    is_leaf = func not in COMPOSITES
    receives = received_slots(canonical)
    return Plan(canonical, distributed or mutates, distributed, allocates, receives, is_leaf, writes, in_place)


def _canonical(full: str) -> str | None:
    if full.startswith(("profiler.", "torch._C._profiler")):
        return None
    for prefix, ours in _PREFIXES:
        if full.startswith(prefix):
            name = full[len(prefix) :]
            return f"VF.{name}" if ours == "Torch." and name in RECURRENT else ours + name
    return f"Ops.{full}"


def _full_name(func: Any, name: str) -> str | None:
    """A dotted name that starts with where the function is at home; None for what is no public function."""
    if isinstance(func, (torch_names.OpOverload, torch_names.OpOverloadPacket)):
        return str(func) if func.__module__ is None or "." in str(func) else f"{func.__module__}.{name}"
    module = getattr(func, "__module__", None) or ""
    if module.startswith("torch.distributed"):
        return f"torch.distributed.{name}"
    resolved = torch_names.resolve_name(func)
    if resolved:
        return str(resolved)
    if (
        getattr(torch, name, None) is func
    ):  # torch leaves its private functions, such as _foreach_add, out of its own list
        return f"torch.{name}"
    if getattr(torch_names.functions_of_nn, name, None) is func:
        return f"torch._C._nn.{name}"
    home = module.split(".")[0] or "torch"
    return f"{home}.{name}" if name else None


class AtenPlan(NamedTuple):
    """What the schema of an op says. `name` is None where no tensor comes out; `written` are its outputs when it returns nothing."""

    name: str | None
    written: tuple[str, ...] = ()
    allocates: bool = False
    receives: tuple[str, ...] = ()


def plan_aten(func: Any) -> AtenPlan:
    """The plan for an op as a TorchDispatchMode meets it: `Aten.mm.default`; an op of another library keeps its namespace."""
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
    return AtenPlan(name, () if returns_tensor else written, has(f"Aten.{base}", Trait.ALLOCATES), receives)
