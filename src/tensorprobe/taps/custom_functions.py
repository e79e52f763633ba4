"""Calls of the program's own `torch.autograd.Function` classes: `Function.Square.0.forward` and `.backward`.

The method that runs a class is wrapped once, where all classes inherit it. Before torch 2.14 that is one that `apply` calls,
so an `apply` that was bound earlier is seen too.
Classes of torch itself (checkpoints, DDP, compiled graphs, functorch) pass through unseen. The calls inside `forward` and
`backward` are recorded as before, as parts of the call.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from tensorprobe import torch_names
from tensorprobe.taps.function_tap import Describing
from tensorprobe.taps.patches import Patch
from tensorprobe.taps.plans import FunctionPlan
from tensorprobe.taps.session import Session
from tensorprobe.taps.sites import call_at

RUNNER: Any = torch.autograd.Function if torch_names.APPLIES_IN_C else torch.autograd.Function.__base__
"""The class whose `apply` runs a function. An older `Function.apply` calls that of its base, but not under functorch."""


class CustomFunctionTap:
    """Hands calls of the program's own functions to `describing`."""

    def __init__(self, session: Session, describing: Describing) -> None:
        self._session, self._describing = session, describing
        self._patch: Patch | None = None
        self._plans: dict[str, FunctionPlan] = {}

    def install(self) -> None:
        """Wrap `apply` of all functions."""
        self._patch = Patch(RUNNER, "apply", self._wrap)

    def remove(self) -> None:
        """Take the wrapper out."""
        patch, self._patch = self._patch, None
        if patch is not None:
            patch.remove()

    def _wrap(self, original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
        stands = inspect.getattr_static(RUNNER, "apply")
        bind: Callable[[Any], Callable[..., Any]] = functools.partial(functools.partial, original)
        if isinstance(stands, types.ClassMethodDescriptorType):  # without a frame of ours, which a warning would name
            bind = functools.partial(stands.__get__, None)

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            session, state = self._session, self._session.state
            if torch_names.is_compiling():  # torch.compile cannot trace frames
                return original(cls, *args, **kwargs)
            unseen = state.busy or not session.recording or torch_names.is_tracing()
            unseen = unseen or torch_names.are_functorch_transforms_active()
            if unseen or cls.__module__.partition(".")[0] == "torch":
                if not patch.active:
                    patch.restore()
                return call_at(sys._getframe(1), bind(cls), args, kwargs or None)
            run = functools.partial(call_at, sys._getframe(1), bind(cls))
            try:
                plan = self._plan_of(cls.__name__)
                return self._describing.run(lambda *a, **k: run(a, k or None), plan, state, args, kwargs)
            except BaseException:
                state.busy = False
                raise

        return torch_names.not_compiled(apply)

    def _plan_of(self, name: str) -> FunctionPlan:
        if name not in self._plans:
            self._plans[name] = FunctionPlan(f"Function.{name}", is_special=True, has_parts=True)
        return self._plans[name]
