"""What is compared, by what it is judged, where it goes; and that what cannot be meant is refused before anything is touched."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensorprobe
from tensorprobe.errors import CaptureIncomplete, RunExists, SettingsError, UnknownSetting
from tensorprobe.judge.policy import Policy, Rule
from tensorprobe.model.online import OnlineResult
from tensorprobe.watches.online.workers import Workers
from tests.taps.scripts import run_python, write_script
from tests.watches.online import faulty
from tests.watches.online.faulty import DOUBLE, NAME, make_model, train
from tests.watches.online.test_harmless import assert_accounted_for


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[None]:
    with faulty.installed():
        yield


def watch_training(length: int = 1, **settings: Any) -> OnlineResult:
    model = make_model()
    with tensorprobe.online(model, on_fail="report", libraries=NAME, **settings) as watch:
        train(model, length)
    assert_accounted_for(watch.result)
    return watch.result


@pytest.fixture(scope="module")
def everything() -> OnlineResult:
    return watch_training(3)


def test_every_nth_call_of_each_op_is_compared(everything: OnlineResult) -> None:
    result = watch_training(3, every=2)
    assert result.seen == everything.seen
    for op, count in everything.ops.items():
        assert result.ops[op].compared == (count.compared + 1) // 2, op
    assert result.unsampled == everything.compared - result.compared
    assert [(row.call, row.step) for row in result.failures] == [(f"{DOUBLE}.0.forward", step) for step in range(3)]


def test_one_call_of_each_kind_is_compared(everything: OnlineResult) -> None:
    result = watch_training(3, once_per_kind=True)
    assert result.seen == everything.seen and set(result.ops) == set(everything.ops)
    assert result.compared < everything.compared / 2
    assert result.unsampled == everything.compared - result.compared
    assert result.failures[0].call == f"{DOUBLE}.0.forward"


@pytest.mark.parametrize("sampling", [{"once_per_kind": True}, {"every": 2}], ids=str)
def test_calls_that_were_not_asked_for_use_up_no_sample(sampling: dict[str, Any]) -> None:
    """The second of two equal layers is asked for: that the first has the same kind of inputs does not matter."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with tensorprobe.online(model, on_fail="report", modules=["1"], **sampling) as watch:
        model(torch.randn(2, 4))
    assert watch.result.ops["Aten.addmm.default"].compared == 1
    assert_accounted_for(watch.result)


def test_ops_modules_and_steps_are_chosen(everything: OnlineResult) -> None:
    by_op = watch_training(ops=["*tanh*"])
    assert set(by_op.ops) == {"Aten.tanh.default", "Aten.tanh_backward.default"}
    by_module = watch_training(modules=["2"])
    assert set(by_module.ops) == set(by_op.ops)
    assert by_op.filtered and by_op.failed == by_module.failed == 0
    by_step = watch_training(3, steps=[1])
    assert by_step.steps == [1] and {row.step for row in by_step.failures} == {1}
    assert by_step.seen < everything.seen / 2


def test_a_name_that_nothing_has_is_told() -> None:
    with pytest.warns(CaptureIncomplete, match="nothing matched 'tanhh'"):
        result = watch_training(ops=["tanhh"])
    assert result.compared == 0


def test_nothing_compared_is_not_success() -> None:
    with tensorprobe.online(on_fail="report", steps=[5]) as watch:
        torch.ones(3) + 1
    assert watch.report.startswith("NOTHING COMPARED: 0 ATen calls were seen")


POLICIES = {
    "seed-2024": (True, "one_minus_cosine"),
    "seed-2023": (True, "one_minus_cosine"),
    "bitwise": (False, "bit_identical"),
    "binary": (False, "bit_identical"),
    "absolute": (False, "max_abs"),
    "seed": (False, "share_over_1e4"),
}
"""Policy → whether a hundredth too much is good enough for it, and else by what it is not."""


@pytest.mark.parametrize("policy", POLICIES)
def test_the_policy_judges(policy: str) -> None:
    passes, figure = POLICIES[policy]
    result = watch_training(policy=policy, ops=["*double*"])
    assert result.policy == policy
    assert (result.failed == 0) == passes
    assert {row.judged_by for row in result.failures} == (set() if passes else {figure})


