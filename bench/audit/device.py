"""A second right device, and one whose kernels are wrong: kernels put under torch, seen alike by forward, backward and every level.

The second device computes each of its kernels in float64 and rounds once. It is right, and rounds otherwise than the CPU. The
kernels are registered once for the process; they act only while a `SecondDevice` is entered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Spoiler = Callable[[Tensor], Tensor]

WIDE = """mm addmm bmm baddbmm convolution convolution_backward _softmax _log_softmax _softmax_backward_data
    _log_softmax_backward_data native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward
    native_batch_norm_backward gelu gelu_backward silu silu_backward tanh sigmoid exp sum.dim_IntList mean mean.dim rsqrt
    pow.Tensor_Scalar sqrt div.Tensor log elu elu_backward sin cos avg_pool2d avg_pool2d_backward sigmoid_backward
    tanh_backward mse_loss var_mean.correction logsumexp erf softplus cumsum linalg_vector_norm reciprocal log1p
    embedding_dense_backward leaky_relu""".split()
"""Kernels that the second device computes in float64."""
EXACT = """native_batch_norm index_add _scaled_dot_product_flash_attention_for_cpu mul.Tensor add.Tensor sub.Tensor
    lerp_.Scalar addcdiv_ addcmul_ add_.Tensor mul_.Tensor topk gather index.Tensor cat max_pool2d_with_indices relu clamp
    masked_fill.Scalar where.self embedding index_select scatter_add""".split()
"""Kernels that it shares with the CPU, and that may be wrong."""
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_NARROW = (torch.float32, torch.bfloat16, torch.float16)


class SecondDevice:
    """The second device, while entered. With a fault, the first floating-point output of one kernel is spoiled.

    `nth` spoils only one call of the kernel, `step` only those of one step (`device.step` is the step).
    """

    _kernels: dict[str, Any] = {}
    _library: Any = None
    _active: SecondDevice | None = None

    def __init__(self, op: str = "", spoil: Spoiler | None = None, *, nth: int | None = None, at: int | None = None):
        self._op, self.spoil, self._nth, self._at = op, spoil, nth, at
        self._count = self.step = self.struck = 0
        SecondDevice._register()

    def __enter__(self) -> SecondDevice:
        SecondDevice._active = self
        return self

    def __exit__(self, *error: object) -> None:
        SecondDevice._active = None

    @classmethod
    def _register(cls) -> None:
        if cls._library is not None:
            return
        cls._kernels["copy_"] = torch.library.get_kernel("aten::copy_", "CPU")
        cls._library = torch.library.Library("aten", "IMPL")
        for name in (*WIDE, *EXACT):
            try:
                cls._kernels[name] = torch.library.get_kernel(f"aten::{name}", "CPU")
            except RuntimeError:  # this torch has no such kernel
                continue
            cls._library.impl(name, _implementation(name), "CPU", with_keyset=True, allow_override=True)

    def run(self, name: str, keys: Any, args: Any, kwargs: Any) -> Any:
        """Compute a kernel, and spoil its result."""
        result = _once(name, keys, args, kwargs) if name in WIDE else _plain(name, keys, args, kwargs)
        if self.spoil is None or name.partition(".")[0] != self._op.partition(".")[0]:
            return result
        self._count += 1
        if (self._nth is not None and self._count != self._nth + 1) or (self._at is not None and self.step != self._at):
            return result
        results = [result] if isinstance(result, Tensor) else list(result)
        for at, each in enumerate(results):
            if isinstance(each, Tensor) and each.is_floating_point() and each.numel():
                wrong = self.spoil(each.clone())
                if wrong is not each and not torch.equal(wrong, each):
                    self.struck += 1
                if any(each is given for given in args):  # in place
                    _plain("copy_", _CPU, (each, wrong, False), {})
                else:
                    results[at] = wrong
                break
        return results[0] if isinstance(result, Tensor) else tuple(results)


def _implementation(name: str) -> Any:
    def implementation(keys: Any, *args: Any, **kwargs: Any) -> Any:
        device, SecondDevice._active = SecondDevice._active, None  # what a kernel calls is computed as on the CPU
        try:
            with torch._C.DisableTorchFunction():  # and is no call of the program
                return (_plain if device is None else device.run)(name, keys, args, kwargs)
        finally:
            SecondDevice._active = device

    return implementation


def _plain(name: str, keys: Any, args: Any, kwargs: Any) -> Any:
    if name.partition(".")[0].rstrip("_") in ("add", "sub", "mul", "div"):
        one, other = args[:2]
        if isinstance(other, (int, float)):
            args = (one, _wrapped(other, one), *args[2:])
        elif isinstance(one, (int, float)):
            args = (_wrapped(one, other), other, *args[2:])
    return SecondDevice._kernels[name].call_boxed(keys, *args, **kwargs)


def _wrapped(number: float, beside: Tensor) -> Tensor:
    """Without dimensions, it changes no dtype."""
    whole = isinstance(number, int) and not beside.is_floating_point()
    return torch.scalar_tensor(number, dtype=torch.int64 if whole else torch.float64)


def _once(name: str, keys: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute in float64 and round once; as it is where dtypes are mixed or named."""
    dtypes = {each.dtype for each in args if isinstance(each, Tensor) and each.is_floating_point()}
    named = kwargs.get("dtype") is not None or (
        any(isinstance(each, torch.dtype) for each in args) and not name.endswith("_backward_data")
    )
    if len(dtypes) != 1 or not dtypes <= set(_NARROW) or named or ("native" in name and dtypes != {torch.float32}):
        return _plain(name, keys, args, kwargs)
    (dtype,) = dtypes

    def widened(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype == dtype:
            return value.double()
        return torch.float64 if value is dtype else value

    def narrowed(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.dtype == torch.float64 else value

    result = _plain(name, keys, tuple(widened(each) for each in args), kwargs)
    return narrowed(result) if isinstance(result, Tensor) else tuple(narrowed(each) for each in result)
