"""What a run says of the program: no secrets in it, and what differs is printed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tensorprobe
from tensorprobe.record import open_run
from tensorprobe.record.provenance import differences, redacted


def test_arguments_that_look_like_secrets_are_replaced() -> None:
    given = ["train.py", "--hf-token", "abc", "--api_key=xyz", "hf_abcdefghijkl", "--lr", "0.1", "https://me:pw@host/x"]
    assert redacted(given) == [
        *("train.py", "--hf-token", "(redacted)", "--api_key=(redacted)", "(redacted)", "--lr", "0.1", "(redacted)")
    ]


def test_differences_are_listed_by_name() -> None:
    ours = {"commit": "a", "cwd": "/x", "switches": {"threads": 1, "mkldnn": True}}
    theirs = {"commit": "b", "switches": {"threads": 8, "mkldnn": True}, "seed": 3}
    assert differences(ours, theirs) == ["commit: a / b", "threads: 1 / 8"]


def test_compare_says_what_differs_between_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, threads in (("a", "1"), ("b", "8")):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        monkeypatch.setenv("NCCL_AUTH_TOKEN", "secret")
        monkeypatch.setenv("HOME_OF_SOMEONE", "private")
        with tensorprobe.capture(tmp_path / name, in_process=True):
            torch.ones(2) + 1
    assert "OMP_NUM_THREADS: 1 / 8" in str(tensorprobe.compare(tmp_path / "a", tmp_path / "b"))
    kept = open_run(tmp_path / "a").manifest.provenance["environment"]
    assert kept["NCCL_AUTH_TOKEN"] == "(redacted)" and "HOME_OF_SOMEONE" not in kept
