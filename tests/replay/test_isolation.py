"""How much memory and time a replay may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tensorprobe.replay import isolation


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
