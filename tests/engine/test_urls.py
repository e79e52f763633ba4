"""Runs and results behind URLs: the same answer, only what is needed is fetched, nothing is left in temporary folders."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tensorprobe.engine import compare, compare_shard, merge_shards
from tensorprobe.engine.remote import RemoteFolder
from tensorprobe.errors import RunDamaged, RunError, RunNotFound, SettingsError
from tests.builders.ranks import FILES, listed, write_pair, written


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def memory() -> Iterator[MemoryFileSystem]:
    files = fsspec.filesystem("memory")
    files.store.clear()
    yield files
    files.store.clear()


@pytest.fixture
def pair(tmp_path: Path, memory: MemoryFileSystem) -> tuple[Path, Path]:
    """Two runs on disk, and both of them in memory under the same names."""
    runs = write_pair(tmp_path)
    for run in runs:
        for file in run.rglob("*"):
            if file.is_file():
                memory.pipe_file(f"/runs/{run.name}/{file.relative_to(run)}", file.read_bytes())
    return runs


def in_memory(memory: MemoryFileSystem, folder: str) -> dict[str, bytes]:
    return {path.removeprefix(f"/{folder}/"): memory.cat_file(path) for path in memory.find(f"/{folder}")}


def without_places(content: dict[str, bytes]) -> dict[str, bytes]:
    """The content without what names a place or a time."""
    summary = json.loads(content["summary.json"])
    for side in ("baseline", "candidate"):
        summary[side].pop("path")
    summary.pop("output")
    summary.pop("elapsed_s", None)
    rest = {name: held for name, held in content.items() if name != "report.html"}  # it says where they are
    return {**rest, "summary.json": json.dumps(summary).encode()}


URLS = ("memory://runs/baseline", "memory://runs/candidate")


def test_runs_and_result_in_memory_are_like_those_on_disk(
    pair: tuple[Path, Path], memory: MemoryFileSystem, temporary: Path, tmp_path: Path
) -> None:
    compare(*pair, out=tmp_path / "out")
    result = compare(*URLS, out="memory://results/one")
    content = in_memory(memory, "results/one")
    assert without_places(content) == without_places(written(tmp_path / "out"))
    assert [result.summary.baseline.path, result.summary.candidate.path, result.summary.output] == [
        *URLS,
        "memory://results/one",
    ]
    assert str(temporary).encode() not in b"".join(content.values())
    assert len(list(result.rows)) == 42
    del result
    gc.collect()
    assert listed(temporary) == []


def test_file_urls_are_used_where_they_are(pair: tuple[Path, Path], temporary: Path, tmp_path: Path) -> None:
    compare(*pair, out=tmp_path / "out")
    expected = without_places(written(tmp_path / "out"))
    urls = [run.as_uri() for run in pair]
    folder = tmp_path / "a folder"
    result = compare(*urls, out=folder.as_uri(), jobs=2)
    assert without_places(written(folder)) == expected
    assert (result.summary.baseline.path, result.summary.output) == (urls[0], folder.as_uri())
    assert "%20" in folder.as_uri()
    assert listed(temporary) == []


def test_only_what_is_needed_is_fetched(
    pair: tuple[Path, Path], temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []
    real = RemoteFolder.get

    def get(self: RemoteFolder, wanted: dict[str, Path]) -> None:
        fetched.extend(wanted)
        real(self, wanted)

    monkeypatch.setattr(RemoteFolder, "get", get)
    result = compare(URLS[0], pair[1], steps=1, ranks=2)
    assert result.divergence is not None and result.divergence.rank == 2
    index = ["manifest.json", "rank0.json", "rank1.json", "rank2.json"]
    segment = ["step1/rank2/calls.jsonl", "step1/rank2/stacks.jsonl"]
    own = ["manifest.json", "rank2.json", *segment, "step1/rank2/tensors.bin"]
    assert sorted(fetched) == sorted([*index, *segment, *own])
    assert listed(temporary) == []


def test_names_that_lead_outside_are_left_alone(
    pair: tuple[Path, Path], memory: MemoryFileSystem, temporary: Path
) -> None:
    for name in ("../../escaped", "step0/rank0/../../../escaped", "step0/rank0/../../rank9.json", "rank01.json"):
        memory.pipe_file("/aside", b"harm")
        memory.store[f"/runs/baseline/{name}"] = memory.store["/aside"]
    assert compare(*URLS).exit_code == 1
    assert listed(temporary) == []
    assert not list(temporary.parent.rglob("escaped"))


def test_shards_meet_behind_a_url(pair: tuple[Path, Path], memory: MemoryFileSystem, temporary: Path) -> None:
    compare(*URLS, out="memory://results/one")
    memory.pipe_file("/results/two/notes.txt", b"mine")
    for number in (1, 2):
        compare_shard(*URLS, shard=f"{number}/2", out="memory://results/two")
    result = merge_shards("memory://results/two")
    one, two = in_memory(memory, "results/one"), in_memory(memory, "results/two")
    assert two.pop("notes.txt") == b"mine"
    assert sorted(two) == sorted(FILES)
    assert without_places(two) == without_places(one)
    assert (result.summary.baseline.path, result.summary.output) == (URLS[0], "memory://results/two")
    del result
    gc.collect()
    assert listed(temporary) == []


def test_a_failed_comparison_puts_nothing_there(
    pair: tuple[Path, Path], memory: MemoryFileSystem, temporary: Path
) -> None:
    memory.rm_file("/runs/candidate/step1/rank1/calls.jsonl")
    with pytest.raises(RunDamaged) as caught:
        compare(*URLS, out="memory://results/one")
    assert str(caught.value).startswith("'memory://runs/candidate'")
    assert str(temporary) not in str(caught.value)
    assert (in_memory(memory, "results"), listed(temporary)) == ({}, [])


def test_a_url_without_a_run_says_what_it_holds(memory: MemoryFileSystem, temporary: Path) -> None:
    memory.pipe_file("/there/a.txt", b"")
    with pytest.raises(RunNotFound, match=r"no run in 'memory://there' \(no manifest.json\).\n  It holds a.txt."):
        compare("memory://there", "memory://there")
    with pytest.raises(RunNotFound, match=r"no run in 'memory://nowhere'.*\n  It is empty."):
        compare("memory://nowhere", "memory://there")
    assert listed(temporary) == []


@pytest.mark.parametrize("settings", [{"jobs": 2}, {"engine": "ray", "address": "local"}], ids=["jobs", "ray"])
def test_the_memory_of_this_process_is_not_that_of_others(settings: dict[str, Any]) -> None:
    with pytest.raises(
        SettingsError, match="'memory://a' is in the memory of this process; other processes cannot see it"
    ):
        compare("memory://a", "memory://b", **settings)


def test_an_unknown_protocol_and_a_missing_package_are_said(tmp_path: Path, temporary: Path) -> None:
    runs = write_pair(tmp_path)
    with pytest.raises(SettingsError, match="'foo://a' cannot be opened: Protocol not known: foo"):
        compare("foo://a", runs[1])
    with pytest.raises(SettingsError, match="'foo://a' cannot be opened"):
        compare(*runs, out="foo://a")
    fsspec.register_implementation("absent", "absent_package.Files", errtxt="Install absent_package to access it")
    with pytest.raises(SettingsError, match="'absent://a' cannot be opened: Install absent_package to access it"):
        compare("absent://a", runs[1])
    with pytest.raises(SettingsError, match="names the machine 'tmp'; a file URL has three slashes"):
        compare("file://tmp/x", runs[1])


def test_whatever_a_storage_raises_names_the_url(memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **settings: Any) -> None:
        raise PermissionError("no credentials")

    monkeypatch.setattr(MemoryFileSystem, "find", refuse)
    with pytest.raises(RunError, match="'memory://a' cannot be read: PermissionError: no credentials"):
        compare("memory://a", "memory://b")


def test_paths_do_without_fsspec_and_torch(tmp_path: Path) -> None:
    baseline, candidate = write_pair(tmp_path)
    code = (
        "import sys, tensorprobe\n"
        f"tensorprobe.compare({str(baseline)!r}, {str(candidate)!r}, out={str(tmp_path / 'out')!r})\n"
        "print(sorted({'fsspec', 'torch', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
