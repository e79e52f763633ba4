"""From a call that raised the alarm to a finding: facts of its tensors, the rules, the birth with all that is told of it.

Runs as tool code in the training: nothing it does is seen by a mode, nothing it raises reaches the training. New findings are
handed on in `settle`, which is called when neither a call nor a backward is under way.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import torch

from tensorprobe import torch_names
from tensorprobe.arguments import flatten_arguments
from tensorprobe.model.overflow import Birth, Kind, NearLimit
from tensorprobe.numerics.summary import Moments, greatest_finite
from tensorprobe.ops import MOVING_NODES, Trait, has
from tensorprobe.taps.looking import LookedCall
from tensorprobe.taps.stacks import user_frames
from tensorprobe.watches.overflow.describing import At, Describer, Frames
from tensorprobe.watches.overflow.facts import Facts
from tensorprobe.watches.overflow.keeping import BornCall, Keeper, NamedTensors, describe_call, describe_facts
from tensorprobe.watches.overflow.ledger import Finding, Ledger
from tensorprobe.watches.overflow.looker import Before, OverflowLooker, Remembered
from tensorprobe.watches.overflow.rules import Seen, arguments, given_numbers
from tensorprobe.watches.overflow.scaler import UNSCALE, ScalerWait
from tensorprobe.watches.overflow.tensors import FLOATING, facts_of, key_of

OUT = "input.kwargs.out"
KeepCall = Callable[[Birth], BornCall]


class Registrar:
    """Makes the findings of one rank. `on_new` gets those that are sure."""

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
        """What a scaler did not skip was a step like any other."""
        self._new += self.scaler.release()
        self.ledger.begin_step()
        self.looker.calls_before = self.looker.calls
        self._epoch = 0
        self.settle()

    def settle(self) -> None:
        """Hand on what is new. Not called inside of a backward."""
        if self._new:
            new, self._new = self._new, []
            self._on_new(new)

    def allocated(self, keys: Iterable[Any]) -> None:
        """Memory that nobody has filled."""
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
        """An output of a call has raised the alarm, or the device says that the call overflowed."""
        named: list[tuple[str, torch.Tensor]] = []
        tree = flatten_arguments(args, kwargs, named)
        with torch_names.no_overrides():
            outputs = [(f"output.{place}", tensor) for place, tensor in enumerate(results)]
            made = _facts(outputs)
            if self.ledger.was_given(Seen(call.name, call.plan.name, call.module, *tree, (), made)):
                return  # the commonest case by far: a mask is filled in
            before = {id(each.tensor): each for each in overwritten}
            inputs = [(slot, tensor) for slot, tensor in named if not slot.startswith(OUT)]
            facts = [_facts_before(slot, tensor, before.get(id(tensor))) for slot, tensor in inputs]
            seen = Seen(call.name, call.plan.name, call.module, *tree, _known(facts), made)

            def keep(birth: Birth) -> BornCall:
                described = describe_call(call.name, call.module, inputs, outputs, *tree)
                return self.keeper.forward(birth, described, inputs, outputs, before)

            if seen.op == UNSCALE and self.scaler.skips(args):
                return
            self._judge(call, seen, inputs, outputs, keep, user_frames(sys._getframe()), flagged=flagged)
            if torch_names.graph_task() == -1:
                self.settle()

    def backward(
        self, call: LookedCall, results: tuple[Any, ...], given: tuple[Any, ...], *, flagged: bool = False
    ) -> None:
        """A gradient has raised the alarm."""
        remembered = call.found if isinstance(call.found, Remembered) else None
        inputs = [(f"input.{place}", tensor) for place, tensor in enumerate(given) if tensor is not None]
        slots = _gradient_slots(call, remembered, len(results))
        outputs = [(slots[place], tensor) for place, tensor in enumerate(results) if tensor is not None]
        given_facts, made = ([each._replace(never_mask=True) for each in _facts(side)] for side in (inputs, outputs))
        seen = Seen(call.backward_name, call.plan.name, call.module, None, None, given_facts, made)

        def keep(birth: Birth) -> BornCall:
            return self.keeper.backward(birth, call, remembered, inputs, outputs)

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
        """A collective has ended. What it brings that no input here had came from another rank, unless its own sum overflowed."""
        at = At(step, False, self._epoch)
        self._epoch += 1
        dirty = [facts for facts in seen.outputs if not facts.clean]
        if not dirty:
            return
        own_sum = reduces and not any(facts.moments.nan for facts in dirty)
        if not own_sum and all(facts.clean for facts in seen.inputs):
            # As if it had been an input that nobody here has made.
            foreign = [facts._replace(key=(seen.name, facts.key)) for facts in dirty]
            seen = seen._replace(inputs=[*seen.inputs, *foreign])

        def keep(birth: Birth) -> BornCall:
            call = describe_facts(seen.name, seen.module, (*seen.inputs, *seen.outputs))
            return BornCall(birth, call, lacking="a collective cannot be run alone")

        self._judge(at, seen, [], [], keep, user_frames(sys._getframe()), what="from another rank")
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

        def make_birth(kind: Kind) -> Finding:
            birth = self.describer.birth(at, seen, kind, tensors, dict(outputs), frames)
            return Finding(birth, born=keep(birth))

        def make_arrival(facts: Facts) -> Finding:
            bare = "uninitialised memory" if self.ledger.is_bare(facts.key) else ""
            made_here = "number" if facts.slot.startswith("output") else ""
            kind = what or bare or made_here or self.describer.what(facts, tensors)
            return Finding(self.describer.arrival(at, seen, facts, kind, frames))

        if not all(facts.clean for facts in seen.outputs):
            new = self.ledger.judge(seen, make_birth, make_arrival)
            if not self.scaler.holds(new, seen):
                self._new += new
        elif flagged and all(facts.clean for facts in seen.inputs):
            self._new.append(self.ledger.add_birth(seen, make_birth("flagged")))
        else:
            self._look_at_limits(at, seen, make_birth)

    def _look_at_limits(self, at: At, seen: Seen, make_birth: Callable[[Kind], Finding]) -> None:
        """All is finite, but at the limit of the dtype, or near it."""
        for facts in seen.outputs:
            limit, greatest = greatest_finite(facts.dtype), _greatest(facts)
            if greatest == limit and _is_saturated(seen, limit):
                finding = make_birth("saturated")
                if _overflows(finding):
                    self._new.append(self.ledger.add_birth(seen, finding))
                    return
            if self._near is not None and greatest >= limit / self._near:
                near = NearLimit(
                    call=seen.name, module=seen.module, step=at.step, rank=self._rank, dtype=facts.dtype,
                    greatest=greatest, limit=limit, times=1,
                )  # fmt: skip
                self.ledger.add_near(near)


def _is_saturated(seen: Seen, limit: float) -> bool:
    """Whether nobody has asked for the greatest number, and no input had it."""
    asked = any(abs(number) >= limit for number in given_numbers(arguments(seen)))
    moved = has(seen.op, Trait.MOVES) and not has(seen.op, Trait.CASTS)
    return not asked and not moved and all(facts.clean and _greatest(facts) != limit for facts in seen.inputs)


def _overflows(finding: Finding) -> bool:
    """Whether a replay shows that a result at the limit is truly beyond it."""
    from tensorprobe.watches.overflow.replaying import replay_verdict

    born: BornCall | None = finding.born
    if born is None or born.lacking:
        return False
    judged = replay_verdict(born.replayed, born.inputs(), born.found(), gradients=born.gradients())
    reason = f"{judged.reason}; the device gives the greatest number instead of infinity"
    finding.fact = msgspec.structs.replace(finding.fact, verdict=judged.verdict, reason=reason)
    return bool(judged.overflows)


def _greatest(facts: Facts) -> float:
    return max((abs(end) for end in (facts.moments.max, facts.moments.min) if not math.isnan(end)), default=0.0)


def _facts(tensors: NamedTensors) -> list[Facts]:
    return _known(facts_of(slot, tensor) for slot, tensor in tensors)


def _known(found: Iterable[Facts | None]) -> list[Facts]:
    return [facts for facts in found if facts is not None]


def _facts_before(slot: str, tensor: torch.Tensor, before: Before | None) -> Facts | None:
    """The facts of an input as it was before the call; of one that was overwritten only the greatest magnitude is known."""
    if before is None:
        return facts_of(slot, tensor)
    if before.facts is not None:
        return before.facts._replace(slot=slot)
    dtype = FLOATING.get(tensor.dtype)
    if dtype is None:
        return None
    moments = Moments(before.greatest, math.nan, math.nan, math.nan, 0, 0)
    return Facts(
        slot, dtype.name, tuple(tensor.shape), moments, key_of(tensor), None, tensor.requires_grad and tensor.is_leaf
    )


def _gradient_slots(call: LookedCall, remembered: Remembered | None, count: int) -> list[str]:
    """The slots of the gradients that a node gives: those of the forward's inputs that its edges lead to, else names that no input has."""
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
    if len(leaving) == len(gone) == 1:  # the tensor is no more, but it can only be this one
        found[leaving[0]] = gone[0]
    return [f"output{found[place][5:]}" if place in found else inner[place] for place in range(count)]


def _beyond_moves(edge: tuple[Any, int], start: int) -> tuple[Any, int]:
    """Where an edge leads to through nodes of the call that only move values."""
    target, number = edge
    while target is not None and target.name() in MOVING_NODES and target._sequence_nr() >= start:
        if len(target.next_functions) != 1:
            break
        ((target, number),) = target.next_functions
    return target, number


def _hangs_on(tensor: torch.Tensor, node: Any, number: int) -> bool:
    return getattr(node, "variable", None) is tensor or (tensor.grad_fn is node and tensor.output_nr == number)
