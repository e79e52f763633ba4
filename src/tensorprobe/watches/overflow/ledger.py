"""What was found, and where everything not finite comes from: births, arrivals, and the calls they spread to.

One ledger for one rank, fed in execution order by a watch or by a recorded run. It applies `rules` and keeps, for the step at
hand, the origin of each tensor that was not finite. Nothing here imports torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tensorprobe.model.call import forward_name
from tensorprobe.model.overflow import Arrival, Birth, Kind, NearLimit
from tensorprobe.watches.overflow.facts import Facts
from tensorprobe.watches.overflow.rules import (
    INTENDED,
    Origin,
    Seen,
    does_harm,
    from_outside,
    is_allowed,
    is_meant,
    made_of_numbers,
    may_be_mask,
)

SHOWN_SPREAD = 50
MOST_NEAR = 200


@dataclass(eq=False)
class Finding:
    """A birth or an arrival, and what became of it. A birth that is not `sure` may turn out to be a mask."""

    fact: Birth | Arrival
    sure: bool = True
    spread: list[str] = field(default_factory=list)
    spread_count: int = 0
    carriers: list[str] = field(default_factory=list)
    """While it is not sure: the calls that have passed it on."""
    born: Any = None
    """The watch's own: the call with its tensors."""

    def reached(self, name: str) -> None:
        """Another call has it."""
        self.spread_count += 1
        if len(self.spread) < SHOWN_SPREAD:
            self.spread.append(name)

    def written(self) -> Birth | Arrival:
        """The fact with what is known now."""
        return msgspec.structs.replace(self.fact, spread=self.spread, spread_count=self.spread_count)


MakeBirth = Callable[[Kind], Finding]
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
    def births(self) -> list[Birth]:
        return [fact for fact in self._written() if isinstance(fact, Birth)]

    @property
    def arrivals(self) -> list[Arrival]:
        return [fact for fact in self._written() if isinstance(fact, Arrival)]

    def _written(self) -> list[Birth | Arrival]:
        return [finding.written() for finding in self.findings]

    def begin_step(self) -> None:
        """What was doubtful and did no harm was a mask; tensors are not known again across steps."""
        for finding in self._doubtful:
            if not finding.sure and isinstance(finding.fact, Birth):
                self.intended[finding.fact.op] += 1
        self._doubtful.clear()
        self._known.clear()
        self._bare.clear()
        self._tainted.clear()
        self._of_step.clear()

    def take_back(self, finding: Finding, keys: Iterable[Hashable]) -> None:
        """A finding is none after all. What came of it, and the tensors with these keys, go on belonging to it, and are not told."""
        self.findings = [each for each in self.findings if each is not finding]
        self._of_step = [each for each in self._of_step if each is not finding]
        self._known |= dict.fromkeys(keys, Origin("bad", finding))

    def allocated(self, keys: Iterable[Hashable]) -> None:
        """Memory that nobody has filled: what stands in it means nothing."""
        self._bare.update(keys)

    def is_bare(self, key: Hashable) -> bool:
        """Whether it is memory that nobody has filled."""
        return key in self._bare

    def found_in_step(self, call: str) -> Finding | None:
        """What was found at that call in this step: a recomputed forward finds it again."""
        return next((finding for finding in self._of_step if finding.fact.call == call), None)

    def was_given(self, seen: Seen) -> bool:
        """Whether all that is not finite in the outputs was an argument of the call; looked at before any input is."""
        if all(facts.clean for facts in seen.outputs) or any(facts.moments.nan for facts in seen.outputs):
            return False
        if not is_meant(seen):
            return False
        self._meant(seen)
        return True

    def judge(self, seen: Seen, make_birth: MakeBirth, make_arrival: MakeArrival) -> list[Finding]:
        """A call with an output that is not finite. Findings that are new, or have become sure."""
        if is_allowed(self._allow, seen.op, seen.name, seen.module):
            return self._meant(seen)
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
            if is_meant(seen):
                return self._meant(seen)
            if may_be_mask(seen):
                finding = make_birth("inf")
                finding.sure = False
                self._doubtful.append(finding)
                self._mark(seen.outputs, Origin("doubtful", finding))
                return []
        if made_of_numbers(seen):
            finding = make_arrival(next(facts for facts in seen.outputs if not facts.clean))
            return [self.add_birth(seen, finding)]
        return [self.add_birth(seen, make_birth("nan" if any(f.moments.nan for f in seen.outputs) else "inf"))]

    def add_birth(self, seen: Seen, finding: Finding) -> Finding:
        """A call that gave birth, or that brought in what its arguments were, by whatever rule."""
        self._keep(finding)
        self._taint(seen, finding)
        return finding

    def add_near(self, near: NearLimit) -> None:
        """Of equal ops in one module the nearest is kept."""
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
        """Something not finite that no watched call has made: it goes back to what this step has found, else it is new.

        A parameter, or a gradient, goes back to what any step has found: that is how it came to be so.
        """
        if self._of_step:
            return self._of_step[-1]
        finding = make_arrival(facts)
        if (
            self.findings
            and isinstance(finding.fact, Arrival)
            and finding.fact.what.startswith(("parameter", "gradient"))
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
            if isinstance(finding.fact, Birth):
                number = sum(isinstance(each.fact, Birth) for each in self.findings)
                finding.fact = msgspec.structs.replace(finding.fact, number=number)
        return finding

    def _meant(self, seen: Seen) -> list[Finding]:
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
