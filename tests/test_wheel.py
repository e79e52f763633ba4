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
NOT_COPIED = (".*", "build", "dist", "runs", "demo-output", "results", "__pycache__", "*.egg-info", "*.so")
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


def install(wheel: Path, folder: Path) -> Installed:
    """A new environment that holds the wheel and sees the dependencies of this one."""
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", folder=folder)
    python = folder / "venv" / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=folder).strip())
    (site / "heavy.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index"]
    run(*pip, wheel, folder=folder)
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


@pytest.mark.parametrize("name", OLD_NAMES)
def test_an_old_name_is_a_pure_wheel_of_its_own(name: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "compat" / name, tmp_path / name, ignore=shutil.ignore_patterns(*NOT_COPIED))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "dist")]
    run(*command, folder=tmp_path / name)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert wheel.name == f"{name}-{tensorprobe.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        packed = {entry for entry in archive.namelist() if ".dist-info/" not in entry}
    source = ROOT / "compat" / name
    files = [path for path in source.rglob("*") if path.suffix in (".py", ".yaml") and "build" not in path.parts]
    assert packed == {f"{name}/{path.relative_to(source)}" for path in files}


def test_wheel_works_outside_of_the_checkout(built: tuple[Path, Path], tmp_path: Path) -> None:
    assert_works_here(install(built[1], tmp_path), kernel="native (")


def test_without_a_compiler_the_twin_serves(built: tuple[Path, Path], tmp_path: Path) -> None:
    with tarfile.open(built[0]) as archive:
        archive.extractall(tmp_path / "sdist", filter="data")
    (source,) = (tmp_path / "sdist").iterdir()
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "dist")]
    run(*command, folder=source, CC="/bin/false")
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]
    assert_works_here(install(wheel, tmp_path), kernel="numpy twin (extension not built)")
