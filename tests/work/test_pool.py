"""The pool: replies, limits and deaths, with a target that does what its parcel says."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tensorprobe.errors import RunDamaged
from tensorprobe.work import pool
from tensorprobe.work.pool import Death, Job, StartFailed, run_in_processes

PROGRAM = """
import sys; sys.path[:] = {path!r}
import os, time, types
from contextlib import contextmanager
from tensorprobe.errors import RunDamaged
from tensorprobe.work import pool

@contextmanager
def obey(start, progress):
    if start == b"refuse":
        raise RunDamaged("no such run")
    if start == b"exit":
        sys.exit("no licence")
    def answer(parcel):
        if parcel == b"hang":
            time.sleep(600)
        if parcel == b"die":
            print("first line\\nlast line", file=sys.stderr, flush=True)
            os._exit(7)
        if parcel == b"raise":
            1 / 0
        if parcel == b"refuse":
            raise RunDamaged("line 3 is damaged")
        progress(2)
        return pool.Reply(parcel + b" by %d" % os.getpid(), parcel == b"last")
    yield answer

module = types.ModuleType("tensorprobe.obedient")
module.obey = obey
sys.modules["tensorprobe.obedient"] = module
pool.serve({descriptor})
"""


@pytest.fixture(autouse=True)
def obedient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_PROGRAM", PROGRAM)


def run(*parcels: bytes, jobs: int = 1, start: bytes = b"", limit: float | None = None) -> tuple[dict[int, str], Any]:
    """The replies and the deaths, each by the number of its parcel."""
    replies: dict[int, str] = {}
    deaths: list[Death] = []
    run_in_processes(
        Job(target="tensorprobe.obedient:obey", start=start, time_limit_s=limit),
        parcels,
        jobs=jobs,
        take=lambda number, content: replies.update({number: content.decode()}),
        died=deaths.append,
    )
    return replies, deaths


def test_one_process_answers_all_parcels() -> None:
    replies, deaths = run(b"a", b"b", b"c")
    assert [reply.split()[0] for _, reply in sorted(replies.items())] == ["a", "b", "c"]
    assert len({reply.split()[2] for reply in replies.values()}) == 1 and not deaths


def test_a_process_that_gives_its_last_reply_is_replaced() -> None:
    replies, deaths = run(b"last", b"b")
    assert len({reply.split()[2] for reply in replies.values()}) == 2 and not deaths


def test_a_process_that_dies_loses_its_parcel_alone() -> None:
    replies, deaths = run(b"die", b"b")
    assert sorted(replies) == [1]
    assert deaths == [Death(0, "ended with exit code 7", "last line")]


def test_a_parcel_that_exceeds_its_limit_is_lost_and_the_rest_goes_on() -> None:
    started = time.monotonic()
    replies, deaths = run(b"hang", b"b", jobs=2, limit=1.0)
    assert sorted(replies) == [1]
    assert [(death.number, death.how) for death in deaths] == [(0, "did not end within 1 s")]
    assert time.monotonic() - started < 60


def test_an_unexpected_exception_comes_with_its_traceback() -> None:
    _, [death] = run(b"raise")
    assert death.last_line == "ZeroDivisionError: division by zero"
    assert death.bug.startswith("Traceback")


@pytest.mark.parametrize(("start", "message"), [(b"", "line 3 is damaged"), (b"refuse", "no such run")])
def test_an_error_of_the_user_is_raised_as_it_is(start: bytes, message: str) -> None:
    with pytest.raises(RunDamaged, match=message):
        run(b"refuse", b"b", start=start)


def test_a_process_that_cannot_start_ends_the_pool() -> None:
    with pytest.raises(StartFailed, match=r"^ended with exit code 1.\n  no licence$"):
        run(b"a", start=b"exit")


def test_begin_is_called_once_a_process_is_ready() -> None:
    begun: list[int] = []
    job = Job(target="tensorprobe.obedient:obey")
    run_in_processes(
        job,
        [b"a", b"b"],
        jobs=1,
        take=lambda number, _: begun.append(number),
        died=pytest.fail,
        begin=lambda: begun.append(-1),
    )
    assert begun == [-1, 0, -1, 1]


def test_a_target_is_a_function_of_this_package() -> None:
    with pytest.raises(ValueError, match="'os:system' is not a function of tensorprobe"):
        pool.resolve("os:system")
