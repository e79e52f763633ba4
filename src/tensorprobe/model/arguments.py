"""What the positional arguments of common ops are called: a tensor is given by place or by name, and is the same tensor."""

from __future__ import annotations

_WEIGHT_AND_BIAS = {"input.1": "weight", "input.2": "bias"}
_AFTER_SHAPE = {"input.2": "weight", "input.3": "bias"}
ARGUMENTS: dict[str, dict[str, str]] = {
    **dict.fromkeys(("linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d"), _WEIGHT_AND_BIAS),
    "embedding": {"input.1": "weight"},
    **dict.fromkeys(("layer_norm", "group_norm", "rms_norm"), _AFTER_SHAPE),
    "batch_norm": {"input.1": "running_mean", "input.2": "running_var", "input.3": "weight", "input.4": "bias"},
}
"""The short name of an op → slot → name."""


def has_places(op: str) -> bool:
    """Whether anything is known of an op."""
    return op.rpartition(".")[2] in ARGUMENTS


def by_place(op: str, slot: str) -> str:
    """The slot under which a tensor stands that is given by place, for one that is given by name; itself when nothing is known."""
    for place, name in ARGUMENTS.get(op.rpartition(".")[2], {}).items():
        if slot == f"input.kwargs.{name}":
            return place
    return slot
