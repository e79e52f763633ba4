"""Record and compare in forked processes: kernels are replaced for good, so each run has a process of its own.

The process that forks has imported everything and has computed nothing, so a fork costs milliseconds. Processes that `compare`
starts for its proofs are forked too, instead of importing torch again: `tensorprobe.work.pool` is served as it is, isolation included.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed

import tensorprobe
from bench.heldout import device as devices
from bench.heldout.cases import Setting
from bench.heldout.plant import NOW, Plant
from bench.heldout.training import Family, Setup
from tensorprobe.work import pool

TIME_LIMIT_S = 300


@dataclass(frozen=True)
class Program:
    """A training, and what is wrong with it."""

    build: Family
    precision: str = "fp32"
    steps: int = 2
    ranks: int = 1
    plant: Plant | None = None


def import_all() -> None:
    """Import what every child needs, once: a fork inherits it."""
    for name in ("torch._dynamo", "torch.nn.parallel.distributed", "tensorprobe.replay.proof", "tensorprobe.sim"):
        import_module(name)
    for name in tensorprobe.__all__:
        getattr(tensorprobe, name)
    torch.set_num_threads(1)


def in_child(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in a fork of this process and return what it returns, through JSON. RuntimeError with its traceback."""
    return join(start(function, *args))


def start(function: Callable[..., Any], *args: Any) -> tuple[int, int]:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        signal.alarm(TIME_LIMIT_S)
        with os.fdopen(writer, "w") as pipe:
            try:
                json.dump({"value": function(*args)}, pipe)
            except BaseException:
                json.dump({"error": traceback.format_exc()}, pipe)
        os._exit(0)
    os.close(writer)
    return child, reader


def join(started: tuple[int, int]) -> Any:
    child, reader = started
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    reply = json.loads(text) if text else {"error": f"no answer within {TIME_LIMIT_S} s, or the process died"}
    if "error" in reply:
        raise RuntimeError(reply["error"])
    return reply["value"]


class Recorded(NamedTuple):
    """How often the fault struck, and the loss of step 0 with the last weights."""

    struck: int
    loss: float


def record(folder: Path, program: Program, where: str, setting: Setting) -> Recorded:
    """Record a training, each rank in a process of its own."""
    Path(f"{folder}.store").unlink(missing_ok=True)
    started = [start(_start_rank, rank, folder, program, where, setting) for rank in range(program.ranks)]
    results = [Recorded(*join(each)) for each in started]
    return Recorded(max(each.struck for each in results), sum(each.loss for each in results) / len(results))


def _start_rank(rank: int, folder: Path, program: Program, where: str, setting: Setting) -> Recorded:
    NOW.rank = rank
    if program.ranks == 1:
        return _record(folder, program, where, setting)
    folder.mkdir(parents=True, exist_ok=True)
    store = distributed.FileStore(f"{folder}.store", program.ranks)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=program.ranks)
    recorded = _record(folder, program, where, setting)
    distributed.destroy_process_group()
    return recorded


def _record(folder: Path, program: Program, where: str, setting: Setting) -> Recorded:
    warnings.simplefilter("ignore")
    torch.set_num_threads(2 if where == "threads" else 1)
    if where == "npu":
        from tensorprobe import sim

        sim.enable()
    torch.manual_seed(5)
    training = program.build(Setup("npu" if where == "npu" else "cpu", program.precision))
    torch.manual_seed(6)
    if where == "second":
        devices.use_second_device()
    planted = contextlib.nullcontext() if program.plant is None else program.plant(training)
    settings: dict[str, Any] = {"level": setting.level, "mode": setting.mode, "in_process": True, "stacks": False}
    if setting.modules:
        settings["modules"] = ["?*"]
    with tensorprobe.capture(folder, model=training.model, overwrite=True, **settings) as probe, planted:
        for NOW.step in range(program.steps):
            training.step(NOW.step)
            probe.step()
    return Recorded(NOW.struck, float(training.loss(0)))


def compare(baseline: Path, candidate: Path, **options: Any) -> dict[str, Any]:
    """Compare two runs with every default, and return the answer as `tensorprobe compare --json` prints it, plus the text."""
    answer: dict[str, Any] = in_child(_compare, baseline, candidate, options)
    return answer


def _compare(baseline: Path, candidate: Path, options: dict[str, Any]) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    pool.subprocess.Popen = _Fork
    try:
        result = tensorprobe.compare(baseline, candidate, threads=1, keep_rows=False, **options)
    except tensorprobe.TensorprobeError as error:
        return {"answer": "refused", "exit_code": 2, "text": f"{type(error).__name__}: {error}"}
    except Exception:
        return {"answer": "crashed", "exit_code": 3, "text": traceback.format_exc()[-600:]}
    found: dict[str, Any] = json.loads(result.to_json())
    return found


class _Fork:
    """What `pool` needs of `subprocess.Popen`: serves the pipe in a fork of this process."""

    def __init__(self, command: list[str], *, pass_fds: list[int], stderr: Any, cwd: str | None, **_: Any) -> None:
        self.pid = os.fork()
        self._code: int | None = None
        if self.pid:
            return
        with contextlib.suppress(BaseException):
            (descriptor,) = pass_fds
            os.dup2(stderr.fileno(), 2)
            os.closerange(3, descriptor)
            os.closerange(descriptor + 1, 4096)
            if cwd is not None:
                os.chdir(cwd)
                os.environ["TMPDIR"] = cwd
            pool.serve(descriptor)
        os._exit(0)

    def kill(self) -> None:
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (timeout or 1e9)
        while self._code is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self._code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("fork", timeout or 0.0)
            else:
                time.sleep(0.002)
        return self._code
