"""What a folder holds when it is not a run of ours: other tools' dumps, or runs one level below.

Readers of other layouts live beside this file; each gives the same `Run`.
"""

from __future__ import annotations

import os
import re
from itertools import islice
from pathlib import Path

_MAX_NAMES = 2000
_SHOWN = 5

_SIGNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(dump|construct|stack)\.json"), "a dump of msprobe"),
    (re.compile(r"(forward|backward|stack)_info_.*\.json"), "a dump of api_accuracy_checker"),
    (re.compile(r"(npu_dump|anonymous|api_stack_.*|.*_dump)\.pkl|ptdbg_dump_v.*"), "a dump of ptdbg_ascend"),
    (re.compile(r".*\.safetensors(\.index\.json)?|pytorch_model.*\.bin"), "a checkpoint"),
)
_READ: dict[str, str] = {
    "a dump of api_accuracy_checker": "a forward_info_{pid}.json, or the folder that holds one set of them",
    "a dump of msprobe": "its folder with step0, step1, …, the folder of one step or rank, or a dump.json",
    "a dump of ptdbg_ascend": "its folder with rank0, rank1, …, the folder of one rank, or a .pkl",
}
"""Of which of them there is a reader, and what it takes."""
_DOWN = re.compile(r"(step|rank|proc)[0-9]*|.*_v[0-9.]+")


def describe_folder(path: Path) -> str:
    """What the folder holds instead of a run, as the second line of a message; empty when nothing can be said."""
    names = _names(path)
    runs = [name for name in names if (path / name / "manifest.json").is_file()]
    if runs:
        shown = ", ".join(runs[:_SHOWN]) + (f" and {len(runs) - _SHOWN} more" if len(runs) > _SHOWN else "")
        what = "1 run" if len(runs) == 1 else f"{len(runs):,} runs"
        return f"\n  It holds {what}: {shown}. Pass {'it' if len(runs) == 1 else 'one'}: {path / runs[-1]}"
    if (path.parent / "manifest.json").is_file():
        return f"\n  It is inside a run. Pass that: {path.parent}"
    if sign := find_sign(path):
        if sign[0] in _READ:
            return f"\n  It looks like {sign[0]} ({sign[1]}). Pass {_READ[sign[0]]}."
        return f"\n  It looks like {sign[0]} ({sign[1]}), which this version does not read."
    if not names:
        return "\n  The folder is empty."
    return f"\n  It holds {', '.join(names[:_SHOWN])}{', …' if len(names) > _SHOWN else ''}."


def find_sign(path: Path, depth: int = 2) -> tuple[str, str] | None:
    """Whose dump the folder looks like, and the file that says so; looks into step and rank folders two levels down."""
    names = _names(path)
    for pattern, what in _SIGNS:
        for name in names:
            if pattern.fullmatch(name):
                return what, str(path / name)
    for name in [name for name in names if _DOWN.fullmatch(name)][:1] if depth else []:
        if (path / name).is_dir() and (sign := find_sign(path / name, depth - 1)):
            return sign
    return None


def _names(path: Path) -> list[str]:
    """The first names in a folder, sorted; a folder of millions of files must not delay an error message."""
    try:
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in islice(entries, _MAX_NAMES))
    except OSError:
        return []
