"""Opening a dump of ptdbg_ascend: `{tag}_v{version}/rank{N}/name.pkl`, which is text, and the folder of `.npy` files beside it.

In: the folder with the ranks, the folder of one rank, or a pkl. Out: a `Run` of one step, or None when the path is no such
dump, or an error that says which file is wrong. Only names and the first bytes of each pkl are read here.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from tensorprobe.errors import RunDamaged, RunError, RunNotFound, SettingsError
from tensorprobe.legacy.layouts.ptdbg_segment import Place, PtdbgSegment
from tensorprobe.record.files import demand_folder, list_names, open_file
from tensorprobe.record.foreign import foreign_run
from tensorprobe.record.run import Run

__all__ = ["PtdbgSegment", "open_ptdbg", "open_run"]

TOOL = "ptdbg_ascend"
_RANK = re.compile("rank(0|[1-9][0-9]{0,17})")
_TIME = "_[0-9][0-9_]*"
_SHOWN = 5
_NOTE = "a dump of ptdbg_ascend does not say which calls were left out of it, nor whether it is whole"


def open_run(path: str | Path, data: str | Path | None = None) -> Run:
    """The dump at `path`; RunNotFound when there is none. `data` is the folder of `.npy` files, if not the one beside the pkl."""
    run = open_ptdbg(Path(path), None if data is None else Path(data))
    if run is None:
        raise RunNotFound(
            f"no dump of ptdbg_ascend at '{path}'. Pass a pkl, or a folder with rank0, rank1, … that hold one each."
        )
    return run


def open_ptdbg(path: Path, data: Path | None = None) -> Run | None:
    """The dump at `path`, None when it is not one of ptdbg_ascend."""
    if path.suffix == ".pkl" and not path.is_dir():
        return _open_file(path, data)
    if not path.is_dir():
        return None
    ranks = {int(match[1]): name for name in list_names(path) if (match := _RANK.fullmatch(name))}
    held = {rank: _find_pkls(path, ranks[rank]) for rank in sorted(ranks) if (path / ranks[rank]).is_dir()}
    if any(held.values()):
        pkls = {rank: Place(path, (ranks[rank], _only(path / ranks[rank], names))) for rank, names in held.items()}
        return _run(path, pkls, data, one_rank=False)
    named = _RANK.fullmatch(path.absolute().name)
    names = _find_pkls(path)
    texts = names if named else [name for name in names if _is_text(Place(path, (name,)))]
    if not texts:
        return None
    pkl = Place(path, (_only(path, texts),))
    return _run(path, {int(named[1]) if named else 0: pkl}, data, one_rank=True)


def _open_file(path: Path, data: Path | None) -> Run:
    if not path.exists():
        raise RunNotFound(f"no file '{path}'.")
    # The user chose the file, so it may be a link; its values are beside the true one.
    file = Path(os.path.realpath(path)) if path.is_symlink() else path
    named = _RANK.fullmatch(file.absolute().parent.name)
    pkl = Place(file.parent, (file.name,))
    return _run(path, {int(named[1]) if named else 0: pkl}, data, one_rank=True)


def _run(path: Path, pkls: dict[int, Place], data: Path | None, *, one_rank: bool) -> Run:
    if data is not None:
        if len(pkls) > 1:
            raise SettingsError(
                f"data is '{data}', a folder for one rank; '{path}' holds {len(pkls)} ranks. Pass the pkl of one of them."
            )
        if not data.is_dir():
            raise RunNotFound(f"no folder '{data}': data is the folder with the .npy files of '{path}'.")
    written_s = max(map(_demand_text, pkls.values()))
    folders = {rank: _find_data(pkl) if data is None else Place(data, ()) for rank, pkl in pkls.items()}
    return foreign_run(
        path,
        TOOL,
        {(0, rank): PtdbgSegment(pkl, folders[rank]) for rank, pkl in pkls.items()},
        written_s=written_s,
        settings={"mode": "tensor" if any(folders.values()) else "summary"},
        note=_NOTE,
        data=data,
        one_rank=one_rank,
    )


def _find_pkls(path: Path, *parts: str) -> list[str]:
    return [name for name in list_names(path, *parts) if name.endswith(".pkl")]


def _only(folder: Path, names: list[str]) -> str:
    """The one pkl of a rank."""
    if not names:
        raise RunNotFound(f"no .pkl in '{folder}', although other ranks of the dump have one. Was it copied in part?")
    if len(names) > 1:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise RunError(
            f"'{folder}' holds {len(names)} dumps: {', '.join(names[:_SHOWN])}{more}.\n"
            f"  Pass one of them: {folder / names[0]}"
        )
    return names[0]


def _find_data(pkl: Place) -> Place | None:
    """The folder of values beside a pkl: of the same name, or, as older versions have it, with the time behind it."""
    *above, file = pkl.parts
    stem = file.removesuffix(".pkl")
    names = list_names(pkl.root, *above)
    found = [stem] if stem in names else [name for name in names if re.fullmatch(re.escape(stem) + _TIME, name)]
    found = [name for name in found if pkl.root.joinpath(*above, name).is_dir()]
    if len(found) > 1:
        raise RunError(
            f"the values of '{pkl}' may be in any of {len(found)} folders: {', '.join(found[:_SHOWN])}.\n"
            "  Move the others away, or say which: tensorprobe.open_run(pkl, data=folder)"
        )
    if not found:
        return None
    demand_folder(pkl.root, *above, found[0])
    return Place(pkl.root, (*above, found[0]))


def _demand_text(pkl: Place) -> float:
    """When the pkl was written last; RunDamaged when it is a true pickle."""
    start, written = _look(pkl)
    if start == b"\x80":
        raise RunDamaged(
            f"'{pkl}' is a binary pickle, not the text that ptdbg_ascend writes; it is never loaded: "
            "a pickle can run any program."
        )
    return written


def _is_text(pkl: Place) -> bool:
    try:
        return _look(pkl)[0] == b"["
    except (OSError, RunError):
        return False  # a link or the like, in a folder that need not be a dump at all


def _look(pkl: Place) -> tuple[bytes, float]:
    descriptor = open_file(pkl.root, *pkl.parts)
    try:
        return os.read(descriptor, 1), os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)
