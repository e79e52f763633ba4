"""Runs one recorded call alone, on one device, in one precision: outputs and gradients of the inputs.

The tensors given are never changed: each replay works on copies. Nothing is watched, nothing stays installed. The caller
sets the state of the random generators.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from tensorprobe import torch_names
from tensorprobe.arguments import Tensors, changed_arguments, flatten_result, written_slots
from tensorprobe.model import Call, Slot
from tensorprobe.model.reason import NotReplayed
from tensorprobe.ops import Trait, has, short_name
from tensorprobe.replay.arguments import PRECISIONS, Rebuilding, rebuild_call
from tensorprobe.replay.functions import CannotReplay, find_function
from tensorprobe.replay.isolation import too_large, too_many
from tensorprobe.replay.layout import copied, room
from tensorprobe.replay.references import find_reference

_HALF = ("float16", "bfloat16")
_MOST_GROWTH, _SMALL = 4, 1 << 20
"""A result with more extra elements than this is not a replay of the recorded one."""
_ON_HOST = {"tensor_split": "input.1"}
"""Arguments that torch requires on the CPU."""
_UNDERSTOOD = {
    "setStorage": NotReplayed.ELSEWHERE,
    "out of bounds for storage": NotReplayed.ELSEWHERE,
    "can't allocate memory": "it needs more memory than a replay of tensors of these sizes may use",
    "'dict' object has no attribute": "an argument is an object, and only its fields are recorded",
}
"""Text of an exception → its meaning for a replay."""


class Replay:
    """A forward call that was run. `outputs` are its results by slot, changed arguments included, as capture names them.

    A number or truth value that comes back instead of tensors is `output.0`, as a tensor. `changed` says which of the
    outputs are arguments as the call left them. `saved` are values of outputs that gradients are computed with.
    """

    whole = False
    """Whether the gradient given for an output holds what comes from the call's other outputs, too, as that of an LSTM cell."""
    joined: Mapping[str, str] = MappingProxyType({})
    """The gradient of an input → that to which it is added: `x * x` has one gradient."""

    def __init__(
        self,
        call: Call,
        inputs: Mapping[str, torch.Tensor],
        *,
        device: str = "cpu",
        precision: str = "own",
        saved: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        wide = PRECISIONS[precision]
        function = (find_reference(call.op) if device == "cpu" else None) or find_function(call.op)
        grads = {slot.name for slot in call.slots if slot.grad}
        self._leaves: dict[str, torch.Tensor] = {}
        # Autocast rounds its inputs: that is what the op is defined to do, and no error of it.
        half = None if precision == "own" else autocast_dtype(call)
        on_host = stay_on_host(call)
        for name, tensor in inputs.items():
            if half is not None and tensor.dtype is torch.float32:
                tensor = copied(copied(tensor, half, "cpu"), torch.float32, "cpu")
            place = "cpu" if name in on_host else device
            moved = copied(tensor, wide.get(tensor.dtype, tensor.dtype), place)
            differentiable = moved.is_floating_point() or moved.is_complex()
            self._leaves[name] = moved.requires_grad_(differentiable and name in grads)
        mutates, written = changes(call, function)
        self.mutates = mutates
        # A leaf that requires a gradient cannot be changed in place, but a copy can.
        working = {
            name: _own_memory(leaf) if mutates and leaf.requires_grad else leaf for name, leaf in self._leaves.items()
        }
        args, kwargs = rebuild_call(call, Rebuilding(working, device, wide))
        versions = {name: tensor._version for name, tensor in working.items()}
        self._saved = saved
        with _autocast_of(call, device, precision), torch.set_grad_enabled(bool(grads)), self._keeping(bool(grads)):
            result = _run(function, args, kwargs)
        self.outputs = _tensors_of(result)
        self.changed: dict[str, str] = {}
        if mutates:
            prefix = "output.changed" if self.outputs else "output"
            returned = {id(tensor) for tensor in self.outputs.values()}
            for name, tensor in working.items():
                unseen = name in written or name.rpartition(".")[0] + "." in written
                if (unseen or tensor._version != versions[name]) and id(tensor) not in returned:
                    self.changed[f"{prefix}{name[5:]}"] = name
        self.outputs |= {name: working[source] for name, source in self.changed.items()}
        _demand_values(self.outputs, device)

    def _keeping(self, grads: bool) -> contextlib.AbstractContextManager[Any]:
        """With `saved`, let the backward use these values for outputs that the forward saved."""
        if not self._saved or not grads:
            return contextlib.nullcontext()

        saved, held = self._saved, weakref.ref(self)  # the graph would keep this replay, and this replay the graph

        def unpack(kept: torch.Tensor) -> torch.Tensor:
            replay = held()
            for name, value in saved.items():
                output = None if replay is None else replay.outputs.get(name)
                if output is not None and _is_same(output, kept) and value.shape == kept.shape:
                    return value.to(kept.dtype).to(kept.device)
            return kept

        return torch_names.replacing_saved(unpack)

    def differentiable(self) -> dict[str, torch.Tensor]:
        """The outputs that accept gradients, in order."""
        return {name: output for name, output in self.outputs.items() if output.requires_grad}

    def gradients(self, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the gradients of the inputs by slot (`output.0` is that of `input.0`, as in a run), given those of the outputs."""
        outputs = {name: output for name, output in self.differentiable().items() if name in given}
        wanted = {name: leaf for name, leaf in self._leaves.items() if leaf.requires_grad}
        if not outputs or not wanted:
            return {}
        coming = [given[name].to(output.dtype).to(output.device) for name, output in outputs.items()]
        if self.whole:
            coming = [own - inner for own, inner in zip(coming, _between(list(outputs.values()), coming), strict=True)]
        found = torch.autograd.grad(list(outputs.values()), list(wanted.values()), coming, allow_unused=True)
        gradients: dict[str, torch.Tensor] = {}
        for name, gradient in zip(map(gradient_name, wanted), found, strict=True):
            if gradient is not None:
                place = self.joined.get(name, name)
                gradients[place] = gradients[place] + gradient if place in gradients else gradient
        return gradients


def gradient_name(slot: str) -> str:
    """Return the slot of the gradient of an input or parameter."""
    return slot if slot.startswith("parameters") else f"output{slot[5:]}"


def _between(outputs: list[torch.Tensor], coming: list[torch.Tensor]) -> Iterator[torch.Tensor | float]:
    """Yield for each output the gradient that it gets from the other outputs, which are computed from it."""
    for at, output in enumerate(outputs):
        others, theirs = outputs[:at] + outputs[at + 1 :], coming[:at] + coming[at + 1 :]
        (inner,) = torch.autograd.grad(others, [output], theirs, allow_unused=True, retain_graph=True)
        yield 0.0 if inner is None else inner


def outsized(call: Call, most_bytes: int) -> str | None:
    """Return why a call is not run: its tensors, or the results that its arguments ask for, need too much memory.

    The sizes of the results are found on the meta device, which has shapes and no memory. An op that it cannot run is
    judged by the recorded tensors alone.
    """
    if reason := too_large(call, most_bytes):
        return reason
    try:
        shapes = {
            slot.name: torch.empty(slot.shape, dtype=getattr(torch, slot.dtype), device="meta")
            for slot in call.slots
            if slot.side != "output"
        }
        with torch.random.fork_rng(devices=[]), torch.device("meta"):  # what names no device is made there too
            made = sum(output.numel() for output in Replay(call, shapes, device="meta").outputs.values())
    except Exception:  # no such kernel, or values decide about the shape: the call itself is run with a limit of memory
        return None
    recorded = sum(slot.count for slot in call.slots if slot.side == "output")
    if recorded and made > _MOST_GROWTH * recorded + _SMALL:
        return f"its arguments ask for results of {made:,} elements; the record holds {recorded:,}"
    return too_many(made, most_bytes)


def stay_on_host(call: Call) -> set[str]:
    """Return the inputs that stay on the CPU: torch requires it, or the recorded program kept them there."""
    devices = {slot.name: slot.device.partition(":")[0] for slot in call.slots}
    kept = (
        {name for name, device in devices.items() if device == "cpu"}
        if set(devices.values()) - {"cpu", "meta"}
        else set()
    )
    return kept | {_ON_HOST.get(short_name(call.op), "")}


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.dtype == other.dtype)


def _own_memory(leaf: torch.Tensor) -> torch.Tensor:
    """Return a copy that gradients flow through, with the original strides."""
    span = room(leaf.shape, leaf.stride())
    if span <= leaf.numel():
        return leaf.clone()
    # Not a view: autograd finds a change of a view by its version, which some list kernels of devices do not count.
    gaps = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    gaps.as_strided((span,), (1,)).zero_()
    return gaps.copy_(leaf)


def _run(function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    try:
        return function(*args, **kwargs)
    except (RuntimeError, AttributeError) as error:
        for said, meaning in _UNDERSTOOD.items():
            if said in str(error):
                raise CannotReplay(meaning) from None
        raise


def _tensors_of(result: Any) -> dict[str, torch.Tensor]:
    outputs: Tensors = []
    flatten_result(result, outputs)
    if not outputs and isinstance(result, (bool, int, float)):
        return {"output.0": torch.tensor(result, dtype=torch.float64 if isinstance(result, float) else None)}
    return dict(outputs)


def _demand_values(outputs: Mapping[str, torch.Tensor], device: str) -> None:
    for name, output in outputs.items():
        if output.is_meta and device != "meta":
            raise CannotReplay(f"{name} is on the meta device, which has no values")
        if output.layout is not torch.strided or output.is_nested:
            kind = "nested" if output.is_nested else str(output.layout).removeprefix("torch.").replace("_", " ")
            raise CannotReplay(f"{name} is a {kind} tensor")
        if output.is_quantized:
            raise CannotReplay(f"{name} is a quantized tensor")


def changes(call: Call, function: Any) -> tuple[bool, tuple[str, ...]]:
    """Return whether a call may change its arguments, and the slots whose version counter does not show it."""
    if isinstance(function, torch_names.OpOverload):
        return bool(function._schema.is_mutable), written_slots(function)
    mutates, written = changed_arguments(call.op)
    asked = bool((call.kwargs or {}).get("inplace")) or "out" in (call.kwargs or {})
    # F.relu(x, True): a function of torch.nn.functional takes `inplace` in place, too.
    asked = asked or (call.op.startswith("Functional.") and any(tree is True for tree in call.args or []))
    return mutates or asked, written


@contextlib.contextmanager
def _autocast_of(call: Call, device: str, precision: str) -> Iterator[None]:
    half = autocast_dtype(call)
    if half is None or precision != "own":
        yield
        return
    with torch.autocast(torch.device(device).type, dtype=half):
        yield


def autocast_dtype(call: Call) -> torch.dtype | None:
    """Return the dtype of autocast if it was on.

    Half precision that comes out of float32 without being asked for was made by it, and so was float32 out of half.
    """
    if call.op.startswith("Aten."):  # recorded below autocast: already cast
        return None
    outputs = {slot.dtype for slot in call.slots if _is_float(slot) and slot.side == "output"}
    inputs = {slot.dtype for slot in call.slots if _is_float(slot) and slot.side != "output"}
    asked = "torch.dtype" in str(call.args) or "torch.dtype" in str(call.kwargs)
    product = has(call.op, Trait.MULTIPLIES)  # without autocast, its operands have one dtype
    half = inputs & set(_HALF)
    if not outputs and product and "float32" in inputs and len(half) == 1:  # a dump without outputs
        return getattr(torch, half.pop())
    if asked or len(outputs) != 1 or not inputs or has(call.op, Trait.CASTS):
        return None
    (dtype,) = outputs
    if dtype in _HALF and (dtype not in inputs or (product and "float32" in inputs)):
        return getattr(torch, dtype)
    if dtype == "float32" and len(inputs) == 1 and inputs <= set(_HALF):
        return getattr(torch, inputs.pop())
    return None


def _is_float(slot: Slot) -> bool:
    return "float" in slot.dtype
