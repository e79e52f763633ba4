"""Threads that run the reference beside the training, within a memory budget. Without threads, the training thread runs it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

Job = Callable[[], None]


class Workers:
    """Runs jobs. `put` waits while the memory of pending jobs exceeds the budget; a single job is always accepted."""

    def __init__(self, number: int, budget: int) -> None:
        self._budget = budget
        self._under_way = self._unfinished = 0
        self._changed = threading.Condition()
        self._jobs: queue.SimpleQueue[tuple[Job, int] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"tensorprobe-online-{at}", daemon=True) for at in range(number)
        ]
        for thread in self._threads:
            thread.start()

    def __bool__(self) -> bool:
        return bool(self._threads)

    def put(self, job: Job, nbytes: int) -> None:
        """Queue a job that holds this many bytes until it is done. It must not raise."""
        if not self._threads:
            job()
            return
        with self._changed:
            self._changed.wait_for(lambda: not self._under_way or self._under_way + nbytes <= self._budget)
            self._under_way += nbytes
            self._unfinished += 1
        self._jobs.put((job, nbytes))

    def settle(self) -> None:
        """Wait for all jobs."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unfinished)

    def close(self) -> None:
        """Wait for all jobs and end the threads."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _work(self) -> None:
        with torch.no_grad():
            while (entry := self._jobs.get()) is not None:
                job, nbytes = entry
                try:
                    job()
                finally:
                    del job, entry
                    with self._changed:
                        self._under_way -= nbytes
                        self._unfinished -= 1
                        self._changed.notify_all()
