"""The pool: replies, limits and deaths, with a target that does what its parcel says."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tensorprobe.errors import RunDamaged
from tensorprobe.work import pool
from tensorprobe.work.limits import Limits
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
        if parcel.startswith(b"open "):
            try:
                with open(parcel[5:].decode(), "ab") as file:
                    file.write(b"x" * 5000)
                    file.flush()
            except OSError as error:
                return pool.Reply(type(error).__name__.encode())
        if parcel == b"grow":
            try:
                bytearray(1 << 28)
            except MemoryError:
                return pool.Reply(b"MemoryError")
        if parcel == b"at most":
            from tensorprobe.work.limits import at_most
            try:
                with at_most(1 << 27):
                    bytearray(1 << 28)
            except MemoryError:
                return pool.Reply(b"MemoryError, then %d" % len(bytearray(1 << 28)))
        if parcel == b"where":
            import tempfile
            return pool.Reply(os.getcwd().encode() + b" " + tempfile.gettempdir().encode())
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


def run(
    *parcels: bytes,
    jobs: int = 1,
    start: bytes = b"",
    limit: float | None = None,
    limits: Limits | None = None,
    most_deaths: int | None = None,
    kinds: Sequence[str] = (),
) -> tuple[dict[int, str], Any]:
    """The replies and the deaths, each by the number of its parcel."""
    replies: dict[int, str] = {}
    deaths: list[Death] = []
    run_in_processes(
        Job(
            target="tensorprobe.obedient:obey", start=start, time_limit_s=limit, limits=limits, most_deaths=most_deaths
        ),
        parcels,
        jobs=jobs,
        take=lambda number, content: replies.update({number: content.decode()}),
        died=deaths.append,
        kinds=kinds,
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


def test_after_many_deaths_the_rest_is_lost_without_a_process() -> None:
    replies, deaths = run(b"a", b"die", b"die", b"b", b"c", most_deaths=2)
    assert sorted(replies) == [0]
    assert [death.how for death in deaths[1:]] == [
        "ended with exit code 7",
        *["was not begun: 2 before it were lost"] * 2,
    ]


def test_a_kind_that_was_lost_twice_is_not_sent_again() -> None:
    replies, deaths = run(b"die", b"die", b"a", b"die", b"b", most_deaths=4, kinds=["x", "x", "x", "y", "z"])
    assert sorted(replies) == [4]
    assert [(death.number, death.how, death.begun) for death in deaths] == [
        (0, "ended with exit code 7", True),
        (1, "ended with exit code 7", True),
        (2, "was not begun: 2 of its kind were lost", False),
        (3, "ended with exit code 7", True),
    ]


def test_many_replies_earn_another_death() -> None:
    replies, deaths = run(*[b"a"] * 20, b"die", b"b", b"die", b"c", most_deaths=1)
    assert sorted(replies) == [*range(20), 21]
    assert [death.begun for death in deaths] == [True, True, False]


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


def test_memory_beyond_the_limit_is_refused_and_the_process_lives() -> None:
    replies, deaths = run(b"grow", b"b", limits=Limits(memory_bytes=1 << 27))
    assert replies[0] == "MemoryError" and replies[1].startswith("b by ") and not deaths
    assert run(b"grow", limits=Limits(memory_bytes=1 << 30))[0][0].startswith("grow by ")


def test_one_block_may_have_less_memory_than_the_process() -> None:
    assert run(b"at most", limits=Limits(memory_bytes=1 << 30))[0][0] == f"MemoryError, then {1 << 28}"


def test_a_file_beyond_the_limit_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    assert run(b"open %s" % bytes(file), limits=Limits(file_bytes=4096))[0][0] == "OSError"
    assert file.stat().st_size <= 4096
    assert run(b"open %s" % bytes(file), limits=Limits(file_bytes=1 << 20))[0][0].startswith("open ")


def test_a_process_with_limits_has_a_scratch_folder_that_goes_with_it() -> None:
    cwd, temporary = run(b"where", limits=Limits())[0][0].split()
    assert cwd == temporary and not Path(cwd).exists() and cwd != str(Path.cwd())


def test_a_read_only_process_writes_to_its_scratch_folder_alone(tmp_path: Path) -> None:
    if run(b"open %s/probe" % bytes(tmp_path), limits=Limits(read_only=True))[0][0] != "PermissionError":
        pytest.skip("this system has no Landlock")
    file = tmp_path / "file"
    file.write_bytes(b"mine")
    replies, _ = run(b"open %s" % bytes(file), b"open own", b"open /dev/null", limits=Limits(read_only=True))
    assert replies[0] == "PermissionError" and file.read_bytes() == b"mine"
    assert replies[1].startswith("open own by ") and replies[2].startswith("open /dev/null by ")
