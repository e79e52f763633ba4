"""Checks every call as it ends, in one pass over each output. Only an alarm causes more work.

The pass computes the largest magnitude as bits (`numerics.summary`) and compares it with the alarm of the dtype. Tensors that
the call overwrites are checked before the call, other inputs only after an alarm. On a device, one number per tensor is computed
there and fetched, so training waits for each call.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial, reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy
import torch

from tensorprobe import torch_names
from tensorprobe.arguments import flatten_arguments
from tensorprobe.fast import fast
from tensorprobe.model import Coverage
from tensorprobe.model.dtypes import DTYPES, DType
from tensorprobe.model.event import Event
from tensorprobe.model.interrupts import let_through
from tensorprobe.model.sink import CallRules, LookingSink, Needs, Tensors
from tensorprobe.numerics.device_summary import device_moments, fetch_moments
from tensorprobe.numerics.native import implementation
from tensorprobe.numerics.summary import (
    LIMITS,
    first_peak_over,
    greatest_finite,
    magnitude,
    peak_of_number,
    summarize_address,
)
from tensorprobe.ops import Trait, has, is_collective
from tensorprobe.record.elements import is_dense
from tensorprobe.record.snapshot import plain
from tensorprobe.taps.looking import LookedCall
from tensorprobe.taps.plans import FunctionPlan
from tensorprobe.taps.stacks import user_frame
from tensorprobe.torch_names import quiet
from tensorprobe.watches.overflow.ring import RingFile
from tensorprobe.watches.overflow.rules import Facts, Seen, is_allowed

if TYPE_CHECKING:
    from tensorprobe.watches.overflow.registrar import Registrar


FLOATING: dict[torch.dtype, DType] = {
    getattr(torch, name): dtype
    for name, dtype in DTYPES.items()
    if dtype.kind in ("float", "complex") and hasattr(torch, name)
}
SHOWN_PLACES = 8


def facts_of(slot: str, tensor: torch.Tensor) -> Facts | None:
    """Return the facts of a tensor on any device; None if it holds no floating-point numbers in plain memory."""
    found = readable(tensor)
    if found is None:
        return None
    dtype = FLOATING[found.dtype]
    with quiet():
        found = once_each(found)
        if found.is_cpu:
            block = one_block(found)
            moments = summarize_address(torch_names.address_of(block) if block.numel() else 0, block.numel(), dtype)
        else:
            (moments,) = fetch_moments([device_moments(found)])
    return Facts(slot, dtype.name, tuple(found.shape), moments, key_of(found), lambda: found, is_parameter(tensor))


def bare(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor without its class, whose methods and properties may do anything; itself if it has no plain one inside."""
    found = tensor if type(tensor) in _PLAIN else plain(tensor)
    return tensor if isinstance(found, str) else found


def is_parameter(tensor: torch.Tensor) -> bool:
    """Return whether it is a leaf that wants a gradient."""
    return torch_names.requires_grad_of(tensor) and torch_names.node_of(tensor) is None


