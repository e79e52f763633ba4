"""Ray: the same bytes as here, never a cluster by itself, a clear word when there is none.

Ray starts processes and opens sockets of its own, so what uses it in earnest runs in a process of its own.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tensorprobe.engine import compare
from tensorprobe.engine.settings import CompareSettings
from tensorprobe.errors import CannotCompare, SettingsError
from tensorprobe.work import cluster
from tests.engine.many_ranks import listed, write_pair, written

SCRIPT = """
import os, ray, tensorprobe
from tensorprobe.errors import RunDamaged

told = []
os.chdir("runs")
tensorprobe.compare("baseline", "candidate", out="../ray", engine="ray", address="local", jobs=2, progress=told.append)
assert not ray.is_initialized()
assert sorted(told) == [6, 6, 6], told

ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
result = tensorprobe.compare("baseline", "candidate", engine="ray", threads=4)
assert [row.rank for row in result.rows][::14] == [0, 1, 2]
os.unlink("candidate/step1/rank1/calls.jsonl")
try:
    tensorprobe.compare("baseline", "candidate", out="../failed", engine="ray")
except RunDamaged as error:
    print(error)
assert ray.is_initialized()
ray.shutdown()
"""


def test_a_cluster_gives_the_same_bytes_and_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    candidate = write_pair(tmp_path / "runs")[1]
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path / "runs")
        compare("baseline", "candidate", out="../ray")
    expected = written(tmp_path / "ray")
    shutil.rmtree(tmp_path / "ray")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert written(tmp_path / "ray") == expected
    assert done.stdout.startswith(f"'{candidate}'") and "step1/rank1/calls.jsonl" in done.stdout
    assert listed(tmp_path) == ["ray", "runs"]


def test_without_a_cluster_the_alternative_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    message = r"no Ray cluster can be used at '127.0.0.1:1': .*refused\n  Compare on this machine instead: --jobs N"
    for address in (None, "auto", "127.0.0.1:1"):
        with pytest.raises(CannotCompare, match=message):
            compare(*write_pair(tmp_path), out=tmp_path / "out", engine="ray", address=address)
    with pytest.raises(CannotCompare, match=r"at 'ray://127.0.0.1:1'"):
        compare(*write_pair(tmp_path), engine="ray", address="ray://127.0.0.1:1")
    assert not (tmp_path / "out").exists()


def stand_in(**names: Any) -> types.ModuleType:
    """A module `ray` with just these names."""
    module = types.ModuleType("ray")
    module.__dict__.update({"is_initialized": lambda: False, **names})
    return module


def test_a_cluster_that_cannot_be_found_is_no_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def init(**settings: Any) -> None:
        asked.append(settings)
        raise ConnectionError("Could not find any running Ray instance.\nmore")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setitem(sys.modules, "ray", stand_in(init=init))
    with pytest.raises(CannotCompare, match=r"at 'auto': Could not find any running Ray instance.\n  Compare on this"):
        compare(*write_pair(tmp_path), engine="ray")
    assert [settings["address"] for settings in asked] == ["auto"]


def test_without_ray_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        SettingsError, match=r"needs Ray: .*\n  Install it: pip install 'tensorprobe\[ray\]'; or use --jobs"
    ):
        compare(*write_pair(tmp_path), engine="ray")


@pytest.mark.parametrize(
    ("threads", "machines", "asked"),
    [(None, [8.0], 1), (16, [8.0, 4.0], 8), (2, [8.0], 2), (16, [], 16), (4, [0.0], 4)],
)
def test_a_task_never_asks_for_more_than_a_machine_has(threads: int | None, machines: list[float], asked: int) -> None:
    nodes = [{"Alive": True, "Resources": {"CPU": count}} for count in machines]
    gone = {"Alive": False, "Resources": {"CPU": 99.0}}
    ray = stand_in(nodes=lambda: [*nodes, gone])
    assert cluster._processors(ray, CompareSettings(engine="ray", threads=threads)) == asked


def test_a_lost_worker_is_an_error_that_names_its_rank() -> None:
    class RayError(Exception):
        pass

    class RayTaskError(RayError):
        cause: Exception | None = None

    def get(reference: Exception) -> None:
        raise reference

    exceptions = types.SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)
    ray, task = stand_in(get=get, exceptions=exceptions), types.SimpleNamespace(rank=5)
    with pytest.raises(
        CannotCompare, match="lost the worker that compared rank 5: out of memory\n  Nothing was written"
    ):
        cluster._fetch(ray, RayError("out of memory\nmore"), task)  # type: ignore[arg-type]
    absent = RayTaskError("...")
    absent.cause = ModuleNotFoundError("No module named 'tensorprobe'")
    with pytest.raises(CannotCompare, match=r"cannot import tensorprobe: No module .*\n  Install it on every machine"):
        cluster._fetch(ray, absent, task)  # type: ignore[arg-type]
    with pytest.raises(RayTaskError, match="a bug"):
        cluster._fetch(ray, RayTaskError("a bug"), task)  # type: ignore[arg-type]
