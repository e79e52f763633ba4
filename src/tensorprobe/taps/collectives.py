"""Results of asynchronous collectives: they exist when `Work.wait` returns, not when the call does.

While a probe records, `Work.wait` is wrapped; `remove` restores it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from tensorprobe import torch_names
from tensorprobe.arguments import Tensors
from tensorprobe.taps.patches import Patch
from tensorprobe.taps.session import OpenCall, Session


class Collectives:
    """Pending collectives, by the identity of their handle. They are kept alive until they are waited for or the step ends."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._pending: dict[int, tuple[Any, OpenCall, Tensors]] = {}
        self._patch: Patch | None = None

    def install(self) -> None:
        """Wrap `Work.wait`, where torch has distributed support."""
        work = _work_class()
        if work is not None and self._patch is None:
            self._patch = Patch(work, "wait", self._wrap)

    def remove(self) -> None:
        """Take the wrapper out."""
        patch, self._patch = self._patch, None
        if patch is not None:
            patch.remove()

    def _wrap(self, original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
        def wait(handle: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(handle, *args, **kwargs)
            if patch.active:
                self.arrived(handle)
            else:
                patch.restore()
            return result

        return wait

    def is_pending(self, result: Any) -> bool:
        """Return whether a collective returned a handle that is not complete yet."""
        work = _work_class()
        return work is not None and isinstance(result, work) and not result.is_completed()

    def later(self, handle: Any, call: OpenCall, outputs: Tensors) -> None:
        """Record this call when its handle is waited for."""
        with self._lock:
            self._pending[id(handle)] = (handle, call, outputs)

    def arrived(self, handle: Any) -> None:
        """Record the call of a handle that was waited for: its outputs are complete now."""
        with self._lock:
            entry = self._pending.pop(id(handle), None)
        if entry is not None:
            self._record(*entry[1:])

    def end_step(self) -> None:
        """Record collectives that nobody waited for, so that they are not lost. A stream may have waited."""
        with self._lock:
            entries, self._pending = list(self._pending.values()), {}
        for entry in entries:
            self._session.notes["asynchronous collective recorded at the end of the step: nobody waited for it"] += 1
            self._record(*entry[1:])

    def _record(self, call: OpenCall, outputs: Tensors) -> None:
        session = self._session
        if not session.recording or not call.wanted.forward:
            return
        busy, session.state.busy = session.state.busy, True
        try:
            with torch_names.no_overrides():
                if session.selection.outputs:
                    call.event.slots += session.sink.take(outputs)
                session.emit(call.event)
        except Exception as error:
            session.tool_failed(call.event.name, error)
        finally:
            session.state.busy = busy


def _work_class() -> Any:
    if not torch.distributed.is_available():
        return None
    return torch.distributed.Work
