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
from tensorprobe.model.event import Event
from tensorprobe.taps.patches import Patch
from tensorprobe.taps.session import OpenCall, Session

_Kept = tuple[Event, Tensors]


class Collectives:
    """Pending collectives. They are kept alive until they are waited for or the step ends.

    `_pending` has them by the identity of their handle; `_functional` those that return a tensor to wait for, by its storage;
    `_held` ATen calls, by the API call they were made in.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._pending: dict[int, tuple[Any, OpenCall, Tensors, list[_Kept]]] = {}
        self._functional: dict[int, list[_Kept]] = {}
        self._held: dict[str | None, list[_Kept]] = {}
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
        def wait(handle: Any, /, *args: Any, **kwargs: Any) -> Any:
            result = original(handle, *args, **kwargs)
            if patch.active:
                self.arrived(handle)
            else:
                patch.restore()
            return result

        return wait

    def is_pending(self, result: Any) -> bool:
        """Return whether a collective returned a handle to wait for, complete or not: the order of calls must not depend on it."""
        work = _work_class()
        return work is not None and isinstance(result, work)

    def later(self, handle: Any, call: OpenCall, outputs: Tensors) -> None:
        """Record this call, and the ATen calls made in it, when its handle is waited for."""
        with self._lock:
            self._pending[id(handle)] = (handle, call, outputs, self._held.pop(call.event.name, []))

    def arrived(self, handle: Any) -> None:
        """Record the call of a handle that the program has waited for: its outputs are complete."""
        with self._lock:
            entry = self._pending.pop(id(handle), None)
        if entry is not None:
            self._record(*entry[1:])

    def keep(self, op: str, event: Event, inputs: Tensors, outputs: Tensors) -> bool:
        """Return whether the results of a call are still to come. If so, it is recorded once they have.

        The result of a functional collective is complete when `wait_tensor` returns.
        """
        if op.partition(".")[0] not in ("Ops", "Aten"):
            return False
        if "c10d_functional.wait_tensor" in op:
            for _, tensor in inputs:
                self.waited(tensor)
        elif "c10d_functional." in op and "_wrap_tensor" not in op and outputs:
            with self._lock:
                self._functional.setdefault(torch_names.storage_key(outputs[0][1]), []).append((event, outputs))
            self._session.unwritten.under_way(outputs)
            return True
        elif op.startswith("Aten.c10d."):
            with self._lock:
                self._held.setdefault(event.parent, []).append((event, outputs))
            return True
        return False

    def waited(self, tensor: torch.Tensor) -> None:
        """Record the functional collective that this is the result of."""
        with self._lock:
            kept = self._functional.pop(torch_names.storage_key(tensor), []) if self._functional else []
        self._emit(kept)

    def returned(self, call: str) -> None:
        """Record the ATen calls made in an API call that has waited for them itself."""
        if not self._held:
            return
        with self._lock:
            kept = self._held.pop(call, [])
        self._emit(kept)

    def end_step(self) -> None:
        """Record the collectives that the program did not wait for: a stream or a reducer may have."""
        with self._lock:
            entries, self._pending = list(self._pending.values()), {}
            kept = [entry for found in (self._functional, self._held) for each in found.values() for entry in each]
            self._functional, self._held = {}, {}
        torch_names.keep_backends_of_groups()
        for entry in entries:
            self._session.notes[
                "asynchronous collective recorded at the end of the step: the program did not wait for it"
            ] += 1
            self._record(*entry[1:])
        self._emit(kept)

    def _record(self, call: OpenCall, outputs: Tensors, held: list[_Kept]) -> None:
        state = self._session.state
        busy, state.busy = state.busy, True
        try:
            self._session.unwritten.filled(outputs)
        finally:
            state.busy = busy
        self._emit([*held, (call.event, outputs)] if call.wanted.forward else held)

    def _emit(self, kept: list[_Kept]) -> None:
        session = self._session
        if not session.recording or not kept:
            return
        busy, session.state.busy = session.state.busy, True
        try:
            with torch_names.no_overrides():
                for event, outputs in kept:
                    session.unwritten.filled(outputs)
                    if session.selection.outputs:
                        event.slots += session.take(outputs)
                    session.emit(event)
        except Exception as error:
            session.tool_failed(kept[0][0].name, error)
        finally:
            session.state.busy = busy


def _work_class() -> Any:
    if not torch.distributed.is_available():
        return None
    return torch.distributed.Work
