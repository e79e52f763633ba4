"""Finds the function of an op by its recorded name, or the reason why its calls are not replayed.

A run is somebody else's file, so a name in it is looked up in an allow-list. Attributes are never followed. Allowed
are: functions that torch offers to overrides, operators of the dispatcher that take and return tensors and plain values,
and public functions that torch_npu defines itself. A look-up takes one attribute of a fixed home, and nothing more. What
touches files, processes, devices, global state or storage is refused by its schema, its home or the table below.
"""

from __future__ import annotations

import keyword
import re
import sys
import types
from collections.abc import Callable
from functools import cache, reduce
from typing import Any, NamedTuple

import torch
import torch.nn.functional

from tensorprobe import torch_names
from tensorprobe.ops import why_not_replayed

_HOMES: dict[str, tuple[str, ...]] = {
    "Functional": ("torch.nn.functional", "torch._C._nn"),
    "Tensor": ("torch.Tensor",),
    "Torch": ("torch", "torch._C._nn", "torch.linalg"),  # the older tools write `Torch.inv` for torch.linalg.inv
    **{
        f"Torch.{part}": (f"torch.{part}",)
        for part in ("functional", "linalg", "fft", "special", "nn.functional", "nn.init")
    },
    "VF": ("torch._VF",),
}
"""Prefix of an op's name → the objects in which the rest is looked up."""
_REFUSED_LIBRARIES: dict[str, str] = {
    **dict.fromkeys(
        "c10d _c10d_functional _c10d_functional_autograd symm_mem _dtensor fsdp".split(), "needs the other ranks"
    ),
    **dict.fromkeys("inductor inductor_prims".split(), "manages memory and computes no values"),
    **dict.fromkeys("image debugprims".split(), "reads or writes files"),
    **dict.fromkeys(
        "prim profiler streams static_runtime export debug_mode_ops _test torch_npu_profiler".split(),
        "changes the state of the process and computes no values",
    ),
}
_PLAIN = frozenset("Tensor List Optional Tuple Dict int float bool complex number str Device Generator QScheme".split())
"""The types that a schema may contain. Storages, streams, process groups and class objects are not among them."""
_OF_TORCH = ("aten", "prims", "npu")
"""Libraries whose operators may take strings: the name of a mode, never of a file."""
_FILE = re.compile(r"file|path|folder|dir(ectory)?$|url")
_STATEFUL = re.compile(
    r"(npu_)?(set|init|finalize|enable|disable|register|unregister|load|save|dump|start|stop|apply|add_\w+_methods"
    r"|erase|synchronize|seed|empty|shutdown|reset)(_|$)"
)
"""Prefixes of torch_npu functions that change the process or the device."""
_OF_NPU = ("torch_npu", __name__.partition(".")[0])
"""The packages that may define functions of torch_npu: itself, or our simulated device."""


class CannotReplay(Exception):
    """A call cannot be run alone. The message becomes the reason of a skipped call; users never see the exception."""


class UnknownOp(CannotReplay):
    """torch has no such function in this process."""


class Found(NamedTuple):
    """A function and how a Python program names it."""

    function: Callable[..., Any]
    path: str


def find_function(op: str) -> Callable[..., Any]:
    """Return the function behind `Functional.conv2d`, `Torch.linalg.norm`, `Aten.mm.default`; CannotReplay with the reason."""
    return find_op(op).function


@cache
def find_op(op: str) -> Found:
    """Return the function with its path: `torch.nn.functional.conv2d`. CannotReplay with the reason."""
    family, _, name = op.partition(".")
    refused = why_not_replayed(op)
    if refused is not None:
        raise CannotReplay(refused)
    parts = name.split(".")
    for part in parts:
        if not part.isascii() or not part.isidentifier():
            raise CannotReplay(f"{op} is not a known operation on tensors")
    if family == "Function":
        return _in_program(name)
    found = _in_dispatcher(family, parts) if family in ("Aten", "Ops", "NPU") else None
    if family == "NPU":
        found = _in_torch_npu(parts) or found
    if found is None and family in _HOMES:
        home, _, last = op.rpartition(".")
        found = _in_torch(home, last)
    if found is None:
        raise UnknownOp(f"{op} is not a known operation on tensors in this process")
    return found


def _in_program(name: str) -> Found:
    """Look up a `torch.autograd.Function` among the classes that the user's own modules have defined in this process."""
    classes = list(torch.autograd.Function.__subclasses__())
    for each in classes:
        classes += [one for one in each.__subclasses__() if one not in classes]
    found = {each for each in classes if each.__name__ == name and each.__module__.partition(".")[0] != "torch"}
    if len(found) == 1:
        (cls,) = found
        return Found(cls.apply, f"importlib.import_module({cls.__module__!a}).{cls.__qualname__}.apply")
    many = f"has {len(found)} of that name" if found else "has not imported"
    raise UnknownOp(
        f"a torch.autograd.Function of the program, which this process {many}: the calls inside it are checked"
    )


def _in_torch(home: str, name: str) -> Found | None:
    for path in _HOMES.get(home, ()):
        if name in _overridable()[path] or _is_kernel(path, name):
            found = getattr(_home(path), name, None)
            if callable(found) and not isinstance(found, (type, types.ModuleType)):
                return Found(found, f"{path}.{name}")
    return None


