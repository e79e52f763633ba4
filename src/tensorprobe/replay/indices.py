"""Results with more than one right answer: indices of tied values, and eigenvectors, which have any phase.

What is compared is the value that was chosen, and the direction of the vector.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tensorprobe.model import Call
from tensorprobe.ops import Trait, has, short_name

_VECTORS = {
    "eig": {"output.1": -2},
    "eigh": {"output.1": -2},
    "lobpcg": {"output.1": -2},
    "svd": {"output.0": -2, "output.2": -2},
    "linalg.svd": {"output.0": -2, "output.2": -1},
}
"""Op → output that holds vectors → the dimension of one vector."""


def choice_dimension(call: Call, name: str) -> tuple[int | None] | None:
    """Return the dimension of the first input that an output indexes: (None,) for the flat input, None for no indices."""
    if not has(call.op, Trait.CHOOSES) or name not in ("output.0", "output.1"):
        return None
    return (_dimension(call),)


def same_choice(call: Call, inputs: Mapping[str, torch.Tensor], one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two results are indices into the first input that pick equal values."""
    source = inputs.get("input.0")
    found = choice_dimension(call, "output.0")
    if source is None or found is None or one.dtype is not torch.int64 or one.shape != other.shape:
        return False
    (dim,) = found
    if dim is None or not source.ndim:
        flat = source.flatten()
        return _valid((one, other), flat.numel()) and bool(torch.equal(flat[one.flatten()], flat[other.flatten()]))
    if not _valid((one, other), source.shape[dim]):
        return False
    picked = []
    for indices in (one, other):
        full = indices if indices.ndim == source.ndim else indices.unsqueeze(dim)
        picked.append(torch.take_along_dim(source, full, dim))
    return bool(torch.equal(*picked))


def _valid(indices: tuple[torch.Tensor, torch.Tensor], size: int) -> bool:
    return all(bool(((each >= 0) & (each < size)).all()) for each in indices)


def vector_dimension(op: str, name: str) -> int | None:
    """Return the dimension of the vectors in an output that are right with any sign or phase; None if it has none."""
    short = op.partition(".")[2]
    return _VECTORS.get(short, _VECTORS.get(short.removeprefix("linalg."), {})).get(name)


def aligned(wide: torch.Tensor, result: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the result with each vector in the phase of the reference."""
    lean = (wide.conj() * result.to(wide.dtype)).sum(dim, keepdim=True)
    phase = torch.where(lean.abs() > 0, lean / lean.abs(), torch.ones_like(lean))
    return (result.to(wide.dtype) / phase).to(result.dtype).contiguous()


def _dimension(call: Call) -> int | None:
    given = (call.kwargs or {}).get("dim")
    if given is None:
        numbers = [tree for tree in (call.args or [])[1:] if isinstance(tree, int) and not isinstance(tree, bool)]
        name = short_name(call.op)
        at = 1 if name in ("topk", "kthvalue") else 0
        given = numbers[at] if len(numbers) > at else None
    if given is None:
        return None if short_name(call.op) in ("argmax", "argmin") else -1
    return int(given)
