"""Planted overflows on a device: wrong kernels are told from numbers that are too large; training programs as on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.watches.overflow.planted import SIM, TRAINING, assert_told, on_device, watch_planted

OF_A_DEVICE = [
    name for name in TRAINING if any(word in name for word in ("scale", "adamw", "checkpoint", "custom", "deep"))
]
"""What takes other ways on a device: scaling, optimizers, and the engine's thread."""


@pytest.mark.parametrize("name", SIM)
def test_a_wrong_kernel_is_named_and_nothing_else(npu: str, name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    assert_told(watch_planted(SIM[name], tmp_path))


@pytest.mark.parametrize("name", OF_A_DEVICE)
def test_an_overflow_in_training_is_named_on_a_device_too(npu: str, name: str, tmp_path: Path) -> None:
    (outcome,) = on_device(tmp_path, (name,))
    assert_told(outcome)
