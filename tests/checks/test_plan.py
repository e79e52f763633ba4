"""Which calls are checked, which of them are equal, and what a plan says of those that it leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorprobe.checks.plan import Plan, plan_checks
from tensorprobe.checks.settings import PrecheckSettings
from tensorprobe.errors import NoData, NotFound, SettingsError
from tensorprobe.record import open_run
from tests.builders.runs import Call, Tensor, call, write

X = np.ones((2, 3), dtype=np.float32)
W = np.ones((4, 3), dtype=np.float32)
Y = np.full((2, 4), 3, dtype=np.float32)
SLOTS: list[Any] = [{"slot": "input.0"}, {"slot": "input.1"}]


def linear(number: int, *, x: Any = X, w: Any = W, y: Any = Y, args: Any = SLOTS, **more: Any) -> Call:
    return call(f"Functional.linear.{number}.forward", inputs=[x, w], outputs=[y], args=args, **more)


def plan(root: Path, recorded: Any, *, mode: str = "tensor", stacks: Any = (), **asked: Any) -> Plan:
    return plan_checks(open_run(write(root / "run", recorded, mode=mode, stacks=stacks)), PrecheckSettings(**asked))


def chosen(made: Plan) -> dict[str, list[str]]:
    """Each call that is run with those it stands for."""
    return {planned.task.call.name: planned.equal for planned in made.checks}


def test_equal_calls_are_run_once(tmp_path: Path) -> None:
    made = plan(tmp_path, [linear(0), linear(1, x=2 * X), linear(2)])
    assert chosen(made) == {
        "Functional.linear.0.forward": ["Functional.linear.1.forward", "Functional.linear.2.forward"]
    }


@pytest.mark.parametrize(
    "other",
    [
        {"args": [*SLOTS, None]},
        {"kwargs": {"alpha": 2}},
        {"x": np.ones((3, 3), dtype=np.float32)},
        {"x": X.astype(np.float64)},
        {"x": Tensor(X, grad=True)},
        {"x": Tensor(X, stride=[1, 2])},
        {"x": Tensor(X, skipped="too large")},
        {"y": Tensor(Y.astype(np.float16))},
    ],
    ids=["arguments", "keywords", "shape", "dtype", "grad", "stride", "skipped", "autocast"],
)
def test_calls_that_differ_are_both_run(other: dict[str, Any], tmp_path: Path) -> None:
    made = plan(tmp_path, [linear(0), linear(1, **other)])
    assert chosen(made) == {"Functional.linear.0.forward": [], "Functional.linear.1.forward": []}


def test_other_ops_are_other_calls(tmp_path: Path) -> None:
    made = plan(
        tmp_path, [call(f"Torch.{op}.0.forward", inputs=[X], args=[{"slot": "input.0"}]) for op in ("exp", "log")]
    )
    assert list(chosen(made)) == ["Torch.exp.0.forward", "Torch.log.0.forward"]


def test_without_dedupe_every_call_is_run(tmp_path: Path) -> None:
    made = plan(tmp_path, [linear(0), linear(1)], dedupe=False)
    assert chosen(made) == {"Functional.linear.0.forward": [], "Functional.linear.1.forward": []}


def test_with_real_data_other_values_are_another_call(tmp_path: Path) -> None:
    made = plan(tmp_path, [linear(0), linear(1, x=2 * X), linear(2)], data="real")
    assert chosen(made) == {
        "Functional.linear.0.forward": ["Functional.linear.2.forward"],
        "Functional.linear.1.forward": [],
    }


def test_with_real_data_other_gradients_are_another_call(tmp_path: Path) -> None:
    backward = [call(f"Functional.linear.{number}.backward", inputs=[number * Y]) for number in (1, 0)]
    made = plan(tmp_path, [linear(0), linear(1), *backward], data="real")
    assert len(made.checks) == 2


def test_the_recorded_backward_goes_along(tmp_path: Path) -> None:
    calls = [linear(0), linear(1, x=Tensor(X, grad=True)), call("Functional.linear.1.backward", inputs=[Y])]
    tasks = [planned.task for planned in plan(tmp_path, calls).checks]
    assert [None if task.backward is None else (task.backward.line, task.backward.name) for task in tasks] == [
        None,
        (2, "Functional.linear.1.backward"),
    ]


def test_a_recomputed_call_is_equal_and_the_one_with_gradients_is_run(tmp_path: Path) -> None:
    """Activation checkpointing runs the original without gradients."""
    made = plan(tmp_path, [linear(0), linear(0, x=Tensor(X, grad=True), repeat=1), linear(0, repeat=2)])
    assert chosen(made) == {
        "Functional.linear.0.forward": [
            "Functional.linear.0.forward (repeat 0)",
            "Functional.linear.0.forward (repeat 2)",
        ]
    }
    assert made.checks[0].task.call.repeat == 1


def test_modules_are_left_out_and_said(tmp_path: Path) -> None:
    module = call("Module.net.Linear.forward.0", inputs=[X], outputs=[Y], level="module")
    made = plan(tmp_path, [linear(0, parent="Module.net.Linear.forward.0"), module])
    assert list(chosen(made)) == ["Functional.linear.0.forward"]
    assert made.notes == ["1 call of a module not run as a whole, only the recorded calls inside"]


def test_only_the_first_step_unless_asked(tmp_path: Path) -> None:
    calls = {(step, rank): [linear(0), linear(step + 1)] for step in (3, 4) for rank in (0, 1)}
    made = plan(tmp_path, calls)
    assert chosen(made) == {
        "Functional.linear.0.forward": [
            "Functional.linear.4.forward (step 3, rank 0)",
            "Functional.linear.0.forward (step 3, rank 1)",
            "Functional.linear.4.forward (step 3, rank 1)",
        ]
    }
    assert made.notes == ["only step 3 of steps 3-4 was checked; choose with --steps"]
    other = plan_checks(open_run(tmp_path / "run"), PrecheckSettings(steps="4", ranks=1, dedupe=False))
    assert [(one.task.step, one.task.rank) for one in other.checks] == [(4, 1), (4, 1)]
    assert other.notes == []


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ("Functional.linear.1", ["Functional.linear.1.forward"]),
        ("Functional.linear.1.forward", ["Functional.linear.1.forward"]),
        ("Functional.linear.1.backward", ["Functional.linear.1.forward"]),
        ("Functional_linear_1_forward", ["Functional.linear.1.forward"]),
        ("Functional*linear*1", ["Functional.linear.1.forward"]),
        ("*.exp.*", ["Torch.exp.0.forward"]),
        (["Torch.exp", "Functional.linear.0"], ["Functional.linear.0.forward", "Torch.exp.0.forward"]),
    ],
)
def test_calls_are_chosen_by_name_or_glob(names: Any, found: list[str], tmp_path: Path) -> None:
    exp = call("Torch.exp.0.forward", inputs=[X], outputs=[X], args=[{"slot": "input.0"}])
    assert list(chosen(plan(tmp_path, [linear(0), linear(1), exp], calls=names, dedupe=False))) == found


def test_a_name_that_fits_nothing_is_told_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"no call that can be run fits 'Functional.linaer.0'.*\n.*Functional.linear.0"):
        plan(tmp_path, [linear(0)], calls=["Functional.linear", "Functional.linaer.0"])


@pytest.mark.parametrize("asked", [{"steps": 7}, {"ranks": "1"}])
def test_a_step_or_rank_that_is_not_there_is_told(asked: Any, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"no (step|rank) (7|1)"):
        plan(tmp_path, [linear(0)], **asked)


def test_real_data_need_values(tmp_path: Path) -> None:
    with pytest.raises(NoData, match="holds no values"):
        plan(tmp_path, [linear(0)], mode="summary", data="real")
    assert len(plan_checks(open_run(tmp_path / "run"), PrecheckSettings()).checks) == 1


def test_the_line_of_the_program_is_there(tmp_path: Path) -> None:
    stacks = [
        {"id": 0, "frames": [["model.py", 88, "forward", "y = F.linear(x, w)"], ["main.py", 3, "<module>", "go()"]]}
    ]
    made = plan(tmp_path, [linear(0, stack=0), linear(1, w=X)], stacks=stacks)
    assert [planned.source and str(planned.source) for planned in made.checks] == [
        "model.py:88 in forward: y = F.linear(x, w)",
        None,
    ]


def test_damaged_lines_are_counted(tmp_path: Path) -> None:
    write(tmp_path / "run", [linear(0), linear(1, w=X)])
    calls = tmp_path / "run" / "step0" / "rank0" / "calls.jsonl"
    lines = calls.read_text().splitlines()
    calls.write_text("\n".join([lines[0], "{broken", lines[1], ""]))
    (tmp_path / "run" / "step0" / "rank0" / "stacks.jsonl").write_text("{broken\n")
    made = plan_checks(open_run(tmp_path / "run"), PrecheckSettings())
    assert len(made.checks) == 2
    assert len(made.notes) == 1 and made.notes[0].startswith("1 damaged line of the run skipped, the first: ")


def test_a_damaged_stack_loses_the_line_and_not_the_call(tmp_path: Path) -> None:
    write(tmp_path / "run", [linear(0, stack=0)])
    (tmp_path / "run" / "step0" / "rank0" / "stacks.jsonl").write_text("{broken\n")
    made = plan_checks(open_run(tmp_path / "run"), PrecheckSettings())
    assert (len(made.checks), made.checks[0].source) == (1, None)
    assert "stacks.jsonl" in made.notes[0]


WRONG = [
    ({"data": "reel"}, "expected random or real"),
    ({"jobs": -1}, "jobs is -1; expected a whole number, 0 or more"),
    ({"jobs": True}, "jobs is True"),
    ({"time_limit_s": 0}, "expected a number greater than 0"),
    ({"steps": "x"}, "steps: 'x' is not a number"),
    ({"calls": []}, "calls is empty; expected names"),
    ({"calls": [1]}, "expected a name or a list of names"),
]


@pytest.mark.parametrize(("asked", "message"), WRONG)
def test_wrong_settings_are_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        PrecheckSettings(**asked)
