"""Is the first call that fails the one where a planted fault first shows? For bench.online.

Each fault of the simulated device's catalog is planted three times: unwatched, with all bits of all ATen calls written down
(beside those of a right run: the first difference is the truth, found without the tool), and watched with each reference.
Collectives need other processes, and an op that raises gives no numbers: those are listed, not counted.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tensorprobe
from bench.sim.models import workload
from tensorprobe import sim
from tensorprobe.model.online import OnlineResult
from tensorprobe.ops import Trait, has
from tensorprobe.replay.evidence import measure
from tensorprobe.sim.known_faults import CatalogFault
from tensorprobe.sim.memory import to_host

DEVICE = "npu"
NOISE = 4.0
"""A change below so many roundings of the result, relative to its size, is no more than another order of summation makes."""

Bits = dict[str, list[torch.Tensor]]
"""`step:call` → everything the call was given or gave, as it is afterwards; in the order of execution."""


@dataclass
class Outcome:
    """What the watch said of one fault. `expected` and `named` are a step and a call: `0:Aten.mm.default.3.forward`."""

    fault: str
    reference: str
    expected: str
    roundings: float
    """By how much the fault changes its first call, in roundings of the result."""
    named: str = ""
    failure: dict[str, Any] = field(default_factory=dict)
    elsewhere: list[str] = field(default_factory=list)
    """Failing calls of ops that the fault does not touch."""
    changed_training: bool = False
    error: str = ""
    note: str = ""
    """Why it is not counted."""

    @property
    def exact(self) -> bool:
        return self.named == self.expected


class BitTrace(TorchDispatchMode):
    """Writes down the bits of every ATen call, by the names that the watch gives them."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0
        self.bits: Bits = {}
        self._numbers: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        direction = "backward" if torch._C._current_graph_task_id() != -1 else "forward"
        op = f"{self.step}:Aten.{str(func).removeprefix('aten.')}"
        number = self._numbers[op, direction]
        self._numbers[op, direction] += 1
        if not has(f"Aten.{func._schema.name.rpartition('::')[2]}", Trait.ALLOCATES):
            tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
            self.bits[f"{op}.{number}.{direction}"] = [to_host(tensor.detach()).clone() for tensor in tensors]
        return result


def train(entry: CatalogFault, after_step: Callable[[], None]) -> tuple[list[float], str]:
    """The losses of the fault's workload, and what its device raised."""
    work = workload(entry.model, DEVICE)
    losses = []
    try:
        for _ in range(entry.steps):
            losses.append(float(work.step()))
            after_step()
    except RuntimeError as error:
        if "simulated device error" not in str(error):
            raise
        return losses, str(error)
    return losses, ""


def trace(entry: CatalogFault) -> tuple[Bits, list[float], str]:
    """The bits of an unwatched training."""
    mode = BitTrace()

    def next_step() -> None:
        mode.step += 1

    with mode:
        losses, error = train(entry, next_step)
    return mode.bits, losses, error


@cache
def right_bits(model: str, steps: int) -> Bits:
    """Those of a right training."""
    return trace(next(each for each in sim.catalog() if (each.model, each.steps) == (model, steps)))[0]


def first_difference(right: Bits, wrong: Bits) -> tuple[str, float]:
    """The first call with other bits, and by how many roundings they differ."""
    for name, before in right.items():
        after = wrong.get(name)
        if after is None:
            return name, math.inf
        sizes = [_roundings(one, other) for one, other in zip(before, after, strict=True)]
        if any(sizes):
            return name, max(sizes)
    return "", 0.0


def _roundings(right: torch.Tensor, wrong: torch.Tensor) -> float:
    figures = measure([(right, wrong)])[0]
    if not figures["different"] and not figures["nonfinite_different"]:
        return 0.0
    if figures["nonfinite_different"] or not right.is_floating_point():
        return math.inf
    return figures["relative_l2"] / torch.finfo(right.dtype).eps


def watch(entry: CatalogFault, reference: str) -> tuple[OnlineResult, list[float]]:
    """A watched training with the fault."""
    with (
        sim.installed([entry.fault]),
        tensorprobe.online(reference=reference, on_fail="report") as watching,
    ):
        losses, _ = train(entry, lambda: None)
    return watching.result, losses


def plant(entries: list[CatalogFault], references: list[str]) -> Iterator[Outcome]:
    """What the watch says of each fault with each reference."""
    logging.getLogger("tensorprobe").setLevel(logging.ERROR)  # failures are what is counted here
    for entry in entries:
        if entry.model == "parallel":
            yield Outcome(entry.name, "", "", 0.0, note="a collective: needs the other processes")
            continue
        right = right_bits(entry.model, entry.steps)
        with sim.installed([entry.fault]) as handles:
            bits, losses, error = trace(entry)
        if error or not handles[0].fired:
            # Some backward formulas of torch take another op, out of place, while a dispatch mode is on.
            note = f"gives no numbers: {error}" if error else "never strikes under a dispatch mode"
            yield Outcome(entry.name, "", "", 0.0, note=note)
            continue
        expected, roundings = first_difference(right, bits)
        for reference in references:
            outcome = Outcome(entry.name, reference, expected, roundings)
            if roundings <= NOISE:
                outcome.note = "no more than rounding noise"
            result, watched_losses = watch(entry, reference)
            # Two runs with noise of their own are never alike.
            outcome.changed_training = entry.fault.kind != "nondeterminism" and repr(losses) != repr(watched_losses)
            yield read(outcome, result)


def read(outcome: Outcome, result: OnlineResult) -> Outcome:
    """The outcome with what the result says."""
    if result.broken or not result.compared:
        outcome.error = result.first_error or "nothing was compared"
    op = outcome.expected.partition(":")[2].rsplit(".", 2)[0]
    outcome.elsewhere = sorted({f"{row.step}:{row.call}" for row in result.failures if row.op != op})
    if result.failures:
        first = result.failures[0]
        outcome.named = f"{first.step}:{first.call}"
        outcome.failure = describe(first)
    return outcome


def describe(row: Any) -> dict[str, Any]:
    """A failing row in short."""
    fields = ("step", "call", "slot", "dtype", "shape", "reference", "judged_by", "measured", "allowed", "message")
    return {**{name: getattr(row, name) for name in fields}, "api": row.api, "module": row.module}
