"""`parse`: what a pkl says of one API, on the screen: where it was called, and the statistics of its tensors.

In: a pkl and the name of a call. Out: text on stdout. The pkl is read from front to back; no tensor is needed for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tensorprobe.errors import NotFound, SettingsError, nearest
from tensorprobe.legacy.layouts import ptdbg_reader
from tensorprobe.legacy.layouts.ptdbg_lines import TensorLine
from tensorprobe.legacy.ptdbg import logger, speak
from tensorprobe.legacy.speaking import without_traceback
from tensorprobe.model import Stack
from tensorprobe.ops.names import underscored
from tensorprobe.record import Damage
from tensorprobe.text import few, in_columns, plain

_TITLES = ("name", "dtype", "shape", "max", "min", "mean")
_MOST_NAMES = 20_000
"""Names among which the nearest are looked for."""


class _Found(NamedTuple):
    call: str
    stack: Stack | None
    lines: list[TensorLine]


@without_traceback
def parse(pkl_file: str | os.PathLike[str], module_name_prefix: str) -> None:
    """Print the stack and the statistics of a call: `parse("npu_dump.pkl", "Torch_batch_normal_1_forward")`.

    The name may go on to a tensor (`…_forward_input.0`) or end early (`Torch_norm_1`: both directions). NotFound names
    the nearest calls of the file.
    """
    speak()
    if not isinstance(pkl_file, str | os.PathLike) or Path(pkl_file).suffix != ".pkl":
        raise SettingsError(f"the first argument is {pkl_file!r}; it must be the path of a .pkl file.")
    if not isinstance(module_name_prefix, str) or not module_name_prefix.strip("_"):
        raise SettingsError(
            f"the second argument is {module_name_prefix!r}; it must be the name of a call: 'Torch_norm_1_forward'."
        )
    wanted = module_name_prefix.rstrip("_")
    seen: dict[str, None] = {}
    found = False
    for call in _read(Path(pkl_file), wanted, seen):
        sys.stdout.write(_render(call) + "\n")
        found = True
    if not found:
        close = nearest(wanted, seen)
        hint = (
            f"Nearest: {', '.join(map(plain, close))}"
            if close
            else f"It holds {few([plain(name) for name in seen]) or 'no call'}"
        )
        raise NotFound(f"no call {wanted!r} in '{plain(pkl_file)}'.\n  {hint}")


def _read(pkl: Path, wanted: str, seen: dict[str, None]) -> Iterator[_Found]:
    """The calls that fit; `seen` is filled with the names of the others."""
    run = ptdbg_reader.open_run(pkl)
    segment = run.segment(*run.segments()[0])
    assert isinstance(segment, ptdbg_reader.PtdbgSegment)
    damaged = 0
    for item in segment.calls():
        if isinstance(item, Damage):
            damaged += 1
            continue
        call = item[1]
        name = underscored(call.name)
        lines = list(call.lines)
        if name != wanted and not name.startswith(f"{wanted}_"):
            lines = [line for line in lines if line.name == wanted or line.name.startswith(f"{wanted}.")]
            if not lines:
                if len(seen) < _MOST_NAMES:
                    seen[name] = None
                continue
        yield _Found(name, None if call.stack is None else segment.stack(call.stack), lines)
    if damaged:
        logger.warning("%s lines of '%s' cannot be read", f"{damaged:,}", plain(pkl))


def _render(found: _Found) -> str:
    """Name, stack, then a line for each tensor, in columns."""
    text = [plain(found.call)]
    if found.stack is not None and found.stack.frames:
        text += ["  called at, innermost first:", *(f"    {plain(frame)}" for frame in found.stack.frames)]
    else:
        text.append("  no stack in this file")
    if found.lines:
        text += in_columns([_TITLES, *(_cells(line) for line in found.lines)])
    return "\n".join(text)


def _cells(line: TensorLine) -> tuple[str, ...]:
    numbers = ["N/A"] * 3 if line.statistics is None else [f"{value:.6g}" for value in line.statistics]
    return (plain(line.name), plain(line.dtype), plain(line.shape_text), *numbers)
