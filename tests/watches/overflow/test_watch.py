"""The watch around a training: where it stops, what it tells and keeps, and that it leaves the training as it was."""

from __future__ import annotations

import json
import math
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensorprobe
from tensorprobe import torch_names
from tensorprobe.errors import RunExists, SettingsError, TrainingStopped, UnknownSetting
from tensorprobe.model.overflow import OverflowReport
from tensorprobe.standard_json import decode, schema
from tensorprobe.watches.overflow import KeptCall, OverflowWatch, find_overflow
from tensorprobe.watches.overflow.looker import hold
from tensorprobe.watches.overflow.ring import read_ring
from tests import warm
from tests.watches.overflow.plants import linear, numbers


class Bursts(nn.Module):
    """Overflows in forward, or only in backward."""

    def __init__(self, where: str = "forward") -> None:
        super().__init__()
        self.first, self.where = linear(4, 4), where

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return torch.exp(y * 500) if self.where == "forward" else (y * 0).sqrt()


def test_a_forward_finding_stops_right_after_the_call() -> None:
    went_on = False
    with OverflowWatch(stop_after=1) as watch:
        with pytest.raises(
            TrainingStopped,
            match=r"stopped after 1 call that made a NaN or inf; the last is Torch\.exp\.0\.forward, step 0, rank 0",
        ):
            torch.exp(torch.full((3,), 100.0))
            went_on = True
        torch.exp(torch.full((3,), 100.0))  # it is raised once, and nothing is watched any more
    assert not went_on
    assert len(watch.first_nonfinite) == 1


