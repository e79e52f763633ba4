"""Reference work in threads beside the training, within a budget of bytes; in its own thread when there are none."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

Job = Callable[[], None]


class Workers:
    """Does jobs. `put` waits while more bytes are under way than the budget allows; one job is always let in."""

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
        """Have a job done, which holds so many bytes until then. It must not raise."""
        if not self._threads:
            job()
            return
        with self._changed:
            self._changed.wait_for(lambda: not self._under_way or self._under_way + nbytes <= self._budget)
            self._under_way += nbytes
            self._unfinished += 1
        self._jobs.put((job, nbytes))

    def settle(self) -> None:
        """Wait until all that was put is done."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unfinished)

    def close(self) -> None:
        """Wait until all is done."""
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
