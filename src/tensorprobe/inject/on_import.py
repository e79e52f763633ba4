"""Waits for the first import of torch and then runs the hooks of the environment. It changes nothing else."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from tensorprobe.inject import HOOKS_VARIABLE, SIM_HOOK
from tensorprobe.model.interrupts import let_through


def install() -> None:
    """Start waiting, if there are hooks."""
    if os.environ.get(HOOKS_VARIABLE) and "torch" not in sys.modules:
        sys.meta_path.insert(0, _TorchFinder())


class _TorchFinder(importlib.abc.MetaPathFinder):
    """Finds torch as usual, and runs the hooks after it is loaded. On a simulated device, torch_npu loads torch first."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> Any:
        if fullname == "torch_npu" and SIM_HOOK in _hooks():
            import_module("torch")  # which runs the hooks, and one of them brings a finder for torch_npu
            return importlib.util.find_spec(fullname)
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenHooks(spec.loader)
        return spec


class _ThenHooks(importlib.abc.Loader):
    """Wraps another loader, and runs the hooks after it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = module.__loader__ = self._loader  # type: ignore[union-attr]
        self._loader.exec_module(module)
        run_hooks(_hooks().items())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _hooks() -> dict[str, str]:
    hooks: dict[str, str] = json.loads(os.environ.get(HOOKS_VARIABLE) or "{}")
    return hooks


def run_hooks(hooks: Any) -> None:
    """Call each hook with its text. If one fails, that is reported, and the program continues."""
    for target, payload in hooks:
        module, _, function = target.partition(":")
        try:
            getattr(import_module(module), function)(payload)
        except Exception as error:
            let_through(error)
            sys.stderr.write(f"tensorprobe: {target} failed: {type(error).__name__}: {error}\n")
