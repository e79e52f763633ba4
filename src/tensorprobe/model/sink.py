"""The door between taps and whoever wants their calls.

A tap knows nothing about a sink but its `needs`. Recording a run, the online compare and the overflow watch are sinks.
A new one derives from `Sink` and overrides what it has a use for; everything else does nothing.

Errors that a sink raises are counted and never reach the program, except `TrainingStopped`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import msgspec

from tensorprobe.model.event import Event, Frames
from tensorprobe.model.manifest import Coverage

Tensors = list[tuple[str, Any]]
"""Slot names and tensors."""


class CallRules(msgspec.Struct, frozen=True):
    """How calls are named, numbered and chosen, where that differs from our own way.

    - `operators`: `x + y` is `Tensor.__add__`, not `Tensor.add`.
    - `only_given`: arguments that the program left to their defaults are not recorded.
    - `inner`: calls that a torch function written in Python makes are recorded and numbered too.
    - `regions`: a call in no other is made in `optimizer` or `clip_grad`, if it is.
    - `torch_paths`: the modules inside the given model, by the paths of `named_modules`; not the model itself, nor others.
    - `listed`: only calls whose name contains one of these texts, and calls made inside them.
    - `only`: the ops to record; None for all. A family of which it has no op is recorded whole. An op that is not in it
      and is written in Python is not one call: the calls in it are.
    - `excluded`: ops to leave out; ATen ops without their overload.
    - `numbers`: the first number of each op.
    - `numbers_go_on`: a new step does not reset the numbers.
    """

    operators: bool = False
    only_given: bool = False
    inner: bool = True
    regions: bool = False
    torch_paths: bool = False
    listed: tuple[str, ...] = ()
    only: frozenset[str] | None = None
    excluded: frozenset[str] = frozenset()
    numbers: Mapping[str, int] = MappingProxyType({})
    numbers_go_on: bool = False


def _nothing() -> None:
    """Do nothing."""


class Alone(msgspec.Struct, frozen=True):
    """One call that is bracketed by two callbacks, or run once more. `name` is its canonical name with direction.

    For `….forward`, `enter` and `leave` are called directly before and after the call. For `….backward`, `gradients` is
    asked when the forward call begins. If it returns gradients of the outputs, the call is run once more on copies and
    back through them, with `enter` and `leave` around that backward. `warn` receives the reason when that is impossible.
    """

    name: str
    gradients: Callable[[], Sequence[Any] | None] = lambda: None
    enter: Callable[[], None] = _nothing
    leave: Callable[[], None] = _nothing
    warn: Callable[[str], None] | None = None


class Needs(msgspec.Struct, frozen=True):
    """What a sink needs of the taps.

    By default every call comes as an `Event`, and `take` sees its tensors before and after it.

    - `look`: only a look at API calls. The sink has the methods of a `LookingSink`; only collectives and composite functions
      come as events.
    - `second`: the sink may execute each ATen call a second time. It has the methods of a `SecondSink`.
    - `alone`: one call to bracket, or to run once more.
    - `rules`: other names, numbers or choices than ours.
    - `self_test`: have the probe prove first that recording works in this process.
    - `roles`: phase and micro-batch of calls, and the roles of tensors; the slots that `take` returns have a field `role`.
    """

    look: bool = False
    second: bool = False
    alone: Alone | None = None
    rules: CallRules = CallRules()
    self_test: bool = False
    roles: bool = False


class Sink:
    """Receives the calls of one probe, in the order in which they end."""

    needs = Needs()
    skip: Callable[[Any, Any], bool] | None = None
    """Optional: given the tap's plan of an API or ATen call and its arguments by position, return whether the sink wants nothing
    of it. The call is then numbered and counted as filtered. A sink that looks gets a glance at the result instead."""
    failure: str | None = None
    """Why the sink gave up, if it did. The probe reports it in a warning at the end."""
    ended_by = ""
    """The exception that ends the program, if one does: set before `close`."""
    in_c: Any = None
    """Optional: a context of `_fast.c` and the writer of its ring. Plain calls then go there from C, past `take` and `call`."""
    slots_taken = 0
    slots_skipped: Mapping[str, int] = MappingProxyType({})
    bytes_seen = 0

    def check(self, rank: int) -> None:
        """Raise a TensorprobeError if nothing may be written for this rank. Called before anything else."""

    def open(self, rank: int, world_size: int, settings: Any) -> None:
        """Make ready. `settings` are the probe's CaptureSettings. Errors are raised to the user: training has not begun."""

    def begin_step(self, step: int) -> None:
        """The calls that follow belong to this step."""

    def end_step(self, *, whole: bool) -> None:
        """No more calls of this step will come. It is not `whole` when the recording stops before the step has ended."""

    def stack(self, number: int, frames: Frames) -> None:
        """Receive a stack that calls of this step refer to by number."""

    def take(self, tensors: Tensors, *, but: tuple[str, ...] = (), reason: str = "") -> list[Any]:
        """Return an entry for each tensor, as it is at this moment; `call` gets them as the slots of the event.

        Tensors whose slot names begin with one of `but` hold no values of interest, for the given reason.
        """
        return []

    def call(self, event: Event) -> None:
        """Receive a call that has ended. Its slots are what `take` returned."""

    def has(self, event: Event) -> bool:
        """Return whether `call` took this event, the last one of this thread. It may have been interrupted."""
        return True

    def drop(self, slots: list[Any]) -> None:
        """Forget entries that `take` returned: they belong to no call."""

    def close(self, coverage: Coverage, coordinates: dict[str, int], device: str) -> Coverage | None:
        """Finish. Return the coverage corrected by what was really kept, if the sink knows better."""
        return None


class LookingSink(Sink):
    """Looks at API calls while they run. Nothing is copied, named or described unless the sink does so itself.

    `call` is the tap's `LookedCall`: its `found` belongs to the sink.
    """

    needs = Needs(look=True)
    stop: Exception | None = None
    """Raised in the program once no call and no backward is running, and then cleared."""

    def glance(self, plan: Any, number: int, step: int, result: Any) -> bool:
        """Look at the result of a skipped call. If this returns False, `glanced` and `after` follow.

        Only calls outside of modules and without gradients can be skipped.
        """
        return False

    def glanced(self, call: Any) -> None:
        """A glance was not enough. `after` follows, and there was no `before`."""

    def before(self, call: Any, args: Any, kwargs: Any) -> None:
        """The call begins."""

    def after(self, call: Any, args: Any, kwargs: Any, outputs: list[Any]) -> None:
        """The call has ended."""

    def gradients(self, call: Any, results: tuple[Any, ...], given: tuple[Any, ...]) -> None:
        """A node of the call's backward has ended: the gradients it made and those it received; either may hold None."""

    def idle(self) -> None:
        """A backward is over and no call is running."""


class AtenNumbers(Protocol):
    """Numbers and names of ATen calls. A sink uses exactly one of the two methods for each call, so that numbers match a run's."""

    step: int

    def count(self, op: str) -> None:
        """Number a call that is of no interest."""

    def event(self, op: str) -> Event | None:
        """Number and describe a call; None when the settings exclude it."""


class SecondSink(Sink):
    """Is asked before and after each ATen call, and may execute it a second time."""

    needs = Needs(second=True)

    def begin(self, func: Any, args: Any, kwargs: Any, numbers: AtenNumbers) -> Any:
        """The call begins. Return None to ignore it."""

    def end(self, opened: Any, result: Any) -> Any:
        """The call has ended. `opened` is what `begin` returned. Return the result that the program goes on with."""
        return result

    def raised(self, opened: Any, error: BaseException) -> None:
        """The call raised."""