def test_a_backward_finding_stops_when_backward_is_over() -> None:
    model = Bursts("backward")
    with OverflowWatch(model, stop_after=1) as watch, pytest.raises(TrainingStopped, match="sqrt"):
        model(numbers(3, 4)).sum().backward()
    assert watch.first_nonfinite[0].direction == "backward"
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_second_finding_stops_with_what_the_caller_wants() -> None:
    with OverflowWatch(stop_after=2, stop_with=lambda: ValueError("[overflow 2 times]")) as watch:
        torch.full((2,), 100.0).exp()
        with pytest.raises(ValueError, match=r"overflow 2 times"):
            torch.zeros(2).reciprocal()
    assert [first.call for first in watch.first_nonfinite] == ["Tensor.exp.0.forward", "Tensor.reciprocal.0.forward"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A watched training with a first in the second step, looked at by many tests."""
    out = tmp_path_factory.mktemp("watch") / "ovf"
    model = nn.Sequential(linear(4, 4), nn.ReLU(), linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with OverflowWatch(model, out=out, near=1e30) as watch:
        for step in range(2):
            y = model(numbers(3, 4) * 10.0 ** (30 * step))
            (y * 1e20).exp().mean().backward() if step else y.mean().backward()
            optimizer.step()
    assert watch.out == out
    return out


@pytest.mark.parametrize("other_ended", [True, False])
def test_the_page_is_written_by_the_last_rank_to_stop(folder: Path, tmp_path: Path, other_ended: bool) -> None:
    other = json.loads((folder / "overflow.rank0.json").read_text())
    with OverflowWatch(out=tmp_path / "two"):
        torch.ones(2).exp()
        report = {**other, "ranks": [1], "closed": other_ended}
        (tmp_path / "two" / "overflow.rank1.json").write_text(json.dumps(report))
    assert (tmp_path / "two" / "report.html").exists() == other_ended


def test_the_report_names_everything(folder: Path) -> None:
    result = find_overflow(folder)
    (first,) = result.first_nonfinite
    assert (first.call, first.kind, first.step, first.module) == ("Tensor.mul.0.forward", "inf", 1, "")
    assert first.frames[0].file == __file__
    assert "(y * 1e20).exp()" in first.frames[0].code
    assert first.outputs[0].count == first.outputs[0].inf == 6
    assert first.outputs[0].first[0] == [0, 0]
    assert first.inputs[0].producer == "Functional.linear.1.forward"
    assert first.chain == ["Functional.linear.1.forward", "Functional.relu.0.forward", "Functional.linear.0.forward"]
    assert 1 < first.inputs[0].margin < 1e10
    assert first.before[-1].startswith("step 1 Functional.linear.1.forward in module '2', max |x| ")
    assert first.spread[0] == "Tensor.exp.0.forward"
    assert (first.verdict, result.exit_code) == ("normal", 1)
    text = str(result)
    assert text.startswith("FIRST INF in Tensor.mul.0.forward, step 1, rank 0\n")
    assert "beyond the float32 limit of 3.4028e+38: not a device fault" in text


def test_the_report_is_json_of_its_schema(folder: Path) -> None:
    text = (folder / "overflow.rank0.json").read_text()
    pytest.importorskip("jsonschema").validate(json.loads(text), schema(OverflowReport, title="tensorprobe overflow"))
    assert decode(text, OverflowReport, what="an overflow report").closed
    assert json.loads(find_overflow(folder).to_json())["first_nonfinite"][0]["call"] == "Tensor.mul.0.forward"


def test_a_report_of_an_older_version_is_read(folder: Path, tmp_path: Path) -> None:
    text = (folder / "overflow.rank0.json").read_text()
    (tmp_path / "overflow.rank0.json").write_text(text.replace('"first_nonfinite": [', '"births": ['))
    result = find_overflow(tmp_path)
    assert result.births == result.first_nonfinite == find_overflow(folder).first_nonfinite


def test_the_script_runs_the_call_alone(folder: Path) -> None:
    script = find_overflow(folder).first_nonfinite[0].script
    assert script is not None
    done = warm.run([sys.executable, script])
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "within the limits on cpu")


def test_near_the_limit_is_told_on_request(folder: Path) -> None:
    near = {each.call.rsplit(".", 2)[0] for each in find_overflow(folder).summary.near}
    assert "Functional.linear" in near
    with OverflowWatch() as watch:
        torch.full((2,), 4e4, dtype=torch.float16).add(1.0)
    assert (watch.near, watch.first_nonfinite) == ([], [])
    with OverflowWatch(near=2) as watch:
        torch.full((2,), 4e4, dtype=torch.float16).add(1.0)
        torch.full((2,), 3e4, dtype=torch.float16).add(1.0)
    assert [(each.call, each.limit) for each in watch.near][-1] == ("Tensor.add.0.forward", 65504.0)


def test_a_folder_that_is_taken_is_refused(folder: Path) -> None:
    with pytest.raises(RunExists, match="findings of another watch"):
        OverflowWatch(out=folder).start()
    with pytest.raises(SettingsError, match="cannot write to out="):
        OverflowWatch(out=folder / "ring.rank0" / "x").start()


KILLED = """
import os, signal, sys, torch
from tensorprobe.watches.overflow import OverflowWatch
watch = OverflowWatch(out=sys.argv[1]).start()
x = torch.full((4,), 200.0)
x.exp()
for _ in range(200):
    x = x.mul(1.5).div(1.5)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_its_finding_and_its_last_calls(tmp_path: Path) -> None:
    warm.run([sys.executable, "-c", KILLED, str(tmp_path / "ovf")])
    result = find_overflow(tmp_path / "ovf")
    assert [first.call for first in result.first_nonfinite] == ["Tensor.exp.0.forward"]
    assert not result.summary.closed
    last = result.summary.last_calls[0]
    assert len(last) == 64
    assert last[-1] == "step 0 Tensor.div.199.forward, max |x| 200"
    assert "rank 0 did not finish" in str(result)


def test_a_ring_that_is_damaged_gives_nothing(tmp_path: Path) -> None:
    (tmp_path / "ring").write_bytes(b"tpring01" + b"\xff" * 50)
    (tmp_path / "ring.names").write_text("a\nb\n")
    assert read_ring(tmp_path / "ring") == []
    assert read_ring(tmp_path / "absent") == []


def test_what_is_allowed_is_not_blamed() -> None:
    for allow in ("Tensor.exp", "Tensor.exp.0.forward", ["x", "*exp*"]):
        with OverflowWatch(allow=allow) as watch:
            torch.full((2,), 100.0).exp().add(1.0)
        assert watch.first_nonfinite == []
        assert watch.result.summary.intended == {"Tensor.exp": 1, "Tensor.add": 1}


def test_findings_come_with_their_tensors() -> None:
    told: list[tuple[str, str, dict[str, Tensor]]] = []

    def keep(kept: KeptCall) -> None:
        told.append((kept.call.name, kept.first.verdict, dict(kept.tensors)))
        raise RuntimeError("of the callback")

    with OverflowWatch(on_first=keep) as watch:
        torch.full((2,), 100.0).exp()
    ((name, verdict, tensors),) = told
    assert (name, verdict) == ("Tensor.exp.0.forward", "normal")
    assert torch.equal(tensors["input.0"], torch.full((2,), 100.0))
    assert tensors["output.0"].isinf().all()
    assert watch.result.summary.notes == ["on_first raised RuntimeError: of the callback", *torch_names.limits()]


def test_tensors_beyond_the_budget_are_not_kept() -> None:
    with OverflowWatch(keep_bytes=100) as watch:
        for count in (4, 4, 64):
            torch.full((count,), 100.0).exp()
    assert [first.verdict for first in watch.first_nonfinite] == ["normal", "normal", "unknown"]
    assert "more than is left of keep_bytes" in watch.first_nonfinite[2].reason


@pytest.mark.parametrize(
    ("rows", "keep", "verdict"),
    [(3, (), "normal"), (30_000, (), "unknown"), (30_000, ("Tensor.sqrt.0.forward",), "normal")],
)
def test_a_backward_whose_input_is_gone_is_replayed_if_that_is_small_or_kept(
    rows: int, keep: tuple[str, ...], verdict: str
) -> None:
    model = Bursts("backward")
    with OverflowWatch(model, keep=keep) as watch:
        model(numbers(rows, 4)).sum().backward()
    first = watch.first_nonfinite[0]
    assert (first.call, first.verdict) == ("Tensor.sqrt.0.backward", verdict)
    assert first.outputs[0].slot == "output.0"
    assert first.frames[0].function == "forward"
    if verdict == "normal":  # the value that caused it
        (extent,) = first.forward
        assert (extent.slot, extent.here) == ("input.0", 0.0)
        assert "forward    input.0 float32" in watch.report
        assert f", 0 at {first.outputs[0].first[0]}" in watch.report


@pytest.mark.needs_torch("2.4", "half precision on the CPU")
def test_the_factors_that_autograd_saves_are_available_in_backward() -> None:
    weight = nn.Parameter(torch.full((300, 300), 200.0, dtype=torch.half))
    with OverflowWatch() as watch:
        made = torch.full((300, 300), 0.25, dtype=torch.half, requires_grad=True) * 1.0
        result = made @ weight
        del made
        result.backward(torch.full((300, 300), 10.0, dtype=torch.half))
    first = watch.first_nonfinite[0]
    assert (first.call, first.verdict) == ("Tensor.matmul.0.backward", "normal")
    assert [extent.slot for extent in first.forward] == ["input.0", "input.1"]


def test_memory_that_autograd_frees_is_not_held() -> None:
    made, frozen = torch.ones(300, 300, requires_grad=True), torch.ones(300, 300)
    assert list(hold([("input.0", made), ("input.1", frozen)])) == ["input.1"]  # what a product with a constant keeps


def scaled_training(under_scaler: bool) -> OverflowWatch:
    """The first scale is far too large: the scaler skips a step, then goes on."""
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=100)
    with OverflowWatch(under_scaler=under_scaler) as watch:
        for _ in range(6):
            optimizer.zero_grad()
            scaler.scale(weight.half().mul(2.0).float().sum()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_([weight], 1.0)
            scaler.step(optimizer)
            scaler.update()
    return watch


@pytest.mark.needs_torch("2.3", "a gradient scaler for the CPU")
def test_steps_that_a_scaler_skips_are_no_findings() -> None:
    watch = scaled_training(False)
    assert watch.first_nonfinite == []
    assert watch.result.summary.skipped_by_scaler[0].endswith(".backward")
    assert watch.result.exit_code == 0
    assert "GradScaler skipped" in watch.report
    assert scaled_training(True).first_nonfinite[0].direction == "backward"


LIBRARY = torch.library.Library("tensorprobe_overflow_test", "DEF")
LIBRARY.define("saturating_square(Tensor x) -> Tensor")
LIBRARY.impl(
    "saturating_square",
    lambda x: (x.double() ** 2).clamp(max=torch.finfo(x.dtype).max).to(x.dtype),
    "CPU",
)
"""Stands for a device that writes the greatest number in place of infinity."""


def test_saturation_is_a_finding_where_the_true_result_is_beyond_the_limit() -> None:
    square = torch.ops.tensorprobe_overflow_test.saturating_square
    with OverflowWatch() as watch:
        square(torch.tensor([3.0, 300.0, 20.0], dtype=torch.float16)).neg()
    (first,) = watch.first_nonfinite
    assert (first.op, first.kind, first.verdict) == (
        "Ops.tensorprobe_overflow_test.saturating_square",
        "saturated",
        "normal",
    )
    assert (first.outputs[0].count, first.outputs[0].first) == (1, [[1]])
    assert "9e+04 in float64" in first.reason
    with OverflowWatch() as watch:
        torch.tensor([8188.0], dtype=torch.float16).mul(8.0)  # 65504: large, and right
        torch.full((3,), 65504.0, dtype=torch.float16).neg().clamp(min=-65504.0)
    with OverflowWatch(saturation=False) as off:
        square(torch.tensor([300.0], dtype=torch.float16))
    assert (watch.first_nonfinite, off.first_nonfinite) == ([], [])


def losses(watched: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    found = []

    def train() -> None:
        for step in range(4):
            optimizer.zero_grad()
            loss = model(torch.randn(6, 8)).pow(2).mean()
            if step == 2:
                (loss.detach() / 0.0).add(torch.rand(1))  # a first, replayed in the midst of it all
            loss.backward()
            optimizer.step()
            found.append(loss.detach())

    if watched:
        with OverflowWatch(model) as watch:
            train()
        assert [first.call for first in watch.first_nonfinite] == ["Tensor.div.0.forward"]
    else:
        train()
    return [*found, *(parameter.detach() for parameter in model.parameters()), torch.get_rng_state()]


def test_a_watched_training_is_bit_identical() -> None:
    assert all(torch.equal(one, other) for one, other in zip(losses(False), losses(True), strict=True))


def test_anomaly_mode_and_inference_mode_are_left_alone() -> None:
    with OverflowWatch() as watch:
        with torch.inference_mode():
            torch.full((2,), 100.0).exp()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            anomaly = torch.autograd.detect_anomaly()
        with anomaly:
            x = torch.tensor([100.0], requires_grad=True)
            x.exp()
    assert [first.op for first in watch.first_nonfinite] == ["Tensor.exp", "Tensor.exp"]
    assert watch.first_nonfinite[0].verdict == "normal"


def test_threads_are_watched() -> None:
    with OverflowWatch() as watch:
        thread = threading.Thread(target=lambda: torch.full((2,), 100.0).exp())
        thread.start()
        thread.join()
    assert [first.call for first in watch.first_nonfinite] == ["Tensor.exp.0.forward"]


def test_tensors_of_all_kinds_pass() -> None:
    with OverflowWatch() as watch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.eye(3).to_sparse().mul(2.0)
        torch.empty(3, device="meta").add(1.0)
        torch.complex(torch.ones(2), torch.zeros(2)).mul(2.0)
        torch.ones(3).to(torch.float8_e5m2).float()
        torch.arange(3).div(2)
        torch.ones(4, 4)[::2, ::2].mul(1.0)
        torch.empty(0).mul(2.0)
        torch.ones(2, 3).t().contiguous().exp_()
        torch.complex(torch.full((2,), 3e38), torch.zeros(2)).mul(2.0)
        torch.full((6, 4), 3e38).t()[::2].mul(10.0)
    assert [(first.call, first.outputs[0].dtype) for first in watch.first_nonfinite] == [
        ("Tensor.mul.4.forward", "complex64"),
        ("Tensor.mul.5.forward", "float32"),
    ]


def test_settings_that_make_no_sense_are_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"stop_after": 0}, "stop_after is 0"),
        ({"near": 0.5}, "near is 0.5"),
        ({"ring": 0}, "ring is 0"),
        ({"allow": [""]}, "expected a name or a list of names"),
        ({"keep_bytes": "much"}, "keep_bytes"),
    ]
    for settings, said in cases:
        with pytest.raises(SettingsError, match=said):
            OverflowWatch(**settings)
    with pytest.raises(UnknownSetting, match=r"unknown setting 'stop_afer'. Did you mean 'stop_after'\?"):
        tensorprobe.overflow(stop_afer=1)


def test_what_goes_wrong_in_the_watch_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorprobe.watches.overflow.registrar import Registrar

    def broken(*_: Any, **__: Any) -> None:
        raise OSError("planted")

    monkeypatch.setattr(Registrar, "forward", broken)
    with pytest.warns(tensorprobe.CaptureIncomplete, match="planted"), OverflowWatch() as watch:
        assert torch.full((2,), 100.0).exp().isinf().all()
    assert "planted" in watch.result.summary.notes[0]
    assert math.isfinite(watch.result.summary.calls)
