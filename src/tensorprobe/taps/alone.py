"""One call by itself: bracketed by two callbacks, or run once more with given gradients.

The second run comes after the true call. It gets copies of the arguments and the same random state. Only the ATen calls of
its backward are attributed. Training is not affected: random states, `.grad`, buffers and tensor versions stay the
same, no graph is kept, and errors are counted, not raised.
"""

from __future__ import annotations

import contextlib
import enum
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy
import torch

from tensorprobe import torch_names
from tensorprobe.arguments import Tensors, flatten_result
from tensorprobe.errors import CaptureIncomplete
from tensorprobe.model.call import forward_name
from tensorprobe.model.sink import Alone
from tensorprobe.taps.backward import find_boundary, find_roots
from tensorprobe.taps.session import NODE_KEY, OpenCall, Session

_PLAIN = (
    int, float, complex, str, bytes, type(None), type(...), enum.Enum, torch.dtype, torch.device, torch.layout,
    torch.memory_format, torch.Size, numpy.generic, numpy.ndarray,
)  # fmt: skip
_NOT_A_TENSOR = "is not of tensor type and cannot be automatically derived"

Gradients = Sequence[numpy.ndarray[Any, Any]]


def _warn(message: str) -> None:
    warnings.warn(message, CaptureIncomplete, stacklevel=2)


class AloneRun:
    """Carries out an `Alone` for a session, once. Only `dispatch` sees the ATen calls of the backward."""

    def __init__(self, alone: Alone, session: Session, dispatch: torch_names.DispatchMode | None) -> None:
        self._alone = alone
        self._session = session
        self._dispatch = dispatch
        self._of_backward = forward_name(alone.name)
        self._forward = self._of_backward or alone.name
        self._done = False

    def is_due(self, name: str) -> bool:
        """Return whether this is the call, seen for the first time. Without gradients it has no backward."""
        if self._done or name != self._forward:
            return False
        return not self._of_backward or torch.is_grad_enabled()

    def run(self, true_call: Callable[[], Any], call: OpenCall, func: Any, args: Any, kwargs: Any) -> tuple[Any, bool]:
        """Return the result of the true call, and whether its backward comes from a second run. Only the true call may raise."""
        self._done = True
        if not self._of_backward:
            with self._bracketed():
                return true_call(), False
        copies = self._copy(call.event.name, args, kwargs)
        result = true_call()
        if copies is not None:
            with self._guarded():
                self._run_again(copies, call, func)
        return result, copies is not None

    def _copy(self, name: str, args: Any, kwargs: Any) -> _Copies | None:
        """Return the arguments before the call changes them; None if no gradients for a second run were given."""
        copies = _Copies()
        with self._guarded():
            gradients = self._alone.gradients()
            if gradients is None:
                return None
            try:
                if name.startswith("Distributed."):
                    raise _CannotRunAlone("it is a collective")
                with unseen():
                    copies.take(args, kwargs, gradients)
            except _CannotRunAlone as reason:
                self._tell(f"{self._alone.name} cannot be run alone: {reason}. It is not recorded.")
        return copies

    def _run_again(self, copies: _Copies, call: OpenCall, func: Any) -> None:
        if copies.arguments is None:
            return
        args, kwargs = copies.arguments
        with unseen(), copies.random_state(), private_graph(self._unpacked):
            start = torch_names.sequence_number()
            result = func(*args, **kwargs)
            found: Tensors = []
            flatten_result(result, found)
            found = found or copies.changed_since(start)
            outputs = [(slot, tensor) for slot, tensor in found if tensor.requires_grad]
            tensors = [tensor for _, tensor in outputs]
            try:
                gradients = _fitting(result, tensors, copies.gradients)
            except _CannotRunAlone as reason:
                self._tell(f"{self._alone.name} cannot be run alone: {reason}. It is not recorded.")
                return
            self._mark(outputs, call, start)
            # Not .backward(): this way nothing but the copies can be given a gradient.
            with _no_autocast({tensor.device.type for tensor in tensors}), self._bracketed(), self._recorded():
                torch.autograd.grad(tensors, copies.leaves, gradients, allow_unused=True)

    def _unpacked(self) -> None:
        self._session.state.detaches = True

    def _mark(self, outputs: Tensors, call: OpenCall, start: int) -> None:
        for node in find_boundary(find_roots(outputs, start), {}, start).nodes:
            node.metadata[NODE_KEY] = self._session.origin(call)

    @contextlib.contextmanager
    def _recorded(self) -> Iterator[None]:
        """Let the dispatch tap see what is done inside."""
        state = self._session.state
        with self._dispatch or contextlib.nullcontext():
            busy, state.busy = state.busy, False
            try:
                yield
            finally:
                state.busy = busy

    @contextlib.contextmanager
    def _bracketed(self) -> Iterator[None]:
        with self._guarded():
            self._alone.enter()
        try:
            yield
        finally:
            with self._guarded():
                self._alone.leave()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Run code of ours: it is not recorded, and its errors are counted."""
        state = self._session.state
        busy, state.busy = state.busy, True
        try:
            yield
        except Exception as error:
            self._session.tool_failed(self._alone.name, error)
        finally:
            state.busy = busy

    def _tell(self, message: str) -> None:
        self._session.notes[message] += 1
        (self._alone.warn or _warn)(message)


class _CannotRunAlone(Exception):
    """A call cannot run alone. The message is the end of a sentence that says why."""


class _Copies:
    """The arguments of a call before it runs, and the random states of their devices."""

    def __init__(self) -> None:
        self.gradients: Gradients = ()
        self.arguments: tuple[Any, Any] | None = None
        self.leaves: list[torch.Tensor] = []
        self._seen: dict[int, torch.Tensor] = {}
        self._random: list[tuple[torch.device, torch.Tensor]] = []

    def take(self, args: Any, kwargs: Any, gradients: Gradients) -> None:
        """Copy everything. Raise _CannotRunAlone for an argument that is not a value."""
        self.gradients = gradients
        self.arguments = self._copy(tuple(args)), self._copy(dict(kwargs))
        devices = {torch.device("cpu"), *(tensor.device for tensor in self._seen.values())}
        self._random = [(device, _get_random_state(device)) for device in devices if device.type != "meta"]

    def changed_since(self, start: int) -> Tensors:
        """Return the copies that a call without a result, such as an assignment, has changed in place."""
        nodes = [(copy, copy.grad_fn) for copy in self._seen.values()]
        return [("output", copy) for copy, node in nodes if node is not None and node._sequence_nr() >= start]

    @contextlib.contextmanager
    def random_state(self) -> Iterator[None]:
        """Draw the random numbers of the true call inside; afterwards the state is as if none had been drawn."""
        now = [(device, _get_random_state(device)) for device, _ in self._random]
        try:
            for device, state in self._random:
                _set_random_state(device, state)
            yield
        finally:
            for device, state in now:
                _set_random_state(device, state)

    def _copy(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._copy_tensor(value)
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, torch.Generator):
            return torch_names.clone_generator(value)
        if isinstance(value, slice):
            return slice(*map(self._copy, (value.start, value.stop, value.step)))
        if isinstance(value, dict):
            return {key: self._copy(entry) for key, entry in value.items()}
        if isinstance(value, (list, tuple)):
            entries = [self._copy(entry) for entry in value]
            return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
        raise _CannotRunAlone(f"one of its arguments is a {type(value).__name__}, which may hold more than values")

    def _copy_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the copy of a tensor, always the same one. It is no leaf if it requires a gradient: the call may be in-place."""
        copy = self._seen.get(id(tensor))
        if copy is None:
            source = tensor.detach()
            if tensor.requires_grad:
                self.leaves.append(source.requires_grad_())
            copy = self._seen[id(tensor)] = source.clone()
        return copy


