"""How a run ended: which steps are whole, whether anything is missing, what is said of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tensorprobe.record import open_run
from tensorprobe.record.endings import End, describe_end, find_ends, lacks_rank
from tests.builders.runs import write_calls, write_manifest, write_rank

CALL = {"name": "Torch.mm.0.forward"}


def write_steps(root: Path, steps: dict[int, list[int]], *, version: int = 2, **parts: dict[str, Any]) -> Path:
    """A run with one call for each rank and step; `rank0={...}` changes the part of rank 0."""
    write_manifest(root, version=version, world_size=len(steps))
    for rank, held in steps.items():
        write_rank(root, rank, **{"steps": [], "closed": False, **parts.get(f"rank{rank}", {})})
        for step in held:
            write_calls(root, [CALL], step=step, rank=rank)
    return root


def test_the_step_that_is_named_is_the_one_that_is_cut(tmp_path: Path) -> None:
    run = open_run(write_steps(tmp_path, {0: [0, 1, 2, 3], 1: [0, 1, 2]}, rank0={"ended": 2}, rank1={"ended": 2}))
    assert find_ends(run) == {0: End(2, ""), 1: End(2, "")}
    assert describe_end(run) == (
        f"'{tmp_path}' was never closed. Steps 0-2 are complete; step 3 has 1 call on rank 0, none on rank 1."
    )


def test_a_rank_that_lags_decides_which_steps_are_whole(tmp_path: Path) -> None:
    run = open_run(write_steps(tmp_path, {0: [0, 1, 2], 1: [0, 1]}, rank0={"ended": 1}, rank1={"ended": 0}))
    assert describe_end(run) == (
        f"'{tmp_path}' was never closed. Step 0 is complete; step 1 has 1 call on rank 0, 1 call on rank 1."
    )


def test_without_a_word_about_its_steps_the_last_one_counts_as_cut(tmp_path: Path) -> None:
    run = open_run(write_steps(tmp_path, {0: [0, 1, 2]}, version=1))
    assert find_ends(run) == {0: End(1, "")}


def test_a_run_that_was_ended_after_all_steps_asked_for_is_whole(tmp_path: Path) -> None:
    write_steps(tmp_path, {0: [0, 2]}, rank0={"ended": 2})
    write_manifest(tmp_path, settings={"steps": [0, 2]})
    assert find_ends(open_run(tmp_path)) == {} and describe_end(open_run(tmp_path)) is None
    write_manifest(tmp_path, settings={"steps": [0, 2, 4]})
    assert find_ends(open_run(tmp_path)) == {0: End(2, "")}


def test_an_exception_is_named(tmp_path: Path) -> None:
    part = {"closed": True, "steps": [0, 1], "ended": 0, "raised": "ValueError: boom"}
    run = open_run(write_steps(tmp_path, {0: [0, 1]}, rank0=part))
    assert find_ends(run) == {0: End(0, "ValueError: boom")} and find_ends(run)[0].is_own
    assert describe_end(run) == (
        f"'{tmp_path}' ended with ValueError: boom. Step 0 is complete; step 1 has 1 call on rank 0."
    )
    assert not End(0, "KeyboardInterrupt").is_own


def test_every_exception_is_named_with_its_rank_and_a_long_one_hides_nothing(tmp_path: Path) -> None:
    part = {"closed": True, "steps": [0, 1], "ended": 0}
    parts = {
        f"rank{rank}": {**part, "raised": f"RuntimeError: Connection closed by peer {'x ' * 300}"} for rank in (0, 2)
    }
    parts["rank1"] = {**part, "raised": "ValueError: boom"}
    run = open_run(write_steps(tmp_path, {rank: [0, 1] for rank in range(3)}, **parts))
    told = describe_end(run)
    assert told is not None
    assert told.startswith(
        f"'{tmp_path}' ended with ValueError: boom (rank 1), RuntimeError: Connection closed by peer x x"
    )
    assert "… (rank 0, 2). Step 0 is complete; step 1 has 1 call on rank 0" in told


def test_the_exit_code_of_the_command_is_named(tmp_path: Path) -> None:
    write_steps(tmp_path, {0: [0, 1]}, rank0={"closed": True, "steps": [0, 1], "ended": 0})
    write_manifest(tmp_path, exit_code=3)
    assert describe_end(open_run(tmp_path)) == f"'{tmp_path}' ended with exit code 3."
    write_manifest(tmp_path, exit_code=0)
    assert describe_end(open_run(tmp_path)) is None


def test_a_rank_that_was_to_be_recorded_and_left_nothing_is_lacking(tmp_path: Path) -> None:
    write_steps(tmp_path, {0: [0]})
    write_manifest(tmp_path, world_size=2)
    assert [lacks_rank(open_run(tmp_path), rank) for rank in (0, 1, 2)] == [False, True, False]
    write_manifest(tmp_path, world_size=2, settings={"ranks": [0]})
    assert not lacks_rank(open_run(tmp_path), 1)


def test_settings_that_are_no_lists_of_numbers_say_nothing(tmp_path: Path) -> None:
    write_steps(tmp_path, {0: [0]}, rank0={"ended": 0})
    write_manifest(tmp_path, settings={"steps": {"0": 1}, "ranks": "all"})
    assert find_ends(open_run(tmp_path)) == {0: End(0, "")}
