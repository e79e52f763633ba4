"""`compare_distributed`: the dumps of all ranks of two runs, rank by rank; a CSV for each pair.

In: two folders that hold `rank0`, `rank1`, … and nothing else. Ranks meet by their number. One comparison covers all of them, so
that ranks are compared at the same time; what is written does not depend on how many at once.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from tensorprobe.engine.settings import CompareSettings
from tensorprobe.errors import SettingsError
from tensorprobe.legacy.compared.arguments import Wish, demand_bool, demand_output, demand_path
from tensorprobe.legacy.compared.compared import Compared, demand_same_ranks
from tensorprobe.legacy.ptdbg import speak
from tensorprobe.legacy.ptdbg.arguments import check_stack_mode
from tensorprobe.legacy.ptdbg.table import FORM
from tensorprobe.record import open_run
from tensorprobe.text import plain

_RANK = re.compile("rank(0|[1-9][0-9]{0,17})")
_SHOWN = 5


def compare_distributed(
    npu_dump_dir: str | os.PathLike[str],
    bench_dump_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    *,
    shape_flag: bool = False,
    stack_mode: bool = False,
    auto_analyze: bool = True,
    suffix: str = "",
    fuzzy_match: bool = False,
    is_print_compare_log: bool = False,
    jobs: int | None = None,
) -> list[Path]:
    """Compare the dumps `{dump_path}/{dump_tag}_v1.0` of a device and of the bench; the paths of the CSVs come back.

    The keywords are those of `compare`. `jobs` ranks are compared at once, by default as many as there are processors.
    """
    speak()
    demand_bool("shape_flag", shape_flag)
    wish = Wish(
        output=demand_output(output_path),
        stack_mode=stack_mode,
        auto_analyze=auto_analyze,
        suffix=suffix,
        fuzzy_match=fuzzy_match,
        print_log=is_print_compare_log,
    )
    npu_files, bench_files = _find_ranks("npu_dump_dir", npu_dump_dir), _find_ranks("bench_dump_dir", bench_dump_dir)
    demand_same_ranks((npu_dump_dir, bench_dump_dir), (list(npu_files), list(bench_files)))
    check_stack_mode(zip(npu_files.values(), bench_files.values(), strict=True), stack_mode)
    npu, bench = open_run(Path(npu_dump_dir)), open_run(Path(bench_dump_dir))
    at_once = min(CompareSettings().threads_for(1), len(npu_files)) if jobs is None else jobs
    compared = Compared.of(npu, bench, wish, FORM, jobs=at_once)
    written = [
        compared.write((npu.segments(rank=rank)[0], bench.segments(rank=rank)[0]), f"rank{rank}-rank{rank}")
        for rank in npu_files
    ]
    compared.log_ranks(written)
    compared.log_answer()
    return [done.path for done in written]


def _find_ranks(name: str, path: Any) -> dict[int, Path]:
    """The pkl of each rank in a folder, in the order of their numbers; SettingsError for everything that is not theirs."""
    folder = demand_path(name, path)
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise SettingsError(
            f"{name} '{plain(folder)}' {what}; it must be the folder with rank0, rank1, …: {{dump_path}}/{{dump_tag}}_v1.0"
        )
    names = sorted(entry.name for entry in folder.iterdir())
    found = {int(match[1]): folder / held for held in names if (match := _RANK.fullmatch(held))}
    foreign = [held for held in names if not _RANK.fullmatch(held) or not (folder / held).is_dir()]
    if foreign:
        raise SettingsError(
            f"{name} '{plain(folder)}' holds what is no rank's folder: {_few(foreign)}.\n  {_hint(folder, foreign)}"
        )
    if not found:
        raise SettingsError(f"{name} '{plain(folder)}' is empty: it must hold rank0, rank1, …")
    return {rank: _only_pkl(found[rank]) for rank in sorted(found)}


def _hint(folder: Path, foreign: list[str]) -> str:
    inside = [held for held in foreign if (folder / held).is_dir() and any((folder / held).glob("rank*"))]
    if inside:
        return f"One level below there are ranks. Pass it: {plain(folder / inside[0])}"
    if "manifest.json" in foreign:
        return "It is a run of tensorprobe: compare it with   tensorprobe compare BENCH NPU"
    return "Move it away: whether it belongs to the dump cannot be known."


def _only_pkl(folder: Path) -> Path:
    files = sorted(folder.glob("*.pkl"))
    if len(files) == 1:
        return files[0]
    if not files:
        held = _few(sorted(entry.name for entry in folder.iterdir()))
        raise SettingsError(f"there is no pkl in '{plain(folder)}'. It holds {held or 'nothing'}.")
    raise SettingsError(
        f"'{plain(folder)}' holds {len(files)} pkl files: {_few([file.name for file in files])}. Which of them is meant?\n"
        "  Move the others away, or compare this rank by itself: compare({'npu_pkl_path': …, 'bench_pkl_path': …}, …)"
    )


def _few(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(plain(name) for name in names[:_SHOWN]) + more
