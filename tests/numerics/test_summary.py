"""The Python face of the kernel: moments of addresses, buffers, batches and pieces, and their form in JSON."""

from __future__ import annotations

import json
import math
import mmap
import struct
from array import array
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorprobe.model import DTYPES, Summary
from tensorprobe.numerics.summary import (
    Moments,
    join_moments,
    json_number,
    json_summary,
    summarize_address,
    summarize_batch,
    summarize_buffer,
)

from .oracle import assert_figures, cases, make_bytes, placed, values_of

FLOAT32 = DTYPES["float32"]


def test_a_small_tensor_by_hand() -> None:
    moments = summarize_buffer(struct.pack("<5f", 1, 2, math.nan, -math.inf, 4), FLOAT32)
    assert moments == Moments(max=4.0, min=-math.inf, mean=7 / 3, norm=math.sqrt(21), nan=1, inf=1)
    assert type(moments.nan) is int and type(moments.mean) is float


@settings(max_examples=60, deadline=None)
@given(st.lists(cases, max_size=8))
def test_buffer_address_and_batch_give_the_same_moments(chosen: list) -> None:
    tensors = [(dtype, count, make_bytes(dtype, count, flavour, seed)) for dtype, count, flavour, seed, _ in chosen]
    kept = [array("b", content) for _, _, content in tensors]
    rows = [(place.buffer_info()[0], count, dtype.code) for place, (dtype, count, _) in zip(kept, tensors, strict=True)]
    batch = summarize_batch(rows)
    assert all(type(moments) is Moments for moments in batch)
    assert repr(batch) == repr([summarize_buffer(content, dtype) for dtype, _, content in tensors])
    one_by_one = [
        summarize_address(address, count, dtype)
        for (address, count, _), (dtype, _, _) in zip(rows, tensors, strict=True)
    ]
    assert repr(batch) == repr(one_by_one)


def test_an_empty_batch_is_an_empty_list() -> None:
    assert summarize_batch([]) == []


def test_a_row_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match="a row of a batch is"):
        summarize_batch([(64, 1)])  # type: ignore[list-item]


def test_a_bad_row_of_a_batch_is_named() -> None:
    with pytest.raises(ValueError, match="row 1: unknown dtype code: 99"):
        summarize_batch([(0, 0, 0), (0, 0, 99)])


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview, lambda content: array("b", content)])
def test_every_kind_of_buffer_is_read(make) -> None:
    content = struct.pack("<3f", 1, 2, 3)
    assert summarize_buffer(make(content), FLOAT32).max == 3.0


def test_a_read_only_memory_map_is_read(tmp_path) -> None:
    path = tmp_path / "tensor.bin"
    path.write_bytes(struct.pack("<3f", 1, 2, 3))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert summarize_buffer(mapped, FLOAT32).mean == 2.0
        # The map can be closed only if no view of it was left behind.
        assert summarize_buffer(memoryview(mapped)[4:], FLOAT32).min == 2.0


def test_a_buffer_is_released_again() -> None:
    content = bytearray(8)
    summarize_buffer(content, FLOAT32)
    content.append(1)  # BufferError if the buffer were still held
    assert len(content) == 9


def test_a_buffer_with_an_incomplete_element_is_refused() -> None:
    with pytest.raises(ValueError, match=r"7 bytes are not a whole number of float32 elements \(4 bytes each\)"):
        summarize_buffer(bytes(7), FLOAT32)


def test_bytes_that_are_not_in_one_piece_are_refused() -> None:
    with pytest.raises(BufferError):
        summarize_buffer(memoryview(bytes(16))[::2], FLOAT32)
    with pytest.raises(TypeError):
        summarize_buffer("text", FLOAT32)


@settings(max_examples=100, deadline=None)
@given(case=cases, cuts=st.lists(st.integers(0, 5000), max_size=3))
def test_moments_of_pieces_join_to_the_moments_of_the_whole(case, cuts: list[int]) -> None:
    dtype, count, flavour, seed, _ = case
    content = make_bytes(dtype, count, flavour, seed)
    borders = [0, *sorted(min(cut, count) for cut in cuts), count]
    parts = []
    for start, stop in pairwise(borders):
        piece = content[start * dtype.itemsize : stop * dtype.itemsize]
        parts.append((summarize_buffer(piece, dtype), (stop - start) * (2 if dtype.kind == "complex" else 1)))
    assert_figures(join_moments(parts), values_of(content, dtype))


def test_joining_nothing_gives_the_moments_of_nothing() -> None:
    assert repr(tuple(join_moments([]))) == "(nan, nan, nan, nan, 0, 0)"


def test_moments_become_a_summary() -> None:
    with placed(struct.pack("<2f", 3, 4)) as address:
        figures = tuple(summarize_address(address, 2, FLOAT32))
    assert Summary(*figures) == Summary(max=4.0, min=3.0, mean=3.5, norm=5.0, nan=0, inf=0)


@pytest.mark.parametrize(
    ("number", "written"),
    [(1.5, 1.5), (0, 0), (math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity"), (1.7e308, 1.7e308)],
)
def test_numbers_json_cannot_write_are_named(number: float, written: float | str) -> None:
    assert json_number(number) == written


def test_a_summary_survives_standard_json() -> None:
    moments = summarize_buffer(struct.pack("<3f", math.inf, math.nan, -math.inf), FLOAT32)
    line = json.dumps(json_summary(moments), allow_nan=False)
    assert line == '["Infinity", "-Infinity", "NaN", "NaN", 1, 2]'
    read = msgspec.json.decode(line, type=Summary)
    assert (read.max, read.min, read.nan, read.inf) == (math.inf, -math.inf, 1, 2)
    assert isinstance(read.mean, float) and math.isnan(read.mean)
