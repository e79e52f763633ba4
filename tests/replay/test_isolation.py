"""How much memory and time a replay may use."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import numpy
import pytest

from tensorprobe.model import Slot
from tensorprobe.record.blob import Blob, MappingPool
from tensorprobe.replay import isolation
from tensorprobe.work.limits import at_most


def test_a_quarter_is_that_of_the_container_where_it_has_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [tmp_path / "memory.max", tmp_path / "memory.limit_in_bytes"]
    monkeypatch.setattr(isolation, "_CONTAINER", [str(path) for path in limits])
    assert isolation.default_replay_bytes() == machine // 4
    limits[0].write_text("max\n")
    limits[1].write_text("9223372036854771712\n")
    assert isolation.default_replay_bytes() == machine // 4
    limits[0].write_text(f"{1 << 28}\n")
    assert isolation.default_replay_bytes() == 1 << 26


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are set on Linux")
def test_a_file_larger_than_the_memory_of_a_call_is_mapped(tmp_path: Path) -> None:
    with (tmp_path / "tensors.bin").open("wb") as file:
        file.truncate(1 << 30)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    slot = Slot(name="input.0", dtype="float32", shape=(4,), device="cpu", nbytes=16, offset=0)
    with at_most(64 << 20):
        held = Blob(tmp_path, (), MappingPool()).read(slot)
        assert len(held) == 16
        with pytest.raises(MemoryError):
            numpy.ones(256 << 20, dtype=numpy.uint8)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
