"""What people call the axes of a tensor that an op works on. A guess from the op and the number of axes; the number is said too."""

from __future__ import annotations

from tensorprobe.ops.table import plain_name

_IMAGES = ("conv", "pool", "batch_norm", "group_norm", "instance_norm", "interpolate", "pixel")
_HEADS = ("softmax", "matmul", "bmm", "attention", "masked_fill", "dropout", "div", "einsum", "baddbmm")


def axis_names(op: str, dimensions: int) -> list[str]:
    """Return a plural for each axis: `["heads", "rows", "columns"]`."""
    short = plain_name(op)
    inner = ["rows", "columns"][-dimensions:] if dimensions > 1 else ["elements"][:dimensions]
    outer = dimensions - len(inner)
    if outer <= 0:
        return inner
    if any(part in short for part in _IMAGES) and outer < 3:
        return [*["images", "channels"][:outer], *inner] if outer == 2 else ["images", "channels", "columns"]
    if outer == 2 and any(part in short for part in _HEADS):
        return ["batches", "heads", *inner]
    return [*(f"axis-{axis} slices" for axis in range(outer)), *inner] if outer > 1 else ["batches", *inner]
