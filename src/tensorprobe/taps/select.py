"""Which calls are recorded: directions, sides, names, ranges, modules; and which names matched nothing."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tensorprobe.errors import nearest
from tensorprobe.model.call import phase_in

_GLOB = re.compile(r"[*?\[]")
_MOST_NAMES_KEPT = 200_000


class Wanted(NamedTuple):
    """Which parts of a call are recorded: its forward, and whether to watch its backward."""

    forward: bool
    backward: bool


NOTHING = Wanted(False, False)


class Selection:
    """The user's choice of calls. Empty criteria select everything.

    A range with full names at both ends (`….forward`, `….backward`) selects what is executed from the first to the last, both
    included. A range without directions selects those calls and all between them, forward and backward. `inside` names API
    calls: only ATen calls made in them, or in their backward, are selected. `listed`, `only` and `excluded` are those of
    `CallRules`.
    """

    def __init__(
        self,
        *,
        phases: Sequence[str] | None = None,
        directions: Sequence[str] = ("forward", "backward"),
        sides: Sequence[str] = ("input", "output"),
        names: Sequence[str] = (),
        span: tuple[str, str] | None = None,
        ops: Sequence[str] = (),
        modules: Sequence[str] = (),
        inside: Sequence[str] = (),
        listed: Sequence[str] = (),
        only: frozenset[str] | None = None,
        excluded: frozenset[str] = frozenset(),
    ) -> None:
        self._phases = phases
        self._all = Wanted("forward" in directions, "backward" in directions)
        self.inputs = "input" in sides
        self.outputs = "output" in sides
        self._names = frozenset(names)
        self._span = span
        self._span_by_execution = span is not None and all(_has_direction(end) for end in span)
        self._inside = self._over = False
        self._ops = [_matcher(pattern) for pattern in ops]
        self._modules = [_matcher(pattern) for pattern in modules]
        self._listed, self._excluded = listed, excluded
        self._only, self._closed = only, frozenset(map(_family, only or ()))
        self._patterns = [*names, *(span or ()), *ops, *modules, *listed]
        self._enclosing = frozenset(inside)
        self._asked_for = [*self._patterns, *inside]
        self._hit: set[str] = set()
        self._met: dict[str, None] = {}

    def begin_step(self) -> None:
        """Look for the range again in each step."""
        self._inside = self._over = False

    def everything(self) -> Wanted | None:
        """Return what is wanted of every call alike; None if the criteria have to be asked for each."""
        asks = self._phases is not None or self._excluded or self._only is not None or self._patterns
        return None if asks else self._all

    def wants(
        self, op: str, name: str, backward_name: str, module: str, made_in: Sequence[str] = (), phase: str = ""
    ) -> Wanted:
        """Return what is wanted of the call that begins now, inside the recorded calls `made_in`."""
        if self._phases is not None and not phase_in(phase, self._phases):
            return NOTHING
        if self._excluded and (op in self._excluded or _without_overload(op) in self._excluded):
            return NOTHING
        if self._only is not None and not self.records(op):
            return NOTHING
        if not self._patterns:
            return self._all
        self._meet(name, backward_name)
        if self._ops and not self._any(self._ops, op):
            return NOTHING
        if self._modules and not self._any(self._modules, module):
            return NOTHING
        forward, backward = self._all
        if self._names:
            forward = forward and self._is_named(name, self._names)
            backward = backward and self._is_named(backward_name, self._names)
        if self._listed:
            forward = forward and self._is_listed(name, made_in)
            backward = backward and self._is_listed(backward_name, map(backward_of, made_in))
        if self._span is not None:
            inside = self._advance(name) or self._span[1] in made_in
            forward = forward and inside
            backward = backward and (inside or self._span_by_execution)
        return Wanted(forward, backward)

    def records(self, op: str) -> bool:
        """Return whether this op is recorded at all."""
        return self._only is None or op in self._only or _family(op) not in self._closed

    def wants_backward_now(self, backward_name: str) -> bool:
        """Return whether a watched backward that begins now is inside the range."""
        return not self._span_by_execution or self._advance(backward_name)

    def enter(self, name: str, backward_name: str) -> None:
        """Note an API call that is not recorded itself. ATen calls in it may be."""
        if self._enclosing:
            self._meet(name, backward_name)

    def wants_inside(self, enclosing: Iterable[str]) -> bool:
        """Return whether an ATen call made in these API calls, or in these backwards, is wanted."""
        if not self._enclosing:
            return True
        return bool([name for name in enclosing if self._is_named(name, self._enclosing)])  # each of them may be a hit

    def unmatched(self) -> dict[str, list[str]]:
        """Return the patterns that matched nothing, each with the nearest names; with none if the name itself was seen."""
        met = dict.fromkeys([*self._met, *map(_stem, self._met)])
        missed = [pattern for pattern in self._asked_for if pattern not in self._hit]
        return {pattern: [] if pattern in met else nearest(pattern, met) for pattern in missed}

    def _meet(self, name: str, backward_name: str) -> None:
        if len(self._met) < _MOST_NAMES_KEPT:
            self._met[name] = self._met[backward_name] = None

    def _is_listed(self, name: str, made_in: Iterable[str]) -> bool:
        hit = [text for call in (name, *made_in) for text in self._listed if text in call]
        self._hit.update(hit)
        return bool(hit)

    def _is_named(self, name: str, asked_for: frozenset[str]) -> bool:
        hit = asked_for.intersection((name, _stem(name)))
        self._hit |= hit
        return bool(hit)

    def _advance(self, name: str) -> bool:
        """Return whether a call is inside the range, and update the state of the range."""
        first, last = self._span or ("", "")
        candidates = (name,) if self._span_by_execution else (name, _stem(name))
        if not self._inside and not self._over and first in candidates:
            self._inside = True
            self._hit.add(first)
        if not self._inside:
            return False
        if last in candidates:
            self._inside, self._over = False, True
            self._hit.add(last)
        return True

    def _any(self, matchers: list[tuple[str, re.Pattern[str] | None]], text: str) -> bool:
        for pattern, compiled in matchers:
            if (pattern in text) if compiled is None else compiled.match(text):
                self._hit.add(pattern)
                return True
        return False


def backward_of(name: str) -> str:
    """Return the name of the backward call that belongs to a forward call."""
    parts = name.rsplit(".", 2)
    return ".".join("backward" if part == "forward" and i else part for i, part in enumerate(parts))


def _family(op: str) -> str:
    return op.partition(".")[0]


def _without_overload(op: str) -> str:
    return op.rpartition(".")[0] if op.startswith("Aten.") else op


def _has_direction(name: str) -> bool:
    return not {"forward", "backward"}.isdisjoint(name.split(".")[-2:])


def _stem(name: str) -> str:
    """Return a name without its direction: `Functional.conv2d.0`, `Module.conv.Conv2d.0`."""
    head, _, last = name.rpartition(".")
    if last in ("forward", "backward"):
        return head
    op, _, direction = head.rpartition(".")
    return f"{op}.{last}" if direction in ("forward", "backward") else name


def _matcher(pattern: str) -> tuple[str, re.Pattern[str] | None]:
    """Return a matcher: a pattern with `*`, `?` or `[` is a glob for the whole name, any other may be anywhere in it."""
    return pattern, re.compile(fnmatch.translate(pattern)) if _GLOB.search(pattern) else None
