"""Tasks on a Ray cluster that exists already. The only place that imports ray.

Workers give back their rows as bytes and this process writes them, so that the output folder need not be shared; the
runs must be: at the same path on every machine, or behind a URL. No cluster is ever started, except one on this machine
for `address="local"`, which ends with the comparison.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tensorprobe.engine.parcel import pack, perform, unpack
from tensorprobe.engine.rank_task import Progress, RankTask
from tensorprobe.engine.settings import CompareSettings
from tensorprobe.errors import CannotCompare, SettingsError, TensorprobeError
from tensorprobe.work.pool import Take

_IN_FLIGHT = 256
"""Tasks handed to the cluster at once: enough to make it grow, few enough that rows do not pile up in its memory."""
_ANSWER_S = 5.0
_INSTEAD = "Compare on this machine instead: --jobs N; or with a Ray of its own: --address local."


def run_on_cluster(
    tasks: Sequence[RankTask], settings: CompareSettings, *, rows: bool, take: Take, progress: Progress | None
) -> None:
    """Run the tasks on the cluster; `take` has each outcome as it comes, in any order."""
    with _connected(settings) as ray:
        remote = ray.remote(num_cpus=_processors(ray, settings))(perform)
        waiting = list(enumerate(tasks))[::-1]
        running: dict[Any, tuple[int, RankTask]] = {}
        try:
            while waiting or running:
                while waiting and len(running) < _IN_FLIGHT:
                    number, task = waiting.pop()
                    running[remote.remote(pack(task, rows=rows))] = number, task
                for done in ray.wait(list(running), num_returns=1)[0]:
                    number, task = running[done]
                    outcome, packed = _fetch(ray, done, task)
                    del running[done]
                    result, pairs = _unpack(outcome, task)
                    take(number, result, packed)
                    if progress is not None:
                        progress(pairs)
        finally:
            for reference in running:
                ray.cancel(reference, force=True)


def _fetch(ray: Any, reference: Any, task: RankTask) -> tuple[bytes, bytes]:
    try:
        held: tuple[bytes, bytes] = ray.get(reference)
        return held
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ImportError) or "ModuleNotFoundError" in str(error):
            raise CannotCompare(
                f"a worker of the cluster cannot import tensorprobe: {error.cause}.\n  Install it on every machine. {_INSTEAD}"
            ) from None
        raise
    except ray.exceptions.RayError as error:
        raise CannotCompare(
            f"the cluster lost the worker that compared rank {task.rank}: {_first_line(error)}\n"
            f"  Nothing was written. {_INSTEAD}"
        ) from None


def _unpack(outcome: bytes, task: RankTask) -> Any:
    try:
        return unpack(outcome)
    except TensorprobeError as error:
        if isinstance(error, FileNotFoundError):
            raise type(error)(
                f"{error}\n  That was on a worker of the cluster (rank {task.rank}): it must see the run at the same path. {_INSTEAD}"
            ) from None
        raise


@contextmanager
def _connected(settings: CompareSettings) -> Iterator[Any]:
    """Ray, connected. A connection that the program had already is used and left; ours is closed."""
    try:
        import ray
    except ImportError as error:
        raise SettingsError(
            f"engine 'ray' needs Ray: {error}.\n  Install it: pip install 'tensorprobe[ray]'; or use --jobs N."
        ) from error
    if ray.is_initialized():
        yield ray
        return
    address = settings.address or "auto"
    _demand_answer(address)
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address == "local":
        options |= {"include_dashboard": False, "num_cpus": settings.jobs if settings.jobs > 1 else None}
    try:
        ray.init(address=address, **options)
    except (OSError, RuntimeError, ValueError) as error:
        raise _no_cluster(address, _first_line(error)) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _demand_answer(address: str) -> None:
    """Ray itself tries for minutes to reach a machine that does not answer."""
    named = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    host, _, port = named.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
        except OSError as error:
            raise _no_cluster(named, str(error)) from None


def _no_cluster(address: str, fact: str) -> CannotCompare:
    return CannotCompare(f"no Ray cluster can be used at {address!r}: {fact}\n  {_INSTEAD}")


def _processors(ray: Any, settings: CompareSettings) -> int:
    """What a task asks for: its threads, but never more than a machine of the cluster has, or it would wait for ever."""
    threads = settings.threads or 1
    largest = max((int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]), default=0)
    return min(threads, largest) if largest else threads


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
