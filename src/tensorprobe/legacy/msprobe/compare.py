"""`compare`: two dumps in, `compare_result_{time}.csv` or `.xlsx` and `advisor_{time}.txt` out.

Dumps are those of msprobe, of any generation; a run in another layout that tensorprobe reads is taken as well, on either
side. Three tables: with values, with statistics, with digests. A difference is never an exception.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tensorprobe import files
from tensorprobe.engine.settings import CompareSettings
from tensorprobe.errors import RunDamaged, SettingsError
from tensorprobe.legacy.compared.comparing import (
    LOG_KEY,
    Compared,
    Wish,
    Written,
    demand_bool,
    demand_folder,
    demand_output,
    demand_path,
    demand_same_ranks,
    known_parameters,
    only_places,
)
from tensorprobe.legacy.layouts.msprobe_entries import read_stacks
from tensorprobe.legacy.layouts.msprobe_reader import frames_of
from tensorprobe.legacy.msprobe import speak
from tensorprobe.legacy.msprobe.tables import DIGEST, choose_style
from tensorprobe.record import open_run
from tensorprobe.text import plain


def compare(
    input_param: Mapping[str, Any],
    output_path: str | os.PathLike[str],
    stack_mode: bool = False,
    auto_analyze: bool = True,
    fuzzy_match: bool = False,
    *,
    xlsx: bool = False,
) -> Path:
    """Compare the dump of a device with that of the bench; the path of the table comes back.

    `input_param` has `npu_json_path` and `bench_json_path` (or `npu_path`, `bench_path`): the dump.json of a rank. With
    `stack_mode` the table has the stacks, from `stack_json_path` or the stack.json beside the dump of the NPU; to give
    that file without the mode is an error. `auto_analyze` logs the first node that fails and writes the advice.
    `fuzzy_match` pairs the calls of an API in their order, whatever their numbers. `is_print_compare_log` logs every row.
    """
    speak()
    given = read_parameters(input_param)
    demand_bool("stack_mode", stack_mode)
    check_stack_mode(given, stack_mode)
    wish = Wish(
        output=demand_output(output_path, create=True),
        stack_mode=stack_mode,
        auto_analyze=auto_analyze,
        fuzzy_match=fuzzy_match,
        print_log=given.print_log,
        xlsx=xlsx,
    )
    return compare_pair(given, wish).paths[0]


def compare_distributed(
    npu_dump_dir: str | os.PathLike[str],
    bench_dump_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    *,
    stack_mode: bool = False,
    auto_analyze: bool = True,
    fuzzy_match: bool = False,
    is_print_compare_log: bool = False,
    xlsx: bool = False,
    jobs: int | None = None,
) -> list[Path]:
    """Compare the dumps of all ranks; the paths of the tables come back: `compare_result_rank0-rank0_{time}.csv`.

    The keywords are those of `compare`. `jobs` ranks are compared at once, by default as many as there are processors.
    """
    speak()
    folders = demand_folder("npu_dump_dir", npu_dump_dir), demand_folder("bench_dump_dir", bench_dump_dir)
    wish = Wish(
        output=demand_output(output_path, create=True),
        stack_mode=stack_mode,
        auto_analyze=auto_analyze,
        fuzzy_match=fuzzy_match,
        print_log=is_print_compare_log,
        xlsx=xlsx,
    )
    return compare_ranks(folders, wish, jobs=jobs).paths


class Done(NamedTuple):
    """The tables that were written, and the exit code of the answer: 0 agrees, 1 diverged, 2 nothing was measured."""

    paths: list[Path]
    exit_code: int


def compare_pair(given: Parameters, wish: Wish) -> Done:
    """One rank of each."""
    npu, bench = open_run(given.npu), open_run(given.bench)
    places = only_places(npu, bench)
    compared = Compared.of(npu, bench, wish, choose_style(npu, bench))
    stack = StackFile(given.stack).of if wish.stack_mode and given.stack is not None else None
    return _end(compared, [compared.write(places, stack=stack)])


def compare_ranks(folders: tuple[Path, Path], wish: Wish, *, jobs: int | None = None) -> Done:
    """Every rank and step that both folders, NPU and bench, hold; `jobs` ranks at once, by default one for each processor."""
    npu, bench = open_run(folders[0]), open_run(folders[1])
    demand_same_ranks(folders, (npu.ranks, bench.ranks))
    at_once = min(CompareSettings().threads_for(1), len(npu.ranks)) if jobs is None else jobs
    compared = Compared.of(npu, bench, wish, choose_style(npu, bench), jobs=at_once)
    common = [place for place in npu.segments() if place in bench.segments()]
    several = len({step for step, _ in common}) > 1
    written = [
        compared.write((place, place), f"{f'step{place[0]}_' if several else ''}rank{place[1]}-rank{place[1]}")
        for place in common
    ]
    compared.log_ranks(written)
    return _end(compared, written)


def _end(compared: Compared, written: Sequence[Written]) -> Done:
    """A row that fails is a divergence, also where the engine has another view of it."""
    compared.log_answer()
    paths, found = [done.path for done in written], [done.analysis for done in written]
    if any(analysis.failure for analysis in found):
        return Done(paths, 1)
    if compared.style is DIGEST and all(analysis.all_match for analysis in found):
        return Done(
            paths, 0
        )  # digests that the published tool took too late are no difference, though their bits differ
    return Done(paths, compared.result.exit_code)


_SPELLINGS = {
    "npu": ("npu_json_path", "npu_path"),
    "bench": ("bench_json_path", "bench_path"),
    "stack": ("stack_json_path", "stack_path"),
}
KEYS = (*(key for keys in _SPELLINGS.values() for key in keys), LOG_KEY)
_TURN_ON = "The current file contains stack information, please turn on the stack_mode."
_TURN_OFF = "The current file does not contain stack information, please turn off the stack_mode."


@dataclass(frozen=True)
class Parameters:
    """Where the dumps are. `stack` is the stack.json that was given; None: the one beside the NPU's dump."""

    npu: Path
    bench: Path
    stack: Path | None
    print_log: Any


