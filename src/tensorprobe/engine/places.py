"""Opens the two runs: local folders, or URLs from which only the needed files are fetched.

For a remote run, the main process holds the index (manifest, ranks, calls, stacks). A task
fetches the tensors of its rank and removes them at its end. Only names that a run has are fetched, so nothing is
written outside the temporary folder. Messages name the run as the user did.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path

from tensorprobe.engine.rank_task import RankTask
from tensorprobe.engine.remote import RemoteFolder, is_in_memory, is_url, local_path
from tensorprobe.engine.settings import CompareSettings
from tensorprobe.errors import RunNotFound, SettingsError, TensorprobeError
from tensorprobe.record import Run, open_run

_NUMBER = "(0|[1-9][0-9]{0,17})"
_RANK_FILE = re.compile(rf"rank{_NUMBER}\.json")
_SEGMENT_FILE = re.compile(rf"step{_NUMBER}/rank{_NUMBER}/(calls\.jsonl|stacks\.jsonl|tensors\.bin)")
_SHOWN = 5

Place = str | os.PathLike[str] | Run


@dataclass(frozen=True)
class Side:
    """One of the two runs: the user's name for it, its address for tasks, and the open run."""

    said: str
    address: str
    run: Run
    opened: Run | None = None
    """The run with its own step and rank numbers, if its values are on this machine."""

    @property
    def data(self) -> str | None:
        """The folder of the values, if it is not the one of the layout."""
        return None if self.run.data is None else str(self.run.data.absolute())


@contextmanager
def open_sides(baseline: Place, candidate: Place, settings: CompareSettings) -> Iterator[tuple[Side, Side]]:
    """Both runs, open for planning and gathering. Fetched files are removed at the end."""
    with ExitStack() as stack:
        sides = [stack.enter_context(_open_side(place, settings)) for place in (baseline, candidate)]
        yield sides[0], _as_partner(sides[1], sides[0])


def _as_partner(candidate: Side, baseline: Side) -> Side:
    """Return the candidate. If the user chose one rank on each side, it gets the number of the baseline's rank.

    Where each is moreover one step of it, the steps meet whatever their numbers are.
    """
    runs = (baseline.run, candidate.run)
    if not all(run.one_rank and len(run.ranks) == 1 for run in runs):
        return candidate
    other_step = all(len(run.steps) == 1 for run in runs) and runs[0].steps != runs[1].steps
    if not other_step and runs[0].ranks == runs[1].ranks:
        return candidate
    step = runs[0].steps[0] if other_step else None
    return replace(candidate, run=candidate.run.renumbered(runs[0].ranks[0], step))


@contextmanager
def _open_side(place: Place, settings: CompareSettings) -> Iterator[Side]:
    if isinstance(place, Run):
        own = place.true_rank is None and place.true_step is None
        yield Side(str(place.path), str(place.path.absolute()), place, place if own else None)
        return
    path = local_path(place)
    if path is not None:
        said = os.fspath(place) if is_url(os.fspath(place)) else str(path)
        run = open_run(path)
        yield Side(said, str(path.absolute()), run, run)
        return
    url = os.fspath(place)
    if settings.leaves_process and is_in_memory(url):
        raise SettingsError(
            f"{url!r} is in the memory of this process; other processes cannot see it. Use one job here."
        )
    with _temporary() as folder, _spoken_of(folder, url):
        _fetch_index(RemoteFolder(url), folder, settings)
        yield Side(url, url, open_run(folder))


OpenRuns = dict[tuple[str, str | None], Run]
"""Open local runs, by address and folder of values."""


@contextmanager
def runs_of(task: RankTask, opened: OpenRuns) -> Iterator[tuple[Run, Run]]:
    """Return both runs of a task. A local run is opened once and kept in `opened`; of a remote one, the rank is fetched."""
    with ExitStack() as stack:
        here = []
        for at, (place, data, rank) in enumerate(
            (
                (task.baseline, task.baseline_data, task.rank),
                (task.candidate, task.candidate_data, task.candidate_rank),
            )
        ):
            steps = [pair[at] for pair in task.steps]
            if is_url(place):
                folder = stack.enter_context(_temporary())
                stack.enter_context(_spoken_of(folder, place))
                _fetch_rank(RemoteFolder(place), folder, rank, steps)
                here.append(open_run(folder))
                continue
            if (place, data) not in opened:
                opened[place, data] = open_run(place, data)
            here.append(_one_rank(opened[place, data], rank, steps))
        yield here[0], here[1]


def _one_rank(run: Run, rank: int, steps: Sequence[int]) -> Run:
    """Return the run with only one of its ranks. Its index and stacks are freed with it."""
    parts = {rank: run.parts[rank]} if rank in run.parts else {}
    segments = {(step, rank): copy(run.segment(step, rank)) for step in steps}
    return Run(run.path, run.manifest, parts, segments, data=run.data, one_rank=run.one_rank)


def _fetch_index(source: RemoteFolder, folder: Path, settings: CompareSettings) -> None:
    """Fetch the small files of a run, and make a folder for each step and rank."""
    names = _names_of_run(source)
    wanted = ["manifest.json", *(name for name in names if _RANK_FILE.fullmatch(name))]
    steps, ranks = settings.wanted_steps, settings.wanted_ranks
    for name in names:
        if match := _SEGMENT_FILE.fullmatch(name):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            chosen = (steps is None or int(match[1]) in steps) and (ranks is None or int(match[2]) in ranks)
            if chosen and match[3] != "tensors.bin":
                wanted.append(name)
    source.get({name: folder / name for name in wanted})


def _fetch_rank(source: RemoteFolder, folder: Path, rank: int, steps: Sequence[int]) -> None:
    """Return all files of one rank in these steps."""
    names = _names_of_run(source)
    wanted = ["manifest.json"]
    for name in names:
        part, segment = _RANK_FILE.fullmatch(name), _SEGMENT_FILE.fullmatch(name)
        if (part and int(part[1]) == rank) or (segment and int(segment[2]) == rank and int(segment[1]) in steps):
            wanted.append(name)
    source.get({name: folder / name for name in wanted})


def _names_of_run(source: RemoteFolder) -> list[str]:
    names = source.names()
    if "manifest.json" not in names:
        held = (
            f"It holds {', '.join(names[:_SHOWN])}{', …' if len(names) > _SHOWN else ''}." if names else "It is empty."
        )
        raise RunNotFound(f"no run in {source.url!r} (no manifest.json).\n  {held}")
    return names


@contextmanager
def _temporary() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tensorprobe-") as folder:
        yield Path(folder)


@contextmanager
def _spoken_of(folder: Path, url: str) -> Iterator[None]:
    """Name the URL instead of the temporary copy in errors."""
    try:
        yield
    except TensorprobeError as error:
        if str(folder) not in str(error):
            raise
        raise type(error)(str(error).replace(str(folder), url)) from None
