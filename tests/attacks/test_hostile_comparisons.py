"""Broken and hostile runs put into a comparison: an answer or one clear error, never a crash, a hang or an escape sequence."""

from __future__ import annotations

import json
import os
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorprobe
from tensorprobe.errors import CannotCompare, NothingPaired, RunDamaged, TensorprobeError
from tensorprobe.report.github import render_github
from tensorprobe.report.junit import render_junit
from tensorprobe.report.markdown import render_markdown
from tests.builders.runs import call, write, write_calls, write_json, write_manifest, write_rank, write_run
from tests.e2e.programs import command

NAME = "Torch.mm.0.forward"
ONE, OTHER = [1.0, 0.0, 0.5, 1.0, 0, 0], [2.0, 0.0, 0.5, 2.0, 0, 0]
ESCAPES = "\x1b[2J\x1b]0;title\x07\x9b31m\r\n\u202e\u2028\0::error::x"
X = np.linspace(-1, 1, 48, dtype=np.float32)
HUGE = 2**70

Line = dict[str, Any]


def slot(name: str = "output.0", **more: Any) -> dict[str, Any]:
    return {"name": name, "dtype": "float32", "shape": [2], "summary": ONE, **more}


def one(**more: Any) -> list[Line]:
    """One call; `more` goes into it."""
    return [{"name": NAME, "slots": [slot()], **more}]


def with_slots(*slots: dict[str, Any]) -> list[Line]:
    return [{"name": NAME, "slots": list(slots)}]


def nested(depth: int, inside: str = "") -> Any:
    return json.loads("[" * depth + inside + "]" * depth)


def forms(result: tensorprobe.Result) -> list[str]:
    """The result in every form that is printed."""
    list(result.rows)
    summary = result.summary
    return [str(result), result.to_json(), render_markdown(summary), render_junit(summary), render_github(summary)]


def assert_harmless(texts: Sequence[str]) -> None:
    for text in texts:
        held = {sign for sign in text if not sign.isprintable() and sign != "\n"}
        assert held == set(), f"unprintable {held!r}"
        assert "\n::error::x" not in text


