"""`compare`: two dumps in, `compare_result_{time}.csv` and `advisor_{time}.txt` out.

Dumps are those of ptdbg_ascend; a run in another layout that tensorprobe reads is taken as well. Pairing, measuring and the
rule of 2023 are tensorprobe's; here the answer is given in the old form. A difference is never an exception.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tensorprobe.engine.settings import CompareSettings
from tensorprobe.errors import RunNotFound, SettingsError
from tensorprobe.legacy.compared.comparing import (
    LOG_KEY,
    Compared,
    Wish,
    demand_bool,
    demand_output,
    demand_path,
    demand_same_ranks,
    known_parameters,
    only_places,
)
from tensorprobe.legacy.compared.paired import Paired
from tensorprobe.legacy.compared.tables import (
    BLIND_TO_SCALE,
    MESSAGE,
    NOTHING,
    STACK_COLUMN,
    Columns,
    Lines,
    Spelled,
    StackOf,
    TableStyle,
)
from tensorprobe.legacy.layouts.ptdbg_lines import write_line_name
from tensorprobe.legacy.layouts.ptdbg_reader import PtdbgCall, say_where
from tensorprobe.legacy.ptdbg import logger, speak
from tensorprobe.legacy.speaking import without_traceback
from tensorprobe.model import Call
from tensorprobe.record import open_run
from tensorprobe.text import few, plain


@without_traceback
def compare(
    input_param: Mapping[str, Any],
    output_path: str | os.PathLike[str],
    shape_flag: bool = False,
    stack_mode: bool = False,
    auto_analyze: bool = True,
    suffix: str = "",
    fuzzy_match: bool = False,
) -> Path:
    """Compare the dump of a device with that of the bench; the path of the CSV comes back.

    `input_param` has `npu_pkl_path`, `bench_pkl_path`, the folders with their .npy files, `npu_dump_data_dir` and
    `bench_dump_data_dir` (by default those beside the pkl), and `is_print_compare_log`. `output_path` must exist.
    An API with another number of tensors, or another shape of one, is `Unmatched` as a whole, whatever `shape_flag` says.
    `stack_mode` is for dumps of the mode
    api_stack, and adds the column with the stacks. `auto_analyze` logs the first node that fails and writes the advice.
    `fuzzy_match` pairs the calls of an API in their order, whatever their numbers.
    """
    speak()
    given = read_parameters(input_param)
    demand_bool("shape_flag", shape_flag)
    wish = Wish(
        output=demand_output(output_path),
        stack_mode=stack_mode,
        auto_analyze=auto_analyze,
        suffix=suffix,
        fuzzy_match=fuzzy_match,
        print_log=given.get(LOG_KEY, False),
    )
    check_stack_mode([(given["npu_pkl_path"], given["bench_pkl_path"])], stack_mode)
    npu, bench = (open_run(given[f"{side}_pkl_path"], given.get(f"{side}_dump_data_dir")) for side in ("npu", "bench"))
    places = only_places(npu, bench)
    compared = Compared.of(npu, bench, wish, STYLE)
    written = compared.write(places)
    compared.log_answer()
    return written.path


_RANK = re.compile("rank(0|[1-9][0-9]{0,17})")


@without_traceback
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
    compared = Compared.of(npu, bench, wish, STYLE, jobs=at_once)
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
    return few([plain(name) for name in names])


STACK_PREFIX = "api_stack_"
"""How the files of the mode api_stack begin."""
_PATHS = ("npu_pkl_path", "bench_pkl_path")
_FOLDERS = ("npu_dump_data_dir", "bench_dump_data_dir")
_KEYS = (*_PATHS, *_FOLDERS, LOG_KEY)


def read_parameters(given: Any) -> dict[str, Any]:
    """The dict that `compare` is given; paths in it are Paths."""
    held = known_parameters(given, _KEYS)
    if lacking := [key for key in _PATHS if key not in held]:
        are = "is" if len(lacking) == 1 else "are"
        raise SettingsError(f"{' and '.join(lacking)} {are} not given: the pkl of each dump is needed.")
    for key in (*_PATHS, *_FOLDERS):
        if key in held:
            held[key] = demand_path(key, held[key])
    for pkl, key in zip(_PATHS, _FOLDERS, strict=True):
        if key in held and not held[key].is_dir():
            if not held[pkl].exists() and (where := say_where(held[pkl])) and not say_where(held[key]):
                raise RunNotFound(f"no file '{plain(held[pkl])}'.{where}")
            raise SettingsError(
                f"{key} '{plain(held[key])}' is no folder. It is the one with the .npy files of the dump; "
                f"without the key, the folder beside the pkl is taken.{say_where(held[key])}"
            )
    return held


def check_stack_mode(pairs: Iterable[tuple[Path, Path]], stack_mode: bool) -> None:
    """SettingsError when the names of the pkl files, NPU and bench, do not fit the mode; other runs say nothing of it."""
    for pair in (tuple(map(_pkl_in, pair)) for pair in pairs):
        if any(path.suffix != ".pkl" for path in pair):
            continue
        npu_has, bench_has = (path.name.startswith(STACK_PREFIX) for path in pair)
        names = f"NPU '{plain(pair[0])}', bench '{plain(pair[1])}'"
        if npu_has != bench_has:
            raise SettingsError(
                "The dump mode of the two files is not same, please check the dump files.\n"
                f"  {names}: one was dumped in the mode api_stack, the other was not. Dump both in one mode."
            )
        if npu_has and not stack_mode:
            raise SettingsError(
                "The current file contains stack information, please turn on the stack_mode.\n"
                f"  {names}. Pass stack_mode=True."
            )
        if stack_mode and not npu_has:
            raise SettingsError(
                "The current file does not contain stack information, please turn off the stack_mode.\n"
                f"  {names}: files of the mode api_stack start with {STACK_PREFIX}. Leave stack_mode out."
            )


def _pkl_in(path: Path) -> Path:
    """The one pkl in the folder of a rank, or in that of the only rank; else the path itself."""
    found = [*path.glob("*.pkl")] or [*path.glob("rank*/*.pkl")]
    return found[0] if len(found) == 1 else path


# The guide's prose has "Npu Tensor Dtype" and "MaxAbsError"; the files that the tool wrote have these.
COLUMNS = (
    "NPU Name", "Bench Name", "NPU Tensor Dtype", "Bench Tensor Dtype", "NPU Tensor Shape", "Bench Tensor Shape", "Cosine", "MaxAbsErr",
    "NPU max", "NPU min", "NPU mean", "Bench max", "Bench min", "Bench mean", "Accuracy Reached or Not", "Err_message",
)  # fmt: skip
_STATISTICS = ("max", "min", "mean")
_VERDICT = "Accuracy Reached or Not"


def _lay_out(paired: Paired, stack: StackOf | None) -> Columns:
    columns: Columns = {
        **paired.both("Name", lambda lines: lines.name),
        **paired.both("Tensor Dtype", lambda lines: lines.dtype),
        **paired.both("Tensor Shape", lambda lines: lines.shape),
        "Cosine": paired.shown(1 - paired.column("one_minus_cosine")),
        "MaxAbsErr": paired.shown(paired.column("max_abs")),
    }
    for at, kind in enumerate(_STATISTICS):
        columns |= paired.both(kind, lambda lines, at=at: _statistic(lines, at))  # type: ignore[misc]
    columns[_VERDICT] = paired.accuracy({"agrees": "Yes", "diverges": "No"}).tolist()
    columns[MESSAGE] = paired.messages().tolist()
    columns = {name: columns[name] for name in COLUMNS}
    return columns if stack is None else {**columns, STACK_COLUMN: paired.stacks(stack)}


def _statistic(lines: Lines, at: int) -> list[float | str]:
    return [NOTHING if held is None else held[at] for held in lines.statistics]


def _spell(call: Call) -> list[Spelled]:
    """Return the lines of a call: those of its pkl, or for another layout what ptdbg_ascend would have written."""
    if isinstance(call, PtdbgCall):
        return [(line.name, line.dtype, line.shape_text, line.statistics) for line in call.lines]
    # What a call has written into its arguments is nothing that it gave back.
    given_back = [slot for slot in call.slots if slot.side == "output" and not slot.name.startswith("output.changed")]
    single = len(given_back) == 1
    head = write_line_name(call.name, "", single=False)
    spelled: list[Spelled] = []
    for slot in call.slots:
        name = (
            write_line_name(call.name, slot.name, single=True) if single and slot is given_back[0] else head + slot.name
        )
        held = slot.summary
        statistics = None if held is None else (float(held.max), float(held.min), float(held.mean))
        spelled.append((name, f"torch.{slot.dtype}", str(list(slot.shape)), statistics))
    return spelled


STYLE = TableStyle(
    logger=logger,
    policy="seed-2023",
    rule="No: Cosine < 0.99 and MaxAbsErr > 0.001",
    blindness=BLIND_TO_SCALE,
    verdict=_VERDICT,
    good="Yes",
    bad=("No",),
    figures=COLUMNS[6:14],
    logged=("Cosine", "MaxAbsErr"),
    spell=_spell,
    lay_out=_lay_out,
    whole_calls=True,
)
