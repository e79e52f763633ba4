"""Order-preserving alignment: always valid, the longest while it says exact, bounded in time whatever comes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorprobe.pairing.codes import join, pack_both
from tensorprobe.pairing.sequence import Matches, align_sequences, longest_increasing

SEQUENCES = st.integers(1, 12).flatmap(lambda most: st.lists(st.integers(0, most), max_size=40))


def aligned(a: list[int], b: list[int], **limits: int) -> Matches:
    matches = align_sequences(np.array(a, dtype=np.int64), np.array(b, dtype=np.int64), **limits)
    assert [a[place] for place in matches.baseline] == [b[place] for place in matches.candidate]
    for places in matches[:2]:
        assert (np.diff(places) > 0).all()
    return matches


def longest_common(a: list[int], b: list[int]) -> int:
    row = [0] * (len(b) + 1)
    for x in a:
        before = row[:]
        for j, y in enumerate(b):
            row[j + 1] = before[j] + 1 if x == y else max(before[j + 1], row[j])
    return row[-1]


@given(SEQUENCES, SEQUENCES)
def test_exact_is_the_longest(a: list[int], b: list[int]) -> None:
    matches = aligned(a, b)
    assert matches.method == "exact"
    assert len(matches.baseline) == longest_common(a, b)


@given(SEQUENCES, SEQUENCES, st.integers(0, 4))
def test_beyond_the_limit_it_is_still_an_alignment_and_says_so(a: list[int], b: list[int], limit: int) -> None:
    matches = aligned(a, b, most_edits=limit)
    longest = longest_common(a, b)
    assert len(matches.baseline) <= longest
    if matches.method == "exact":
        assert len(matches.baseline) == longest


@given(SEQUENCES)
def test_a_sequence_is_its_own_partner(a: list[int]) -> None:
    assert aligned(a, a).baseline.tolist() == list(range(len(a)))


@given(st.lists(st.integers(0, 30), max_size=60))
def test_longest_increasing(values: list[int]) -> None:
    chosen = longest_increasing(np.array(values, dtype=np.int64))
    picked = [values[place] for place in chosen]
    assert all(x < y for x, y in pairwise(picked))
    assert len(picked) == longest_common(values, sorted(set(values)))


@given(SEQUENCES, SEQUENCES)
def test_join_pairs_equal_codes_in_order(a: list[int], b: list[int]) -> None:
    rows, others = join(np.array(a, dtype=np.int64), np.array(b, dtype=np.int64))
    assert [a[row] for row in rows] == [b[row] for row in others]
    assert len(set(rows.tolist())) == len(set(others.tolist())) == len(rows)
    assert len(rows) == sum(min(a.count(code), b.count(code)) for code in set(a))
    assert rows.tolist() == sorted(rows.tolist())


def test_codes_are_told_apart_beyond_63_bits() -> None:
    columns = [np.array([0, 1 << 40, 1 << 40], dtype=np.int64), np.array([1 << 40, 0, 1 << 40], dtype=np.int64)]
    left, right = pack_both(columns, columns)
    assert left.tolist() == right.tolist()
    assert len(set(left.tolist())) == 3


RANDOM = np.random.default_rng(7)
MANY = 15_000


@pytest.mark.parametrize(
    ("a", "b", "least"),
    [
        pytest.param(np.zeros(MANY), np.zeros(2 * MANY), MANY, id="all equal, many inserted"),
        pytest.param(np.arange(MANY), np.arange(MANY) + MANY, 0, id="nothing shared"),
        pytest.param(np.arange(MANY), np.arange(MANY)[::-1], 1, id="reversed"),
        pytest.param(np.arange(MANY), RANDOM.permutation(MANY), 100, id="shuffled"),
        pytest.param(RANDOM.integers(2, size=MANY), RANDOM.integers(2, size=MANY), MANY // 3, id="two numbers"),
        pytest.param(np.tile(np.arange(30), MANY // 30), np.arange(MANY) % 31, MANY // 30, id="two periods"),
        pytest.param(np.arange(MANY), np.repeat(np.arange(MANY), 2), MANY, id="every call twice"),
    ],
)
def test_hard_cases_end(a: np.ndarray, b: np.ndarray, least: int) -> None:
    matches = align_sequences(a.astype(np.int64), b.astype(np.int64))
    assert len(matches.baseline) >= least
    assert np.array_equal(a[matches.baseline], b[matches.candidate])


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_few_insertions_into_a_long_sequence_are_found(data: st.DataObject) -> None:
    a = [*range(5000)] * 2
    b = list(a)
    for place in data.draw(st.lists(st.integers(0, len(a)), max_size=30)):
        b.insert(place, data.draw(st.integers(0, 4999)))
    matches = aligned(a, b)
    assert matches.method == "exact"
    assert len(matches.baseline) == len(a)


def test_many_edits_are_followed_step_by_step() -> None:
    a = np.tile(np.arange(40), 200)
    b = np.delete(a, RANDOM.choice(len(a), 400, replace=False))
    matches = align_sequences(a, b, most_edits=100)
    assert matches.method == "approximate"
    assert len(matches.baseline) >= len(b) - 50
