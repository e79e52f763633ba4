"""Calls that torch and multiprocessing make for their own purposes. They are not the program's, and their number varies.

A DataLoader with workers rebuilds each batch when it happens to arrive. The threads behind queues copy tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import dataloader

from tensorprobe.taps.patches import Patch
from tensorprobe.taps.session import Session

_THREADS = ("torch.utils.data", "multiprocessing.queues", "multiprocessing.resource_sharer", "multiprocessing.managers")


def is_machinery(thread: threading.Thread) -> bool:
    """Return whether a thread belongs to a queue or a DataLoader."""
    return str(getattr(getattr(thread, "_target", None), "__module__", "")).startswith(_THREADS)


class MachineryTap:
    """While a DataLoader fetches from its workers, calls are not recorded. A storage that is resized has new memory."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._patches: list[Patch] = []

    def install(self) -> None:
        """Wrap the method that fetches, where torch has it, and that of storages."""
        fetching = getattr(dataloader, "_MultiProcessingDataLoaderIter", None)
        if not self._patches and hasattr(fetching, "_try_get_data"):
            self._patches.append(Patch(fetching, "_try_get_data", self._wrap_fetch))
        self._patches.append(Patch(torch.UntypedStorage, "resize_", self._wrap_resize))

    def remove(self) -> None:
        """Take the wrappers out."""
        patches, self._patches = self._patches, []
        for patch in patches:
            patch.remove()

    def _wrap_fetch(self, original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
        def _try_get_data(iterator: Any, /, *args: Any, **kwargs: Any) -> Any:
            if not patch.active:
                patch.restore()
                return original(iterator, *args, **kwargs)
            state = self._session.state
            busy, state.busy = state.busy, True
            try:
                return original(iterator, *args, **kwargs)
            finally:
                state.busy = busy

        return _try_get_data

    def _wrap_resize(self, original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
        def resize_(storage: Any, /, *args: Any, **kwargs: Any) -> Any:
            session = self._session
            state = session.state
            was_empty = not storage.nbytes()
            result = original(storage, *args, **kwargs)
            if not patch.active:
                patch.restore()
            elif was_empty and session.recording and not state.busy:
                state.busy = True  # calls of the tool are not calls of the program
                try:
                    session.unwritten.grown(storage)
                except Exception as error:
                    session.tool_failed("resize_", error)
                finally:
                    state.busy = False
            return result

        return resize_
