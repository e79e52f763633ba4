"""The digest is xxh3-128 of the bytes, whole or in pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorprobe.numerics.summary import RunningDigest, digest


def test_digests_are_those_of_xxh3_128() -> None:
    assert digest(b"") == "99aa06d3014798d86001c324468d497f"
    assert digest(b"abc") == "06b05ab6733a618578af5f94892f3950"


@given(st.lists(st.binary(max_size=400), max_size=6))
def test_pieces_give_the_digest_of_the_whole(pieces: list[bytes]) -> None:
    running = RunningDigest()
    for piece in pieces:
        running.update(memoryview(piece))
    assert running.hexdigest() == digest(b"".join(pieces))


def test_the_order_of_the_bytes_counts() -> None:
    assert digest(bytes([1, 2])) != digest(bytes([2, 1]))


def test_views_are_read_and_broken_ones_refused() -> None:
    content = bytearray(range(64))
    assert digest(memoryview(content)[8:16]) == digest(bytes(range(8, 16)))
    with pytest.raises(BufferError):
        digest(memoryview(content)[::2])
