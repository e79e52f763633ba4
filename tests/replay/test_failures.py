"""A saved failure is two files that need none of our code: the script exits 1 while the call fails and 0 when it does not."""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import tensorprobe
from tensorprobe.checks.check import CheckSettings, check_call
from tensorprobe.judge.standards import STANDARDS
from tensorprobe.model.precheck import CallCheck
from tensorprobe.record.stored import StoredCall
from tensorprobe.replay import functions
from tensorprobe.replay.failures import failure_script
from tensorprobe.replay.script import LIMIT_NAMES
from tests.builders.runs import call as made_call
from tests.builders.runs import write
from tests.checks.planting import record, record_one

torch.manual_seed(0)
X, W = torch.randn(6, 8), torch.randn(8, 8)


@pytest.fixture
def wrong_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes a function of torch 1 % too large in every dtype but those of the reference."""

    def spoil(home: Any, name: str, reference: torch.dtype = torch.float64) -> None:
        right = getattr(home, name)

        def wrong(*args: Any, **kwargs: Any) -> Any:
            found = right(*args, **kwargs)
            first = found[0] if isinstance(found, (tuple, list)) else found
            narrow = first.is_floating_point() and first.dtype not in (torch.float64, reference)
            if not narrow or isinstance(found, (tuple, list)):
                return [each * 1.05 for each in found] if narrow else found
            return found.mul_(1.05) if name.endswith("_") else found * 1.05

        functions.find_op.cache_clear()
        monkeypatch.setattr(home, name, wrong)

    yield spoil
    monkeypatch.undo()
    functions.find_op.cache_clear()


def run_script(script: Path, *options: str) -> tuple[int, str]:
    """Its exit code and what it prints, here in this process, where our package cannot be imported."""
    printed = io.StringIO()
    ours = {name: module for name, module in sys.modules.items() if name.startswith("tensorprobe")}
    before = sys.argv
    try:
        sys.modules.update(dict.fromkeys(ours))  # type: ignore[arg-type]  # None: importing it raises
        sys.argv = [str(script), *options]
        with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as ended:
            runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.modules.update(ours)
        sys.argv = before
    return ended.value.code or 0, printed.getvalue()  # type: ignore[return-value]


def case_of(script: Path) -> dict[str, Any]:
    """The data of a script."""
    found: dict[str, Any] = runpy.run_path(str(script))["CASE"]
    return found


def save(call: StoredCall, folder: Path, **settings: Any) -> Path:
    asked = CheckSettings(**settings)
    check = check_call(call, None, asked)
    assert "fail" in (check.forward, check.backward), check
    return write_script(call, asked, check, folder)


def write_script(call: StoredCall, settings: CheckSettings, check: CallCheck, folder: Path) -> Path:
    script = failure_script(call, None, settings.conditions(), check)
    return script.write(folder, call.name, at=(call.step, call.rank))


PROGRAMS: dict[str, tuple[Any, str, Callable[[], Any]]] = {
    "plain": (F, "softmax", lambda: F.softmax(X.clone().requires_grad_(), -1)),
    "nested": (torch, "cat", lambda: torch.cat([X.clone().requires_grad_(), X], dim=1)),
    "in place": (torch.Tensor, "addcmul_", lambda: X.clone().addcmul_(W[:6], X, value=2)),
    "lists": (torch, "_foreach_mul", lambda: torch._foreach_mul([X, W], [2.0, 3.0])),
    "dtype and device": (torch, "full", lambda: torch.full((4, 5), 0.3, dtype=torch.float32, device="cpu")),
    "strides": (torch, "exp", lambda: torch.exp(torch.randn(4, 12)[:, ::3].t().requires_grad_())),
    "expanded": (torch, "sin", lambda: torch.sin(torch.randn(1, 8).expand(5, 8).requires_grad_())),
    "half": (torch, "matmul", lambda: torch.matmul(X.bfloat16().requires_grad_(), W.bfloat16())),
    "keywords": (F, "linear", lambda: F.linear(X, weight=W.clone().requires_grad_(), bias=None)),
    "infinity": (torch.Tensor, "masked_fill", lambda: X.clone().requires_grad_().masked_fill(X > 1, -torch.inf)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_script_fails_with_the_fault_and_passes_without(
    tmp_path: Path, wrong_kernels: Callable[..., None], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    home, function, program = PROGRAMS[name]
    *_, call = record(tmp_path / "run", program)
    wrong_kernels(home, function)
    script = save(call, tmp_path / "failures")
    assert script.name == f"{call.name}.py" and sorted(each.name for each in script.parent.iterdir()) == [
        f"{call.name}.py",
        f"{call.name}.safetensors",
    ]
    assert "tensorprobe" not in script.read_text()
    code, printed = run_script(script)
    assert code == 1 and "FAILS on cpu" in printed and "<-- over" in printed
    assert "max_abs" in printed and "relative_l2" in printed and "one_minus_cosine" in printed
    monkeypatch.undo()
    code, printed = run_script(script, "--device", "cpu:0")
    assert code == 0 and "within the limits on cpu:0" in printed


HEALTHY: dict[str, Callable[[], Any]] = {
    "slices": lambda: X.clone().requires_grad_()[1:4, ..., None],
    "item": lambda: X.clone().requires_grad_().clone().__setitem__((slice(None, None, 2), 0), 5.0),
    "part of a tensor": lambda: torch.randn(6, 8).requires_grad_().clone()[:, 2:5].mul_(3.0),
    "named tuple": lambda: torch.topk(torch.round(X), 3, dim=-1),
    "flat choice": lambda: torch.argmax(torch.round(X)),
    "eigenvectors": lambda: torch.linalg.eigh(W @ W.T),
    "complex": lambda: torch.mul(torch.view_as_complex(X.view(6, 4, 2)).t(), 2 + 1j),
    "to": lambda: X.to("cpu", torch.float16),
    "size": lambda: X.expand(torch.Size([2, 6, 8])),
    "memory format": lambda: torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "bools": lambda: X > 0,
    "unused gradient": lambda: torch.where(X > 0, X.clone().requires_grad_(), X),
    "fused": lambda: torch._foreach_addcdiv_([X.clone()], [X], [X.abs() + 1], value=0.1),
    "statistics": lambda: F.batch_norm(X, torch.zeros(8), torch.ones(8), training=True),
    "random": lambda: torch.rand(300),
    "channels": lambda: F.dropout2d(torch.randn(4, 8, 5, 5), 0.5),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_script_runs_the_call_as_it_was(tmp_path: Path, name: str) -> None:
    """What our own check calls right, the script does, for every way to pass arguments."""
    *_, call = record(tmp_path / "run", HEALTHY[name])
    settings = CheckSettings(device="cpu:0")
    check = check_call(call, None, settings)
    assert check.forward == "pass", check.message
    code, printed = run_script(write_script(call, settings, check, tmp_path / "out"))
    assert code == 0, printed
    assert all(one.slot in printed for one in check.details if one.direction == "forward")


@pytest.mark.parametrize("standard", STANDARDS)
def test_every_standard_has_its_limits_in_the_script(
    tmp_path: Path, wrong_kernels: Callable[..., None], monkeypatch: pytest.MonkeyPatch, standard: str
) -> None:
    call = record_one(tmp_path / "run", lambda: torch.matmul(X.bfloat16(), W.bfloat16()), "matmul")
    wrong_kernels(torch, "matmul", torch.float32 if STANDARDS[standard].reference == "single" else torch.float64)
    script = save(call, tmp_path, standard=standard)
    limits = case_of(script)["limits"]["output.0"]
    assert limits and set(limits) <= set(LIMIT_NAMES)
    assert run_script(script)[0] == 1
    if standard != "binary":  # the reference is not added up as the kernel is
        monkeypatch.undo()
        allowed = 0 if standard in ("noise-aware", "ulp", "absolute") else run_script(script)[0]
        assert run_script(script)[0] == allowed


def test_the_tensors_are_those_that_were_used(tmp_path: Path, wrong_kernels: Callable[..., None]) -> None:
    call = record_one(tmp_path / "run", lambda: F.softmax(X.clone().requires_grad_(), -1), "softmax")
    wrong_kernels(F, "softmax")
    stored = load_file(save(call, tmp_path, data="real").with_suffix(".safetensors"))
    assert set(stored) == {"input.0", "gradient.output.0", "device.output.0", "device.gradient.output.0"}
    assert torch.equal(stored["input.0"], X)
    assert torch.allclose(stored["device.output.0"], torch.softmax(X, -1) * 1.05)


def test_a_failing_variant_is_saved_with_its_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong_kernels: Callable[..., None]
) -> None:
    right = torch.neg

    def flushes(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x.abs() < 1e-38, torch.zeros_like(x), right(x)) if x.dtype is torch.float32 else right(x)

    call = record_one(tmp_path / "run", lambda: torch.neg(X), "neg")
    functions.find_op.cache_clear()
    monkeypatch.setattr(torch, "neg", flushes)
    script = save(call, tmp_path, hard=True)
    assert "subnormals" in script.read_text().split("import")[0]
    assert float(load_file(script.with_suffix(".safetensors"))["input.0"].abs().max()) < 1.2e-38
    assert run_script(script)[0] == 1
    monkeypatch.setattr(torch, "neg", right)
    assert run_script(script)[0] == 0


def test_dropout_is_saved_with_its_law(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong_kernels: Callable[..., None]
) -> None:
    call = record_one(tmp_path / "run", lambda: F.dropout(torch.randn(40, 40), 0.25), "dropout")
    wrong_kernels(F, "dropout")
    script = save(call, tmp_path)
    code, printed = run_script(script)
    assert code == 1 and "share of zeros" in printed and "scale off" in printed
    monkeypatch.undo()
    assert run_script(script)[0] == 0


def test_an_op_that_raises_is_saved_with_the_limits_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.checks.planting import DEVICE, planted

    def broken(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("error code 507015")

    call = record_one(tmp_path / "run", lambda: torch.exp(X.clone().requires_grad_()), "exp")
    with planted(monkeypatch, outputs=broken):
        script = save(call, tmp_path, device=DEVICE)
    assert "error code 507015" in script.read_text()
    assert run_script(script)[0] == 0
    right = torch.exp

    def raises(x: torch.Tensor) -> torch.Tensor:
        if x.dtype is torch.float32:
            raise RuntimeError("error code 507015")
        return right(x)

    monkeypatch.setattr(torch, "exp", raises)
    code, printed = run_script(script)
    assert code == 1 and "it raises on cpu:0: RuntimeError: error code 507015" in printed


def test_autocast_is_on_in_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def program() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.matmul(X, W)

    call = record_one(tmp_path / "run", program, "matmul")
    settings = CheckSettings(device="cpu:0")
    check = check_call(call, None, settings)
    failed = msgspec.structs.replace(check, details=[msgspec.structs.replace(check.details[0], result="fail")])
    script = write_script(call, settings, failed, tmp_path)
    assert case_of(script)["autocast"] == "bfloat16"
    assert load_file(script.with_suffix(".safetensors"))["device.output.0"].dtype is torch.bfloat16
    assert run_script(script)[0] == 0


def test_text_of_a_hostile_run_stays_text(tmp_path: Path) -> None:
    evil = '"""\nimport os; os.system("touch owned")\n#'
    run = write(
        tmp_path / "run",
        [made_call("Torch.matmul.0.forward", module=evil, inputs=[numpy.ones((2, 2), "float32")] * 2,
                   args=[{"slot": "input.0"}, {"slot": "input.1"}], kwargs={"x'] or evil(": evil})],
    )  # fmt: skip
    (call,) = tensorprobe.open_run(run).calls()
    model = msgspec.structs.replace(call.model, kwargs=None)
    call.model = model
    check = check_call(call, None, CheckSettings())
    failed = msgspec.structs.replace(check, message=evil)
    script = write_script(call, CheckSettings(), failed, tmp_path / "out")
    lines = script.read_text().splitlines()
    assert not any(line.startswith("import os") for line in lines) and run_script(script)[0] == 0
    from tensorprobe.replay.script import call_source

    text = call_source(msgspec.structs.replace(model, kwargs={"x'] or evil(": evil, "dim": evil}))
    assert compile(text, "x", "eval") and repr(evil) in text