PAIRS: dict[str, tuple[list[Line], list[Line]]] = {
    "escapes in every text": (
        one(module=ESCAPES, parent=ESCAPES, origin=ESCAPES, raised=ESCAPES, args=[ESCAPES], kwargs={ESCAPES: ESCAPES}),
        one(module="x" + ESCAPES, args=[1], kwargs={}),
    ),
    "escapes in slots": (
        with_slots(
            slot(f"output.{ESCAPES}", device=ESCAPES), slot("input.0", skipped=ESCAPES), slot("input.1", dtype=ESCAPES)
        ),
        with_slots(
            slot(f"output.{ESCAPES}", summary=OTHER), slot("input.0"), slot("input.1", dtype=ESCAPES, summary=OTHER)
        ),
    ),
    "escapes in a slot of one side": (with_slots(slot(f"input.{ESCAPES}")), with_slots(slot("output.1"))),
    "64 dimensions of 2**62": (
        with_slots(slot(shape=[2**62] * 64)),
        with_slots(slot(shape=[2**62] * 64, summary=OTHER)),
    ),
    "a dimension beyond 64 bits": (with_slots(slot(shape=[2**100])), with_slots(slot(shape=[2**100], summary=OTHER))),
    "negative dimensions": (with_slots(slot(shape=[-3, -1])), with_slots(slot(shape=[-3, -1], summary=OTHER))),
    "5000 dimensions": (with_slots(slot(shape=[1] * 5000)), with_slots(slot(shape=[1] * 5000, summary=OTHER))),
    "shapes that differ absurdly": (with_slots(slot(shape=[2**62] * 64)), with_slots(slot(shape=[]))),
    "equal digests of impossible tensors": (
        with_slots(slot(shape=[2**62, 2**62], digest="a" * 32, offset=0, nbytes=-1)),
        with_slots(slot(shape=[2**62, 2**62], digest="a" * 32, offset=HUGE, nbytes=HUGE)),
    ),
    "offsets and sizes of nothing": (
        with_slots(slot(offset=-64, nbytes=8), slot("output.1", offset=HUGE, nbytes=8)),
        with_slots(slot(offset=7, nbytes=8), slot("output.1", offset=64, nbytes=HUGE)),
    ),
    "strides of nothing": (
        with_slots(
            slot(stride=[7, 8, 9], digest="a" * 32), slot("output.1", shape=[2, 2], stride=[-1, HUGE], digest="b" * 32)
        ),
        with_slots(slot(stride=[-1], digest="a" * 32), slot("output.1", shape=[2, 2], stride=[0, 0], digest="b" * 32)),
    ),
    "counts beyond 64 bits": (
        with_slots(slot(summary=[1.0, 0.0, 0.5, 1.0, HUGE, -5])),
        with_slots(slot(summary=[1.0, 0.0, 0.5, 1.0, 0, 2**63])),
    ),
    "greatest numbers": (
        with_slots(slot(summary=[1e308, -1e308, 1e308, 1e308, 0, 0])),
        with_slots(slot(summary=[-1e308, 1e308, -1e308, "Infinity", 0, 0])),
    ),
    "nothing but NaN": (
        with_slots(slot(summary=["NaN"] * 4 + [2, 0]), slot("input.0", summary=["NaN"] * 4)),
        with_slots(slot(summary=["NaN", "Infinity", "-Infinity", "NaN", 0, 2]), slot("input.0", summary=["NaN"] * 4)),
    ),
    "repeats beyond 64 bits": (one(repeat=HUGE), one(repeat=HUGE)),
    "negative repeats": ([*one(repeat=-2), *one()], [*one(), *one(repeat=-2)]),
    "threads and stacks beyond 64 bits": (one(thread=HUGE, stack=HUGE), one(thread=-1, stack=-HUGE)),
    "unknown dtypes": (
        with_slots(slot(dtype="float4"), slot("output.1", dtype="load", offset=0, nbytes=1)),
        with_slots(slot(dtype="float4", summary=OTHER), slot("output.1", dtype="load", offset=0, nbytes=1)),
    ),
    "dtypes of other families": (with_slots(slot(dtype="int64")), with_slots(slot(dtype="complex64", summary=OTHER))),
    "slots of no side": (
        with_slots(slot("weird"), slot(""), slot(".")),
        with_slots(slot("weird", summary=OTHER), slot("", summary=OTHER), slot(".", summary=OTHER)),
    ),
    "the same call many times": (one() * 50, [{"name": NAME, "slots": [slot(summary=OTHER)]}] * 30),
    "levels that contradict the name": (one(level="module"), one(level="aten")),
    "arguments nested to the limit": (one(args=nested(90)), one(args=nested(90, "1"))),
    "arguments nested beyond it": (one(args=nested(300)), one(args=nested(299, "1"))),
    "arguments of odd kinds": (
        one(args=[{"type": ["x"], "value": {}}, {"slot": {}}, {}], kwargs={"a": {"type": "object", "value": "X"}}),
        one(args={"type": "tuple", "value": 5}, kwargs=[1]),
    ),
    "very long texts": (
        [{"name": f"Torch.{'m' * 100_000}.0.forward", "module": "x" * 100_000, "slots": [slot()]}],
        [{"name": f"Torch.{'m' * 100_000}.0.forward", "raised": "y" * 100_000, "slots": [slot(summary=OTHER)]}],
    ),
    "ten thousand slots": (
        with_slots(*(slot(f"output.{at}") for at in range(10_000))),
        with_slots(*(slot(f"output.{at}", summary=OTHER) for at in range(0, 20_000, 2))),
    ),
    "ancestors in a circle": (one(parent=NAME, origin=NAME), one(parent=NAME, origin=NAME)),
}


@pytest.mark.parametrize("attack", PAIRS)
@pytest.mark.parametrize("swapped", [False, True], ids=["", "swapped"])
def test_hostile_calls_give_an_answer_or_one_clear_error(attack: str, swapped: bool, tmp_path: Path) -> None:
    lines = PAIRS[attack][:: -1 if swapped else 1]
    for name, held in zip("ab", lines, strict=True):
        write_run(tmp_path / name, held)
    for policy in ("noise-aware", "bitwise", "seed-2024"):
        try:
            texts = forms(tensorprobe.compare(tmp_path / "a", tmp_path / "b", policy=policy))
            assert len(texts[0]) < 50_000
        except TensorprobeError as error:
            texts = [str(error)]
        assert_harmless(texts)


