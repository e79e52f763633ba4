"""Where a fault is planted: in a kernel, in the arguments of one call, in the program, or in gradients that nobody records.

Each function returns a `Plant`: called with the training before its first step, it returns the context in which the steps run.
`NOW` says which step is under way; before the first step nothing strikes.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import numpy
import torch
from torch import Tensor

from bench.heldout.device import Kernel, Layer, add_layer
from bench.heldout.training import Training

Plant = Callable[[Training], AbstractContextManager[Any]]


@dataclass
class Moment:
    """The step and the rank that run in this process, and how often a fault has struck."""

    step: int = -1
    rank: int = 0
    struck: int = 0


NOW = Moment()


class Chooser:
    """Say of each candidate, in order, whether it is struck. `nth` counts within a step and direction."""

    def __init__(self, nth: int | None, step: int | None, way: str | None = None, rank: int | None = None) -> None:
        self._nth, self._step, self._way, self._rank = nth, step, way, rank
        self._counts: dict[int, int] = {}

    def __call__(self) -> bool:
        backward = torch._C._current_graph_task_id() != -1
        if NOW.step < 0 or (self._way is not None and backward != (self._way == "backward")):
            return False
        number = self._counts[NOW.step] = self._counts.get(NOW.step, -1) + 1
        if self._step not in (None, NOW.step) or self._nth not in (None, number) or self._rank not in (None, NOW.rank):
            return False
        NOW.struck += 1
        return True


def kernel(
    op: str,
    wrong: Layer,
    nth: int | None = None,
    way: str | None = "forward",
    step: int | None = None,
    rank: int | None = None,
) -> Plant:
    """A wrong kernel of the CPU. `way`: forward (optimizers included), backward, or None for both."""

    def plant(_: Training) -> AbstractContextManager[None]:
        chosen = Chooser(nth, step, way, rank)

        def layer(below: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not chosen():
                if getattr(wrong, "sees_all", False):  # it must know what came before
                    wrong(lambda *a, **k: _copied(below(*a, **k)), args, kwargs)
                return below(*args, **kwargs)
            return wrong(below, args, kwargs)

        add_layer(op, layer)
        return contextlib.nullcontext()

    return plant


def _copied(result: Any) -> Any:
    return result.clone() if isinstance(result, Tensor) else tuple(each.clone() for each in result)


def gradient_kernel(op: str, wrong: Layer, nth: int | None = None, step: int | None = None) -> Plant:
    """A kernel that is wrong in backward only."""
    return kernel(op, wrong, nth, "backward", step)


_HOMES = {"F": torch.nn.functional, "t": torch.Tensor, "torch": torch, "distributed": torch.distributed}


def call(
    function: str,
    change: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]],
    nth: int | None = 0,
    step: int | None = None,
    *,
    way: str | None = "forward",
    rank: int | None = None,
) -> Plant:
    """The program calls a function (`F.linear`, `t.softmax`, `torch.full`) with what `change(*args, **kwargs)` returns."""
    prefix, _, name = function.partition(".")
    home: Any = _HOMES[prefix]

    @contextlib.contextmanager
    def planted() -> Iterator[None]:
        chosen, original = Chooser(nth, step, way, rank), getattr(home, name)

        def changed(*args: Any, **kwargs: Any) -> Any:
            if chosen():
                with torch._C.DisableTorchFunction():
                    args, kwargs = change(*args, **kwargs)
            setattr(home, name, original)  # functions of torch look themselves up for their own dispatch
            try:
                return original(*args, **kwargs)
            finally:
                setattr(home, name, changed)

        setattr(home, name, changed)
        yield
        setattr(home, name, original)

    return lambda _: planted()


def tensor(at: int, change: Callable[[Tensor], Tensor]) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
    """For `call`: another tensor at one position."""
    return lambda *args, **kwargs: ((*args[:at], change(args[at]), *args[at + 1 :]), kwargs)


def stale_tensor(at: int) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
    """For `call`: the tensor of the step before, at one position."""
    kept: list[Tensor] = []

    def change(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        kept.append(args[at].detach().clone())
        return ((*args[:at], kept[-2], *args[at + 1 :]) if len(kept) > 1 else args), kwargs

    return change


def keyword(**values: Any) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
    """For `call`: other keywords."""
    return lambda *args, **kwargs: (args, {**kwargs, **values})


def position(at: int, value: Any) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
    """For `call`: another value at one position."""
    return lambda *args, **kwargs: ((*args[:at], value, *args[at + 1 :]), kwargs)


def program(change: Callable[[Training], Any]) -> Plant:
    """The program itself is another: `change` edits the training before its first step."""

    def plant(training: Training) -> AbstractContextManager[None]:
        change(training)
        NOW.struck += 1
        return contextlib.nullcontext()

    return plant


def loaded(name: str, change: Callable[[Tensor], Tensor], rank: int | None = None) -> Plant:
    """Parameters and buffers (a glob) are not what they should be before the first step: a checkpoint read wrongly."""

    def load(training: Training) -> None:
        named = [*training.model.named_parameters(), *training.model.named_buffers()]
        for value in [value for each, value in named if fnmatch(each, name) and rank in (None, NOW.rank)]:
            value.data.copy_(change(value.data.clone()))

    return program(load)


def optimizer(**values: Any) -> Plant:
    """Another setting of the optimizer's first group: a number, or a function of the right one."""

    def change(training: Training) -> None:
        group = training.optimizer.param_groups[0]
        for key, value in values.items():
            group[key] = value(group[key]) if callable(value) else value

    return program(change)


