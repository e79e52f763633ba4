"""Does the simulated device compute what the CPU computes? One check for each entry of torch's own operator database.

`check_entry(entry)` runs an `OpInfo` on its sample inputs on both devices, forward and backward, from equal seeds,
and returns an `Outcome`. Needs `expecttest` (torch's test support imports it). Known gaps are listed with their
reasons in `UNSUPPORTED`; docs/sim.md repeats the list.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from tensorprobe.sim import STATE

Status = Literal["right", "wrong", "raised", "unsupported", "no samples"]
_DTYPES = (torch.float32, torch.complex64, torch.int64, torch.bool, torch.float64)
_SEED = 20
_RELATIVE = {
    torch.float32: 1e-4,
    torch.float64: 1e-7,
    torch.complex64: 1e-4,
    torch.complex128: 1e-7,
    torch.float16: 1e-2,
    torch.bfloat16: 4e-2,
}

_NO_SPARSE = "the device has no sparse tensors"
_CUDA_ONLY = "the database has no CPU sample for it: nothing to compare with"
UNSUPPORTED: dict[str, str] = {
    "sparse.sampled_addmm": _NO_SPARSE,
    "sparse.mm.reduce": _NO_SPARSE,
    "to_sparse": _NO_SPARSE,
    "tensor_split": "split points must be on the CPU for every device; the sample puts them on the device",
    "torch.ops.aten._flash_attention_forward": _CUDA_ONLY,
    "torch.ops.aten._efficient_attention_forward": _CUDA_ONLY,
    "nn.functional.batch_norm.without_cudnn": _CUDA_ONLY,
}
"""Entry → why it is not expected to work; any other entry that is not right counts against the device."""
UNINITIALISED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
"""Entries whose values mean nothing: shape and dtype are compared."""


@dataclass(frozen=True)
class Outcome:
    """What came of one entry; `detail` is the first thing wrong."""

    entry: str
    status: Status
    samples: int = 0
    backward: bool = False
    detail: str = ""


def entries() -> list[Any]:
    """The operator database, in its own order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return list(op_db)


def label(entry: Any) -> str:
    """The name of an entry with its variant, unique in the database."""
    return f"{entry.name}.{entry.variant_test_name}" if entry.variant_test_name else entry.name


def check_entry(entry: Any, *, most_samples: int = 12, dtype: torch.dtype | None = None) -> Outcome:
    """Compare both devices on up to `most_samples` sample inputs of the entry, in `dtype` or the first it has of a
    few.
    """
    name = label(entry)
    if name in UNSUPPORTED:
        return Outcome(name, "unsupported", detail=UNSUPPORTED[name])
    if dtype is None:
        dtype = next((known for known in _DTYPES if known in entry.dtypes), next(iter(entry.dtypes)))
    if dtype not in entry.dtypes:
        return Outcome(name, "no samples", detail=f"not for {dtype}")
    backward = bool(entry.supports_autograd and (dtype.is_floating_point or dtype.is_complex))
    checked = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for sample in _samples(entry, dtype, backward, most_samples):
                wrong = _check_sample(entry, sample, backward)
                if wrong:
                    return Outcome(name, "wrong", checked, backward, wrong)
                checked += wrong is not None
        except Exception as error:  # a sweep reports whatever an op raises and goes on
            return Outcome(
                name,
                "raised",
                checked,
                backward,
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            )
    return Outcome(name, "right" if checked else "no samples", checked, backward)


def _samples(entry: Any, dtype: torch.dtype, grad: bool, most: int) -> Iterator[Any]:
    torch.manual_seed(_SEED)
    return itertools.islice(entry.sample_inputs("cpu", dtype, requires_grad=grad), most)


