"""The findings of one rank, and the calls that each of them spread to.

A watch or a search feeds calls in execution order. The ledger applies `rules` and remembers, within a step, the origin of each
tensor with a NaN or inf. Nothing here imports torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tensorprobe.model.call import forward_name
from tensorprobe.model.overflow import Arrival, Arrived, FirstNonfinite, Kind, NearLimit
from tensorprobe.watches.overflow.rules import (
    INTENDED,
    Facts,
    Origin,
    Seen,
    does_harm,
    from_outside,
    is_allowed,
    is_intended,
    made_of_numbers,
    may_be_mask,
)

SHOWN_SPREAD = 50
MOST_NEAR = 200


@dataclass(eq=False)
class Finding:
    """A fact and the calls it spread to. A finding that is not `sure` may turn out to be a mask."""

    fact: FirstNonfinite | Arrival
    sure: bool = True
    spread: list[str] = field(default_factory=list)
    spread_count: int = 0
    carriers: list[str] = field(default_factory=list)
    """While it is not sure: the calls that passed it on."""
    kept: Any = None
    """Of a watch: the `KeptCall`."""

    def reached(self, name: str) -> None:
        """Add a call that it spread to."""
        self.spread_count += 1
        if len(self.spread) < SHOWN_SPREAD:
            self.spread.append(name)

    def written(self) -> FirstNonfinite | Arrival:
        """Return the fact with the calls it spread to so far."""
        return msgspec.structs.replace(self.fact, spread=self.spread, spread_count=self.spread_count)


MakeFirst = Callable[[Kind], Finding]
MakeArrival = Callable[[Facts], Finding]


class Ledger:
    """The findings of one rank."""

    def __init__(self, allow: Iterable[str] = (), *, most: int = 100) -> None:
        self._allow = tuple(allow)
        self._most = most
        self.findings: list[Finding] = []
        self.left_out = 0
        self.intended: Counter[str] = Counter()
        self.near: dict[tuple[str, str, str], NearLimit] = {}
        self._known: dict[Hashable, Origin] = {}
        self._bare: set[Hashable] = set()
        self._tainted: dict[str, Finding] = {}
        self._doubtful: list[Finding] = []
        self._of_step: list[Finding] = []

    @property
    def first_nonfinite(self) -> list[FirstNonfinite]:
        return [fact for fact in self._written() if isinstance(fact, FirstNonfinite)]

    @property
    def arrivals(self) -> list[Arrival]:
        return [fact for fact in self._written() if isinstance(fact, Arrival)]

    def _written(self) -> list[FirstNonfinite | Arrival]:
        return [finding.written() for finding in self.findings]

    def begin_step(self) -> None:
        """Forget the tensors of the last step. What is still doubtful was a mask."""
        for finding in self._doubtful:
            if not finding.sure and isinstance(finding.fact, FirstNonfinite):
                self.intended[finding.fact.op] += 1
        self._doubtful.clear()
        self._known.clear()
        self._bare.clear()
        self._tainted.clear()
        self._of_step.clear()

    def take_back(self, finding: Finding, keys: Iterable[Hashable]) -> None:
        """Withdraw a finding. What it spread to, and the tensors with these keys, stay attached to it and are not reported."""
        self.findings = [each for each in self.findings if each is not finding]
        self._of_step = [each for each in self._of_step if each is not finding]
        self._known |= dict.fromkeys(keys, Origin("bad", finding))

    def allocated(self, keys: Iterable[Hashable]) -> None:
        """Remember uninitialised memory: its content means nothing."""
        self._bare.update(keys)

    def is_bare(self, key: Hashable) -> bool:
        """Return whether it is uninitialised memory."""
        return key in self._bare

    def found_in_step(self, call: str) -> Finding | None:
        """Return this step's finding at that call: a recomputed forward (checkpointing) meets it again."""
        return next((finding for finding in self._of_step if finding.fact.call == call), None)

    def was_given(self, seen: Seen) -> bool:
        """Return whether every inf of the outputs was an argument. Decided before the inputs are inspected."""
        if all(facts.clean for facts in seen.outputs) or any(facts.moments.nan for facts in seen.outputs):
            return False
        if not is_intended(seen):
            return False
        self._intend(seen)
        return True

    def judge(self, seen: Seen, make_first: MakeFirst, make_arrival: MakeArrival) -> list[Finding]:
        """Judge a call with a NaN or inf in its outputs; return the findings that are new or have become sure."""
        if is_allowed(self._allow, seen.op, seen.name, seen.module):
            return self._intend(seen)
        dirty = [facts for facts in seen.inputs if not facts.clean]
        origins = [self._origin(facts) for facts in dirty]
        new: list[Finding] = []
        bad = next((origin.source for origin in origins if origin and origin.standing == "bad"), None)
        bad = bad or self._tainted.get(forward_name(seen.name)) or self.found_in_step(seen.name)
        if bad is None and None in origins:
            facts = dirty[origins.index(None)]
            if facts.key in self._bare and any(output.key == facts.key for output in seen.outputs):
                return []  # memory that is being filled
            bad = self._carried(facts, make_arrival, new)
        doubtful = next((origin.source for origin in origins if origin and origin.standing == "doubtful"), None)
        if bad is None and doubtful is not None and does_harm(seen):
            doubtful.sure = True
            bad = self._keep(doubtful)
            self._tainted |= dict.fromkeys([doubtful.fact.call, *doubtful.carriers], doubtful)
            new.append(doubtful)
        if bad is not None:
            bad.reached(seen.name)
            self._taint(seen, bad)
            return new
        if not any(facts.moments.nan for facts in seen.outputs):
            if doubtful is not None:
                doubtful.carriers.append(seen.name)
                self._mark(seen.outputs, Origin("doubtful", doubtful))
                return []
            if is_intended(seen):
                return self._intend(seen)
            if may_be_mask(seen):
                finding = make_first("inf")
                finding.sure = False
                self._doubtful.append(finding)
                self._mark(seen.outputs, Origin("doubtful", finding))
                return []
        if made_of_numbers(seen):
            finding = make_arrival(next(facts for facts in seen.outputs if not facts.clean))
            return [self.add(seen, finding)]
        return [self.add(seen, make_first("nan" if any(f.moments.nan for f in seen.outputs) else "inf"))]

    def add(self, seen: Seen, finding: Finding) -> Finding:
        """Add a finding at this call, and return it."""
        self._keep(finding)
        self._taint(seen, finding)
        return finding

    def add_near(self, near: NearLimit) -> None:
        """Add an output near its limit. One is kept for each op, module and dtype: the nearest."""
        op = near.call.rsplit(".", 2)[0]
        key = (op, near.module, near.dtype)
        known = self.near.get(key)
        if known is None and len(self.near) >= MOST_NEAR:
            return
        if known is not None:
            best = max(known, near, key=lambda each: each.greatest / each.limit)
            near = msgspec.structs.replace(best, times=known.times + 1)
        self.near[key] = near

    def _origin(self, facts: Facts) -> Origin | None:
        origin = self._known.get(facts.key)
        if origin is not None and origin.standing == "doubtful" and origin.source.sure:
            return Origin("bad", origin.source)
        if origin is None or (origin.standing == "intended" and facts.moments.nan):
            return None if facts.key in self._bare else from_outside(facts)
        return origin

    def _carried(self, facts: Facts, make_arrival: MakeArrival, new: list[Finding]) -> Finding:
        """Return the finding that explains a NaN or inf which no watched call made; a new one if there is none.

        Earlier findings of this step explain it. A parameter or a gradient is also explained by those of earlier steps.
        """
        if self._of_step:
            return self._of_step[-1]
        finding = make_arrival(facts)
        if (
            self.findings
            and isinstance(finding.fact, Arrival)
            and finding.fact.kind in (Arrived.PARAMETER, Arrived.GRADIENT)
        ):
            self._of_step.append(self.findings[-1])
            return self.findings[-1]
        new.append(self._keep(finding))
        return finding

    def _keep(self, finding: Finding) -> Finding:
        self._of_step.append(finding)
        if len(self.findings) >= self._most:
            self.left_out += 1
        else:
            self.findings.append(finding)
            if isinstance(finding.fact, FirstNonfinite):
                number = sum(isinstance(each.fact, FirstNonfinite) for each in self.findings)
                finding.fact = msgspec.structs.replace(finding.fact, number=number)
        return finding

    def _intend(self, seen: Seen) -> list[Finding]:
        self.intended[seen.op] += 1
        self._mark(seen.outputs, INTENDED)
        return []

    def _taint(self, seen: Seen, finding: Finding) -> None:
        self._tainted[seen.name] = finding
        self._mark(seen.outputs, Origin("bad", finding))

    def _mark(self, outputs: Iterable[Facts], origin: Origin) -> None:
        for facts in outputs:
            if not facts.clean:
                self._known[facts.key] = origin
