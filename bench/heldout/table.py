"""The figures: counts by kind of fault and by setting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from rich.table import Table

from bench.heldout.answer import OUTCOMES
from bench.tables import table

Case = dict[str, Any]
HEALTHY = ("quiet", "alarm", "cannot say", "crashed", "error")
STATUSES = ("introduced", "structural", "entered", "inherited", "amplified", "nothing")
"""What `compare` says of the call that it names."""


def tables(cases: list[Case]) -> list[Table]:
    """Return the tables of one part."""
    made = []
    for section, title in (("fault", "One program"), ("programs", "Two programs of one model")):
        faults = [case for case in cases if case["section"] == section and "above" in case]
        clear = [case for case in faults if case["above"]]
        made.append(_faults(f"{title}: faults above rounding, by kind", clear, lambda case: case["kind"]))
        made.append(_faults(f"{title}: faults above rounding, by setting", clear, lambda case: case["setting"]))
        hidden = [case for case in faults if not case["above"]]
        made.append(
            _faults(f"{title}: faults within rounding, which need not be found", hidden, lambda case: case["setting"])
        )
        lines = [
            [name, *map(str, (len(each), *_count(each, STATUSES, "status")))]
            for name, each in _group(clear, lambda case: "from outside" if case["outside"] else "of a recorded call")
        ]
        made.append(table(f"{title}: whose fault it is, and what the call that is named is said to have done",
                          ["", "cases", *STATUSES], lines))  # fmt: skip
    for section, title in (("healthy", "Healthy pairs of one program"), ("programs", "Healthy pairs of two programs")):
        healthy = [case for case in cases if case["section"] == section and case["kind"] == "healthy"]
        lines = [
            [name, *map(str, (len(each), *_count(each, HEALTHY), _structural(each)))]
            for name, each in _group(healthy, lambda case: case["setting"])
        ]
        made.append(table(title, ["setting", "pairs", *HEALTHY, "alarms of structure"], lines))
    return [each for each in made if each.row_count]


def failing(cases: list[Case]) -> list[Case]:
    """Return the cases that are not as they should be."""
    good = ("exact", "region", "quiet")
    hidden = ("missed", "unlocated", "cannot say")
    return [case for case in cases if case["outcome"] not in (good if case.get("above", True) else good + hidden)]


def _faults(title: str, cases: list[Case], key: Callable[[Case], str]) -> Table:
    groups = _group(cases, key)
    groups += [("all", cases)] if len(groups) > 1 else []
    lines = [[name, *map(str, (len(each), *_count(each, OUTCOMES)))] for name, each in groups]
    return table(title, ["", "cases", *OUTCOMES], lines)


def _group(cases: list[Case], key: Callable[[Case], str]) -> list[tuple[str, list[Case]]]:
    names = sorted({key(case) for case in cases})
    return [(name, [case for case in cases if key(case) == name]) for name in names]


def _count(cases: list[Case], values: tuple[str, ...], key: str = "outcome") -> list[int]:
    counts = Counter(case.get(key) for case in cases)
    return [counts[value] for value in values]


def _structural(cases: list[Case]) -> int:
    return sum(case["outcome"] == "alarm" and case["status"] == "structural" for case in cases)
