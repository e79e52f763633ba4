"""Planted births on a device: wrong kernels are told from numbers that are too large; training programs as on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

# At the end: names of other files in that folder are those of folders of tests.
sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))

from overflow_births import on_device
from overflow_case import watch_planted
from overflow_sim import SIM
from overflow_training import TRAINING


@pytest.mark.parametrize("name", SIM)
def test_a_wrong_kernel_is_named_and_nothing_else(npu: str, name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    outcome = watch_planted(SIM[name], tmp_path)
    assert outcome.error == ""
    assert outcome.told == outcome.expected


@pytest.mark.parametrize("name", TRAINING)
def test_a_birth_in_training_is_named_on_a_device_too(npu: str, name: str, tmp_path: Path) -> None:
    (outcome,) = on_device(tmp_path, (name,))
    assert outcome.error == ""
    assert outcome.told == outcome.expected
