"""What the older tools of the family get wrong in a comparison, and this one must not."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tensorprobe
from tensorprobe.errors import NothingPaired, SettingsError
from tests.builders.runs import call, write
from tests.e2e.programs import Program, command, compare_programs, scale_second_layer
from tests.taps.scripts import environment, run_tool, write_script

X = np.linspace(-1, 1, 48, dtype=np.float32)


# A call with no partner is no pass, and calls that only the baseline has are in the report.


@pytest.mark.parametrize("side", ["only_baseline", "only_candidate"])
def test_a_call_without_a_partner_is_no_pass(side: str, tmp_path: Path) -> None:
    both = [call("Functional.gelu.0.forward", inputs=[X], outputs=[X])]
    more = [*both, call("Functional.silu.0.forward", inputs=[X], outputs=[X], module="mlp")]
    runs = (more, both) if side == "only_baseline" else (both, more)
    result = tensorprobe.compare(*(write(tmp_path / name, calls) for name, calls in zip("ab", runs, strict=True)))
    assert not result.agrees and result.exit_code == 1
    assert getattr(result.summary.buckets, side) == 1
    (finding,) = result.findings
    assert (finding.kind, finding.call, finding.module) == (side, "Functional.silu.0.forward", "mlp")
    text = str(result)
    assert f"Functional.silu.0.forward in module 'mlp', {side.replace('_', ' in ', 1)}" in text
    assert f"1 {side.replace('_', ' in ', 1)}" in text


def test_calls_without_a_partner_are_told_though_something_else_diverges(tmp_path: Path) -> None:
    runs = [
        [call("Functional.gelu.0.forward", inputs=[X], outputs=[X * np.float32(scale)]), *more]
        for scale, more in ((1, [call("Torch.sin.0.forward", inputs=[X], outputs=[X])]), (2, []))
    ]
    result = tensorprobe.compare(*(write(tmp_path / name, calls) for name, calls in zip("ab", runs, strict=True)))
    assert result.divergence is not None and result.divergence.call == "Functional.gelu.0.forward"
    assert "Torch.sin.0.forward, only in baseline" in str(result)


def test_a_call_without_a_partner_is_no_pass_however_many_other_findings_there_are(tmp_path: Path) -> None:
    """What is cut from a list of findings must not be cut from the answer."""
    many = 10_050
    runs = [[call(f"Tensor.add.{number}.forward", args=[value]) for number in range(many)] for value in (0, 1)]
    runs[0].append(call("Torch.sin.0.forward", outputs=[X]))
    result = tensorprobe.compare(*(write(tmp_path / name, calls) for name, calls in zip("ab", runs, strict=True)))
    assert result.summary.buckets.only_baseline == 1
    assert not result.agrees
    assert result.summary.findings_total == many + 1


def test_no_pair_at_all_cannot_be_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = (write(tmp_path / name, [call(f"Torch.{name}.0.forward", outputs=[X])]) for name in ("sin", "cos"))
    with pytest.raises(NothingPaired, match="0 of 2 calls have a partner"):
        tensorprobe.compare(a, b)
    done = command(capsys, monkeypatch, "compare", a, b)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("NothingPaired: 0 of 2 calls")


# A weight scaled by 1.01 is named, and the exit code says so.


@pytest.mark.parametrize("level", ["api", "module", "mix"])
def test_a_scaled_weight_is_named(level: str, tmp_path: Path) -> None:
    settings = {"level": level}
    result = compare_programs(
        tmp_path, Program(settings=settings), Program(change=scale_second_layer, settings=settings)
    )
    assert result.exit_code == 1
    assert [(each.kind, each.name, each.detail) for each in result.summary.externals] == [
        ("parameter", "blocks.1.layer.weight", "scaled by 1.01")
    ]
    found = result.divergence
    assert found is not None and found.module == "blocks.1.layer"
    assert result.summary.statuses["introduced"] == 0, f"{found.call} is blamed for what a weight has done"
    assert "parameters differ before step 0: blocks.1.layer.weight, scaled by 1.01" in str(result)


def test_a_scaled_weight_gives_exit_code_1_and_the_same_run_0(tmp_path: Path) -> None:
    a, b = Program().record(tmp_path / "a"), Program(change=scale_second_layer).record(tmp_path / "b")
    done = run_tool(["compare", a, b], tmp_path, code=1)
    assert done.stdout.startswith(
        "DIVERGED  first at step 0, rank 0: Functional.linear.1.forward in module 'blocks.1.layer'"
    )
    assert "scaled by 1.01" in done.stdout
    assert run_tool(["compare", a, a], tmp_path, code=0).stdout.startswith("AGREES")


# A killed process leaves a run that can be compared; any path will do; typing errors are told.

KILLED = """
    import os, signal, sys
    import torch
    import tensorprobe

    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 8)
    kill_at = int(sys.argv[2])
    with tensorprobe.capture(sys.argv[1], model=layer, level="api", mode="tensor") as probe:
        hidden = torch.ones(4, 8)
        for number in range(300):
            hidden = torch.tanh(layer(hidden))
            if number == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.usefixtures("warm_processes")
