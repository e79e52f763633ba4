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
from tensorprobe.errors import CannotCompare, SettingsError
from tensorprobe.work import cluster
from tests.builders.ranks import listed, write_pair, written

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
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
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
    [(1, [8.0], 1), (16, [8.0, 4.0], 8), (2, [8.0], 2), (16, [], 16), (4, [0.0], 4)],
)
def test_a_task_never_asks_for_more_than_a_machine_has(threads: int, machines: list[float], asked: int) -> None:
    nodes = [{"Alive": True, "Resources": {"CPU": count}} for count in machines]
    gone = {"Alive": False, "Resources": {"CPU": 99.0}}
    ray = stand_in(nodes=lambda: [*nodes, gone])
    assert cluster._processors(ray, threads) == asked


class RayError(Exception):
    pass


class RayTaskError(RayError):
    cause: Exception | None = None


ABSENT = RayTaskError("...")
ABSENT.cause = ModuleNotFoundError("No module named 'tensorprobe'")


@pytest.mark.parametrize(
    ("failure", "kind", "message"),
    [
        (
            RayError("out of memory\nmore"),
            CannotCompare,
            "the worker that compared rank 2 was lost by the cluster: out of memory\n  Nothing was written",
        ),
        (
            ABSENT,
            CannotCompare,
            r"cannot import tensorprobe: No module .*\n  Install it on every machine(.|\n)*--jobs N",
        ),
        (RayTaskError("a bug"), RayTaskError, "a bug"),
    ],
    ids=["lost", "not installed", "bug"],
)
def test_a_worker_that_fails_is_an_error_that_says_why(
    failure: Exception, kind: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last parcel, that of rank 2, fails; the others are answered in this process."""

    def get(answer: list[Any]) -> Any:
        if answer[0] == 2:
            raise failure
        return answer[1]

    class Remote:
        def __init__(self, function: Any) -> None:
            self._function, self._count = function, 0

        def remote(self, *arguments: Any) -> Any:
            self._count += 1
            return (self._count - 1, self._function(*arguments))

    ray = stand_in(
        is_initialized=lambda: True,
        nodes=list,
        remote=lambda **_: Remote,
        wait=lambda references, num_returns: (references[:num_returns], references[num_returns:]),
        get=get,
        cancel=lambda reference, force: None,
        exceptions=types.SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError),
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(kind, match=message):
        compare(*write_pair(tmp_path), engine="ray")


def test_a_worker_with_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    content, _, refusal = cluster._perform("0.0.1", "tensorprobe.engine.tasks:answer_tasks", b"", b"")
    assert content is None
    assert isinstance(cluster.as_error(refusal), SettingsError)
    assert "this machine has 0.0.1" in str(cluster.as_error(refusal))
