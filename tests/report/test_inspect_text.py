"""The words of inspect: answer first, what is missing is said, nothing from a run commands the terminal."""

from __future__ import annotations

import json
import math

import pytest

from tensorprobe.model import Coverage, Frame, Summary
from tensorprobe.model.overview import CallLine, CallView, Element, RunOverview, SegmentOverview, SlotView
from tensorprobe.report.inspect import (
    render_arguments,
    render_call,
    render_calls,
    render_lines,
    render_run,
    render_verification,
)
from tensorprobe.standard_json import json_ready
from tensorprobe.text import counted, plain, size


def overview(**changes: object) -> RunOverview:
    facts: dict[str, object] = {
        "path": "runs/a",
        "closed": True,
        "incomplete": None,
        "steps": [0, 2],
        "ranks": [0],
        "calls": 1204,
        "damaged": 0,
        "size_bytes": 1_800_000_000,
        "devices": {0: "npu:0"},
        "coordinates": {0: {"dp": 1, "tp": 0}},
        "tool": "0.1.0",
        "torch": "2.13.0",
        "python": "3.11.9",
        "created": "2026-01-02T03:04:05Z",
        "world_size": 8,
        "settings": {"level": "api", "steps": [0, 2], "max_bytes": None},
        "coverage": Coverage(
            seen=1300,
            recorded=1204,
            filtered=90,
            failed=6,
            slots=5000,
            slots_skipped={"sparse layout": 3},
            bytes_seen=4000,
            bytes_written=1000,
            blind_spots={"jit.script": 2},
            unmatched={"conv3d": ["conv2d"]},
            notes=["attention took its slow path"],
            first_error="RuntimeError: boom",
        ),
        "segments": [SegmentOverview(0, 0, 1000, 0, 1_500_000_000), SegmentOverview(2, 0, 204, 0, 300_000_000)],
        "example": "Functional.conv2d.0.forward",
    }
    return RunOverview(**{**facts, **changes})  # type: ignore[arg-type]


def slot_view(**changes: object) -> SlotView:
    facts: dict[str, object] = {
        "name": "output.0",
        "dtype": "float32",
        "shape": (8, 3),
        "device": "cpu",
        "stride": None,
        "grad": True,
        "summary": Summary(2.5, -1.0, 0.25, 4.0, 1, 0),
        "digest": None,
        "nbytes": 96,
        "skipped": None,
        "first": [1.0, math.nan, 0.5],
        "places": {"max": Element(2.5, [1, 2]), "nan": Element(math.nan, [0, 1])},
    }
    return SlotView(**{**facts, **changes})  # type: ignore[arg-type]


def call_view(**changes: object) -> CallView:
    facts: dict[str, object] = {
        "name": "Functional.linear.3.forward",
        "step": 4,
        "rank": 2,
        "index": 311,
        "level": "api",
        "direction": "forward",
        "module": "layers.7.mlp",
        "parent": None,
        "origin": None,
        "thread": 0,
        "repeat": 0,
        "raised": None,
        "frames": [Frame("train.py", 88, "forward", "y = F.linear(x, w)")],
        "args": [{"slot": "input.0"}],
        "kwargs": {"bias": None},
        "slots": [slot_view()],
    }
    return CallView(**{**facts, **changes})  # type: ignore[arg-type]


def test_run_is_told_answer_first_and_next_command_last() -> None:
    text = render_run(overview())
    lines = text.splitlines()
    assert lines[0] == "runs/a: 2 steps, 1 rank, 1,204 calls, 1.8 GB of tensors, closed"
    assert lines[-1].endswith("tensorprobe inspect runs/a Functional.conv2d.0.forward")
    for fact in (
        "1,300 calls seen: 1,204 recorded · 90 filtered · 6 failed",
        "sparse layout 3",
        "jit.script 2",
        "'conv3d' matches no call; nearest: conv2d",
        "attention took its slow path",
        "RuntimeError: boom",
        "npu:0 (rank 0)",
        "dp 1, tp 0",
        "level=api steps=[0, 2]",
        "world size 8",
    ):
        assert fact in text
    assert "max_bytes" not in text


def test_unclosed_run_says_so_first() -> None:
    told = "'runs/a' was never closed. Steps 0-11 are complete; step 12 has 418 calls on rank 0."
    lines = render_run(overview(closed=False, incomplete=told, coverage=Coverage())).splitlines()
    assert lines[0] == f"RunIncomplete: {told}"
    assert any("coverage    unknown" in line for line in lines)


def test_damage_is_told() -> None:
    text = render_run(overview(damaged=2, segments=[SegmentOverview(0, 0, 5, 2, 0)]))
    assert "DAMAGED: 2 lines cannot be read. List them with --verify" in text
    assert "2 damaged lines" in text


