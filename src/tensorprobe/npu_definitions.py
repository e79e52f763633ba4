"""What ops of torch_npu compute, as ordinary torch code: the simulated device runs it, and a replay without the device too.

A function has the name of its op. It computes in the dtype of its arguments, so in float64 it is a reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def fast_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def npu_mish(x: Tensor) -> Tensor:
    return x * torch.tanh(F.softplus(x))


def npu_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias)


def npu_bmmV2(x: Tensor, other: Tensor, output_sizes: Sequence[int]) -> Tensor:
    product = torch.bmm(x, other)
    return product.reshape(output_sizes) if output_sizes else product


def npu_transpose(x: Tensor, perm: Sequence[int], require_contiguous: bool = True) -> Tensor:
    return x.permute(perm).contiguous().clone()


def npu_broadcast(x: Tensor, size: Sequence[int]) -> Tensor:
    return x.expand(size).clone(memory_format=torch.contiguous_format)


def npu_dtype_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype, copy=True)


def npu_one_hot(
    x: Tensor, num_classes: int = -1, depth: int = 1, on_value: float = 1.0, off_value: float = 0.0
) -> Tensor:
    classes = depth if num_classes == -1 else num_classes
    chosen = x.unsqueeze(-1) == torch.arange(classes, device=x.device)
    return torch.where(chosen, on_value, off_value)


def npu_pad(x: Tensor, paddings: Sequence[int]) -> Tensor:
    pairs = [list(paddings[i : i + 2]) for i in range(0, len(paddings), 2)]
    return F.pad(x, [amount for pair in reversed(pairs) for amount in pair]).clone()


def npu_slice(x: Tensor, offsets: Sequence[int], size: Sequence[int]) -> Tensor:
    chosen = tuple(slice(start, start + count) for start, count in zip(offsets, size, strict=True))
    return x[chosen].clone()


def npu_indexing(x: Tensor, begin: Sequence[int], end: Sequence[int], strides: Sequence[int]) -> Tensor:
    chosen = tuple(slice(*bounds) for bounds in zip(begin, end, strides, strict=True))
    return x[chosen].clone()


def npu_confusion_transpose(x: Tensor, perm: Sequence[int], shape: Sequence[int], transpose_first: bool) -> Tensor:
    changed = x.permute(perm).reshape(shape) if transpose_first else x.reshape(shape).permute(perm)
    return changed.contiguous().clone()


def npu_max(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    values, indices = torch.max(x, dim, keepdim)
    return values, indices.int()


def npu_scatter(x: Tensor, indices: Tensor, updates: Tensor, dim: int) -> Tensor:
    return x.scatter(dim, indices.long().unsqueeze(dim), updates.unsqueeze(dim))


def npu_layer_norm_eval(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    return F.layer_norm(x, list(normalized_shape), weight, bias, eps)


def npu_iou(bboxes: Tensor, gtboxes: Tensor, mode: int = 0) -> Tensor:
    """Rows of `gtboxes` against columns of `bboxes`; mode 1 divides by the area of the ground truth."""
    low = torch.maximum(gtboxes[:, None, :2], bboxes[None, :, :2])
    high = torch.minimum(gtboxes[:, None, 2:], bboxes[None, :, 2:])
    overlap = (high - low).clamp(min=0).prod(-1)
    areas = (bboxes[:, 2:] - bboxes[:, :2]).prod(-1)
    truth_areas = (gtboxes[:, 2:] - gtboxes[:, :2]).prod(-1)
    whole = truth_areas[:, None] if mode == 1 else areas[None] + truth_areas[:, None] - overlap
    return overlap / whole


def npu_sign_bits_pack(x: Tensor, size: int) -> Tensor:
    """One bit for each element, 1 where it is not negative, eight to a byte, in `size` rows."""
    bits = (F.pad(x, [0, -x.numel() % 8], value=-1.0) >= 0).view(-1, 8).to(torch.uint8)
    packed = (bits << torch.arange(8, dtype=torch.uint8, device=x.device)).sum(-1).to(torch.uint8)
    return packed.view(size, -1).clone()


def npu_sign_bits_unpack(x: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """The inverse: 1 and -1 in `size` rows."""
    bits = (x.view(-1, 1) >> torch.arange(8, dtype=torch.uint8, device=x.device)) & 1
    return (bits.to(dtype) * 2 - 1).view(size, -1)


def npu_scaled_masked_softmax(x: Tensor, mask: Tensor, scale: float = 1.0, fixed_triu_mask: bool = False) -> Tensor:
    hidden = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1) if fixed_triu_mask else mask.bool()
    return torch.softmax((x * scale).masked_fill(hidden, -10000.0), dim=-1)


def npu_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    reciprocal = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (wide * reciprocal).to(x.dtype) * gamma, reciprocal


def npu_rotary_mul(x: Tensor, r1: Tensor, r2: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * r1 + torch.cat([-second, first], -1) * r2


def npu_swiglu(x: Tensor, dim: int = -1) -> Tensor:
    first, second = x.chunk(2, dim)
    return F.silu(first) * second


def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The attended values, and each row's maximum and sum of the softmax; in `atten_mask` True hides a place."""
    if input_layout not in ("BNSD", "BSND", "BSH") or padding_mask is not None:
        raise NotImplementedError(
            f"the stand-in attends in the layouts BNSD, BSND and BSH, unpadded; not {input_layout!r}"
        )
    q, k, v = (_heads_first(tensor, head_num, input_layout) for tensor in (query, key, value))
    scores = torch.matmul(q, k.transpose(-2, -1)) * scale
    if pse is not None:
        scores = scores + pse
    if atten_mask is not None:
        scores = scores.masked_fill(atten_mask.bool(), -torch.inf)
    weights = F.dropout(torch.softmax(scores, -1), 1 - keep_prob) if keep_prob < 1 else torch.softmax(scores, -1)
    largest = scores.amax(-1, keepdim=True)
    return (
        _heads_back(torch.matmul(weights, v), input_layout),
        largest,
        torch.exp(scores - largest).sum(-1, keepdim=True),
    )


def _heads_first(tensor: Tensor, heads: int, layout: str) -> Tensor:
    if layout == "BSH":
        return tensor.unflatten(-1, (heads, -1)).transpose(1, 2)
    return tensor.transpose(1, 2) if layout == "BSND" else tensor


def _heads_back(tensor: Tensor, layout: str) -> Tensor:
    if layout == "BSH":
        return tensor.transpose(1, 2).flatten(2)
    return tensor.transpose(1, 2).contiguous() if layout == "BSND" else tensor
