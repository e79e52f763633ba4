"""How differently two tensors have changed since the step before."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tensorprobe.pairing.diff import measure_update


def test_updates_that_only_noise_tells_apart_are_alike() -> None:
    random = np.random.default_rng(3)
    before = random.normal(size=4096).astype(np.float32)
    change = (0.01 * np.sign(random.normal(size=4096))).astype(np.float32)
    alike = measure_update((before, before), (before + change, before + change * np.float32(1.0001)), 1.2e-7)
    assert alike.off == 0 and alike.factor == pytest.approx(1.0001, abs=1e-5) and alike.size == pytest.approx(0.01, 0.1)
    scaled = measure_update((before, before), (before + change, (before + change) * np.float32(1.01)), 1.2e-7)
    assert scaled.off > 0.9
    slower = measure_update((before, before), (before + change, before + change * np.float32(0.95)), 1.2e-7)
    assert slower.off == 1 and slower.factor == pytest.approx(0.95, abs=1e-3)


def test_a_change_below_the_last_place_has_no_factor() -> None:
    before = np.ones(64, np.float32)
    assert math.isnan(measure_update((before, before), (before, before + np.float32(1e-7)), 1.2e-7).factor)


def noisy_update(scale: float = 1.0) -> tuple[float, float | None]:
    """Half of the gradients are rounding noise, and the optimizer makes steps of one size of them all. Return `off` and `slope`."""
    rng = np.random.default_rng(0)
    before, signs = rng.standard_normal(1000) * 0.1, rng.choice([-1.0, 1.0], (3, 1000))
    noise = np.arange(1000) < 500
    ours, theirs = (np.where(noise, side * 1e-9, signs[2]) for side in signs[:2])
    now = before + 1e-3 * np.sign(ours), (before + 1e-3 * np.sign(theirs)) * scale
    update = measure_update((before, before), now, 1.2e-7, (ours, theirs))
    assert measure_update((before, before), now, 1.2e-7).off > 0.2
    return update.off, update.slope


def test_elements_whose_gradients_are_noise_may_move_otherwise_but_not_further() -> None:
    off, slope = noisy_update()
    assert off == 0 and slope is not None and abs(slope - 1) < 1e-12
    off, slope = noisy_update(1.1)
    assert off > 0.6 and slope is not None and abs(slope - 1.1) < 1e-12


def test_where_every_gradient_is_noise_nothing_is_known_of_the_slope() -> None:
    zeros, one = np.zeros(100), np.ones(100)
    update = measure_update((zeros, zeros), (one, -one), 1.2e-7, (one, -one))
    assert update.off == 0 and math.isnan(update.factor) and math.isnan(update.slope or 0.0)


def test_changes_are_as_near_as_the_gradients_or_further_apart() -> None:
    rng = np.random.default_rng(0)
    before, ours, other = (rng.standard_normal(1000) for _ in range(3))
    rounded, noisy = ours * (1 + 1e-7 * other), ours * (1 + 1e-3 * other)

    def gain(made_of: np.ndarray, recorded: np.ndarray) -> float:
        now = before + 0.01 * ours, before + 0.01 * made_of
        return measure_update((before, before), now, 1.2e-16, (ours, recorded)).gain

    assert 0.5 < gain(rounded, rounded) < 2
    assert gain(noisy, rounded) > 3000
    assert gain(noisy, noisy) < 2
    assert math.isnan(measure_update((before, before), (before + ours, before + rounded), 1.2e-16).gain)
    zeros = np.zeros(1000)
    assert math.isnan(measure_update((before, before), (before + ours, before + rounded), 1.2e-16, (zeros, zeros)).gain)
