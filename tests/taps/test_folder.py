"""Where a run may be written: into nothing, into a folder that is a run's when told to, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tensorprobe
from tensorprobe.errors import RunExists
from tests.taps.tiny import names, record


def test_folder_with_a_run_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    record(tmp_path / "run", lambda: torch.sin(torch.ones(2)))
    with pytest.raises(RunExists, match=r"already holds a run with rank 0. Nothing was written.\n.*overwrite=True"):
        tensorprobe.Probe(tmp_path / "run").start()
    assert "Torch.sin.0.forward" in names(tensorprobe.open_run(tmp_path / "run"))


def test_overwrite_replaces_all_of_the_older_run(tmp_path: Path) -> None:
    with tensorprobe.capture(tmp_path / "run") as probe:
        for _ in range(3):
            torch.sin(torch.ones(2))
            probe.step()
    run = record(tmp_path / "run", lambda: torch.cos(torch.ones(2)), overwrite=True)
    assert run.steps == [0]
    assert [name for name in names(run) if "sin" in name] == []
    assert "Torch.cos.0.forward" in names(run)
    assert run.parts[0].steps == [0]


@pytest.mark.parametrize("overwrite", [False, True])
def test_folder_with_other_files_is_refused_even_when_told_to_overwrite(overwrite: bool, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(RunExists, match=r"holds files that do not belong to a run: thesis.tex"):
        tensorprobe.Probe(tmp_path / "mine", overwrite=overwrite).start()
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_file_in_place_of_the_folder_is_refused(overwrite: bool, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(RunExists, match="is a file, not a folder"):
        tensorprobe.Probe(tmp_path / "run", overwrite=overwrite).start()
    assert (tmp_path / "run").read_text() == "a file"


def test_empty_folder_is_taken_and_missing_parents_are_made(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for out in (tmp_path / "empty", tmp_path / "a" / "b" / "c"):
        assert record(out, lambda: torch.sin(torch.ones(2))).closed


def test_ranks_share_a_folder_without_touching_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, op in ((1, torch.cos), (0, torch.sin)):
        monkeypatch.setenv("RANK", str(rank))
        record(tmp_path / "run", lambda op=op: op(torch.ones(2)))
    run = tensorprobe.open_run(tmp_path / "run")
    assert run.ranks == [0, 1]
    assert "Torch.sin.0.forward" in names(run, rank=0)
    assert "Torch.cos.0.forward" in names(run, rank=1)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(RunExists, match="rank 1"):
        tensorprobe.Probe(tmp_path / "run").start()


def test_smaller_run_over_a_larger_one_leaves_no_rank_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        record(tmp_path / "run", lambda: torch.sin(torch.ones(2)))
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    run = record(tmp_path / "run", lambda: torch.cos(torch.ones(2)), overwrite=True)
    assert run.ranks == [0]
    assert run.manifest.world_size == 1


def test_manifest_says_what_was_run_and_how(tmp_path: Path) -> None:
    run = record(tmp_path / "run", lambda: torch.sin(torch.ones(2)), level="mix", mode="summary", ops=["sin"])
    manifest = run.manifest
    assert (manifest.torch, manifest.world_size) == (str(torch.__version__), 1)
    assert (manifest.settings["level"], manifest.settings["mode"]) == ("mix", "summary")
    assert manifest.settings["ops"] == ["sin"]
    assert (run.parts[0].device, run.parts[0].steps, run.parts[0].closed) == ("cpu", [0], True)
