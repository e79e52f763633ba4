"""Begins a recording in a program that was not edited: at its first module, or at its first call of torch.

Each function waits for one event, removes what it had installed, and calls `action` once. Workers of a DataLoader are
ignored.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import get_worker_info

from tensorprobe import torch_names
from tensorprobe.taps.modes import ModeStack
from tensorprobe.taps.patches import Patch
from tensorprobe.taps.plans import plan_function
from tensorprobe.taps.sites import call_at


def before_first_module(action: Callable[[nn.Module], None]) -> None:
    """Call `action` with the first module that is called, before it runs. Until then `nn.Module.__call__` is wrapped."""

    def wrap(original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
        def __call__(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if not patch.active:
                patch.restore()
                return patch.successor(module, *args, **kwargs)
            if get_worker_info() is None:
                topmost = patch.restore()
                patch.remove()
                try:
                    action(module)
                except BaseException:  # raised by the program into our code: the next call is the first
                    before_first_module(action)
                    raise
                # A wrapper around this one was passed already: calling it again would never end.
                return (nn.Module.__call__ if topmost else original)(module, *args, **kwargs)
            return original(module, *args, **kwargs)

        return __call__

    Patch(nn.Module, "__call__", wrap)


def before_first_call(action: Callable[[], None]) -> None:
    """Call `action` before the first operation of torch in this thread. Until then a function mode is on."""
    mode = _FirstCall(action)
    mode.stack.install()


class _FirstCall(TorchFunctionMode):
    """Passes every call on, and removes itself at the first operation."""

    def __init__(self, action: Callable[[], None]) -> None:
        super().__init__()
        self._action: Callable[[], None] | None = action
        self.stack = ModeStack(self, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        action = self._action
        elsewhere = get_worker_info() is not None or torch_names.is_compiling()
        if action is not None and not elsewhere and plan_function(func).name:
            self._action = None
            action()
        if self._action is None:
            self.stack.leave_soon()
        return call_at(sys._getframe(1), func, args, kwargs)
