"""An audit judges what was recorded: a wrong kernel is named in the run that it spoiled, and nowhere else."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import tensorprobe
from tensorprobe.checks import runner
from tensorprobe.errors import NoData, NotFound, SettingsError
from tensorprobe.model.precheck import Audit
from tensorprobe.model.reason import NotReplayed
from tensorprobe.standard_json import decode
from tensorprobe.work.pool import Death

Spoiler = Callable[[torch.Tensor], torch.Tensor]


class Wrong(TorchDispatchMode):
    """A device whose kernel for one op is wrong."""

    def __init__(self, op: str, spoil: Spoiler, *, since: int = 0) -> None:
        super().__init__()
        self._op, self._spoil, self._since = op, spoil, since

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # what a kernel does is no call of the program
            result = self.compute(func, args, kwargs or {})
            if str(func) != f"aten.{self._op}":
                return result
            self._since -= 1
            return result if self._since >= 0 else self._spoil(result)

    def compute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)


def scaled(result: torch.Tensor) -> torch.Tensor:
    return result * 1.001


def wrong_element(result: torch.Tensor) -> torch.Tensor:
    flat = result.clone().view(-1)
    flat[flat.abs().argmin()] += torch.finfo(result.dtype).eps * flat.abs().max()
    return flat.view_as(result)


class Block(torch.nn.Module):
    """Enough for a product, a norm, a softmax, dropout and an op in place."""

    def __init__(self) -> None:
        super().__init__()
        self.product, self.norm = torch.nn.Linear(16, 16), torch.nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.softmax(F.gelu(self.norm(self.product(x))), -1), 0.25)


def record(folder: Path, wrong: TorchDispatchMode | None = None, *, steps: int = 1, **settings: Any) -> Path:
    torch.manual_seed(3)
    model = torch.nn.Sequential(Block(), Block())
    with tensorprobe.capture(folder, model=model, in_process=True, **{"level": "api", **settings}) as probe:
        for _ in range(steps):
            x = torch.randn(24, 16)
            if wrong is None:
                model(x).mul(2).square().sum().backward()
            else:
                with wrong:
                    model(x).mul(2).square().sum().backward()
            probe.step()
    return folder


def audit(folder: Path, **settings: Any) -> tensorprobe.AuditResult:
    return tensorprobe.audit(folder, **{"jobs": 0, **settings})


def failing(result: tensorprobe.AuditResult) -> list[tuple[str, str, str]]:
    return [(check.call, check.forward, check.backward) for check in result.failures]


def test_every_call_of_a_healthy_run_passes(tmp_path: Path) -> None:
    result = audit(record(tmp_path / "run"))
    summary = result.summary
    assert result.exit_code == 0 and not result.failures and summary.skipped == 0
    assert summary.calls == summary.passed == 15
    assert summary.backward_passed == 13
    assert str(result).splitlines()[0] == "PASSED    15 of 15 calls"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_autocast_is_no_fault(tmp_path: Path, dtype: str) -> None:
    with torch.autocast("cpu", dtype=getattr(torch, dtype)):
        folder = record(tmp_path / "run")
    assert not audit(folder).failures


def test_one_wrong_element_in_half_precision_is_named(tmp_path: Path) -> None:
    with tensorprobe.capture(tmp_path / "run", level="api", in_process=True), Wrong("gelu.default", wrong_element):
        F.gelu(torch.linspace(-4, 4, 512).bfloat16())
    assert [check.op for check in audit(tmp_path / "run").failures] == ["Functional.gelu"]


def test_autocast_hides_no_wrong_product(tmp_path: Path) -> None:
    """What autocast rounds of the inputs is no error of the op, so it allows no more."""
    torch.manual_seed(3)
    x, weight = torch.randn(64, 48), torch.randn(32, 48)
    watched = tensorprobe.capture(tmp_path / "run", level="api", in_process=True)
    with watched, Wrong("mm.default", wrong_element), torch.autocast("cpu", dtype=torch.bfloat16):
        F.linear(x, weight)
    assert [check.op for check in audit(tmp_path / "run").failures] == ["Functional.linear"]


def test_a_wrong_softmax_is_named_and_its_backward_is_not(tmp_path: Path) -> None:
    result = audit(record(tmp_path / "run", Wrong("_softmax.default", scaled)))
    assert failing(result) == [(f"Functional.softmax.{at}.forward", "fail", "pass") for at in (0, 1)]
    first = str(result).splitlines()[0]
    named = "Functional.softmax.0 and .1 are off by 1.0e-03 (slope 1.0e-03, allowed 1.2e-07)"
    assert first == f"FAILED    2 of 15 calls: {named}"
    assert result.summary.losses[0].kind == "module"
    worst = next(loss for loss in result.summary.losses if loss.kind == "call")
    assert worst.name.startswith("Functional.softmax") and worst.error == pytest.approx(1e-3 / 1.19e-7, rel=0.05)


def test_a_wrong_derivative_is_named_as_a_backward(tmp_path: Path) -> None:
    result = audit(record(tmp_path / "run", Wrong("gelu_backward.default", scaled)))
    assert failing(result) == [(f"Functional.gelu.{at}.forward", "pass", "fail") for at in (0, 1)]
    assert "off by 1.0e-03 in backward" in str(result).splitlines()[0]


def test_a_fault_that_strikes_once_is_found_where_it_struck(tmp_path: Path) -> None:
    folder = record(
        tmp_path / "run", Wrong("native_layer_norm.default", lambda t: (t[0] * 1.001, *t[1:]), since=3), steps=2
    )
    assert [(check.call, check.step) for check in audit(folder).failures] == [("Functional.layer_norm.1.forward", 1)]
    assert not audit(folder, steps=[0]).failures


def test_a_dropout_that_forgets_to_scale_is_found(tmp_path: Path) -> None:
    folder = record(tmp_path / "run", Wrong("div_.Scalar", lambda t: t.mul_(0.75)))
    assert {check.op for check in audit(folder).failures} == {"Functional.dropout"}


def attend(folder: Path, dtype: str, wrong: TorchDispatchMode | None = None, **more: Any) -> tensorprobe.AuditResult:
    """Audit attention of which parts are dropped."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 2, 24, 8).to(getattr(torch, dtype)).requires_grad_() for _ in range(3))
    with tensorprobe.capture(folder, level="api", in_process=True), wrong or contextlib.nullcontext():
        held = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2, **more)
        (held * held.detach().cos()).sum().backward()
    return audit(folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_with_dropout_passes_whatever_was_dropped(tmp_path: Path, dtype: str, causal: bool) -> None:
    result = attend(tmp_path / "run", dtype, is_causal=causal)
    [check] = [each for each in result.checks if "attention" in each.op]
    assert (check.forward, check.backward) == ("pass", "pass") and result.exit_code == 0
    assert [(each.direction, each.slot) for each in check.details] == [
        ("forward", "output.0"), ("backward", "output.0"), ("backward", "output.1"), ("backward", "output.2"),
    ]  # fmt: skip


@pytest.mark.parametrize(("since", "failing"), [(2, ["output.2"]), (5, ["output.0", "output.1"])])
def test_a_wrong_gradient_of_attention_with_dropout_is_named(tmp_path: Path, since: int, failing: list[str]) -> None:
    """The products of a step are: scores, result, and the gradients of value, shares, query and key.

    Those of query and key that are wrong by the same factor could be another draw.
    """
    result = attend(tmp_path / "run", "float32", Wrong("bmm.default", scaled, since=since))
    [check] = [each for each in result.checks if "attention" in each.op]
    assert check.backward == "fail"
    assert [each.slot for each in check.details if each.result == "fail"] == failing


def test_attention_that_forgets_to_scale_what_it_keeps_is_found(tmp_path: Path) -> None:
    result = attend(tmp_path / "run", "float32", Wrong("bmm.default", lambda t: t * 0.6, since=1))
    [check] = [each for each in result.checks if "attention" in each.op]
    assert check.forward == "fail" and "size of a draw" in check.message


def test_a_span_is_audited_from_its_first_call_to_its_last(tmp_path: Path) -> None:
    folder = record(tmp_path / "run", steps=2)
    ends = ("Functional.layer_norm.0.forward", "Functional.softmax.0.forward")
    chosen = [(each.step, each.op.partition(".")[2]) for each in audit(folder, span=ends).checks]
    assert chosen == [(step, op) for step in (0, 1) for op in ("layer_norm", "gelu", "softmax")]
    backward = audit(folder, span=("Functional.softmax.1.backward", "Functional.gelu.1.backward"), steps=0)
    assert {each.call for each in backward.checks} == {f"Functional.{op}.1.forward" for op in ("softmax", "gelu")}
    with pytest.raises(NotFound, match=r"no call that can be run fits 'Functional\.gelu\.7'"):
        audit(folder, span=("Functional.gelu.0", "Functional.gelu.7"))
    with pytest.raises(SettingsError, match="span has 1 name"):
        audit(folder, span=("Functional.gelu.0",))


def test_a_cluster_gives_the_same_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def perform(job: Any, parcels: Any, *, take: Any, died: Any, **_: Any) -> None:
        died(Death(0, "was lost by the cluster", ""))
        for number, parcel in enumerate(parcels[1:], 1):
            with runner.serve_chunks(job.start, None) as answer:
                take(number, answer(parcel).content)

    monkeypatch.setattr("tensorprobe.work.cluster.run_on_cluster", perform)
    monkeypatch.setattr(runner, "_CHUNK_CALLS", 6)
    folder = record(tmp_path / "run", Wrong("_softmax.default", scaled))
    here, there = audit(folder), audit(folder, engine="ray")
    assert [each.forward for each in there.checks[:6]] == ["skip"] * 6 and "lost by the cluster" in str(there)
    assert [each.details for each in there.failures] == [here.failures[1].details]
    assert [(each.call, each.forward) for each in there.checks[6:]] == [(e.call, e.forward) for e in here.checks[6:]]
    with pytest.raises(SettingsError, match="needs engine 'ray'"):
        audit(folder, address="local")


def test_calls_are_chosen_by_name_module_sample_and_time(tmp_path: Path) -> None:
    folder = record(tmp_path / "run")
    assert {check.op for check in audit(folder, calls=["*.gelu.*"]).checks} == {"Functional.gelu"}
    assert {check.module for check in audit(folder, modules=["1"]).checks} == {"1", "1.norm", "1.product"}
    assert {check.module for check in audit(folder, modules=["*.norm"]).checks} == {"0.norm", "1.norm"}
    sampled = audit(folder, sample=0.5)
    assert 0 < len(sampled.checks) < 15
    assert [each.call for each in sampled.checks] == [each.call for each in audit(folder, sample=0.5).checks]
    assert "not in the sample of 0.5" in str(sampled)
    hurried = audit(folder, budget=1e-9)
    assert hurried.summary.passed == 1 and hurried.summary.reasons == {"not reached in the time allowed": 14}
    assert "14 not judged: not reached in the time allowed" in str(hurried).splitlines()[0]
    with pytest.raises(NotFound):
        audit(folder, calls=["no_such"])
    for wrong in ({"sample": 2.0}, {"budget": "soon"}, {"standard": "none"}):
        with pytest.raises(SettingsError):
            audit(folder, **wrong)


def test_a_run_without_values_cannot_be_audited(tmp_path: Path) -> None:
    with pytest.raises(NoData, match="holds no values"):
        audit(record(tmp_path / "run", mode="summary"))


def test_what_was_not_recorded_is_not_judged(tmp_path: Path) -> None:
    result = audit(record(tmp_path / "run", directions=["forward"]))
    assert result.exit_code == 0 and result.summary.backward_passed == result.summary.skipped == 0
    inputs = audit(record(tmp_path / "inputs", sides=["input"]))
    assert inputs.exit_code == 2 and "its outputs were not recorded" in str(inputs).splitlines()[0]


def test_modules_alone_are_not_audited_and_the_answer_says_so(tmp_path: Path) -> None:
    result = audit(record(tmp_path / "run", level="module"))
    assert result.exit_code == 2 and "of a module not audited as a whole" in str(result)
    mixed = audit(record(tmp_path / "mix", Wrong("_softmax.default", scaled), level="mix"))
    assert {check.op for check in mixed.failures} == {"Functional.softmax"}


def test_calls_with_equal_inputs_and_other_results_are_judged_apart(tmp_path: Path) -> None:
    x = torch.randn(8, 8)
    with (
        tensorprobe.capture(tmp_path / "run", level="api", in_process=True),
        Wrong("_softmax.default", scaled, since=2),
    ):
        for _ in range(4):
            F.softmax(x, -1)
    result = audit(tmp_path / "run")
    assert [(check.call, len(check.equal), check.forward) for check in result.checks] == [
        ("Functional.softmax.0.forward", 1, "pass"),
        ("Functional.softmax.2.forward", 1, "fail"),
    ]


@pytest.mark.process
def test_files_are_written_and_a_script_passes_on_a_right_device(tmp_path: Path) -> None:
    folder, out = record(tmp_path / "run", Wrong("_softmax.default", scaled)), tmp_path / "out"
    result = tensorprobe.audit(folder, jobs=2, out=out, save_failures=True)
    assert len(result.failures) == len(result.replays) == 2
    assert decode((out / "summary.json").read_bytes(), Audit, what="the summary") == result.summary
    result.save(tmp_path / "rows.parquet", "parquet")
    rows = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    assert {row["Npu Name"] for row in rows if row["Pass"] == "False"} == {
        f"Functional.softmax.{at}.forward.output.0" for at in (0, 1)
    }
    cases = ElementTree.fromstring(result.render("junit")).findall("testcase")
    assert [case.get("name") for case in cases if case.find("failure") is not None] == list(result.replays)
    script = next(iter(result.replays.values()))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((out / "summary.json").read_text())["exit_code"] == 1


def test_an_op_without_a_cpu_kernel_is_judged_by_a_registered_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_references.py").write_text("def tripled(x, by=3.0):\n    return x * by\n")
    library = torch.library.Library("audited", "DEF")  # only in this process
    library.define("tripled(Tensor x, float by=3.0) -> Tensor")
    library.impl("tripled", lambda x, by=3.0: x * by * 1.001, "CPU")
    x = torch.randn(64, 8)
    with tensorprobe.capture(tmp_path / "run", level="api", in_process=True):
        torch.ops.audited.tripled(x, 2.0)
    without = tensorprobe.audit(tmp_path / "run", jobs=1)
    assert without.exit_code == 2 and "not a known operation" in str(without)
    monkeypatch.chdir(tmp_path)
    found = tensorprobe.audit(tmp_path / "run", jobs=1, references=["torch.ops.audited.tripled=my_references:tripled"])
    assert [check.op for check in found.failures] == ["Ops.audited.tripled"]
    with pytest.raises(SettingsError, match="cannot be imported"):
        tensorprobe.audit(tmp_path / "run", jobs=1, references={"audited::tripled": "my_references:missing"})
    with pytest.raises(SettingsError, match="expected NAME=module:function"):
        tensorprobe.audit(tmp_path / "run", references=["audited.tripled"])
    with pytest.raises(SettingsError, match="no other process can import"):
        tensorprobe.reference("audited.tripled", lambda x: x)


def test_ops_of_torch_npu_are_judged_by_their_definition(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import sys, torch, torch_npu, tensorprobe\n"
        "x = torch.randn(16, 32, device='npu', requires_grad=True)\n"
        "with tensorprobe.capture(sys.argv[1], level='api', in_process=True):\n"
        "    torch_npu.npu_rms_norm(x, torch.ones(32, device='npu'))[0].square().sum().backward()\n"
    )
    fault = {"op": "npu::npu_rms_norm", "kind": "scale", "factor": 1.001}
    for name, options in (("right", []), ("wrong", ["--fault", json.dumps(fault)])):
        command = ["sim", "--torch-npu", *options, "--", sys.executable, str(script), str(tmp_path / name)]
        done = subprocess.run(
            [sys.executable, "-m", "tensorprobe", *command], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
    right, wrong = (audit(tmp_path / name) for name in ("right", "wrong"))
    assert right.exit_code == 0 and not right.summary.skipped, str(right)
    assert [check.op for check in wrong.failures] == ["NPU.npu_rms_norm"]


def test_kernels_of_the_backward_pass_are_judged_as_calls_of_their_own(tmp_path: Path) -> None:
    right = audit(record(tmp_path / "right", level="aten"))
    assert right.exit_code == 0 and not right.failures, str(right)
    found = next(check for check in right.checks if check.call == "Aten.gelu_backward.default.0.backward")
    assert found.forward == "pass" and found.details[0].slot == "output.0"


def test_autocast_inside_a_recurrent_layer_is_no_fault_and_hides_none(tmp_path: Path) -> None:
    torch.manual_seed(3)
    layer, x = torch.nn.GRU(24, 20, batch_first=True), torch.randn(6, 9, 24)
    for name in ("right", "wrong"):
        with tensorprobe.capture(tmp_path / name, level="api", in_process=True):
            if name == "right":
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    layer(x)
            else:
                with Wrong("tanh_.default", lambda result: result.mul_(1.001)):
                    layer(x)
    assert audit(tmp_path / "right").exit_code == 0
    assert [check.op for check in audit(tmp_path / "wrong").failures] == ["VF.gru"]


def test_a_weight_that_autocast_casts_once_for_two_calls_has_the_gradient_of_each(tmp_path: Path) -> None:
    torch.manual_seed(3)
    layer, x = torch.nn.Linear(16, 12), torch.randn(24, 16)
    with (
        tensorprobe.capture(tmp_path / "run", model=layer, level="mix", in_process=True),
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        torch.stack((layer(x), layer(2 * x).sin(), F.linear(x, layer.weight))).float().square().sum().backward()
    found = audit(tmp_path / "run")
    assert not found.failures, str(found)
    assert [check.backward for check in found.checks if check.op == "Functional.linear"] == ["pass"] * 3


def test_a_state_that_nobody_uses_is_no_gap_and_one_used_inside_counts_once(tmp_path: Path) -> None:
    torch.manual_seed(3)
    layer, cell = torch.nn.GRU(6, 5), torch.nn.LSTMCell(6, 5)
    xs = torch.randn(3, 4, 6)
    states = (torch.zeros(4, 5), torch.zeros(4, 5))
    with tensorprobe.capture(tmp_path / "run", level="api", in_process=True):
        for x in xs:
            states = cell(x, states)
        (layer(xs)[0].sin().sum() + states[0].square().sum()).backward()
    found = {check.call: check.backward for check in audit(tmp_path / "run").checks if check.op.startswith("VF.")}
    assert set(found.values()) == {"pass"} and len(found) == 4, found


def test_a_tensor_that_comes_twice_has_one_gradient(tmp_path: Path) -> None:
    layer = torch.nn.Linear(6, 6)
    with tensorprobe.capture(tmp_path / "run", level="api", in_process=True):
        x = layer(torch.randn(6, 6))
        (torch.stack((x * x, x, x)).sin() + x @ x.conj()).sum().backward()
    found = {check.op: check.backward for check in audit(tmp_path / "run").checks}
    assert [found[op] for op in ("Tensor.mul", "Torch.stack", "Tensor.matmul")] == ["pass"] * 3, found


def test_inputs_with_equal_values_are_not_taken_for_one(tmp_path: Path) -> None:
    """Only one of them was asked for its gradient."""
    x, y = (torch.ones(64, requires_grad=True) for _ in range(2))
    with tensorprobe.capture(tmp_path / "run", in_process=True):
        torch.autograd.grad(torch.mul(x, y).sum(), x)
    result = tensorprobe.audit(tmp_path / "run", jobs=0)
    assert result.exit_code == 0, str(result)


@pytest.mark.parametrize("level", ["api", "aten"])
def test_a_place_in_memory_that_the_record_does_not_hold_is_not_judged(level: str, tmp_path: Path) -> None:
    base = torch.arange(40.0)
    with tensorprobe.capture(tmp_path / "run", level=level, in_process=True):
        base[8:24].as_strided((3, 4), (4, 1), 2)
        torch.as_strided_scatter(base[8:24], torch.ones(2, 2), (2, 2), (2, 1), 9)
        base.as_strided((3, 4), (4, 1), 2)
    result = audit(tmp_path / "run")
    assert not result.failures
    assert result.summary.reasons == {NotReplayed.ELSEWHERE: 2}


def test_a_backward_is_judged_with_what_its_recomputed_forward_kept(tmp_path: Path) -> None:
    weight = torch.linspace(-1, 1, 64).reshape(8, 8).requires_grad_()

    def block(x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.gelu(x), weight).sin().square()

    with tensorprobe.capture(tmp_path / "run", level="api", in_process=True):
        with Wrong("gelu.default", scaled), set_checkpoint_early_stop(False):
            out = checkpoint(block, torch.linspace(0, 2, 32).reshape(4, 8).requires_grad_(), use_reentrant=False)
        out.sum().backward()
    assert failing(audit(tmp_path / "run")) == [("Functional.gelu.0.forward", "fail", "skip")]
