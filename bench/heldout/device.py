"""Replace CPU kernels of torch in this process: by a second right device, and by wrong ones.

A replaced kernel lies below autograd, autocast and every tap, so forward, backward, optimizers and compiled code meet it alike.
Nothing is undone: use a process of its own for each run. Layers of one kernel are applied in the order of their installation; inside
a layer all kernels are the original ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Kernel = Callable[..., Any]
Layer = Callable[[Kernel, tuple[Any, ...], dict[str, Any]], Any]
"""Gets the kernel below it, the arguments and the keywords."""

_layers: dict[str, list[Layer]] = {}
_libraries: list[torch.library.Library] = []
_inside = threading.local()

WIDE = """mm addmm bmm baddbmm mv dot addmv convolution convolution_backward _softmax _log_softmax _softmax_backward_data
_log_softmax_backward_data native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward native_batch_norm
native_batch_norm_backward gelu gelu_backward silu silu_backward tanh tanh_backward sigmoid sigmoid_backward exp log log1p erf softplus
softplus_backward elu elu_backward sin cos sqrt rsqrt reciprocal pow.Tensor_Scalar div.Tensor sum sum.dim_IntList mean mean.dim
var_mean.correction var.correction std.correction logsumexp cumsum mse_loss mse_loss_backward linalg_vector_norm addcdiv_ addcmul_
lerp_.Scalar embedding_dense_backward index_add_ index_add scatter_add_ scatter_add _fft_r2c _fft_c2r avg_pool2d avg_pool2d_backward
_adaptive_avg_pool2d _adaptive_avg_pool2d_backward upsample_bilinear2d upsample_bilinear2d_backward log_sigmoid_forward _cdist_forward
binary_cross_entropy_with_logits nll_loss_forward smooth_l1_loss huber_loss""".split()
"""Kernels that the second device computes in float64 and rounds once."""

_NARROW = (torch.float32, torch.bfloat16, torch.float16)
_PLAIN = {"sum", "sum.dim_IntList", "mean", "mean.dim", "_softmax", "_log_softmax", "cumsum"}
"""Kernels that may be asked for another dtype: then they stay as they are."""


def add_layer(op: str, layer: Layer) -> None:
    """Put a layer around a kernel of the CPU: `mm`, `sum.dim_IntList`."""
    if op in _layers:
        _layers[op].append(layer)
        return
    layers = _layers[op] = [layer]
    native = torch.library.get_kernel(f"aten::{op}", "CPU")
    library = torch.library.Library("aten", "IMPL")
    takes_number = op.partition(".")[0].rstrip("_") in ("add", "sub", "mul", "div") and op.endswith(".Tensor")

    def run_native(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if takes_number:  # a boxed call does not wrap numbers
            args = (*_wrap_number(*args[:2]), *args[2:])
        return native.call_boxed(keys, *args, **kwargs)

    def run(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if getattr(_inside, "busy", False):
            return run_native(keys, *args, **kwargs)
        _inside.busy = True
        try:
            with torch._C.DisableTorchFunction():  # what a kernel does is no call of the program
                return _run_layers(layers, lambda *a, **k: run_native(keys, *a, **k), args, kwargs)
        finally:
            _inside.busy = False

    library.impl(op, run, "CPU", with_keyset=True, allow_override=True)
    _libraries.append(library)


def _run_layers(layers: list[Layer], kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    for layer in layers[:-1]:
        kernel = _bind(layer, kernel)
    return layers[-1](kernel, args, kwargs)


def _bind(layer: Layer, kernel: Kernel) -> Kernel:
    return lambda *args, **kwargs: layer(kernel, args, kwargs)


def _wrap_number(one: Any, other: Any) -> tuple[Tensor, Tensor]:
    """Make a tensor of the number. It must not change the dtype of the result, and it must not be rounded to it."""
    like, number = (one, other) if isinstance(one, Tensor) else (other, one)
    if isinstance(number, Tensor):
        return one, other
    kind = torch.int64 if isinstance(number, int) else torch.float64 if like.is_floating_point() else torch.float32
    dtype = kind if like.dim() or not like.is_floating_point() else like.dtype
    wrapped = torch.scalar_tensor(number, dtype=dtype)
    return (one, wrapped) if like is one else (wrapped, other)


def use_second_device() -> None:
    """Compute every kernel of `WIDE` in float64 and round once, from now on."""
    for op in WIDE:
        add_layer(op, _compute_wide(op))


def _compute_wide(op: str) -> Layer:
    in_place = op.partition(".")[0].endswith("_")

    def layer(kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dtypes = {each.dtype for each in args if isinstance(each, Tensor) and each.dtype.is_floating_point}
        complexes = {each.dtype for each in args if isinstance(each, Tensor) and each.is_complex()}
        if complexes == {torch.complex64} and not dtypes:
            dtypes = {torch.float32}
        asked = kwargs.get("dtype") is not None or (op in _PLAIN and any(isinstance(a, torch.dtype) for a in args))
        if len(dtypes) != 1 or not dtypes <= set(_NARROW) or asked:
            return kernel(*args, **kwargs)
        (dtype,) = dtypes
        if op.startswith("native_") and dtype != torch.float32:  # their statistics have a dtype of their own
            return kernel(*args, **kwargs)
        wide = [_widen(each, dtype) for each in args]
        result = kernel(*wide, **kwargs)
        if in_place:
            return args[0].copy_(wide[0])
        if op == "native_batch_norm":
            for old, new in zip(args[3:5], wide[3:5], strict=True):
                if isinstance(old, Tensor):
                    old.copy_(new)
        return _narrow(result, dtype) if isinstance(result, Tensor) else tuple(_narrow(each, dtype) for each in result)

    return layer


def _widen(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor) and value.is_complex():
        return value.to(torch.complex128)
    if isinstance(value, Tensor) and value.dtype == dtype:
        return value.double()
    return torch.float64 if value is dtype else value


def _narrow(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor) and value.is_complex():
        return value.to(torch.complex64)
    return value.to(dtype) if isinstance(value, Tensor) and value.dtype == torch.float64 else value
