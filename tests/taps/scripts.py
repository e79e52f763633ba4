"""Starts other Python programs for the tests and waits for them, with a limit."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from tests import warm

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
    arguments: list[str | Path], folder: Path, *, code: int | None = 0, cold: bool = False, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments; it must end with the exit code, when one is given. Cold: with a start of its own."""
    command = [sys.executable, *map(str, arguments)]
    run = _run_cold if cold else warm.run
    done = run(command, timeout_s=TIME_LIMIT_S, cwd=folder, env=environment(**more))
    assert code is None or done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def _run_cold(command: list[str], *, timeout_s: float, **settings: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=timeout_s, **settings
    )


def run_tool(
    arguments: list[str | Path], folder: Path, *, code: int | None = 0, cold: bool = False, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run `tensorprobe` with these arguments."""
    tool = ["-c", "from tensorprobe.cli.main import main; main()"]
    return run_python([*tool, *arguments], folder, code=code, cold=cold, **more)
