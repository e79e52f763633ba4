"""`tensorprobe doctor`: what is installed, which arithmetic serves, whether capture works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from tensorprobe.cli import doctor
from tensorprobe.model import CaptureLevel
from tensorprobe.numerics.native import SWITCH, describe
from tensorprobe.version import VERSION

pytestmark = pytest.mark.usefixtures("warm_processes")
PROGRAM = "from tensorprobe.cli.main import main; main()"


def run_doctor(*arguments: str, code: str = PROGRAM, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, with environment variables of its own."""
    return subprocess.run(
        [sys.executable, "-c", code, "doctor", *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )


def test_doctor_tells_versions_devices_kernel_and_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    done = run_doctor()
    assert (done.returncode, done.stderr) == (0, "")
    lines = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert lines["tensorprobe"].startswith(f"tensorprobe {VERSION} on Python 3.")
    assert f"torch {version('torch')}" in lines["packages"]
    assert lines["kernel"].split(maxsplit=1)[1] == describe()
    assert lines["loops"].split() == ["loops", "native"]
    assert "cpu" in lines["devices"]
    assert lines["capture"].split()[1:] == ["works"]
    for part in ("pyarrow", "xlsxwriter", "ray"):
        assert f"optional   {part} " in done.stdout
    assert lines["compiler"] and lines["completion"]


def test_doctor_says_what_a_missing_part_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise doctor.PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", absent)
    monkeypatch.setattr(doctor, "describe", lambda: "numpy twin (extension not built)")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setattr(doctor.Path, "home", lambda: Path("/nonexistent"))
    app = typer.Typer()
    doctor.register(app)
    lines = CliRunner().invoke(app, []).stdout.splitlines()
    assert (
        "optional   xlsxwriter not installed. Needed for compare --format xlsx. Install: pip install 'tensorprobe[xlsx]'"
        in lines
    )
    assert "kernel     numpy twin (extension not built): measuring tensors is several times slower" in lines
    assert "compiler   none: install one (gcc or clang) and reinstall tensorprobe" in lines
    assert lines[-1] == "completion not installed. Install: tensorprobe --install-completion"


def test_doctor_prints_the_same_facts_as_json() -> None:
    done = run_doctor("--json")
    facts = json.loads(done.stdout)
    assert done.returncode == 0
    assert facts["tensorprobe"] == VERSION
    assert facts["packages"]["torch"] == version("torch")
    assert facts["kernel"] == describe()
    assert facts["loops"] == facts["recorder"] == "native"
    assert facts["capture"] == "works"


def test_doctor_says_when_the_twin_serves() -> None:
    facts = json.loads(run_doctor("--json", **{SWITCH: "1"}).stdout)
    assert facts["kernel"] == f"numpy twin ({SWITCH} is set)"
    assert facts["loops"] == f"python ({SWITCH} is set)"
    assert facts["capture"] == "works"


REFUSE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            raise {problem}
sys.meta_path.insert(0, Refuse())
"""


@pytest.mark.parametrize(
    ("fact", "extension"), [("loops", "tensorprobe._fast"), ("recorder", "tensorprobe.record._frames")]
)
@pytest.mark.parametrize(
    ("problem", "described"),
    [
        ("ModuleNotFoundError('no such module')", "python (extension not built)"),
        ("ImportError('undefined symbol: x')", "python (extension does not load: undefined symbol: x)"),
    ],
)
def test_doctor_says_why_parts_of_capture_are_python(problem: str, described: str, fact: str, extension: str) -> None:
    code = REFUSE.format(name=extension, problem=problem) + PROGRAM
    facts = json.loads(run_doctor("--json", code=code).stdout)
    assert facts[fact] == described
    assert facts["capture"] == "works"


def test_doctor_exits_2_when_this_torch_cannot_be_captured() -> None:
    done = run_doctor(code=f"import torch; del torch._C._current_graph_task_id; {PROGRAM}")
    assert (done.returncode, done.stderr) == (2, "")
    assert f"does not work: torch {torch.__version__} has no torch._C._current_graph_task_id" in done.stdout


def test_doctor_proves_every_level_on_every_device() -> None:
    facts = json.loads(run_doctor("--json").stdout)
    assert facts["proof"] == {"cpu": dict.fromkeys(map(str, CaptureLevel), "works")}
    printed = run_doctor().stdout
    assert f"proof      cpu: {', '.join(CaptureLevel)}: recorded, read back, compared; every value checked" in printed


UNREADABLE = """
from tensorprobe import torch_names
from tensorprobe.record import snapshot
def unreadable(tensor):
    raise AttributeError("no address")
snapshot.fast, torch_names.address_of = None, unreadable
"""


def test_doctor_exits_2_when_values_are_not_recorded() -> None:
    done = run_doctor(code=UNREADABLE + PROGRAM)
    assert done.returncode == 2
    assert "capture    does not work: " in done.stdout
    assert "no address" in done.stdout


def test_doctor_exits_2_when_compare_sees_no_difference() -> None:
    blind = "from tensorprobe.engine import comparison as proof; same = proof.compare; proof.compare = lambda a, b: same(a, a);"
    done = run_doctor(code=blind + PROGRAM)
    assert done.returncode == 2
    assert "proof      cpu: api: a training with a wrong weight is said to agree" in done.stdout
