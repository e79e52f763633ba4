"""Opening a dump of api_accuracy_checker: `forward_info_{pid}.json`, with `backward_info` and `stack_info` of the same pid beside it.

In: one of these files, or the folder that holds one set of them. Out: a `Run` of one step and one rank, or None when the
path is no such dump. Only names, and the beginning of the forward file, are read here. A folder with the files of several
processes is refused with their names: a pid tells neither which rank it was, nor whether it was the same training.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from tensorprobe.errors import RunDamaged, RunError, RunNotFound
from tensorprobe.legacy.layouts.checker_segment import CheckerFile, CheckerSegment
from tensorprobe.record.files import list_names, open_file
from tensorprobe.record.foreign import foreign_run
from tensorprobe.record.run import Run

TOOL = "api_accuracy_checker"
UNFINISHED = ".api_accuracy_checker_"
"""What the folder of a recording begins with whose JSON files are not yet written; the pid follows. It is a run of ours."""
_NAME = re.compile(r"(forward|backward|stack)_info_(.+)\.json")
_HEAD = 1 << 20
_SHOWN = 5
_NOTE = "a dump of api_accuracy_checker holds inputs alone, and does not say which calls were left out of it"


def open_checker(path: Path, data: Path | None = None) -> Run | None:
    """Return the dump at `path`; None when it is not one of api_accuracy_checker. Its values cannot be elsewhere."""
    if data is not None:
        return None
    if path.is_dir():
        names = list_names(path)
        tags = sorted({match[2] for name in names if (match := _NAME.fullmatch(name)) and match[1] != "stack"})
        return _open_set(path, path, _only(path, tags)) if tags else None
    match = _NAME.fullmatch(path.name)
    if match is None:
        return None
    if not path.is_file():
        raise RunNotFound(f"no file '{path}'.{_say_unfinished(path.parent, match[2])}")
    # The user chose the file, so it may be a link; its companions are beside the true one.
    file = Path(os.path.realpath(path)) if path.is_symlink() else path
    true_name = _NAME.fullmatch(file.name)
    return _open_set(path, file.parent, true_name[2] if true_name else match[2])


def open_checker_files(forward: Path, backward: Path | None = None, stack: Path | None = None) -> Run:
    """The dump in files of any name, as the command line of the older tool takes them."""
    chosen = {}
    for kind, path in (("forward", forward), ("backward", backward), ("stack", stack)):
        if path is not None:
            if not path.is_file():
                match = _NAME.fullmatch(path.name)
                raise RunNotFound(f"no file '{path}'.{_say_unfinished(path.parent, match[2]) if match else ''}")
            file = Path(os.path.realpath(path))
            chosen[kind] = CheckerFile(file.parent, file.name)
    return _run(forward, chosen)


def _open_set(path: Path, folder: Path, tag: str) -> Run:
    names = {kind: f"{kind}_info_{tag}.json" for kind in ("forward", "backward", "stack")}
    return _run(path, {kind: CheckerFile(folder, name) for kind, name in names.items() if (folder / name).exists()})


def _run(path: Path, files: dict[str, CheckerFile]) -> Run:
    first = files.get("forward") or files["backward"]
    head, written = _look(first)
    if head.lstrip()[:1] not in (b"{", b""):
        raise RunDamaged(f"'{first}' is not a JSON object; {TOOL} writes nothing else.")
    settings = {"mode": "tensor" if b'"datapath"' in head else "summary"}
    segments = {(0, 0): CheckerSegment(files)}
    return foreign_run(path, TOOL, segments, written_s=written, settings=settings, note=_NOTE, one_rank=True)


def _only(folder: Path, tags: list[str]) -> str:
    if len(tags) > 1:
        more = f" and {len(tags) - _SHOWN} more" if len(tags) > _SHOWN else ""
        raise RunError(
            f"'{folder}' holds the dumps of {len(tags)} processes: {', '.join(tags[:_SHOWN])}{more}.\n"
            f"  Pass the file of one of them: {folder / f'forward_info_{tags[0]}.json'}"
        )
    return tags[0]


def _say_unfinished(folder: Path, tag: str) -> str:
    recording = folder / f"{UNFINISHED}{tag}"
    if not recording.is_dir():
        return ""
    return (
        f"\n  Process {tag} was cut off before it was written. What it had recorded is a run: '{recording}'\n"
        "  run_ut writes the JSON files from it."
    )


def _look(file: CheckerFile) -> tuple[bytes, float]:
    """The beginning of a file, and when it was written."""
    with os.fdopen(open_file(file.folder, file.name), "rb") as content:
        return content.read(_HEAD), os.fstat(content.fileno()).st_mtime
