"""A sketch: eight numbers that tell how far apart two tensors are, whatever their order, and the same on every machine."""

from __future__ import annotations

import base64

import numpy
import pytest

from tensorprobe.numerics.sketch import estimate_distance, sketch_of

RANDOM = numpy.random.default_rng(0)


def distance(one: numpy.ndarray, other: numpy.ndarray) -> float:
    sketches = sketch_of(one), sketch_of(other)
    assert sketches[0] is not None and sketches[1] is not None
    return estimate_distance(*sketches)


@pytest.mark.parametrize("size", [8, 1000, 300_000])
@pytest.mark.parametrize("error", [1e-1, 1e-3, 1e-5])
def test_the_distance_is_about_right(size: int, error: float) -> None:
    ratios = []
    for _ in range(5):
        values = RANDOM.normal(size=size).astype("float32")
        moved = values + error * RANDOM.normal(size=size).astype("float32")
        ratios.append(distance(values, moved) / float(numpy.linalg.norm(moved.astype("float64") - values)))
    assert all(0.2 < ratio < 2.3 for ratio in ratios)
    assert 0.6 < sum(ratios) / len(ratios) < 1.5


def test_one_wrong_element_is_measured_exactly() -> None:
    values = RANDOM.normal(size=4096)
    wrong = values.copy()
    wrong[1234] += 3.0
    assert distance(values, wrong) == pytest.approx(3.0, rel=1e-4)


@pytest.mark.parametrize(
    "permute", [lambda v: v[::-1], lambda v: numpy.roll(v, 1), lambda v: v.reshape(64, 64).T, lambda v: -v]
)
def test_the_same_numbers_in_other_places_are_far_apart(permute: object) -> None:
    values = RANDOM.normal(size=4096)
    values -= values.mean()
    assert distance(values, permute(values)) > 0.3 * float(numpy.linalg.norm(values))  # type: ignore[operator]


def test_equal_and_nearly_equal_tensors_have_no_distance() -> None:
    values = RANDOM.normal(size=1000)
    assert numpy.isnan(distance(values, values.copy()))
    assert numpy.isnan(distance(values, values * (1 + 1e-12)))


def test_numbers_that_cannot_be_summed_up() -> None:
    assert sketch_of(numpy.array([1.0, 2.0])) is None
    assert sketch_of(numpy.full(9, 1e300)) is None
    holes = numpy.array([1.0, numpy.nan, numpy.inf, 4.0])
    assert sketch_of(holes) == sketch_of(numpy.array([1.0, 0.0, 0.0, 4.0]))
    assert sketch_of(numpy.array([1 + 2j, 3 - 1j])) == sketch_of(numpy.array([1.0, 2.0, 3.0, -1.0]))
    assert sketch_of(numpy.array([True, False, True])) == sketch_of(numpy.array([1, 0, 1]))


def mix(position: int) -> int:
    """SplitMix64 in whole numbers of Python: the four upper bits."""
    mask = (1 << 64) - 1
    z = position * 0x9E3779B97F4A7C15 & mask
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
    return ((z ^ z >> 27) * 0x94D049BB133111EB & mask) >> 60


def test_its_bytes_are_fixed() -> None:
    sketch = sketch_of(numpy.arange(100, dtype="float32"))
    expected = [0.0] * 8
    for position in range(100):
        drawn = mix(position + 1)
        expected[drawn % 8] += position if drawn >= 8 else -position
    assert sketch is not None
    assert numpy.frombuffer(base64.b64decode(sketch), "<f4").tolist() == expected
    assert expected[:3] == [-20.0, 137.0, -288.0]


@pytest.mark.parametrize("text", ["", "?", "AAAA", base64.b64encode(b"\x00" * 33).decode()])
def test_a_sketch_from_a_file_is_not_trusted(text: str) -> None:
    good = sketch_of(numpy.arange(9.0))
    assert good is not None and numpy.isnan(estimate_distance(text, good))