def test_the_same_call_of_another_step_does_not_replace_the_first(
    tmp_path: Path, wrong_kernels: Callable[..., None]
) -> None:
    calls = []
    with tensorprobe.capture(tmp_path / "run", in_process=True) as probe:
        for _ in range(2):
            F.softmax(X, -1)
            probe.step()
    calls = [call for call in tensorprobe.open_run(tmp_path / "run").calls() if "softmax" in call.name]
    wrong_kernels(F, "softmax")
    names = [save(call, tmp_path / "out").name for call in (*calls, calls[0])]
    first = "Functional.softmax.0.forward"
    assert names == [f"{first}.py", f"{first}.step1.rank0.py", f"{first}.py"]


def test_without_safetensors_scripts_are_written_and_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong_kernels: Callable[..., None]
) -> None:
    call = record_one(tmp_path / "run", lambda: F.softmax(X, -1), "softmax")
    wrong_kernels(F, "softmax")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    assert run_script(save(call, tmp_path))[0] == 1


@pytest.mark.simulated
@pytest.mark.usefixtures("warm_processes")
def test_on_the_simulated_device_a_script_follows_the_fault(tmp_path: Path) -> None:
    """In processes of their own, from a folder that holds nothing but the two files."""
    program = """
import sys, torch, tensorprobe
from pathlib import Path
from tensorprobe.checks.check import CheckSettings, check_call
from tensorprobe.replay.failures import failure_script
with tensorprobe.capture("run", in_process=True):
    torch.nn.functional.softmax(torch.randn(4, 16, device="npu", requires_grad=True), -1)
(call,) = [c for c in tensorprobe.open_run("run").calls() if "softmax" in c.name and c.direction == "forward"]
settings = CheckSettings(device="npu")
script = failure_script(call, None, settings.conditions(), check_call(call, None, settings))
print(script.write(Path("out"), call.name))
"""
    sim = [sys.executable, "-c", "from tensorprobe.cli.main import main; main()", "sim"]
    faulty = [*sim, "--fault", "softmax-tail", "--", sys.executable]
    made = subprocess.run([*faulty, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    script = tmp_path / made.stdout.strip()
    wrong = subprocess.run([*faulty, script.name], cwd=script.parent, capture_output=True, text=True, check=False)
    assert wrong.returncode == 1 and "FAILS on npu" in wrong.stdout, wrong.stderr
    right = subprocess.run(
        [*sim, "--", sys.executable, script.name], cwd=script.parent, capture_output=True, text=True, check=False
    )
    assert right.returncode == 0 and "within the limits on npu" in right.stdout, right.stderr
    assert json.dumps(sorted(each.name for each in script.parent.iterdir())).count("Functional.softmax.0.forward") == 2
