"""A run that did not finish is compared as far as it goes: what both have decides, and what is missing is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorprobe
from tensorprobe.engine import Result, compare_shard, merge_shards
from tests.builders.runs import call, write, write_json, write_manifest

X = np.ones((4, 4), dtype=np.float32)


def step(*, wrong: float = 0.0, calls: int = 3) -> list[Any]:
    return [
        call(f"Functional.gelu.{n}.forward", inputs=[X + n], outputs=[X + n + (n == 1) * wrong]) for n in range(calls)
    ]


def whole(root: Path, *, ranks: int = 1, steps: int = 4) -> Path:
    return write(root, {(at, rank): step() for at in range(steps) for rank in range(ranks)})


def cut(root: Path, held: dict[tuple[int, int], list[Any]], **part: Any) -> Path:
    """A run of these steps and ranks that was killed, after step 1 unless the part says otherwise."""
    write(root, held)
    for rank in sorted({rank for _, rank in held}):
        write_json(
            root / f"rank{rank}.json",
            {"rank": rank, "pid": 1, "host": "elsewhere", "closed": False, "ended": 1, **part},
        )
    return root


def compare(tmp_path: Path, held: dict[tuple[int, int], list[Any]], *, part: Any = None, **settings: Any) -> Result:
    baseline, candidate = whole(tmp_path / "a"), cut(tmp_path / "b", held, **(part or {}))
    return tensorprobe.compare(baseline, candidate, **settings)


HELD = {(0, 0): step(), (1, 0): step(), (2, 0): step(calls=2)}


def test_what_both_have_agrees_and_the_end_is_named(tmp_path: Path) -> None:
    result = compare(tmp_path, HELD)
    assert str(result).startswith("UNFINISHED  the candidate ends in step 2; steps 0-1 agree\n")
    assert (result.exit_code, bool(result), result.findings) == (2, False, [])
    assert result.summary.buckets.skipped == {"step only in baseline": 3, "after the end of the candidate": 1}
    assert str(result).endswith(f"tensorprobe compare {tmp_path / 'a'} {tmp_path / 'b'} --steps 0-1")


def test_the_sides_may_be_swapped(tmp_path: Path) -> None:
    compare(tmp_path, HELD)
    result = tensorprobe.compare(tmp_path / "b", tmp_path / "a")
    assert str(result).startswith("UNFINISHED  the baseline ends in step 2; steps 0-1 agree\n")
    assert result.summary.buckets.skipped == {"step only in candidate": 3, "after the end of the baseline": 1}


def test_a_run_that_ends_between_two_steps_says_so(tmp_path: Path) -> None:
    result = compare(tmp_path, {(0, 0): step(), (1, 0): step()})
    assert str(result).startswith("UNFINISHED  the candidate ends after step 1; steps 0-1 agree\n")


def test_a_difference_in_what_both_have_is_a_divergence(tmp_path: Path) -> None:
    result = compare(tmp_path, {**HELD, (2, 0): step(calls=2, wrong=0.5)})
    assert result.exit_code == 1 and result.divergence is not None
    assert (result.divergence.step, result.divergence.call) == (2, "Functional.gelu.1.forward")
    assert "the candidate ends in step 2" in str(result)


def test_whole_steps_can_be_chosen(tmp_path: Path) -> None:
    result = compare(tmp_path, HELD, steps="0-1")
    assert str(result).startswith("AGREES") and result.exit_code == 0
    assert compare(tmp_path, HELD, steps="1-2").exit_code == 2


def test_an_end_beyond_what_the_other_run_has_does_not_matter(tmp_path: Path) -> None:
    baseline, candidate = whole(tmp_path / "a", steps=2), cut(tmp_path / "b", HELD)
    result = tensorprobe.compare(baseline, candidate)
    assert result.exit_code == 0
    assert any("the candidate did not finish" in note for note in result.summary.notes)


def test_two_runs_that_were_both_killed_are_no_agreement(tmp_path: Path) -> None:
    one, other = cut(tmp_path / "a", HELD), cut(tmp_path / "b", HELD)
    result = tensorprobe.compare(one, other)
    assert result.exit_code == 2
    assert "the baseline ends in step 2 and the candidate ends in step 2; steps 0-1 agree" in str(result)
    assert tensorprobe.compare(one, other, steps=[0, 1]).exit_code == 0


@pytest.mark.parametrize(("raised", "code"), [("ValueError: boom", 1), ("KeyboardInterrupt", 2)])
def test_calls_after_an_exception_of_the_program_are_a_difference(tmp_path: Path, raised: str, code: int) -> None:
    result = compare(tmp_path, HELD, part={"closed": True, "steps": [0, 1, 2], "raised": raised})
    assert result.exit_code == code
    assert f"the candidate ends with {raised} in step 2" in str(result)


def test_an_exception_between_two_steps_is_no_agreement(tmp_path: Path) -> None:
    held = {(0, 0): step(), (1, 0): step()}
    result = compare(tmp_path, held, part={"closed": True, "steps": [0, 1], "raised": "ValueError: boom"})
    assert str(result).startswith("UNFINISHED  the candidate ends with ValueError: boom after step 1; steps 0-1 agree")


def test_two_runs_that_end_with_the_same_exception_agree(tmp_path: Path) -> None:
    part = {"closed": True, "steps": [0, 1, 2], "raised": "ValueError: at 0x1"}
    one = cut(tmp_path / "a", HELD, **part)
    other = cut(tmp_path / "b", HELD, **{**part, "raised": "ValueError: at 0x2"})
    assert tensorprobe.compare(one, other).exit_code == 0


def test_a_command_that_failed_after_fewer_steps_is_no_agreement(tmp_path: Path) -> None:
    baseline, candidate = whole(tmp_path / "a"), whole(tmp_path / "b", steps=2)
    assert tensorprobe.compare(baseline, candidate).exit_code == 0
    write_manifest(candidate, exit_code=3)
    result = tensorprobe.compare(baseline, candidate)
    assert str(result).startswith("UNFINISHED  the candidate ends with exit code 3 after step 1; steps 0-1 agree")
    write_manifest(baseline, exit_code=3)
    assert tensorprobe.compare(candidate, candidate).exit_code == 0


def test_the_rank_that_got_least_far_is_named(tmp_path: Path) -> None:
    baseline = whole(tmp_path / "a", ranks=2)
    held = {(at, rank): step() for at in range(3) for rank in range(2)}
    candidate = cut(tmp_path / "b", held)
    write_json(tmp_path / "b" / "rank1.json", {"rank": 1, "pid": 1, "host": "elsewhere", "ended": 0})
    assert "the candidate ends in step 1 (rank 1); step 0 agrees" in str(tensorprobe.compare(baseline, candidate))


def test_a_rank_that_left_nothing_is_no_agreement(tmp_path: Path) -> None:
    baseline, candidate = whole(tmp_path / "a", ranks=2), whole(tmp_path / "b")
    write_manifest(candidate, world_size=2)
    result = tensorprobe.compare(baseline, candidate)
    assert str(result).startswith("UNFINISHED  the candidate has no call (rank 1); steps 0-3 agree\n")
    assert tensorprobe.compare(baseline, candidate, ranks=[0]).exit_code == 0


def test_every_form_says_that_a_run_did_not_finish(tmp_path: Path) -> None:
    result = compare(tmp_path, HELD, out=tmp_path / "out")
    assert '<error type="unfinished"' in result.render("junit")
    assert result.render("github").startswith("::error title=tensorprobe%3A unfinished::")
    assert "unfinished: the candidate ends in step 2; steps 0-1 agree" in result.render("md")
    assert "one of them did not finish" in (tmp_path / "out" / "advisor.txt").read_text()


def test_shards_know_the_end_too(tmp_path: Path) -> None:
    baseline, candidate = whole(tmp_path / "a"), cut(tmp_path / "b", HELD)
    compare_shard(baseline, candidate, shard="1/1", out=tmp_path / "out")
    assert merge_shards(tmp_path / "out").exit_code == 2
