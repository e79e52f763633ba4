"""The output folder: whole or untouched, and nobody else's files."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorprobe.engine import compare, output
from tensorprobe.errors import CannotCompare, RunDamaged, SettingsError
from tensorprobe.record.reader import NativeSegment
from tests.builders.ranks import FILES, listed, write_pair, written
from tests.builders.runs import call, write


def test_files_of_others_stay_and_ours_are_replaced(tmp_path: Path) -> None:
    baseline, candidate = write_pair(tmp_path)
    out = tmp_path / "deep" / "out"
    compare(baseline, baseline, out=out)
    (out / "notes.txt").write_text("mine")
    (out / "result.csv.bak").write_text("mine")
    agreeing = written(out)
    compare(baseline, candidate, out=out, jobs=2)
    assert listed(out) == sorted([*FILES, "notes.txt", "result.csv.bak"])
    assert (out / "notes.txt").read_text() == "mine"
    assert all(content != agreeing[name] for name, content in written(out).items())


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_failed_comparison_leaves_an_earlier_result_as_it_was(jobs: int, tmp_path: Path) -> None:
    baseline, candidate = write_pair(tmp_path)
    out = tmp_path / "out"
    compare(baseline, baseline, out=out)
    before = written(out)
    (candidate / "step1" / "rank2" / "calls.jsonl").unlink()
    with pytest.raises(RunDamaged):
        compare(baseline, candidate, out=out, jobs=jobs)
    assert (listed(out), written(out)) == (sorted(FILES), before)


def test_a_table_of_an_earlier_comparison_does_not_stay_beside_the_new_one(tmp_path: Path) -> None:
    runs, out = write_pair(tmp_path), tmp_path / "out"
    compare(*runs, out=out, table="csv", workbook=True)
    assert listed(out) == sorted(["result.csv", "result.xlsx", *FILES[1:]])
    compare(*runs, out=out)
    assert listed(out) == sorted(FILES)


@pytest.mark.parametrize("summary", [None, "{}"], ids=["no summary", "a foreign summary"])
def test_a_table_that_may_be_somebody_elses_stays(summary: str | None, tmp_path: Path) -> None:
    runs, out = write_pair(tmp_path), tmp_path / "out"
    out.mkdir()
    (out / "result.csv").write_text("mine")
    if summary is not None:
        (out / "summary.json").write_text(summary)
    compare(*runs, out=out)
    assert (out / "result.csv").read_text() == "mine"


def test_a_file_is_no_output_folder(tmp_path: Path) -> None:
    runs = write_pair(tmp_path)
    (tmp_path / "out").write_text("mine")
    with pytest.raises(SettingsError, match=r"'.*/out' cannot be used as an output folder: File exists"):
        compare(*runs, out=tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


def test_a_full_disk_is_no_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(output, "write_text", full)
    with pytest.raises(CannotCompare, match=r"the result cannot be written: .*No space left on device"):
        compare(*write_pair(tmp_path), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_workbook_that_was_cut_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorprobe.report import xlsx

    real = xlsx.write_xlsx
    monkeypatch.setattr(xlsx, "write_xlsx", lambda path, batches, **settings: real(path, batches, cap=20, **settings))
    result = compare(*write_pair(tmp_path), out=tmp_path / "out", workbook=True)
    assert result.notices == ["result.xlsx holds 20 rows; 22 more are in the table beside it."]


def test_each_input_names_the_call_that_made_it(tmp_path: Path) -> None:
    first, second = (np.arange(8, dtype=np.float32) + shift for shift in (0, 100))
    calls = [
        call("Torch.add.0.forward", inputs=[first], outputs=[second]),
        call("Torch.mul.0.forward", inputs=[second, first], outputs=[first]),
        call("Torch.sub.0.forward", inputs=[first, second], outputs=[first * 3]),
    ]
    for name in ("a", "b"):
        write(tmp_path / name, calls)
    rows = compare(tmp_path / "a", tmp_path / "b").rows
    made = {(row.call.split(".")[1], row.slot): row.producer for row in rows}
    assert made == {
        ("add", "input.0"): -1,
        ("add", "output.0"): -1,
        ("mul", "input.0"): 0,
        ("mul", "input.1"): -1,
        ("mul", "output.0"): -1,
        ("sub", "input.0"): 1,
        ("sub", "input.1"): 0,
        ("sub", "output.0"): -1,
    }


def test_what_is_kept_of_a_diverging_call_needs_no_second_pass_over_the_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = write_pair(tmp_path)
    kept = [one.call for one in compare(*runs, prove="off").evidence]
    assert kept
    monkeypatch.setattr(NativeSegment, "index", lambda _: pytest.fail("an index was made"))
    assert [one.call for one in compare(*runs, prove="off").evidence] == kept
