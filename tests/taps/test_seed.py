"""`seed_all`: every source of randomness, and nothing of the user's switched off."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch

import tensorprobe
from tensorprobe.errors import SettingsError

VARIABLES = ("PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG", "HCCL_DETERMINISTIC")


@pytest.fixture(autouse=True)
def everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    before = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
    cudnn = (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn


def draw() -> tuple[float, float, list[float]]:
    return random.random(), float(numpy.random.rand()), torch.rand(3).tolist()


def test_python_numpy_and_torch_draw_the_same_again() -> None:
    tensorprobe.seed_all(5)
    first = draw()
    assert draw() != first
    tensorprobe.seed_all(5)
    assert draw() == first
    tensorprobe.seed_all(6)
    assert draw() != first
    assert os.environ["PYTHONHASHSEED"] == "6"


def test_default_seed_is_1234() -> None:
    tensorprobe.seed_all()
    first = draw()
    tensorprobe.seed_all(1234)
    assert draw() == first


def test_deterministic_mode_sets_what_it_needs() -> None:
    tensorprobe.seed_all(mode=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert os.environ["HCCL_DETERMINISTIC"] == "true"


def test_what_the_user_has_set_stays_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    tensorprobe.seed_all(mode=False)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.deterministic
    tensorprobe.seed_all(mode=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_warn_only_of_the_user_stays_on() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    tensorprobe.seed_all(mode=True)
    assert torch.is_deterministic_algorithms_warn_only_enabled()


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, "7", None, True])
def test_seed_that_is_none_is_refused(seed: Any) -> None:
    with pytest.raises(SettingsError, match="it must be a whole number from 0 to 4294967295"):
        tensorprobe.seed_all(seed)


def test_mode_that_is_no_answer_is_refused() -> None:
    with pytest.raises(SettingsError, match="mode is 1; it must be True or False"):
        tensorprobe.seed_all(1, mode=1)  # type: ignore[arg-type]
