"""What the schema of an op says about running it on the host: made once for each op, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tensorprobe import torch_names

# Kernels of these read and write sizes, strides and flags only: the CPU kernel serves a device tensor as it is.
_METADATA_ONLY = {
    "aten::as_strided", "aten::view", "aten::_reshape_alias", "aten::unfold", "aten::_conj", "aten::_neg_view",
    "aten::view_as_real", "aten::view_as_complex", "aten::set_",
}  # fmt: skip
# CPU tensors with elements that an op takes beside device tensors, on real accelerators too.
_MIXES_DEVICES = {
    "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index",
    "aten::_unsafe_index_put", "aten::_pack_padded_sequence", "aten::_ctc_loss", "aten::tensor_split",
    "aten::_amp_foreach_non_finite_check_and_unscale_", "aten::equal", "aten::is_set_to",
}  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """What the schema says about an op.

    `mutated` holds, for each return, the argument it is, as (position, name), or None. `written` holds the arguments
    an op without returns writes to (the foreach family).
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
    """Neither a view nor uninitialised memory."""
    strict: bool
    outputs: frozenset[str]
    """Keyword arguments that the op writes to: `out` and its like."""
    numbers: tuple[int, ...]
    """Positions where a number is to be made a tensor: C++ hands scalars over as Python numbers, and not every op
    takes them back.
    """


def make_plan(op: Any) -> Plan:
    """The plan for an op overload."""
    schema = op._schema
    view = op.is_view or schema.name in ("aten::_reshape_alias", "aten::lift_fresh")
    mutated = tuple(None if view else _argument_returned(schema, returned) for returned in schema.returns)
    written = (
        () if mutated else tuple(i for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write)
    )
    names = {argument.name for argument in schema.arguments}
    return Plan(
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
