"""Parcels on a Ray cluster that already exists. The only module that imports ray; it knows nothing of what they compute.

The same jobs as in `pool`, with one parcel for each Ray task. Replies come back as bytes, so the caller's output folder need not be
shared; whatever a parcel reads must be visible on every machine. No cluster is ever started, except one on this machine
for `address="local"`, which ends with the work.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tensorprobe.errors import SettingsError, TensorprobeError
from tensorprobe.version import VERSION
from tensorprobe.work.pool import Death, Job, Progress, as_bytes, as_error, resolve

_IN_FLIGHT = 256
"""Parcels that the cluster holds at once: enough to make it grow, few enough that replies do not fill its memory."""
_CONNECT_S = 5.0


class ClusterFailed(Exception):
    """The cluster cannot be used."""


def run_on_cluster(
    job: Job,
    parcels: Sequence[bytes],
    *,
    address: str | None,
    jobs: int,
    threads: int,
    take: Callable[[int, bytes], None],
    died: Callable[[Death], None],
    progress: Progress | None = None,
) -> None:
    """Run all parcels on the cluster; `take` and `died` as in `run_in_processes`. Each parcel asks for `threads` processors.

    `jobs` limits the processors of a cluster that is started here (`address="local"`). ClusterFailed when there is no
    cluster, or when it cannot run this package.
    """
    with _connected(address, jobs) as ray:
        remote = ray.remote(num_cpus=_processors(ray, threads))(_perform)
        waiting = list(enumerate(parcels))[::-1]
        running: dict[Any, int] = {}
        try:
            while waiting or running:
                while waiting and len(running) < _IN_FLIGHT:
                    number, parcel = waiting.pop()
                    running[remote.remote(VERSION, job.target, job.start, parcel)] = number
                for done in ray.wait(list(running), num_returns=1)[0]:
                    number = running.pop(done)
                    outcome = _fetch(ray, done, number)
                    if isinstance(outcome, Death):
                        died(outcome)
                        continue
                    content, count = outcome
                    take(number, content)
                    if progress is not None:
                        progress(count)
        finally:
            for reference in running:
                ray.cancel(reference)  # not by force: Ray 2.60 then aborts this process if the task ends just now


def _perform(version: str, target: str, start: bytes, parcel: bytes) -> tuple[bytes | None, int, bytes]:
    """Answer one parcel on a worker: the reply, how much progress was made, and the packed error if it failed."""
    count = 0

    def add(more: int) -> None:
        nonlocal count
        count += more

    try:
        if version != VERSION:
            raise SettingsError(
                f"the worker has tensorprobe {VERSION}, this machine has {version}. Install the same version on both."
            )
        with resolve(target)(start, add) as answer:
            return answer(parcel).content, count, b""
    except TensorprobeError as error:
        return None, count, as_bytes(error)


def _fetch(ray: Any, reference: Any, number: int) -> tuple[bytes, int] | Death:
    """The reply of a parcel and its progress, or how its worker died."""
    try:
        content, count, refusal = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ImportError) or "ModuleNotFoundError" in str(error):
            raise ClusterFailed(
                f"a worker of the cluster cannot import tensorprobe: {error.cause}.\n  Install it on every machine."
            ) from None
        raise
    except ray.exceptions.RayError as error:
        return Death(number, "was lost by the cluster", _first_line(error))
    if content is not None:
        return content, count
    refused = as_error(refusal)
    if isinstance(refused, FileNotFoundError):
        refused = type(refused)(
            f"{refused}\n  This happened on a worker of the cluster. Every worker must see the files at the same path."
        )
    raise refused


@contextmanager
def _connected(address: str | None, jobs: int) -> Iterator[Any]:
    """Ray, connected. A connection that the program already has is used and kept; ours is closed."""
    try:
        import ray
    except ImportError as error:
        raise SettingsError(
            f"engine 'ray' needs Ray: {error}.\n  Install it: pip install 'tensorprobe[ray]'; or use --jobs N."
        ) from error
    if ray.is_initialized():
        yield ray
        return
    address = address or "auto"
    _check_reachable(address)
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address == "local":
        options |= {"include_dashboard": False, "num_cpus": jobs if jobs > 1 else None}
    try:
        ray.init(address=address, **options)
    except (OSError, RuntimeError, ValueError) as error:
        raise _no_cluster(address, _first_line(error)) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raise ClusterFailed at once if nothing answers; Ray itself retries for minutes."""
    named = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    host, _, port = named.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
        except OSError as error:
            raise _no_cluster(named, str(error)) from None


def _no_cluster(address: str, fact: str) -> ClusterFailed:
    return ClusterFailed(f"no Ray cluster can be used at {address!r}: {fact}")


def _processors(ray: Any, threads: int) -> int:
    """What a parcel asks for: its threads, but at most what a machine of the cluster has, or it would wait forever."""
    largest = max((int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]), default=0)
    return min(threads, largest) if largest else threads


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
