"""Does the watch raise false alarms, and does it change a training? Real architectures, for bench.overflow.

With and without half precision.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from bench.overflow.case import told_arrival, told_first
from bench.zoo import MODELS
from tensorprobe.watches.overflow import OverflowWatch

STEPS = 2
NUMBERS = {"fp32": None, "bf16 autocast": torch.bfloat16, "fp16 autocast with GradScaler": torch.float16}


def train(name: str, dtype: torch.dtype | None, folder: Path | None) -> tuple[list[float], OverflowWatch | None]:
    """The losses of a training, watched when there is a folder for what the watch says."""
    torch.manual_seed(5)
    model, loss = MODELS[name]()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
    watch = None if folder is None else OverflowWatch(model, out=folder).start()
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            value = loss()
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(value.item())
    if watch is not None:
        watch.stop()
    return losses, watch


def clean_rows(names: list[str]) -> Iterator[dict[str, Any]]:
    """A row for each model and kind of numbers: what was told, and whether the losses stayed the same."""
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    for name in names:
        for numbers, dtype in NUMBERS.items():
            with tempfile.TemporaryDirectory(prefix="clean-") as folder:
                plain, _ = train(name, dtype, None)
                losses, watch = train(name, dtype, Path(folder))
            assert watch is not None
            found = watch.result.summary
            told = [told_first(first) for first in found.first_nonfinite] + [
                told_arrival(each) for each in found.arrivals
            ]
            yield {
                "model": name,
                "numbers": numbers,
                "calls": found.calls,
                "told": told,
                "intended": found.intended,
                "skipped": len(found.skipped_by_scaler),
                "changed_training": repr(plain) != repr(losses),
                "notes": found.notes,
            }
