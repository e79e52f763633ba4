"""Where to look closer: from a comparison of summaries to the steps, ranks and calls whose values are worth recording.

In: the answer, a run with summaries, a limit in bytes. Out: a `Window`. Nothing is recorded and nothing is judged here.
"""

from __future__ import annotations

from collections.abc import Iterable

from tensorprobe.model import DTYPES, Call
from tensorprobe.model.comparison import Comparison, Divergence
from tensorprobe.model.search import Window
from tensorprobe.ops import is_collective
from tensorprobe.record import Run

_MOST_NAMES = 1000
"""A process is told the names in one variable of its environment, which holds 128 KB."""


def choose_window(summary: Comparison, run: Run, *, most_bytes: int) -> Window | None:
    """Return what to record with values: whole steps if they fit, else the calls nearest to the divergence that fit.

    None if both runs hold the same bits. `run` is the baseline, or the candidate if the divergence is only there.
    """
    place = summary.divergence or summary.first_difference
    if place is None:
        return None
    steps = {place.step}
    if summary.first_difference is not None and summary.first_difference.rank == place.rank:
        steps.add(summary.first_difference.step)
    if place.status == "entered":
        steps.add(place.step - 1)  # the update that made what enters
    held = sorted(steps.intersection(run.steps))
    alone = len(run.ranks) > 1 and not is_collective(place.call or place.candidate_call)
    ranks = [place.rank] if alone else []
    seen: set[str] = set()
    sizes: dict[str, int] = {}
    counts: dict[str, int] = {}
    for step, rank in run.segments():
        if step in held and (not ranks or rank in ranks):
            for call in run.calls(step, rank, on_damage="skip"):
                name = both_directions(call.name)
                sizes[name] = sizes.get(name, 0) + _bytes(call.model, seen)
                counts[name] = counts.get(name, 0) + 1
    calls, total = sum(counts.values()), sum(sizes.values())
    if total <= most_bytes:
        return Window(steps=held, ranks=ranks, names=[], calls=calls, of_calls=calls, size_bytes=total)
    chosen: list[str] = []
    left = most_bytes
    for name in _nearest(list(sizes), summary, place):
        if sizes[name] <= left and len(chosen) < _MOST_NAMES:
            chosen.append(name)
            left -= sizes[name]
    return Window(
        steps=held,
        ranks=ranks,
        names=chosen,
        calls=sum(counts[name] for name in chosen),
        of_calls=calls,
        size_bytes=most_bytes - left,
    )


def both_directions(call: str) -> str:
    """Return the name that stands for a call and its backward."""
    return call.removesuffix(".forward").removesuffix(".backward")


def _nearest(names: list[str], summary: Comparison, place: Divergence) -> Iterable[str]:
    """Return the calls: where bits first differ, up to the divergence, then those before and after by distance."""
    at = {name: number for number, name in enumerate(names)}
    end = at.get(both_directions(place.call or place.candidate_call), 0)
    first = end
    if summary.first_difference is not None:
        first = min(end, at.get(both_directions(summary.first_difference.call), end))
    around = sorted(range(len(names)), key=lambda number: max(first - number, number - end, 0))
    return [names[end], *(names[number] for number in around if number != end)]


def _bytes(call: Call, seen: set[str]) -> int:
    """Return the bytes of the values of a call that no call before it has."""
    total = 0
    for slot in call.slots:
        if slot.digest is None or slot.digest not in seen:
            total += slot.count * DTYPES[slot.dtype].itemsize if slot.dtype in DTYPES else 0
        if slot.digest is not None:
            seen.add(slot.digest)
    return total
