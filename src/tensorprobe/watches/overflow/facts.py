"""What is known of one tensor of a call: counts of NaN and infinity, its range, and by what it is known again.

A watch makes facts of tensors in memory (`tensors`), a look at a record makes them of stored statistics. Rules see facts
only. Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from tensorprobe.model.overflow import Born, Extent
from tensorprobe.numerics.summary import Moments, greatest_finite


class Facts(NamedTuple):
    """`key` is equal for tensors that share memory, or content. `values` gives the tensor, where it can still be had.
    `never_mask`: it is a parameter or a gradient."""

    slot: str
    dtype: str
    shape: tuple[int, ...]
    moments: Moments
    key: Hashable
    values: Callable[[], Any] | None = None
    never_mask: bool = False

    @property
    def clean(self) -> bool:
        return not (self.moments.nan or self.moments.inf)

    @property
    def signs(self) -> frozenset[float]:
        """The infinities it holds, without saying how many."""
        return frozenset(end for end in (self.moments.max, self.moments.min) if math.isinf(end))

    @property
    def single(self) -> bool:
        return math.prod(self.shape) == 1

    def extent(self, producer: str | None = None) -> Extent:
        """As it stands in a report."""
        m = self.moments
        ends = [abs(end) for end in (m.max, m.min) if math.isfinite(end)]
        largest = max(ends, default=0.0)
        return Extent(
            slot=self.slot,
            dtype=self.dtype,
            shape=list(self.shape),
            min=m.min,
            max=m.max,
            nan=m.nan,
            inf=m.inf,
            margin=greatest_finite(self.dtype) / largest if largest else math.inf,
            producer=producer,
        )

    def born(self, count: int | None = None, first: list[list[int]] | None = None) -> Born:
        """As it stands in a report, when it came out of a call that gave birth."""
        m = self.moments
        return Born(
            slot=self.slot,
            dtype=self.dtype,
            shape=list(self.shape),
            nan=m.nan,
            inf=m.inf,
            count=m.nan + m.inf if count is None else count,
            elements=math.prod(self.shape),
            first=first or [],
        )
