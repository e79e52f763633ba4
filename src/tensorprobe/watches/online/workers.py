"""Threads that run the reference beside the training, within a memory budget. Without threads, the training thread runs it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

Job = Callable[[], None]
_PAUSE_S = 0.001


class Workers:
    """Runs jobs. `put` waits while the memory of pending jobs exceeds the budget; a single job is always accepted."""

    def __init__(self, number: int, budget: int) -> None:
        self._budget = budget
        self._begun = self._ended = self._bytes_begun = self._bytes_ended = 0
        self._counting, self._pause = threading.Lock(), threading.Lock()
        self._pause.acquire()  # nobody releases it: to wait for it is to pause
        self._jobs: queue.SimpleQueue[tuple[Job, int] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"tensorprobe-online-{at}", daemon=True) for at in range(number)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self.close()
            raise

    def __bool__(self) -> bool:
        return bool(self._threads)

    def put(self, job: Job, nbytes: int) -> None:
        """Queue a job that holds this many bytes until it is done. It must not raise."""
        if not self._threads:
            job()
            return
        while self._bytes_begun > self._bytes_ended and self._bytes_begun + nbytes > self._bytes_ended + self._budget:
            self._wait()
        # No handler of a signal can raise, and no thread takes over, before `put` is done: nothing is called.
        self._begun += 1
        self._bytes_begun += nbytes
        self._jobs.put((job, nbytes))

    def settle(self) -> None:
        """Wait for all jobs."""
        while self._begun > self._ended:
            self._wait()

    def _wait(self) -> None:
        """Pause. A condition variable would stay locked where the handler of a signal raises as it is acquired."""
        self._pause.acquire(timeout=_PAUSE_S)

    def close(self) -> None:
        """Wait for all jobs and end the threads."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            if thread.is_alive():
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
                    with self._counting:
                        self._ended += 1
                        self._bytes_ended += nbytes
