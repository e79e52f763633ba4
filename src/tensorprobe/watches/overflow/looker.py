"""Looks at every call as it ends: one pass over each output, and nothing more unless that says that something is wrong.

The pass gives the greatest magnitude as bits (`numerics.summary`); one comparison with the alarm of the dtype decides. What a call
overwrites is looked at before the call. Inputs are looked at when an output has raised the alarm: they are still there.
On a device one number for each tensor is computed there and fetched, so the training waits for each call.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tensorprobe import torch_names
from tensorprobe.arguments import flatten_arguments
from tensorprobe.fast import fast
from tensorprobe.model import Coverage
from tensorprobe.model.event import Event
from tensorprobe.model.sink import CallRules, LookingSink, Needs, Tensors
from tensorprobe.numerics.native import implementation
from tensorprobe.numerics.summary import LIMITS, first_peak_over, greatest_finite, magnitude, peak_of_number
from tensorprobe.ops import Trait, has, is_collective
from tensorprobe.record.elements import is_dense
from tensorprobe.taps.looking import LookedCall
from tensorprobe.taps.plans import FunctionPlan
from tensorprobe.taps.stacks import user_frame
from tensorprobe.torch_names import quiet
from tensorprobe.watches.overflow.facts import Facts
from tensorprobe.watches.overflow.ring import RingFile
from tensorprobe.watches.overflow.rules import Seen, is_allowed
from tensorprobe.watches.overflow.status import find_status
from tensorprobe.watches.overflow.tensors import FLOATING, facts_of, key_of, one_block, readable

if TYPE_CHECKING:
    from tensorprobe.watches.overflow.registrar import Registrar

_COPIED_BEFORE, _COPIED_TENSORS = 1 << 16, 8
Reference = weakref.ref[torch.Tensor]
Row = tuple[LookedCall, list[Reference], list[Reference]]
"""One of the last calls, what it made and what it was given: for the chain of producers. A tuple: one is made for each call."""
BeforeFields = tuple[torch.Tensor, float, Facts | None, torch.Tensor | None]
_FINITE: tuple[()] = ()
"""In place of what a call overwrites, where that is known to be finite."""
_ref = weakref.ref
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


class Remembered(NamedTuple):
    """What a backward birth needs to know of its forward. Tensors are held weakly, with the version they had."""

    args: Any
    kwargs: Any
    slots: list[str]
    tensors: list[Reference]
    versions: list[int]
    grads: list[bool]
    frame: tuple[str, int, str] | None
    shapes: list[torch.Size]
    copies: dict[str, torch.Tensor] | None


class Before(NamedTuple):
    """A tensor that the call overwrites, as it was. `facts` are None when it was finite, `greatest` is NaN when nobody looked."""

    tensor: torch.Tensor
    greatest: float
    facts: Facts | None
    copy: torch.Tensor | None


Alarms = tuple[int, int]
"""For one dtype: its code for the kernel, and the least peak that is of interest."""


class OverflowLooker(LookingSink):
    """The sink of an overflow watch: looks at every call, and has what it finds registered."""

    def __init__(
        self,
        report: Registrar,
        on_close: Callable[[Coverage], None],
        *,
        near: float | None,
        saturation: bool,
        status: bool,
        keep: tuple[str, ...],
        rules: CallRules | None = None,
    ) -> None:
        self.needs = Needs(look=True, rules=rules or CallRules())
        self._report, self._on_close = report, on_close
        self._alarms = _alarms(near, saturation)
        self._quick = _quick_look(self._alarms)
        self._looks_at_status, self._keep = status, keep
        self._step = 0

    def restart(self, ring: RingFile, rows: int) -> None:
        """Begin anew, with a ring of the last calls."""
        self.stop = None
        self.rows: deque[Row] = deque(maxlen=rows)
        self.calls = self.calls_before = 0
        self._put = ring.put
        self._status = find_status() if self._looks_at_status else None
        self._written: dict[int, Reference] = {}
        """Tensors that a call outside of modules (an optimizer's) has written to, and left finite."""

    def begin_step(self, step: int) -> None:
        """A step begins."""
        self._step = step
        self._report.begin_step()

    def take(self, tensors: Tensors, *, but: tuple[str, ...] = (), reason: str = "") -> list[Facts]:
        """Return facts about the tensors of collectives. Nothing is copied."""
        found = [facts_of(slot, tensor) for slot, tensor in tensors if not (but and slot.startswith(but))]
        self.slots_taken += len(found)
        return [facts for facts in found if facts is not None]

    def call(self, event: Event) -> None:
        """Register a collective. Composite functions come here too, and are left to their parts."""
        op = event.name.rsplit(".", 2)[0]
        if is_collective(op) and event.name.endswith(".forward"):
            slots: list[Any] = event.slots
            inputs = [facts for facts in slots if not facts.slot.startswith("output")]
            outputs = [facts for facts in slots if facts.slot.startswith("output")]
            seen = Seen(event.name, op, event.module, None, None, inputs, outputs)
            self._report.collective(seen, self._step, reduces=has(op, Trait.REDUCES))

    def close(self, coverage: Coverage, coordinates: dict[str, int], device: str) -> None:
        """Let the watch finish."""
        self._on_close(coverage)

    def skip(self, plan: FunctionPlan, args: Any) -> bool:
        """Whether a call outside of modules needs no look before it."""
        if self._status is not None or plan.allocates or self._keep or plan.by_request:
            return False
        if not plan.overwrites:
            return True
        if not args:
            return False
        known = self._written.get(
            id(args[0])
        )  # it was finite when a call wrote to it; and the watch sees every call that writes
        return known is not None and known() is args[0]

    def glance(self, plan: FunctionPlan, number: int, step: int, result: Any) -> bool:
        """Whether the result is plain and finite. Then it is in the ring, and nothing else is done."""
        greatest = self._quick((result,))
        if greatest is None:
            return False
        self.calls += 1
        self._put(plan.name, number, "", step, greatest, False)
        return True

    def glanced(self, call: LookedCall) -> None:
        """What the call overwrote was finite."""
        if call.plan.overwrites:
            call.found = _FINITE

    def before(self, call: LookedCall, args: Any, kwargs: Any) -> None:
        """Look at what the call is going to overwrite."""
        plan = call.plan
        if self._status is not None:
            self._status.clear()
        if plan.overwrites or plan.by_request:
            overwritten = plan.overwritten(args, kwargs)
            if overwritten:
                call.found = [self._see_before(call, tensor, len(overwritten)) for tensor in overwritten]

    def _see_before(self, call: LookedCall, tensor: torch.Tensor, together: int) -> BeforeFields:
        greatest, alarm = self._quick((tensor,)), False
        if greatest is None:
            greatest, alarm = self._scan((tensor,))
        facts = facts_of("", tensor) if alarm else None
        copy = None
        if call.module or self._keep:
            # Outside of modules stands the optimizer, with a thousand such calls in a step.
            small = call.module and together <= _COPIED_TENSORS and tensor.nbytes <= _COPIED_BEFORE
            if small or is_allowed(self._keep, call.plan.name, call.name, call.module):
                with quiet():
                    copy = tensor.detach().clone(memory_format=torch.preserve_format)
        return tensor, greatest, facts, copy

    def after(self, call: LookedCall, args: Any, kwargs: Any, outputs: list[Any]) -> None:
        """One pass over each output."""
        self.calls += 1
        overwritten = call.found
        call.found = None
        if overwritten and (len(overwritten) > 1 or not outputs or overwritten[0][0] is not outputs[0]):
            seen = {id(output) for output in outputs}
            outputs = outputs + [each[0] for each in overwritten if id(each[0]) not in seen]
        plan = call.plan
        greatest, alarm = 0.0, False
        if plan.allocates:
            self._report.allocated([key_of(tensor) for tensor in outputs])
        elif not plan.is_view:
            quick = self._quick(outputs)
            greatest, alarm = self._scan(outputs) if quick is None else (quick, False)
        self._put(plan.name, call.number, call.module, call.step, greatest, False)
        if outputs and outputs[0].grad_fn is not None:
            self.rows.append((call, [_ref(output) for output in outputs], self._remember(call, args, kwargs, outputs)))
        elif call.module:
            given = [_ref(arg) for arg in args if type(arg) in _PLAIN]
            self.rows.append((call, [_ref(output) for output in outputs], given))
        elif plan.overwrites and outputs:
            if alarm:
                self._written.clear()
            elif overwritten:
                self._written[id(outputs[0])] = _ref(outputs[0])
        flagged = self._status is not None and self._status.is_raised()
        if alarm or flagged:
            before = [Before(*fields) for fields in overwritten or ()]
            if overwritten is _FINITE:
                before = [Before(args[0], math.nan, None, None)]
            self._report.forward(call, args, kwargs, outputs, before, flagged=flagged)

    def gradients(self, call: LookedCall, results: tuple[Any, ...], given: tuple[Any, ...]) -> None:
        """One pass over each gradient that a node has made."""
        self.calls += 1
        greatest, alarm = self._quick(results), False
        if greatest is None:
            greatest, alarm = self._scan([tensor for tensor in results if tensor is not None])
        self._put(call.plan.name, call.number, call.module, call.step, greatest, True)
        flagged = self._status is not None and self._status.is_raised()
        if flagged and self._status is not None:
            self._status.clear()
        if alarm or flagged:
            self._report.backward(call, results, given, flagged=flagged)

    def _scan(self, tensors: Sequence[torch.Tensor]) -> tuple[float, bool]:
        """The greatest magnitude in tensors of any kind, and whether one is of interest."""
        greatest, alarm = 0.0, False
        for tensor in tensors:
            alarms = self._alarms.get(tensor.dtype)
            if alarms is not None:
                peak = self._peak_with_care(tensor, alarms[0])
                found = magnitude(peak, FLOATING[tensor.dtype].name)
                greatest = found if math.isnan(found) else max(found, greatest)
                alarm = alarm or peak >= alarms[1]
        return greatest, alarm

    @property
    def index(self) -> int:
        """How many calls of this step there were before the one at hand."""
        return self.calls - self.calls_before - 1

    def idle(self) -> None:
        """A backward is over."""
        self._report.settle()

    def _peak_with_care(self, tensor: torch.Tensor, code: int) -> int:
        found = readable(tensor)
        if found is None or not found.numel():
            return 0
        with quiet():
            if found.is_cpu:
                block = found if is_dense(found.shape, found.stride()) else one_block(found)
                return int(implementation().peak(torch_names.address_of(block), block.numel(), code))
            values = torch.view_as_real(found.resolve_conj()) if found.is_complex() else found
            values = values.float() if values.dtype.itemsize == 1 else values
            greatest = float(values.abs().amax())
        return peak_of_number(greatest, FLOATING[found.dtype].name)

    def _remember(self, call: LookedCall, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> list[Reference]:
        """Keep what a birth in the call's backward will be told from; references to the inputs come back."""
        tensors: list[tuple[str, torch.Tensor]] = []
        tree = flatten_arguments(args, kwargs, tensors)
        references = [_ref(tensor) for _, tensor in tensors]
        call.found = Remembered(
            *tree,
            [slot for slot, _ in tensors],
            references,
            [_version(tensor) for _, tensor in tensors],
            [tensor.requires_grad for _, tensor in tensors],
            user_frame(sys._getframe(4)),
            [output.shape for output in outputs],
            self._copies(call, tensors) if self._keep else None,
        )
        return references

    def _copies(self, call: LookedCall, tensors: list[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """The inputs of a call that the user wants to have for the replay of its backward, or of what it overwrites."""
        if not is_allowed(self._keep, call.plan.name, call.name, call.backward_name, call.module):
            return {}
        with quiet():
            return {slot: tensor.detach().clone().requires_grad_(tensor.requires_grad) for slot, tensor in tensors}

    def producer(self, tensor: torch.Tensor | None, reference: Any = None, until: int | None = None) -> int | None:
        """Which of the last calls has made a tensor: its place in `rows`, looked for before `until`."""
        wanted = _ref(tensor) if tensor is not None else reference
        for place in range((len(self.rows) if until is None else until) - 1, -1, -1):
            if any(made is wanted for made in self.rows[place][1]):
                return place
        return None


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _quick_look(alarms: dict[torch.dtype, Alarms]) -> Callable[[Sequence[Any]], float | None]:
    """The greatest magnitude in plain tensors on the host; None where one is of interest, or has to be looked at with care."""
    if fast is None:
        return lambda tensors: None
    return partial(fast.greatest, fast.scanner(torch.Tensor, torch.nn.Parameter, alarms))


def _alarms(near: float | None, saturation: bool) -> dict[torch.dtype, Alarms]:
    found = {}
    for dtype, described in FLOATING.items():
        limits = LIMITS.get(described.name)
        if limits is None:
            continue
        alarm = limits.greatest if saturation and described.itemsize > 1 else limits.infinite
        if near is not None:
            alarm = min(alarm, first_peak_over(greatest_finite(described.name) / near, described.name))
        found[dtype] = (described.code, alarm)
    return found
