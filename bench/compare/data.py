"""Makes the dumps that the compare benchmark reads: a baseline and a candidate, in our layout and in the peer's.

Both layouts hold the same tensors. A tensor of the baseline is a window of one pool of normal noise, scaled; that of the
candidate is a little nearer to zero in every second element: by one unit in the last place of float32, which is as much as
equal tensors may differ when nothing is known of where they come from. One output of the candidate is 1.5 times too large: the
planted fault. The same seed gives the same bytes. (A short bfloat16 vector may come out equal on both sides: the noise is far
below its rounding.)

    <work>/tensorprobe-compare-<size>/ours/{baseline,candidate,same}     same: hard links to the baseline's files
    <work>/tensorprobe-compare-<size>/peer/{baseline,candidate}/step0/rank0/dump.json …
    <work>/tensorprobe-compare-<size>/made.json                           written last: what the folder was made for
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import torch

from bench.compare.layouts import NativeLayout, PeerLayout, StoredSlot
from bench.compare.plan import SIZES, Dumps, PlannedCall, PlannedSlot, Size, describe_dumps, list_calls
from tensorprobe.model import DTYPES
from tensorprobe.numerics.summary import Moments, digest, summarize_address

VERSION = 3
"""To be raised whenever the same size would give other bytes."""
SEED = 20240
NOISE = {"float32": 2.0**-24, "bfloat16": 1e-6}
FAULT = 1.5
SIDES = ("baseline", "candidate")
BOUND = 4.87654321
"""Greatest and least of a few million normal values, as a multiple of their deviation."""
_WINDOWS = 1 << 20
"""How many places a window of the pool may start at."""


def make_dumps(size: Size, work: Path) -> None:
    """Makes the dumps of a size, unless they stand there already."""
    dumps, calls = describe_dumps(size, work), list_calls(size)
    made_for = {"version": VERSION, "seed": SEED, **dataclasses.asdict(size)}
    del made_for["variants"]  # they change nothing of what is on disk
    marker = dumps.folder / "made.json"
    if marker.is_file() and json.loads(marker.read_text()) == made_for:
        return
    shutil.rmtree(dumps.folder, ignore_errors=True)
    for side in SIDES:
        _write_side(size, calls, dumps, side)
    shutil.copytree(dumps.ours("baseline"), dumps.ours("same"), copy_function=os.link)
    marker.write_text(json.dumps(made_for))
    os.sync()  # writing back must not go on during the measurements


def _write_side(size: Size, calls: list[PlannedCall], dumps: Dumps, side: str) -> None:
    noisy = side == "candidate"
    layouts: list[NativeLayout | PeerLayout] = [NativeLayout(dumps.ours(side), values=size.values)]
    if size.peer:
        layouts.append(PeerLayout(dumps.peer(side), values=size.values))
    for call, stored in _Values(size, calls, faulty=dumps.planted if noisy else None, noisy=noisy).all_calls():
        for layout in layouts:
            layout.add(call, stored)
    for layout in layouts:
        layout.close()


class _Values:
    """Gives each slot its tensor, or its statistics when the size has no tensors."""

    def __init__(self, size: Size, calls: list[PlannedCall], *, faulty: str | None, noisy: bool) -> None:
        self._size, self._calls, self._faulty, self._noisy = size, calls, faulty, noisy
        random = torch.Generator().manual_seed(SEED)
        largest = max(slot.count for call in calls for slot in call.slots) if size.values else 0
        self._pool = torch.randn(largest + _WINDOWS, generator=random)
        chosen = torch.randint(0, 2, (largest + _WINDOWS,), generator=random)
        self._factors = {dtype: 1 - noise * chosen for dtype, noise in NOISE.items() if dtype in size.layers}
        # Of each figure of a summary by itself: neither next to nothing nor far out, because the figures of a call's
        # inputs and outputs stand for errors that belong together.
        signs = torch.randn(_WINDOWS + 4, generator=random).sign()
        wobbles = 1 + NOISE["float32"] * signs.double() * (0.5 + torch.rand(_WINDOWS + 4, generator=random))
        self._wobbles: list[float] = [] if size.values else wobbles.tolist()

    def all_calls(self) -> Iterator[tuple[PlannedCall, list[StoredSlot]]]:
        """Each call with what is to be stored of its slots."""
        number = 0
        for call in self._calls:
            stored = []
            for slot in call.slots:
                factor = FAULT if call.name == self._faulty and slot.name == "output.0" else 1.0
                make = self._with_values if self._size.values else self._without
                stored.append(make(slot, number, factor))
                number += 1
            yield call, stored

    def _with_values(self, slot: PlannedSlot, number: int, factor: float) -> StoredSlot:
        start, count = _window(number), slot.count
        # The scale makes tensors differ whose windows begin at the same place.
        tensor = self._pool[start : start + count] * (0.5 + 1e-6 * number)
        if self._noisy:
            noise = _window(number + 7)
            tensor *= self._factors[slot.dtype][noise : noise + count]
        tensor = (tensor * factor).to(getattr(torch, slot.dtype)).reshape(slot.shape)
        raw = tensor.view(torch.uint8).reshape(-1).numpy()
        moments = summarize_address(tensor.data_ptr(), count, DTYPES[slot.dtype])
        return StoredSlot(slot, moments, digest(raw), raw, tensor)

    def _without(self, slot: PlannedSlot, number: int, factor: float) -> StoredSlot:
        """Statistics as normal noise of this size would have them, without making it."""
        scale = factor * (0.5 + 1e-6 * number)
        high, low, mean, norm = (BOUND, -BOUND, (-1) ** number * 0.3 / slot.count**0.5, slot.count**0.5)
        a, b, c, d = self._wobble(number)
        moments = Moments(a * scale * high, b * scale * low, c * scale * mean, d * scale * norm, 0, 0)
        return StoredSlot(slot, moments, digest(struct.pack("4d", *moments[:4])), None, None)

    def _wobble(self, number: int) -> tuple[float, float, float, float]:
        """Noise for four figures."""
        if not self._noisy:
            return 1.0, 1.0, 1.0, 1.0
        place = _window(number)
        a, b, c, d = self._wobbles[place : place + 4]
        return a, b, c, d


def _window(number: int) -> int:
    """Where the window of this tensor starts: spread over the pool, by a multiplier that is prime."""
    return number * 611_953 % _WINDOWS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("size", choices=list(SIZES))
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--peer", action=argparse.BooleanOptionalAction, help="also in the peer's layout")
    options = parser.parse_args()
    gc.disable()  # looking through the planned calls again and again would take most of the time
    make_dumps(dataclasses.replace(SIZES[options.size], peer=options.peer), options.work)


if __name__ == "__main__":
    main()
