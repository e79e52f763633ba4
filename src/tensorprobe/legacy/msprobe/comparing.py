"""The work of `compare` and `compare_distributed`: two dumps opened, compared, and written in the form that fits them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tensorprobe.engine.settings import CompareSettings
from tensorprobe.legacy.compared.arguments import Wish
from tensorprobe.legacy.compared.compared import Compared, Written, demand_same_ranks, only_places
from tensorprobe.legacy.msprobe.parameters import Parameters
from tensorprobe.legacy.msprobe.stack_file import StackFile
from tensorprobe.legacy.msprobe.tables import choose_form
from tensorprobe.record import open_run


class Done(NamedTuple):
    """The tables that were written, and the exit code of the answer: 0 agrees, 1 diverged, 2 nothing was measured."""

    paths: list[Path]
    exit_code: int


def compare_pair(given: Parameters, wish: Wish) -> Done:
    """One rank of each."""
    npu, bench = open_run(given.npu), open_run(given.bench)
    places = only_places(npu, bench)
    compared = Compared.of(npu, bench, wish, choose_form(npu, bench))
    stack = StackFile(given.stack).of if wish.stack_mode and given.stack is not None else None
    return _end(compared, [compared.write(places, stack=stack)])


def compare_ranks(folders: tuple[Path, Path], wish: Wish, *, jobs: int | None = None) -> Done:
    """Every rank and step that both folders, NPU and bench, hold; `jobs` ranks at once, by default one for each processor."""
    npu, bench = open_run(folders[0]), open_run(folders[1])
    demand_same_ranks(folders, (npu.ranks, bench.ranks))
    at_once = min(CompareSettings().threads_for(1), len(npu.ranks)) if jobs is None else jobs
    compared = Compared.of(npu, bench, wish, choose_form(npu, bench), jobs=at_once)
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
    fails = any(done.analysis.failure for done in written)
    return Done([done.path for done in written], 1 if fails else compared.result.exit_code)
