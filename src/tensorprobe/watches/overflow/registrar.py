"""Turns a call that raised an alarm into a finding: collects facts of its tensors, applies the rules, describes the finding.

It runs inside the training. No mode sees it, and no error of it reaches the training. `settle` hands on new findings when no
call and no backward is running.
"""

from __future__ import annotations

import gc
import math
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import torch

from tensorprobe import torch_names
from tensorprobe.arguments import flatten_arguments
from tensorprobe.model.overflow import Arrived, FirstNonfinite, Kind, NearLimit
from tensorprobe.numerics.summary import Moments, greatest_finite
from tensorprobe.ops import MOVING_NODES, Trait, has
from tensorprobe.taps.looking import LookedCall
from tensorprobe.taps.stacks import user_frames
from tensorprobe.torch_names import quiet
from tensorprobe.watches.overflow.keeping import (
    At,
    Describer,
    Frames,
    Keeper,
    KeptCall,
    NamedTensors,
    describe_call,
    describe_facts,
)
from tensorprobe.watches.overflow.ledger import Finding, Ledger
from tensorprobe.watches.overflow.looker import (
    FLOATING,
    Before,
    OverflowLooker,
    Remembered,
    facts_of,
    is_parameter,
    key_of,
)
from tensorprobe.watches.overflow.rules import Facts, Seen, arguments, given_numbers

UNSCALE = "Torch._amp_foreach_non_finite_check_and_unscale_"
"""What a scaler calls before each step; its second argument becomes 1 when a gradient is not finite."""


class ScalerWait:
    """Findings under a GradScaler. A scaler overflows on purpose now and then, skips the step and lowers its scale. So a
    finding in backward waits until the scaler has checked the gradients, and is dropped if the scaler skips the step."""

    def __init__(self, ledger: Ledger, *, counts: bool) -> None:
        self._ledger = ledger
        self._counts = counts
        self._scaler: weakref.ref[Any] | None = None
        self._held: list[Finding] = []
        self.skipped: list[str] = []

    def holds(self, new: list[Finding], seen: Seen) -> bool:
        """Hold findings in backward, and in the product of loss and scale; return whether they were held."""
        if not new or self._counts or not self._is_used():
            return False
        scale = None if self._scaler is None else getattr(self._scaler(), "_scale", None)
        scaled = scale is not None and any(facts.key == key_of(scale) for facts in seen.inputs)
        if not scaled and not seen.name.endswith("backward"):
            return False
        self._held += new
        return True

    def skips(self, args: Any) -> bool:
        """Return whether the scaler skips the step. If so, withdraw the held findings."""
        if not self._held or len(args) < 2:
            return False
        with quiet():
            if not float(args[1]) > 0:
                return False
        for finding in self._held:
            self.skipped.append(finding.fact.call)
            self._ledger.take_back(finding, [key_of(gradient) for gradient in args[0]])
        self._held.clear()
        return True

    def release(self) -> list[Finding]:
        """Return the held findings: the step was taken."""
        held, self._held = self._held, []
        return held

    def _is_used(self) -> bool:
        """Return whether a GradScaler has scaled a loss. It is searched among all objects: nothing announces it."""
        found = None if self._scaler is None else self._scaler()
        if found is None:
            # type(), because isinstance may run code of the object, which may warn.
            scalers = (each for each in gc.get_objects() if issubclass(type(each), torch_names.GradScaler))
            found = next((each for each in scalers if each.is_enabled() and each._scale is not None), None)
            self._scaler = None if found is None else weakref.ref(found)
        return found is not None


OUT = "input.kwargs.out"
KeepCall = Callable[[FirstNonfinite], KeptCall]


