"""Ops of torch_npu that the older tools know by name, registered under `npu::`.

Each is a real op of the dispatcher with one CPU kernel: on the simulated device it runs through the device's own
kernel, so it can be captured and made faulty by its name. Gradients come from differentiating the same code again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tensorprobe.npu_definitions import (
    fast_gelu,
    npu_bmmV2,
    npu_broadcast,
    npu_confusion_transpose,
    npu_dtype_cast,
    npu_fusion_attention,
    npu_indexing,
    npu_iou,
    npu_layer_norm_eval,
    npu_linear,
    npu_max,
    npu_mish,
    npu_one_hot,
    npu_pad,
    npu_rms_norm,
    npu_rotary_mul,
    npu_scaled_masked_softmax,
    npu_scatter,
    npu_sign_bits_pack,
    npu_sign_bits_unpack,
    npu_slice,
    npu_swiglu,
    npu_transpose,
)

_SCHEMAS: dict[Callable[..., Any], str] = {
    fast_gelu: "(Tensor self) -> Tensor",
    npu_mish: "(Tensor self) -> Tensor",
    npu_linear: "(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor",
    npu_bmmV2: "(Tensor self, Tensor mat2, int[] output_sizes) -> Tensor",
    npu_transpose: "(Tensor self, int[] perm, bool require_contiguous=True) -> Tensor",
    npu_broadcast: "(Tensor self, int[] size) -> Tensor",
    npu_dtype_cast: "(Tensor self, ScalarType dtype) -> Tensor",
    npu_one_hot: "(Tensor self, int num_classes=-1, int depth=1, float on_value=1, float off_value=0) -> Tensor",
    npu_pad: "(Tensor self, int[] paddings) -> Tensor",
    npu_slice: "(Tensor self, int[] offsets, int[] size) -> Tensor",
    npu_indexing: "(Tensor self, int[] begin, int[] end, int[] strides) -> Tensor",
    npu_confusion_transpose: "(Tensor self, int[] perm, int[] shape, bool transpose_first) -> Tensor",
    npu_max: "(Tensor self, int dim, bool keepdim=False) -> (Tensor, Tensor)",
    npu_scatter: "(Tensor self, Tensor indices, Tensor updates, int dim) -> Tensor",
    npu_layer_norm_eval: (
        "(Tensor input, int[] normalized_shape, Tensor? weight=None, Tensor? bias=None, float eps=1e-05) -> Tensor"
    ),
    npu_iou: "(Tensor bboxes, Tensor gtboxes, int mode=0) -> Tensor",
    npu_sign_bits_pack: "(Tensor self, int size) -> Tensor",
    npu_sign_bits_unpack: "(Tensor input, int size, ScalarType dtype) -> Tensor",
    npu_scaled_masked_softmax: "(Tensor x, Tensor mask, Scalar scale=1.0, bool fixed_triu_mask=False) -> Tensor",
    npu_rms_norm: "(Tensor self, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
    npu_rotary_mul: "(Tensor self, Tensor r1, Tensor r2) -> Tensor",
    npu_swiglu: "(Tensor self, int dim=-1) -> Tensor",
    npu_fusion_attention: (
        "(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, Tensor? pse=None, "
        "Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1., float keep_prob=1.) "
        "-> (Tensor, Tensor, Tensor)"
    ),
}
_libraries: list[torch.library.Library] = []


def register() -> dict[str, Any]:
    """Define the ops, once in a process; name → callable."""
    if not _libraries:
        library = torch.library.Library("npu", "DEF")
        _libraries.append(library)
        for body, schema in _SCHEMAS.items():
            library.define(body.__name__ + schema)
            library.impl(body.__name__, body, "CPU")
            torch.library.register_autograd(
                f"npu::{body.__name__}", _gradient_of(body), setup_context=_keep_inputs, lib=library
            )
    return {body.__name__: getattr(torch.ops.npu, body.__name__) for body in _SCHEMAS}


def register_composites(schemas: dict[Callable[..., Any], str]) -> dict[str, Any]:
    """Define ops that are made of other ops, whatever device these run on; name → callable."""
    library = torch.library.Library("npu", "FRAGMENT")
    _libraries.append(library)
    for body, schema in schemas.items():
        library.define(body.__name__ + schema)
        library.impl(body.__name__, body, "CompositeExplicitAutograd")
    return {body.__name__: getattr(torch.ops.npu, body.__name__) for body in schemas}


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.places = [place for place, value in enumerate(inputs) if isinstance(value, Tensor)]
    ctx.others = [None if place in ctx.places else value for place, value in enumerate(inputs)]
    ctx.save_for_backward(*[inputs[place] for place in ctx.places])


def _gradient_of(body: Callable[..., Any]) -> Callable[..., Any]:
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        inputs = list(ctx.others)
        wanted = []
        with torch.enable_grad():
            for place, saved in zip(ctx.places, ctx.saved_tensors, strict=True):
                needed = ctx.needs_input_grad[place] and saved.is_floating_point()
                inputs[place] = saved.detach().requires_grad_(needed)
                wanted += [place] if needed else []
            outputs = body(*inputs)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        pairs = [
            (out, grad) for out, grad in zip(outputs, grads, strict=True) if grad is not None and out.requires_grad
        ]
        found = torch.autograd.grad(
            [out for out, _ in pairs],
            [inputs[place] for place in wanted],
            [grad for _, grad in pairs],
            allow_unused=True,
        )
        answer = [None] * len(inputs)
        for place, gradient in zip(wanted, found, strict=True):
            answer[place] = gradient
        return answer[0] if len(answer) == 1 else tuple(answer)

    return backward
