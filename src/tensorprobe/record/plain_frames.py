"""What the recorder does for nearly every call, in C where that was built.

`PlainFrames.take` records the frames at the beginning of what came through the pipe, up to the first that is not plain, as
`Recorder` would have: the same lines, bytes and tokens. That one, and all where nothing was built, is left to `Recorder`.
"""

from __future__ import annotations

from array import array
from functools import cache
from types import ModuleType
from typing import Any

from tensorprobe.numerics.native import extension
from tensorprobe.numerics.summary import Moments, digest
from tensorprobe.record.blob_writer import BUFFER_BYTES
from tensorprobe.record.ring import Ring
from tensorprobe.record.step_files import StepFiles, Stored

_EXTENSION = "tensorprobe.record._frames"
_EXPONENTS = range(-292, 325)


def load() -> ModuleType | None:
    """Return the extension; None if it was not built or native code is switched off."""
    return extension(_EXTENSION)[0]


@cache
def powers_of_ten() -> bytes:
    """Return 10^k for each k that a double may need, as the upper 128 bits, rounded up: lower half first."""
    return b"".join(map(_power, _EXPONENTS))


def _power(exponent: int) -> bytes:
    if exponent < 0:
        divisor = 10**-exponent
        bits = -(-(1 << (127 + divisor.bit_length())) // divisor)
    else:
        number = 10**exponent
        spare = 128 - number.bit_length()
        bits = number << spare if spare >= 0 else -(-number >> -spare)
    return array("Q", [bits & (1 << 64) - 1, bits >> 64]).tobytes()


class PlainFrames:
    """Records plain frames into `files`. `stored` and `tokens`, a single number, are those of the recorder."""

    def __init__(
        self, native: ModuleType, files: StepFiles, ring: Ring, stored: dict[int, Stored], tokens: array[int]
    ) -> None:
        self._files, self._take = files, native.take
        self._recorder: Any = native.recorder(
            stored,
            tokens,
            tokens.buffer_info()[0],
            digest,
            files.tensors.store,
            Moments,
            Stored,
            ring.address,
            ring.size_bytes,
            ring.header_address,
            BUFFER_BYTES,
            files.tensors.keeps_data,
            powers_of_ten(),
        )

    def take(self, waiting: bytearray, at: int) -> int:
        """Record plain frames from `at` on. Return where the first one begins that was not recorded."""
        blob, limit = self._files.tensors.room()
        at, lines, calls = self._take(self._recorder, waiting, at, blob, limit)
        if calls:
            self._files.add_lines(lines, calls)
        return int(at)