def other_module(wrong: str, right: str) -> Plant:
    """A module computes with the weights of another."""

    def change(training: Training) -> None:
        training.model.get_submodule(wrong).forward = training.model.get_submodule(right).forward

    return program(change)


def skipped(name: str) -> Plant:
    """The optimizer does not know a parameter."""

    def change(training: Training) -> None:
        lost = training.model.get_parameter(name)
        for group in training.optimizer.param_groups:
            group["params"] = [each for each in group["params"] if each is not lost]

    return program(change)


def _memory(value: Tensor) -> Any:
    """The memory of a float32 tensor as a numpy array: no call of torch is made that a tap could see."""
    width = value.element_size()
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    flat = numpy.ctypeslib.as_array((ctypes.c_float * (last + 1)).from_address(value.data_ptr()))
    return numpy.lib.stride_tricks.as_strided(flat, tuple(value.shape), [width * stride for stride in value.stride()])


def unseen_gradient(
    name: str, change: Callable[[Any], None], step: int | None = None, rank: int | None = None, *, hook: bool = False
) -> Plant:
    """Gradients are changed through numpy, which no tap sees: after backward, or in a hook while it runs."""

    def strike(training: Training) -> None:
        if step in (None, NOW.step) and rank in (None, NOW.rank):
            for each, parameter in training.model.named_parameters():
                if name in ("*", each) and parameter.grad is not None:
                    change(_memory(parameter.grad))
                    NOW.struck += 1

    def plant(training: Training) -> AbstractContextManager[None]:
        if hook:
            training.model.get_parameter(name).register_post_accumulate_grad_hook(lambda _: strike(training))
        else:
            training.after_backward.append(lambda: strike(training))
        return contextlib.nullcontext()

    return plant


def unseen_update(name: str, factor: float, step: int | None = None) -> Plant:
    """The update of a parameter is too large by a factor, through numpy: an optimizer in a library of its own."""

    def plant(training: Training) -> AbstractContextManager[None]:
        parameter = training.model.get_parameter(name)
        before = _memory(parameter).copy()

        def remember() -> None:
            before[...] = _memory(parameter)

        def strike() -> None:
            if step in (None, NOW.step):
                values = _memory(parameter)
                values += (factor - 1) * (values - before)
                NOW.struck += 1

        training.after_backward.append(remember)
        training.after_step.append(strike)
        return contextlib.nullcontext()

    return plant


def other_stream(seed: int = 4321) -> Plant:
    """Random ops draw from another stream."""
    return program(lambda _: torch.manual_seed(seed))
