"""What an op asks of its inputs beyond dtype, shape and range, so that random ones mean something to it.

Sorted boundaries, lengths that add up, places that are written to once, a mask that leaves something over: a table from
the name of the op to a function that puts random inputs right, in place. Recorded values are never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tensorprobe.model import Call
from tensorprobe.ops import short_name
from tensorprobe.replay.layout import distinct

Tensors = dict[str, torch.Tensor]
Constraint = Callable[[Call, Tensors, torch.Generator], None]


def constrain(call: Call, tensors: Tensors, source: torch.Generator) -> None:
    """Put random inputs right for their op."""
    name = short_name(call.op)
    found = _CONSTRAINTS.get(name) or _CONSTRAINTS.get(name.rstrip("_"))
    if found is not None and all(tensor.numel() for tensor in tensors.values()):
        # Of an expanded tensor only what is really there is written to.
        views = {name: view for name, tensor in tensors.items() if (view := distinct(tensor)) is not None}
        found(call, views, source)


def _given(call: Call, tensors: Tensors, position: int, keyword: str) -> torch.Tensor | None:
    """The tensor of an argument, however it was passed."""
    trees = call.args or []
    tree = trees[position] if position < len(trees) else (call.kwargs or {}).get(keyword)
    return tensors.get(tree["slot"]) if isinstance(tree, dict) and "slot" in tree else None


def _number(call: Call, position: int, keyword: str, otherwise: Any = None) -> Any:
    trees = call.args or []
    return trees[position] if position < len(trees) else (call.kwargs or {}).get(keyword, otherwise)


def _classes(call: Call, tensors: Tensors, source: torch.Generator) -> None:
    """Classes of a loss count from 0; a negative one stands for elements that are left out, and nothing lies between."""
    target = _given(call, tensors, 1, "target")
    if target is None or target.is_floating_point() or not int(target.min()) < 0 <= int(target.max()):
        return
    classes = torch.randint(0, int(target.max()) + 1, target.shape, generator=source)
    target.copy_(torch.where((target < 0) & (target > target.min()), classes, target))


def _sorted(position: int, keyword: str) -> Constraint:
    def sort(call: Call, tensors: Tensors, source: torch.Generator) -> None:
        found = _given(call, tensors, position, keyword)
        if found is not None:
            found.copy_(found.sort().values)

    return sort


def _offsets(call: Call, tensors: Tensors, source: torch.Generator) -> None:
    """Where bags begin: the first at 0, none before the one in front of it."""
    found = _given(call, tensors, 2, "offsets")
    if found is not None:
        found.copy_(found.sort().values)
        found[0] = 0


def _positive_definite(call: Call, tensors: Tensors, source: torch.Generator) -> None:
    matrix = tensors.get("input.0")
    if matrix is not None and matrix.ndim >= 2 and matrix.shape[-1] == matrix.shape[-2]:
        wide = matrix.to(torch.complex128 if matrix.is_complex() else torch.float64)
        size = wide.shape[-1]
        product = wide @ wide.mH / size + wide.abs().square().amax() * torch.eye(size)
        matrix.copy_(product.to(matrix.dtype))


def _written_once(call: Call, tensors: Tensors, source: torch.Generator) -> None:
    """Where two values go to one place it is left open which one stays: along the dimension, every place comes once."""
    target, index = _given(call, tensors, 0, "input"), _given(call, tensors, 2, "index")
    dim = _number(call, 1, "dim")
    if target is None or index is None or not isinstance(dim, int) or not target.ndim or index.dtype is not torch.int64:
        return
    dim %= target.ndim
    along = dim if index.ndim == target.ndim else 0
    size = target.shape[dim]
    if index.shape[along] <= size:
        shape = [size if at == along else length for at, length in enumerate(index.shape)]
        order = torch.rand(shape, generator=source).argsort(along)
        index.copy_(order.narrow(along, 0, index.shape[along]))


def _stored_once(call: Call, tensors: Tensors, source: torch.Generator) -> None:
    """The same for `x[index] = values` with one tensor of places."""
    if _number(call, 3, "accumulate") is True:
        return
    indices = [tensors[name] for name in _slots((call.args or [None, None])[1]) if name in tensors]
    for index in indices:
        low, high = int(index.min()), int(index.max())
        if index.dtype is torch.int64 and len(indices) == 1 and index.numel() <= high - low + 1:
            index.copy_((torch.randperm(high - low + 1, generator=source)[: index.numel()] + low).view(index.shape))


def _slots(tree: Any) -> Iterator[str]:
    if isinstance(tree, dict) and "slot" in tree:
        yield tree["slot"]
    elif isinstance(tree, dict):
        yield from _slots(tree.get("value"))
    elif isinstance(tree, list):
        for part in tree:
            yield from _slots(part)


def _mask(call: Call, tensors: Tensors, source: torch.Generator) -> None:
    """An attention mask leaves every row something to look at."""
    mask = _given(call, tensors, 3, "attn_mask")
    if mask is not None and mask.dtype is torch.bool and mask.ndim:
        mask.select(-1, 0).fill_(True)


def _lengths(call: Call, tensors: Tensors, source: torch.Generator) -> None:
    """Lengths of sequences, longest first; the longest is all there is."""
    lengths, data = _given(call, tensors, 1, "lengths"), _given(call, tensors, 0, "input")
    if lengths is not None and data is not None:
        lengths.clamp_(min=1).copy_(lengths.sort(descending=True).values)
        first = _number(call, 2, "batch_first", False)
        lengths[0] = data.shape[1 if first else 0]


_CONSTRAINTS: dict[str, Constraint] = {
    **dict.fromkeys(("cross_entropy", "nll_loss", "nll_loss_nd", "cross_entropy_loss"), _classes),
    "searchsorted": _sorted(0, "sorted_sequence"),
    "bucketize": _sorted(1, "boundaries"),
    "embedding_bag": _offsets,
    **dict.fromkeys(("cholesky", "cholesky_ex", "cholesky_inverse"), _positive_definite),
    **dict.fromkeys(("scatter", "index_copy"), _written_once),
    **dict.fromkeys(("index_put", "__setitem__", "setitem"), _stored_once),
    "scaled_dot_product_attention": _mask,
    "_pack_padded_sequence": _lengths,
}
