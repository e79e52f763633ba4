"""The package as others get it: built from a copy of the source, installed outside of the checkout, and used there.

The new environments see the heavy dependencies of the test's own environment through a `.pth` file. Path files inside
that folder are not followed from there, so the checkout's editable install stays out of sight; the tests check it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import tensorprobe

pytestmark = pytest.mark.xdist_group("wheel")  # one worker, so that the package is built once

ROOT = Path(__file__).resolve().parents[1]
TIME_LIMIT_S = 600
OLD_NAMES = ["ptdbg_ascend", "api_accuracy_checker", "msprobe"]
NOT_COPIED = (
    ".*",
    "build",
    "dist",
    "runs",
    "demo-output",
    "results",
    "__pycache__",
    "node_modules",
    "*.egg-info",
    "*.so",
)
CLEAN = {
    name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TENSORPROBE", "VIRTUAL_ENV"))
}
TRAINING = """\
import torch
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
"""


def run(*command: str | Path, folder: Path, **variables: str) -> str:
    """stdout of a command that must succeed."""
    done = subprocess.run(
        command, cwd=folder, env={**CLEAN, **variables}, capture_output=True, text=True, timeout=TIME_LIMIT_S
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@dataclass(frozen=True)
class Installed:
    """A new environment with the package in it, and a folder to work in."""

    python: Path
    folder: Path

    @property
    def program(self) -> Path:
        return self.python.with_name("tensorprobe")


def install(folder: Path, *wheels: Path) -> Installed:
    """A new environment that holds the wheels and sees the dependencies of this one."""
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", folder=folder)
    python = folder / "venv" / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=folder).strip())
    (site / "heavy.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index"]
    run(*pip, *wheels, folder=folder)
    (folder / "work").mkdir()
    return Installed(python, folder / "work")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel made from it."""
    folder = tmp_path_factory.mktemp("build")
    shutil.copytree(ROOT, folder / "source", ignore=shutil.ignore_patterns(*NOT_COPIED))
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", folder=folder / "source")
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    (wheel,) = (folder / "dist").glob("*.whl")
    return sdist, wheel


def assert_works_here(installed: Installed, *, kernel: str) -> None:
    """doctor and a capture, in another folder than the checkout, with the installed package and no other."""
    site = installed.python.parents[1]
    where = run(installed.python, "-c", "import tensorprobe; print(tensorprobe.__file__)", folder=installed.folder)
    assert Path(where.strip()).is_relative_to(site)
    assert f"kernel     {kernel}" in run(installed.program, "doctor", folder=installed.folder)
    (installed.folder / "train.py").write_text(TRAINING)
    run(installed.program, "capture", "-o", "a run", "--", installed.python, "train.py", folder=installed.folder)
    shown = json.loads(run(installed.program, "inspect", "a run", "--json", folder=installed.folder))
    assert (shown["closed"], shown["steps"]) == (True, [0, 1])
    assert shown["coverage"]["failed"] == 0
    verified = json.loads(run(installed.program, "inspect", "a run", "--verify", "--json", folder=installed.folder))
    assert verified["sound"]


def test_sdist_holds_the_sources_of_the_kernel_and_the_papers(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    native = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("src/tensorprobe/**/*.[ch]")}
    assert {"src/tensorprobe/numerics/_native.c", "src/tensorprobe/numerics/_moments.h"} <= native <= names
    assert "src/tensorprobe/py.typed" in names
    assert {
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "SECURITY.md",
        "setup.py",
        "docs/format.md",
        "tests/test_wheel.py",
    } <= names
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


def test_wheel_is_for_every_python_from_3_10(built: tuple[Path, Path]) -> None:
    assert "-cp310-abi3-" in built[1].name
    with zipfile.ZipFile(built[1]) as archive:
        names = archive.namelist()
    assert "tensorprobe/inject/site/sitecustomize.py" in names
    assert "tensorprobe/py.typed" in names
    sources = [path for path in ROOT.glob("src/**/*.c") if "PyInit_" in path.read_text(encoding="utf-8")]
    built_for = {f"{path.relative_to(ROOT / 'src').with_suffix('')}.abi3.so" for path in sources}
    assert {name for name in names if name.endswith(".so")} == built_for >= {"tensorprobe/numerics/_native.abi3.so"}
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"tensorprobe"}


