"""`tensorprobe find`: two commands in, the proved call out; what is said beforehand, limits, resuming, chance."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import tensorprobe
from tensorprobe.engine.narrow import choose_window
from tests.e2e.programs import Program, command, scale_second_layer
from tests.taps.scripts import run_tool, write_script

SCRIPT = """\
import sys
import torch
from torch import nn

torch.manual_seed(0)
if "--unseeded" in sys.argv:
    torch.seed()
net = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 1)).to("npu")
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    net(torch.ones(4, 8).to("npu")).square().sum().backward()
    optimizer.step()
print("trained")
"""
TOOL = (sys.executable, "-c", "from tensorprobe.cli.main import main; main()")
SOFTMAX, ATEN = "Functional.softmax.0.forward", "Aten._softmax.default.0.forward"


def _train(folder: Path, *options: str, fault: str = "") -> list[str]:
    script = write_script(folder, SCRIPT)
    faults = ["--fault", fault] if fault else []
    return [*TOOL, "sim", *faults, "--", sys.executable, str(script), *options]


def _find(folder: Path, *words: str, code: int) -> tuple[dict[str, Any], str]:
    done = run_tool(["find", "--json", "-o", "found", *words], folder, code=code)
    return json.loads(done.stdout), done.stderr


def test_the_wrong_kernel_is_proved_and_a_second_time_nothing_is_run_again(tmp_path: Path) -> None:
    words = ["--", *_train(tmp_path), "--vs", *_train(tmp_path, fault="softmax-tail")]
    found, told = _find(tmp_path, *words, code=1)
    assert "at most" in told.splitlines()[0] and told.index("both commands twice") < told.index("running ")
    assert [twice["first_difference"] for twice in found["repeats"].values()] == [None, None]
    assert found["comparison"]["divergence"]["call"] == SOFTMAX
    assert found["comparison"]["divergence"]["proof"]["candidate_wrong"]
    assert found["inside"]["divergence"]["call"] == ATEN
    assert len(found["executions"]) == 8 and found["window"]["steps"] == [0]
    assert "trained" in (tmp_path / "found/values-candidate.log").read_text()
    assert {"report.html", "replay.py"} <= {path.name for path in (tmp_path / "found/result").iterdir()}

    again, told = _find(tmp_path, *words, code=1)
    assert again == found and "running " not in told
    other = run_tool(["find", "-o", "found", "--", "a", "--vs", "b"], tmp_path, code=2)
    assert "holds another search: baseline, candidate differ" in other.stderr


def test_a_command_that_does_not_repeat_itself_is_said_first_and_blames_nothing(tmp_path: Path) -> None:
    words = ["--", *_train(tmp_path, "--unseeded"), "--vs", *_train(tmp_path, "--unseeded")]
    done = run_tool(["find", "-o", "found", *words], tmp_path, code=2)
    first, second, third, *_ = done.stdout.splitlines()
    assert first.startswith("NOT REPEATABLE  two executions of the baseline's command differ")
    assert second.startswith("NOT REPEATABLE  two executions of the candidate's") and third.startswith("UNKNOWN")


def test_with_a_baseline_of_summaries_the_candidate_is_audited_alone(tmp_path: Path) -> None:
    run_tool(["capture", "-o", "given", "--mode", "summary", "--", *_train(tmp_path)], tmp_path)
    words = ["--baseline", "given", "--", *_train(tmp_path, fault="softmax-tail")]
    found, _ = _find(tmp_path, *words, code=1)
    assert found["comparison"]["divergence"]["call"] == SOFTMAX
    assert {call["call"] for call in found["audits"]["values"]["checks"] if call["forward"] == "fail"} == {SOFTMAX}
    assert found["audits"]["inside"]["failed"] == 1
    assert all("baseline" not in one["run"] for one in found["executions"])


def test_values_stay_below_the_limit_and_are_those_around_the_difference(tmp_path: Path) -> None:
    summary = {"mode": "summary"}
    first = Program(settings=summary).record(tmp_path / "first")
    second = Program(change=scale_second_layer, settings=summary).record(tmp_path / "second")
    answer, run = tensorprobe.compare(first, second).summary, tensorprobe.open_run(first)
    assert answer.divergence is not None
    whole = choose_window(answer, run, most_bytes=1 << 30)
    part = choose_window(answer, run, most_bytes=20_000)
    assert whole is not None and part is not None
    assert whole.names == [] and whole.calls == whole.of_calls
    assert 0 < part.size_bytes <= 20_000 < whole.size_bytes and part.calls < whole.calls
    assert part.names[0] == answer.divergence.call.removesuffix(".forward")
    assert choose_window(tensorprobe.compare(first, first).summary, run, most_bytes=1) is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--", "python", "a.py"], "expected two commands"),
        (["--baseline", "r", "--", "a", "--vs", "b"], "leave out --vs"),
        (["--", "a", "--vs"], "a command is missing"),
        (["--max-bytes", "much", "--", "a", "--vs", "b"], "is not a size"),
    ],
)
def test_a_wrong_command_line_is_refused_before_anything_runs(
    words: list[str], said: str, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    done = command(capsys, monkeypatch, "find", "-o", tmp_path / "found", *words)
    assert done.code == 2 and said in done.err and not (tmp_path / "found").exists()


def test_a_dry_run_says_what_would_be_done_and_does_nothing(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    done = command(capsys, monkeypatch, "find", "-o", tmp_path / "found", "--dry-run", "--", "a", "--vs", "b")
    assert done.code == 0 and "ATen calls inside" in done.err and not (tmp_path / "found").exists()


def test_what_a_command_printed_before_it_failed_is_shown(tmp_path: Path) -> None:
    script = write_script(tmp_path, "raise SystemExit('no data')")
    fails = [sys.executable, str(script)]
    done = run_tool(["find", "-o", "found", "--", *fails, "--vs", *fails], tmp_path, code=2)
    assert "ended with exit code 1 and recorded nothing" in done.stderr and "no data" in done.stderr
