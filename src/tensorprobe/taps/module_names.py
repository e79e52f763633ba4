"""The path of each module in the user's model, without wrappers.

Modules are held weakly, and by their ids: the program's classes may have `__hash__` and `__eq__` of their own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

_INNER_NAMES = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
}
_WRAPPER_HOMES = ("torch.",)


def inner_module(module: nn.Module) -> nn.Module | None:
    """Return the module inside a wrapper of torch; None for other modules. Wrappers are recognised by type, never by name."""
    for cls in type(module).__mro__:
        attribute = _INNER_NAMES.get(cls.__name__)
        if attribute is not None and cls.__module__.startswith(_WRAPPER_HOMES):
            inner = module._modules.get(attribute)
            return inner if isinstance(inner, nn.Module) else None
    return None


def class_name(module: nn.Module) -> str:
    """Return the name of the user's class. FSDP2 puts a class of its own in front of it."""
    cls = type(module)
    if cls.__name__.startswith("FSDP") and any(base.__name__ == "FSDPModule" for base in cls.__mro__):
        return next(base.__name__ for base in cls.__mro__[1:] if base.__name__ != "FSDPModule")
    return cls.__name__


_UNKNOWN: tuple[Callable[[], nn.Module | None], str] = (lambda: None), ""


class ModuleNames:
    """Module → path. A module outside of the model has an empty path: its class says what it is.

    `as_torch`: the paths are those of `named_modules`, with what wrappers put into them, and a model itself has none.
    """

    def __init__(self, *, as_torch: bool = False) -> None:
        self.as_torch = as_torch
        self._paths: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        self._many = 1000
        self._root: weakref.ref[nn.Module] | None = None

    def add(self, model: Any) -> None:
        """Learn a model: a module, or several in a list, tuple or dict (the chunks of a pipeline)."""
        if len(self._paths) > self._many:
            self._paths = {key: known for key, known in self._paths.items() if known[0]() is not None}
            self._many = 2 * len(self._paths) + 1000
        if isinstance(model, nn.Module):
            self._walk(model, "")
        elif isinstance(model, dict):
            for key, chunk in model.items():
                self._walk(chunk, str(key))
                self._learn(chunk, str(key))
        elif isinstance(model, Iterable):
            chunks = list(model)
            for i, chunk in enumerate(chunks):
                self._walk(chunk, "" if len(chunks) == 1 else str(i))

    @property
    def root(self) -> nn.Module | None:
        """Return the first model that was added, without its wrappers; None if there is none, or it is gone."""
        return None if self._root is None else self._root()

    def items(self) -> list[tuple[nn.Module, str]]:
        """Yield every module with its path, in the order of torch's `named_modules`, model after model."""
        return [(module, path) for held, path in self._paths.values() if (module := held()) is not None]

    def path(self, module: nn.Module) -> str | None:
        """Return the path of a module; None if it belongs to no model that was added."""
        held, path = self._paths.get(id(module), _UNKNOWN)
        return path if held() is module else None

    def is_call(self, module: nn.Module) -> bool:
        """Return whether this module belongs to the user's model, and is no wrapper around it."""
        return self.path(module) is not None if self.as_torch else inner_module(module) is None

    def _learn(self, module: nn.Module, path: str) -> bool:
        """Learn the path of a module. Return whether the module is new."""
        is_new = self.path(module) is None
        if is_new:
            self._paths[id(module)] = weakref.ref(module), path
        return is_new

    def _walk(self, module: nn.Module, path: str) -> None:
        if self.as_torch:
            self._root = self._root or weakref.ref(module)
            for name, child in module.named_modules(prefix=path):
                if child is not module and type(child).__name__ != "FullyShardedDataParallel":
                    self._learn(child, name)
            return
        todo = [(module, path)]
        while todo:
            module, path = todo.pop()
            if not self._learn(module, path):
                continue
            inner = inner_module(module)
            if inner is not None:
                todo.append((inner, path))
                continue
            if self._root is None:
                self._root = weakref.ref(module)
            # Reversed, so that of several names of a module the first counts, as in torch.
            for name, child in reversed(module._modules.items()):
                if child is not None:
                    todo.append((child, f"{path}.{name}" if path else name))


def direct_parameters(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return a module's own parameters as slots, without those of its children."""
    return [(f"parameters.{name}", value) for name, value in module._parameters.items() if value is not None]


def parameters_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the parameters of a module and of its children. Its method `parameters` may be overridden by the program."""
    waiting = [module]
    while waiting:
        module = waiting.pop()
        yield from (value for value in module._parameters.values() if value is not None)
        waiting += [child for child in reversed(module._modules.values()) if child is not None]


def named_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the parameters and buffers of a model, or of several, by name."""
    names = ModuleNames()
    names.add(model)
    for module, path in names.items():
        for name, value in (*module._parameters.items(), *module._buffers.items()):
            if value is not None:
                yield f"{path}.{name}" if path else name, value
