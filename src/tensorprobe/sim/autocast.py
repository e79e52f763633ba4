"""Autocast for the simulated device: which ops run in the lower type, which in float32, which in the widest type of
their inputs.

The lists follow the reference that PyTorch publishes for accelerators ("Autocast Op Reference"); every other op takes
its inputs as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tensorprobe import torch_names
from tensorprobe.sim import memory
from tensorprobe.sim.memory import map_tensors, tensors_in

aten = torch.ops.aten

LOWER_PRECISION = [
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "addbmm",
    "addmv",
    "addr",
    "mv",
    "matmul",
    "linear",
    "chain_matmul",
    "linalg_vecdot",
    "linalg_multi_dot",
    "prelu",
    "einsum",
    "convolution",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_tbc",
    "conv_transpose1d",
    "conv_transpose2d.input",
    "conv_transpose3d.input",
    "_convolution",
    "scaled_dot_product_attention",
    "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell",
    "lstm_cell",
    "gru_cell",
    "rnn_tanh_cell",
    "rnn_relu_cell",
]
FLOAT32 = [
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
    "softplus",
    "layer_norm",
    "native_layer_norm",
    "group_norm",
    "frobenius_norm.dim",
    "nuclear_norm",
    "nuclear_norm.dim",
    "cosine_similarity",
    "poisson_nll_loss",
    "cosine_embedding_loss",
    "nll_loss",
    "nll_loss2d",
    "hinge_embedding_loss",
    "kl_div",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "mse_loss",
    "margin_ranking_loss",
    "multilabel_margin_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
    "multi_margin_loss",
    "cross_entropy_loss",
    "binary_cross_entropy_with_logits",
    "dist",
    "pdist",
    "cdist",
    "renorm",
    "logsumexp",
    "prod",
    "prod.dim_int",
    "softmax.int",
    "log_softmax.int",
    "cumprod",
    "cumsum",
    "linalg_vector_norm",
    "sum",
    "sum.dim_IntList",
    "norm.Scalar",
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_bicubic2d",
]
WIDEST = [
    "addcdiv",
    "addcmul",
    "atan2",
    "bilinear",
    "cross",
    "dot",
    "grid_sampler",
    "index_put",
    "tensordot",
    "scatter_add",
    "cat",
    "stack",
    "vdot",
]

_AUTOCAST = torch_names.DispatchKeySet(torch_names.DispatchKey.AutocastPrivateUse1)


def register(library: torch.library.Library, name: str) -> None:
    """Register the casts for device `name` in a library that implements `aten`."""

    def lower(_args: Any) -> torch.dtype:
        return torch.get_autocast_dtype(name)

    def single(_args: Any) -> torch.dtype:
        return torch.float32

    def widest(args: Any) -> torch.dtype:
        floating = [tensor.dtype for tensor in tensors_in(args) if tensor.is_floating_point()]
        return torch.float32 if torch.float32 in floating else lower(args)

    for names, choose in ((LOWER_PRECISION, lower), (FLOAT32, single), (WIDEST, widest)):
        for qualified in names:
            packet, _, overload = qualified.partition(".")
            op = getattr(getattr(aten, packet), overload or "default")
            library.impl(qualified, _casting(op, choose), "AutocastPrivateUse1")


def _casting(op: Any, choose: Callable[[Any], torch.dtype]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch_names.without_keys(_AUTOCAST):
            dtype = choose(args)

            def cast(tensor: Tensor) -> Tensor:
                eligible = tensor.is_floating_point() and tensor.dtype != torch.float64 and memory.is_device(tensor)
                return tensor.to(dtype) if eligible else tensor

            return op(*map_tensors(cast, args), **map_tensors(cast, kwargs))

    return run
