"""Work is done once: runs are opened once in each process, a slice of rows is one pass, all ranks are settled together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tensorprobe.engine import compare, places, rank_task
from tensorprobe.engine.result import Rows
from tests.builders.ranks import write_pair


@pytest.fixture
def opens(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The name of each run that is opened."""
    opened: list[str] = []
    real = places.open_run

    def counted(path: Any, *more: Any) -> Any:
        opened.append(Path(path).name)
        return real(path, *more)

    monkeypatch.setattr(places, "open_run", counted)
    return opened


@pytest.mark.parametrize("out", [False, True])
def test_a_comparison_of_three_ranks_opens_each_run_once(opens: list[str], out: bool, tmp_path: Path) -> None:
    result = compare(*write_pair(tmp_path), out=tmp_path / "out" if out else None)
    assert len(result.summary.ranks) == 3
    assert opens == ["baseline", "candidate"]


def test_a_process_of_a_pool_opens_each_run_once(opens: list[str], tmp_path: Path) -> None:
    from tensorprobe.engine import tasks
    from tensorprobe.engine.plan import plan_tasks
    from tensorprobe.engine.settings import CompareSettings

    with places.open_sides(*write_pair(tmp_path), CompareSettings()) as sides:
        parcels = [tasks._pack(task, rows=False) for task in plan_tasks(sides, CompareSettings()).tasks]
    opens.clear()
    with tasks.answer_tasks(b"", lambda count: None) as answer:
        assert len([answer(parcel) for parcel in parcels]) == 3
    assert opens == ["baseline", "candidate"]


def test_a_map_is_parsed_once_for_all_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parsed: list[str] = []
    real = rank_task.parse_mapping
    monkeypatch.setattr(rank_task, "parse_mapping", lambda text, **named: parsed.append(text) or real(text, **named))
    (tmp_path / "map").write_text(f"Functional.silu = NPU.npu_silu  # {tmp_path}\n")
    result = compare(*write_pair(tmp_path), map=tmp_path / "map")
    assert len(result.summary.ranks) == 3
    assert len(parsed) == 1


class Counted(Rows):
    passes = 0

    def batches(self) -> Any:
        self.passes += 1
        return super().batches()


@pytest.mark.parametrize(
    "wanted",
    [slice(2, 9), slice(None), slice(None, None, -1), slice(40, 3, -7), slice(-5, None), slice(9, 2), slice(1, 42, 5)],
    ids=str,
)
def test_a_slice_of_rows_is_one_pass(wanted: slice, tmp_path: Path) -> None:
    kept = list(compare(*write_pair(tmp_path)).rows.batches())
    assert len(kept) > 2
    rows = Counted(kept, sum(batch.num_rows for batch in kept))
    assert repr(rows[wanted]) == repr(list(rows)[wanted])
    assert rows.passes <= 2  # one for the slice, one for the list
    assert rows[3:5][1].call == rows[4].call
