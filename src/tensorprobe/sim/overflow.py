"""The overflow flag that the accelerators of the older tools keep: set when an op makes infinity or NaN out of finite
inputs.

Looking at every input and output costs time, so nothing is looked at until somebody arms the flag (the stand-in for
torch_npu does).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


class OverflowFlag:
    """`armed`: whether ops are looked at. `raised`: whether one overflowed since the last `clear`."""

    def __init__(self) -> None:
        self.armed = False
        self.raised = False

    def clear(self) -> None:
        """Forget what happened."""
        self.raised = False

    def watch(self, inputs_finite: bool, outputs: Any) -> None:
        """Raise the flag when finite inputs gave an output that is not."""
        if inputs_finite and not all_finite(outputs):
            self.raised = True


FLAG = OverflowFlag()


def all_finite(value: Any) -> bool:
    """Whether every number in tensors, lists and scalars is finite; NaN counts as not."""
    if isinstance(value, Tensor):
        numbers = (value.is_floating_point() or value.is_complex()) and value.layout == torch.strided
        return not numbers or bool(value.isfinite().all())
    if isinstance(value, (list, tuple)):
        return all(all_finite(item) for item in value)
    return math.isfinite(value) if isinstance(value, float) else True
