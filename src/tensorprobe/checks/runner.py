"""`tensorprobe.precheck` and `tensorprobe.audit`: a run in, a verdict on each of its calls out.

In: a run and settings. Out: a result; with `out`, also files in that folder. Fails with an error of the user's
when the run, the settings or the device cannot be used, never with an exception because a call fails. How many processes
there are, and in which order calls come to their end, changes no byte of it but the times. Calls of a million elements and
more are the exception: they use all threads that their process has, and on these may depend in which order sums are added up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path

import msgspec

from tensorprobe.checks.output import Header, Output
from tensorprobe.checks.plan import Answer, Finished, Plan, Start, Task, plan_checks
from tensorprobe.checks.result import AuditResult, PrecheckResult, conclude
from tensorprobe.checks.settings import Asked, AuditSettings, Data, PrecheckSettings
from tensorprobe.errors import DeviceUnavailable, SettingsError
from tensorprobe.model.reason import NotReplayed
from tensorprobe.record import Run, open_run
from tensorprobe.replay.isolation import TIME_LIMIT_S, RunPlace, default_replay_bytes, replay_job
from tensorprobe.replay.references import registered, search_path
from tensorprobe.settings import Names, Numbers, public
from tensorprobe.version import VERSION
from tensorprobe.work.pool import Death, Job, Reply, StartFailed, pack, processors, run_in_processes

Progress = Callable[[int, int], None]
"""Is told how many distinct calls are done, and of how many."""


_CHUNK_CALLS = 64
"""Calls that a worker of a cluster gets at a time: its process takes seconds to start."""


class _OutOfTime(Exception):
    """The budget of an audit is spent."""


@public
def precheck(
    run: str | os.PathLike[str] | Run,
    *,
    device: str | None = None,
    data: Data = "random",
    standard: str = "noise-aware",
    calls: Names | None = None,
    steps: Numbers | None = None,
    ranks: Numbers | None = None,
    dedupe: bool = True,
    backward: bool = True,
    hard: bool = False,
    imports: Names = (),
    jobs: int = 1,
    time_limit_s: float = TIME_LIMIT_S,
    max_replay_bytes: int | str | None = None,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    save_failures: bool = False,
    progress: Progress | None = None,
) -> PrecheckResult:
    """Run each call of a recorded step alone, on `device` and on the CPU in higher precision, and judge the difference.

        result = tensorprobe.precheck("runs/a", device="npu")
        print(result)            # what the command prints
        result.failures          # the calls that fail

    Args:
        run: the folder of a run, a dump of another tool, or a Run.
        device: the device under test, as torch names it: `cpu`, `cuda`, `npu:1`. By default the one the run was recorded on.
        data: inputs of the calls: `random` (from the recorded dtypes, shapes and ranges) or `real` (recorded values).
        standard: how results are judged: `noise-aware`, `seed`, `binary`, `absolute` or `ulp`.
        calls: check only these calls: `Functional.conv2d.1`, or a glob such as `*.linear.*`.
        steps, ranks: check these, e.g. `[0, 2]` or `'0,2-4'`. By default the first step and all ranks.
        dedupe: run equal calls once.
        backward: check gradients too.
        hard: add edge-case inputs: zeros, subnormals, values near overflow, ties, non-contiguous tensors.
        imports: modules that every process imports before it runs calls: they register your own ops.
        jobs: number of processes. 0 runs the calls in this process, without isolation: for your own runs only.
        time_limit_s: seconds after which a call that is still running has failed.
        max_replay_bytes: skip calls whose replay would need more memory, e.g. `4G`. Default: a quarter of this machine's.
        out: folder for two tables, `summary.json` and saved failures.
        resume: continue a precheck that was stopped in `out`.
        save_failures: save each failing call with a script that runs it alone.
        progress: is called with the number of distinct calls that are done, and their total.

    Returns a PrecheckResult: `result.exit_code` is 0 when all calls pass, 1 when one fails, 2 when none could be run. A
    failing call is never an exception; a run, a device or a setting that cannot be used is.
    """
    return check_run(run, PrecheckSettings.among(locals()), out=out, resume=resume, progress=progress)


@public
def audit(
    run: str | os.PathLike[str] | Run,
    *,
    standard: str = "noise-aware",
    calls: Names | None = None,
    modules: Names | None = None,
    span: tuple[str, str] | None = None,
    steps: Numbers | None = None,
    ranks: Numbers | None = None,
    sample: float | None = None,
    budget: float | str | None = None,
    references: Mapping[str, str] | Names | None = None,
    dedupe: bool = True,
    backward: bool = True,
    jobs: int = 1,
    engine: str = "local",
    address: str | None = None,
    time_limit_s: float = TIME_LIMIT_S,
    max_replay_bytes: int | str | None = None,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    save_failures: bool = False,
    progress: Progress | None = None,
) -> AuditResult:
    """Recompute each recorded call in float64 from its recorded inputs, and judge its recorded outputs and gradients.

        result = tensorprobe.audit("runs/a")
        print(result)            # what the command prints
        result.failures          # the calls whose recorded results are wrong

    No second run and no device are needed. The run must hold values.

    Args:
        run: the folder of a run, a dump of another tool, or a Run.
        standard: how results are judged: `noise-aware`, `seed`, `binary`, `absolute` or `ulp`.
        calls: audit only these calls: `Functional.conv2d.1`, or a glob such as `*.linear.*`.
        modules: audit only calls inside these modules: `layers.3`, or a glob such as `*.attn`.
        steps, ranks: audit only these, e.g. `[0, 2]` or `'0,2-4'`.
        span: audit only the calls from the first name to the second, both included.
        sample: audit only this share of the calls, e.g. 0.1. The same calls every time.
        budget: stop after this time, e.g. `90s` or `5m`, and report how many calls were not reached.
        references: functions that compute ops without a CPU kernel, beside those of `tensorprobe.reference`:
            `{"torch_npu.npu_rms_norm": "my_references:rms_norm"}`.
        dedupe: judge calls with equal inputs and equal results once.
        backward: audit gradients too.
        jobs: number of processes. 0 runs the calls in this process, without isolation: for your own runs only.
        engine, address: `ray` audits on the Ray cluster at that address, whose machines must see the run at the same path.
        time_limit_s: seconds after which a call that is still running is skipped.
        max_replay_bytes: skip calls whose replay would need more memory, e.g. `4G`. Default: a quarter of this machine's.
        out: folder for two tables, `summary.json` and saved failures.
        resume: continue an audit that was stopped in `out`.
        save_failures: save each failing call with a script that runs it alone.
        progress: is called with the number of distinct calls that are done, and their total.

    Returns an AuditResult: `result.exit_code` is 0 when all calls pass, 1 when one fails, 2 when none could be judged.
    """
    result = check_run(run, AuditSettings.among(locals()), out=out, resume=resume, progress=progress)
    assert isinstance(result, AuditResult)
    return result


def check_run(
    run: str | os.PathLike[str] | Run,
    asked: Asked,
    *,
    out: str | os.PathLike[str] | None,
    resume: bool,
    progress: Progress | None,
) -> PrecheckResult:
    """Check every call that is asked for, and return the answer."""
    started = time.monotonic()
    if out is None and (resume or asked.save_failures):
        what = "save_failures writes files" if asked.save_failures else "resume continues in the folder of a precheck"
        raise SettingsError(f"{what}: pass out=FOLDER (-o FOLDER).")
    opened = run if isinstance(run, Run) else open_run(Path(run))
    plan = plan_checks(opened, asked)
    by_default = asked.device is None
    if isinstance(asked, PrecheckSettings) and by_default:
        asked = dataclasses.replace(asked, device=plan.device)
    outcomes: dict[int, Finished] = {}
    with contextlib.ExitStack() as stack:
        output = None
        if out is not None:
            output = stack.enter_context(Output(out, _header(opened, plan, asked), resume=resume))
            outcomes = _known(plan, output.finished)
        try:
            _check_rest(opened, plan, asked, outcomes, output, progress)
        except DeviceUnavailable as error:
            if not by_default:
                raise
            hint = "The run was recorded on it. To check another device, name it: device='cpu' (--device cpu)."
            raise DeviceUnavailable(f"{error}\n  {hint}") from None
        said = None if out is None else os.fspath(out)
        elapsed_s = time.monotonic() - started
        result = conclude(plan, outcomes, asked, run=str(opened.path), output=said, elapsed_s=elapsed_s)
        if output is not None:
            output.publish(result.summary, result.evidence)
        return result


def _check_rest(
    run: Run,
    plan: Plan,
    asked: Asked,
    outcomes: dict[int, Finished],
    output: Output | None,
    progress: Progress | None,
) -> None:
    """Check what has no outcome yet."""
    rest = [(number, planned.task) for number, planned in enumerate(plan.checks) if number not in outcomes]
    if not rest:
        return
    started = time.monotonic()
    start = Start(
        run=RunPlace.of(run),
        device=asked.device,
        data=asked.data,
        standard=asked.standard,
        backward=asked.backward,
        hard=asked.hard,
        recorded=asked.recorded,
        threads=max(1, processors() // max(1, min(asked.jobs, len(rest)))),
        max_replay_bytes=asked.max_replay_bytes or default_replay_bytes(),
        save_failures=output is not None and asked.save_failures,
        time_limit_s=asked.time_limit_s,
        references=registered() | (asked.references or {}),
        folders=search_path(),
        imports=asked.imports,
    )

    def begin() -> None:
        if output is not None:
            output.begin()

    def take(position: int, content: bytes) -> None:
        answer = msgspec.msgpack.decode(content, type=Answer)
        kept = answer.finished if output is None or not answer.begun else output.keep(answer)
        outcomes[rest[position][0]] = kept
        if progress is not None:
            progress(len(outcomes), len(plan.checks))
        if asked.budget is not None and time.monotonic() - started > asked.budget:
            raise _OutOfTime

    try:
        tasks = [task for _, task in rest]
        if asked.engine == "ray":
            _check_on_cluster(tasks, start, asked, begin, take)
        elif asked.jobs == 0:
            _check_here(tasks, start, run, begin, take)
        else:
            _check_in_processes(tasks, _Chunk(start), asked.jobs, begin, take)
    except _OutOfTime:
        for number, task in rest:
            if number not in outcomes:
                outcomes[number] = Finished(check=task.without_figures("skip", NotReplayed.NO_TIME))


def _check_here(
    tasks: list[Task],
    start: Start,
    run: Run,
    begin: Callable[[], None],
    take: Callable[[int, bytes], None],
) -> None:
    from tensorprobe.checks.check import Checker  # imports torch

    checker = Checker(start, run)
    begin()
    with checker.conditions():
        for position, task in enumerate(tasks):
            # Packed as between processes, so that the outcome has the same types: what is 0.0 there is not 0 here.
            take(position, pack(checker.check(task)))


class _Chunk(msgspec.Struct, frozen=True):
    """What the calls of one process, or of one task of a cluster, have in common."""

    start: Start

    def lost(self, task: Task, death: Death) -> bytes:
        """Return the outcome of a call whose process died. In an audit it is the replay that died: the call itself did not."""
        text = f"the process {death.how}" + (f": {death.last_line}" if death.last_line else "")
        skipped = death.bug or self.start.recorded or not death.begun
        text += "" if death.begun else "; --calls NAME runs it"
        check = task.without_figures("skip" if skipped else "fail", text)
        return pack(Answer(finished=Finished(check=check, trouble=death.bug), begun=death.begun))


def _check_in_processes(
    tasks: list[Task],
    chunk: _Chunk,
    jobs: int,
    begin: Callable[[], None],
    take: Callable[[int, bytes], None],
) -> None:
    device = chunk.start.device
    job = replay_job(
        "tensorprobe.checks.check:serve_checks",
        pack(chunk.start),
        device=device,
        time_limit_s=chunk.start.time_limit_s,
        most_bytes=chunk.start.max_replay_bytes,
    )

    def died(death: Death) -> None:
        take(death.number, chunk.lost(tasks[death.number], death))

    try:
        kinds = [task.call.name.rsplit(".", 2)[0] for task in tasks]
        parcels = [pack(task) for task in tasks]
        run_in_processes(job, parcels, jobs=jobs, take=take, died=died, begin=begin, kinds=kinds)
    except StartFailed as failed:
        raise DeviceUnavailable(f"no process could begin on device {device!r}: it {failed}") from None
    except DeviceUnavailable as error:
        if not _is_known_here(device):
            raise
        hint = "Calls run in processes of their own. If only this process knows the device, run them here: jobs=0 (--jobs 0)."
        raise DeviceUnavailable(f"{error}\n  {hint}") from None


def _check_on_cluster(
    tasks: list[Task],
    start: Start,
    asked: Asked,
    begin: Callable[[], None],
    take: Callable[[int, bytes], None],
) -> None:
    """Send the calls to a cluster, many at a time. Its workers run them in processes of their own, with the same limits."""
    from tensorprobe.work.cluster import ClusterFailed, run_on_cluster

    chunk = _Chunk(msgspec.structs.replace(start, threads=1))
    parts = [range(at, min(at + _CHUNK_CALLS, len(tasks))) for at in range(0, len(tasks), _CHUNK_CALLS)]

    begun: list[int] = []

    def take_part(number: int, content: bytes) -> None:
        if not begun:  # before there is an outcome, what stands in the output folder stays
            begin()
        begun.append(number)
        for position, one in zip(parts[number], msgspec.msgpack.decode(content, type=list[bytes]), strict=True):
            take(position, one)

    def died(death: Death) -> None:
        take_part(death.number, pack([chunk.lost(tasks[position], death) for position in parts[death.number]]))

    job = Job(target="tensorprobe.checks.runner:serve_chunks", start=pack(chunk))
    parcels = [pack([tasks[position] for position in part]) for part in parts]
    try:
        run_on_cluster(
            job, parcels, address=asked.address, jobs=max(1, asked.jobs), threads=1, take=take_part, died=died
        )
    except ClusterFailed as failed:
        raise SettingsError(f"{failed}\n  Audit on this machine instead: --jobs N.") from None


@contextlib.contextmanager
def serve_chunks(start: bytes, _progress: object) -> Iterator[Callable[[bytes], Reply]]:
    """Answer lists of tasks with lists of outcomes; a target of `work.cluster`."""
    chunk = msgspec.msgpack.decode(start, type=_Chunk)

    def answer(parcel: bytes) -> Reply:
        tasks = msgspec.msgpack.decode(parcel, type=list[Task])
        made: dict[int, bytes] = {}
        _check_in_processes(tasks, chunk, 1, lambda: None, made.__setitem__)
        return Reply(pack([made[position] for position in range(len(tasks))]))

    yield answer


def _is_known_here(device: str) -> bool:
    """Return whether this process can use the device: a program may have registered one that its children do not have."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, ImportError):
        return False
    return True


def _known(plan: Plan, finished: list[Finished]) -> dict[int, Finished]:
    """The outcomes of a journal by the number of the check."""
    numbers = {
        (planned.task.step, planned.task.rank, planned.task.call.line): number
        for number, planned in enumerate(plan.checks)
    }
    places = [(one.check.step, one.check.rank, one.check.line) for one in finished]
    return {numbers[place]: one for place, one in zip(places, finished, strict=True) if place in numbers}


def _header(run: Run, plan: Plan, asked: Asked) -> Header:
    try:
        torch_version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch_version = ""
    return Header(
        run=str(run.path.absolute()),
        tool=VERSION,
        torch=torch_version,
        plan=plan.digest(),
        settings=asked.remembered(),
    )
