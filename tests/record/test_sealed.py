"""A sealed run: small, the same bytes for the same run, compared like the run itself, and never trusted."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from typer.testing import CliRunner

import tensorprobe
from tensorprobe.cli.main import app
from tensorprobe.errors import RunDamaged, TensorprobeError, UnsupportedVersion
from tensorprobe.record import sealed
from tensorprobe.record.sealed import seal_run
from tests.builders.runs import Tensor, call, write


def record(folder: Path, *, factor: float = 1.0) -> tensorprobe.Run:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    with tensorprobe.capture(folder, model=model) as probe:
        for _ in range(2):
            (model(torch.ones(2, 4)) * factor).sum().backward()
            probe.step()
    return tensorprobe.open_run(folder)


def test_the_same_program_gives_the_same_bytes_without_place_or_time(tmp_path: Path) -> None:
    sealed = [tmp_path / "a.tpz", tmp_path / "b.tpz"]
    for file in sealed:
        seal_run(record(tmp_path / file.stem), file, root=Path(__file__).parent)
    assert sealed[0].read_bytes() == sealed[1].read_bytes()
    first = json.loads(gzip.decompress(sealed[0].read_bytes()))
    assert first["manifest"]["created"] == "" and first["parts"][0]["host"] == ""
    assert str(tmp_path) not in json.dumps(first)
    assert "\n  recorded    by tensorprobe" in CliRunner().invoke(app, ["inspect", str(sealed[0])]).stdout
    assert first["segments"][0]["stacks"][0]["frames"][0][0] == "test_sealed.py"


def test_it_is_compared_with_a_run_and_names_the_call_that_changed(tmp_path: Path) -> None:
    seal_run(record(tmp_path / "a"), tmp_path / "a.tpz")
    assert tensorprobe.compare(tmp_path / "a.tpz", tmp_path / "a")
    record(tmp_path / "b", factor=1.01)
    result = tensorprobe.compare(tmp_path / "a.tpz", tmp_path / "b")
    assert result.exit_code == 1 and result.divergence.call == "Tensor.mul.0.forward"
    with pytest.raises(AssertionError, match="DIVERGED"):
        tensorprobe.assert_runs_agree(tmp_path / "a.tpz", tmp_path / "b")


@pytest.mark.parametrize(
    ("damage", "error", "told"),
    [
        (lambda raw: raw[:-20], RunDamaged, "its end is missing"),
        (lambda raw: b"not gzip", RunDamaged, "not compressed"),
        (lambda raw: raw[:40] + b"\xff" * 20 + raw[60:], RunDamaged, "a.tpz"),
        (lambda raw: gzip.compress(b"[" * 100_000), RunDamaged, "cannot be read"),
        (lambda raw: gzip.compress(b'{"format": "other"}'), RunDamaged, "not a sealed run"),
        (lambda raw: gzip.compress(b'{"format": "tensorprobe-sealed", "version": 9}'), UnsupportedVersion, "version 9"),
        (lambda raw: gzip.compress(gzip.decompress(raw).replace(b"Functional.linear.0.f", b"\\u001b.f")), RunDamaged, "name of a call"),
        (lambda raw: gzip.compress(b" " * (3 << 20)), RunDamaged, "unpacks to more than"),
    ],
)  # fmt: skip
def test_a_bad_file_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Any, error: type[TensorprobeError], told: str
) -> None:
    monkeypatch.setenv("TENSORPROBE_MAX_READ_BYTES", "2M")
    seal_run(record(tmp_path / "a"), tmp_path / "a.tpz")
    (tmp_path / "a.tpz").write_bytes(damage((tmp_path / "a.tpz").read_bytes()))
    with pytest.raises(error, match=told):
        tensorprobe.open_run(tmp_path / "a.tpz")


def test_export_writes_one(tmp_path: Path) -> None:
    record(tmp_path / "a")
    done = CliRunner().invoke(app, ["export", str(tmp_path / "a"), "--to", "tpz", "-o", str(tmp_path / "a.tpz")])
    assert done.exit_code == 0, done.output
    assert tensorprobe.compare(tmp_path / "a", tmp_path / "a.tpz")


def test_a_sketch_shows_the_right_numbers_in_the_wrong_places(tmp_path: Path) -> None:
    values = numpy.random.default_rng(0).normal(size=(8, 16)).astype("float32")
    for name, result in (("a", values), ("b", values[::-1].copy())):
        made = [call("Torch.sigmoid.0.forward", inputs=[values], outputs=[result])]
        write(tmp_path / name, made)
        write(tmp_path / f"{name}-summary", made, mode="summary")
    a, b = (tensorprobe.open_run(tmp_path / name) for name in ("a", "b"))
    for name, run in (("a", a), ("b", b)):
        seal_run(run, tmp_path / f"{name}.tpz")
    assert tensorprobe.compare(tmp_path / "a-summary", tmp_path / "b-summary")  # every statistic is the same
    for candidate in ("b", "b.tpz"):
        result = tensorprobe.compare(tmp_path / "a.tpz", tmp_path / candidate)
        assert result.divergence.call == "Torch.sigmoid.0.forward"
        assert result.divergence.row.basis == "statistics" and 0.5 < result.divergence.row.relative_l2 < 3
    assert tensorprobe.compare(tmp_path / "a.tpz", tmp_path / "a")


def test_equal_bytes_with_other_strides_are_equal_without_values_too(tmp_path: Path) -> None:
    tokens = numpy.arange(12).reshape(3, 4)
    for name, stride in (("a", [5, 1]), ("b", None)):
        made = [call("Functional.embedding.0.forward", inputs=[Tensor(tokens, stride=stride)], outputs=[tokens * 1.5])]
        write(tmp_path / name, made, mode="summary")
    assert tensorprobe.compare(tmp_path / "a", tmp_path / "b", policy="bitwise")


def test_a_run_that_compresses_far_is_stored_so_that_it_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealed, "_LEAST_UNPACKED", 100)
    monkeypatch.setattr(sealed, "_MOST_GROWTH", 2)
    seal_run(record(tmp_path / "a"), tmp_path / "a.tpz")
    assert [*tensorprobe.open_run(tmp_path / "a.tpz").calls()]
