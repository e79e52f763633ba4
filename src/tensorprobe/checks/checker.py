"""Checks one call after the other in the process that it is made in.

In: `Start`, then tasks. Out: `Finished`, always: an exception that the check itself lets out becomes a skipped call with the
reason and the traceback, or a failed one when the device does not answer after it. Outside of `conditions` nothing in the
process is changed.
"""

from __future__ import annotations

import importlib.util
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import msgspec
import torch

from tensorprobe.checks.check import CheckSettings, check_call
from tensorprobe.checks.messages import Finished, Start
from tensorprobe.checks.plan import Task
from tensorprobe.errors import TensorprobeError
from tensorprobe.model import Call
from tensorprobe.model.precheck import CallCheck
from tensorprobe.record import open_run
from tensorprobe.record.run import Entry, Run
from tensorprobe.record.stored import StoredCall

_LARGE = 1 << 20
"""Elements of all tensors of a call from which on more than one thread is worth it. With one, sums are added up in one order."""
_BACKENDS = {"npu": "torch_npu", "hpu": "habana_frameworks.torch", "mlu": "torch_mlu", "musa": "torch_musa"}
"""Devices that torch knows of only after another package was imported."""


class Checker:
    """A run that is open, and the settings for its calls. Raises SettingsError or RunError when either cannot be used."""

    def __init__(self, start: Start, run: Run | None = None) -> None:
        self._start = start
        _load_backend(start.device)
        self._settings = CheckSettings(
            device=start.device,
            data=start.data,  # type: ignore[arg-type]  # checked by what it is given to
            standard=start.standard,
            backward=start.backward,
            hard=start.hard,
        )
        self._run = run or (open_run(start.run, start.data_folder) if start.data_folder else open_run(start.run))

    @contextmanager
    def conditions(self) -> Iterator[None]:
        """What calls are run under; put back at the end: the state of the generators, the threads, warnings."""
        threads = torch.get_num_threads()
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                yield
            finally:
                torch.set_num_threads(threads)

    def check(self, task: Task) -> Finished:
        """The outcome of one call."""
        try:
            call = self._read(task, task.call)
            backward = None if task.backward is None else self._read(task, task.backward)
        except TensorprobeError as error:
            return Finished(check=task.without_figures("skip", str(error).splitlines()[0]))
        if call.model.args is None and call.model.kwargs is None:
            return Finished(check=task.without_figures("skip", "its arguments were not recorded, only its tensors"))
        torch.set_num_threads(self._start.threads if _elements(call.model) >= _LARGE else 1)
        try:
            check = check_call(call, backward, self._settings)
        except Exception as error:
            said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            if not self._device_answers():
                return Finished(check=task.without_figures("fail", f"it broke {self._start.device}: {said}"), ends=True)
            check = task.without_figures("skip", f"the check itself failed with {said}")
            return Finished(check=check, trouble=traceback.format_exc())
        if "fail" not in (check.forward, check.backward):
            return Finished(check=check)
        finished = self._save(call, backward, check)
        return finished if self._device_answers() else msgspec.structs.replace(finished, ends=True)

    def _read(self, task: Task, entry: Entry) -> StoredCall:
        segment = self._run.segment(task.step, task.rank)
        call = segment.call_at(entry)
        return StoredCall(
            call, step=task.step, rank=task.rank, index=entry.line, run=self._run.path, source=segment.source
        )

    def _save(self, call: StoredCall, backward: StoredCall | None, check: CallCheck) -> Finished:
        """With what was saved of a failing call. That it cannot be saved does not change what the call is."""
        if self._start.failures is None:
            return Finished(check=check)
        try:
            from tensorprobe.replay.failures import save_failure

            script = save_failure(call, backward, self._settings.conditions(), check, Path(self._start.failures))
        except Exception:
            return Finished(check=check, trouble=f"{call.name} could not be saved.\n{traceback.format_exc()}")
        return Finished(check=check, replay=str(script))

    def _device_answers(self) -> bool:
        """Whether the device still computes: after some errors everything fails that is asked of it later."""
        try:
            return self._start.device == "cpu" or torch.ones(2, device=self._start.device).sum().item() == 2.0
        except Exception:
            return False


def _elements(call: Call) -> int:
    return sum(slot.count for slot in call.slots)


def _load_backend(device: str) -> None:
    package = _BACKENDS.get(device.partition(":")[0])
    if package is not None and importlib.util.find_spec(package.partition(".")[0]) is not None:
        import_module(package)