def _check_sample(entry: Any, sample: Any, backward: bool) -> str | None:
    """What is wrong, or an empty text; None when both devices refuse the sample."""
    expected = _execute(entry, sample, "cpu", backward)
    actual = _execute(entry, sample, STATE.name or "npu", backward)
    if isinstance(expected, str):  # the CPU refuses this sample: so must the device, in whatever words
        return None if isinstance(actual, str) else f"the CPU raises ({expected}), the device does not"
    if isinstance(actual, str):
        return actual
    for part, (wanted, got) in enumerate(zip(expected, actual, strict=False)):
        difference = _difference(wanted, got, values=entry.name not in UNINITIALISED)
        if difference:
            return f"result {part}: {difference}"
    return "" if len(expected) == len(actual) else f"{len(actual)} results instead of {len(expected)}"


def _execute(entry: Any, sample: Any, device: str, backward: bool) -> list[Any] | str:
    """Outputs, then gradients of the inputs, all on the CPU; or the message of the error."""
    moved: list[torch.Tensor] = []

    def move(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.detach().to(device, copy=True) if device == "cpu" else tensor.detach().to(device)
        copy.requires_grad_(tensor.requires_grad)
        moved.append(copy)
        return copy

    args = _map(move, (sample.input, *sample.args), device)
    kwargs = _map(move, dict(sample.kwargs), device)
    torch.manual_seed(_SEED)
    try:
        result = sample.output_process_fn_grad(entry.op(*args, **kwargs))
        outputs = _leaves(result)
        gradients = _gradients(outputs, [tensor for tensor in moved if tensor.requires_grad]) if backward else []
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return [value.detach().cpu() if isinstance(value, torch.Tensor) else value for value in outputs + gradients]


def _gradients(outputs: list[Any], inputs: list[torch.Tensor]) -> list[Any]:
    differentiable = [value for value in outputs if isinstance(value, torch.Tensor) and value.requires_grad]
    if not differentiable or not inputs:
        return []
    cotangents = [_cotangent(value) for value in differentiable]
    return list(torch.autograd.grad(differentiable, inputs, cotangents, allow_unused=True))


def _cotangent(value: torch.Tensor) -> torch.Tensor:
    ramp = torch.linspace(0.5, 1.5, max(value.numel(), 1))[: value.numel()].reshape(value.shape)
    return ramp.to(value.dtype).to(value.device)


def _difference(wanted: Any, got: Any, *, values: bool) -> str:
    if not isinstance(wanted, torch.Tensor):
        return (
            ""
            if type(wanted) is type(got) and (wanted == got or wanted != wanted)
            else f"{got!r} instead of {wanted!r}"
        )
    if wanted.shape != got.shape or wanted.dtype != got.dtype:
        return f"{got.dtype} {list(got.shape)} instead of {wanted.dtype} {list(wanted.shape)}"
    if not values:
        return ""
    exact = wanted.is_floating_point() and wanted.itemsize == 1
    try:
        torch.testing.assert_close(
            got,
            wanted,
            equal_nan=True,
            rtol=0 if exact else _RELATIVE.get(wanted.dtype, 0),
            atol=0 if exact else _noise(wanted),
        )
    except AssertionError as different:
        return " ".join(str(different).split())[:200]
    return ""


def _noise(wanted: torch.Tensor) -> float:
    """The absolute difference that another order of summation may cause: 1e-5 of the largest finite element, or of
    one.
    """
    if not (wanted.is_floating_point() or wanted.is_complex()):
        return 0.0
    magnitudes = wanted.abs().double().flatten()
    finite = magnitudes[magnitudes.isfinite()]
    return _RELATIVE.get(wanted.dtype, 0.0) / 10 * max(1.0, float(finite.max()) if finite.numel() else 0.0)


def _map(change: Callable[[torch.Tensor], torch.Tensor], value: Any, device: str) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        items = [_map(change, item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: _map(change, item, device) for key, item in value.items()}
    if isinstance(value, torch.device) or value == "cpu":
        return torch.device(device)
    return value


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return [leaf for item in value for leaf in _leaves(item)]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    return [value]
