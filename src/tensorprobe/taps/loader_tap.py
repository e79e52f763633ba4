"""Iterations told apart by the batches that a DataLoader gives, for scripts that say nothing themselves.

Counted is the first loader that gives a batch to the thread that installed the tap, over all its epochs; when it is gone,
the next one goes on from its count. Not counted: loaders in worker processes and in other threads, and a loader that is
asked from inside another one. The tap wraps one method of torch's iterators; `DataLoader` itself, its subclasses and
its pickles never see it. Nothing is done to batches.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

from torch.utils.data import get_worker_info

from tensorprobe.torch_names import LoaderIterator


class LoaderTap:
    """Calls `before(n)` when batch n of the counted loader is asked for, from 0, and `after(n)` when it has come.

    What `before` raises goes to the script in place of the batch.
    """

    def __init__(self, before: Callable[[int], None], after: Callable[[int], None]) -> None:
        self._before, self._after = before, after
        self._thread = threading.get_ident()
        self._original: Any = None
        self._wrapper: Any = None
        self._counted: Callable[[], Any] | None = None
        self._inside = False
        self.batches = 0
        """How many batches were counted."""
        self.elsewhere = 0
        """How many were given to other threads."""

    def install(self) -> None:
        """Watch all loaders, also those whose iteration has begun."""
        if self._wrapper is not None:
            return
        original = LoaderIterator.__next__

        @functools.wraps(original)
        def __next__(iterator: Any) -> Any:
            return original(iterator) if self._wrapper is None else self._next(iterator, original)

        self._original, self._wrapper = original, __next__
        LoaderIterator.__next__ = __next__

    def remove(self) -> None:
        """Watch them no more. Where another wrapper stands around ours, ours stays and passes everything through."""
        if self._wrapper is not None and LoaderIterator.__next__ is self._wrapper:
            LoaderIterator.__next__ = self._original
        self._wrapper = self._counted = None

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
