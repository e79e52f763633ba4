"""The path of each module in the user's model, without what wrappers put around it. Modules are held weakly."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
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
    """What a wrapper of torch wraps; None for other modules. Wrappers are recognised by type, never by name."""
    for cls in type(module).__mro__:
        attribute = _INNER_NAMES.get(cls.__name__)
        if attribute is not None and cls.__module__.startswith(_WRAPPER_HOMES):
            inner = module._modules.get(attribute)
            return inner if isinstance(inner, nn.Module) else None
    return None


def class_name(module: nn.Module) -> str:
    """The name of the user's class; FSDP2 puts a class of its own in front of it."""
    cls = type(module)
    if cls.__name__.startswith("FSDP") and any(base.__name__ == "FSDPModule" for base in cls.__mro__):
        return next(base.__name__ for base in cls.__mro__[1:] if base.__name__ != "FSDPModule")
    return cls.__name__


class ModuleNames:
    """Path by module. A module met that is not in the model keeps the path of nothing: its class says what it is."""

    def __init__(self) -> None:
        self._paths: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._root: weakref.ref[nn.Module] | None = None

    def add(self, model: Any) -> None:
        """Learn a model: a module, or several in a list, tuple or dict (the chunks of a pipeline)."""
        if isinstance(model, nn.Module):
            self._walk(model, "")
        elif isinstance(model, dict):
            for key, chunk in model.items():
                self._walk(chunk, str(key))
        elif isinstance(model, Iterable):
            chunks = list(model)
            for i, chunk in enumerate(chunks):
                self._walk(chunk, "" if len(chunks) == 1 else str(i))

    @property
    def root(self) -> nn.Module | None:
        """The first model that was added, without its wrappers; None when there is none, or no more."""
        return None if self._root is None else self._root()

    def items(self) -> list[tuple[nn.Module, str]]:
        """Every module with its path, in the order of torch's `named_modules`, model after model."""
        return list(self._paths.items())

    def path(self, module: nn.Module) -> str | None:
        """The path of a module; None when it belongs to no model that was added."""
        return self._paths.get(module)

    def _walk(self, module: nn.Module, path: str) -> None:
        todo = [(module, path)]
        while todo:
            module, path = todo.pop()
            if module in self._paths:
                continue
            self._paths[module] = path
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
    """A module's own parameters as slots, without those of its children."""
    return [(f"parameters.{name}", value) for name, value in module._parameters.items() if value is not None]
