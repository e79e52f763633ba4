"""`tensorprobe doctor`: what is installed, what is active, and whether capture works here."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import typer

from tensorprobe.cli.options import JSON
from tensorprobe.model import CaptureLevel
from tensorprobe.numerics.native import describe, extension
from tensorprobe.standard_json import encode
from tensorprobe.text import message
from tensorprobe.version import VERSION

_REQUIRED = ("torch", "numpy", "msgspec", "xxhash", "typer", "rich")
_PARTS = {
    "pyarrow": ("pyarrow", "result tables: compare and precheck cannot write or read them"),
    "xlsxwriter": ("'tensorprobe[xlsx]'", "compare --format xlsx"),
    "ray": ("'tensorprobe[ray]'", "compare --engine ray; --jobs N and --shard work without it"),
    "fsspec": ("fsspec", "runs and output folders behind URLs"),
}
"""Package → how to install it, and what does not work without it."""


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(name="doctor")(doctor)


def doctor(as_json: bool = JSON) -> None:
    """Show what is installed, and test that capture works.

    The test captures a small training on every device at every level, reads the run back, compares it and checks the
    values. Also shown: versions, native code, and every optional part with what its absence costs. Exit code 2: the test
    failed.
    """
    facts = {
        "tensorprobe": VERSION,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _REQUIRED},
        "kernel": describe(),
        "loops": _native("tensorprobe._fast"),
        "recorder": _native("tensorprobe.record._frames"),
        "compiler": _compiler(),
        "devices": _devices(),
        "extras": {name: _version(name) for name in _PARTS},
        "completion": _completion(),
        "capture": "works",
        **_proof(),
    }
    typer.echo(encode(facts, indent=1) if as_json else _render(facts))
    if facts["capture"] != "works":
        raise typer.Exit(2)


def _render(facts: dict[str, Any]) -> str:
    packages = ", ".join(f"{name} {number or 'missing'}" for name, number in facts["packages"].items())
    native = all(facts[part].startswith("native") for part in ("kernel", "loops", "recorder"))
    compiler = facts["compiler"] or "none" + (
        "" if native else ": install one (gcc or clang) and reinstall tensorprobe"
    )
    lines = [
        f"tensorprobe {facts['tensorprobe']} on Python {facts['python']}",
        f"capture    {message(facts['capture'])}",
        *_render_proof(facts["proof"]),
        *(f"limit      {message(limit)}" for limit in facts["limits"]),
        f"devices    {', '.join(facts['devices'])}",
        f"packages   {packages}",
        f"kernel     {message(facts['kernel'])}" + _cost(facts["kernel"], "measuring tensors is several times slower"),
        f"loops      {message(facts['loops'])}" + _cost(facts["loops"], "capture costs more per call"),
        f"recorder   {message(facts['recorder'])}"
        + _cost(facts["recorder"], "writing a record takes several times longer"),
        f"compiler   {compiler}",
    ]
    for name, number in facts["extras"].items():
        install, cost = _PARTS[name]
        lines.append(
            f"optional   {name} {number or f'not installed. Needed for {cost}. Install: pip install {install}'}"
        )
    lines.append(f"completion {facts['completion'] or 'not installed. Install: tensorprobe --install-completion'}")
    return "\n".join(lines)


def _cost(state: str, cost: str) -> str:
    return "" if state.startswith("native") else f": {cost}"


def _compiler() -> str | None:
    """Return the C compiler that would build the native code, if there is one."""
    return next(
        (name for name in (os.environ.get("CC", ""), "cc", "gcc", "clang") if name and shutil.which(name)), None
    )


def _completion() -> str | None:
    """Return the file that completes our commands in the user's shell, if it was installed."""
    home = Path.home()
    known = (
        home / ".bash_completions/tensorprobe.sh",
        home / ".zfunc/_tensorprobe",
        home / ".config/fish/completions/tensorprobe.fish",
    )
    return next((f"installed ({path})" for path in known if path.exists()), None)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _native(name: str) -> str:
    """Return whether loops that run for every captured call are the C ones: `native`, or `python (why)`."""
    found, reason = extension(name)
    return f"python ({reason})" if found is None else "native"


def _devices() -> list[str]:
    try:
        from tensorprobe import torch_names
    except ImportError:
        return []
    found = ["cpu"]
    for name, module in torch_names.accelerators().items():
        found.append(f"{name} x{getattr(module, 'device_count', lambda: 1)()}")
    return found


def _proof() -> dict[str, Any]:
    """Return for each device and level whether capture, record and compare work there, and what this torch cannot do."""
    try:
        from tensorprobe import torch_names
        from tensorprobe.taps import self_test  # noqa: F401  imports torch
    except ImportError as error:
        return {"capture": f"does not work: {error}", "proof": {}, "limits": []}
    proof = {
        device: {str(level): _prove(str(level), device) for level in CaptureLevel}
        for device in ("cpu", *torch_names.accelerators())
    }
    problems = [problem for levels in proof.values() for problem in levels.values() if problem != "works"]
    capture = f"does not work: {problems[0]}" if problems else "works"
    limits = torch_names.limits()
    if torch_names.accelerator_parts is None:
        limits.append(f"tensorprobe sim needs torch {torch_names.SIMULATED_SINCE}")
    return {"capture": capture, "proof": proof, "limits": limits}


def _prove(level: str, device: str) -> str:
    """Return `works`, or what failed: capture, record and compare get calls whose numbers are known."""
    from tensorprobe.engine import comparison
    from tensorprobe.taps.self_test import find_problem, record_known_calls

    for mode in ("tensor", "summary"):
        problem = find_problem(level, mode, device)
        if problem:
            return problem
    with tempfile.TemporaryDirectory(prefix="tensorprobe-doctor-", ignore_cleanup_errors=True) as folder:
        try:
            for name in ("first", "again", "wrong"):
                record_known_calls(f"{folder}/{name}", level, "tensor", device, wrong=name == "wrong")
            if comparison.compare(f"{folder}/first", f"{folder}/again").divergence is not None:
                return "two equal trainings are said to diverge"
            if comparison.compare(f"{folder}/first", f"{folder}/wrong").divergence is None:
                return "a training with a wrong weight is said to agree"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "works"


def _render_proof(proof: dict[str, dict[str, str]]) -> list[str]:
    lines = []
    for device, levels in proof.items():
        working = ", ".join(level for level, state in levels.items() if state == "works")
        if working:
            lines.append(f"proof      {device}: {working}: recorded, read back, compared; every value checked")
        lines += [f"proof      {device}: {level}: {message(s)}" for level, s in levels.items() if s != "works"]
    return lines
