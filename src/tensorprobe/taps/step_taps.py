"""Steps of scripts that do not report them: by `optimizer.step()`, or by the batches of a DataLoader. Regions in a step.

Optimizer: the first one that steps marks the steps; when it is deleted, the next one does. A step that a GradScaler skips counts
too. The next step begins with the next training call of a model: what comes between, such as an evaluation, belongs to
the step that is over. A program that trains without calling a module has no such call, and its steps end with the optimizer.
A script that calls `probe.step()` itself takes over from then on.

DataLoader: the first loader that gives a batch to the thread that installed the tap is counted, over all its epochs. When
it is gone, the next one continues the count. Loaders in worker processes, in other threads and inside another loader are
not counted. The tap wraps one method of torch's iterators. `DataLoader`, its subclasses and its pickles never see it, and batches
are not touched.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer
from torch.utils.data import get_worker_info

from tensorprobe import torch_names
from tensorprobe.taps.module_names import parameters_of
from tensorprobe.taps.patches import OptimizerHooks, Patch
from tensorprobe.torch_names import LoaderIterator


class StepTap:
    """Calls `next_step` where the next step begins, once the marking optimizer has stepped."""

    def __init__(self, next_step: Callable[[], None], *, by_optimizer: bool) -> None:
        self._next_step = next_step
        self._by_optimizer = by_optimizer
        self._marking: weakref.ref[Optimizer] | None = None
        self._hooks = OptimizerHooks(self._before_step, self._after_step)
        self._scalers: list[Patch] = []
        self._watches = False
        self._marked = 0
        self._is_due = self._has_ended = False
        self._trained: set[bool] = set()
        """`module.training` of the models that were called with gradients before the first step of the optimizer."""
        self._thread = 0

    def install(self) -> None:
        """Watch all optimizers and scalers."""
        if self._by_optimizer:
            self._watches = True
            self._hooks.install()
            self._scalers = [Patch(scaler, "step", self._wrap_scaler) for scaler in _scalers()]

    def remove(self) -> None:
        """Stop watching."""
        self._hooks.remove()
        while self._scalers:
            self._scalers[-1].remove()  # kept until it is done: the program may raise into it, and then we come again
            del self._scalers[-1]
        self._watches = False

    @property
    def awaits_model(self) -> bool:
        """Whether `before_model` wants to know of the next call of a module."""
        return self._watches and (self._is_due or not self._marked)

    def before_model(self, module: nn.Module) -> None:
        """Begin a step that is due, if this call of an outermost module is training."""
        if not torch.is_grad_enabled() or next(parameters_of(module), None) is None:
            return
        if not self._marked:
            self._trained.add(module.training)
        elif module.training in self._trained and threading.get_ident() == self._thread:
            self._begin()

    def take_over(self) -> bool:
        """Let the script report its steps from now on. Return whether the optimizer has ended the current one already."""
        ended, self._has_ended, self._is_due = self._has_ended, False, False
        self.remove()
        return ended

    def _begin(self) -> None:
        self._is_due = False
        self._next_step()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_due and self._marks(optimizer):  # the model is called by the closure, or not at all
            self._begin()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._marks(optimizer) and not _is_nested(optimizer):
            self._end()

    def _end(self) -> None:
        self._marked += 1
        self._thread = threading.get_ident()
        if self._trained:
            self._is_due = True
        else:
            self._has_ended = True
            self._next_step()

    def _marks(self, optimizer: Optimizer) -> bool:
        marking = self._marking() if self._marking is not None else None
        if marking is None:
            self._marking = weakref.ref(optimizer)
            marking = optimizer
        return marking is optimizer

    def _wrap_scaler(self, original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            before = self._marked
            result = original(scaler, optimizer, *args, **kwargs)
            if not patch.active:
                patch.restore()
            elif self._marked == before and self._marks(optimizer):
                self._end()
            return result

        return step


def _scalers() -> Iterator[type]:
    """Yield the classes of scalers with a `step` of their own: torch's, and those that devices derive from it."""
    classes = [torch_names.GradScaler]
    while classes:
        found = classes.pop()
        classes += found.__subclasses__()
        if "step" in vars(found):
            yield found


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
        self._hooks = OptimizerHooks(lambda *_: enter("optimizer"), lambda *_: enter(None))
        self._clips: list[Patch] = []

    def install(self) -> None:
        """Watch all optimizers, and the functions of torch.nn.utils that clip gradients."""
        self._hooks.install()
        self._clips = [Patch(torch.nn.utils, name, self._wrap) for name in ("clip_grad_norm_", "clip_grad_value_")]

    def remove(self) -> None:
        """Stop watching."""
        self._hooks.remove()
        for patch in self._clips:
            patch.remove()

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
        """Stop watching."""
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
        """Return whether the iterator belongs to the counted loader, or none is counted yet. Epochs share a sampler of indices."""
        counted = self._counted() if self._counted is not None else None
        return counted is None or counted is iterator._index_sampler


def _weakly(sampler: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(sampler)
    except TypeError:  # a list of lists is a sampler too, and there are no weak references to it
        return lambda: sampler
