"""`tensorprobe doctor`: what is installed, what is active, and whether capture works here."""

from __future__ import annotations

import json
import os
import platform
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import typer

from tensorprobe.numerics.native import SWITCH, describe
from tensorprobe.version import VERSION

_REQUIRED = ("torch", "numpy", "msgspec", "xxhash", "typer", "rich")
_EXTRAS = {"safetensors": "tensorprobe export --to safetensors"}


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(name="doctor")(doctor)


def doctor(as_json: bool = typer.Option(False, "--json", help="Print one JSON object.")) -> None:
    """Show versions, devices, the active kernel and loops, and optional extras. Exit 2 when capture cannot work here."""
    facts = {
        "tensorprobe": VERSION,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _REQUIRED},
        "kernel": describe(),
        "loops": _loops(),
        "devices": _devices(),
        "extras": {name: _version(name) for name in _EXTRAS},
        "capture": _capture(),
    }
    typer.echo(json.dumps(facts, indent=1) if as_json else _render(facts))
    if facts["capture"] != "works":
        raise typer.Exit(2)


def _render(facts: dict[str, Any]) -> str:
    packages = ", ".join(f"{name} {number or 'missing'}" for name, number in facts["packages"].items())
    lines = [
        f"tensorprobe {facts['tensorprobe']} on Python {facts['python']}",
        f"packages   {packages}",
        f"kernel     {facts['kernel']}",
        f"loops      {facts['loops']}",
        f"devices    {', '.join(facts['devices'])}",
        f"capture    {facts['capture']}",
    ]
    for name, number in facts["extras"].items():
        state = number or f"not installed; for `{_EXTRAS[name]}`: pip install 'tensorprobe[{name}]'"
        lines.append(f"extra      {name} {state}")
    return "\n".join(lines)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _loops() -> str:
    """Whether the loops of capture that run for every call are the C ones: `native`, or `python (why)`."""
    try:
        from tensorprobe.fast import fast
    except ImportError:
        return "none (capture does not work)"
    if fast is not None:
        return "native"
    if os.environ.get(SWITCH, "") not in ("", "0"):
        return f"python ({SWITCH} is set)"
    try:
        import_module("tensorprobe._fast")
    except ModuleNotFoundError:
        return "python (extension not built)"
    except ImportError as problem:
        return f"python (extension does not load: {problem})"
    return "python"


def _devices() -> list[str]:
    try:
        import torch

        from tensorprobe import torch_names
    except ImportError:
        return []
    found = ["cpu"]
    for name in ("cuda", "xpu", "mps", "mtia", torch_names.extra_device()):
        module = getattr(torch, name, None)
        if module is not None and module.is_available():
            found.append(f"{name} x{module.device_count()}")
    return found


def _capture() -> str:
    """Whether every private name of torch that capture needs is there."""
    try:
        import tensorprobe.taps.probe  # noqa: F401
    except ImportError as error:
        return f"does not work: {error}"
    return "works"
