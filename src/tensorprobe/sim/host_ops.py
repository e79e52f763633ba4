"""How an op of the simulated device runs on the host: a plan from its schema, and ops that need code of their own.

Usually the device runs the same op on CPU aliases. That fails for ops that exist only for accelerators (the overrideable
convolution, the fused recurrent cells): torch picks them because the device is not the CPU, and the CPU has no kernel for
them. `SPECIALS` computes these on CPU tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tensorprobe import torch_names

# These kernels read and write only sizes, strides and flags: the CPU kernel works on a device tensor directly.
_METADATA_ONLY = {
    "aten::as_strided", "aten::view", "aten::_reshape_alias", "aten::unfold", "aten::_conj", "aten::_neg_view",
    "aten::view_as_real", "aten::view_as_complex", "aten::set_",
}  # fmt: skip
# Ops that take CPU tensors beside device tensors, on real accelerators too.
_MIXES_DEVICES = {
    "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index",
    "aten::_unsafe_index_put", "aten::_pack_padded_sequence", "aten::_ctc_loss", "aten::tensor_split",
    "aten::_amp_foreach_non_finite_check_and_unscale_", "aten::equal", "aten::is_set_to",
}  # fmt: skip


@dataclass(frozen=True)
class HostPlan:
    """What the schema says about an op.

    `mutated` has for each returned tensor the argument it is, as (position, name), or None. `written` has the arguments
    that an op without returns writes to (the foreach family).
    """

    name: str
    metadata_only: bool
    view: bool
    mutated: tuple[tuple[int, str] | None, ...]
    written: tuple[int, ...]
    random: bool
    takes_generator: bool
    takes_device: bool
    computes: bool
    """Whether it computes values: it is neither a view nor uninitialised memory."""
    strict: bool
    outputs: frozenset[str]
    """Keyword arguments that the op writes to: `out` and its like."""
    numbers: tuple[int, ...]
    """Positions where a number is to be made a tensor: C++ hands scalars over as Python numbers, and not every op
    takes them back.
    """


def make_plan(op: Any) -> HostPlan:
    """Return the plan for an op overload."""
    schema = op._schema
    view = op.is_view or schema.name in ("aten::_reshape_alias", "aten::lift_fresh")
    mutated = tuple(None if view else _argument_returned(schema, returned) for returned in schema.returns)
    written = (
        () if mutated else tuple(i for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write)
    )
    names = {argument.name for argument in schema.arguments}
    return HostPlan(
        name=schema.name,
        metadata_only=schema.name in _METADATA_ONLY,
        view=view,
        mutated=mutated,
        written=written,
        random=torch.Tag.nondeterministic_seeded in op.tags,
        takes_generator="generator" in names,
        takes_device="device" in names,
        computes=not view and not schema.name.startswith("aten::empty"),
        strict=schema.name.startswith("aten::") and schema.name not in _MIXES_DEVICES,
        outputs=frozenset(a.name for a in schema.arguments if a.kwarg_only and a.alias_info and a.alias_info.is_write),
        numbers=_number_positions(schema),
    )


def _number_positions(schema: Any) -> tuple[int, ...]:
    if torch_names.takes_numbers(schema.name.partition("::")[2]):
        return ()
    return tuple(i for i, argument in enumerate(schema.arguments) if isinstance(argument.type, torch_names.TensorType))


def _argument_returned(schema: Any, returned: Any) -> tuple[int, str] | None:
    if returned.alias_info is None:
        return None
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.before_set == returned.alias_info.before_set:
            return position, argument.name
    return None


aten = torch.ops.aten


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    return aten.convolution.default(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)


def _convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    channels = weight.size(1) * groups if transposed else weight.size(0)
    bias_sizes = [channels] if mask[2] else None
    gradients = aten.convolution_backward.default(
        grad, x, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, mask
    )
    return tuple(gradients)


def _lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cell: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    gates = input_gates + hidden_gates
    if input_bias is not None and hidden_bias is not None:
        gates = gates + input_bias + hidden_bias
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    new_cell = f * cell + i * g
    return o * new_cell.tanh(), new_cell, torch.cat([i, f, g, o], 1)


def _lstm_cell_backward(
    grad_hidden: Tensor | None, grad_cell: Tensor | None, cell: Tensor, new_cell: Tensor, workspace: Tensor, bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    i, f, g, o = workspace.chunk(4, 1)
    squashed = new_cell.tanh()
    if grad_hidden is None:
        grad_hidden = torch.zeros_like(new_cell)
    through_cell = grad_hidden * o * (1 - squashed * squashed)
    if grad_cell is not None:
        through_cell = through_cell + grad_cell
    grad_gates = torch.cat(
        [
            through_cell * g * i * (1 - i),
            through_cell * cell * f * (1 - f),
            through_cell * i * (1 - g * g),
            grad_hidden * squashed * o * (1 - o),
        ],
        1,
    )
    return grad_gates, through_cell * f, grad_gates.sum(0) if bias else None


def _gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hidden: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    if input_bias is not None and hidden_bias is not None:
        input_gates, hidden_gates = input_gates + input_bias, hidden_gates + hidden_bias
    input_r, input_z, input_n = input_gates.chunk(3, 1)
    hidden_r, hidden_z, hidden_n = hidden_gates.chunk(3, 1)
    r, z = (input_r + hidden_r).sigmoid(), (input_z + hidden_z).sigmoid()
    n = (input_n + r * hidden_n).tanh()
    return n + z * (hidden - n), torch.cat([r, z, n, hidden, hidden_n], 1)


def _gru_cell_backward(grad: Tensor, workspace: Tensor, bias: bool) -> tuple[Tensor | None, ...]:
    r, z, n, hidden, hidden_n = workspace.chunk(5, 1)
    grad_z = grad * (hidden - n) * z * (1 - z)
    grad_n = grad * (1 - z) * (1 - n * n)
    grad_r = grad_n * hidden_n * r * (1 - r)
    grad_input = torch.cat([grad_r, grad_z, grad_n], 1)
    grad_hidden_gates = torch.cat([grad_r, grad_z, grad_n * r], 1)
    biases = (grad_input.sum(0), grad_hidden_gates.sum(0)) if bias else (None, None)
    return grad_input, grad_hidden_gates, grad * z, *biases


def _histc(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Count integers too, as accelerators do; the CPU counts only floating-point numbers."""
    if x.is_floating_point():
        return aten.histc(x, *args, **kwargs)
    counted: Tensor = aten.histc.default(x.double(), *args, **{key: kwargs[key] for key in kwargs if key != "out"})
    return counted.to(x.dtype)


def _sdp_choice(*_args: Any, **_kwargs: Any) -> int:
    """Choose attention by its definition (scaled matmul, softmax, matmul), so that faults can name each part."""
    return 0


SPECIALS: dict[str, Callable[..., Any]] = {
    "aten::convolution_overrideable": _convolution,
    "aten::convolution_backward_overrideable": _convolution_backward,
    "aten::_thnn_fused_lstm_cell": _lstm_cell,
    "aten::_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
    "aten::_thnn_fused_gru_cell": _gru_cell,
    "aten::_thnn_fused_gru_cell_backward": _gru_cell_backward,
    "aten::histc": _histc,
    "aten::_fused_sdp_choice": _sdp_choice,
}