def _fitting(result: Any, outputs: list[torch.Tensor], given: Gradients) -> list[torch.Tensor]:
    """Return the gradients as tensors like the outputs. Raise `_CannotRunAlone` if they do not fit."""
    single = isinstance(result, torch.Tensor)
    if len(given) != len(outputs) and not (single and not outputs):
        kind = "its output" if single else f"its output ({type(result).__name__}) {_NOT_A_TENSOR}; it"
        plural = "" if len(outputs) == 1 else "s"
        raise _CannotRunAlone(f"{kind} takes {len(outputs)} gradient{plural}, given: {len(given)}")
    if not outputs:
        raise _CannotRunAlone("none of its outputs requires a gradient, so it has no backward")
    gradients = []
    for place, (output, array) in enumerate(zip(outputs, given, strict=True)):
        if tuple(array.shape) != tuple(output.shape):
            raise _CannotRunAlone(f"gradient {place} has shape {tuple(array.shape)}, its output {tuple(output.shape)}")
        if numpy.iscomplexobj(array) != output.is_complex():
            raise _CannotRunAlone(f"gradient {place} is {array.dtype}, its output {output.dtype}")
        gradients.append(torch.from_numpy(numpy.array(array)).to(output.device, output.dtype))
    return gradients


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Hide what is done inside from modes and tensor classes of the user. Gradients are followed."""
    with torch_names.no_overrides(), torch_names.no_modes(), torch.inference_mode(False), torch.enable_grad():
        yield


@contextlib.contextmanager
def private_graph(unpacked: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Keep the user's hooks on saved tensors (offloading, recomputation) away from ours.

    Hooks that do nothing replace the user's. With hooks, the backward detaches what was saved: `unpacked` is called before
    that. They are left out if torch says that there are none to replace. Autocast keeps no casts of the copies. NaN may
    be what the user is looking for, so it is no reason to stop.
    """

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        unpacked()
        return tensor

    hides: AbstractContextManager[Any] = contextlib.nullcontext()
    if torch_names.top_saved_tensor_hooks is None or torch_names.top_saved_tensor_hooks(True) is not None:
        hides = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), unpack)
    caching = torch.is_autocast_cache_enabled()
    with hides, torch.autograd.set_detect_anomaly(False):
        torch.set_autocast_cache_enabled(False)
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(caching)


@contextlib.contextmanager
def _no_autocast(device_types: set[str]) -> Iterator[None]:
    """Turn autocast off for a backward, as torch recommends: the call itself may be inside of one."""
    enabled = [device_type for device_type in device_types if torch_names.is_autocast_on(device_type)]
    try:
        for device_type in enabled:
            torch_names.set_autocast(device_type, False)
        yield
    finally:
        for device_type in enabled:
            torch_names.set_autocast(device_type, True)


def _get_random_state(device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    module = torch_names.device_module(device)
    state: torch.Tensor = module.get_rng_state() if device.type == "mps" else module.get_rng_state(device)
    return state


def _set_random_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    elif device.type == "mps":
        torch.mps.set_rng_state(state)
    else:
        torch_names.device_module(device).set_rng_state(state, device)
