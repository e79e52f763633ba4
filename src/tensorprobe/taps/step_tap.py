"""Steps told apart by `optimizer.step()`, for scripts that say nothing themselves.

The first optimizer seen to step marks the steps; if it is gone, the next one does. A boundary takes effect at once.
When the script calls `probe.step()` itself, that counts from then on and the optimizer does not.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook


class StepTap:
    """Calls `next_step` after each step of the marking optimizer."""

    def __init__(self, next_step: Callable[[], None], *, by_optimizer: bool) -> None:
        self._next_step = next_step
        self._by_optimizer = by_optimizer
        self._marking: weakref.ref[Optimizer] | None = None
        self._handle: Any = None
        self._has_marked = False

    def install(self) -> None:
        """Watch all optimizers."""
        if self._by_optimizer:
            self._handle = register_optimizer_step_post_hook(self._after_step)

    def remove(self) -> None:
        """Watch them no more."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def take_over(self) -> bool:
        """The script tells its steps itself. Whether the optimizer has told the end of this one already, as it may at the first time."""
        told, self._has_marked = self._has_marked, False
        self.remove()
        return told

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        marking = self._marking() if self._marking is not None else None
        if marking is None:
            self._marking = weakref.ref(optimizer)
            marking = optimizer
        if marking is optimizer:
            self._has_marked = True
            self._next_step()