@pytest.mark.parametrize("reference", ["cpu", "cpu-fp64"])
def test_bits_are_compared_in_the_dtype_of_the_result(reference: str) -> None:
    with tensorprobe.online(on_fail="report", policy="bitwise", reference=reference) as watch:
        (torch.arange(4.0) * 2).bfloat16().sum()
        torch.zeros(0) + 1
        torch.zeros(3) / 0
    assert watch.result.compared >= 6 and watch.result.failed == 0


def test_rules_of_a_file_come_first(tmp_path: Path) -> None:
    rules = tmp_path / "mine.toml"
    rules.write_text(f'[[rule]]\nop = "{DOUBLE}"\ncall = "*.forward"\nignore = true\n')
    result = watch_training(policy=rules)
    assert [row.call for row in result.failures] == [f"{DOUBLE}.0.backward"]


@pytest.mark.parametrize(("noise", "fails"), [(1e6, False), (1e-3, True)])
def test_a_rule_may_allow_more_noise_or_less(noise: float, fails: bool) -> None:
    policy = Policy(name="mine", rules=[Rule(noise=noise)])
    with tensorprobe.online(on_fail="report", libraries=NAME, policy=policy) as watch:
        (torch.linspace(0.1, 7, 50).exp() if fails else torch.ops.tensorprobe_faulty.double(torch.ones(5)))
    assert (watch.result.failed > 0) == fails


def test_a_policy_of_one_rule_judges_only_what_the_rule_is_for() -> None:
    policy = Policy(name="mine", rules=[Rule(op="*exp*", diverges=[{"max_abs": 0.0}])])
    with tensorprobe.online(on_fail="report", policy=policy) as watch:
        torch.linspace(0.1, 7, 50).exp().sin()
    assert [row.op for row in watch.failures] == ["Aten.exp.default"]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "reference": ({"reference": "cpu-fp46"}, "reference is 'cpu-fp46'; .* Did you mean 'cpu-fp64'"),
    "no reference": ({"reference": None}, "reference is None"),
    "on_fail": ({"on_fail": "sav", "out": "x"}, "on_fail is 'sav'; .* Did you mean 'save'"),
    "nowhere to save": ({"on_fail": "save"}, "Pass out=FOLDER"),
    "every": ({"every": 0}, "every is 0; expected a whole number, 1 or more"),
    "workers": ({"workers": -1}, "workers is -1"),
    "stop_after": ({"stop_after": True}, "stop_after is True"),
    "most_saved": ({"most_saved": 1.5}, "most_saved is 1.5"),
    "heal with workers": ({"heal": True, "workers": 1}, "heal needs the reference's result at once"),
    "chain with workers": ({"chain": True, "workers": 1}, "chain follows every call"),
    "chain with samples": ({"chain": True, "every": 2}, "chain follows every call"),
    "chain with kinds": ({"chain": True, "once_per_kind": True}, "chain follows every call"),
    "policy": ({"policy": "noise-awre"}, "unknown policy 'noise-awre'. Did you mean 'noise-aware'"),
    "policy file": ({"policy": "absent.toml"}, "no policy file 'absent.toml'"),
    "budget": ({"budget": "much"}, "budget: 'much' is not a size"),
    "ops": ({"ops": [3]}, r"ops is \[3\]; expected a name"),
    "modules": ({"modules": 3}, "modules is 3; expected a name"),
    "steps": ({"steps": "a-b"}, "steps"),
    "rule": ({"policy": Policy(name="mine", rules=[Rule()])}, "rule 1 of policy 'mine' needs exactly one of"),
    "unknown": ({"refrence": "cpu"}, "unknown setting 'refrence'. Did you mean 'reference'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_meant_is_refused_before_anything_is_touched(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, message = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=message) as refused:
        tensorprobe.online(**{"on_fail": "report", **settings})
    assert (type(refused.value) is UnknownSetting) == (case == "unknown")
    assert list(tmp_path.iterdir()) == []


def test_one_name_need_not_be_in_a_list() -> None:
    assert set(watch_training(ops="*tanh*").ops) == {"Aten.tanh.default", "Aten.tanh_backward.default"}


def test_results_are_replaced_only_when_told_and_only_ours(tmp_path: Path) -> None:
    with tensorprobe.online(out=tmp_path):
        torch.ones(3) + 1
    with pytest.raises(RunExists, match=r"already holds results.*overwrite=True"):
        tensorprobe.online(out=tmp_path).start()
    with tensorprobe.online(out=tmp_path, overwrite=True) as watch:
        torch.ones(3) * 2
    held = json.loads((tmp_path / "rank0" / "online.json").read_text())
    assert set(held["ops"]) == set(watch.result.ops) and "Aten.mul.Tensor" in held["ops"]
    mine = tmp_path / "mine" / "rank0"
    mine.mkdir(parents=True)
    (mine / "thesis.txt").write_text("three years")
    with pytest.raises(RunExists, match="other files than those of an online compare"):
        tensorprobe.online(out=mine.parent, overwrite=True).start()
    assert (mine / "thesis.txt").read_text() == "three years"


def test_a_place_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="cannot write to out="):
        tensorprobe.online(out=tmp_path / "file").start()