def test_list_of_segments_says_what_was_cut() -> None:
    assert "and 1 more: --limit 2" in render_run(overview(), limit=1)


def test_call_is_told_with_stack_arguments_and_tensors() -> None:
    text = render_call(call_view())
    assert text.splitlines()[0] == "Functional.linear.3.forward   step 4, rank 2, call 311"
    for fact in (
        "layers.7.mlp",
        "(<input.0>, bias=None)",
        "train.py:88 in forward: y = F.linear(x, w)",
        "float32 [8, 3]   cpu · 96 bytes · requires grad",
        "max 2.5 at [1, 2]   min -1   mean 0.25   norm 4   nan 1 first at [0, 1]",
        "values 1 nan 0.5 …",
    ):
        assert fact in text


def test_call_that_raised_or_was_repeated_says_so() -> None:
    text = render_call(call_view(raised="ValueError", repeat=1, thread=2, slots=[]))
    assert "ValueError" in text
    assert "1 (recomputed, or a second backward)" in text
    assert "No tensors." in text


def test_slot_without_values_says_why() -> None:
    text = render_call(
        call_view(slots=[slot_view(summary=None, first=[], places={}, skipped="sparse", problem="cut off")])
    )
    assert "not recorded: sparse" in text
    assert "cut off" in text


def test_calls_left_out_are_counted_and_the_export_is_named() -> None:
    text = render_calls([call_view()], 3, run="runs/my run")
    assert "2 more: --limit 3" in text
    assert text.endswith("tensorprobe export 'runs/my run' -o FOLDER --to npy --call Functional.linear.3.forward")


def test_list_of_calls_says_what_was_cut() -> None:
    line = CallLine("Torch.mm.0.forward", 0, 1, 7, 2, "head", ["float32 [2]"])
    text = render_lines([line], 9, run="runs/a")
    assert text.splitlines()[0] == "9 calls, the first 1:"
    assert "Torch.mm.0.forward  float32 [2]  in head  (repeat 2)" in text
    assert "8 more: --limit 9" in text
    assert render_lines([], 0, run="runs/a") == "No calls."


def test_verification_is_told() -> None:
    sound = render_verification([], calls=1, slots=2, bytes_hashed=64, cut=False)
    assert sound.startswith("INTACT  1 call, 2 slots, 64 bytes read")
    broken = render_verification(["a: x", "b: y"], calls=1, slots=2, bytes_hashed=0, cut=True, limit=1)
    assert broken.splitlines() == [
        "DAMAGED  at least 2 problems in 1 call, 2 slots, 0 bytes read:",
        "  a: x",
        "  and 1 more: --limit 2",
    ]


@pytest.mark.parametrize(
    ("args", "kwargs", "told"),
    [
        ([], {}, "()"),
        ([1, "a", [True, None]], {}, "(1, 'a', [True, None])"),
        ([{"type": "tuple", "value": [1]}, {"type": "tuple", "value": [1, 2]}], None, "((1,), (1, 2))"),
        ([{"type": "torch.dtype", "value": "torch.float32"}], {"x": {"type": "dict", "value": {"a": 1}}}, None),
        ([{"type": "slice", "value": [0, None, 2]}], {}, "(slice([0, None, 2]))"),
        (None, None, "()"),
    ],
)
def test_arguments_are_told_as_in_a_call(args: object, kwargs: object, told: str | None) -> None:
    assert render_arguments(args, kwargs) == (told or "(torch.float32, x={a: 1})")


def test_control_characters_never_reach_the_terminal() -> None:
    hostile = "\x1b[2J\x9b\u202e\nx"
    text = render_run(
        overview(created=hostile, settings={hostile: hostile}, coverage=Coverage(notes=[hostile], seen=1))
    )
    text += render_call(call_view(name=hostile, module=hostile, slots=[slot_view(name=hostile, dtype=hostile)]))
    text += render_lines([CallLine(hostile, 0, 0, 0, 0, hostile, [hostile])], 1, run="a")
    assert not {"\x1b", "\x9b", "\u202e"} & set(text)
    assert plain("a\nb") == r"a\nb"


def test_long_text_is_cut_and_says_so() -> None:
    assert plain("x" * 1000).endswith("… (700 more)")


def test_json_has_no_bare_infinities() -> None:
    ready = json_ready({"a": [math.nan, math.inf, -math.inf, 1.5], 3: ("x",)})
    assert json.loads(json.dumps(ready, allow_nan=False)) == {"a": ["NaN", "Infinity", "-Infinity", 1.5], "3": ["x"]}


@pytest.mark.parametrize(
    ("count", "told"), [(0, "0 bytes"), (999, "999 bytes"), (1000, "1 KB"), (1_234_567, "1.23 MB")]
)
def test_sizes_have_units(count: int, told: str) -> None:
    assert size(count) == told
    assert counted(1, "call") == "1 call"
