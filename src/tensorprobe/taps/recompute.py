"""Activation checkpointing: calls of a recomputed forward get the numbers they had the first time.

Both kinds of `torch.utils.checkpoint` remember the numbers of their first run. When they run again, calls get the same
numbers and are marked as repeats. The wrappers call the originals with the same arguments and do nothing once
the probe has stopped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.checkpoint as checkpoint

from tensorprobe import torch_names
from tensorprobe.taps.patches import Patch
from tensorprobe.taps.session import Session
from tensorprobe.taps.thread_state import Recompute

First = tuple[dict[str, int], int | None]
"""The next number of each op when a forward was first run, and its micro-batch."""


class RecomputeTap:
    """Marks recomputed forwards in a session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._patches: list[Patch] = []

    def install(self) -> None:
        """Wrap both halves of the reentrant function, and the frame of the other kind."""
        function = checkpoint.CheckpointFunction
        self._patches.append(Patch(function, "forward", self._remembering))
        self._patches.append(Patch(function, "backward", self._repeating))
        self._patches.append(Patch(torch_names.CheckpointFrame, "__init__", self._frame_init))

    def remove(self) -> None:
        """Take the wrappers out."""
        while self._patches:
            self._patches[-1].remove()
            del self._patches[-1]

    @contextlib.contextmanager
    def _repetition(self, first: First | None, *, keeps_graph: bool) -> Iterator[None]:
        state = self._session.state
        if first is None or not self._session.recording:
            yield
            return
        before = state.recompute
        state.recompute = Recompute(dict(first[0]), first[1], keeps_graph, torch_names.graph_task())
        try:
            yield
        finally:
            state.recompute = before

    def _first(self) -> First | None:
        session = self._session
        if not session.recording:
            return None
        return session.numbers_now(), None if session.training is None else session.training.microbatch

    def _remembering(self, forward: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
        tap = self

        def remembering_forward(ctx: Any, *args: Any) -> Any:
            if patch.active:
                ctx._tensorprobe_first = tap._first()
            else:
                patch.restore()
            return forward(ctx, *args)

        return remembering_forward

    def _repeating(self, backward: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
        tap = self

        def repeating_backward(ctx: Any, *gradients: Any) -> Any:
            if not patch.active:
                patch.restore()
            with tap._repetition(getattr(ctx, "_tensorprobe_first", None), keeps_graph=True):
                return backward(ctx, *gradients)

        return repeating_backward

    def _frame_init(self, original: Callable[..., None], patch: Patch) -> Callable[..., None]:
        tap = self

        def frame_init(frame: Any, recompute_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            if not patch.active:
                patch.restore()
                return original(frame, recompute_fn, *args, **kwargs)
            first = tap._first()

            def recompute(*inputs: Any) -> Any:
                with tap._repetition(first, keeps_graph=False):
                    return recompute_fn(*inputs)

            return original(frame, recompute, *args, **kwargs)

        return frame_init