def readable(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the plain floating-point tensor inside, or None if its values cannot be read."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        found = plain(tensor)
        if isinstance(found, str):
            return None
        tensor = found
    if tensor.dtype not in FLOATING or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        return None
    try:
        if (
            tensor.is_cpu
            and tensor.numel()
            and torch_names.address_of(tensor) == tensor.storage_offset() * tensor.itemsize
        ):
            return None  # its storage has no memory
    except RuntimeError as error:
        let_through(error)
        return None  # inside vmap it has no storage
    return tensor.detach()


def once_each(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without the repetitions that `expand` makes, where these are large: they have no memory."""
    if tensor.nbytes <= _REPEATED_BYTES:
        return tensor
    for axis, (step, size) in enumerate(zip(tensor.stride(), tensor.shape, strict=True)):
        if step == 0 and size > 1:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


def one_block(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same numbers in one block of memory, in any order."""
    if tensor.is_contiguous():
        return tensor
    by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(by_stride).contiguous()


def key_of(tensor: torch.Tensor) -> Hashable:
    """Return a key that is equal for all tensors of one storage."""
    return torch_names.storage_key(tensor)


def places_of(tensor: torch.Tensor, *, greatest: bool = False) -> tuple[int, list[list[int]]]:
    """Count the non-finite elements (with `greatest`: those at the limit of the dtype), and return the first indices too."""
    with quiet():
        tensor = once_each(bare(tensor))
        values = torch.view_as_real(tensor).abs().amax(-1) if tensor.is_complex() else tensor.detach()
        wide = values.double() if values.dtype.itemsize == 1 else values
        chosen = wide.abs() >= torch.finfo(values.dtype).max if greatest else ~wide.isfinite()
        flat = chosen.flatten().nonzero().flatten()
        first = flat[:SHOWN_PLACES].tolist()
        return flat.numel(), [[int(at) for at in numpy.unravel_index(place, tuple(tensor.shape))] for place in first]


_SPELLINGS = (
    ("npu.utils.get_npu_overflow_flag", "npu.utils.clear_npu_overflow_flag"),
    ("npu.get_npu_overflow_flag", "npu.clear_npu_overflow_flag"),
    ("_C._check_overflow_npu", "_C._clear_overflow_npu"),
)


class Status(NamedTuple):
    """The overflow register of an accelerator. It reports overflows that no value shows."""

    is_raised: Callable[[], bool]
    clear: Callable[[], None]


def find_status() -> Status | None:
    """Return the register of the accelerator; None if there is none, or it does not answer.

    Nothing is imported: only a package that the program already uses is asked. torch_npu spells the functions in three ways.
    """
    package = sys.modules.get("torch_npu")
    if package is None:
        return None
    for names in _SPELLINGS:
        try:
            asked, cleared = (_find(package, name) for name in names)
            cleared()
            asked()
        except (AttributeError, RuntimeError):  # a device that is absent, or busy with another process
            continue
        return Status(asked, cleared)
    return None


def _find(package: Any, name: str) -> Any:
    return reduce(getattr, name.split("."), package)


_REPEATED_BYTES = 256 << 20
_COPIED_BEFORE, _COPIED_TENSORS = 1 << 16, 8
Reference = weakref.ref[torch.Tensor]
Row = tuple[str, int, list[Reference], list[Reference]]
"""Op and number of a call, its outputs and inputs: not the call itself, which holds inputs until its backward is gone."""
"""A recent call, its outputs and its inputs, for the chain of producers. A tuple, because every call makes one."""
BeforeFields = tuple[torch.Tensor, float, Facts | None, torch.Tensor | None]
_FINITE: tuple[()] = ()
"""Stands for overwritten tensors that are known to be finite."""
_ref = weakref.ref
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


class Remembered(NamedTuple):
    """What a finding in backward needs from its forward call. Tensors are held weakly, with their versions."""

    args: Any
    kwargs: Any
    slots: list[str]
    tensors: list[Reference]
    versions: list[int]
    grads: list[bool]
    frame: tuple[str, int, str] | None
    shapes: list[torch.Size]
    copies: dict[str, torch.Tensor] | None
    held: dict[str, torch.Tensor] | None
    """Inputs whose memory autograd keeps too, or which are small."""


class Before(NamedTuple):
    """A tensor before the call overwrote it. `facts` is None if it was finite; `greatest` is NaN if it was not checked."""

    tensor: torch.Tensor
    greatest: float
    facts: Facts | None
    copy: torch.Tensor | None


Alarms = tuple[int, int]
"""Of one dtype: its code for the kernel, and the lowest peak that raises an alarm."""


class OverflowLooker(LookingSink):
    """The sink of an overflow watch: checks every call and hands alarms to the registrar."""

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
        """Start again, with this ring of recent calls."""
        self.stop = None
        self.rows: deque[Row] = deque(maxlen=rows)
        self.calls = self.calls_before = 0
        self._put = ring.put
        self._status = find_status() if self._looks_at_status else None
        self._written: dict[int, Reference] = {}
        """Tensors that a call outside of modules (of an optimizer) wrote, and left finite."""

    def begin_step(self, step: int) -> None:
        """Start a step."""
        self._step = step
        self._report.begin_step()

    def take(self, tensors: Tensors, *, but: tuple[str, ...] = (), reason: str = "") -> list[Facts]:
        """Return facts about the tensors of collectives. Nothing is copied."""
        found = [facts_of(slot, tensor) for slot, tensor in tensors if not (but and slot.startswith(but))]
        self.slots_taken += len(found)
        return [facts for facts in found if facts is not None]

    def call(self, event: Event) -> None:
        """Register a collective. Composite functions come here too; their parts are checked instead."""
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
        """Return whether a call outside of modules needs no check before it."""
        if self._status is not None or plan.allocates or self._keep or plan.by_request >= 0:
            return False
        if not plan.overwrites:
            return True
        if not args:
            return False
        # It was finite after the last call that wrote it, and the watch sees every call that writes.
        known = self._written.get(id(args[0]))
        return known is not None and known() is args[0]

    def glance(self, plan: FunctionPlan, number: int, step: int, result: Any) -> bool:
        """Return whether the result is plain and finite. Then it only goes into the ring."""
        greatest = self._quick((result,))
        if greatest is None:
            return False
        self.calls += 1
        self._put(plan.name, number, "", step, greatest, False)
        return True

    def glanced(self, call: LookedCall) -> None:
        """Note that the overwritten tensors were finite."""
        if call.plan.overwrites:
            call.found = _FINITE

    def before(self, call: LookedCall, args: Any, kwargs: Any) -> None:
        """Check the tensors that the call will overwrite."""
        plan = call.plan
        if self._status is not None:
            self._status.clear()
        if plan.overwrites or plan.by_request >= 0:
            overwritten = plan.overwritten(args, kwargs)
            if overwritten:
                call.found = [self._see_before(call, tensor, len(overwritten)) for tensor in overwritten]

    def _see_before(self, call: LookedCall, tensor: torch.Tensor, together: int) -> BeforeFields:
        greatest, alarm = self._quick((tensor,)), False
        if greatest is None:
            greatest, alarm = self._scan((tensor,))
        facts = facts_of("", tensor) if alarm else None
        copy, plainly = None, bare(tensor)
        if call.module or self._keep:
            # Calls outside of modules are the optimizer's: about a thousand in each step.
            small = call.module and together <= _COPIED_TENSORS and plainly.nbytes <= _COPIED_BEFORE
            if small or is_allowed(self._keep, call.plan.name, call.name, call.module):
                with quiet():
                    copy = plainly.detach().clone(memory_format=torch.preserve_format)
        return tensor, greatest, facts, copy

    def after(self, call: LookedCall, args: Any, kwargs: Any, outputs: list[Any]) -> None:
        """Check each output in one pass."""
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
        if outputs and torch_names.node_of(outputs[0]) is not None:
            given = self._remember(call, args, kwargs, outputs)
            self.rows.append((plan.name, call.number, [_ref(output) for output in outputs], given))
        elif call.module:
            given = [_ref(arg) for arg in args if type(arg) in _PLAIN]
            self.rows.append((plan.name, call.number, [_ref(output) for output in outputs], given))
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
        """Check each gradient of an autograd node in one pass."""
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
        """Return the largest magnitude in tensors of any kind, and whether there is an alarm."""
        greatest, alarm = 0.0, False
        for tensor in tensors:
            dtype = torch_names.dtype_of(tensor)
            alarms = self._alarms.get(dtype)
            if alarms is not None:
                peak = self._peak_with_care(tensor, alarms[0])
                found = magnitude(peak, FLOATING[dtype].name)
                greatest = found if math.isnan(found) else max(found, greatest)
                alarm = alarm or peak >= alarms[1]
        return greatest, alarm

    @property
    def index(self) -> int:
        """The number of calls in this step before the current one."""
        return self.calls - self.calls_before - 1

    def idle(self) -> None:
        """Report pending findings: a backward has ended."""
        self._report.settle()

    def _peak_with_care(self, tensor: torch.Tensor, code: int) -> int:
        found = readable(tensor)
        if found is None or not found.numel():
            return 0
        with quiet():
            found = once_each(found)
            if found.is_cpu:
                block = found if is_dense(found.shape, found.stride()) else one_block(found)
                return int(implementation().peak(torch_names.address_of(block), block.numel(), code))
            values = torch.view_as_real(found.resolve_conj()) if found.is_complex() else found
            values = values.float() if values.dtype.itemsize == 1 else values
            greatest = float(values.abs().amax())
        return peak_of_number(greatest, FLOATING[found.dtype].name)

    def _remember(self, call: LookedCall, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> list[Reference]:
        """Keep what a finding in the call's backward will need; return references to the inputs."""
        tensors: list[tuple[str, torch.Tensor]] = []
        tree = flatten_arguments(args, kwargs, tensors)
        references = [_ref(tensor) for _, tensor in tensors]
        call.found = Remembered(
            *tree,
            [slot for slot, _ in tensors],
            references,
            [torch_names.version_of(tensor) for _, tensor in tensors],
            [torch_names.requires_grad_of(tensor) for _, tensor in tensors],
            user_frame(sys._getframe(4)),
            [torch_names.shape_of(output) for output in outputs],
            self._copies(call, tensors) if self._keep else None,
            hold(tensors)
            if _may_overflow_in_backward(call.plan.name) and not torch_names.innermost_transform()
            else None,
        )
        return references

    def _copies(self, call: LookedCall, tensors: list[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Return copies of the inputs, if the user's `keep` names the call."""
        if not is_allowed(self._keep, call.plan.name, call.name, call.backward_name, call.module):
            return {}
        with quiet():
            return {
                slot: bare(tensor).detach().clone().requires_grad_(torch_names.requires_grad_of(tensor))
                for slot, tensor in tensors
            }

    def producer(self, tensor: torch.Tensor | None, reference: Any = None, until: int | None = None) -> int | None:
        """Return the position in `rows`, before `until`, of the call that made a tensor."""
        wanted = _ref(tensor) if tensor is not None else reference
        for place in range((len(self.rows) if until is None else until) - 1, -1, -1):
            if any(made is wanted for made in self.rows[place][2]):
                return place
        return None


@cache
def _may_overflow_in_backward(op: str) -> bool:
    return has(op, Trait.MULTIPLIES | Trait.DIVIDES | Trait.EXPONENTIAL)


def hold(tensors: list[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return aliases of the inputs that autograd keeps for the backward (the other factor has a gradient), and of small ones.

    The program's own objects may be gone when the backward runs. Memory that autograd would free is not held.
    """
    learned = [torch_names.requires_grad_of(tensor) for _, tensor in tensors]
    with quiet():
        return {
            slot: tensor.detach().requires_grad_(learned[place])
            for place, (slot, tensor) in enumerate(tensors)
            if type(tensor) in _PLAIN
            and (any(learned[:place] + learned[place + 1 :]) or tensor.nbytes <= _COPIED_BEFORE)
        }


def _quick_look(alarms: dict[torch.dtype, Alarms]) -> Callable[[Sequence[Any]], float | None]:
    """Return a function: the largest magnitude in plain CPU tensors, or None if `_scan` has to check them."""
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