@pytest.mark.parametrize("attack", PAIRS)
def test_hostile_calls_compared_with_themselves_do_not_diverge(attack: str, tmp_path: Path) -> None:
    write_run(tmp_path / "a", PAIRS[attack][0])
    try:
        result = tensorprobe.compare(tmp_path / "a", tmp_path / "a")
    except TensorprobeError:
        return
    assert result.divergence is None, str(result)


@pytest.mark.parametrize(
    "attack",
    [
        "escapes in every text",
        "escapes in slots",
        "64 dimensions of 2**62",
        "counts beyond 64 bits",
        "repeats beyond 64 bits",
    ],
)
@pytest.mark.parametrize("form", ["csv", "parquet", "xlsx"])
def test_hostile_calls_can_be_written_as_tables(
    attack: str, form: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, held in zip("ab", PAIRS[attack], strict=True):
        write_run(tmp_path / name, held)
    done = command(
        capsys, monkeypatch, "compare", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "out", "--format", form
    )
    assert done.code in (0, 1, 2), done.err
    assert_harmless([done.out, done.err])
    if form == "csv" and (tmp_path / "out" / "result.csv").exists():
        assert_harmless([(tmp_path / "out" / "result.csv").read_text(), (tmp_path / "out" / "advisor.txt").read_text()])


def test_escapes_in_what_a_run_says_of_itself_are_not_printed(tmp_path: Path) -> None:
    for name in "ab":
        write_run(tmp_path / name, one(stack=0))
        write_manifest(tmp_path / name, torch=ESCAPES, tool=ESCAPES, settings={"mode": ESCAPES})
        write_rank(tmp_path / name, device=ESCAPES, host=ESCAPES, coverage={"seen": 1, "blind_spots": {ESCAPES: 1}})
        frame = [ESCAPES, 3, ESCAPES, ESCAPES]
        (tmp_path / name / "step0" / "rank0" / "stacks.jsonl").write_text(
            json.dumps({"id": 0, "frames": [frame]}) + "\n"
        )
    write_calls(tmp_path / "b", [{"name": NAME, "stack": 0, "slots": [slot(summary=OTHER)]}])
    result = tensorprobe.compare(tmp_path / "a", tmp_path / "b")
    assert result.divergence is not None and result.divergence.source is not None
    texts = forms(result)
    assert_harmless(texts)
    ElementTree.fromstring(texts[3])


def test_a_policy_with_escapes_in_its_name_is_printed_plainly(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text('name = "\\u001b[2J"\n')
    write_run(tmp_path / "a", one())
    assert_harmless(forms(tensorprobe.compare(tmp_path / "a", tmp_path / "a", policy=str(tmp_path / "p.toml"))))


# Damage on one side.


def good(root: Path, factor: float = 1.0) -> Path:
    """Four calls, each with values."""
    calls = [
        call(f"Functional.gelu.{number}.forward", inputs=[X], outputs=[X * np.float32(number + factor)])
        for number in range(4)
    ]
    return write(root, calls)


def damage_line(root: Path, number: int, content: bytes = b"{") -> None:
    file = root / "step0" / "rank0" / "calls.jsonl"
    lines = file.read_bytes().splitlines()
    lines[number] = content
    file.write_bytes(b"\n".join(lines) + b"\n")


@pytest.mark.parametrize("side", ["a", "b"])
@pytest.mark.parametrize(
    "content",
    [b"{", b"", b"\0" * 50, b'{"name": "Functional.gelu.1.forward", "slots": 5}', b"\xff"],
    ids=["cut", "empty", "zeros", "no call", "not UTF-8"],
)
def test_a_damaged_line_on_one_side_is_counted_and_the_rest_is_compared(
    side: str, content: bytes, tmp_path: Path
) -> None:
    good(tmp_path / "a")
    good(tmp_path / "b")
    damage_line(tmp_path / side, 1, content)
    result = tensorprobe.compare(tmp_path / "a", tmp_path / "b")
    buckets = result.summary.buckets
    assert buckets.skipped.get("damaged line", 0) >= 1
    assert buckets.paired == 3
    assert {row.call for row in result.rows} == {row.candidate_call for row in result.rows}, "paired with another call"
    assert result.summary.statuses["agrees"] == 3
    assert 2 * buckets.paired + buckets.only_baseline + buckets.only_candidate + sum(buckets.skipped.values()) == 8
    assert "damaged line" in str(result)


@pytest.mark.parametrize("side", ["a", "b"])
def test_a_call_whose_partner_is_damaged_is_not_said_to_be_absent(side: str, tmp_path: Path) -> None:
    good(tmp_path / "a")
    good(tmp_path / "b")
    damage_line(tmp_path / side, 1)
    text = str(tensorprobe.compare(tmp_path / "a", tmp_path / "b"))
    assert "makes no such call" not in text


@pytest.mark.parametrize("size", [0, 1, 100, 200, 300])
def test_tensors_cut_short_are_known_by_their_statistics_if_at_all(size: int, tmp_path: Path) -> None:
    good(tmp_path / "a")
    good(tmp_path / "b", factor=1.5)
    file = tmp_path / "b" / "step0" / "rank0" / "tensors.bin"
    file.write_bytes(file.read_bytes()[:size])
    try:
        result = tensorprobe.compare(tmp_path / "a", tmp_path / "b")
    except CannotCompare:
        assert size < 200
        return
    lost = [row for row in result.rows if row.note.startswith("damaged: ")]
    assert lost and all(row.basis in ("statistics", "none") for row in lost)
    assert all(row.verdict == "unmeasured" for row in lost if row.basis == "none")
    assert not result.agrees
    assert_harmless(forms(result))


@pytest.mark.parametrize("name", ["calls.jsonl", "tensors.bin", "stacks.jsonl"])
@pytest.mark.parametrize(
    "make", [lambda path, to: path.symlink_to(to), lambda path, _: os.mkfifo(path)], ids=["link", "pipe"]
)
def test_links_and_pipes_in_place_of_files_are_not_followed(
    name: str, make: Callable[[Path, Path], None], tmp_path: Path
) -> None:
    good(tmp_path / "a")
    folder = good(tmp_path / "b", factor=1.5) / "step0" / "rank0"
    (folder / "stacks.jsonl").write_text('{"id": 0, "frames": []}\n')
    (folder / name).rename(tmp_path / "outside")
    make(folder / name, tmp_path / "outside")
    try:
        result = tensorprobe.compare(tmp_path / "a", tmp_path / "b")
    except TensorprobeError as error:
        assert name in str(error) or isinstance(error, CannotCompare)
        return
    if name == "tensors.bin":
        assert all(row.basis != "values" for row in result.rows)
    assert_harmless(forms(result))


def test_lost_stacks_cost_the_source_line_only(tmp_path: Path) -> None:
    write(tmp_path / "a", [call(NAME, inputs=[X], outputs=[X], stack=0)])
    write(tmp_path / "b", [call(NAME, inputs=[X], outputs=[X * 2], stack=0)])
    (tmp_path / "b" / "step0" / "rank0" / "stacks.jsonl").write_bytes(b"\xff\n{}\n")
    found = tensorprobe.compare(tmp_path / "a", tmp_path / "b").divergence
    assert found is not None and found.source is None


# Nothing to compare.


def test_two_runs_without_calls_cannot_be_compared(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "a", [])
    write_run(tmp_path / "b", [])
    with pytest.raises(NothingPaired, match="holds no calls"):
        tensorprobe.compare(tmp_path / "a", tmp_path / "b")
    assert command(capsys, monkeypatch, "compare", tmp_path / "a", tmp_path / "b").code == 2


def test_a_run_without_steps_cannot_be_compared(tmp_path: Path) -> None:
    write_manifest(tmp_path / "a")
    write_rank(tmp_path / "a", steps=[])
    good(tmp_path / "b")
    for pair in (("a", "b"), ("b", "a"), ("a", "a")):
        with pytest.raises(CannotCompare, match="no step of a rank is in both runs"):
            tensorprobe.compare(*(tmp_path / name for name in pair))


def test_no_common_step_and_no_common_rank_cannot_be_compared(tmp_path: Path) -> None:
    calls = [call(NAME, outputs=[X])]
    write(tmp_path / "a", {(0, 0): calls})
    write(tmp_path / "step", {(5, 0): calls})
    write(tmp_path / "rank", {(0, 3): calls})
    for name in ("step", "rank"):
        with pytest.raises(CannotCompare, match="holds steps 0 of ranks 0") as raised:
            tensorprobe.compare(tmp_path / "a", tmp_path / name)
        assert "candidate" in str(raised.value)


def test_nothing_but_damage_on_one_side_cannot_be_compared(tmp_path: Path) -> None:
    good(tmp_path / "a")
    write_run(tmp_path / "b", b"\xff\n" * 2000)
    with pytest.raises(TensorprobeError):
        tensorprobe.compare(tmp_path / "a", tmp_path / "b")


def test_lines_that_only_look_whole_in_the_index_are_told_as_damaged(tmp_path: Path) -> None:
    """A number that no float holds: the line is found when it is read, after the calls were paired."""
    line = json.dumps(one()[0]).replace("1.0, 0.0", "1" + "0" * 400 + ", 0").encode() + b"\n"
    for name in "ab":
        write_run(tmp_path / name, line)
    with pytest.raises(TensorprobeError, match="damaged"):
        tensorprobe.compare(tmp_path / "a", tmp_path / "b")


def test_a_run_that_changes_into_another_version_is_refused(tmp_path: Path) -> None:
    good(tmp_path / "a")
    good(tmp_path / "b")
    write_manifest(tmp_path / "b", version=3)
    with pytest.raises(TensorprobeError, match="version 3"):
        tensorprobe.compare(tmp_path / "a", tmp_path / "b")
    write_json(tmp_path / "b" / "manifest.json", [])
    with pytest.raises(RunDamaged):
        tensorprobe.compare(tmp_path / "a", tmp_path / "b")


def test_step_numbers_at_the_limit(tmp_path: Path) -> None:
    calls = [call(NAME, outputs=[X])]
    big = 10**18 - 1
    for name in "ab":
        write(tmp_path / name, {(big, 0): calls})
    result = tensorprobe.compare(tmp_path / "a", tmp_path / "b")
    assert result.agrees and result.summary.steps == [big]
    assert result.rows[0].step == big


# Hostile maps and policies.


@pytest.mark.parametrize(
    "content", [b"\xff\xfe", b"{" * 5000, b"a = b = c\n", b'{"a": 1}', b"\0", b"Functional.gelu = \x1b[2J\n", b""]
)
def test_a_hostile_map_is_refused_or_does_nothing(content: bytes, tmp_path: Path) -> None:
    run = good(tmp_path / "a")
    (tmp_path / "map").write_bytes(content)
    try:
        text = str(tensorprobe.compare(run, run, map=tmp_path / "map"))
    except TensorprobeError as error:
        text = str(error)
    assert_harmless([text])


@pytest.mark.parametrize(
    "content",
    [
        "[[rule]]\nnoise = nan\n",
        "[[rule]]\nnoise = inf\n",
        "[[rule]]\ndiverges = [{ max_abs = nan }]\n",
        '[[rule]]\ncall = "[" \nignore = true\n',
        "a" * 100_000,
    ],
)
def test_a_hostile_policy_is_refused_or_does_not_hide_a_divergence_unsaid(content: str, tmp_path: Path) -> None:
    good(tmp_path / "a")
    good(tmp_path / "b", factor=2.0)
    (tmp_path / "p.toml").write_text(content)
    try:
        result = tensorprobe.compare(tmp_path / "a", tmp_path / "b", policy=str(tmp_path / "p.toml"))
    except TensorprobeError as error:
        assert len(str(error)) < 2000
        return
    assert "nan" not in content or not result.agrees, "a limit that is no number lets everything pass"