class Registrar:
    """Makes the findings of one rank. `on_new` receives them once they are sure."""

    looker: OverflowLooker
    describer: Describer

    def __init__(
        self,
        ledger: Ledger,
        *,
        rank: int,
        keep_bytes: int,
        near: float | None,
        under_scaler: bool,
        on_new: Callable[[list[Finding]], None],
    ) -> None:
        self.ledger = ledger
        self.scaler = ScalerWait(ledger, counts=under_scaler)
        self._rank = rank
        self.keeper = Keeper(keep_bytes)
        self._near = near
        self._on_new = on_new
        self._new: list[Finding] = []
        self._epoch = 0

    def begin_step(self) -> None:
        """Start a step. Findings that still wait for a scaler count, since it did not skip their step."""
        self._new += self.scaler.release()
        self.ledger.begin_step()
        self.looker.calls_before = self.looker.calls
        self._epoch = 0
        self.settle()

    def settle(self) -> None:
        """Hand on new findings. Never called during a backward."""
        if self._new:
            new, self._new = self._new, []
            self._on_new(new)

    def allocated(self, keys: Iterable[Any]) -> None:
        """Remember uninitialised memory."""
        self.ledger.allocated(keys)

    def forward(
        self,
        call: LookedCall,
        args: Any,
        kwargs: Any,
        results: list[torch.Tensor],
        overwritten: list[Before],
        *,
        flagged: bool = False,
    ) -> None:
        """Judge a call with an alarm in an output, or whose overflow register is set."""
        named: list[tuple[str, torch.Tensor]] = []
        tree = flatten_arguments(args, kwargs, named)
        with torch_names.no_overrides():
            outputs = [(f"output.{place}", tensor) for place, tensor in enumerate(results)]
            made = _facts(outputs)
            if self.ledger.was_given(Seen(call.name, call.plan.name, call.module, *tree, (), made)):
                return  # by far the most common case: a mask is filled in
            before = {id(each.tensor): each for each in overwritten}
            inputs = [(slot, tensor) for slot, tensor in named if not slot.startswith(OUT)]
            facts = [_facts_before(slot, tensor, before.get(id(tensor))) for slot, tensor in inputs]
            seen = Seen(call.name, call.plan.name, call.module, *tree, _known(facts), made)

            def keep(first: FirstNonfinite) -> KeptCall:
                described = describe_call(call.name, call.module, inputs, outputs, *tree)
                return self.keeper.forward(first, described, inputs, outputs, before)

            if seen.op == UNSCALE and self.scaler.skips(args):
                return
            self._judge(call, seen, inputs, outputs, keep, user_frames(sys._getframe()), flagged=flagged)
            if torch_names.graph_task() == -1:
                self.settle()

    def backward(
        self, call: LookedCall, results: tuple[Any, ...], given: tuple[Any, ...], *, flagged: bool = False
    ) -> None:
        """Judge the backward of a call with an alarm in a gradient."""
        remembered = call.found if isinstance(call.found, Remembered) else None
        inputs = [(f"input.{place}", tensor) for place, tensor in enumerate(given) if tensor is not None]
        slots = _gradient_slots(call, remembered, len(results))
        outputs = [(slots[place], tensor) for place, tensor in enumerate(results) if tensor is not None]
        given_facts, made = ([each._replace(never_mask=True) for each in _facts(side)] for side in (inputs, outputs))
        seen = Seen(call.backward_name, call.plan.name, call.module, None, None, given_facts, made)

        def keep(first: FirstNonfinite) -> KeptCall:
            return self.keeper.backward(first, call, remembered, inputs, outputs)

        self._judge(
            call,
            seen,
            inputs,
            outputs,
            keep,
            [remembered.frame] if remembered and remembered.frame else [],
            flagged=flagged,
        )

    def collective(self, seen: Seen, step: int, *, reduces: bool) -> None:
        """Judge a collective. A NaN or inf that no input had comes from another rank, unless its own sum overflowed."""
        at = At(step, False, self._epoch)
        self._epoch += 1
        dirty = [facts for facts in seen.outputs if not facts.clean]
        if not dirty:
            return
        own_sum = reduces and not any(facts.moments.nan for facts in dirty)
        if not own_sum and all(facts.clean for facts in seen.inputs):
            # Treat it as an input that no call of this rank made.
            foreign = [facts._replace(key=(seen.name, facts.key)) for facts in dirty]
            seen = seen._replace(inputs=[*seen.inputs, *foreign])

        def keep(first: FirstNonfinite) -> KeptCall:
            call = describe_facts(seen.name, seen.module, (*seen.inputs, *seen.outputs))
            return KeptCall(first, call, lacking="a collective cannot be run alone")

        self._judge(at, seen, [], [], keep, user_frames(sys._getframe()), what=Arrived.OTHER_RANK)
        self.settle()

    def _judge(
        self,
        call: LookedCall | At,
        seen: Seen,
        inputs: NamedTensors,
        outputs: NamedTensors,
        keep: KeepCall,
        frames: Frames,
        *,
        what: str = "",
        flagged: bool = False,
    ) -> None:
        at, tensors = At(call.step, call.repeat, self._epoch), dict(inputs)

        def make_first(kind: Kind) -> Finding:
            first = self.describer.describe_first(at, seen, kind, tensors, dict(outputs), frames)
            kept = keep(first)
            return Finding(kept.first, kept=kept)

        def make_arrival(facts: Facts) -> Finding:
            bare = Arrived.MEMORY if self.ledger.is_bare(facts.key) else ""
            made_here = Arrived.NUMBER if facts.slot.startswith("output") else ""
            kind = what or bare or made_here or self.describer.what(facts, tensors)
            return Finding(self.describer.arrival(at, seen, facts, kind, frames))

        if not all(facts.clean for facts in seen.outputs):
            new = self.ledger.judge(seen, make_first, make_arrival)
            if not self.scaler.holds(new, seen):
                self._new += new
        elif flagged and all(facts.clean for facts in seen.inputs):
            self._new.append(self.ledger.add(seen, make_first("flagged")))
        else:
            self._look_at_limits(at, seen, make_first)

    def _look_at_limits(self, at: At, seen: Seen, make_first: Callable[[Kind], Finding]) -> None:
        """Check finite outputs: are they at the limit of their dtype, or near it?"""
        for facts in seen.outputs:
            limit, greatest = greatest_finite(facts.dtype), _greatest(facts)
            if greatest == limit and _is_saturated(seen, limit):
                finding = make_first("saturated")
                if _overflows(finding):
                    self._new.append(self.ledger.add(seen, finding))
                    return
            if self._near is not None and greatest >= limit / self._near:
                near = NearLimit(
                    call=seen.name, module=seen.module, step=at.step, rank=self._rank, dtype=facts.dtype,
                    greatest=greatest, limit=limit, times=1,
                )  # fmt: skip
                self.ledger.add_near(near)


