"""Which calls are made inside which call of a module: what they computed is what the module gives.

In: the calls of a step, in the order in which they end. Out: for each call of a module the greatest of some figure among the
calls inside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy

from tensorprobe.model.measured import Measured

Array = numpy.ndarray[Any, Any]


class Inside:
    """Which calls are made inside which call of a module, so far as they were recorded: they end before it."""

    def __init__(self, around: list[int], whole: set[int]) -> None:
        self.around, self.whole = around, whole

    @classmethod
    def nothing(cls) -> Inside:
        """Return that no call is inside of another."""
        return cls([], set())

    def chain(self, call: int) -> Iterator[int]:
        """Yield the calls of the modules around a call, from inside to outside."""
        while self.around and (call := self.around[call]) >= 0:
            yield call

    @classmethod
    def of(cls, measured: Measured) -> Inside:
        """Return the calls inside of modules, from the paths of modules and the order of the calls."""
        calls = measured.calls
        if not any(level.is_module for level in calls.level):
            return cls.nothing()
        around = [-1] * len(calls.name)
        # A path that is empty is that of the model itself, or of a module that it does not name: anything may be inside.
        whole: set[int] = set()
        ended: dict[str, list[int]] = {"forward": [], "backward": []}
        paths = [
            op.removeprefix("Module.").rpartition(".")[0] if level.is_module else path
            for op, level, path in zip(calls.op, calls.level, calls.module, strict=True)
        ]
        for at, (path, level) in enumerate(zip(paths, calls.level, strict=True)):
            stack = ended[calls.direction[at]]
            if level.is_module and not path:
                whole.add(at)
                continue
            while level.is_module and stack and _is_inside(paths[stack[-1]], path, calls.level[stack[-1]].is_module):
                around[stack.pop()] = at
            stack.append(at)
        return cls(around, whole)

    def _spread(self, values: Array) -> Array:
        """Return for each call the greatest value of the calls inside it."""
        found = numpy.zeros(len(values))
        so_far = 0.0
        for at, module in enumerate(self.around):
            if at in self.whole:
                found[at] = so_far
            elif module >= 0:
                found[module] = max(found[module], found[at], values[at])
            so_far = max(so_far, float(values[at]))
        return found

    def greatest(self, values: Array) -> Array:
        """Return for each call the greatest value of the calls inside it; 0 where there are none."""
        return self._spread(values) if self.around else numpy.zeros(len(values))


def _is_inside(path: str, module: str, is_module: bool) -> bool:
    return path.startswith(f"{module}.") or (path == module and not is_module)
