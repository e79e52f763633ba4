"""Names every op that the device runs by the API call it belongs to, and keeps its output bits: the oracle for the
catalog's truth.

Independent of the capture room on purpose. Forward: the outermost torch function open in a `TorchFunctionMode`.
Backward: autograd nodes carry the sequence number of the forward call that made them.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from bench.sim.models import Workload
from tensorprobe.sim import fallback, memory
from tensorprobe.sim.memory import tensors_in

_PREFIXES = (
    ("torch.nn.functional.", "Functional"),
    ("torch._C._nn.", "Functional"),
    ("torch.Tensor.", "Tensor"),
    ("torch.functional.", "Torch"),
    ("torch.", "Torch"),
)
_COLLECTIVES = {"c10d::allreduce_": "all_reduce", "c10d::allgather_": "all_gather", "c10d::broadcast_": "broadcast"}
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}


@dataclass(frozen=True)
class Op:
    """One ATen op: its place in the step, the API call it belongs to, and the digest of what it wrote."""

    step: int
    aten: str
    number: int
    api: str
    digest: str
    error: str = ""


@dataclass(frozen=True)
class Call:
    """What a recorder at API level can see: a forward call's outputs, or one of the gradients made in a call's
    backward.
    """

    step: int
    api: str
    digest: str
    error: str = ""


class Tracer(TorchFunctionMode):
    """Follows API calls while the device reports its ops."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self.calls: list[Call] = []
        self._open: str | None = None
        self._spans: list[tuple[int, int, str]] = []
        self.begin_step(0)

    def begin_step(self, step: int) -> None:
        self.step = step
        self._api_counts: Counter[str] = Counter()
        self._aten_counts: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = api_name(func)
        if name is None or name == "Tensor.backward":
            return func(*args, **(kwargs or {}))
        number = self._api_counts[name]
        self._api_counts[name] += 1
        self._open = f"{name}.{number}"
        start = torch._C._autograd._get_sequence_nr()
        try:
            result = func(*args, **(kwargs or {}))
            written = tensors_in(args[0]) if name.endswith("_") else []
            digest = digest_of(tensors_in(result) + written) if "empty" not in name else ""
            self.calls.append(Call(self.step, f"{self._open}.forward", digest))
            return result
        finally:
            self._spans.append((start, torch._C._autograd._get_sequence_nr(), self._open))
            self._open = None

    def see(self, aten: str, outputs: Sequence[torch.Tensor]) -> None:
        number = self._aten_counts[aten]
        self._aten_counts[aten] += 1
        if aten.startswith("aten::empty"):
            return
        api = self.current()
        if aten.startswith("c10d::"):
            api = f"Distributed.{_COLLECTIVES[aten]}.{number}.forward"
        op = Op(self.step, aten, number, api, digest_of(outputs))
        self.ops.append(op)
        if not api.endswith(".forward") or aten.startswith("c10d::"):
            self.calls.append(Call(self.step, api, op.digest))

    def current(self) -> str:
        node = torch._C._current_autograd_node()
        if node is None:
            return f"{self._open}.forward" if self._open else ""
        number = node._sequence_nr()
        covering = [(end - start, name) for start, end, name in self._spans if start <= number < end]
        return f"{min(covering)[1]}.backward" if covering else ""


def digest_of(tensors: Sequence[Any]) -> str:
    digest = hashlib.sha256()
    with torch._C.DisableTorchFunction(), torch.no_grad():
        for tensor in tensors:
            if memory.is_device(tensor):
                flat = memory.to_host(tensor.detach()).resolve_conj().reshape(-1).contiguous()
                digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def api_name(func: Any) -> str | None:
    dotted = resolve_name(func) or ""
    plain = getattr(func, "__name__", "")
    if not dotted and getattr(torch, plain, None) is func:
        dotted = f"torch.{plain}"
    for prefix, family in _PREFIXES:
        if dotted.startswith(prefix):
            name = dotted.removeprefix(prefix)
            if "." in name:
                return None
            return f"VF.{name}" if name in _RECURRENT else f"{family}.{name}"
    return None


@contextmanager
def traced() -> Iterator[Tracer]:
    """A tracer that is told of every op the device computes."""
    tracer = Tracer()
    fallback.OBSERVERS.append(tracer.see)
    try:
        with tracer:
            yield tracer
    finally:
        fallback.OBSERVERS.remove(tracer.see)


def trace(workload: Workload, steps: int) -> tuple[Tracer, list[float]]:
    """The tracer after some steps, and the losses; a step that raises ends the trace with an entry that holds the
    message.
    """
    losses: list[float] = []
    with traced() as tracer:
        for step in range(steps):
            tracer.begin_step(step)
            try:
                losses.append(workload.step().item())
            except RuntimeError as error:
                tracer.ops.append(Op(step, "", 0, "", "", error=str(error)))
                tracer.calls.append(Call(step, "", "", error=str(error)))
                break
    return tracer, losses


def first_difference(right: Sequence[Any], wrong: Sequence[Any]) -> tuple[Any, Any] | None:
    """The first pair that is not the same, or None."""
    for one, other in zip(right, wrong, strict=False):
        if one != other:
            return one, other
    return None
