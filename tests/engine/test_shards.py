"""A comparison in shards: the same files as in one go, and a clear word when the parts do not make a whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tensorprobe.engine import compare, compare_shard, merge_shards
from tensorprobe.engine.shard_files import sealed
from tensorprobe.errors import CannotCompare, NothingPaired, RunNotFound, SettingsError
from tests.builders.ranks import FILES, listed, write_pair, write_ranks, written


def make_shards(runs: Sequence[Path], out: Path, of: int, **settings: Any) -> None:
    for number in range(of, 0, -1):
        compare_shard(*runs, shard=f"{number}/{of}", out=out, **settings)


@pytest.mark.parametrize("of", [1, 2, 5])
@pytest.mark.parametrize(
    "settings",
    [{}, {"table": "csv"}, {"ranks": "1"}, {"steps": 0, "policy": "bitwise"}],
    ids=["all", "csv", "one rank", "one step"],
)
def test_merged_shards_are_the_comparison_in_one_go(of: int, settings: dict[str, Any], tmp_path: Path) -> None:
    runs = write_pair(tmp_path)
    out = tmp_path / "out"
    names = (f"result.{settings.get('table', 'parquet')}", *FILES[1:])
    expected = compare(*runs, out=out, **settings)
    content = written(out, names)
    shutil.rmtree(out)
    make_shards(runs, out, of, **settings)
    merged = merge_shards(out)
    assert written(out, names) == content
    assert listed(out) == sorted(names)
    assert (merged.exit_code, len(merged.rows)) == (expected.exit_code, len(expected.rows))


def test_a_shard_says_what_it_did_and_what_is_missing(tmp_path: Path) -> None:
    runs = write_pair(tmp_path)
    done = compare_shard(*runs, shard="1/2", out=tmp_path / "out", jobs=2)
    assert (done.ranks, done.all_ranks, done.pairs, done.missing) == ([0, 2], 3, 12, [2])
    assert listed(tmp_path / "out") == [
        "shard-1-of-2-rank0.parquet",
        "shard-1-of-2-rank2.parquet",
        "shard-1-of-2.json",
    ]
    done = compare_shard(*runs, shard="2/2", out=tmp_path / "out")
    assert (done.ranks, done.missing) == ([1], [])


def test_a_shard_is_standard_json(tmp_path: Path) -> None:
    compare_shard(*write_pair(tmp_path), shard="1/1", out=tmp_path / "out")

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    held = json.loads((tmp_path / "out" / "shard-1-of-1.json").read_text(), parse_constant=refuse)
    assert held["results"][2]["answers"][1]["introduced"]["divergence"]["row"]["baseline_max"] == "NaN"


def test_files_of_others_stay(tmp_path: Path) -> None:
    runs, out = write_pair(tmp_path), tmp_path / "out"
    out.mkdir()
    for name in ("notes.txt", "shard-1-of-1.txt", "shard-1-of-3.parquet"):
        (out / name).write_text("mine")
    make_shards(runs, out, 1)
    merge_shards(out)
    assert listed(out) == sorted([*FILES, "notes.txt", "shard-1-of-1.txt", "shard-1-of-3.parquet"])


def test_relative_paths_are_found_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pair(tmp_path)
    monkeypatch.chdir(tmp_path)
    compare_shard("baseline", "candidate", shard="1/1", out="out")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    summary = merge_shards("../out").summary
    assert (summary.baseline.path, summary.candidate.path) == ("baseline", "candidate")


def test_nothing_paired_is_said_when_merging(tmp_path: Path) -> None:
    write_pair(tmp_path)
    other = write_ranks(tmp_path / "other", rename="Torch.other")
    for folder in other.glob("step*/rank*"):
        first = (folder / "calls.jsonl").read_bytes().splitlines(keepends=True)[0]
        (folder / "calls.jsonl").write_bytes(first)
    baseline = write_ranks(tmp_path / "one")
    for folder in baseline.glob("step*/rank*"):
        first = (folder / "calls.jsonl").read_bytes().splitlines(keepends=True)[0]
        (folder / "calls.jsonl").write_bytes(first)
    make_shards((baseline, other), tmp_path / "out", 2)
    before = listed(tmp_path / "out")
    with pytest.raises(NothingPaired, match="0 of 12 calls have a partner"):
        merge_shards(tmp_path / "out")
    assert listed(tmp_path / "out") == before


def _edit(out: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = out / "shard-2-of-3.json"
    held = json.loads(path.read_text())
    del held["digest"]
    change(held)
    path.write_bytes(sealed(json.dumps(held).encode()))


def _flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (
        lambda out: [(out / f"shard-{number}-of-3.json").unlink() for number in (1, 3)],
        r"holds 1 of 3 shards; 1, 3 are missing.\n  Run it with the same settings and --shard 1/3.",
    ),
    "one missing": (lambda out: (out / "shard-2-of-3.json").unlink(), "holds 2 of 3 shards; 2 is missing"),
    "no json": (
        lambda out: (out / "shard-2-of-3.json").write_text("{"),
        r"'shard-2-of-3.json' cannot be read as a shard: .*\n  Run it again with --shard 2/3.",
    ),
    "no shard": (lambda out: (out / "shard-2-of-3.json").write_text("{}"), "cannot be read as a shard: .*format"),
    "too deep": (lambda out: (out / "shard-2-of-3.json").write_text("[" * 100_000), "cannot be read as a shard"),
    "copied": (
        lambda out: shutil.copy(out / "shard-1-of-3.json", out / "shard-2-of-3.json"),
        "'shard-2-of-3.json' is not what its name says",
    ),
    "other version": (lambda out: _edit(out, lambda held: held.update(tool="0.0.1")), "was made by tensorprobe 0.0.1"),
    "other division": (
        lambda out: shutil.copy(out / "shard-1-of-3.json", out / "shard-1-of-2.json"),
        r"shards of different divisions \(of 2: 1; of 3: 1-3\)",
    ),
    "other policy": (
        lambda out: _edit(out, lambda held: held["question"]["policy"].update(name="other")),
        r"shards 1 and 2 of 3 .* do not belong together: they differ in policy.\n  policy: noise-aware, 1 rules against other",
    ),
    "other run": (
        lambda out: _edit(out, lambda held: held["question"]["baseline"].update(address="/elsewhere")),
        r"differ in baseline.\n  baseline: .*/baseline \(recorded .*\) against /elsewhere \(recorded",
    ),
    "other notes": (lambda out: _edit(out, lambda held: held["question"].update(fuzzy=True)), "they differ in fuzzy"),
    "rank lost": (lambda out: _edit(out, lambda held: held["results"].clear()), "no shard in '.*' holds rank 1"),
    "figure changed": (
        lambda out: (out / "shard-2-of-3.json").write_bytes(
            (out / "shard-2-of-3.json").read_bytes().replace(b'"paired": ', b'"paired": 1')
        ),
        "'shard-2-of-3.json' is damaged: its digest does not match",
    ),
    "unknown basis": (
        lambda out: _edit(out, lambda held: held["results"][0]["answers"][0].update(bases={"guess": 1})),
        "cannot be read as a shard: Invalid enum value 'guess'",
    ),
    "unknown status": (
        lambda out: _edit(out, lambda held: held["results"][0]["answers"][0].update(statuses={"guess": 1})),
        "cannot be read as a shard: Invalid enum value 'guess'",
    ),
    "byte of the rows changed": (
        lambda out: _flip(out / "shard-2-of-3-rank1.parquet", 40),
        "'shard-2-of-3-rank1.parquet' is damaged",
    ),
    "rows lost": (
        lambda out: (out / "shard-2-of-3-rank1.parquet").unlink(),
        "'shard-2-of-3-rank1.parquet' is missing in",
    ),
    "rows damaged": (
        lambda out: (out / "shard-2-of-3-rank1.parquet").write_bytes(b"PAR1"),
        "'shard-2-of-3-rank1.parquet' is damaged",
    ),
    "other rows": (
        lambda out: _edit(out, lambda held: held["results"][0]["answers"][0].update(rows=99)),
        "'shard-2-of-3-rank1.parquet' holds 14 rows, not 106",
    ),
}


@pytest.mark.parametrize(("harm", "message"), BROKEN.values(), ids=BROKEN)
def test_shards_that_make_no_whole_are_refused_and_kept(
    harm: Callable[[Path], Any], message: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    make_shards(write_pair(tmp_path), out, 3)
    harm(out)
    before = listed(out)
    with pytest.raises(CannotCompare, match=message):
        merge_shards(out)
    assert listed(out) == before


def test_a_run_recorded_anew_is_noticed(tmp_path: Path) -> None:
    runs, out = write_pair(tmp_path), tmp_path / "out"
    make_shards(runs, out, 2)
    write_ranks(runs[0], created="2026-02-03T00:00:00Z")
    with pytest.raises(
        CannotCompare, match="was recorded at 2026-02-03T00:00:00Z, the shards have read one of 2026-01"
    ):
        merge_shards(out)
    shutil.rmtree(runs[0])
    with pytest.raises(RunNotFound, match="no folder"):
        merge_shards(out)


def test_a_folder_without_shards_says_how_to_make_them(tmp_path: Path) -> None:
    with pytest.raises(CannotCompare, match=r"no shard in '.*'. Make them with: tensorprobe compare"):
        merge_shards(tmp_path)
    with pytest.raises(SettingsError, match="cannot be used as an output folder: No such file"):
        merge_shards(tmp_path / "nowhere")
    assert listed(tmp_path) == []


@pytest.mark.parametrize("shard", ["0/2", "3/2", "1", "a/b", "1/0", "-1/2", "1/2/3", ""])
def test_a_shard_is_i_of_n(shard: str) -> None:
    with pytest.raises(SettingsError, match="it must be i/n with i from 1 to n"):
        compare_shard("no such run", "nor this", shard=shard, out="nowhere")
