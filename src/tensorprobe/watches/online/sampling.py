"""Which calls are compared: all, every n-th of an op, or one of each kind of inputs."""

from __future__ import annotations

from typing import Any

import torch

from tensorprobe.watches.online.schema import OpPlan


class Sampler:
    """Asked once for each call that could be compared."""

    def __init__(self, every: int = 1, once_per_kind: bool = False) -> None:
        self._every = every
        self._once_per_kind = once_per_kind
        self._calls: dict[str, int] = {}
        self._kinds: set[tuple[Any, ...]] = set()
        self.takes_all = every == 1 and not once_per_kind

    def wants(self, plan: OpPlan, args: Any, kwargs: Any) -> bool:
        """Whether this call is one of those to be compared. Of each op the first one is."""
        if self._once_per_kind:
            kind = (plan.name, *map(_kind, args), *((name, _kind(value)) for name, value in kwargs.items()))
            if kind in self._kinds:
                return False
            self._kinds.add(kind)
        if self._every == 1:
            return True
        number = self._calls.get(plan.name, 0)
        self._calls[plan.name] = number + 1
        return number % self._every == 0


def _kind(value: Any) -> Any:
    """What of an argument makes a kernel take another way: all but the numbers in tensors."""
    if isinstance(value, torch.Tensor):
        layout = value.stride() if value.layout is torch.strided else value.layout
        return (value.dtype, value.shape, layout, value.device.type)
    if isinstance(value, (list, tuple)):
        return tuple(map(_kind, value))
    return value if isinstance(value, (int, bool, str, type(None))) else str(value)