@pytest.fixture(scope="module")
def old_names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheels of the old names."""
    folder = tmp_path_factory.mktemp("old-names")
    for name in OLD_NAMES:
        shutil.copytree(ROOT / "compat" / name, folder / name, ignore=shutil.ignore_patterns(*NOT_COPIED))
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder / "dist")]
        run(*command, folder=folder / name)
    return {wheel.name.partition("-")[0]: wheel for wheel in (folder / "dist").glob("*.whl")}


@pytest.mark.parametrize("name", OLD_NAMES)
def test_an_old_name_is_a_pure_wheel_of_its_own(name: str, old_names: dict[str, Path]) -> None:
    wheel = old_names[name]
    assert wheel.name == f"{name}-{tensorprobe.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        packed = {entry for entry in archive.namelist() if ".dist-info/" not in entry}
        (metadata,) = (entry for entry in archive.namelist() if entry.endswith(".dist-info/METADATA"))
        assert "Requires-Dist: tensorprobe" in archive.read(metadata).decode()
    source = ROOT / "compat" / name
    files = [path for path in source.rglob("*") if path.suffix in (".py", ".yaml") and "build" not in path.parts]
    assert packed == {f"{name}/{path.relative_to(source)}" for path in files}


def test_the_old_names_work_when_installed(
    built: tuple[Path, Path], old_names: dict[str, Path], tmp_path: Path
) -> None:
    installed = install(tmp_path, built[1], *old_names.values())
    pip = [sys.executable, "-m", "pip", "--python", str(installed.python)]
    for name in OLD_NAMES:
        shown = run(*pip, "show", name, folder=installed.folder)
        assert f"Name: {name}\nVersion: {tensorprobe.__version__}\n" in shown
        assert "\nRequires: tensorprobe\n" in shown
    code = (
        "from ptdbg_ascend import *\nfrom msprobe.pytorch import PrecisionDebugger, compare\n"
        "import api_accuracy_checker.config, ptdbg_ascend\nprint(ptdbg_ascend.__file__)"
    )
    said = run(installed.python, "-c", code, folder=installed.folder)
    assert Path(said.strip()).is_relative_to(installed.python.parents[1])
    assert run(installed.python.with_name("msprobe"), "--version", folder=installed.folder).startswith("msprobe of ")
    run(installed.python, "-m", "api_accuracy_checker.run_ut.run_ut", "--help", folder=installed.folder)


def test_tensorprobe_alone_takes_no_old_name_and_a_published_one_is_reported(
    built: tuple[Path, Path], old_names: dict[str, Path], tmp_path: Path
) -> None:
    alone = install(tmp_path, built[1])
    code = "import importlib.util as u; print([u.find_spec(n) for n in ('ptdbg_ascend', 'api_accuracy_checker', 'msprobe')])"
    assert run(alone.python, "-c", code, folder=alone.folder) == "[None, None, None]\n"
    site = Path(
        run(alone.python, "-c", "import tensorprobe; print(tensorprobe.__file__)", folder=alone.folder)
    ).parents[1]
    rival = site / "mindstudio_probe-26.1.0.dist-info"
    rival.mkdir()
    (rival / "METADATA").write_text("Metadata-Version: 2.1\nName: mindstudio-probe\nVersion: 26.1.0\n")
    pip = [sys.executable, "-m", "pip", "--python", str(alone.python), "install", "-q", "--no-deps", "--no-index"]
    run(*pip, old_names["msprobe"], folder=alone.folder)
    done = subprocess.run(
        [alone.python, "-c", "import msprobe"], cwd=alone.folder, env=CLEAN, capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "mindstudio-probe 26.1.0 is installed too, and both bring the package msprobe" in done.stderr
    assert "pip uninstall mindstudio-probe" in done.stderr


def test_wheel_works_outside_of_the_checkout(built: tuple[Path, Path], tmp_path: Path) -> None:
    assert_works_here(install(tmp_path, built[1]), kernel="native (")


def test_without_a_compiler_the_twin_serves(built: tuple[Path, Path], tmp_path: Path) -> None:
    with tarfile.open(built[0]) as archive:
        archive.extractall(tmp_path / "sdist", filter="data")
    (source,) = (tmp_path / "sdist").iterdir()
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "dist")]
    run(*command, folder=source, CC="/bin/false")
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]
    assert_works_here(install(tmp_path, wheel), kernel="numpy twin (extension not built)")


def test_a_checkout_works_through_pythonpath(tmp_path: Path) -> None:
    code = "import ptdbg_ascend, msprobe, api_accuracy_checker, tensorprobe; print(ptdbg_ascend.__file__, tensorprobe.__file__)"
    said = run(sys.executable, "-c", code, folder=tmp_path, PYTHONPATH=f"{ROOT / 'src'}:{ROOT / 'compat'}")
    assert [Path(file).relative_to(ROOT).parts[0] for file in said.split()] == ["compat", "src"]
