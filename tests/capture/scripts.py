"""Starts other Python programs for the tests and waits for them, with a limit."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

TIME_LIMIT_S = 120
SOURCE = str(Path(__file__).resolve().parents[2] / "src")


def environment(**more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TENSORPROBE", "PYTHONPATH"))}
    return {**clean, "OMP_NUM_THREADS": "1", "PYTHONPATH": SOURCE, **more}


def write_script(folder: Path, text: str, name: str = "script.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def run_python(
    arguments: list[str | Path], folder: Path, *, code: int | None = 0, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments; it must end with the exit code, when one is given."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env=environment(**more),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=TIME_LIMIT_S,
    )
    assert code is None or done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def run_tool(
    arguments: list[str | Path], folder: Path, *, code: int | None = 0, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run `tensorprobe` with these arguments."""
    return run_python(["-c", "from tensorprobe.cli.main import main; main()", *arguments], folder, code=code, **more)
