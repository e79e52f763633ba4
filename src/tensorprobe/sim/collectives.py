"""Collectives of the simulated device: the process group backend `hccl` is gloo working on host aliases of device
tensors.

torch sends every collective through an op of the `c10d` library, chosen by the device of its tensors. For the
simulated device those ops are replaced by one that hands the same collective to the CPU, where the group's gloo
backend answers. Faults apply to the `c10d::` ops by name; a collective hit by a fault is waited for first.
"""

from __future__ import annotations

from typing import Any

import torch

from tensorprobe import torch_names
from tensorprobe.sim import faults, memory
from tensorprobe.sim.fallback import OBSERVERS
from tensorprobe.sim.kinds import OpCall
from tensorprobe.sim.memory import map_tensors, tensors_in

BACKEND = "hccl"
_OPS = [
    "allreduce_",
    "allreduce_coalesced_",
    "allgather_",
    "_allgather_base_",
    "allgather_coalesced_",
    "allgather_into_tensor_coalesced_",
    "broadcast_",
    "reduce_",
    "reduce_scatter_",
    "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced_",
    "gather_",
    "scatter_",
    "alltoall_",
    "alltoall_base_",
    "barrier",
    "send",
    "recv_",
    "recv_any_source_",
]


def register(name: str) -> torch.library.Library:
    """Register the backend and the ops. The caller must keep the returned library."""
    import torch.distributed as dist

    library = torch.library.Library("c10d", "IMPL")
    if not dist.is_available():
        return library
    for qualified in _OPS:
        packet = getattr(torch.ops.c10d, qualified, None)
        if packet is not None:
            library.impl(qualified, _on_host(packet.default), "PrivateUse1", allow_override=True)
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _make_gloo, devices=[name, "cpu"])
    return library


def _make_gloo(store: Any, rank: int, size: int, timeout: Any) -> Any:
    from torch.distributed import ProcessGroupGloo

    return ProcessGroupGloo(store, rank, size, timeout=timeout)


def _on_host(op: Any) -> Any:
    """Return the collective as a kernel of the device. By convention of c10d, it writes to its first argument."""
    name = op._schema.name

    def run(*args: Any) -> Any:
        with torch_names.no_overrides(), torch.no_grad():
            answers: list[Any] = []

            def collective(*values: Any) -> Any:
                answers.append(op(*values))
                if faults.concern(name):
                    _work_of(answers[0]).wait()
                return values[0]

            host_args = map_tensors(memory.to_host, args)
            call = OpCall(name, collective, host_args, {})
            _store(host_args[0], faults.perform(call, lambda: None))
            _report(name, args[0], answers[0])
            # Return the caller's own tensors, not their host aliases.
            return (args[0], answers[0][1]) if isinstance(answers[0], tuple) else answers[0]

    return run


def _report(name: str, written: Any, answer: Any) -> None:
    if OBSERVERS:
        _work_of(answer).wait()
        for observer in OBSERVERS:
            observer(name, tensors_in(written))


def _work_of(answer: Any) -> Any:
    return answer[1] if isinstance(answer, tuple) else answer


def _store(host: Any, value: Any) -> None:
    """Write the result of a fault back into the output."""
    if isinstance(host, torch.Tensor):
        if value is not host:
            host.copy_(value)
    else:
        for one_host, one_value in zip(host, value, strict=True):
            _store(one_host, one_value)
