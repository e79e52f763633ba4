"""Find where in the program an op runs: in which module, and whether in backward.

`ModuleWatch` follows `nn.Module` calls through torch's global module hooks while something needs paths. Forward: the
innermost module on the stack. Backward: every autograd node carries the sequence number it got when the forward pass
made it, and the watch remembers which range of numbers each module call covered. Paths are relative to the outermost
module called, without the `module.` of a data-parallel wrapper.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from tensorprobe import torch_names

_REMEMBERED_CALLS = 50_000  # bounds the memory of a long run; backward asks about recent calls only


def in_backward() -> bool:
    """Return whether the current thread is executing a node of the autograd graph."""
    return torch_names.autograd_node() is not None


class ModuleWatch:
    """Knows, from `start` to `stop`, the path of the module that the current op belongs to."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._spans: deque[tuple[int, int, str]] = deque(maxlen=_REMEMBERED_CALLS)
        self._handles: list[Any] = []
        self._told: list[Callable[[Iterable[str]], None]] = []
        self._root: weakref.ref[torch.nn.Module] | None = None

    def start(self, told: Callable[[Iterable[str]], None]) -> None:
        """Start to follow module calls, until `stop`.

        `told` is called with the paths of its modules each time that the model, the first module called, is about to be
        called.
        """
        self._told.append(told)
        if len(self._told) == 1:
            hooks = torch.nn.modules.module
            self._handles = [
                hooks.register_module_forward_pre_hook(self._enter),
                hooks.register_module_forward_hook(self._leave, always_call=True),
            ]

    def stop(self, told: Callable[[Iterable[str]], None]) -> None:
        """Remove the hooks when the last user is done."""
        self._told.remove(told)
        if not self._told:
            for handle in self._handles:
                handle.remove()
            self._handles, self._root = [], None
            self._spans.clear()

    def path(self) -> str:
        """Return the path of the module that the running op belongs to; empty outside of modules."""
        node = torch_names.autograd_node()
        if node is not None:
            return self._path_of_number(node._sequence_nr())
        stack = self._stack()
        return stack[-1][1] if stack else ""

    def _path_of_number(self, number: int) -> str:
        covering = [(end - start, path) for start, end, path in self._spans if start <= number < end]
        return min(covering)[1] if covering else ""

    def _stack(self) -> list[tuple[int, str]]:
        if not hasattr(self._local, "stack"):
            self._local.stack = []
            self._local.paths = {}
        stack: list[tuple[int, str]] = self._local.stack
        return stack

    def _enter(self, module: torch.nn.Module, _inputs: Any) -> None:
        stack = self._stack()
        if not stack:
            self._local.paths = _paths_in(module)
            if self._root is None or self._root() is None:
                self._root = weakref.ref(module)
            if self._root() is module:
                for told in list(self._told):
                    told(self._local.paths.values())
        path = self._local.paths.get(id(module), stack[-1][1] if stack else "")
        stack.append((torch_names.sequence_number(), path))

    def _leave(self, _module: torch.nn.Module, _inputs: Any, _output: Any) -> None:
        stack = self._stack()
        if stack:
            start, path = stack.pop()
            self._spans.append((start, torch_names.sequence_number(), path))


def _paths_in(root: torch.nn.Module) -> dict[int, str]:
    inner = root.module if isinstance(root, torch.nn.parallel.DistributedDataParallel) else root
    return {id(module): path for path, module in inner.named_modules()}


WATCH = ModuleWatch()
