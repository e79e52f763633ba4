"""The digest of a tensor: xxh3-128 of its stored bytes, as 32 hexadecimal digits.

Equal bytes give equal digests, and the order of the bytes counts. It recognises content; it does not resist forgery.
"""

from __future__ import annotations

from typing import Any

import xxhash


def digest(buffer: Any) -> str:
    """The digest of a bytes-like object whose bytes are in one piece."""
    return xxhash.xxh3_128_hexdigest(buffer)


class RunningDigest:
    """The digest of bytes that come in pieces: the same as `digest` of all of them together."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, piece: Any) -> None:
        """Take the next piece."""
        self._state.update(piece)

    def hexdigest(self) -> str:
        """The digest of what was taken so far."""
        return self._state.hexdigest()
