"""`tensorprobe sim`: scripts that know nothing of the simulated device train on it, right or wrong as ordered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tensorprobe.inject import environment

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"
pytestmark = pytest.mark.usefixtures("warm_processes")
PROGRAM = [sys.executable, "-c", "from tensorprobe.cli.main import main; main()"]


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1", **variables}
    )


def train(*before: str, device: str) -> list[float]:
    """The losses of two steps of the example."""
    done = run(*before, sys.executable, str(EXAMPLE), "--device", device, "--steps", "2")
    assert done.returncode == 0, done.stderr
    return [float(line.split()[-1]) for line in done.stdout.splitlines()]


def test_the_example_trains_on_the_device_with_and_without_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = train(device="cpu")
    right = train(*PROGRAM, "sim", "--", device="npu")
    monkeypatch.undo()
    wrong = train(*PROGRAM, "sim", "--fault", "softmax-tail", "--", device="npu")
    assert right == pytest.approx(on_cpu, rel=1e-5)
    assert wrong[0] != pytest.approx(on_cpu[0], rel=1e-5)


def test_another_name_a_fault_file_and_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "f.toml").write_text('[[fault]]\nop = "aten::add"\nkind = "bias"\namount = 1.0\n')
    code = "import sys, torch, torch; sys.exit(int((torch.ones(1, device='acc') + 1).item()))"
    done = run(*PROGRAM, "sim", "--name", "acc", "--fault", str(tmp_path / "f.toml"), "--", sys.executable, "-c", code)
    assert done.returncode == 3, done.stderr


def test_hooks_of_an_outer_command_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    (tmp_path / "outer_hook.py").write_text("def begin(text):\n    print('outer', text, flush=True)\n")
    outer = environment(
        {"outer_hook:begin": "hello"}, {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    )
    code = "import torch_npu, torch; print(torch.ones(2).npu().device, torch_npu.__version__)"
    inner = [*PROGRAM, "sim", "--", sys.executable, "-c", code]
    done = subprocess.run(inner, capture_output=True, text=True, env=outer)
    assert done.stdout.splitlines() == ["outer hello", "npu:0 0.0+simulated"], done.stderr


def test_mistakes_end_with_exit_code_2() -> None:
    for arguments, message in (
        (["--fault", "sofmax-tail", "--", "python"], "Did you mean 'softmax-tail'"),
        ([], "the command is missing"),
        (["--", "no-such-program-here"], "cannot start 'no-such-program-here'"),
    ):
        done = run(*PROGRAM, "sim", *arguments)
        assert done.returncode == 2 and message in done.stderr


def test_the_catalog_is_listed() -> None:
    done = run(*PROGRAM, "sim", "--list")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("layer-norm-nan-third-step "))
    assert lines[at].endswith("One NaN in a layer norm in the third step.")
    assert lines[at + 1].strip() == "affects the 13th native_layer_norm"
    listed = {entry["name"]: entry["strikes"] for entry in json.loads(run(*PROGRAM, "sim", "--list", "--json").stdout)}
    assert listed["linear-scale"] == "every addmm in module blocks.1.attn.qkv"
    assert listed["bf16-linear-scale"] == "every addmm, from the 3rd on, of dtype bfloat16"
    assert listed["all-reduce-dropped"] == "the 2nd allreduce_ on rank 1"


def test_the_payload_holds_no_truth() -> None:
    from tensorprobe.inject import sim as autostart
    from tensorprobe.sim import read_faults

    payload = json.loads(autostart.payload("npu", read_faults("layer-norm-saved-scale")))
    assert "Functional" not in json.dumps(payload) and "truth" not in json.dumps(payload)