def _is_saturated(seen: Seen, limit: float) -> bool:
    """Return whether the largest number came from neither an argument nor an input."""
    asked = any(abs(number) >= limit for number in given_numbers(arguments(seen)))
    moved = has(seen.op, Trait.MOVES) and not has(seen.op, Trait.CASTS)
    return not asked and not moved and all(facts.clean and _greatest(facts) != limit for facts in seen.inputs)


def _overflows(finding: Finding) -> bool:
    """Return whether a replay shows that the true result exceeds the limit."""
    from tensorprobe.watches.overflow.replaying import replay_verdict

    kept: KeptCall | None = finding.kept
    if kept is None or kept.lacking:
        return False
    judged = replay_verdict(kept.replayed, kept.inputs(), kept.found(), gradients=kept.gradients())
    reason = f"{judged.reason}; the device returns the largest number instead of inf"
    finding.fact = msgspec.structs.replace(finding.fact, verdict=judged.verdict, reason=reason)
    return bool(judged.overflows)


def _greatest(facts: Facts) -> float:
    return max((abs(end) for end in (facts.moments.max, facts.moments.min) if not math.isnan(end)), default=0.0)


def _facts(tensors: NamedTensors) -> list[Facts]:
    return _known(facts_of(slot, tensor) for slot, tensor in tensors)


def _known(found: Iterable[Facts | None]) -> list[Facts]:
    return [facts for facts in found if facts is not None]


def _facts_before(slot: str, tensor: torch.Tensor, before: Before | None) -> Facts | None:
    """Return the facts of an input before the call. Of an overwritten one only the largest magnitude is known."""
    if before is None:
        return facts_of(slot, tensor)
    if before.facts is not None:
        return before.facts._replace(slot=slot)
    dtype = FLOATING.get(torch_names.dtype_of(tensor))
    if dtype is None:
        return None
    moments = Moments(before.greatest, math.nan, math.nan, math.nan, 0, 0)
    return Facts(
        slot, dtype.name, tuple(torch_names.shape_of(tensor)), moments, key_of(tensor), None, is_parameter(tensor)
    )


def _gradient_slots(call: LookedCall, remembered: Remembered | None, count: int) -> list[str]:
    """Return a slot for each gradient of a node: that of the forward's input which its edge leads to, else an inner name."""
    inner = [f"output.inner.{place}" for place in range(count)]
    node = torch_names.autograd_node()
    if remembered is None or node is None:
        return inner
    held = [
        (slot, reference())
        for slot, reference, grad in zip(remembered.slots, remembered.tensors, remembered.grads, strict=True)
        if grad
    ]
    found: dict[int, str] = {}
    leaving: list[int] = []
    for place, edge in enumerate(node.next_functions[:count]):
        target, number = _beyond_moves(edge, call.start)
        if target is None or (target._sequence_nr() >= call.start and not hasattr(target, "variable")):
            continue
        slot = next((slot for slot, tensor in held if tensor is not None and _hangs_on(tensor, target, number)), None)
        if slot is None:
            leaving.append(place)
        else:
            found[place] = slot
    gone = [slot for slot, tensor in held if tensor is None]
    if len(leaving) == len(gone) == 1:  # the tensor is gone, but only one remains
        found[leaving[0]] = gone[0]
    return [f"output{found[place][5:]}" if place in found else inner[place] for place in range(count)]


def _beyond_moves(edge: tuple[Any, int], start: int) -> tuple[Any, int]:
    """Follow an edge through nodes of the call that only move values."""
    target, number = edge
    while target is not None and target.name() in MOVING_NODES and target._sequence_nr() >= start:
        if len(target.next_functions) != 1:
            break
        ((target, number),) = target.next_functions
    return target, number


def _hangs_on(tensor: torch.Tensor, node: Any, number: int) -> bool:
    hangs = torch_names.node_of(tensor) is node and torch_names.output_number_of(tensor) == number
    return getattr(node, "variable", None) is tensor or hangs