def test_the_run_of_a_killed_process_is_compared_as_far_as_it_goes(tmp_path: Path) -> None:
    script = write_script(tmp_path, KILLED)
    for name, kill_at, code in (("whole", -1, 0), ("killed", 200, -signal.SIGKILL)):
        done = subprocess.run(
            [sys.executable, script, tmp_path / name, str(kill_at)], env=environment(), capture_output=True, timeout=120
        )
        assert done.returncode == code, done.stderr
    killed = tensorprobe.open_run(tmp_path / "killed")
    calls = len(killed.names(0, 0))
    assert not killed.closed and calls >= 100
    result = tensorprobe.compare(tmp_path / "whole", tmp_path / "killed")
    buckets = result.summary.buckets
    assert (buckets.paired, buckets.only_candidate) == (calls, 0)
    assert (result.exit_code, buckets.only_baseline) == (2, 0)
    rest = buckets.skipped["after the end of the candidate"]
    assert buckets.paired + rest == len(tensorprobe.open_run(tmp_path / "whole").names(0, 0))
    assert result.summary.statuses["agrees"] == calls
    assert str(result).startswith("UNFINISHED  the candidate ends in step 0;")


@pytest.mark.parametrize("name", ["with space", "größe-模型-Ω", "quote'\"$(x)", "-dash", "a=b&c;d#e%20"])
def test_any_path_will_do(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    a = write(tmp_path / name / "a b", [call("Functional.gelu.0.forward", inputs=[X], outputs=[X])])
    b = write(tmp_path / name / "ü", [call("Functional.gelu.0.forward", inputs=[X], outputs=[X * 2])])
    done = command(capsys, monkeypatch, "compare", a, b, "-o", tmp_path / name / "out ä", "--format", "csv")
    assert done.code == 1 and done.out.startswith("DIVERGED") and done.err == ""
    assert sorted(path.name for path in (tmp_path / name / "out ä").iterdir()) == [
        "advisor.txt",
        "evidence.json",
        "report.html",
        "result.csv",
        "summary.json",
    ]
    assert json.loads((tmp_path / name / "out ä" / "summary.json").read_text())["candidate"]["path"] == str(b)


@pytest.mark.parametrize(
    ("option", "told"),
    [
        (["--polcy", "bitwise"], "--polcy"),
        (["--policy", "noise-awre"], "Did you mean 'noise-aware'?"),
        (["--policy", "mine.tmol"], "unknown policy 'mine.tmol'"),
        (["--format", "jsn"], "jsn"),
        (["--steps", "0-x"], "steps"),
        (["--steps", "7"], "no step 7 in either run"),
        (["--ranks", "1"], "no rank 1 in either run"),
        (["--map", "absent.map"], "map file 'absent.map' does not exist"),
        (["--engine", "local", "--address", "auto"], "it needs engine 'ray'"),
        (["--format", "xlsx"], "writes a file: add -o FOLDER"),
        (["--threads", "0"], "threads"),
        (["--shard", "1"], "-o FOLDER"),
    ],
)
def test_a_typing_error_is_told_and_exits_with_2(
    option: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write(tmp_path / "a", [call("Functional.gelu.0.forward", outputs=[X])])
    done = command(capsys, monkeypatch, "compare", run, run, *option)
    assert (done.code, done.out) == (2, "")
    assert told in done.err and "Traceback" not in done.err


def test_a_run_that_is_not_there_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write(tmp_path / "runs" / "first", [call("Functional.gelu.0.forward", outputs=[X])])
    for place, told in ((tmp_path / "rnus", "no folder"), (tmp_path / "runs", "first"), (run / "rank0.json", "")):
        done = command(capsys, monkeypatch, "compare", run, place)
        assert done.code == 2 and done.err.startswith("RunNotFound: ") and told in done.err


def test_a_misspelt_argument_of_the_function_is_refused(tmp_path: Path) -> None:
    run = write(tmp_path / "a", [call("Functional.gelu.0.forward", outputs=[X])])
    with pytest.raises(TypeError, match="polcy"):
        tensorprobe.compare(run, run, polcy="bitwise")  # type: ignore[call-arg]
    for wrong in ({"engine": "rya"}, {"table": "cvs"}, {"jobs": 0}, {"threads": -1}, {"policy": "bitwize"}):
        with pytest.raises(SettingsError):
            tensorprobe.compare(run, run, **wrong)  # type: ignore[arg-type]
