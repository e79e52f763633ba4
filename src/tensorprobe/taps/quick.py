"""What the C code that records plain calls asks of Python: all that is rare. See `_fast_record.h`.

C looks at the arguments, copies tensors and writes the message that `Describing` would have written. It asks here for tensors
that need care, values that are no plain ones, and the hooks in the graph. Nothing here leads to the mode: C would keep it alive.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from tensorprobe import torch_names
from tensorprobe.arguments import Tensors, describe, flatten_result
from tensorprobe.fast import fast
from tensorprobe.model.event import NO_TOKEN, Event, SlotEvent
from tensorprobe.model.level import Level
from tensorprobe.taps.backward import (
    Boundary,
    Edges,
    SlotIndices,
    Watch,
    WholeBackward,
    edges_of,
    find_boundary,
    find_roots,
)
from tensorprobe.taps.plans import NOT_AN_OP, FunctionPlan
from tensorprobe.taps.select import Wanted
from tensorprobe.taps.session import OpenCall, Session

_encode = msgspec.msgpack.Encoder().encode
_decode_event = msgspec.msgpack.Decoder(Event).decode
_ALL = Wanted(True, True)
_MOST_FORMS = 5000


def recording_in_c(session: Session, plans: dict[Any, FunctionPlan]) -> Any:
    """Return what C records plain calls with; None where it cannot, or where a choice has to be made for each call."""
    chosen = session.selection
    wants_all = session.wants_all == _ALL and chosen.inputs and chosen.outputs
    sink, exchange = session.sink, torch_names.exchange_api
    if fast is None or exchange is None or not wants_all or sink.in_c is None:
        return None
    if sink.skip is not None or sink.needs.rules.only_given:
        return None
    context, writer = sink.in_c
    stacks, tensor = session.stacks, torch.Tensor
    parts = (
        session, Side(session, plans), writer, writer.lock.acquire, writer.lock.release,
        stacks, None if stacks is None else stacks.walker, None if stacks is None else stacks.meet,
        sink, session.training, session.unwritten, tensor.is_neg, torch_names.is_lazy_clone, torch.is_grad_enabled,
        torch_names.sequence_number, torch_names.function_modes, torch.Size,
    )  # fmt: skip
    recording = fast.recording(context, exchange(), parts)
    if recording is not None:
        session.record_whole = _recorder_of_backward(session, recording)
    return recording


def _recorder_of_backward(session: Session, recording: Any) -> WholeBackward:
    def record(watch: Watch, gradients: Tensors) -> bool:
        if session.unwritten.blocks:
            return False
        repeat = session.repeat(watch.about.name) - 1
        fast.record_backward(recording, watch.about, repeat, watch.roles, gradients)  # type: ignore[union-attr]
        session.recorded += 1
        return True

    return record


class Side:
    """Called by C while the thread is busy with us."""

    def __init__(self, session: Session, plans: dict[Any, FunctionPlan]) -> None:
        self._session = session
        self._plans = plans
        self._places: dict[tuple[Any, ...], SlotIndices] = {}
        """What belongs to which argument in the only node that a call has made: the same for all calls of that form."""

    def care(self, name: str, tensor: torch.Tensor, role: str | None) -> tuple[SlotEvent, bytes]:
        """Take a tensor that is not plain; return its slot and its slot as bytes."""
        with torch_names.no_overrides():
            slot: SlotEvent = self._session.sink.take([(name, tensor)])[0]
        slot.role = role or ""
        summary, slot.summary = slot.summary, None
        encoded = _encode(slot)
        slot.summary = summary
        return slot, encoded

    def tree(self, value: Any, name: str) -> tuple[bytes, Tensors]:
        """Return the tree of an argument, as bytes, and its tensors."""
        tensors: Tensors = []
        with torch_names.no_overrides():
            return _encode(describe(value, name, tensors)), tensors

    def results(self, result: Any) -> Tensors:
        """Return the tensors of a result."""
        outputs: Tensors = []
        with torch_names.no_overrides():
            flatten_result(result, outputs)
        return outputs

    def set_aside(self, encoded: bytes, waiting: list[tuple[int, SlotEvent]] | None) -> None:
        """Hand over a call that has to wait, as others before it do, for the statistics of these slots."""
        event = _decode_event(encoded)
        for place, slot in waiting or ():
            event.slots[place] = slot
        self._session.sink.call(event)

    def edges(self, inputs: Tensors) -> Edges:
        """Return where these inputs hang in the graph."""
        with torch_names.no_overrides():
            return edges_of(inputs)

    def follow(self, about: tuple[Any, ...]) -> None:
        """Follow the gradients of a call that was recorded."""
        op, number, module, parent, phase, microbatch, stack, thread, inputs, edges, start, result, form = about
        session = self._session
        with torch_names.no_overrides():
            name, back = Level.API.call_names(op, number)
            event = Event(name, Level.API, module or "", parent, None, stack, thread, 0, phase or "", microbatch)
            call = OpenCall(event, back, _ALL, session.step, inputs, start=start)
            node = _only_node(result, start) if edges is None else None
            key = (op, form, type(node), *(slot for slot, _ in inputs))
            known = None if node is None else self._places.get(key)
            roots: dict[Any, SlotIndices] = {node: [("input.0", 0)]}
            if known is not None and len({id(tensor) for _, tensor in inputs}) == len(inputs):
                boundary = Boundary({node}, {node: known} if known else {}, {}, {})
            else:
                call.edges = edges_of(inputs) if edges is None else edges
                outputs: Tensors = []
                flatten_result(result, outputs)
                roots = find_roots(outputs, start) if call.edges else {}
                boundary = find_boundary(roots, call.edges, start)
                if node is not None and roots == {node: [("input.0", 0)]} and len(call.edges) == len(inputs):
                    if len(self._places) >= _MOST_FORMS:
                        self._places.clear()
                    self._places[key] = boundary.to_inputs.get(node, [])
            if roots:
                session.watch_nodes(call, roots, boundary)

    def learn(self, tokens: list[int], func: Any, plan: FunctionPlan) -> None:
        """The call was a query, not an operation. So are the next ones, unless the function may also change arguments."""
        self._drop(tokens)
        if not plan.mutates:
            self._plans[func] = NOT_AN_OP

    def discard(self, tokens: list[int], counts: bool = True) -> None:
        """Forget a call: one that is not wanted after all, or, where it does not count, whose beginning has failed."""
        self._drop(tokens)
        if counts:
            self._session.filter_out()

    def _drop(self, tokens: list[int]) -> None:
        self._session.sink.drop([SlotEvent("", "", (), token=token) for token in tokens if token != NO_TOKEN])


def _only_node(result: Any, start: int) -> Any:
    """Return the node of a result, if the call that began at `start` has made that one and no other; else None."""
    if type(result) is not torch.Tensor or torch_names.sequence_number() != start + 1:
        return None
    node = torch_names.node_of(result)
    is_new = node is not None and node._sequence_nr() == start and torch_names.output_number_of(result) == 0
    return node if is_new else None
