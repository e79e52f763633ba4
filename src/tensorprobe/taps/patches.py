"""One attribute of a class, wrapped while a probe runs, and unwrapped again wherever the wrapper is by then.

The program may put a wrapper of its own around ours, or remove one that ours is around. At the end only ours is
removed: from the class, or from the closure, `__wrapped__`, `partial` or instance that holds it. If it cannot be found,
it passes every call through, and removes itself when it is called and is on the class again.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tensorprobe import torch_names

_MOST_LAYERS = 100
_standing: list[Patch] = []
"""Patches that are still installed. Each is listed before it is made and until it is removed, as an exception may come between."""


class Patch:
    """Wraps `owner.name`. `make` gets the original function and this object, and returns the wrapper.

    A wrapper that finds `active` false calls `restore` and then the original.
    """

    def __init__(self, owner: Any, name: str, make: Callable[[Callable[..., Any], Patch], Callable[..., Any]]) -> None:
        self._owner, self._name = owner, name
        self._found = owner.__dict__.get(name)
        stands = inspect.getattr_static(owner, name)
        kind: Any = staticmethod if isinstance(stands, staticmethod) else lambda made: made
        self._original = getattr(owner, name)
        if isinstance(stands, types.ClassMethodDescriptorType):  # written in C
            kind, self._original = classmethod, lambda cls, *args, **kwargs: stands.__get__(None, cls)(*args, **kwargs)
        self.active = True
        self._wrapper = functools.update_wrapper(make(self._original, self), self._original)
        _standing.append(self)
        setattr(owner, name, kind(self._wrapper))

    def remove(self) -> None:
        """Take the wrapper out, and nothing else."""
        self.active = False
        if not self.restore():
            for replace in _holders(_function_of(self._owner, self._name), self._wrapper):
                replace(self._original)
        _standing[:] = [patch for patch in _standing if patch is not self]

    @property
    def is_reached(self) -> bool:
        """Return whether the class still leads to the wrapper, as far as can be seen."""
        now = _function_of(self._owner, self._name)
        return now is self._wrapper or any(True for _ in _holders(now, self._wrapper))

    @property
    def successor(self) -> Callable[..., Any]:
        """What a removed wrapper calls that the program still holds, as `call = model.__call__`: the patch that stands there now.

        The original, where another's wrapper stands there or below: it may be the one that has called.
        """
        standing = {id(patch._wrapper): patch for patch in _standing}
        now: Callable[..., Any] = _function_of(self._owner, self._name)
        below = now
        while id(below) in standing:
            below = standing[id(below)]._original
        return now if below is self._original else self._original

    def restore(self, owner: Any = None, name: str = "") -> bool:
        """Put the original back if the wrapper is on the class, or on one that copied it. Return whether it was."""
        owner, name = owner or self._owner, name or self._name
        if _function_of(owner, name) is not self._wrapper:
            return False
        if self._found is None:
            delattr(owner, name)
        else:
            setattr(owner, name, self._found)
        return True


def _function_of(owner: Any, name: str) -> Any:
    """Return the attribute of this name; of a class method, the function."""
    now = getattr(owner, name, None)
    return getattr(now, "__func__", now)


class OptimizerHooks:
    """Calls `before` and `after` around each step of every optimizer.

    They are removed by what they are, not by handles: an exception may come before a handle is kept.
    """

    def __init__(self, before: Callable[..., None], after: Callable[..., None]) -> None:
        self._before, self._after = before, after

    def install(self) -> None:
        """Register both."""
        register_optimizer_step_pre_hook(self._before)
        register_optimizer_step_post_hook(self._after)

    def remove(self) -> None:
        """Take both out, wherever they stand. This can be called again if it was interrupted."""
        for kept in torch_names.hooks_of_all_optimizers:
            for key, hook in list(kept.items()):
                if hook is self._before or hook is self._after:
                    kept.pop(key, None)


def remover() -> Callable[[], None]:
    """Return a function that removes the patches made from now on that are still installed."""
    before = list(_standing)

    def remove() -> None:
        for patch in [patch for patch in _standing if patch not in before]:
            patch.remove()

    return remove


def _holders(outermost: Any, wrapper: Any) -> Iterator[Callable[[Any], None]]:
    """Yield functions that put something else in the places where layers of wrappers hold `wrapper`."""
    layers, seen = [outermost], {id(wrapper)}
    while layers and len(seen) < _MOST_LAYERS:
        layer = layers.pop()
        if id(layer) in seen:
            continue
        seen.add(id(layer))
        for held, replace in _held(layer):
            if held is wrapper:
                yield replace
            elif (callable(held) or hasattr(held, "__dict__")) and not isinstance(held, (type, ModuleType)):
                layers.append(held)


def _held(layer: Any) -> Iterator[tuple[Any, Callable[[Any], None]]]:
    for cell in getattr(layer, "__closure__", None) or ():
        try:
            yield cell.cell_contents, functools.partial(setattr, cell, "cell_contents")
        except ValueError:  # an empty cell
            continue
    for owner in (layer, getattr(layer, "__self__", None)):
        names = getattr(owner, "__dict__", None)
        if isinstance(names, dict):
            for name, value in list(names.items()):
                yield value, functools.partial(names.__setitem__, name)
    if isinstance(layer, functools.partial):
        function, args, kwargs = layer.func, layer.args, layer.keywords
        yield function, lambda new: layer.__setstate__((new, args, kwargs, {}))  # type: ignore[attr-defined]
    defaults = getattr(layer, "__defaults__", None) or ()
    for place, value in enumerate(defaults):

        def replace(new: Any, place: int = place) -> None:
            layer.__defaults__ = (*defaults[:place], new, *defaults[place + 1 :])

        yield value, replace