def read_parameters(given: Any) -> Parameters:
    """The parameters; SettingsError names the key that is wrong, missing, or there twice."""
    held = known_parameters(given, KEYS)
    paths: dict[str, Path | None] = {}
    for side, keys in _SPELLINGS.items():
        named = [key for key in keys if key in held]
        if len(named) > 1 and held[named[0]] != held[named[1]]:
            raise SettingsError(f"{' and '.join(named)} mean the same and are not equal: leave out one of them.")
        if not named and side != "stack":
            raise SettingsError(f"{' or '.join(keys)} is not given: the dump.json of each side is needed.")
        paths[side] = demand_path(named[0], held[named[0]]) if named else None
    npu, bench, stack = paths["npu"], paths["bench"], paths["stack"]
    assert npu is not None and bench is not None
    if stack is not None and not stack.is_file():
        what = "is a folder" if stack.is_dir() else "does not exist"
        raise SettingsError(f"stack_json_path '{plain(stack)}' {what}; it is the stack.json of the NPU's dump.")
    return Parameters(npu, bench, stack, held.get(LOG_KEY, False))


def read_settings(path: Path) -> dict[str, Any]:
    """What a compare.json says, unknown keys named with their line."""
    try:
        text = files.read_settings(path).decode("utf-8")
        given = json.loads(text)
    except OSError as error:
        raise SettingsError(f"'{plain(path)}' cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"'{plain(path)}' is no JSON: {error}.") from None
    try:
        return known_parameters(given, KEYS)
    except SettingsError as error:
        unknown = [key for key in given if key not in KEYS] if isinstance(given, dict) else []
        lines = [str(text[: text.find(json.dumps(key))].count("\n") + 1) for key in unknown[:1]]
        raise type(error)(f"in '{plain(path)}'{''.join(f', line {line}' for line in lines)}: {error}") from None


def check_stack_mode(given: Parameters, stack_mode: bool) -> None:
    """SettingsError when a stack.json is given and not to be shown, or to be shown and not there."""
    if given.stack is not None:
        if stack_mode is False:
            raise SettingsError(
                f"{_TURN_ON}\n  '{plain(given.stack)}' is given. Pass stack_mode=True (-s), or leave it out."
            )
        return
    dump = given.npu / "dump.json" if given.npu.is_dir() else given.npu
    if stack_mode is True and dump.name == "dump.json" and dump.is_file() and not stack_beside(dump):
        raise SettingsError(
            f"{_TURN_OFF}\n  There is no stack.json beside '{plain(dump)}'. Leave stack_mode out, or pass stack_json_path."
        )


def stack_beside(dump: Path) -> bool:
    """Whether a dump.json has its stacks beside it."""
    return dump.with_name("stack.json").is_file()


class StackFile:
    """The stacks of a file that need not stand beside its dump; RunDamaged when it cannot be read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._numbers, frames = read_stacks(path.parent, (path.name,))
        if isinstance(frames, RunDamaged):
            raise frames
        self._frames = frames
        self._known: dict[int, str] = {}

    def of(self, call: str, _: int | None) -> str:
        """The stack of a call on one line, innermost frame first; empty when there is none."""
        number = self._numbers.get(call)
        if number is None:
            return ""
        if number not in self._known:
            self._known[number] = " <- ".join(map(str, frames_of(self._frames[number], self._path, number)))
        return self._known[number]
