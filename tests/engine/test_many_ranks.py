"""Runs of several ranks: each is paired with its own, and the whole answer does not depend on who did what when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tensorprobe.engine import Rows, compare
from tensorprobe.engine.settings import CompareSettings
from tensorprobe.errors import SettingsError
from tests.builders.ranks import FILES, write_pair, write_ranks, written


def texts(rows: Rows) -> list[str]:
    """Rows as text: figures that were not measured are NaN, which equals nothing."""
    return [repr(row) for row in rows]


def test_the_rank_that_went_wrong_before_the_sum_is_named(tmp_path: Path) -> None:
    result = compare(*write_pair(tmp_path))
    assert result.divergence is not None
    assert (result.divergence.step, result.divergence.rank) == (1, 2)
    assert (result.divergence.call, result.divergence.status) == ("Torch.matmul.0.forward", "introduced")
    assert result.divergence.source is not None and result.divergence.source.line == 12
    own = {answer.rank: answer.divergence for answer in result.summary.ranks}
    assert {rank: one and one.call for rank, one in own.items()} == {
        0: "Distributed.all_reduce.0.forward",
        1: "Distributed.all_reduce.0.forward",
        2: "Torch.matmul.0.forward",
    }
    assert (len(result.rows), result.summary.buckets.paired, result.exit_code) == (42, 18, 1)


def test_equal_runs_agree_on_every_rank(tmp_path: Path) -> None:
    runs = [write_ranks(tmp_path / name) for name in ("a", "b")]
    result = compare(*runs, jobs=2)
    assert [answer.answer for answer in result.summary.ranks] == ["agrees"] * 3
    assert result.exit_code == 0


def test_the_order_in_which_files_were_written_changes_nothing(tmp_path: Path) -> None:
    results = []
    for name, settings in {
        "one": {},
        "other": {"ranks": (2, 0, 1), "steps": (1, 0)},
    }.items():
        root = tmp_path / name
        write_pair(root / "runs", **settings)
        compare(root / "runs" / "baseline", root / "runs" / "candidate", out=root / "out", jobs=2)
        content = written(root / "out")
        content["summary.json"] = content["summary.json"].replace(str(root).encode(), b"")
        results.append(content)
    assert results[0] == results[1]


@pytest.mark.parametrize(
    "settings",
    [{"jobs": 2}, {"jobs": 5, "threads": 1}, {"threads": 3}],
    ids=["jobs", "more jobs than ranks", "threads"],
)
@pytest.mark.parametrize("table", ["parquet", "csv"])
def test_jobs_and_threads_change_no_byte(settings: dict[str, Any], table: Any, tmp_path: Path) -> None:
    runs = write_pair(tmp_path)
    names = (f"result.{table}", *FILES[1:])
    compare(*runs, out=tmp_path / "out", table=table)
    expected = written(tmp_path / "out", names)
    compare(*runs, out=tmp_path / "out", table=table, **settings)
    assert written(tmp_path / "out", names) == expected


@pytest.mark.parametrize("ranks", ["1", "0-2"])
def test_rows_on_disk_are_those_in_memory(ranks: str, tmp_path: Path) -> None:
    runs = write_pair(tmp_path)
    expected = texts(compare(*runs, ranks=ranks).rows)
    assert len(expected) in (14, 42)
    assert texts(compare(*runs, ranks=ranks, out=tmp_path / "out").rows) == expected
    assert texts(compare(*runs, ranks=ranks, out=tmp_path / "out", table="csv").rows) == expected


def test_rows_in_memory_are_the_same_whoever_made_them(tmp_path: Path) -> None:
    runs = write_pair(tmp_path)
    here, there, nowhere = compare(*runs), compare(*runs, jobs=3), compare(*runs, jobs=3, keep_rows=False)
    assert texts(here.rows) == texts(there.rows)
    assert [row.rank for row in there.rows][::14] == [0, 1, 2]
    with pytest.raises(LookupError, match="were not kept"):
        list(nowhere.rows)


def test_steps_and_ranks_that_only_one_run_has_are_said(tmp_path: Path) -> None:
    baseline = write_ranks(tmp_path / "baseline", ranks=(0, 1, 3), steps=(0, 1))
    candidate = write_ranks(tmp_path / "candidate", ranks=(0, 1), steps=(1, 2))
    summary = compare(baseline, candidate, jobs=2).summary
    assert summary.steps == [1]
    assert summary.buckets.skipped == {
        "rank only in baseline": 6,
        "step only in baseline": 6,
        "step only in candidate": 6,
    }


@pytest.mark.parametrize("jobs", [1, 2])
def test_progress_counts_every_pair(jobs: int, tmp_path: Path) -> None:
    told: list[int] = []
    compare(*write_pair(tmp_path), jobs=jobs, progress=told.append)
    assert sum(told) == 18


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"jobs": 0}, "jobs is 0; expected a whole number, 1 or more"),
    ({"jobs": "2"}, "jobs is '2'; expected a whole number"),
    ({"threads": -1}, "threads is -1"),
    ({"engine": "rya"}, r"engine is 'rya'; expected local or ray. Did you mean 'ray'\?"),
    ({"table": "xlsx"}, "table is 'xlsx'; expected parquet or csv"),
    ({"address": "auto"}, r"address 'auto' is the address of a Ray cluster: it needs engine 'ray' \(--engine ray\)"),
    ({"engine": "ray", "jobs": 4}, "jobs is 4 with engine 'ray', but the cluster decides"),
    ({"steps": "x"}, "steps: 'x' is not a number"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG)
def test_wrong_settings_are_refused_before_anything_is_read(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        compare("no such run", "nor this", **settings)


def test_a_workbook_needs_a_folder() -> None:
    with pytest.raises(SettingsError, match="workbook writes a file: pass out"):
        compare("no such run", "nor this", workbook=True)


def test_processors_are_shared_out_among_the_ranks_that_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(12)))
    threads = {
        (jobs, tasks): CompareSettings(jobs=jobs).threads_for(tasks)
        for jobs, tasks in [(1, 8), (4, 8), (4, 2), (40, 40), (5, 0)]
    }
    assert threads == {(1, 8): 12, (4, 8): 3, (4, 2): 6, (40, 40): 1, (5, 0): 12}
    assert CompareSettings(jobs=4, threads=7).threads_for(8) == 7
    assert CompareSettings(engine="ray").threads_for(8) == 1
