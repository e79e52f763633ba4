"""Calls that an older torch does not show to a function mode: collectives before 2.13, indexing before 2.2.

While a step is recorded, the bodies of the collectives are replaced, and Tensor has subscript methods that take part in
indexing only. Every function and every attribute stays the same object, whatever name it was imported by. The other way
round, making a subclass of Tensor by its constructor, and `as_subclass` before 2.6, raise under a dispatch mode, and have
to be hidden from ours.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType
from typing import Any

import torch

from tensorprobe import torch_names

Show = Callable[[Any, Any, Any], Any]
"""Executes a call through a function mode, or hides it from one: function, arguments, keyword arguments."""


class UnshownCalls:
    """Sends such calls to `show`, and those to be hidden to `hide`; None where a probe has no mode of that kind."""

    def __init__(self, show: Show | None, hide: Show | None) -> None:
        self._show, self._hide = show, hide
        self._patches: list[_Body | _Method] = []

    def install(self) -> None:
        """Start. Nothing is installed if torch shows everything."""
        if not self._patches:
            self._patches = list(self._wanted())
        for patch in self._patches:
            patch.install()

    def remove(self) -> None:
        """Restore what there was. An exception may come at any line: each is listed until all are removed."""
        for patch in self._patches:
            patch.remove()
        self._patches = []

    def _wanted(self) -> Iterator[_Body | _Method]:
        if self._show is not None:
            for name, function in torch_names.hidden_collectives():
                yield _Body(function, name, self._show)
            for name in () if torch_names.SHOWS_SUBSCRIPTS else ("__getitem__", "__setitem__"):
                yield _Method(name, self._show)
        if self._hide is not None:
            yield _Constructor(self._hide)
            if not torch_names.MODES_PASS_SUBCLASSES:
                yield _Method("as_subclass", self._hide, of_class=True)


class _Body:
    """Another body for a Python function that has no closure."""

    def __init__(self, function: FunctionType, name: str, show: Show) -> None:
        self._function, self._show = function, show
        body = FunctionType(function.__code__, function.__globals__, name, function.__defaults__)
        body.__kwdefaults__, body.__module__ = function.__kwdefaults__, torch.distributed.__name__
        self._original = body
        self._signature = inspect.signature(body)

    def install(self) -> None:
        function = self._function
        function.__signature__ = self._signature  # type: ignore[attr-defined]
        function.__kwdefaults__ = {"tensorprobe_call": self._call}
        function.__code__ = _new_body.__code__.replace(co_name=self._original.__name__)

    def remove(self) -> None:
        function, original = self._function, self._original
        function.__code__ = original.__code__
        function.__kwdefaults__ = original.__kwdefaults__
        vars(function).pop("__signature__", None)

    def _call(self, args: Any, kwargs: Any) -> Any:
        """Show a call as torch 2.13 does: by keyword are `src`, `dst` and what has a default."""
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError:
            return self._original(*args, **kwargs)  # it says what is wrong in its own words
        bound.apply_defaults()
        args, kwargs = (), {}
        for name, value in bound.arguments.items():
            if name in ("src", "dst") or self._signature.parameters[name].default is not inspect.Parameter.empty:
                kwargs[name] = value
            else:
                args += (value,)
        return self._show(self._original, args, kwargs)


def _new_body(*args: Any, tensorprobe_call: Callable[..., Any], **kwargs: Any) -> Any:
    return tensorprobe_call(args, kwargs)


class _Method:
    """A method of Tensor for `x[i]` and `x[i] = y`. Asking the class for it gives torch's own, except with `of_class`."""

    def __init__(self, name: str, show: Show, of_class: bool = False) -> None:
        self._name, self._show, self._of_class = name, show, of_class
        self._original = getattr(torch.Tensor, name)

    def install(self) -> None:
        setattr(torch.Tensor, self._name, self)

    def __get__(self, tensor: torch.Tensor | None, owner: Any = None) -> Any:
        if tensor is not None:
            return functools.partial(self._call, tensor)
        return self._call if self._of_class else self._original

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        return self._show(self._original, args, kwargs)

    def remove(self) -> None:
        if torch.Tensor.__dict__.get(self._name) is self:
            delattr(torch.Tensor, self._name)


class _Constructor(_Method):
    """`class Mine(torch.Tensor): pass` is made of a tensor or a list by `Mine(data)`, which raises under any dispatch mode.

    So does `torch.Tensor.__new__(Mine, data)`, where the name is called at once. Otherwise the name gives torch's own.
    """

    def __init__(self, hide: Show) -> None:
        super().__init__("__new__", hide)
        self._made = lambda *args, **kwargs: self._call(*args, **kwargs)
        self._named = lambda *args, **kwargs: (
            self._original(*args, **kwargs) if args and args[0] is torch.Tensor else self._call(*args, **kwargs)
        )

    def __get__(self, tensor: torch.Tensor | None, owner: Any = None) -> Any:
        # torch.compile asks whether a class has the constructor of Tensor.
        frame = sys._getframe(1)
        if frame.f_globals.get("__name__", "").startswith("torch._dynamo."):
            return self._original
        if owner is torch.Tensor:
            return self._named if _calls(frame) else self._original
        return self._made


def _calls(frame: FrameType) -> bool:
    """Return whether a frame calls the attribute that it is looking up: `x.name(1)`, not `x.name is y`."""
    code, at = frame.f_code.co_code, frame.f_lasti
    name = dis.opname[code[at]] if 0 <= at < len(code) else ""
    return name == "LOAD_METHOD" or (name == "LOAD_ATTR" and sys.version_info >= (3, 12) and bool(code[at + 1] & 1))
