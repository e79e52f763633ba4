"""What a probe hands its calls to when they do not go to a run on disk.

A tap never knows what becomes of what it sees. A `Sink` takes the place of the writer of a run and of what copies
tensors; a `Second` is asked about every ATen call, before and after, and may do it once more elsewhere.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol

from tensorprobe.arguments import Tensors

if TYPE_CHECKING:
    from tensorprobe.taps.lean_tap import LeanCall, LeanPlan
    from tensorprobe.taps.session import Header

Frames = list[tuple[str, int, str]]
"""File, line and function of each frame of the user's, innermost first."""


class Taker(Protocol):
    """Looks at the tensors of calls while they are what the call sees. `Snapshots` is the one that copies them."""

    slots: int
    skipped: Counter[str]
    summary_only: bool

    @property
    def bytes_seen(self) -> int:
        """How many bytes of values were looked at."""

    def take(self, tensors: Tensors, *, but: tuple[str, ...] = (), reason: str = "") -> list[Any]:
        """One entry for each tensor; the sink gets them with the call. Those whose names begin with `but` have no values yet."""

    def tokens(self, slots: list[Any]) -> list[int]:
        """What stands for the copies of these slots, which the sink is to drop."""


class Place(Protocol):
    """Where a call is. Exactly one of the two is asked for each call that has a name, so that numbers are those of a run."""

    def count(self, op: str) -> None:
        """The call is of no interest, but it has a number."""

    def header(self, op: str) -> Header | None:
        """All that is known of the call; None when it is not wanted."""


class Second(Protocol):
    """Does ATen calls a second time. Nothing it raises reaches the training but `TrainingStopped`: it is counted."""

    def begin(self, func: Any, args: Any, kwargs: Any, place: Place) -> Any:
        """Before the call. None when there is nothing to do about it."""

    def end(self, opened: Any, result: Any) -> Any:
        """After the call: the result, which the training goes on with."""

    def raised(self, opened: Any, error: BaseException) -> None:
        """The call raised instead."""


class Looker(Protocol):
    """Looks at API calls as they are made, and keeps nothing of those that do not interest it.

    A sink that has one in its attribute `looker` gets only collectives and composite functions as calls.
    """

    stop: Exception | None
    """Raised once, in the training as soon as no call and no backward is under way."""

    def is_known(self, plan: LeanPlan, args: Any) -> bool:
        """Whether the call overwrites nothing, or only what the looker has seen: it may do with a glance at the result."""

    def glance(self, plan: LeanPlan, number: int, step: int, result: Any) -> bool:
        """The result of such a call: whether that was all that is to be done about it."""

    def passed(self, call: LeanCall) -> None:
        """It was not: `after` comes next, without a `before`."""

    def before(self, call: LeanCall, args: Any, kwargs: Any) -> None:
        """The call begins: what it overwrites can be seen for the last time."""

    def after(self, call: LeanCall, args: Any, kwargs: Any, outputs: list[Any]) -> None:
        """The call has ended."""

    def backward(self, call: LeanCall, results: tuple[Any, ...], given: tuple[Any, ...]) -> None:
        """A node of the call's backward has ended: the gradients it made, and those it was given. None for one that is not."""

    def idle(self) -> None:
        """A backward is over: no call is under way."""


class Sink(Protocol):
    """Takes calls, in the order in which they end."""

    taker: Taker
    second: Second | None
    failure: str | None

    def step(self, step: int) -> None:
        """A step begins."""

    def stack(self, number: int, frames: Frames) -> None:
        """A stack that calls of this step will refer to."""

    def call(self, event: tuple[Any, ...]) -> None:
        """A call that has ended: the fields of `record.messages.CallEvent`, its slots being what the taker gave."""

    def drop(self, tokens: list[int]) -> None:
        """Slots that were taken belong to no call."""

    def close(self, coverage: dict[str, Any], coordinates: dict[str, int], device: str) -> None:
        """Nothing comes any more."""
