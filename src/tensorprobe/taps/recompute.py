"""Activation checkpointing: calls of a recomputed forward get the numbers they had the first time.

Both kinds of `torch.utils.checkpoint` remember the numbers when they first run. When they run again, calls take their
numbers from there and are marked as repeated. The wrappers call the originals with the same arguments and do nothing once
the probe has stopped. `remove` restores the originals.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.checkpoint as checkpoint

from tensorprobe import torch_names
from tensorprobe.taps.session import Recompute, Session


class RecomputeTap:
    """Marks recomputed forwards in a session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._originals: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        """Wrap both halves of the reentrant function, and the frame of the other kind."""
        function = checkpoint.CheckpointFunction
        forward, backward = function.__dict__["forward"], function.__dict__["backward"]
        self._replace(function, "forward", staticmethod(self._remembering(forward.__func__)))
        self._replace(function, "backward", staticmethod(self._repeating(backward.__func__)))
        frame = torch_names.CheckpointFrame
        self._replace(frame, "__init__", self._frame_init(frame.__init__))

    def remove(self) -> None:
        """Restore the originals."""
        while self._originals:
            owner, name, original = self._originals.pop()
            setattr(owner, name, original)

    def _replace(self, owner: Any, name: str, new: Any) -> None:
        self._originals.append((owner, name, owner.__dict__[name]))
        setattr(owner, name, new)

    @contextlib.contextmanager
    def _repetition(self, numbers: dict[str, int] | None, *, keeps_graph: bool) -> Iterator[None]:
        state = self._session.state
        if numbers is None or not self._session.recording:
            yield
            return
        before, state.recompute = state.recompute, Recompute(dict(numbers), keeps_graph, torch_names.graph_task())
        try:
            yield
        finally:
            state.recompute = before

    def _numbers(self) -> dict[str, int] | None:
        session = self._session
        return session.numbers_now() if session.recording else None

    def _remembering(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        tap = self

        def remembering_forward(ctx: Any, *args: Any) -> Any:
            ctx._tensorprobe_numbers = tap._numbers()
            return forward(ctx, *args)

        return remembering_forward

    def _repeating(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        tap = self

        def repeating_backward(ctx: Any, *gradients: Any) -> Any:
            with tap._repetition(getattr(ctx, "_tensorprobe_numbers", None), keeps_graph=True):
                return backward(ctx, *gradients)

        return repeating_backward

    def _frame_init(self, original: Callable[..., None]) -> Callable[..., None]:
        tap = self

        def frame_init(frame: Any, recompute_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            numbers = tap._numbers()

            def recompute(*inputs: Any) -> Any:
                with tap._repetition(numbers, keeps_graph=False):
                    return recompute_fn(*inputs)

            original(frame, recompute, *args, **kwargs)

        return frame_init
