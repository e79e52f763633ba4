"""The ATen level for a sink that does calls a second time: a torch_names.DispatchMode that asks it before and after each of them."""

from __future__ import annotations

from typing import Any

import torch

from tensorprobe import torch_names
from tensorprobe.errors import TrainingStopped
from tensorprobe.taps.dispatch_tap import origin_of_backward
from tensorprobe.taps.session import Header, Session
from tensorprobe.taps.sinks import Second


class SecondTap(torch_names.DispatchMode):
    """Watches ATen calls for a `Second`. What that raises is counted and never reaches the training."""

    def __init__(self, session: Session, second: Second) -> None:
        super().__init__()
        self._session = session
        self._second = second

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled regions pass through: torch.compile need not give up because this mode is on."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        session = self._session
        state = session.state
        if not session.recording or state.busy or torch_names.is_compiling():
            return func(*args, **kwargs)
        if torch_names.is_tracing():
            session.pass_by_tracing()
            return func(*args, **kwargs)
        if types and not _PLAIN.issuperset(types):
            if any(map(torch_names.is_wrapper_class, types)):
                return NotImplemented  # it does its own dispatch: what it makes of the call comes here again
            return func(*args, **kwargs)
        state.busy = True
        opened = None
        try:
            with torch_names.no_overrides():
                opened = self._second.begin(func, args, kwargs, self)
        except TrainingStopped:
            raise
        except Exception as error:
            session.tool_failed(str(func), error)
        finally:
            state.busy = False
        if opened is None:
            return func(*args, **kwargs)
        try:
            result = func(*args, **kwargs)
        except BaseException as error:
            self._tell_raised(func, opened, error)
            raise
        state.busy = True
        try:
            with torch_names.no_overrides():
                return self._second.end(opened, result)
        except TrainingStopped:
            raise
        except Exception as error:
            session.tool_failed(str(func), error)
            return result
        finally:
            state.busy = False

    def _tell_raised(self, func: Any, opened: Any, error: BaseException) -> None:
        state = self._session.state
        state.busy = True
        try:
            self._second.raised(opened, error)
        except Exception as problem:  # the user's own exception is what matters
            self._session.tool_failed(str(func), problem)
        finally:
            state.busy = False

    def count(self, op: str) -> None:
        """Give the call its number."""
        self._session.count_aten(op, backward=self._in_backward())

    def header(self, op: str) -> Header | None:
        """Count the call and say where it is."""
        in_backward = self._in_backward()
        origin = origin_of_backward() if in_backward else None
        return self._session.aten_header(op, backward=in_backward, origin=origin)

    def _in_backward(self) -> bool:
        return torch_names.graph_task() != -1 and self._session.repetition() is None


_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
