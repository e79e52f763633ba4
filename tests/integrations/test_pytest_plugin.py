"""The pytest plug-in, driven by a pytest of its own: the first run writes a golden, a planted change fails with the call named."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_S = 240
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "test_golden.py"

TEST = """
import os, torch

def test_step(tensorprobe_golden):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
    with tensorprobe_golden("step", policy=os.environ.get("POLICY", "noise-aware"), model=model):
        hidden = model[1](model[0](torch.ones(2, 4)))
        model[2](hidden * float(os.environ.get("FACTOR", 1))).sum().backward()
"""


def run_pytest(folder: Path, *options: str, code: int = 0, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("suite")
    (place / "test_it.py").write_text(TEST)
    shutil.copy(EXAMPLE, place)
    (place / "pytest.ini").write_text("[pytest]\n")
    told = run_pytest(place, "-n", "1", "-p", "xdist")
    assert re.search(r"tensorprobe: wrote goldens/step.tpz \([\d,]+ bytes\)\. Commit it\.", told)
    assert "wrote goldens/train-step.tpz" in told
    return place


def test_a_planted_change_fails_with_the_call_named_and_update_accepts_it(folder: Path) -> None:
    golden = folder / "goldens" / "step.tpz"
    before = golden.read_bytes()
    told = run_pytest(folder, "--tensorprobe-strict")
    assert "2 passed" in told and "wrote" not in told
    told = run_pytest(folder, "--tensorprobe-report", "out", code=1, FACTOR="1.01")
    comment = (folder / "out" / "step.md").read_text()
    assert comment.startswith("### tensorprobe: the runs diverge at `Tensor.mul.0.forward`\n")
    assert "- baseline: `goldens/step.tpz` (`sketch`" in comment
    assert "| source | `test_it.py:9`" in comment and "<html" in (folder / "out" / "step.html").read_text()[:300]
    assert "golden step.tpz: DIVERGED  first at step 0, rank 0: Tensor.mul.0.forward" in told
    assert "test_it.py:9" in told
    assert "If this change is intended: pytest test_it.py::test_step --tensorprobe-update\n" in told
    pages = re.findall(r"Page: +(\S+)", told)  # pytest repeats the whole message in its summary where CI is set
    assert pages and Path(pages[0]).is_file()
    assert golden.read_bytes() == before
    run_pytest(folder, "--tensorprobe-update", FACTOR="1.01")
    assert golden.read_bytes() != before
    run_pytest(folder, "--tensorprobe-update")
    assert golden.read_bytes() == before


def test_another_setting_is_a_warning_and_strict_refuses_it(folder: Path) -> None:
    told = run_pytest(folder, OMP_NUM_THREADS="3", MKL_NUM_THREADS="3", POLICY="bitwise", FACTOR="1.0000001")
    assert "GoldenWarning: golden step.tpz was made with another setting: threads:" in told
    told = run_pytest(folder, "--tensorprobe-strict", code=1, OMP_NUM_THREADS="3", MKL_NUM_THREADS="3")
    assert "To write it with these settings: pytest test_it.py::test_step --tensorprobe-update" in told
    assert "torch.set_num_threads(1) in conftest.py" in told


def test_only_a_package_that_the_tests_import_is_another_setting(folder: Path) -> None:
    about = folder / "site" / "peft-9.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Name: peft\nVersion: 9\n")
    (about.parent / "peft.py").touch()
    path = os.pathsep.join([str(about.parent), os.environ.get("PYTHONPATH", "")])
    run_pytest(folder, "--tensorprobe-strict", PYTHONPATH=path)
    told = run_pytest(folder, "--tensorprobe-strict", "-p", "peft", code=1, PYTHONPATH=path)
    assert "made with another setting: peft: not set / 9." in told


def test_without_the_fixture_nothing_of_ours_but_the_plugin_is_imported() -> None:
    program = (
        "import sys; import tensorprobe.integrations.pytest_plugin; "
        "print([name for name in ('torch', 'numpy', 'msgspec', 'pyarrow') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout.strip() == "[]", done.stderr
