"""Runs a program alone and with a watch on it, and compares everything that can be seen of it."""

from __future__ import annotations

import hashlib
import random
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy
import torch

import tensorprobe
from tensorprobe.errors import CaptureIncomplete
from tests.taps.scripts import run_python, write_script

Watch = Callable[..., AbstractContextManager[Any]]
Say = Callable[..., None]
Program = Callable[[Watch, Say], None]

CAPTURES = {
    "api": {"level": "api"},
    "mix": {"level": "mix", "mode": "summary"},
    "module": {"level": "module"},
    "aten": {"level": "aten"},
}
WATCHES = (*CAPTURES, "online", "overflow")


def assert_unharmed(program: Program, folder: Path, *, by: tuple[str, ...] = WATCHES, complete: bool = False) -> None:
    """Run the program alone, then with each watch: what it says, raises, warns of and draws is the same.

    With `complete` no watch may have missed a call. Whoever raises in the end raises KeyError("last").
    """
    _observe(program, lambda *_, **__: nullcontext())  # torch warns of some things once only
    alone = _observe(program, lambda *_, **__: nullcontext())
    alone.pop("incomplete")
    assert "raised" not in alone or alone["raised"][:2] == ("KeyError", "'last'"), alone["raised"]
    for name in by:
        watched = _observe(program, _watch(name, folder / name))
        missed = watched.pop("incomplete")
        assert not (complete and missed), (name, missed)
        print(name, missed)
        assert watched == alone, name


def _watch(name: str, folder: Path) -> Watch:
    count = iter(range(100))

    def watch(model: Any = None) -> AbstractContextManager[Any]:
        out = folder / str(next(count))
        if name == "online":
            return tensorprobe.online(model, out=out)
        if name == "overflow":
            watch: Any = tensorprobe.overflow(model, out=out)
            return watch  # type: ignore[no-any-return]
        return tensorprobe.capture(out, model=model, in_process=True, ring_bytes=1 << 20, **CAPTURES[name])

    return watch


def _observe(program: Program, watch: Watch) -> dict[str, Any]:
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    said: list[Any] = []
    seen: dict[str, Any] = {"said": said}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            program(watch, lambda *things: said.append([_plain(thing) for thing in things]))
        except Exception as error:
            seen["raised"] = described(error)
    seen["warned"] = [
        (w.category.__name__, str(w.message), w.filename, w.lineno)
        for w in caught
        if w.category is not CaptureIncomplete
    ]
    seen["incomplete"] = [str(w.message) for w in caught if w.category is CaptureIncomplete]
    seen["random"] = (torch.rand(1).item(), random.random(), numpy.random.rand())
    seen["state"] = (torch.is_grad_enabled(), torch.get_default_dtype(), sys.getrecursionlimit())
    return seen


def described(error: BaseException | None) -> Any:
    """The exception and those behind it, each with the program's own frames."""
    if error is None:
        return None
    frames = [
        f"{frame.name}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if "/tests/" in frame.filename and not frame.filename.endswith("harm/programs.py")
    ]
    return type(error).__name__, str(error), frames, described(error.__cause__), described(error.__context__)


def _plain(thing: Any) -> Any:
    if isinstance(thing, torch.Tensor):
        with torch._C.DisableTorchFunction():
            values = thing.detach().as_subclass(torch.Tensor)
            values = (values.to_dense() if values.is_sparse else values).resolve_conj().resolve_neg().contiguous()
            raw = values.reshape(-1).view(torch.uint8).numpy().tobytes()
        return type(thing).__name__, str(values.dtype), tuple(values.shape), hashlib.md5(raw).hexdigest()
    if isinstance(thing, (list, tuple)):
        return [_plain(each) for each in thing]
    if isinstance(thing, dict):
        return {key: _plain(value) for key, value in thing.items()}
    return thing


SCRIPT = """
    import contextlib, os, resource, signal, sys, threading, time, warnings
    import torch
    import tensorprobe
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    watching = sys.argv[1] == "watched"

    def watch():
        return tensorprobe.capture("../run", level="mix") if watching else contextlib.nullcontext()

    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(steps=2):
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(torch.randn(3, 4)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses
"""


def run_both(body: str, folder: Path, *, code: int = 0) -> tuple[Any, Any]:
    """Run a script alone and watched, in processes; the prints, exit codes and files of both are the same."""
    found = []
    for how in ("alone", "watched"):
        cwd = folder / how / "cwd"
        cwd.mkdir(parents=True)
        script = write_script(folder / how, SCRIPT)
        script.write_text(script.read_text() + "\n" + _dedented(body))
        done = run_python([script, how], cwd, code=code)
        files = {str(path.relative_to(cwd)): path.read_bytes() for path in cwd.rglob("*") if path.is_file()}
        found.append((done.stdout, done.stderr.replace(how, ""), files))
    assert found[1] == found[0]
    return found[0], found[1]


def _dedented(body: str) -> str:
    return textwrap.dedent(body)