def _home(path: str) -> Any:
    return reduce(getattr, path.split(".")[1:], torch)


@cache
def _overridable() -> dict[str, frozenset[str]]:
    """Return for each home the names of the functions that torch offers to overrides, or that torch.nn.functional defines."""
    offered = {function for functions in torch_names.overridable_functions().values() for function in functions}
    found = {}
    for path in {path for paths in _HOMES.values() for path in paths}:
        home = _home(path)
        members = {name: getattr(home, name, None) for name in dir(home)}
        found[path] = frozenset(
            name
            for name, member in members.items()
            if isinstance(member, _FUNCTIONS) and (member in offered or _is_public_function(path, name, member))
        )
    return found


_FUNCTIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
)


def _is_public_function(path: str, name: str, member: Any) -> bool:
    return path.startswith("torch.nn.") and member.__module__ == path and not name.startswith("_")


def _is_kernel(path: str, name: str) -> bool:
    """Return whether a name is a binding of an ATen operator: factories, `_foreach_add`, fused optimizer steps, gelu."""
    if (path, name) in _FACTORIES:
        return True
    bound = any(hasattr(home, name) for home in _KERNELS.get(path, ()))
    return bound and any(_is_plain(schema) for schema in _schemas("aten", name))


_FACTORIES = {("torch", "asarray"), ("torch.Tensor", "new_tensor"), ("torch.Tensor", "to_sparse_coo")}
_KERNELS: dict[str, tuple[Any, ...]] = {
    "torch": (torch_names.functions_of_aten,),
    "torch._VF": (torch_names.functions_of_aten,),
    "torch._C._nn": (torch_names.functions_of_nn,),
    "torch.nn.functional": (torch_names.functions_of_nn, torch_names.functions_of_aten),
    "torch.Tensor": (torch_names.methods_of_tensor,),
}


def _in_dispatcher(family: str, parts: list[str]) -> Found | None:
    """Look up `mm.default`, `aten.mm` or `mylib.op.default` among the operators of the dispatcher."""
    library = {"Aten": "aten", "NPU": "npu"}.get(family)
    ways = [(library, parts)] if library is not None and len(parts) <= 2 else []
    if family != "NPU" and 2 <= len(parts) <= 3:
        ways.append((parts[0], parts[1:]))
    for namespace, (name, *overload) in ways:
        schemas = _schemas(namespace, name)
        if not schemas:
            continue
        if namespace in _REFUSED_LIBRARIES:
            raise CannotReplay(f"{namespace}::{name} {_REFUSED_LIBRARIES[namespace]}")
        wanted = [s for s in schemas if not overload or (s.overload_name or "default") == overload[0]]
        if not any(_is_plain(schema) for schema in wanted):
            continue
        packet = getattr(getattr(torch.ops, namespace), name, None)
        function = getattr(packet, overload[0], None) if overload else packet
        if isinstance(function, (torch_names.OpOverload, torch_names.OpOverloadPacket)):
            return Found(function, _path("torch.ops", namespace, name, *overload))
    return None


def _path(*parts: str) -> str:
    """Return how Python writes it; the overload of `random_` that is called `from` needs getattr."""
    if keyword.iskeyword(parts[-1]):
        return f"getattr({'.'.join(parts[:-1])}, {parts[-1]!r})"
    return ".".join(parts)


def _schemas(namespace: str, name: str) -> list[Any]:
    return list(torch_names.schemas_of_op(f"{namespace}::{name}"))


def _is_plain(schema: Any) -> bool:
    """Return whether an operator takes and returns tensors and plain values only, and none of these names a file."""
    namespace = schema.name.partition("::")[0]
    taken = {argument.name: str(argument.type) for argument in schema.arguments}
    given = [str(value.type) for value in schema.returns]
    if not all(set(re.findall(r"[\w.]+", kind)) <= _PLAIN for kind in (*taken.values(), *given)):
        return False
    if any("str" in kind and (namespace not in _OF_TORCH or _FILE.search(name)) for name, kind in taken.items()):
        return False
    writes = any(each.alias_info is not None and each.alias_info.is_write for each in schema.arguments)
    return any("Tensor" in kind for kind in (*taken.values(), *given)) and (writes or bool(given))


def _in_torch_npu(parts: list[str]) -> Found | None:
    """Look up a public function that torch_npu defines itself; nothing that it imported."""
    package = sys.modules.get("torch_npu")
    if package is None or len(parts) != 1:
        return None
    name = parts[0]
    found = vars(package).get(name)
    path = f"torch_npu.{name}"
    if isinstance(found, (torch_names.OpOverload, torch_names.OpOverloadPacket)):
        return Found(found, path) if _in_dispatcher("Ops", str(found).split(".")) else None
    if (
        name.startswith("_")
        or _STATEFUL.match(name)
        or not isinstance(found, (types.FunctionType, types.BuiltinFunctionType))
    ):
        return None
    home = getattr(found, "__module__", None) or ""
    ours = isinstance(home, str) and any(home == root or home.startswith(f"{root}.") for root in _OF_NPU)
    return Found(found, path) if ours else None


_overridable()  # at import, before the program can patch torch
