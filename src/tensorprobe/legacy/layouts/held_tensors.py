"""The bytes of tensors between their way out of the ring and the call that names them: only then is their file known.

The same calls as `TensorStore`, with a number in place of an offset.
"""

from __future__ import annotations

from tensorprobe.legacy.layouts.rooms import Room, Rooms


class HeldTensors:
    """Tensors held in memory, by number; not held at all where a dump keeps nothing but their statistics."""

    def __init__(self, *, keep: bool = True, wants_digest: bool = False) -> None:
        self.wants_digest = wants_digest
        self.rooms = Rooms()
        self._keep = keep
        self._held: dict[int, Room] = {}
        self._pieces = bytearray()
        self._next = 0

    def store(self, data: memoryview, digest: str) -> int | None:
        """Copy the bytes; their number comes back."""
        if not self._keep:
            return None
        room = self.rooms.take(len(data))
        room.view[:] = data
        number, self._next = self._next, self._next + 1
        self._held[number] = room
        return number

    def begin(self) -> int:
        """Start a tensor that comes in pieces."""
        self._pieces = bytearray()
        return self._next

    def extend(self, data: memoryview) -> None:
        """Add a piece to the tensor that was begun."""
        if self._keep:
            self._pieces += data

    def end(self, number: int | None, digest: str, nbytes: int) -> int | None:
        """The tensor in pieces is complete."""
        pieces, self._pieces = self._pieces, bytearray()
        return self.store(memoryview(pieces), digest)

    def get(self, number: int) -> Room:
        """The bytes; valid until `discard`."""
        return self._held[number]

    def discard(self, number: int | None) -> None:
        """They are not needed any more."""
        room = self._held.pop(number, None) if number is not None else None
        if room is not None:
            self.rooms.give_back(room)
