"""Steps of scripts that do not report them: by `optimizer.step()`, or by the batches of a DataLoader. Regions in a step.

Optimizer: the first one that steps marks the steps; when it is gone, the next one does. A script that calls `probe.step()`
itself takes over from then on.

DataLoader: counted is the first loader that gives a batch to the thread that installed the tap, over all its epochs. When it
is gone, the next one continues the count. Loaders in worker processes, in other threads and inside another loader are not
counted. The tap wraps one method of torch's iterators. `DataLoader`, its subclasses and its pickles never see it, and batches
are not touched.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import get_worker_info

from tensorprobe.taps.patches import Patch
from tensorprobe.torch_names import LoaderIterator


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
        if marking is optimizer and not _is_nested(optimizer):
            self._has_marked = True
            self._next_step()


def _is_nested(optimizer: Optimizer) -> bool:
    """Return whether the step that ended is part of another one: a subclass whose `step` calls that of its base class."""
    home, found = Optimizer.__init__.__code__.co_filename, 0
    frame = sys._getframe(1)
    while frame is not None and found < 2:
        code = frame.f_code
        # torch wraps the `step` of each class once
        found += code.co_name == "wrapper" and code.co_filename == home and frame.f_locals.get("self") is optimizer
        frame = frame.f_back  # type: ignore[assignment]
    return found > 1


class RegionTap:
    """Calls `enter` with the name of what begins, `optimizer` or `clip_grad`, and with None when that is over."""

    def __init__(self, enter: Callable[[str | None], None]) -> None:
        self._enter = enter
        self._handles: list[Any] = []

    def install(self) -> None:
        """Watch all optimizers, and the functions of torch.nn.utils that clip gradients."""
        self._handles = [
            register_optimizer_step_pre_hook(lambda *_: self._enter("optimizer")),
            register_optimizer_step_post_hook(lambda *_: self._enter(None)),
            *(Patch(torch.nn.utils, name, self._wrap) for name in ("clip_grad_norm_", "clip_grad_value_")),
        ]

    def remove(self) -> None:
        """Watch them no more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _wrap(self, original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
        @functools.wraps(original)
        def clip(*args: Any, **kwargs: Any) -> Any:
            if not patch.active:
                patch.restore()
                return original(*args, **kwargs)
            self._enter("clip_grad")
            try:
                return original(*args, **kwargs)
            finally:
                self._enter(None)

        return clip


class LoaderTap:
    """Calls `before(n)` when batch n of the counted loader is asked for, from 0, and `after(n)` when it has come.

    What `before` raises goes to the script in place of the batch.
    """

    def __init__(self, before: Callable[[int], None], after: Callable[[int], None]) -> None:
        self._before, self._after = before, after
        self._thread = threading.get_ident()
        self._patch: Patch | None = None
        self._counted: Callable[[], Any] | None = None
        self._inside = False
        self.batches = 0
        """How many batches were counted."""
        self.elsewhere = 0
        """How many were given to other threads."""

    def install(self) -> None:
        """Watch all loaders, also those whose iteration has begun."""
        if self._patch is None:
            self._patch = Patch(LoaderIterator, "__next__", self._wrap)

    def remove(self) -> None:
        """Watch them no more."""
        patch, self._patch, self._counted = self._patch, None, None
        if patch is not None:
            patch.remove()

    def _wrap(self, original: Callable[[Any], Any], patch: Patch) -> Callable[[Any], Any]:
        @functools.wraps(original)
        def __next__(iterator: Any) -> Any:
            if patch.active:
                return self._next(iterator, original)
            patch.restore()
            return original(iterator)

        return __next__

    def _next(self, iterator: Any, original: Callable[[Any], Any]) -> Any:
        if get_worker_info() is not None:
            return original(iterator)
        if threading.get_ident() != self._thread:
            self.elsewhere += 1
            return original(iterator)
        if self._inside:
            return original(iterator)
        if not self._counts(iterator):
            return original(iterator)
        self._before(self.batches)
        self._inside = True
        try:
            batch = original(iterator)
        finally:
            self._inside = False
        self._counted = _weakly(iterator._index_sampler)
        number, self.batches = self.batches, self.batches + 1
        self._after(number)
        return batch

    def _counts(self, iterator: Any) -> bool:
        """Whether the iterator belongs to the counted loader, or there is none: all its epochs share a sampler of indices."""
        counted = self._counted() if self._counted is not None else None
        return counted is None or counted is iterator._index_sampler


def _weakly(sampler: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(sampler)
    except TypeError:  # a list of lists is a sampler too, and there are no weak references to it
        return lambda: sampler
