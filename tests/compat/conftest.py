"""The older packages keep their state in the process: each test begins with a fresh one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorprobe.legacy.ptdbg import dump


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    state = dump._State()
    monkeypatch.setattr(dump, "_state", state)
    yield
    assert state.probe is None, "the test left its dump on"