def test_a_second_watch_is_refused_and_replaces_nothing(tmp_path: Path) -> None:
    with tensorprobe.online(out=tmp_path) as first:
        torch.ones(3) + 1
        with pytest.raises(SettingsError, match="is running in this process"):
            tensorprobe.online(out=tmp_path, overwrite=True).start()
        torch.ones(3) + 1
    assert first.result.ops["Aten.add.Tensor"].compared == 2
    assert (tmp_path / "rank0" / "online.json").exists()


def test_a_watch_is_for_one_time_and_says_nothing_before() -> None:
    watch = tensorprobe.online(on_fail="report")
    with pytest.raises(SettingsError, match="was not started"):
        watch.report  # noqa: B018
    with watch:
        pass
    with pytest.raises(SettingsError, match="already been started"):
        watch.start()


KILLED = """
    import os, signal, sys
    sys.path.insert(0, {tests!r})
    import torch
    import tensorprobe
    from tests.watches.online import faulty

    with faulty.installed():
        model = faulty.make_model()
        with tensorprobe.online(model, out="out", libraries=faulty.NAME):
            faulty.train(model, 2)
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_found_survives_a_kill(tmp_path: Path) -> None:
    script = write_script(tmp_path, KILLED.format(tests=str(Path(__file__).parents[3])))
    run_python([script], tmp_path, code=-signal.SIGKILL)
    folder = tmp_path / "out" / "rank0"
    rows = [json.loads(line) for line in (folder / "failures.jsonl").read_text().splitlines()]
    assert [(row["step"], row["call"]) for row in rows] == [
        (step, f"{DOUBLE}.0.{way}") for step in range(2) for way in ("forward", "backward")
    ]
    assert all((Path(tmp_path, row["saved"]) / "replay.py").is_file() for row in rows)
    assert not (folder / "online.json").exists()
    with tensorprobe.online(out=tmp_path / "out", overwrite=True):  # it is ours, and may be replaced
        pass


def test_workers_hold_no_more_than_the_budget() -> None:
    workers, gate, order, entered = Workers(1, 100), threading.Event(), [], threading.Event()
    workers.put(lambda: (entered.set(), gate.wait(), order.append("first")), 60)  # type: ignore[func-returns-value, arg-type]
    entered.wait()
    waiting = threading.Thread(target=lambda: workers.put(lambda: order.append("second"), 60))
    waiting.start()
    workers.put(lambda: order.append("small"), 30)
    assert order == []
    gate.set()
    waiting.join()
    workers.settle()
    assert sorted(order) == ["first", "second", "small"] and order[0] == "first"
    workers.put(lambda: order.append("too large for it"), 1000)  # one is always let in
    workers.close()
    assert order[-1] == "too large for it"
